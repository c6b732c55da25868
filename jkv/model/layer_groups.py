"""Layers in groups: with full attention, whose keys and values are in the pool, with a sliding window, or with a state."""

import inspect
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jkv.errors import refused
from jkv.model.delta_net import DeltaInputs
from jkv.model.params import ModelConfig


class LayerGroups(NamedTuple):
    """One `jkv.model.decoder.Attend` for each group with attention, called with the layer's index in its group; None for none.

    `recurrent` is called with the index, the inputs of the recurrence and the cache, and returns what each head reads, and the
    cache.
    """

    paged: Any
    windowed: Any
    window_layers: tuple[int, ...]
    recurrent: Any = None
    state_layers: tuple[int, ...] = ()

    def __call__(
        self,
        layer: int,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        cache: Any,
        sink: Float[Array, " N"] | None = None,
        is_stored: bool = False,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """`jkv.model.decoder.Attend`."""
        options = ({} if sink is None else {"sink": sink}) | ({"is_stored": True} if is_stored else {})
        if layer in self.window_layers:
            return self.windowed(self.window_layers.index(layer), query, key, value, cache, **options)
        num_before = sum(other < layer for other in (*self.window_layers, *self.state_layers))
        return self.paged(layer - num_before, query, key, value, cache, **options)

    def recur(self, layer: int, inputs: DeltaInputs, cache: Any) -> tuple[Float[Array, "B T N H"], Any]:
        """What the heads of a layer with a state read, and the cache."""
        return self.recurrent(self.state_layers.index(layer), inputs, cache)


def check_attend(config: ModelConfig, attend: Any) -> None:
    """Refuses a computation that does not know the model's windows, recurrent states, learned sinks, or layers that share.

    Raises:
      ValueError: the model has them, and the attention is that of full layers, of layers without sinks, or of layers with keys
        and values of their own.
    """
    groups = attend if isinstance(attend, LayerGroups) else LayerGroups(attend, None, ())
    if config.window_layers and groups.windowed is None:
        raise refused(
            f"This computation needs a model with full attention in every layer; layers {list(config.window_layers)} have a "
            f"sliding window of {config.window} tokens. Use another model.",
            model="unsupported",
        )
    if config.state_layers and groups.recurrent is None:
        raise refused(
            f"This computation needs a model with full attention in every layer; layers {list(config.state_layers)} have a "
            "recurrent state. Use another model.",
            model="unsupported",
        )
    parts = [part for part in (groups.paged, groups.windowed) if part is not None]
    if config.num_sharing_layers and not all("is_stored" in inspect.signature(part).parameters for part in parts):
        raise refused(
            f"This computation needs a model whose layers have keys and values of their own; the last "
            f"{config.num_sharing_layers} of this one reuse an earlier layer's. Use another model.",
            model="unsupported",
        )
    if config.has_sinks and not all("sink" in inspect.signature(part).parameters for part in parts):
        raise refused(
            "This computation needs a model without learned sinks in its attention; this one has a sink for each query head. "
            "Use another model.",
            model="unsupported",
        )
