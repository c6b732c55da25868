"""Traces of what each query of a sample read: attention columns, recorded by the engine and replayed by `jkv.score`.

A column is `(source, begin, end)` in one layer and KV head: the query at position q reads the key of token `source` when
`begin <= q < end`. Every token starts as the column (t, t, `OPEN_END`). Eviction sets its end; sharing ends the newer page's
columns and adds one more for each token of the page that is kept. `TraceRecorder` is the only writer.

Columns end at few moments, since a compaction ends many of them. So an end is kept as the index of its moment, one byte up to
255 moments, and `source` and `begin` are kept only where a column is not its token's own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.cache.attention import OPEN_END
from jkv.cache.pool import EMPTY
from jkv.checks import counted


class SteerTrace(NamedTuple):
    """The steering of each sample: `amount` times `vector` was added to the hidden states that entered `layer`."""

    amount: Any  # [n, T]
    layer: Any  # [n]
    vector: Any  # [n, D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Trace:
    """Attention columns of each sample, layer and KV head, on the host; prompt and completion are one sequence.

    `source`, `begin` and `end` (int32, `[n, L, K, C]`) are written out when they are asked for, and `Trace.of` makes a trace
    of them. What is stored is smaller, and all of it begins with the samples:

    Attributes:
      moment: `[n, M]` int32, the first position that no longer reads the columns which ended then. The first is `OPEN_END`
        (2**31 - 1), of columns that stay.
      ended: `[n, L, K, C]` uint8, or uint16 or uint32 for more moments: the index in `moment` of each column's end.
      tokens: `[n, 1 or L, 1 or K, C]` uint16 or uint32, the token whose key and value a column holds. None: column c is
        token c.
      starts: the same, the first position that reads a column. None: column c is read from position c on.
      sinks: `[n]`, first tokens that queries read from another position (`jkv.cache.moved_sinks`).
      sink_shift: `[n, T]`, positions by which each query is rotated for them, at most 0.
      steer: the steering, if a sample was steered.
      kv_format: the `pallas_kernels.quantised.Format` of the pool; None if it held floats.
    """

    moment: Any
    ended: Any
    tokens: Any = None
    starts: Any = None
    sinks: Any = None
    sink_shift: Any = None
    steer: SteerTrace | None = None
    kv_format: Any = None

    @classmethod
    def of(cls, source: np.ndarray, begin: np.ndarray, end: np.ndarray, **others: Any) -> "Trace":
        """A trace of columns that are written out, `[n, L, K, C]` each; `others` are the further fields."""
        moments = [np.unique(np.append(one, OPEN_END))[::-1] for one in end]
        ended = [np.searchsorted(-moment, -one) for moment, one in zip(moments, end, strict=True)]
        width = max(map(len, moments))
        moment = np.stack([np.pad(one, (0, width - len(one))) for one in moments]).astype(np.int32)
        own = np.arange(end.shape[-1])
        is_own = all((np.asarray(x) == own).all() for x in (source, begin))
        names: dict[str, Any] = {} if is_own else {"tokens": smallest(source), "starts": smallest(begin)}
        return cls(moment, np.stack(ended).astype(np.min_scalar_type(width - 1)), **names, **others)

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples, layers, KV heads and columns."""
        return tuple(self.ended.shape)

    @property
    def source(self) -> np.ndarray:
        """The token whose key and value each column holds."""
        return self._written(self.tokens)

    @property
    def begin(self) -> np.ndarray:
        """The first position that reads each column."""
        return self._written(self.starts)

    @property
    def end(self) -> np.ndarray:
        """The first position that no longer reads each column; `OPEN_END` if it stays."""
        return np.stack([moment[ended] for moment, ended in zip(self.moment, self.ended, strict=True)])

    def columns(self, sample: int, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source, begin and end of the columns of one layer of a sample: `[K, C]` each."""
        ended = self.ended[sample, layer]

        def written(values: np.ndarray | None) -> np.ndarray:
            if values is None:
                return np.broadcast_to(np.arange(ended.shape[-1], dtype=np.int32), ended.shape)
            return np.broadcast_to(values[sample, min(layer, values.shape[1] - 1)].astype(np.int32), ended.shape)

        return written(self.tokens), written(self.starts), self.moment[sample][ended]

    def part(self, rows: Any) -> "Trace":
        """The trace of some samples: a slice, or their indices."""
        return jax.tree.map(lambda field: field[rows], self)

    def replace(self, **fields: np.ndarray) -> "Trace":
        """The trace with another `source`, `begin` or `end`."""
        others = {name: getattr(self, name) for name in ("sinks", "sink_shift", "steer", "kv_format")}
        return Trace.of(**{name: getattr(self, name) for name in ("source", "begin", "end")} | others | fields)

    def _written(self, values: np.ndarray | None) -> np.ndarray:
        """One number of every column; of columns that are their token's own, a view that costs no memory."""
        if values is None:
            values = np.arange(self.shape[-1], dtype=np.int32)
        return np.broadcast_to(values.astype(np.int32), self.shape)

    def __repr__(self) -> str:
        n, num_layers, num_kv_heads, num_columns = self.shape
        return f"Trace({counted(n, 'sample')}, {num_layers} layers, {num_kv_heads} KV heads, {num_columns:,} columns)"


class TraceRecorder:
    """Writes the trace of one sample while it is decoded. `jkv.engine.samples.Sample` calls it, in `advance` and `compact`.

    Positions and times count the sequence: prompt first, then the completion. `now` is the number of tokens seen, which
    is the position of the next query.

    Args:
      num_layers: L.
      num_kv_heads: K.
      num_tokens: the most tokens of prompt and completion.
      sinks: first tokens that queries read from another position.
      steer: the policy's `jkv.reasoning.steering.Steer`, if it steers.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, num_tokens: int, sinks: int = 0, steer: Any = None) -> None:
        self._moments = [OPEN_END]
        self._ended = np.zeros((num_layers, num_kv_heads, num_tokens), np.uint8)  # index of the moment
        self._sinks, self._steer = sinks, steer
        self._sink_shift = np.zeros(num_tokens if sinks else 0, np.int32)
        self._amount = np.zeros(num_tokens if steer else 0, np.float32)
        self._reads: list[np.ndarray] = []  # [steps, L, K, MP] bool
        self._extra_source, self._extra_begin = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._extra_ended = np.zeros((1, 1, 0), np.uint8)  # [L, K, n] once an eviction made layers and heads differ

    @property
    def end(self) -> np.ndarray:
        """The end of each token's own column so far: `[L, K, T]`."""
        return np.array(self._moments, np.int32)[self._ended]

    def fork_from(self, other: "TraceRecorder", num_tokens: int) -> None:
        """Starts from the first `num_tokens` of another sample of the same prompt."""
        self._moments = list(other._moments)
        self._ended = self._ended.astype(other._ended.dtype)
        self._ended[..., :num_tokens] = other._ended[..., :num_tokens]

    def grown(self, num_tokens: int) -> "TraceRecorder":
        """A copy for a sequence of more tokens, which this one is the beginning of."""
        sinks = self._sinks
        other = TraceRecorder(*self._ended.shape[:2], num_tokens, sinks, self._steer)
        other.fork_from(self, min(num_tokens, self._ended.shape[-1]))
        for name in ("_sink_shift", "_amount"):
            old = getattr(self, name)[:num_tokens]
            getattr(other, name)[: len(old)] = old
        other._reads = list(self._reads)
        other._extra_source, other._extra_begin = self._extra_source, self._extra_begin
        other._extra_ended = self._extra_ended
        return other

    def extended(self, count: int) -> None:
        """The next `count` tokens are prefilled, not drawn: their queries read all that is there."""
        if self._reads:
            self._reads.append(np.ones((count, *self._reads[-1].shape[1:]), bool))

    def dropped(self, position: np.ndarray, now: int) -> None:
        """A compaction dropped these positions ([L, K, n], EMPTY for none): no query from `now` on reads them."""
        layer, head, index = np.nonzero(position != EMPTY)
        if not len(index):
            return
        is_dropped = np.zeros(self._ended.shape, bool)
        is_dropped[layer, head, position[layer, head, index]] = True
        moment = self._moment(now)
        self._ended[is_dropped] = moment
        self._end_extra(is_dropped, moment)

    def dropped_in_steps(self, position: np.ndarray, now: int) -> None:
        """Step i of the next steps dropped `position[i]` ([L, K], EMPTY for none) after its attention."""
        for step, dropped in enumerate(position):
            layer, head = np.nonzero(dropped != EMPTY)
            if len(layer):
                moment = self._moment(now + step + 1)
                self._ended[layer, head, dropped[layer, head]] = moment

    def shared(self, dropped: np.ndarray, repeated: np.ndarray, now: int) -> None:
        """Sharing removed the tokens `dropped` from every layer and head; queries from `now` on read `repeated` once more."""
        is_dropped = np.zeros(self._ended.shape[-1], bool)
        is_dropped[dropped] = True
        moment = self._moment(now)
        self._ended[..., is_dropped] = moment
        self._end_extra(is_dropped, moment)
        self._extra_source = np.concatenate([self._extra_source, repeated.astype(np.int32)])
        self._extra_begin = np.concatenate([self._extra_begin, np.full(len(repeated), now, np.int32)])
        stays = np.zeros((*self._extra_ended.shape[:2], len(repeated)), self._extra_ended.dtype)
        self._extra_ended = np.concatenate([self._extra_ended, stays], axis=-1)

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
        others: dict[str, Any] = {"kv_format": kv_format}
        if self._sinks:
            others |= {"sinks": np.array([self._sinks], np.int32), "sink_shift": self._sink_shift[None]}
        if self._steer is not None:
            layer, vector = np.array([self._steer.layer], np.int32), self._steer.values.astype(np.float32)[None]
            others["steer"] = SteerTrace(self._amount[None], layer, vector)
        if self._reads:
            return Trace.of(*(x[None] for x in columns_of(np.concatenate(self._reads), prompt, page_size)), **others)
        ended = self._ended[..., :num_seen]
        if self._extra_source.size:
            own, extra = np.arange(num_seen), np.broadcast_to(self._extra_ended, (*ended.shape[:2], len(self._extra_source)))
            ended = np.concatenate([ended, extra], axis=-1)
            others["tokens"], others["starts"] = (
                smallest(np.concatenate([own, more]))[None, None, None] for more in (self._extra_source, self._extra_begin)
            )
        return Trace(np.array([self._moments], np.int32), ended[None].copy(), **others)

    def _moment(self, now: int) -> int:
        """The index of a moment, the last one or a new one."""
        if self._moments[-1] != now:
            self._moments.append(now)
            kind = np.min_scalar_type(len(self._moments) - 1)
            self._ended, self._extra_ended = (x.astype(kind, copy=False) for x in (self._ended, self._extra_ended))
        return len(self._moments) - 1

    def _end_extra(self, is_dropped: np.ndarray, moment: int) -> None:
        """Ends the extra columns of dropped tokens, by position: [T] or [L, K, T]."""
        is_ending = is_dropped[..., self._extra_source] & (self._extra_ended == 0)
        self._extra_ended = np.where(is_ending, self._extra_ended.dtype.type(moment), self._extra_ended)


def smallest(values: np.ndarray) -> np.ndarray:
    """Numbers that are not negative, in the smallest dtype."""
    return np.asarray(values).astype(np.min_scalar_type(int(np.max(values, initial=0))))


def join_traces(traces: Sequence[Trace]) -> Trace:
    """One trace of several samples of one engine, padded to the widest with columns that no query reads."""
    width = max(trace.shape[-1] for trace in traces)
    # Position 0 is a moment that no column outlives: the end of columns that fill up.
    moments = [np.append(trace.moment[0], 0) if trace.shape[-1] < width else trace.moment[0] for trace in traces]
    kind = np.min_scalar_type(max(map(len, moments)) - 1)
    ended = [
        np.pad(trace.ended[0].astype(kind), [(0, 0), (0, 0), (0, width - trace.shape[-1])], constant_values=len(moment) - 1)
        for trace, moment in zip(traces, moments, strict=True)
    ]
    others: dict[str, Any] = {"kv_format": traces[0].kv_format}
    for name in ("tokens", "starts"):
        if any(getattr(trace, name) is not None for trace in traces):
            values = [np.arange(trace.shape[-1])[None, None] if getattr(trace, name) is None else getattr(trace, name)[0]
                      for trace in traces]  # fmt: skip
            axes = np.broadcast_shapes(*(value.shape[:2] for value in values))
            others[name] = smallest(stack_padded([np.broadcast_to(value, (*axes, value.shape[-1])) for value in values]))
    if any(trace.sinks is not None for trace in traces):
        none = np.zeros(1, np.int32)
        others["sinks"] = np.array([0 if trace.sinks is None else trace.sinks[0] for trace in traces], np.int32)
        others["sink_shift"] = stack_padded([none if trace.sink_shift is None else trace.sink_shift[0] for trace in traces])
    steer = join_steering([trace.steer for trace in traces])
    return Trace(stack_padded(moments), np.stack(ended), steer=steer, **others)


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
