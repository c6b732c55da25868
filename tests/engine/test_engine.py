"""The engine: whatever the traffic, every request gives the same as by itself, and every page is freed."""

import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.engine.engine import Engine
from tests.support.mixes import (
    MAX_SLOTS,
    PROMPTS,
    Expected,
    Spec,
    assert_engine_is_consistent,
    draw_spec,
    make_engine,
)
from tests.support.soak import soak

ROW = 2 * 2 * MAX_SLOTS // 4  # pages of a full row
FULL, R_KV, STREAMING = 0, 1, 3
GREEDY, SAMPLED = 0, 1


@pytest.fixture(scope="module")
def expected(model):
    return Expected(model)


@pytest.fixture(scope="module")
def engines(model):
    """Rows -> an engine whose pool holds far less than full rows; used again and again, as a server would. Half run ahead."""
    pages = {1: ROW, 3: ROW, 8: ROW + ROW // 4, 32: 2 * ROW}
    return {rows: make_engine(model, rows, pages[rows], return_trace=True, ahead=rows > 3) for rows in pages}


def play(engine, rng, expected):
    """One mix: requests arrive at any time, some are cancelled. Every sample's result; those that ended give what they must."""
    submitted = {}
    num_requests = int(rng.integers(1, 9))
    while len(submitted) < num_requests or not engine.is_idle:
        if len(submitted) < num_requests and rng.random() < 0.6:
            spec, n = draw_spec(rng), int(rng.choice([1, 1, 2, 5]))
            submitted[engine.submit(**spec.arguments, n=n)] = spec
        elif submitted and rng.random() < 0.08:
            engine.cancel(int(rng.choice(list(submitted))))
        else:
            engine.step()
    outs = []
    for ticket, spec in submitted.items():
        outs.append(engine.result(ticket))
        for sample, (length, reason) in enumerate(zip(outs[-1].lengths, outs[-1].finish_reason, strict=True)):
            tokens, log_probs, ended = expected(spec, sample)
            assert outs[-1].tokens[sample, :length].tolist() == tokens[:length]
            np.testing.assert_allclose(outs[-1].logprobs[sample, :length], log_probs[:length], atol=2e-5)
            assert reason == "cancelled" or (length, reason) == (len(tokens), ended)
    return outs


def replay(model, outs):
    """Differences between log-probabilities and their replay, of all samples at once."""

    def joined(parts):
        size = max(part.shape[-1] for part in parts)
        return np.concatenate([np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, size - part.shape[-1])]) for part in parts])

    traces = [out.trace for out in outs]
    unmoved = [np.zeros(len(out.lengths), np.int32) for out in outs]
    sinks = [none if trace.sinks is None else trace.sinks for trace, none in zip(traces, unmoved, strict=True)]
    shift = [none[:, None] if trace.sinks is None else trace.sink_shift for trace, none in zip(traces, unmoved, strict=True)]
    columns = (joined([getattr(trace, field) for trace in traces]) for field in ("source", "begin", "end"))
    scored = jkv.score(
        model,
        joined([out.tokens for out in outs]),
        jkv.Trace.of(*columns, sinks=np.concatenate(sinks), sink_shift=joined(shift)),
        prompts=[prompt for out in outs for prompt in out.prompts],
        lengths=[length for out in outs for length in out.lengths.tolist()],
        sampling=[sampling for out in outs for sampling in out.sampling],
    )
    return np.abs(np.asarray(scored.logprobs) - joined([out.logprobs for out in outs]))


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("seed", "num_mixes", "rows"), [(7, 16, (1, 8)), pytest.param(0, 200, (1, 3, 8, 32), marks=pytest.mark.slow)]
)
def test_random_mixes_change_no_request_and_lose_no_page(model, engines, expected, seed, num_mixes, rows):
    """`python -m pytest tests/engine -m slow` plays all of them, once before a change of the engine lands."""
    rng, outs = np.random.default_rng(seed), []
    for i in range(num_mixes):
        engine = engines[rows[i % len(rows)]]
        outs += play(engine, rng, expected)
        assert_engine_is_consistent(engine)
        assert int(engine.runner.state.cache.pool.free_top) == engine.num_pages
    difference = replay(model, outs)
    assert np.percentile(difference, 99) <= 1e-5
    assert difference.max() <= 1e-4
    reasons = [reason for out in outs for reason in out.finish_reason]
    assert len(reasons) - reasons.count("cancelled") > 5 * num_mixes
    assert "nan" not in reasons
    stats = [engine.stats for engine in engines.values()]
    assert sum(one.preemptions for one in stats) >= num_mixes / 20
    assert sum(one.forks for one in stats) > num_mixes
    assert sum(one.sharing.shared for one in stats) >= num_mixes / 20
    assert not any(engine.scheduler.prefixes for engine in engines.values())


@pytest.mark.rounding
def test_swapped_rows_come_back_bit_for_bit(model, engines):
    """The same engine, once with the pool to itself and once in a batch that is too large for it."""
    engine = engines[8]
    arguments = Spec(prompt=1, policy=FULL, sampling=SAMPLED, length=3).arguments | {"stop_ids": ()}

    def run(crowd):
        before = engine.stats.preemptions
        tickets = [engine.submit(**arguments, request=i) for i in range(crowd)]
        engine.run()
        return [engine.result(ticket) for ticket in tickets], engine.stats.preemptions - before

    alone = [run(crowd=1)[0][0]]
    crowd, preemptions = run(crowd=8)
    assert preemptions > 0
    assert sum(out.samples[0].preemptions for out in crowd) == preemptions
    np.testing.assert_array_equal(crowd[0].tokens, alone[0].tokens)
    np.testing.assert_array_equal(crowd[0].logprobs, alone[0].logprobs)
    quiet = make_engine(model, 8, 8 * ROW, return_trace=True)
    tickets = [quiet.submit(**arguments, request=i) for i in range(8)]
    quiet.run()
    assert quiet.stats.preemptions == 0
    for ticket, out in zip(tickets, crowd, strict=True):
        np.testing.assert_array_equal(quiet.result(ticket).logprobs, out.logprobs)


def test_samples_of_a_prompt_share_one_prefill_and_its_pages(model):
    engine = make_engine(model, 8, 8 * ROW)
    ticket = engine.submit(PROMPTS[4], sampling=jkv.Sampling(seed=1), max_new_tokens=8, n=8, stop_ids=())
    engine.submit(PROMPTS[4], max_new_tokens=8, stop_ids=())  # another request with the same prompt joins
    engine.run()
    assert engine.stats.prefills == 1
    assert engine.stats.forks == 9
    shared, own = 39 // 4, 3  # pages of 4 slots: 39 prompt tokens, then 8 more from the partial page on
    assert engine.stats.peak_kv_bytes - engine.runner.meter.row_bytes == 4 * (shared + 1 + 8 * own) * engine.page_bytes
    out = engine.result(ticket)
    assert all(one.is_forked for one in out.samples)
    assert len({tuple(row) for row in out.tokens.tolist()}) == 8


def test_a_long_prompt_is_compacted_once_for_all_its_samples(model, expected):
    engine = make_engine(model, 4, 4 * ROW, return_trace=True)
    spec = Spec(prompt=4, policy=2, sampling=SAMPLED, length=3)
    ticket = engine.submit(**spec.arguments, n=4)
    engine.step()
    assert_engine_is_consistent(engine)
    assert (
        np.asarray(engine.runner.state.cache.pool.refcount) == 5
    ).sum() == 4 * 20 // 4  # the budget's pages: 4 rows and the prefix
    engine.run()
    out = engine.result(ticket)
    for sample in range(4):
        assert out.tokens[sample, : out.lengths[sample]].tolist() == expected(spec, sample)[0]
    assert engine.stats.prefills == 1


def test_siblings_that_compact_together_never_run_out_of_pages(model, expected):
    """Both copy the pages that they share before either frees them: more than two rows' own pages."""
    spec = Spec(prompt=3, policy=R_KV, sampling=SAMPLED, length=3)
    for num_pages in (2 * 24, 2 * 24 + 8, 3 * 24):
        engine = make_engine(model, 2, max(num_pages, ROW))
        ticket = engine.submit(**spec.arguments, n=2)
        while not engine.is_idle:
            engine.step()
            assert_engine_is_consistent(engine)
        out = engine.result(ticket)
        for sample in range(2):
            assert out.tokens[sample, : out.lengths[sample]].tolist() == expected(spec, sample)[0]


def test_rows_refill_so_that_a_full_queue_keeps_them_busy(model):
    engine = make_engine(model, 8, 8 * ROW)
    rng = np.random.default_rng(0)
    for i in range(64):  # skewed: most end early, some are eight times as long
        engine.submit([i % 30, 2], max_new_tokens=int(np.clip(rng.geometric(1 / 20), 4, 60)), stop_ids=())
    while engine.scheduler.waiting:
        engine.step()
    assert engine.stats.occupancy >= 0.8  # a chunk of 8 wastes 3.5 steps of a row whose mean is 20


def test_the_longest_are_admitted_first_on_request(model):
    engine = make_engine(model, 1, ROW, order="longest")
    tickets = [engine.submit(PROMPTS[0], max_new_tokens=limit, stop_ids=()) for limit in (4, 20, 9)]
    ended = [event.ticket for event in engine.stream() if event.finish_reason]
    assert ended == [tickets[1], tickets[2], tickets[0]]


def test_cancelling_frees_waiting_swapped_and_running_samples(model, expected):
    engine = make_engine(model, 2, ROW)
    spec = Spec(prompt=1, policy=FULL, sampling=GREEDY, length=3)
    first, second, third = (engine.submit(**spec.arguments | {"max_new_tokens": 40, "stop_ids": ()}) for _ in range(3))
    for _ in range(3):
        engine.step()
    assert engine.stats.preemptions == 1
    engine.cancel(second)  # swapped out
    engine.cancel(third)  # waiting
    engine.step()
    engine.cancel(first)  # running
    engine.cancel(first)  # again: nothing happens
    events = engine.step()
    assert engine.is_idle
    assert [event.finish_reason for event in events] == ["cancelled"]
    assert int(engine.runner.state.cache.pool.free_top) == engine.num_pages
    out = engine.result(first)
    assert out.finish_reason == ["cancelled"]
    assert out.lengths[0] == 32
    known = expected(spec, 0)[0]
    assert out.tokens[0, : len(known)].tolist() == known
    assert engine.result(second).samples[0].preemptions == 1
    assert engine.result(third).lengths[0] == 0


def test_unknown_tickets_and_unfinished_results_are_refused(model):
    engine = make_engine(model, 1, ROW)
    with pytest.raises(ValueError, match="No request has the ticket 5"):
        engine.cancel(5)
    ticket = engine.submit(PROMPTS[0], max_new_tokens=4)
    with pytest.raises(ValueError, match=f"Request {ticket} is not finished"):
        engine.result(ticket)
    engine.run()
    engine.result(ticket)
    with pytest.raises(ValueError, match="was already taken"):
        engine.result(ticket)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": [1] * 50, "max_new_tokens": 20}, "fill 64 slots .* this one fills 70 .50 prompt tokens, at most 20 new"),
        ({"prompt": [1] * 40, "max_new_tokens": 20}, r"60 slots = 15 pages of 4 in each of 4 layer-heads = 60 pages of 336"),
        (
            {"prompt": [1], "policy": jkv.r_kv(budget=16, interval=8, window=5)},
            "needs window=5; this engine was built with window=4",
        ),
        ({"prompt": [1], "stop_ids": range(9)}, "stop_ids must be at most 8 token ids; got 9"),
        ({"prompt": [[1], [2]]}, "one prompt at a time; got 2"),
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1], "n": 0}, "n must be at least 1"),
        ({"prompt": [1], "request": -1}, "request must lie in"),
        ({"prompt": [1], "first_sample": -1}, "first_sample must lie in"),
        ({"prompt": [1], "first_sample": 2**32 - 1, "n": 2}, "first_sample must lie in"),
    ],
    ids=["slots", "pool", "window", "stop ids", "prompts", "no prompt", "no sample", "request", "first", "last"],
)
def test_a_request_that_can_never_be_served_is_refused_and_the_others_continue(model, expected, arguments, words):
    engine = make_engine(model, 2, ROW - 8)
    spec = Spec(prompt=0, policy=R_KV, sampling=GREEDY, length=3)
    ticket = engine.submit(**spec.arguments)
    engine.step()
    with pytest.raises(ValueError, match=words):
        engine.submit(**{"max_new_tokens": 4} | arguments)
    engine.run()
    assert engine.result(ticket).tokens[0].tolist() == expected(spec, 0)[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"chunk": 3}, r"chunk must be one of \(16, 8, 4, 2, 1\)"),
        ({"order": "shortest"}, "order must be one of"),
        ({"kv_memory": "2GB"}, "kv_memory must be a number of bytes, or \"auto\" for the free memory; got '2GB'"),
        ({"kv_memory": 10_000, "num_pages": 4}, "in bytes or in pages, not both"),
        ({"num_pages": 10**9}, r"must fit the device: 1000000000 pages of 1088 bytes = .* [GM]B are free. Lower kv_memory"),
    ],
    ids=["rows", "chunk", "order", "memory", "both", "out of memory"],
)
def test_settings_out_of_range_are_refused(model, settings, words):
    with pytest.raises(ValueError, match=words):
        Engine(model, **settings)


def test_the_pool_may_be_sized_by_the_device(model):
    engine = Engine(model, max_running=2, max_slots=64, page_size=4, kv_memory="auto")
    assert engine.num_pages == 2 * 2 * ROW  # there is plenty: all that two rows and their prompts can ever use
    assert Engine(model, max_running=2, max_slots=64, page_size=4, kv_memory=100 * 272).num_pages == 100


def test_a_callback_that_raises_ends_its_own_request_only(model, expected):
    engine = make_engine(model, 4, 4 * ROW)
    spec = Spec(prompt=0, policy=R_KV, sampling=SAMPLED, length=3)

    def fail(event):
        raise RuntimeError("the socket is closed")

    failing = engine.submit(**spec.arguments, n=2, on_tokens=fail)
    heard = []
    other = engine.submit(**spec.arguments, on_tokens=heard.append)
    engine.run()
    assert engine.result(failing).finish_reason == ["error", "error"]
    out = engine.result(other)
    assert out.tokens[0].tolist() == expected(spec, 0)[0]
    assert [token for event in heard for token in event.tokens] == out.tokens[0].tolist()
    assert [event.finish_reason for event in heard][:-1] == [""] * (len(heard) - 1)
    assert heard[-1].finish_reason == out.finish_reason[0]
    assert int(engine.runner.state.cache.pool.free_top) == engine.num_pages


def test_a_callback_that_interrupts_loses_nothing_in_flight(model, expected):
    engine = make_engine(model, 4, 4 * ROW)
    spec = Spec(prompt=0, policy=R_KV, sampling=SAMPLED, length=3)

    def fail(event):
        raise KeyboardInterrupt

    failing = engine.submit(**spec.arguments, n=2, on_tokens=fail)
    other = engine.submit(**spec.arguments)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert {sample.completion.finish_reason for sample in engine.tickets[failing]} == {"error"}
    engine.run()
    assert engine.result(other).tokens[0].tolist() == expected(spec, 0)[0]
    assert int(engine.runner.state.cache.pool.free_top) == engine.num_pages


def test_weights_that_are_not_finite_are_refused_before_anything_compiles(model):
    broken = model.params.replace(final_norm=model.params.final_norm * jnp.nan)
    with pytest.raises(ValueError, match=r"Weights must be finite; params.final_norm"):
        Engine(broken)


def test_speeds_exclude_compilation_and_a_result_has_the_engines(model):
    engine = make_engine(model, 3, 3 * ROW)  # of a row count that nothing compiled for
    began = time.perf_counter()
    tickets = [engine.submit([1, 2, 3 + i], max_new_tokens=20, stop_ids=()) for i in range(3)]
    engine.run()
    elapsed = time.perf_counter() - began
    results = [engine.result(ticket) for ticket in tickets]
    assert engine.stats.compile_seconds > 0
    assert engine.stats.seconds <= elapsed - engine.stats.compile_seconds
    assert {result.stats.tokens_per_second for result in results} == {engine.stats.tokens_per_second}
    for result in results:
        assert 0 < result.samples[0].seconds <= elapsed - engine.stats.compile_seconds


def test_generate_warns_of_a_callback_that_raised(model):
    def fail(event):
        if event.ticket == 1:
            raise RuntimeError("the socket is closed")

    with pytest.warns(UserWarning, match=r"RuntimeError: the socket is closed has ended samples"):
        out = jkv.generate(model, PROMPTS[:2], max_new_tokens=20, stop_ids=(), on_tokens=fail, progress=False)
    assert out.finish_reason == ["length", "error"]
    assert out.lengths.tolist() == [20, 16]


def test_ctrl_c_returns_the_tokens_so_far(model):
    def interrupt(event):
        if event.finish_reason == "length":
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    knobs = {"max_running": 1, "page_size": 4, "stop_ids": (), "progress": False}
    out = jkv.generate(model, PROMPTS[:3], max_new_tokens=20, on_tokens=interrupt, **knobs)
    assert out.finish_reason == ["length", "cancelled", "cancelled"]
    assert out.lengths.tolist() == [20, 0, 0]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_callback_that_raises_at_the_last_event_is_reported(model):
    def fail(event):
        if event.finish_reason:
            raise RuntimeError("the disk is full")

    with pytest.warns(UserWarning, match="the disk is full"):
        out = jkv.generate(model, PROMPTS[0], max_new_tokens=5, stop_ids=(), on_tokens=fail, progress=False)
    assert out.finish_reason == ["length"]
    assert isinstance(out.samples[0].error, RuntimeError)


def test_events_count_samples_within_their_request(model):
    heard = []
    out = jkv.generate(
        model,
        [PROMPTS[0]] * 2,
        n=2,
        max_new_tokens=3,
        stop_ids=(),
        on_tokens=lambda e: heard.append((e.ticket, e.sample)),
        sampling=jkv.Sampling(seed=1),
        progress=False,
    )
    assert sorted(heard) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(out.lengths) == 4


def test_ctrl_c_in_a_stream_leaves_a_usable_engine(model):
    """The turn in progress is finished first, and no token of it is lost."""
    engine, quiet = (make_engine(model, 2, 2 * ROW) for _ in range(2))

    def interrupt(event):
        if len(heard) == 0:
            heard.append(event)
            signal.raise_signal(signal.SIGINT)

    heard = []
    tickets = [engine.submit(prompt, max_new_tokens=20, stop_ids=(), on_tokens=interrupt) for prompt in PROMPTS[:2]]
    with pytest.raises(KeyboardInterrupt):
        list(engine.stream())
    streamed = {ticket: [] for ticket in tickets}
    for event in engine.stream():
        streamed[event.ticket] += event.tokens
    expected = [quiet.submit(prompt, max_new_tokens=20, stop_ids=()) for prompt in PROMPTS[:2]]
    quiet.run()
    for ticket, alone in zip(tickets, expected, strict=True):
        assert streamed[ticket] == engine.result(ticket).tokens[0].tolist() == quiet.result(alone).tokens[0].tolist()


def test_a_stream_that_stops_early_loses_no_event(model):
    engine = make_engine(model, 2, 2 * ROW)
    tickets = [engine.submit(prompt, max_new_tokens=20, stop_ids=()) for prompt in PROMPTS[:2]]
    streamed = {ticket: [] for ticket in tickets}
    while not engine.is_idle:
        for event in engine.stream():
            streamed[event.ticket] += event.tokens
            break
    assert [len(tokens) for tokens in streamed.values()] == [20, 20]


def test_a_stream_may_take_new_requests_and_cancel_old_ones(model):
    engine = make_engine(model, 2, 2 * ROW)
    first = engine.submit(PROMPTS[0], max_new_tokens=60, stop_ids=())
    later = []
    for event in engine.stream():
        if event.ticket == first and not later:
            later.append(engine.submit(PROMPTS[1], max_new_tokens=4, stop_ids=()))
        elif later and event.ticket == later[0]:
            engine.cancel(first)
    assert engine.result(first).finish_reason == ["cancelled"]
    assert engine.result(later[0]).lengths.tolist() == [4]


def test_statistics_cover_each_sample(model):
    engine = make_engine(model, 1, ROW)
    tickets = [engine.submit(PROMPTS[0], max_new_tokens=8, stop_ids=()) for _ in range(2)]
    engine.run()
    first, second = (engine.result(ticket).samples[0] for ticket in tickets)
    assert 0 < first.queued_seconds < first.first_seconds <= first.seconds
    assert second.queued_seconds > first.queued_seconds
    assert first.num_tokens == second.num_tokens == 8
    assert first.tokens_per_second == 8 / (first.seconds - first.queued_seconds)
    slots = len(PROMPTS[0]) + 8  # in pages of 4, of 2 layers and 2 heads
    assert first.peak_kv_bytes == second.peak_kv_bytes == 2 * 2 * -(-slots // 4) * engine.page_bytes
    stats = engine.stats
    prefix = 2 * 2 * engine.page_bytes  # of the prompt, for the one that waits
    assert stats.peak_kv_bytes == first.peak_kv_bytes + prefix + engine.runner.meter.row_bytes
    assert (stats.started, stats.queued_seconds) == (2, first.queued_seconds + second.queued_seconds)
    assert stats.occupancy == 1.0
    assert 0 < stats.host_seconds < stats.seconds
    assert stats.chunks == 2


@pytest.mark.everyday
@pytest.mark.rounding
def test_random_operations_leak_nothing_and_read_nothing_freed(model, engines, expected):
    """A short run of `python -m tests.support.soak`."""
    counts = soak(engines[3], expected, np.random.default_rng(1), operations=600, check_every=10)
    assert min(counts.values()) > 10


def test_a_callback_that_ends_other_samples_splits_no_event_of_theirs(model):
    """The tokens of the chunk in which a sample is ended come with its final event, and nothing comes after it."""
    engine, events = make_engine(model, 4, 4 * ROW), []

    def stop_all(event):
        events.append(event)
        for ticket in tickets:
            engine.cancel(ticket)

    tickets = [engine.submit(PROMPTS[i], max_new_tokens=20, stop_ids=(), on_tokens=stop_all) for i in range(3)]
    engine.run()
    for ticket in tickets:
        own = [event for event in events if event.ticket == ticket]
        assert [event.finish_reason for event in own][:-1] == [""] * (len(own) - 1)
        assert own[-1].finish_reason == "cancelled"
        out = engine.result(ticket)
        assert [token for event in own for token in event.tokens] == out.tokens[0, : out.lengths[0]].tolist()


def test_requests_cancelled_while_the_engine_sleeps_end_without_a_pool(model):
    engine = make_engine(model, 2, 2 * ROW)
    tickets = [engine.submit(prompt, max_new_tokens=20, stop_ids=()) for prompt in PROMPTS[:3]]
    engine.step()
    engine.sleep()
    with pytest.raises(ValueError, match="Call wake"):
        engine.step()
    for ticket in tickets:
        engine.cancel(ticket)
    assert {event.finish_reason for event in engine.step()} == {"cancelled"}
    assert engine.is_idle
    assert [int(engine.result(ticket).lengths[0]) for ticket in tickets] == [8, 8, 0]
    assert engine.stats.host_seconds > 0


def test_a_sample_that_never_started_saves_no_pages(model):
    engine = make_engine(model, 1, ROW)
    first = engine.submit(PROMPTS[0], max_new_tokens=20, stop_ids=())
    never = engine.submit(PROMPTS[2], policy=jkv.streaming_llm(budget=12, interval=8), max_new_tokens=20, stop_ids=())
    engine.step()
    engine.cancel(never)
    engine.run()
    assert engine.result(never).stats.final_amsr == 0
    assert engine.result(first).stats.final_amsr == 0


@pytest.mark.parametrize("policy", [jkv.full(), jkv.h2o(budget=8)], ids=repr)
def test_a_chunk_ends_with_its_last_row(model, policy):
    """Requests of one, three and nine tokens end after nine steps of sixteen, with what chunks of one step give them."""
    outs = {}
    for chunk in (16, 1):
        engine = Engine(model, max_running=4, max_slots=64, page_size=4, chunk=chunk, policies=[policy], return_trace=True)
        limits = {"policy": policy, "stop_ids": (), "sampling": jkv.Sampling(seed=3)}
        tickets = [engine.submit([5, 6, 7, number], max_new_tokens=number, **limits) for number in (1, 3, 9)]
        engine.run()
        assert engine.stats.steps == 9
        assert engine.stats.occupancy == 13 / 36
        outs[chunk] = [engine.result(ticket) for ticket in tickets]
    for one, other in zip(*outs.values(), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.trace.end, other.trace.end)
