"""The recorder of traces against plain sets: which tokens each query reads, after any sequence of events."""

import pickle

import numpy as np
import pytest

from jkv.cache.attention import OPEN_END
from jkv.cache.pool import EMPTY
from jkv.replay.columns import trace_columns
from jkv.replay.trace import Trace, TraceRecorder, columns_of, join_traces


def test_columns_are_the_spans_of_queries_that_read_a_page():
    """Prompt of 3, page of 2, four steps, one layer and head: which queries read token t, against the columns."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        reads = rng.random((4, 1, 1, 4)) < 0.5
        for step in range(4):
            reads[step, 0, 0, (3 + step) // 2] = True  # the current page
            reads[step, 0, 0, (3 + step) // 2 + 1 :] = False
        source, begin, end = columns_of(reads, prompt=3, page_size=2)
        for q in range(7):
            expected = sorted(t for t in range(q + 1) if q < 3 or reads[q - 3, 0, 0, t // 2])
            assert sorted(source[0, 0][(begin[0, 0] <= q) & (q < end[0, 0])].tolist()) == expected


def reads_of(trace, query, layer, head):
    """The tokens that a query reads, with repetition."""
    begin, end = trace.begin[0, layer, head], trace.end[0, layer, head]
    return sorted(trace.source[0, layer, head][(begin <= query) & (query < end)].tolist())


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_events_gives_the_columns_that_its_queries_read(seed):
    """Compactions, drops inside steps and shared pages at random times, against a multiset of each head's tokens."""
    rng = np.random.default_rng(seed)
    layers, heads, prompt, total = 2, 2, 5, 40
    recorder = TraceRecorder(layers, heads, total)
    held = [[list(range(prompt)) for _ in range(heads)] for _ in range(layers)]
    expected = {}
    for now in range(prompt, total):
        event = rng.choice(["none", "share" if now < total // 2 else "compact"])  # sharing ends at the first compaction
        if event == "compact":
            dropped = np.full((layers, heads, 3), EMPTY, np.int32)
            for layer, head in np.ndindex(layers, heads):
                gone = rng.permutation(np.unique(held[layer][head]))[: rng.integers(0, 3)]
                dropped[layer, head, : len(gone)] = gone
                held[layer][head] = [token for token in held[layer][head] if token not in gone]
            recorder.dropped(dropped, now)
        elif event == "share":
            there = rng.permutation(np.unique(held[0][0]))
            gone, again = there[:1], there[1:3]
            recorder.shared(gone, again, now)
            for layer, head in np.ndindex(layers, heads):
                kept = [token for token in held[layer][head] if token not in gone]
                held[layer][head] = kept + again.tolist()
        in_step = np.full((1, layers, heads), EMPTY, np.int32)
        for layer, head in np.ndindex(layers, heads):
            held[layer][head].append(now)
            expected[now, layer, head] = sorted(held[layer][head])
            once = [token for token in sorted(set(held[layer][head])) if held[layer][head].count(token) == 1]
            if now >= total // 2 and rng.random() < 0.3:
                in_step[0, layer, head] = rng.choice(once)
                held[layer][head].remove(in_step[0, layer, head])
        recorder.dropped_in_steps(in_step, now)
    trace = recorder.finish(total, prompt, page_size=4)
    for (query, layer, head), tokens in expected.items():
        assert reads_of(trace, query, layer, head) == tokens


def test_a_fork_starts_with_only_the_columns_of_its_prompt():
    first = TraceRecorder(1, 1, 10)
    first.dropped(np.array([[[2]]], np.int32), 4)
    second = TraceRecorder(1, 1, 10)
    second.fork_from(first, 4)
    first.dropped(np.array([[[1]]], np.int32), 6)
    assert second.end[0, 0].tolist() == [OPEN_END, OPEN_END, 4] + [OPEN_END] * 7


def test_joined_traces_are_as_wide_as_the_widest_and_padding_is_read_by_no_query():
    short, long = TraceRecorder(1, 1, 3), TraceRecorder(1, 1, 6)
    long.shared(np.array([4]), np.array([1, 1]), 5)
    trace = join_traces([short.finish(3, 1, 4), long.finish(6, 1, 4)])
    assert trace.end.shape == (2, 1, 1, 8)
    is_padding = np.arange(8) >= 3
    assert (trace.end[0, 0, 0][is_padding] <= trace.begin[0, 0, 0][is_padding]).all()
    assert reads_of(join_traces([long.finish(6, 1, 4)]), 5, 0, 0) == [0, 1, 1, 1, 2, 3, 5]


def test_moved_sinks_and_steering_are_zero_for_samples_without_them():
    plain, moved = TraceRecorder(1, 1, 4), TraceRecorder(1, 1, 4, sinks=2)
    moved.shifted(2, 2, -3)
    trace = join_traces([plain.finish(4, 1, 4), moved.finish(4, 1, 4)])
    assert trace.sinks.tolist() == [0, 2]
    assert trace.sink_shift.tolist() == [[0] * 4, [0, 0, -3, -3]]
    assert trace.steer is None


@pytest.mark.parametrize(("compactions", "kind"), [(255, np.uint8), (256, np.uint16)])
def test_an_end_takes_one_byte_up_to_255_moments(compactions, kind):
    """One moment too many must widen all indices: cut to a byte, it would be that of tokens that stay."""
    layers, heads, total = 2, 3, 300
    recorder, expected = TraceRecorder(layers, heads, total), np.full((layers, heads, total), OPEN_END)
    for i in range(compactions):
        recorder.dropped(np.full((layers, heads, 1), i, np.int32), i + 20)
        expected[..., i] = i + 20
    trace = recorder.finish(total, 1, 4)
    np.testing.assert_array_equal(trace.end[0], expected)
    assert trace.ended.dtype == kind
    assert (trace.tokens, trace.starts) == (None, None)
    assert trace.ended.nbytes == layers * heads * total * kind().itemsize


@pytest.mark.parametrize("seed", range(5))
def test_a_trace_that_is_written_out_and_made_again_is_the_same(seed):
    rng = np.random.default_rng(seed)
    shape = (2, 2, 3, 70)
    own = np.broadcast_to(np.arange(70, dtype=np.int32), shape)
    begin, end = own, np.where(rng.random(shape) < 0.5, OPEN_END, rng.integers(0, 90_000, shape)).astype(np.int32)
    source = own
    if seed % 2:
        source, begin = rng.integers(0, 70_000, shape), rng.integers(0, 70, shape)
    trace = Trace.of(source, begin, end)
    for again in (
        trace,
        pickle.loads(pickle.dumps(trace)),
        trace.replace(end=end),
        join_traces([trace.part([0]), trace.part([1])]),
    ):
        for name, field in {"source": source, "begin": begin, "end": end}.items():
            np.testing.assert_array_equal(getattr(again, name), field)
            for sample, layer in np.ndindex(2, 2):
                columns = dict(zip(("source", "begin", "end"), again.columns(sample, layer), strict=True))
                np.testing.assert_array_equal(columns[name], field[sample, layer])
    assert (trace.tokens is None) == (seed % 2 == 0)


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_the_device_gets_are_the_columns_that_the_host_has(is_shared):
    """With more moments than one byte holds, and rows cut shorter than the trace."""
    recorder = TraceRecorder(2, 2, 400)
    for i in range(300):
        recorder.dropped(np.full((2, 2, 1), i, np.int32) * [[[1], [1]], [[1], [0]]], i + 50)
    if is_shared:
        recorder.shared(np.array([350]), np.array([5, 399]), 380)
    trace = join_traces([recorder.finish(400, 1, 4), TraceRecorder(2, 2, 10).finish(10, 1, 4)])
    for total in (400, 64, 512):
        columns = trace_columns(trace, total)
        for layer in range(2):
            begin, end, source = columns.of_layer(layer)
            source = np.broadcast_to(np.arange(begin.shape[-1]), begin.shape) if source is None else np.asarray(source)
            for row in range(2):
                got = spans_in(source[row], np.asarray(begin[row]), np.asarray(end[row]), min(total, 400))
                assert got == spans_in(*trace.columns(row, layer), total=min(total, 400))


def spans_in(source, begin, end, total):
    """The columns of each head that some query of a text reads."""
    is_read = (begin < np.minimum(end, total)) & (source < total)
    return [
        sorted(zip(*(x[head][is_read[head]].tolist() for x in (source, begin, end)), strict=True)) for head in range(len(end))
    ]


@pytest.mark.parametrize(
    ("total", "life", "sorts"), [(4096, 256, True), (4096, 4096, False), (1024, 64, False)], ids=["evicted", "kept", "short"]
)
def test_columns_are_sorted_where_a_long_text_keeps_few(total, life, sorts):
    moment = np.array([[OPEN_END, *range(1, 129)]], np.int32) * np.array([1, *[total // 128] * 128], np.int32)
    ended = np.minimum((np.arange(total) + life) * 128 // total + 1, 129) % 129
    trace = Trace(moment, np.broadcast_to(ended.astype(np.uint8), (1, 2, 2, total)))
    assert trace_columns(trace, total).walk.sorts == sorts
