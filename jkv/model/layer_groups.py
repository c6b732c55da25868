"""Layers in groups: those with full attention, whose keys and values are in the pool, and those with a sliding window."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jkv.model.params import ModelConfig


class LayerGroups(NamedTuple):
    """One `jkv.model.decoder.Attend` for each group, called with the layer's index in its group."""

    paged: Any
    windowed: Any
    window_layers: tuple[int, ...]

    def __call__(
        self,
        layer: int,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        cache: Any,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """`jkv.model.decoder.Attend`."""
        num_before = sum(other < layer for other in self.window_layers)
        if layer in self.window_layers:
            return self.windowed(num_before, query, key, value, cache)
        return self.paged(layer - num_before, query, key, value, cache)


def check_attend(config: ModelConfig, attend: Any) -> None:
    """Refuses a computation that does not know the model's sliding windows.

    Raises:
      ValueError: the model has them, and the attention is that of full layers.
    """
    if config.window_layers and not isinstance(attend, LayerGroups):
        raise ValueError(
            f"This computation needs a model with full attention in every layer; layers {list(config.window_layers)} have a "
            f"sliding window of {config.window} tokens. Use another model."
        )
