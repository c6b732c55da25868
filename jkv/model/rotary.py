"""The rotary embedding (RoPE, arXiv 2104.09864) of positions: frequencies with their scaling, angles, and rotations."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.model.params import ModelConfig
from jkv.model.rope_scaling import RopeScaling


def rotation(config: ModelConfig, position: Int[Array, "*B"]) -> tuple[Float[Array, "*B half"], Float[Array, "*B half"]]:
    """The cosines and sines that rotate queries and keys to their positions, times the attention factor.

    They are those of the layers with RoPE; `ModelConfig.layers_without_rope` lists the others.
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
    if scaling.kind == "proportional":  # the pairs are those of the whole head, and most of them stay as they are
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
