"""The arguments of real calls: gate and up of a layer, for the tokens of a decode step and of one that verifies guesses."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = Case("decode step"), Case("verification of 4 places", {"batch": 8})
WIDER = 4  # of the inner width of a block


def arguments(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Shapes of the hidden state and of two matrices; the width is taken to be that of all query heads."""
    width = model.num_query_heads * model.head_size
    matrix = of(workload.dtype, width, WIDER * width)
    return of(workload.dtype, workload.batch, width), matrix, matrix


def values(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Normal numbers."""
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, arguments(model, workload), strict=True))


def num_bytes(model: ModelShape, workload: Workload) -> int:
    """Bytes of the matrices, read once, and of the rows."""
    x, matrix, _ = arguments(model, workload)
    rows = x.size + 2 * workload.batch * matrix.shape[1]
    return int((2 * matrix.size + rows) * jnp.dtype(workload.dtype).itemsize)
