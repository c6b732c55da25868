"""The arguments of real calls: the compaction of one layer of a model."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (
    Case("compaction", is_updated=True),
    Case("compaction, int8", workload={"kv_format": "int8"}, is_updated=True),
    Case("compaction, int4", workload={"kv_format": "int4"}, is_updated=True),
)


def arguments(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Shapes of the pool, the slots that each row keeps, and its pages before and after."""
    rows, max_pages = workload.num_rows(model), workload.max_pages()
    pages = of(jnp.int32, rows, max_pages)
    return workload.pool(model), of(jnp.int32, rows, max_pages * workload.page_size), pages, pages


def values(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """A normal pool; each row keeps eight of nine slots, as R-KV does, in the first ones of its own pages."""
    kv, slots, pages, _ = arguments(model, workload)
    num_kept = num_kept_of(workload)
    keys = jax.random.split(jax.random.key(0), 3)
    shuffled = jax.vmap(lambda key: jax.random.permutation(key, workload.slots)[:num_kept])
    kept = jnp.sort(shuffled(jax.random.split(keys[1], slots.shape[0])), axis=1).astype(jnp.int32)
    kept = jnp.pad(kept, [(0, 0), (0, slots.shape[1] - num_kept)], constant_values=-1)
    source = 1 + jax.random.permutation(keys[2], kv.shape[0] - 1)[: pages.size].reshape(pages.shape).astype(jnp.int32)
    is_used = jnp.arange(pages.shape[1], dtype=jnp.int32) * workload.page_size < num_kept
    return workload.random_pool(model, keys[0]), kept, source, jnp.where(is_used, source, 0)


def num_bytes(model: ModelShape, workload: Workload) -> int:
    """Bytes of the keys and values of the kept slots, read and written once."""
    return 4 * workload.num_rows(model) * num_kept_of(workload) * workload.vector_bytes(model)


def num_kept_of(workload: Workload) -> int:
    """Slots that a row keeps, in whole pages."""
    return workload.slots * 8 // 9 // workload.page_size * workload.page_size
