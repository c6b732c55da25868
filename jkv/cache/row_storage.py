"""What each row keeps outside of the pool: rings of windows, recurrent states, and the floats beside sealed pages.

All are arrays of a fixed shape for all rows. A fork, a swap and a kept conversation copy a row's part of them as a whole; a
decode step or a prompt reads and writes them in the layers that have them.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from jkv.cache import states, windows
from jkv.cache.attention import Cache
from jkv.cache.states import RowStates, StateDecode, StatePrefill
from jkv.cache.windows import WindowDecode, WindowPrefill
from jkv.model.layer_groups import LayerGroups
from jkv.model.params import ModelConfig
from jkv.model.rotary import rotation


class RowContent(NamedTuple):
    """One row's part; None for what the model has not."""

    windows: Float[Array, "L K MP 2 page H"] | None = None
    states: RowStates | None = None
    tail: Float[Array, "L K MP 2 page H"] | None = None


def read_row(cache: Cache, row: Int[Array, ""]) -> RowContent:
    """A copy of one row's part."""
    return RowContent(
        None if cache.windows is None else windows.read_row(cache.windows, cache.rings, row),
        None if cache.states is None else states.read_row(cache.states, row),
        None if cache.tail is None else windows.read_row(cache.tail, cache.tails, row),
    )


def write_rows(cache: Cache, target: Int[Array, " R"], content: RowContent) -> Cache:
    """The cache with one row's content in rows `target`; targets equal to the number of rows, at the end, are ignored."""
    if cache.windows is not None:
        assert content.windows is not None
        cache = cache._replace(windows=windows.write_rows(cache.windows, cache.rings, target, content.windows))
    if cache.states is not None:
        assert content.states is not None
        cache = cache._replace(states=states.write_rows(cache.states, target, content.states))
    if cache.tail is not None:
        assert content.tail is not None
        cache = cache._replace(tail=windows.write_rows(cache.tail, cache.tails, target, content.tail))
    return cache


def decode_groups(
    config: ModelConfig, paged: Any, cache: Cache, position: Int[Array, "B T"], is_new: Bool[Array, "B T"]
) -> Any:
    """The attention of a decode step, with that of the layers outside of the pool where the model has such."""
    if not config.unpaged_layers:
        return paged
    windowed = recurrent = None
    if cache.windows is not None:
        turn = rotation(config.in_windows, position.reshape(-1))
        windowed = WindowDecode(cache.rings, position, is_new, *turn, config.unrotated_windows)
    if config.delta_net is not None:
        recurrent = StateDecode(config.delta_net, is_new)
    return LayerGroups(paged, windowed, config.window_layers, recurrent, config.state_layers)


def prefill_groups(
    config: ModelConfig, paged: Any, cache: Cache, row: Int[Array, " 1"], position: Int[Array, "1 T"], num_new: Int[Array, " 1"]
) -> Any:
    """The attention of a chunk of a prompt, with that of the layers outside of the pool where the model has such."""
    if not config.unpaged_layers:
        return paged
    windowed = recurrent = None
    if cache.windows is not None:
        windowed = WindowPrefill(cache.rings, row, position, num_new)
    if config.delta_net is not None:
        recurrent = StatePrefill(config.delta_net, row, position, num_new)
    return LayerGroups(paged, windowed, config.window_layers, recurrent, config.state_layers)
