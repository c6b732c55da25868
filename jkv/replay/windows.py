"""Attention of layers with a sliding window in a parallel forward pass: scoring, replay, calibration.

The window of a token is what an eviction is in a trace: the end of its column. So these layers need no trace.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from jkv.model.layer_groups import LayerGroups
from jkv.model.params import ModelConfig


class WindowReplay(NamedTuple):
    """Every token reads the last `window` tokens, its own included (`jkv.model.decoder.Attend`); nothing is cached."""

    position: Int[Array, "n T"]
    window: int

    def __call__(
        self,
        layer: int,
        query: Float[Array, "n T N H"],
        key: Float[Array, "n T K H"],
        value: Float[Array, "n T K H"],
        cache: Any,
    ) -> tuple[Float[Array, "n T N H"], Any]:
        """Attention in any of these layers."""
        (num_samples, total), num_kv_heads = self.position.shape, key.shape[2]
        begin = jnp.broadcast_to(self.position[:, None], (num_samples, num_kv_heads, total))
        return kernels.replay_attention(query, key, value, self.position, begin, begin + self.window), cache


def with_windows(config: ModelConfig, paged: Any, position: Int[Array, "n T"]) -> Any:
    """An attention of the layers with full attention, and what the others read if the model has such."""
    if not config.window_layers:
        return paged
    return LayerGroups(paged, WindowReplay(position, config.window), config.window_layers)
