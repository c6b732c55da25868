"""Plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.row_sum import row_sum


def add_norm(
    hidden: Float[Array, "*B D"], added: Float[Array, "*B D"], weight: Float[Array, " D"], epsilon: float
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """See `pallas_kernels.add_norm`."""
    total = hidden + added
    return total, rms_norm(total, weight, epsilon)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], epsilon: float) -> Float[Array, "*B D"]:
    """Root-mean-square normalisation, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(row_sum(wide, of_squares=True) / x.shape[-1] + epsilon)
    return weight * (wide * scale).astype(x.dtype)
