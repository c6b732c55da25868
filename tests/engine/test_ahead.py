"""An engine that dispatches a chunk before it reads the last one: the same completions, and no wait where none is needed."""

import jax
import numpy as np
import pytest

import jkv
from jkv.engine import programs
from jkv.engine.engine import Engine
from jkv.testing import tiny_model

PROMPTS = [[5, 1, 9], list(range(20)), [3, 7] * 9, [4] * 8, [9, 8, 7], list(range(12, 0, -1)), [1, 2], [6] * 11]
PLANNED = {
    "full": jkv.full(),
    "r_kv": jkv.r_kv(24, interval=8, window=4),
    "h2o": jkv.h2o(16),
    "rpc": jkv.rpc(interval=16, window=4),
    "streaming_llm": jkv.streaming_llm(16, interval=8),
    "streaming_llm, moved sinks": jkv.streaming_llm(16, interval=8, positions="cache"),
    "quest": jkv.quest(8),
    "cur": jkv.cur(16, interval=4),
    "g_kv": jkv.g_kv(24, interval=8, window=4),
}
DISTINCT = ("full", "r_kv", "h2o", "streaming_llm, moved sinks", "quest")  # the others take the same path through the engine
SAMPLED = jkv.Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def run(model, policy, ahead, **settings):
    """Eight prompts, two samples each, on three rows; some end by a stop token."""
    knobs = {
        "max_new_tokens": 40,
        "n": 2,
        "stop_ids": (2, 11),
        "max_running": 3,
        "page_size": 4,
        "chunk": 8,
        "sampling": SAMPLED,
    }
    return jkv.generate(model, PROMPTS, policy, return_trace=True, progress=False, ahead=ahead, **knobs | settings)


def assert_same(one, other):
    for field in ("tokens", "lengths", "logprobs"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
    assert one.finish_reason == other.finish_reason
    jax.tree.map(np.testing.assert_array_equal, one.trace, other.trace)
    for field in ("evicted", "compactions", "final_amsr", "generated_tokens"):
        assert getattr(one.stats, field) == getattr(other.stats, field)


@pytest.mark.everyday(where=lambda name: name in DISTINCT)
@pytest.mark.parametrize("name", PLANNED)
def test_completions_traces_and_counts_are_those_of_an_engine_that_waits(model, name):
    waits, ahead = (run(model, PLANNED[name], ahead) for ahead in (False, True))
    assert "stop" in waits.finish_reason
    assert_same(waits, ahead)


def test_preempted_rows_and_stop_strings_change_nothing(model):
    pages = 2 * 2 * 3 * (40 + 20) // 4 // 2  # for half of what full rows hold
    waits, ahead = (run(model, jkv.full(), ahead, num_pages=pages) for ahead in (False, True))
    assert waits.stats.preemptions > 0
    assert ahead.stats.preemptions > 0
    assert_same(waits, ahead)


def test_penalties_count_the_tokens_that_are_not_read_yet(model):
    sampling = jkv.Sampling(temperature=1.0, seed=3, repetition_penalty=1.3, frequency_penalty=0.5)
    waits, ahead = (run(model, PLANNED["r_kv"], ahead, sampling=sampling) for ahead in (False, True))
    assert_same(waits, ahead)
    assert not np.array_equal(waits.tokens, run(model, PLANNED["r_kv"], False).tokens)


def watch(engine):
    """What the engine does, in order: D for a dispatched chunk, R for one that is read, C for a compaction."""
    done, runner = [], engine.runner
    dispatch, read, compact = runner.dispatch, runner.read, runner._compact_row

    def noting(letter, call):
        def noted(*args):
            done.append(letter)
            return call(*args)

        return noted

    runner.dispatch, runner.read, runner._compact_row = noting("D", dispatch), noting("R", read), noting("C", compact)
    return done


@pytest.mark.parametrize(
    ("policy", "ahead", "order"),
    [
        (jkv.full(), True, "DDRDRDRR"),
        (jkv.full(), False, "DRDRDRDR"),
        (jkv.streaming_llm(12, interval=8), True, "CDCDCCRDCCRDRR"),  # each compaction is dispatched before its chunk is read
        (jkv.streaming_llm(12, interval=8), False, "CDRCDRCCDRCCDR"),
    ],
)
def test_the_next_chunk_is_dispatched_before_the_last_one_is_read(model, policy, ahead, order):
    engine = Engine(model, max_running=2, max_slots=64, chunk=8, page_size=4, ahead=ahead)
    done = watch(engine)
    tickets = [engine.submit(prompt, policy, SAMPLED, max_new_tokens=32, stop_ids=()) for prompt in PROMPTS[:2]]
    engine.run()
    assert "".join(done) == order
    assert all(engine.result(ticket).lengths[0] == 32 for ticket in tickets)


def test_running_ahead_compiles_nothing_twice(model):
    counts = []
    for ahead, max_slots in ((False, 68), (True, 72)):  # other shapes than elsewhere
        before = programs.decode_chunk.num_compiled(), programs.compact.num_compiled()
        engine = Engine(model, max_running=2, max_slots=max_slots, chunk=8, page_size=4, ahead=ahead)
        for prompt in PROMPTS[:2]:
            engine.submit(prompt, jkv.streaming_llm(12, interval=8), SAMPLED, max_new_tokens=32, stop_ids=())
        engine.run()
        after = programs.decode_chunk.num_compiled(), programs.compact.num_compiled()
        counts.append([end - start for start, end in zip(before, after, strict=True)])
    assert counts == [[1, 1], [1, 1]]


def test_a_policy_that_reads_the_text_waits_for_it(model):
    gate = jkv.learned_gate(jkv.testing.random_gate(model), threshold=0.0, window=4, interval=8)
    engine = Engine(model, max_running=2, max_slots=64, chunk=8, page_size=4, ahead=True, policies=[gate])
    done = watch(engine)
    engine.submit(PROMPTS[0], gate, SAMPLED, max_new_tokens=32, stop_ids=())
    engine.run()
    assert "DD" not in "".join(done).replace("C", "")


def test_on_a_cpu_an_engine_waits_unless_told(model):
    assert [Engine(model, max_slots=32, ahead=ahead).runner.ahead for ahead in (None, True, False)] == [False, True, False]


@pytest.mark.parametrize("policy", [jkv.full(), jkv.r_kv(24, interval=8, window=4)], ids=["full", "r_kv"])
def test_what_is_cancelled_keeps_the_tokens_that_were_read(model, policy):
    def play(ahead):
        engine = Engine(model, max_running=2, max_slots=64, chunk=8, page_size=4, ahead=ahead, return_trace=True)
        tickets = [engine.submit(prompt, policy, SAMPLED, max_new_tokens=40, stop_ids=()) for prompt in PROMPTS[:3]]
        for _ in range(3 + ahead):
            engine.step()
        engine.cancel(tickets[0])
        engine.run()
        assert engine.runner.num_held_pages == 0
        return [engine.result(ticket) for ticket in tickets]

    waits, ahead = play(False), play(True)
    assert [out.finish_reason for out in ahead] == [["cancelled"], ["length"], ["length"]]
    assert ahead[0].lengths[0] == 24
    for one, other in zip(waits, ahead, strict=True):
        for field in ("tokens", "logprobs"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        jax.tree.map(np.testing.assert_array_equal, one.trace, other.trace)
        assert one.stats.evicted == other.stats.evicted


def test_sleep_new_weights_and_reset_in_the_middle_lose_nothing(model):
    other = jax.tree.map(lambda leaf: leaf * 1.01, model.params)

    def play(ahead):
        engine = Engine(model, max_running=2, max_slots=64, chunk=8, page_size=4, ahead=ahead)
        tickets = [engine.submit(prompt, jkv.full(), SAMPLED, max_new_tokens=40, stop_ids=()) for prompt in PROMPTS[:4]]
        for _ in range(2 + ahead):  # two chunks are read
            engine.step()
        engine.sleep()  # what is dispatched is read first
        engine.wake()
        events = engine.step()
        if ahead:
            assert sum(len(event.tokens) for event in events) == 16
        engine.run()
        return [engine.result(ticket).tokens for ticket in tickets]

    np.testing.assert_array_equal(play(False), play(True))

    engine = Engine(model, max_running=2, max_slots=64, chunk=8, page_size=4, ahead=True)
    ticket = engine.submit(PROMPTS[0], jkv.full(), SAMPLED, max_new_tokens=40, stop_ids=())
    engine.step()
    engine.step()
    engine.update(other)
    engine.run()
    sample = engine.take([ticket])[0]
    assert sample.completion.versions == [0] * 17 + [1] * 23  # two chunks, and the token whose logits the second one left

    engine = Engine(model, max_running=2, max_slots=64, chunk=8, page_size=4, ahead=True)
    ticket = engine.submit(PROMPTS[0], jkv.full(), SAMPLED, max_new_tokens=40, stop_ids=())
    engine.step()
    engine.step()
    engine.reset()
    engine.run()
    np.testing.assert_array_equal(engine.result(ticket).tokens, play(False)[0])


# Kept rows.

KEPT = {name: policy for name, policy in PLANNED.items() if not policy.moves_sinks}
NEW = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8], list(range(20, 2, -1))]


def converse(model, policy, ahead, between=None, **settings):
    """Six conversations of up to four turns on three rows, each extended as soon as it can be; results by conversation."""
    options = {"max_running": 3, "page_size": 4, "chunk": 8, "max_slots": 192, "return_trace": True, "poison": True}
    engine = Engine(model, policies=[policy, jkv.full()], ahead=ahead, **options)
    limits = {"max_new_tokens": 23, "stop_ids": (2, 11), "keep": True} | settings
    turns = {i: engine.submit(prompt, policy, SAMPLED, **limits) for i, prompt in enumerate(PROMPTS[:6])}
    outs, num_steps = {i: [] for i in turns}, 0
    while turns:
        engine.step()
        num_steps += 1
        if between is not None and num_steps % 3 == 0:
            between(engine)
        for i, ticket in list(turns.items()):
            if not engine.tickets[ticket][0].is_finished:
                continue
            outs[i].append(engine.result(ticket))
            if len(outs[i]) > len(NEW):
                engine.release(turns.pop(i))
            else:
                turns[i] = engine.extend(ticket, NEW[len(outs[i]) - 1], **limits)
    while not engine.is_idle:
        engine.step()
    assert engine.runner.num_held_pages == engine.scheduler.reserved == 0
    return outs


def assert_same_turns(waits, ahead):
    for i, turns in waits.items():
        for one, other in zip(turns, ahead[i], strict=True):
            for field in ("tokens", "logprobs"):
                np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
            assert one.finish_reason == other.finish_reason
            jax.tree.map(np.testing.assert_array_equal, one.trace, other.trace)
            for field in ("evicted", "compactions"):
                assert getattr(one.samples[0], field) == getattr(other.samples[0], field)


@pytest.mark.parametrize("name", KEPT)
def test_kept_rows_go_on_as_after_an_engine_that_waits(model, name):
    waits, ahead = (converse(model, KEPT[name], ahead) for ahead in (False, True))
    reasons = [out.finish_reason[0] for turns in waits.values() for out in turns]
    assert {"stop", "length"} == set(reasons)
    assert_same_turns(waits, ahead)


def test_kept_rows_run_ahead(model):
    engine = Engine(model, max_running=2, max_slots=64, chunk=8, page_size=4, ahead=True)
    done = watch(engine)
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, jkv.streaming_llm(12, interval=8), SAMPLED, max_new_tokens=32, stop_ids=(), keep=True)
    engine.run()
    assert "".join(done) == "CDCDCCRDCCRDRR"


def sleep(engine):
    engine.sleep()
    engine.wake()


def swap_out(engine):
    engine.scheduler.kept_rows.swap_out()


@pytest.mark.parametrize("between", [sleep, swap_out])
@pytest.mark.parametrize("name", ["full", "r_kv"])
def test_kept_rows_that_ran_ahead_survive_what_happens_between_chunks(model, name, between):
    waits, ahead = converse(model, KEPT[name], False), converse(model, KEPT[name], True, between)
    assert_same_turns(waits, ahead)


def test_new_weights_and_cancelled_turns_keep_what_was_read(model):
    other = jax.tree.map(lambda leaf: leaf * 1.01, model.params)
    policy, knobs = KEPT["r_kv"], {"max_new_tokens": 40, "stop_ids": ()}

    def play(ahead):
        engine = Engine(model, max_running=2, max_slots=128, chunk=8, page_size=4, ahead=ahead, return_trace=True)
        tickets = [engine.submit(prompt, policy, SAMPLED, keep=True, **knobs) for prompt in PROMPTS[:2]]
        engine.run()
        later = [engine.extend(ticket, NEW[0], **knobs) for ticket in tickets]
        for _ in range(2 + ahead):  # the same chunks are read
            engine.step()
        if ahead:
            assert engine._flight is not None
        engine.cancel(later[0])
        if not ahead:  # one more chunk with the old weights: the one that the other engine has dispatched
            engine.step()
        engine.update(other)
        engine.run()
        outs = [engine.result(ticket) for ticket in later]
        engine.release(later[1])
        assert engine.runner.num_held_pages == engine.scheduler.reserved == 0
        return outs

    waits, ahead = play(False), play(True)
    assert [out.finish_reason[0] for out in ahead] == ["cancelled", "length"]
    assert ahead[1].transcripts[0].versions.tolist() == waits[1].transcripts[0].versions.tolist()
    assert_same_turns(dict(enumerate([[out] for out in waits])), dict(enumerate([[out] for out in ahead])))


@pytest.mark.parametrize("name", ["full", "r_kv"])
def test_a_reset_ends_turns_that_ran_ahead_and_keeps_those_on_the_host(model, name):
    knobs = {"max_new_tokens": 30, "stop_ids": ()}

    def start(ahead):
        engine = Engine(model, max_running=1, max_slots=128, chunk=8, page_size=4, ahead=ahead)
        tickets = [engine.submit(PROMPTS[i], KEPT[name], SAMPLED, keep=True, **knobs) for i in range(2)]
        engine.run()
        return engine, tickets

    engine, tickets = start(False)
    expected = engine.extend(tickets[1], NEW[0], **knobs)
    engine.run()
    expected = engine.result(expected)
    engine, tickets = start(True)
    begun = engine.extend(tickets[0], NEW[0], **knobs)
    engine.step()
    engine.step()
    waiting = engine.extend(tickets[1], NEW[0], **knobs)
    kept = engine.tickets[waiting][0].resumes
    engine.scheduler.kept_rows.swap_out()
    engine.step()
    assert kept.row.swapped is not None
    engine.reset()
    engine.run()
    assert engine.result(begun).finish_reason == ["error"]
    out = engine.result(waiting)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.logprobs, expected.logprobs)
