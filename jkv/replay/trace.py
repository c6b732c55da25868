"""Traces of what each query of a sample read: attention columns, recorded by the engine and replayed by `jkv.score`.

A column is `(source, begin, end)` in one layer and KV head: the query at position q reads the key of token `source` when
`begin <= q < end`. Every token starts as the column (t, t, `OPEN_END`). Eviction sets its end; sharing ends the newer page's
columns and adds one more for each token of the page that is kept. `TraceRecorder` is the only writer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jkv.cache.attention import OPEN_END
from jkv.cache.pool import EMPTY
from jkv.checks import counted


class SteerTrace(NamedTuple):
    """The steering of each sample: `amount` times `vector` was added to the hidden states that entered `layer`."""

    amount: Any  # [n, T]
    layer: Any  # [n]
    vector: Any  # [n, D]


class Trace(NamedTuple):
    """Attention columns of each sample, layer and KV head (int32, on the host); prompt and completion are one sequence."""

    source: np.ndarray  # [n, L, K, C] token whose key and value the column holds
    begin: np.ndarray  # [n, L, K, C] first position that reads it
    end: np.ndarray  # [n, L, K, C] first position that no longer reads it; OPEN_END (2**31 - 1) if it stays
    sinks: np.ndarray | None = None  # [n] first tokens that queries read from another position (`jkv.cache.moved_sinks`)
    sink_shift: np.ndarray | None = None  # [n, T] positions by which each query is rotated for them, at most 0
    steer: SteerTrace | None = None
    kv_format: Any = None  # the `pallas_kernels.quantised.Format` of the pool; None if it held floats

    def __repr__(self) -> str:
        n, num_layers, num_kv_heads, num_columns = self.source.shape
        return f"Trace({counted(n, 'sample')}, {num_layers} layers, {num_kv_heads} KV heads, {num_columns:,} columns)"


class TraceRecorder:
    """Writes the trace of one sample while it is decoded.

    Positions and times are those of the sequence: prompt first, then the completion. `now` is the number of tokens seen, which
    is the position of the next query.

    Args:
      num_layers: L.
      num_kv_heads: K.
      num_tokens: the most tokens of prompt and completion.
      sinks: first tokens that queries read from another position.
      steer: the policy's `jkv.reasoning.steering.Steer`, if it steers.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, num_tokens: int, sinks: int = 0, steer: Any = None) -> None:
        self.end = np.full((num_layers, num_kv_heads, num_tokens), OPEN_END, np.int32)
        self._sinks, self._steer = sinks, steer
        self._sink_shift = np.zeros(num_tokens if sinks else 0, np.int32)
        self._amount = np.zeros(num_tokens if steer else 0, np.float32)
        self._reads: list[np.ndarray] = []  # [steps, L, K, MP] bool
        self._extra_source, self._extra_begin = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._extra_end = np.zeros((1, 1, 0), np.int32)  # [L, K, n] once an eviction made layers and heads differ

    def fork_from(self, other: "TraceRecorder", num_tokens: int) -> None:
        """Starts from the first `num_tokens` of another sample of the same prompt."""
        self.end[..., :num_tokens] = other.end[..., :num_tokens]

    def grown(self, num_tokens: int) -> "TraceRecorder":
        """A copy for a sequence of more tokens, which this one is the beginning of."""
        sinks = self._sinks
        other = TraceRecorder(*self.end.shape[:2], num_tokens, sinks, self._steer)
        count = min(num_tokens, self.end.shape[-1])
        other.end[..., :count] = self.end[..., :count]
        for name in ("_sink_shift", "_amount"):
            old = getattr(self, name)[:num_tokens]
            getattr(other, name)[: len(old)] = old
        other._reads = list(self._reads)
        other._extra_source, other._extra_begin = self._extra_source, self._extra_begin
        other._extra_end = self._extra_end
        return other

    def extended(self, count: int) -> None:
        """The next `count` tokens are prefilled, not drawn: their queries read all that is there."""
        if self._reads:
            self._reads.append(np.ones((count, *self._reads[-1].shape[1:]), bool))

    def dropped(self, position: np.ndarray, now: int) -> None:
        """A compaction dropped these positions ([L, K, n], EMPTY for none): no query from `now` on reads them."""
        layer, head, index = np.nonzero(position != EMPTY)
        is_dropped = np.zeros(self.end.shape, bool)
        is_dropped[layer, head, position[layer, head, index]] = True
        self.end[is_dropped] = now
        self._end_extra(is_dropped, now)

    def dropped_in_steps(self, position: np.ndarray, now: int) -> None:
        """Step i of the next steps dropped `position[i]` ([L, K], EMPTY for none) after its attention."""
        step, layer, head = np.nonzero(position != EMPTY)
        self.end[layer, head, position[step, layer, head]] = now + step + 1

    def shared(self, dropped: np.ndarray, repeated: np.ndarray, now: int) -> None:
        """Sharing removed the tokens `dropped` from every layer and head; queries from `now` on read `repeated` once more."""
        is_dropped = np.zeros(self.end.shape[-1], bool)
        is_dropped[dropped] = True
        self.end[..., is_dropped] = now
        self._end_extra(is_dropped, now)
        new_end = np.full((*self._extra_end.shape[:2], len(repeated)), OPEN_END, np.int32)
        self._extra_source = np.concatenate([self._extra_source, repeated.astype(np.int32)])
        self._extra_begin = np.concatenate([self._extra_begin, np.full(len(repeated), now, np.int32)])
        self._extra_end = np.concatenate([self._extra_end, new_end], axis=-1)

    def read(self, is_read: np.ndarray) -> None:
        """The next steps read only these entries of their page tables: [steps, L, K, MP]."""
        self._reads.append(is_read)

    def shifted(self, now: int, count: int, shift: int) -> None:
        """The next `count` queries are rotated by `shift` positions for the sinks."""
        self._sink_shift[now : now + count] = shift

    def steered(self, now: int, amount: np.ndarray) -> None:
        """The next steps added these multiples of the steering vector: [steps]."""
        self._amount[now : now + len(amount)] = amount

    def finish(self, num_seen: int, prompt: int, page_size: int, kv_format: Any = None) -> Trace:
        """The trace of this one sample (n = 1), which has `num_seen` tokens, `prompt` of them in its prompt."""
        end = self.end[..., :num_seen]
        own = np.broadcast_to(np.arange(num_seen, dtype=np.int32), end.shape)  # a view: costs no memory
        source = begin = own
        if self._reads:
            source, begin, end = columns_of(np.concatenate(self._reads), prompt, page_size)
        elif self._extra_source.size:
            source, begin = (self._with_extra(own, extra) for extra in (self._extra_source, self._extra_begin))
            end = self._with_extra(end, self._extra_end)
        sinks = steer = shift = None
        if self._sinks:
            sinks, shift = np.array([self._sinks], np.int32), self._sink_shift[None]
        if self._steer is not None:
            layer, vector = np.array([self._steer.layer], np.int32), self._steer.values.astype(np.float32)[None]
            steer = SteerTrace(self._amount[None], layer, vector)
        whole = own[None] if source is own else source[None]
        return Trace(whole, whole if begin is own else begin[None], end[None], sinks, shift, steer, kv_format)

    def _end_extra(self, is_dropped: np.ndarray, now: int) -> None:
        """Ends the extra columns of dropped tokens, by position: [T] or [L, K, T]."""
        is_open = self._extra_end == OPEN_END
        self._extra_end = np.where(is_dropped[..., self._extra_source] & is_open, now, self._extra_end)

    def _with_extra(self, own: np.ndarray, extra: np.ndarray) -> np.ndarray:
        """Every token's own column, then the extra ones: [L, K, C]."""
        return np.concatenate([own, np.broadcast_to(extra, (*own.shape[:2], len(self._extra_source)))], axis=-1)


def join_traces(traces: Sequence[Trace]) -> Trace:
    """One trace of several samples of one engine, padded to the widest with columns that no query reads."""
    end = stack_padded([trace.end[0] for trace in traces])
    if all(trace.source is trace.begin for trace in traces):  # only every token's own column
        source = begin = np.broadcast_to(np.arange(end.shape[-1], dtype=np.int32), end.shape)
    else:
        source, begin = (stack_padded([getattr(trace, field)[0] for trace in traces]) for field in ("source", "begin"))
    sinks, shift = None, None
    if any(trace.sinks is not None for trace in traces):
        sinks = np.array([0 if trace.sinks is None else trace.sinks[0] for trace in traces], np.int32)
        none = np.zeros(1, np.int32)
        shift = stack_padded([none if trace.sink_shift is None else trace.sink_shift[0] for trace in traces])
    steer = join_steering([trace.steer for trace in traces])
    return Trace(source, begin, end, sinks, shift, steer, traces[0].kv_format)


def join_steering(steers: Sequence[SteerTrace | None]) -> SteerTrace | None:
    """The steering of several samples: zeros for samples without steering, None if none is steered."""
    width = next((steer.vector.shape[1] for steer in steers if steer is not None), None)
    if width is None:
        return None
    amount = stack_padded([np.zeros(1, np.float32) if steer is None else steer.amount[0] for steer in steers])
    layer = np.array([0 if steer is None else steer.layer[0] for steer in steers], np.int32)
    vector = np.stack([np.zeros(width, np.float32) if steer is None else steer.vector[0] for steer in steers])
    return SteerTrace(amount, layer, vector)


def stack_padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of different widths, stacked and padded with zeros: columns that no query reads."""
    width = max(array.shape[-1] for array in arrays)
    return np.stack([np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]) for array in arrays])


def columns_of(reads: np.ndarray, prompt: int, page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention columns (source, begin, end: [L, K, C]) of a row whose steps read the pages `reads` ([steps, L, K, MP]).

    The prompt's queries read everything. A token has one column for each run of steps that read its page.
    """
    steps, layers, heads, _ = reads.shape
    total = prompt + steps
    before, after = np.ones((prompt, *reads.shape[1:]), bool), np.zeros((1, *reads.shape[1:]), bool)
    reads = np.concatenate([before, reads, after])
    lists = [[spans_of(reads[:, layer, head], total, page_size) for head in range(heads)] for layer in range(layers)]
    width = max(spans.shape[1] for row in lists for spans in row)
    padded = np.array([[np.pad(spans, [(0, 0), (0, width - spans.shape[1])]) for spans in row] for row in lists], np.int32)
    source, begin, end = np.moveaxis(padded, 2, 0)
    return source, begin, end


def spans_of(is_read: np.ndarray, total: int, page_size: int) -> np.ndarray:
    """Columns of one layer and head, from the pages that each query reads ([total + 1, MP], the last row False): [3, C]."""
    change = np.diff(is_read.astype(np.int8), axis=0, prepend=0)
    page, begin = np.nonzero(change.T == 1)
    end = np.nonzero(change.T == -1)[1]
    source = page[:, None] * page_size + np.arange(page_size)
    begin = np.maximum(begin[:, None], source)
    end = np.broadcast_to(np.where(end == total, OPEN_END, end)[:, None], source.shape)
    is_column = (source < total) & (begin < end)
    return np.stack([source[is_column], begin[is_column], end[is_column]])
