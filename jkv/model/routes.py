"""Which experts each token goes through, as data: recorded while a model runs, and given back to it when a text is scored.

A router whose logits are nearly equal may choose other experts where rounding differs, as between decoding and one pass over
the whole text, or between an engine and a trainer. With the engine's choice given, the trainer computes the distribution that
tokens were drawn from (rollout routing replay, arXiv 2510.11370). The weights of the chosen experts, and their gradients, come
from the trainer's own router.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from jkv.model.params import ModelConfig

Choose = Callable[[int, Array, Any], tuple[Array, Any]]  # see `jkv.model.decoder.forward`


def index_dtype(config: ModelConfig) -> Any:
    """The smallest integers that hold an expert's index."""
    return np.dtype(np.uint8 if config.num_experts <= 256 else np.uint16)


def empty(config: ModelConfig, token: Int[Array, "B T"]) -> UInt[Array, "B T L A"]:
    """Where `recorder` writes the experts of tokens: L counts the layers with experts."""
    return jnp.zeros((*token.shape, len(config.expert_layers), config.num_active_experts), index_dtype(config))


def recorder(config: ModelConfig, is_on: bool = True) -> Choose | None:
    """A `choose` of the decoder that writes the router's choice into `cache.experts`, and keeps it."""

    def choose(layer: int, expert: Int[Array, "B T A"], cache: Any) -> tuple[Int[Array, "B T A"], Any]:
        index = config.expert_layers.index(layer)
        return expert, cache._replace(experts=cache.experts.at[:, :, index].set(expert.astype(cache.experts.dtype)))

    return choose if is_on else None


def given(config: ModelConfig, experts: UInt[Array, "n T L A"] | None) -> Choose | None:
    """A `choose` of the decoder that takes these experts in place of the router's choice; None leaves the choice to it."""
    if experts is None:
        return None

    def choose(layer: int, expert: Int[Array, "n T A"], cache: Any) -> tuple[Int[Array, "n T A"], Any]:
        return experts[:, :, config.expert_layers.index(layer)].astype(expert.dtype), cache

    return choose


def check_experts(experts: Any, config: ModelConfig, totals: list[int]) -> np.ndarray:
    """The experts of sequences of `totals` tokens, checked: [n, T, L, A], T at least that of the longest.

    Raises:
      ValueError: another shape, or what is no index of an expert.
    """
    experts, count = np.asarray(experts), config.num_experts
    if not count:
        raise ValueError("routed_experts are of a model with a mixture of experts; this one has none. Leave them out.")
    num_tokens, of_token = max(totals, default=0), (len(config.expert_layers), config.num_active_experts)
    if experts.ndim != 4 or (len(experts), *experts.shape[2:]) != (len(totals), *of_token) or experts.shape[1] < num_tokens:
        raise ValueError(
            "routed_experts must be those of each token of prompt and completion, layer that has any, and choice, here "
            f"{(len(totals), num_tokens, *of_token)}; got {experts.shape}. Pass `out.routed_experts` of the call that made the "
            "tokens."
        )
    if not np.issubdtype(experts.dtype, np.integer) or (experts.size and not 0 <= experts.min() <= experts.max() < count):
        got = f"{experts.dtype} in [{experts.min()}, {experts.max()}]" if experts.size else experts.dtype
        raise ValueError(f"routed_experts must be integers in [0, {count}); got {got}. Pass `out.routed_experts`.")
    return experts.astype(index_dtype(config))


class RouteRecorder:
    """The experts of each token of one sample, while it is decoded: prompt first, then the completion."""

    def __init__(self, pieces: "list[tuple[Any, int]] | None" = None) -> None:
        self._pieces = list(pieces or [])  # experts [T, L, A], on the host or on the device, and how many of them count

    def add(self, experts: Any, count: int | None = None) -> None:
        """Appends the first `count` tokens' of experts [T, L, A], or those of all; nothing is read from the device."""
        self._pieces.append((experts, len(experts) if count is None else count))

    def copy(self) -> "RouteRecorder":
        """Another recorder with the same tokens."""
        return RouteRecorder(self._pieces)

    def land(self) -> None:
        """Reads what is on the device, once that is there."""
        self._pieces = [(np.asarray(experts), count) for experts, count in self._pieces]

    def finish(self, num_tokens: int, config: ModelConfig) -> np.ndarray:
        """The experts of the first `num_tokens` tokens, [T, L, A]; 0 for those that never went through the model."""
        self.land()
        out = np.zeros((num_tokens, len(config.expert_layers), config.num_active_experts), index_dtype(config))
        known = np.concatenate([out[:0], *(experts[:count] for experts, count in self._pieces)])[:num_tokens]
        out[: len(known)] = known
        return out
