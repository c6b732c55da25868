"""Layers with a sliding window or a recurrent state in a parallel forward pass: scoring, replay, calibration.

The window of a token is what an eviction is in a trace: the end of its column. A state depends on all tokens before it,
whatever policies do. So these layers need no trace.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from jkv.model import delta_net
from jkv.model.delta_net import DeltaInputs
from jkv.model.delta_weights import DeltaNet
from jkv.model.layer_groups import LayerGroups
from jkv.model.params import ModelConfig


class WindowReplay(NamedTuple):
    """Every token reads the last `window` tokens, its own included (`jkv.model.decoder.Attend`); nothing is cached."""

    place: Int[Array, "n T"]  # of each token in its row
    window: int
    first: Int[Array, "n T"] | None = None  # the place of the first token of each token's sequence; None: one in each row

    def __call__(
        self,
        layer: int,
        query: Float[Array, "n T N H"],
        key: Float[Array, "n T K H"],
        value: Float[Array, "n T K H"],
        cache: Any,
        sink: Float[Array, " N"] | None = None,
        is_stored: bool = False,
    ) -> tuple[Float[Array, "n T N H"], Any]:
        """Attention in any of these layers."""
        end = self.place + self.window
        if self.first is not None:
            end = jnp.minimum(end, next_sequence(self.first))
        (num_samples, total), num_kv_heads = self.place.shape, key.shape[2]
        begin, end = (jnp.broadcast_to(x[:, None], (num_samples, num_kv_heads, total)) for x in (self.place, end))
        return kernels.replay_attention(query, key, value, self.place, begin, end, sink=sink), cache


def next_sequence(first: Int[Array, "n T"]) -> Int[Array, "n T"]:
    """The place after the last token of each token's sequence.

    >>> next_sequence(jnp.array([[0, 0, 2, 3, 3]], jnp.int32)).tolist()
    [[2, 2, 3, 5, 5]]
    """
    total = first.shape[1]
    place = jnp.arange(total, dtype=jnp.int32)
    begins = jnp.where(first == place, place, total)
    after = jnp.concatenate([begins[:, 1:], jnp.full_like(begins[:, :1], total)], axis=1)
    return jax.lax.cummin(after, axis=1, reverse=True)


class StateReplay(NamedTuple):
    """The recurrence along a sequence, from its first token (`jkv.model.layer_groups.LayerGroups`); nothing is cached."""

    sizes: DeltaNet

    def __call__(self, layer: int, inputs: DeltaInputs, cache: Any) -> tuple[Float[Array, "n T N H"], Any]:
        """What the heads read, in any of these layers."""
        num_samples, total = inputs.mixed.shape[:2]
        start = delta_net.zero_state(self.sizes, num_samples, inputs.mixed.dtype)
        return delta_net.chunks(self.sizes, inputs, start, jnp.full(num_samples, total, jnp.int32))[0], cache


def with_other_groups(config: ModelConfig, paged: Any, place: Int[Array, "n T"], first: Int[Array, "n T"] | None = None) -> Any:
    """An attention of the layers with full attention, and what the others read if the model has such."""
    if not config.unpaged_layers:
        return paged
    windowed = WindowReplay(place, config.window, first) if config.window_layers else None
    recurrent = None if config.delta_net is None else StateReplay(config.delta_net)
    return LayerGroups(paged, windowed, config.window_layers, recurrent, config.state_layers)
