"""C++ for a CPU, called by XLA: a row is added up in one order, however many there are.

How the library comes about says `pallas_kernels.native_target`.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import native_target
from pallas_kernels.row_sum import reference

SOURCE = Path(__file__).with_name("native.cc")
MOST_ROWS = 2048  # of a decode step, with those of each head; longer pieces of prompts are fused by XLA
TARGET = native_target.target_of(SOURCE)
why_no_library = functools.partial(native_target.why_no_library, SOURCE)


def why_not(x: Any, of_squares: bool = False) -> str | None:
    """Why the library cannot take these arguments; None when it can."""
    return native_target.why_not_rows(SOURCE, x, MOST_ROWS)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def row_sum(x: Float[Array, "*B D"], of_squares: bool = False) -> Float[Array, "*B 1"]:
    """See `pallas_kernels.row_sum`."""
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32), vmap_method="broadcast_all")
    return call(x, of_squares=of_squares)[..., None]


@row_sum.defjvp
def derivative(of_squares: bool, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    """The sums, and how they change with x."""
    change = 2 * primals[0] * tangents[0] if of_squares else tangents[0]
    return row_sum(*primals, of_squares), reference.row_sum(change)
