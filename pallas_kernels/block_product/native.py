"""C++ for a CPU, called by XLA: blocks become floats in registers, or for more rows in tiles, and are read once for all rows.

How the library comes about says `pallas_kernels.native_target`.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import native_target
from pallas_kernels.block_product import reference
from pallas_kernels.blocks import BLOCKS, Blocks

SOURCE = Path(__file__).with_name("native.cc")
TARGET = native_target.target_of(SOURCE)
why_no_library = functools.partial(native_target.why_no_library, SOURCE)


def why_not(x: Any, *matrices: Blocks, dtype: Any = None) -> str | None:
    """Why the library cannot take these arguments; None when it can."""
    if reason := native_target.why_left_to_xla():
        return reason
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x must be float32 or bfloat16; got {x.dtype}"
    return why_no_library()


def block_product(x: Float[Array, "*B D"], *matrices: Blocks, dtype: Any = None) -> tuple[Float[Array, "*B _F"], ...]:
    """See `pallas_kernels.block_product`."""
    sums = products(x.reshape(-1, x.shape[-1]).astype(jnp.float32), matrices)
    return tuple(one.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype) for one in sums)


@jax.custom_jvp
def products(x: Float[Array, "R D"], matrices: tuple[Blocks, ...]) -> tuple[Float[Array, "R _F"], ...]:
    """The products in float32. They change with x as XLA's products do."""
    results = tuple(jax.ShapeDtypeStruct((x.shape[0], one.data.shape[0]), jnp.float32) for one in matrices)
    kinds = np.array([BLOCKS[one.kind].kind for one in matrices], np.int64)
    call = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")
    return tuple(call(x, *(one.data for one in matrices), kinds=kinds))


@products.defjvp
def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The products, and how they change with x."""
    return products(*primals), reference.block_product(tangents[0], *primals[1])
