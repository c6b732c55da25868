"""The sizes and weights of layers with a recurrent state; `jkv.model.delta_net` computes with them."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from jkv.pytrees import PyTree


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """The sizes of the layers with a recurrent state, Gated DeltaNet (`jkv.model.delta_net`)."""

    num_key_heads: int  # each of them serves as many value heads, which follow each other
    num_value_heads: int
    key_size: int  # channels of a key head, and of its queries
    value_size: int
    taps: int  # inputs that a channel of the convolution reads, its own included

    @property
    def num_channels(self) -> int:
        """Channels of the convolution (C): queries, keys and values."""
        return sum(self.widths)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of queries, of keys and of values."""
        keys = self.num_key_heads * self.key_size
        return keys, keys, self.num_value_heads * self.value_size


class DeltaParams(PyTree):
    """The weights of a layer's Gated DeltaNet, where K are its key heads and N its value heads."""

    query: Annotated[Any, "D K*H"]
    key: Annotated[Any, "D K*H"]
    value: Annotated[Any, "D N*H"]
    query_taps: Annotated[Any, "K*H 1 W"]  # of the convolution, the newest input last
    key_taps: Annotated[Any, "K*H 1 W"]
    value_taps: Annotated[Any, "N*H 1 W"]
    rate: Annotated[Any, "D N"]  # how strongly a token replaces what its key reads
    decay: Annotated[Any, "D N"]
    decay_bias: Annotated[Any, "N"]
    log_decay: Annotated[Any, "N"]
    gate: Annotated[Any, "D N*H"]  # of the output
    norm: Annotated[Any, "H"]  # of the output, without `ModelConfig.norm_offset`
    out: Annotated[Any, "N*H D"]
    query_key_value: Annotated[Any, "D joined"] = None  # in place of the three (`jkv.join_weights`)


def delta_shapes(width: int, sizes: DeltaNet, leaf: Callable[..., Any]) -> DeltaParams:
    """The shapes of a layer's Gated DeltaNet."""
    keys, _, values = sizes.widths
    return DeltaParams(
        query=leaf(width, keys),
        key=leaf(width, keys),
        value=leaf(width, values),
        query_taps=leaf(keys, 1, sizes.taps),
        key_taps=leaf(keys, 1, sizes.taps),
        value_taps=leaf(values, 1, sizes.taps),
        rate=leaf(width, sizes.num_value_heads),
        decay=leaf(width, sizes.num_value_heads),
        decay_bias=leaf(sizes.num_value_heads),
        log_decay=leaf(sizes.num_value_heads),
        gate=leaf(width, values),
        norm=leaf(sizes.value_size),
        out=leaf(values, width),
    )
