"""The rotary embedding (RoPE, arXiv 2104.09864) of positions: frequencies with their scaling, angles, and rotations; and as
data (`Rope`), for scores that rotate queries to other positions.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.model.params import ModelConfig, RopeScaling
from pallas_kernels.rotate_append.reference import rotate


def rotation(config: ModelConfig, position: Int[Array, "*B"]) -> tuple[Float[Array, "*B half"], Float[Array, "*B half"]]:
    """The cosines and sines that rotate queries and keys to their positions, times the attention factor.

    They are for layers with RoPE; `ModelConfig.layers_without_rope` lists the other layers.
    """
    return turned(rotary_angle(config, position), config.rope_scaling.attention_factor)


def turn_in(
    layer: int, cos: Float[Array, "*B half"], sin: Float[Array, "*B half"], unrotated: tuple[int, ...]
) -> tuple[Float[Array, "*B half"], Float[Array, "*B half"]]:
    """The rotation in a layer: none in those without RoPE."""
    return (jnp.ones_like(cos), jnp.zeros_like(sin)) if layer in unrotated else (cos, sin)


def turned(angle: Float[Array, "*B half"], factor: Any) -> tuple[Float[Array, "*B half"], Float[Array, "*B half"]]:
    """The cosines and sines of angles, times the attention factor."""
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotary_angle(config: ModelConfig, position: Int[Array, "*B"]) -> Float[Array, "*B half"]:
    """Rotation angles in radians, float32 because bf16 rounds position 257 to 256."""
    return position[..., None].astype(jnp.float32) * rotary_frequency(config)


def rotary_frequency(config: ModelConfig) -> Float[Array, " half"]:
    """Radians per position of each rotated pair of channels, with RoPE scaling."""
    size, scaling = config.rotary_size or config.head_size, config.rope_scaling
    frequency = config.rope_theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if scaling.kind == "default":
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "proportional":  # the pairs of the whole head count, and most are not rotated
        turns = jnp.arange(size // 2, dtype=jnp.int32) < int(scaling.share * size // 2)
        return jnp.where(turns, frequency / scaling.factor, 0.0)
    if scaling.kind == "longrope":
        return frequency / jnp.asarray(longrope_divisors(config), jnp.float32)
    is_llama = scaling.kind == "llama3"
    kept = kept_of_llama3(frequency, scaling) if is_llama else jnp.asarray(kept_of_yarn(size, config.rope_theta, scaling))
    return kept * frequency + (1.0 - kept) * frequency / scaling.factor


def longrope_divisors(config: ModelConfig) -> tuple[float, ...]:
    """What LongRoPE (arXiv 2402.13753) divides each frequency by: the long factors if the model has more positions than before.

    transformers chooses them by the length of the batch, and changes them when a text outgrows the original context; keys that
    are cached by then stay as the short factors rotated them. Here a model has the same factors at every length, as in vLLM.
    """
    scaling = config.rope_scaling
    return scaling.long_factor if config.max_positions > scaling.original_max_position else scaling.short_factor


def kept_of_llama3(frequency: Float[Array, " half"], scaling: RopeScaling) -> Float[Array, " half"]:
    """How far Llama 3.1 keeps each frequency: high ones are kept, low ones divided by the factor, with a ramp between."""
    turns = scaling.original_max_position * frequency / (2 * math.pi)  # over the original context
    return jnp.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)


def kept_of_yarn(size: int, theta: float, scaling: RopeScaling) -> Float[np.ndarray, " half"]:
    """How far YaRN (arXiv 2309.00071, section 3.2) keeps each frequency of `size` rotated channels.

    Pairs that turn more than `beta_fast` times over the original context are kept, those that turn less than `beta_slow` times
    are divided by the factor. As in transformers, the ramp between them is linear in the index of the pair, where the paper's
    is linear in the number of turns, and its ends are whole pairs if the checkpoint says so.
    """

    def pair_of(turns: float) -> float:
        return size * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 0.001))
    return 1.0 - np.clip(ramp, 0.0, 1.0)


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
