"""Replicas as a backend: for `Rollout`, and for whoever calls `submit_requests`, `step` and `take`."""

import concurrent.futures
import threading

import jax
import numpy as np
import pytest

import jkv
from jkv.engine.requests import RequestOptions, make_requests

PROMPTS = [[5, 1, 9], [3, 7] * 13 + [1], [4] * 8]
R_KV = jkv.r_kv(budget=16, interval=8, window=4)
SIZES = {"max_running": 3, "max_slots": 256, "page_size": 4}
LIMITS = {"max_prompt_tokens": 32, "max_new_tokens": 200, "n": 4}
CALL = {"seed": 5, "stop_ids": (), "max_new_tokens": 40}


@pytest.fixture(scope="module")
def replicas(model):
    with jkv.Replicas(model, num_replicas=2, policies=[R_KV, jkv.full()], **SIZES) as replicas:
        yield replicas


@pytest.fixture(scope="module")
def one(model):
    """A rollout of one engine of as many rows."""
    return jkv.Rollout(model, R_KV, **LIMITS, **SIZES)


@pytest.fixture
def rollout(replicas, model):
    rollout = jkv.Rollout(replicas, **LIMITS)
    yield rollout
    rollout.cancel()
    rollout.update(model.params)


def slow_down(replicas, monkeypatch):
    """Each turn takes a while, so that a busy machine does what a test does in the middle before the last ones are finished."""
    for member in replicas._dispatcher.members.values():
        engine = member.replica.engine
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda step=step: (threading.Event().wait(0.05), step())[1])


@pytest.fixture
def slowly(replicas, monkeypatch):
    """`slow_down` of the replicas that tests share."""
    slow_down(replicas, monkeypatch)


def requests_of(model, prompts=PROMPTS, **settings):
    options = RequestOptions(
        **{"policy": R_KV, "sampling": jkv.Sampling(seed=5), "stop_ids": (), "max_new_tokens": 24} | settings
    )
    return make_requests(model, [np.array(prompt, np.int32) for prompt in prompts], options)


def chunks(replicas):
    """Chunks that each replica has decoded so far."""
    return [member.replica.num_chunks for member in replicas._dispatcher.members.values()]


@pytest.mark.parametrize("traced", [False, True])
def test_a_rollout_on_replicas_returns_what_one_engine_does(rollout, one, model, traced):
    out, expected = rollout(PROMPTS, return_trace=traced, **CALL), one(PROMPTS, return_trace=traced, **CALL)
    for name in ("tokens", "mask", "logprobs", "logprobs_full", "prompt_index", "sample_index", "seeds"):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name), err_msg=name)
    assert set(out.policy_version[out.mask].tolist()) == {rollout.version}
    assert out.finish_reason == expected.finish_reason
    assert (out.stats.generated_tokens, out.stats.compactions) == (12 * 40, expected.stats.compactions)
    assert (out.trace is not None) == traced
    if traced:
        np.testing.assert_array_equal(out.trace.end, expected.trace.end)
        score = jkv.score(rollout.model, out, trace=out.trace)
        assert np.percentile(np.abs(score.logprobs - out.logprobs), 99) < 1e-5


def test_samples_come_as_they_finish_and_replicas_rest_between_two_runs(rollout, one, replicas, slowly):
    rollout.submit(PROMPTS, **CALL)
    first = rollout.run(until_done=2)
    assert 2 <= len(first.lengths) < 12
    assert rollout.pending == 12 - len(first.lengths)
    before = chunks(replicas)
    threading.Event().wait(0.3)
    assert chunks(replicas) == before
    rest = rollout.run()
    got = {
        (prompt, sample): tokens.tolist()
        for out in (first, rest)
        for prompt, sample, tokens in zip(out.prompt_index, out.sample_index, out.tokens, strict=True)
    }
    expected = one(PROMPTS, **CALL)
    keys = zip(expected.prompt_index, expected.sample_index, strict=True)
    assert got == {key: tokens.tolist() for key, tokens in zip(keys, expected.tokens, strict=True)}


def test_samples_of_a_prompt_that_are_submitted_one_by_one_stay_together(replicas):
    session, model = replicas.session(), replicas.model
    for request in (one for group in requests_of(model, PROMPTS[:2], n=3) for one in group):
        session.submit_requests([request])
    seen = []
    plain = replicas._dispatcher._dispatch

    def look():
        plain()
        seen.append({m.index: sorted(m.numbers) for m in replicas._dispatcher.members.values()})

    replicas._dispatcher._dispatch = look
    try:
        session.run()
    finally:
        replicas._dispatcher._dispatch = plain
    (a, b) = (next(numbers for numbers in (state[i] for state in seen) if numbers) for i in (0, 1))
    assert [np.ptp(a), np.ptp(b)] == [2, 2]


def test_weights_that_come_between_two_runs_are_used_from_there_on(rollout, replicas, model, slowly):
    before = rollout.version
    rollout.submit(PROMPTS, **CALL | {"max_new_tokens": 120})
    first = rollout.run(until_done=1)
    assert rollout.pending
    rollout.update(jax.tree.map(lambda x: x * 1.01, model.params))
    out = rollout.run()
    assert rollout.version == replicas.version == before + 1
    assert set(out.policy_version[out.mask].tolist()) <= {before, before + 1}
    assert before + 1 in out.policy_version
    assert (np.diff(np.where(out.mask, out.policy_version, before + 1), axis=1) >= 0).all()
    assert set(first.policy_version[first.mask].tolist()) == {before}


def test_a_sleeping_rollout_frees_every_pool_and_goes_on_with_equal_tokens(rollout, one, replicas, model, slowly):
    rollout.submit(PROMPTS, **CALL)
    rollout.run(until_done=1)
    rollout.sleep(forget_weights=True)
    engines = [member.replica.engine for member in replicas._dispatcher.members.values()]
    assert rollout.is_asleep
    assert all(engine.is_asleep for engine in engines)
    assert not any(isinstance(leaf, jax.Array) for engine in engines for leaf in jax.tree.leaves(engine.model.params))
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(rollout.model.params))
    rollout.update(model.params)
    out = rollout.run()
    assert not rollout.is_asleep
    expected = one(PROMPTS, **CALL)
    for tokens, prompt, sample in zip(out.tokens, out.prompt_index, out.sample_index, strict=True):
        assert tokens.tolist() == expected.tokens[4 * prompt + sample].tolist()


def test_cancelled_samples_keep_their_tokens(rollout, one, slowly):
    rollout.submit(PROMPTS, **CALL | {"max_new_tokens": 200})
    rollout.run(until_done=1)
    out = rollout.cancel()
    assert rollout.pending == 0
    assert "cancelled" in out.finish_reason
    assert set(out.finish_reason) <= {"cancelled", "length"}  # some may have come to their end
    assert 0 < out.lengths.max() <= 200
    expected = one(PROMPTS, **CALL | {"max_new_tokens": 200})
    for tokens, length, prompt, sample in zip(out.tokens, out.lengths, out.prompt_index, out.sample_index, strict=True):
        assert tokens[:length].tolist() == expected.tokens[4 * prompt + sample][:length].tolist()


def test_an_event_comes_for_each_sample_and_a_callback_that_raises_ends_its_request(replicas):
    session, events = replicas.session(), []

    def fail(event):
        events.append(event)
        raise OSError("disk full")

    failing, other = requests_of(replicas.model, PROMPTS[:2], n=4)
    tickets = session.submit_requests(failing, fail), session.submit_requests(other, events.append)
    session.run()
    assert [len(event.tokens) for event in events if event.ticket == tickets[1]] == [24] * 4
    assert len([event for event in events if event.ticket == tickets[0]]) == 1
    assert [type(sample.completion.error) for sample in session.take([tickets[0]])] == [OSError] * 4
    assert [sample.completion.finish_reason for sample in session.take([tickets[1]])] == ["length"] * 4


def test_an_interrupt_cancels_what_is_unfinished(replicas, slowly):
    session = replicas.session()
    (group,) = requests_of(replicas.model, PROMPTS[:1], n=8, max_new_tokens=120)
    ticket = session.submit_requests(group)

    def interrupt(events):
        if events:
            raise KeyboardInterrupt

    session.run(interrupt)
    reasons = [sample.completion.finish_reason for sample in session.take([ticket])]
    assert {"length", "cancelled"} == set(reasons)
    assert [load.items for load in replicas.loads] == [0, 0]


def test_when_all_replicas_are_lost_samples_end_and_the_error_is_raised(model):
    with jkv.Replicas(model, num_replicas=2, policies=[R_KV], restarts=0, **SIZES) as replicas:
        rollout = jkv.Rollout(replicas, **LIMITS)
        rollout.submit(PROMPTS, **CALL)
        for member in list(replicas._dispatcher.members.values()):
            member.replica._post(jkv.replicas.replica.Lost(OSError("unplugged")))
        with pytest.raises(RuntimeError, match="All replicas are lost"):
            rollout.run()
        assert set(rollout.cancel().finish_reason) == {"error"}
        with pytest.raises(RuntimeError, match="All replicas are lost"):
            rollout(PROMPTS, **CALL)
        assert set(rollout.cancel().finish_reason) == {"error"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda replicas: jkv.Rollout(replicas, max_running=4), r"Engines of replicas are built; got max_running"),
        (lambda replicas: jkv.Rollout(replicas, jkv.full(), max_prompt_tokens=64, max_new_tokens=400), r"slots"),
        (lambda replicas: jkv.Rollout(replicas, jkv.h2o(16), **LIMITS), r"Give it to jkv.Replicas\(policies=\[...\]\)"),
        (
            lambda replicas: jkv.Rollout(replicas, jkv.full(), **LIMITS).converse(PROMPTS, lambda turn: [1]),
            r"replicas keep no rows. Use a mesh without the axis \"data\"",
        ),
    ],
    ids=["settings", "lengths", "policy", "converse"],
)
def test_what_replicas_cannot_do_is_refused(replicas, call, message):
    with pytest.raises(ValueError, match=message):
        call(replicas)


def test_a_call_is_traced_as_it_asks_whatever_was_asked_before(rollout, replicas):
    def traced():
        return [member.replica.engine.is_traced for member in replicas._dispatcher.members.values()]

    assert rollout(PROMPTS, n=2, seed=1, max_new_tokens=4, return_trace=True).trace is not None
    assert all(traced())
    assert replicas.generate(PROMPTS, n=2, max_new_tokens=4).trace is None
    assert not any(traced())


def test_a_replica_that_was_started_again_traces_what_a_call_asked_for(model, one):
    with jkv.Replicas(model, num_replicas=1, policies=[R_KV], restarts=1, **SIZES) as replicas:
        rollout = jkv.Rollout(replicas, **LIMITS)
        rollout([PROMPTS[0]], n=1, max_new_tokens=4, return_trace=True)
        first = replicas._dispatcher.members[0].replica
        rollout.submit(PROMPTS, return_trace=True, **CALL)
        first._post(jkv.replicas.replica.Lost(OSError("unplugged")))
        out, expected = rollout.run(), one(PROMPTS, return_trace=True, **CALL)
        assert replicas._dispatcher.members[0].replica is not first
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.trace.end, expected.trace.end)


def test_an_untraced_call_beside_a_traced_one_leaves_its_trace_whole(rollout, replicas, one, slowly):
    options, begun = CALL | {"n": 1, "max_new_tokens": 60, "return_trace": True}, chunks(replicas)
    rollout.submit(PROMPTS[:2], **options)  # one for each replica, which has rows left
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(rollout.run)
        while min(np.subtract(chunks(replicas), begun)) < 1:
            threading.Event().wait(0.001)
        assert replicas.generate(PROMPTS[0], max_new_tokens=4).trace is None
        out = running.result()
    np.testing.assert_array_equal(out.trace.end, one(PROMPTS[:2], **options).trace.end)


def test_a_row_that_moves_to_a_replica_that_traced_nothing_stays_traced(model, one, monkeypatch):
    with jkv.Replicas(model, num_replicas=2, policies=[R_KV], **SIZES) as replicas:
        slow_down(replicas, monkeypatch)
        rollout, options = jkv.Rollout(replicas, **LIMITS), CALL | {"n": 1, "return_trace": True}
        rollout.submit([PROMPTS[0]], **options)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(rollout.run)
            while max(chunks(replicas)) < 1:
                threading.Event().wait(0.001)
            replicas.retire(int(np.argmax(chunks(replicas))))
            out = running.result()
    expected = one([PROMPTS[0]], **options)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.trace.end, expected.trace.end)


def test_a_conversation_of_one_turn_needs_no_kept_row(rollout):
    out = rollout.converse(PROMPTS, lambda turn: [1], max_turns=1, seed=5, n=1, stop_ids=(), max_turn_tokens=8)
    assert out.lengths.tolist() == [8, 8, 8]
