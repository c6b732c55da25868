"""Plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def add_norm(
    hidden: Float[Array, "*B D"], added: Float[Array, "*B D"], weight: Float[Array, " D"], epsilon: float
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """See `pallas_kernels.add_norm`."""
    total = hidden + added
    return total, rms_norm(total, weight, epsilon)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], epsilon: float) -> Float[Array, "*B D"]:
    """Root-mean-square normalisation, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return weight * (wide * scale).astype(x.dtype)
