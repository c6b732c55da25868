"""Root-mean-square norms (arXiv 1910.07467) as the families have them; `jkv.model.decoder` calls them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels as kernels
from jkv.model.params import MeshAxis, ModelConfig
from pallas_kernels.dispatch import possible_platforms


def norm(config: ModelConfig, x: Float[Array, "*B H"], weight: Float[Array, " H"] | None) -> Float[Array, "*B H"]:
    """The norm of a model over the last axis; without a weight, that weight is 1.

    Llama rounds to the dtype of `x` before it multiplies by the weight. With `ModelConfig.norm_offset`, as in Gemma, the offset
    is added to the weight and the product is rounded once.
    """
    if config.norm_offset is None and weight is not None:
        return rms_norm(x, weight, config.norm_epsilon)
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(kernels.row_sum(wide, of_squares=True) / x.shape[-1] + config.norm_epsilon)
    factor = 1.0 if weight is None else (config.norm_offset or 0.0) + weight.astype(jnp.float32)
    return (unit * factor).astype(x.dtype)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], epsilon: float) -> Float[Array, "*B D"]:
    """Llama's norm, in float32; the sum of a row has the same bits in any batch where the kernel's has."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(kernels.row_sum(wide, of_squares=True) / x.shape[-1] + epsilon)
    return weight * (wide * scale).astype(x.dtype)


def add_norm(
    config: ModelConfig, hidden: Float[Array, "*B D"], added: Float[Array, "*B D"], weight: Float[Array, " D"]
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """A residual and its norm. The kernel has the norm of Llama; XLA fuses the other one, and on a CPU both."""
    if config.norm_offset is None and possible_platforms() != ("cpu",):
        return kernels.add_norm(hidden, added, weight, epsilon=config.norm_epsilon)
    return hidden + added, norm(config, hidden + added, weight)


def norm_of_all_heads(
    flat: Float[Array, "*B heads"], weight: Float[Array, " heads"], epsilon: float, axis: MeshAxis
) -> Float[Array, "*B heads"]:
    """The RMS norm over all heads together. Each shard of a mesh has as many of them, and they exchange the mean square."""
    if axis is None:
        return rms_norm(flat, weight, epsilon)
    wide = flat.astype(jnp.float32)
    mean_square = jax.lax.pmean(kernels.row_sum(wide, of_squares=True) / flat.shape[-1], axis)
    return weight * (wide * jax.lax.rsqrt(mean_square + epsilon)).astype(flat.dtype)
