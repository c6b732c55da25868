"""The rotary embedding (RoPE) of a model as data, for scores that rotate queries to other positions."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.model.params import ModelConfig
from jkv.model.rotary import rotary_frequency, turned
from pallas_kernels.rotate_append.reference import rotate


class Rope(NamedTuple):
    """RoPE of each layer, or of each batch row of a view.

    At position p, the channels (f, f + half) of a query or key are rotated by `p * frequency[f]` and multiplied by `factor`.
    Channels from 2 * half on are left alone.

    Attributes:
      frequency: radians per position, with RoPE scaling; 0 in layers without RoPE.
      factor: the attention factor of YaRN and LongRoPE; 1 in other models, and in layers without RoPE.
    """

    frequency: Float[Array, "L half"]
    factor: Float[Array, " L"]


@functools.lru_cache
def rope_of(config: ModelConfig) -> Rope:
    """The RoPE of each layer with full attention, on the host."""
    frequency = np.tile(np.asarray(rotary_frequency(config)), (config.num_paged_layers, 1))
    factor = np.full(config.num_paged_layers, config.rope_scaling.attention_factor, np.float32)
    without = list(config.unrotated)
    frequency[without], factor[without] = 0, 1
    of_layers: Any = frequency, factor
    return Rope(*of_layers)


def turn(rope: Rope, position: Int[Array, "B n"]) -> tuple[Float[Array, "B n half"], Float[Array, "B n half"]]:
    """The cosines and sines, times the factor, that rotate a query or key to its position (`rotate`)."""
    angle = position[..., None].astype(jnp.float32) * rope.frequency[:, None]
    return turned(angle, rope.factor[:, None, None])


def mean_turn(rope: Rope, position: Int[Array, "B n"]) -> tuple[Float[Array, "B 1 half"], Float[Array, "B 1 half"]]:
    """The means of `turn` over positions: what rotates a vector to all of them on average."""
    cos, sin = turn(rope, position)
    return cos.mean(axis=1, keepdims=True), sin.mean(axis=1, keepdims=True)


def unrotate(rope: Rope, x: Float[Array, "B n heads H"], position: Int[Array, "B n"]) -> Float[Array, "B n heads H"]:
    """Queries or keys as they were before RoPE, in float32."""
    cos, sin = (part / rope.factor[:, None, None] ** 2 for part in turn(rope, position))
    return rotate(x.astype(jnp.float32), cos, -sin)


def pair_norms(x: Float[Array, "*B H"], half: int) -> Float[Array, "*B half"]:
    """The length of each rotated pair of channels, which no rotation changes."""
    return jnp.hypot(x[..., :half], x[..., half : 2 * half])
