"""Plain XLA."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.blocks import Blocks, decoded


def block_product(x: Float[Array, "*B D"], *matrices: Blocks, dtype: Any = None) -> tuple[Float[Array, "*B _F"], ...]:
    """See `pallas_kernels.block_product`."""
    wide, dtype = x.astype(jnp.float32), dtype or x.dtype
    return tuple(jnp.einsum("...d,fd->...f", wide, decoded(one.data, one.kind)).astype(dtype) for one in matrices)
