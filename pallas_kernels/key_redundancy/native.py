"""C++ for a CPU, called by XLA: each key looks for its latest similar one from the newest keys on, and ends once it has it.

How the library comes about says `pallas_kernels.native_target`.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pallas_kernels import native_target

SOURCE = Path(__file__).with_name("native.cc")
TARGET = native_target.target_of(SOURCE)
why_no_library = functools.partial(native_target.why_no_library, SOURCE)


def why_not(key: Any, is_filled: Any, threshold: float = 0.5, exempt: int = 1, exempt_first: bool = False) -> str | None:
    """Why the library cannot be had, whatever the arguments; None when it can."""
    return why_no_library()


def key_redundancy(
    key_RSH: Float[Array, "R S H"], is_filled: Bool[Array, "R S"], threshold: float, exempt: int, exempt_first: bool
) -> Float[Array, "R S"]:
    """See `pallas_kernels.key_redundancy`."""
    result = jax.ShapeDtypeStruct(is_filled.shape, jnp.float32)
    call = jax.ffi.ffi_call(TARGET, result, vmap_method="sequential")
    knobs = {"threshold": np.float32(threshold), "exempt": np.int64(exempt), "exempt_first": exempt_first}
    return call(key_RSH.astype(jnp.float32), is_filled, **knobs)
