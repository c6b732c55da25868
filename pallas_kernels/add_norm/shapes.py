"""The arguments of real calls: the tokens of a decode step, and of a chunk of prompts."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = Case("decode step"), Case("prefill", {"batch": 1024})


def arguments(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Shapes of the hidden state, a block's output and the norm's weight; the width is taken to be that of all query heads."""
    width = model.num_query_heads * model.head_size
    hidden = of(workload.dtype, workload.batch, 1, width)
    return hidden, hidden, of(workload.dtype, width)


def values(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Normal numbers."""
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, arguments(model, workload), strict=True))


def num_bytes(model: ModelShape, workload: Workload) -> int:
    """Bytes of both arrays, read once, and of sum and norm, written."""
    return 4 * workload.batch * model.num_query_heads * model.head_size * jnp.dtype(workload.dtype).itemsize
