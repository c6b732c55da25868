"""Which prompts, or beginnings of prompts, stay in the pool after their requests, and which of them goes first.

`PrefixCache` is host arithmetic; the functions after it hold and drop the pages. A prompt is cut into pieces of equally many
tokens, and only whole pieces are kept. Where a piece is as long as the largest prefill program, or the least multiple of that
which fills pages, prefill from the end of a piece on runs the same programs on the same inputs as prefill of the whole prompt,
and gives the same bits. Shorter pieces find more of a prompt; the rest of it then passes through other programs, which may
round otherwise.

The key of a piece is a hash of its tokens and of the key before it. The first one continues the salt, the adapter,
the weights' version, and how often the cache was cleared.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jkv.engine.requests import Request
from jkv.engine.samples import Sample
from jkv.engine.state import State
from jkv.eviction import Policy


class PrefixCache:
    """The pieces that the pool holds, the least recently used first; a piece always comes before the one that it continues.

    Args:
      piece: tokens of a piece; 0 for a cache that keeps nothing.
      pages_of_piece: its pages in all layers and KV heads.
      rest: the last tokens of a prompt that are always prefilled.

    Attributes:
      spare: pages that no reservation needs, by which the cache may grow in this step; the scheduler sets it.
      num_clears: how often the cache was cleared.
    """

    def __init__(self, piece: int = 0, pages_of_piece: int = 0, rest: int = 1) -> None:
        self.piece, self.pages_of_piece, self.rest, self.spare, self.num_clears = piece, pages_of_piece, rest, 0, 0
        self._pages: OrderedDict[bytes, Any] = OrderedDict()
        self._evicted: list[Any] = []

    @property
    def num_pages(self) -> int:
        """Pages of the pool that it holds, those that rows read too included."""
        return len(self._pages) * self.pages_of_piece

    def keys_of(self, prompt: np.ndarray, salt: str, version: int, adapter: str = "") -> tuple[bytes, ...]:
        """The keys of a prompt's whole pieces, computed with the weights of a version, for requests of one salt and adapter."""
        key, keys = hashlib.blake2b(repr((version, salt, adapter, self.num_clears)).encode()).digest(), []
        for end in range(self.piece, len(prompt) + 1, self.piece) if self.piece else ():
            tokens = np.ascontiguousarray(prompt[end - self.piece : end], np.int32)
            key = hashlib.blake2b(key + tokens.tobytes()).digest()
            keys.append(key)
        return tuple(keys)

    def find(self, keys: Sequence[bytes]) -> int:
        """How many leading pieces of a prompt are held. They become the most recently used ones."""
        count = self._count(keys)
        self._use(keys[:count])
        return count

    def num_found(self, request: Request, version: int) -> int:
        """Tokens that a row of a request would start from now, with weights of a version; no piece counts as used."""
        keys = self.keys_of(request.prompt, request.cache_salt, version, request.adapter)
        return self._count(usable(keys, request, self)) * self.piece

    def _count(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def pages(self, key: bytes) -> Any:
        """The pages of a piece that is held, as they were added."""
        return self._pages[key]

    def add(self, keys: Sequence[bytes], pages: Sequence[Any]) -> None:
        """Adds the last pieces of `keys`, which continue the others, all held; with the pages of each."""
        self._pages.update(zip(keys[len(keys) - len(pages) :], pages, strict=True))
        self._use(keys)

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):  # the last piece is evicted before those that it continues
            self._pages.move_to_end(key)

    def num_free(self, in_use: Collection[bytes]) -> int:
        """How many pieces are not in use."""
        return len(self._pages.keys() - set(in_use))

    def evict(self, in_use: Collection[bytes] = ()) -> bool:
        """Evicts the least recently used piece that is not in use; False if there is none.

        Pieces in use are leading pieces of some prompts, so none of them continues one that is evicted.
        """
        key = next((key for key in self._pages if key not in in_use), None)
        if key is not None:
            self._evicted.append(self._pages.pop(key))
        return key is not None

    def evict_all(self, in_use: Collection[bytes] = ()) -> None:
        """Evicts all pieces that are not in use."""
        while self.evict(in_use):
            pass

    def clear(self, in_use: Collection[bytes]) -> None:
        """Evicts all pieces that are not in use; pieces in use match no later prompt."""
        self.num_clears += 1
        self.evict_all(in_use)

    def take_evicted(self) -> list[Any]:
        """The pages of pieces evicted since the last call, whose references are to be dropped."""
        pages, self._evicted = self._evicted, []
        return pages

    def forget(self) -> None:
        """Forgets everything; for an empty pool."""
        self._pages.clear()
        self._evicted.clear()


def piece_for(num_tokens: int, page_size: int) -> int:
    """Tokens of a piece: the least multiple of `num_tokens` that fills pages.

    >>> piece_for(256, 16), piece_for(256, 24)
    (256, 768)
    """
    return math.lcm(num_tokens, page_size)


def cache_for(num_tokens: int, page_size: int, num_heads: int, window: int) -> PrefixCache:
    """The cache of an engine with `num_heads` KV heads in all layers; scores read the last `window` queries of a prompt."""
    piece = piece_for(num_tokens, page_size)
    return PrefixCache(piece, num_heads * (piece // page_size), max(1, window))


def can_reuse(policy: Policy) -> bool:
    """Whether a row of a policy can start from pages of the cache, and leave its own to it.

    Not if its score reads numbers that prefill computes for each slot of the prompt and that no page holds: attention mass
    (H2O, TOVA), a gate, hidden states of sentences (SkipKV). Rows that evict inside steps also write into their pages.
    """
    needs = policy.needs
    return not (needs.mass or needs.gate or needs.similarity or policy.evicts_in_steps)


def usable(keys: tuple[bytes, ...], request: Request, cache: PrefixCache) -> tuple[bytes, ...]:
    """The pieces that a row may start from: prefill must still give its logits, and the last queries that scores read.

    As many queries as any score of the engine reads, because samples of other policies may fork from this one's prefill.
    """
    return keys[: max(0, len(request.prompt) - cache.rest) // cache.piece] if cache.piece else ()


def reserve(cache: PrefixCache, sample: Sample, counts_once: bool) -> None:
    """Before a sample is admitted: refreshes its match, whose pages are not reserved again if they count once."""
    found = cache.find(usable(sample.pieces, sample.request, cache))
    sample.num_shared_pieces = found if counts_once and sample.keeps_pieces else 0


def adopt(programs: Any, state: State, cache: PrefixCache, row: int, sample: Sample) -> tuple[State, int]:
    """The state whose empty row starts with the longest match, and the number of its tokens."""
    keys = usable(sample.pieces, sample.request, cache)
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
        protected, held = {*in_use, *keys}, []
        for i in range(shared, len(keys)):
            if not (sample.keeps_pieces or make_room(cache, protected)):
                break
            entry = np.arange(i * size, (i + 1) * size, dtype=np.int32)
            state, pages = programs.hold_pages(state, np.int32(row), entry)
            held.append(pages)
        shared += len(held)
        cache.add(keys[:shared], held)
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
