"""The arguments of real calls: a compaction of one row of a batch, in all layers, and one of long rows."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = Case("compaction", {"batch": 1}), Case("long rows", {"batch": 1, "slots": 8192})


def arguments(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Shapes of the scores and of the numbers of slots to keep."""
    rows = model.num_layers * workload.num_rows(model)
    return of(jnp.float32, rows, workload.slots), of(jnp.int32, rows)


def values(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Normal scores, some of them equal; each row keeps eight of nine slots, as R-KV does."""
    score, count = arguments(model, workload)
    drawn = jax.random.normal(jax.random.key(0), score.shape, score.dtype)
    return jnp.round(64 * drawn) / 64, jnp.full(count.shape, workload.slots * 8 // 9, count.dtype)


def num_bytes(model: ModelShape, workload: Workload) -> int:
    """Bytes of the scores, read once, and of the list of slots, written."""
    score, _ = arguments(model, workload)
    return 8 * score.size
