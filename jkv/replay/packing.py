"""Several sequences in one row of the forward pass, which then computes less padding where their lengths differ.

A token reads the columns of its own sequence alone. In a row's numbering these begin with the sequence's first token at the
earliest and end with its last one, so a packed row is a trace like any other (`jkv.replay.trace`).
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jkv.cache.attention import OPEN_END
from jkv.replay.trace import Trace, smallest, stack_padded


def place_sequences(lengths: Sequence[int], kinds: Sequence[Hashable], size: int) -> list[list[int]]:
    """The sequences of each packed row of `size` tokens, longest first, each in the first row that has room; of one kind.

    >>> place_sequences([3, 9, 5, 2], ["p", "p", "p", "q"], 12)
    [[1, 0], [2], [3]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (b for b, row in enumerate(rows) if room[b] >= lengths[i] and kinds[row[0]] == kinds[i])
        b = next(fits, len(rows))
        if b == len(rows):
            rows.append([])
            room.append(size)
        rows[b].append(i)
        room[b] -= lengths[i]
    return rows


def offsets_of(row: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Where each sequence of a packed row begins, and where the last one ends.

    >>> offsets_of([1, 0], [3, 9])
    [0, 9, 12]
    """
    return [0, *np.cumsum([lengths[i] for i in row]).tolist()]


def first_places(rows: Sequence[Sequence[int]], lengths: Sequence[int], size: int) -> Int[np.ndarray, "B P"]:
    """The place at which the sequence of each token of the packed rows begins; what is left of a row counts as one more."""
    first = np.zeros((len(rows), size), np.int32)
    for b, row in enumerate(rows):
        for begin in offsets_of(row, lengths):
            first[b, begin:] = begin
    return first


def packed_trace(trace: Trace | None, rows: Sequence[Sequence[int]], lengths: Sequence[int], size: int) -> Trace:
    """The trace of packed rows of `size` tokens, from one of N samples; None is that of full caches, L and K alike (1)."""
    parts = [pack_row(trace, row, lengths, size) for row in rows]
    width = max(part.shape[-1] for part in parts)
    others: dict[str, Any] = {"kv_format": None if trace is None else trace.kv_format}
    if parts[0].tokens is not None:
        for name in ("tokens", "starts"):
            others[name] = smallest(stack_padded([getattr(part, name) for part in parts]))
    # A column that is added is the row's first token, read by none: it ends where a text begins.
    moments = [np.append(part.moment, 0) for part in parts]
    kind = np.min_scalar_type(max(map(len, moments)) - 1)
    ended = [
        np.pad(part.ended.astype(kind), [(0, 0), (0, 0), (0, width - part.shape[-1])], constant_values=len(moment) - 1)
        for part, moment in zip(parts, moments, strict=True)
    ]
    return Trace(stack_padded(moments).astype(np.int32), np.stack(ended), **others)


def pack_row(trace: Trace | None, row: Sequence[int], lengths: Sequence[int], size: int) -> Trace:
    """The trace of one packed row, without the axis of samples. What is left of the row is a sequence of its own."""
    num_layers, num_kv_heads = (1, 1) if trace is None else trace.shape[1:3]
    has_columns = trace is not None and (trace.tokens is not None or trace.starts is not None)
    moments: list[np.ndarray] = []
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    begins = offsets_of(row, lengths)
    for i, begin, after in zip([*row, None], begins, [*begins[1:], size], strict=True):
        count, base = after - begin, sum(map(len, moments))
        if trace is None or i is None:
            moment = np.array([OPEN_END], np.int32)
            ended = np.zeros((num_layers, num_kv_heads, count), np.int64)
            source = first = np.broadcast_to(np.arange(count), ended.shape)
        else:
            moment, ended = trace.moment[i], trace.ended[i].astype(np.int64)
            source, first = trace.source[i], trace.begin[i]
            if has_columns:  # columns past this text hold no token, and begin where they end
                first = np.where(source < count, first, OPEN_END - size)
            else:
                ended, source, first = (x[..., :count] for x in (ended, source, first))
        moments.append(np.where(moment == OPEN_END, after, np.minimum(moment, count) + begin))
        pieces.append((ended + base, np.minimum(source, max(count - 1, 0)) + begin, first + begin))
    ended, source, first = (np.concatenate(values, axis=-1) for values in zip(*pieces, strict=True))
    names: dict[str, Any] = {"tokens": source, "starts": first} if has_columns else {}
    return Trace(np.concatenate(moments), ended, **names)
