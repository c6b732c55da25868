"""C++ for a CPU, called by XLA: a row is computed in the same way, however many there are.

How the library comes about says `pallas_kernels.native_target`.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import native_target

SOURCE = Path(__file__).with_name("native.cc")
MOST_ROWS = 32  # of decode steps; XLA fuses the rows of a trained or scored text with what follows
TARGET = native_target.target_of(SOURCE)
why_no_library = functools.partial(native_target.why_no_library, SOURCE)


def why_not(below: Any) -> str | None:
    """Why the library cannot take these arguments; None when it can."""
    return native_target.why_not_rows(SOURCE, below, MOST_ROWS)


@jax.custom_jvp
def log_softmax(below: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """See `pallas_kernels.log_softmax`."""
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(below.shape, jnp.float32), vmap_method="broadcast_all")(below)


@log_softmax.defjvp
def derivative(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    """The log-probabilities, and how they change with the logits."""
    out, change = log_softmax(*primals), tangents[0]
    return out, change - (jnp.exp(out) * change).sum(axis=-1, keepdims=True)
