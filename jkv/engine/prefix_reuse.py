"""Rows that start from pages of the prefix cache, and leave the pages of their prompts to it.

`programs` are the engine's: `jkv.engine.programs`, or those of a mesh. Nothing is read from the device.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from jkv.engine.prefix_cache import PrefixCache
from jkv.engine.samples import Sample
from jkv.engine.state import State


def usable(sample: Sample, cache: PrefixCache) -> tuple[bytes, ...]:
    """The pieces that a sample may start from: prefill must still give its logits, and the last queries that scores read.

    Those that any score of the engine reads, because samples of other policies may fork from this one's prefill.
    """
    return sample.pieces[: max(0, len(sample.request.prompt) - cache.rest) // cache.piece] if cache.piece else ()


def reserve(cache: PrefixCache, sample: Sample, counts_once: bool) -> None:
    """Before a sample is admitted: refreshes its match, whose pages are not reserved again if they count once."""
    found = cache.find(usable(sample, cache))
    sample.num_shared_pieces = found if counts_once and sample.keeps_pieces else 0


def adopt(programs: Any, state: State, cache: PrefixCache, row: int, sample: Sample) -> tuple[State, int]:
    """The state whose empty row starts with the longest match, and the number of its tokens."""
    keys = usable(sample, cache)
    keys = keys[: cache.find(keys)]
    for key in keys:
        state = programs.adopt_pages(state, np.int32(row), cache.pages(key))
    return state, len(keys) * cache.piece


def keep(
    programs: Any, state: State, cache: PrefixCache, row: int, sample: Sample, start: int, in_use: Collection[bytes]
) -> State:
    """Holds the pages of a prompt that is prefilled, from its token `start` on, and not compacted yet.

    Pages that the row itself keeps are reserved already. Others need room: spare pages, or pages of pieces not in use.
    """
    keys, page_size = sample.pieces, state.cache.pool.page_size
    size, shared = cache.piece // page_size, start // cache.piece
    if cache.find(keys) == shared:  # else the next piece is held too, in pages of another row
        protected = {*in_use, *keys}
        for i in range(shared, len(keys)):
            if not (sample.keeps_pieces or make_room(cache, protected)):
                break
            entry = np.arange(i * size, (i + 1) * size, dtype=np.int32)
            state, pages = programs.hold_pages(state, np.int32(row), entry)
            cache.add(keys[: i + 1], pages)
            shared = i + 1
    sample.num_shared_pieces = shared if sample.keeps_pieces else 0
    return drop(programs, state, cache)


def make_room(cache: PrefixCache, protected: Collection[bytes]) -> bool:
    """Takes the pages of one piece from the spare ones, for which other pieces are evicted; False if there are too few."""
    while cache.spare < cache.pages_of_piece:
        if not cache.evict(protected):
            return False
        cache.spare += cache.pages_of_piece
    cache.spare -= cache.pages_of_piece
    return True


def drop(programs: Any, state: State, cache: PrefixCache) -> State:
    """Drops the references on the pages of pieces that were evicted."""
    for pages in cache.take_evicted():
        state = programs.drop_pages(state, pages)
    return state
