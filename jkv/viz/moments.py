"""What was held, packed for a page: for each token, when the number of heads that keep it changes.

A trace of 10,000 tokens, 32 layers and 8 heads has 2.6 million columns. What a picture shows of them are counts: of each layer,
or of each head where that is few enough. They change at ticks, positions in the sequence, of which a page has
at most `MAX_TICKS`.
"""

import base64
import zlib
from typing import NamedTuple

import numpy as np

from jkv.viz.held import Held, Spans

MAX_TICKS = 1024
MIN_TICKS = 32
MAX_CHANGES = 4_000_000  # beyond, fewer ticks do: where each step reads other pages, all changes would be most of the trace
MAX_CELLS = 1 << 20  # tokens times heads: up to here each head is kept apart, beyond only each layer


class Moments(NamedTuple):
    """Changes of how many heads of each group keep each token.

    Attributes:
      stops: `[n]` positions to look at; every one from the prompt's last on, unless the changes were too many.
      ticks: `[n]` positions from which on something is different.
      num_groups: of heads: L, or L * K.
      group_size: heads of each: K, or 1.
      place: `[C]` group * tokens + token.
      tick: `[C]` index of the change's tick.
      change: `[C]` heads that keep it from then on, less those before. At its own position, all do.
    """

    stops: np.ndarray
    ticks: np.ndarray
    num_groups: int
    group_size: int
    place: np.ndarray
    tick: np.ndarray
    change: np.ndarray


def has_heads(held: Held) -> bool:
    """Whether a page can keep each head apart."""
    return held.num_layers * held.num_heads * held.num_tokens <= MAX_CELLS


def moments_of(held: Held, by_head: bool) -> Moments:
    """When something changes in each head, or only in each layer; where such times are too many, evenly spaced ones."""
    group_size = 1 if by_head else held.num_heads
    found = changes(held, group_size)
    stops, ticks = np.arange(held.num_prompt - 1, held.num_tokens), np.unique(found[1])
    if len(ticks) > MAX_TICKS:
        stops = ticks = spaced(held, MAX_TICKS)
    merged = merge(*found, ticks)
    while len(merged[0]) > MAX_CHANGES and len(ticks) > MIN_TICKS:
        stops = ticks = spaced(held, len(ticks) // 2)
        merged = merge(*found, ticks)
    return Moments(stops, ticks, held.num_layers * held.num_heads // group_size, group_size, *merged)


def spaced(held: Held, count: int) -> np.ndarray:
    """Evenly spaced positions from the prompt's last to the sequence's."""
    return np.unique(np.linspace(held.num_prompt - 1, held.num_tokens - 1, count).round().astype(np.int64))


def changes(held: Held, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place, position and sign of every change; what happened before the prompt's last token counts as if then."""
    spans, total = held.spans, held.num_tokens
    cell = spans.head * total + spans.token
    is_missing = np.ones(held.num_layers * held.num_heads * total, bool)
    is_missing[cell[spans.begin == spans.token]] = False
    missing = np.flatnonzero(is_missing)  # tokens that not even their own query reads: no policy has any
    comes, goes = spans.begin > spans.token, spans.end < total
    cell = np.concatenate([missing, cell[comes], cell[goes]])
    position = np.concatenate([missing % total, spans.begin[comes], spans.end[goes]])
    change = np.ones(len(cell), np.int64)
    change[: len(missing)] = change[len(cell) - goes.sum() :] = -1
    return cell // total // group_size * total + cell % total, np.maximum(position, held.num_prompt - 1), change


def merge(
    place: np.ndarray, position: np.ndarray, change: np.ndarray, ticks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Changes as place, tick and amount, in order: one for each place and tick. Changes that cancel out are left out."""
    count = max(len(ticks), 1)
    key, index = np.unique(place * count + np.searchsorted(ticks, position), return_inverse=True)
    total = np.bincount(index, change, len(key)).astype(np.int64)
    key, total = key[total != 0], total[total != 0]
    return key // count, key % count, total


def first_loss(moments: Moments) -> int | None:
    """The first stop at which fewer heads keep a token than before; None if all tokens stay.

    A loss within the prompt counts at the prompt's last token.
    """
    ticks = moments.tick[moments.change < 0]
    return int(moments.ticks[ticks.min()]) if len(ticks) else None


def pack(moments: Moments, num_tokens: int) -> str:
    """Changes as base64 of deflated little-endian int16: how many each place has, then their ticks, then the changes."""
    counts = np.bincount(moments.place, minlength=moments.num_groups * num_tokens)
    numbers = np.concatenate([counts, moments.tick, moments.change]).astype("<i2")
    return base64.b64encode(zlib.compress(numbers.tobytes())).decode()


def stand_ins(again: Spans) -> np.ndarray:
    """Tokens that are read in others' places too, from which position to which in any head: `[C, 3]`, one for each other."""
    keys = np.stack([again.head, again.token, again.begin], axis=1)
    if not len(keys):
        return np.zeros((0, 3), np.int64)
    heads = keys[:, 0] == keys[0, 0]  # sharing is the same in all heads, until an eviction ends it in some
    first = np.stack([again.token, again.begin, again.end], axis=1)[heads]
    last: dict[tuple[int, int], int] = {}
    for token, begin, end in zip(again.token.tolist(), again.begin.tolist(), again.end.tolist(), strict=True):
        last[token, begin] = max(end, last.get((token, begin), 0))
    first[:, 2] = [last[token, begin] for token, begin in first[:, :2].tolist()]
    return first
