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
    unit = wide * jax.lax.rsqrt(mean_square(x) + config.norm_epsilon)
    factor = 1.0 if weight is None else (config.norm_offset or 0.0) + weight.astype(jnp.float32)
    return (unit * factor).astype(x.dtype)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], epsilon: float) -> Float[Array, "*B D"]:
    """Llama's norm, in float32."""
    return divided(x, weight, mean_square(x), epsilon)


def mean_square(x: Float[Array, "*B D"]) -> Float[Array, "*B 1"]:
    """Of the last axis, in float32, by a kernel that gives a row the same bits in any batch."""
    return kernels.row_sum(x.astype(jnp.float32), of_squares=True) / x.shape[-1]


def divided(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], square: Float[Array, "*B 1"], epsilon: float
) -> Float[Array, "*B D"]:
    """`x` over the root of its mean square, rounded to its dtype, times the weight."""
    return weight * (x.astype(jnp.float32) * jax.lax.rsqrt(square + epsilon)).astype(x.dtype)


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
    return divided(flat, weight, jax.lax.pmean(mean_square(flat), axis), epsilon)
