"""The arguments of real calls: a compaction, and one of long rows."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (
    Case("compaction"),
    Case("compaction, similar keys", options={"similar": True}),
    Case("long rows", {"batch": 1, "slots": 8192}),
)


def arguments(model: ModelShape, workload: Workload, *, similar: bool = False) -> tuple[Any, ...]:
    """Shapes of the keys and masks of every row."""
    rows, slots = workload.num_rows(model), workload.slots
    return of(workload.dtype, rows, slots, model.head_size), of(jnp.bool_, rows, slots)


def values(model: ModelShape, workload: Workload, *, similar: bool = False) -> tuple[Any, ...]:
    """Normal keys in full rows, a third of them (or all that are `similar`) close to the first one.

    No cosine is near the threshold. Of a language model's keys, three quarters of all pairs are above it.
    """
    key, is_filled = arguments(model, workload)
    drawn = jax.random.normal(jax.random.key(0), key.shape, jnp.float32)
    is_alike = jnp.arange(key.shape[1], dtype=jnp.int32)[:, None] % 3 == 1
    is_alike |= similar
    alike = drawn[:, :1] + 0.1 * drawn
    return jnp.where(is_alike, alike, drawn).astype(key.dtype), jnp.ones(is_filled.shape, bool)


def num_bytes(model: ModelShape, workload: Workload, *, similar: bool = False) -> int:
    """Bytes of the keys, read once, and of the scores, written; the time goes into arithmetic."""
    key, is_filled = arguments(model, workload)
    return key.size * key.dtype.itemsize + 4 * is_filled.size
