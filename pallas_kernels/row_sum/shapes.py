"""The arguments of real calls: the norm of a decode step's tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (Case("decode step"),)


def arguments(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """The shape of the hidden state, in float32; the width is taken to be that of all query heads."""
    return (of(jnp.float32, workload.batch, model.num_query_heads * model.head_size),)


def values(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Normal numbers."""
    (x,) = arguments(model, workload)
    return (jax.random.normal(jax.random.key(0), x.shape),)


def num_bytes(model: ModelShape, workload: Workload) -> int:
    """Bytes of the rows, read once."""
    return int(4 * arguments(model, workload)[0].size)
