"""The arguments of real calls: a decode step of a model."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (
    Case("decode step"),
    Case("decode step, log-weights", options={"weighted": True}),
    Case("decode step, int8", workload={"kv_format": "int8"}),
    Case("decode step, int4", workload={"kv_format": "int4"}),
    Case("step of 4 tokens", options={"places": 4}),
    Case("step of 4 tokens, int8", workload={"kv_format": "int8"}, options={"places": 4}),
)


def arguments(model: ModelShape, workload: Workload, *, weighted: bool = False, places: int = 1) -> tuple[Any, ...]:
    """Shapes of the query, pool, page table, lengths (of each place) and, if `weighted`, log-weights of every row."""
    rows, max_pages = workload.num_rows(model), workload.max_pages()
    log_weight: jax.ShapeDtypeStruct | None = None
    if weighted:
        log_weight = of(jnp.float32, rows, max_pages * workload.page_size)
    query = of(workload.dtype, rows, places * model.group, model.head_size)
    length = of(jnp.int32, rows, *(() if places == 1 else (places,)))
    return query, workload.pool(model), of(jnp.int32, rows, max_pages), length, log_weight


def values(model: ModelShape, workload: Workload, *, weighted: bool = False, places: int = 1) -> tuple[Any, ...]:
    """Normal queries and pool; all rows are full, with pages in random order, and log-weights are of multiplicities 1 to 4."""
    query, kv, page_table, length, log_weight = arguments(model, workload, weighted=weighted, places=places)
    keys = jax.random.split(jax.random.key(0), 4)
    filled = workload.slots - jnp.arange(places - 1, -1, -1)  # at each place
    pages = 1 + jax.random.permutation(keys[2], kv.shape[0] - 1)[: page_table.size]
    return (
        jax.random.normal(keys[0], query.shape, query.dtype),
        workload.random_pool(model, keys[1]),
        pages.reshape(page_table.shape).astype(jnp.int32),
        jnp.broadcast_to(filled if places > 1 else workload.slots, length.shape).astype(jnp.int32),
        None if log_weight is None else jnp.log(jax.random.randint(keys[3], log_weight.shape, 1, 5).astype(jnp.float32)),
    )


def num_bytes(model: ModelShape, workload: Workload, *, weighted: bool = False, places: int = 1) -> int:
    """Bytes of keys and values, read once, of queries, read, and of outputs, written; tables do not count."""
    slots = 2 * workload.num_rows(model) * workload.slots * workload.vector_bytes(model)
    weights = 4 * workload.num_rows(model) * workload.slots if weighted else 0
    rest = 2 * workload.num_rows(model) * places * model.group * model.head_size
    return slots + rest * jnp.dtype(workload.dtype).itemsize + weights
