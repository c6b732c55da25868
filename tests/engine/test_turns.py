"""Turns of a conversation: a kept row goes on with new tokens alone, and gives what a row that had drawn them would give."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv.engine import prefill, turns
from jkv.policies import POLICIES
from tests.policies.test_conformance import build
from tests.support.faults import DeviceError, with_failing_programs
from tests.support.mixes import BreakingTokenizer, assert_engine_is_consistent

RNG = np.random.default_rng(5)
PROMPT = RNG.integers(4, 30, 21).tolist()
NEW = [RNG.integers(4, 30, count).tolist() for count in (11, 1, 40)]  # less than an interval, one token, several intervals
LIMITS = (13, 19, 7, 20)  # new tokens of each turn
FREE = {"stop_ids": ()}
MAX_SLOTS, PAGE = 192, 4
ROW = 2 * 2 * MAX_SLOTS // PAGE
R_KV = jkv.r_kv(budget=24, interval=16, window=4)
FULL = jkv.full()
KNOBS = {"max_slots": MAX_SLOTS, "page_size": PAGE, "chunk": 8, "poison": True}
ALL = {name: build(name) for name in POLICIES}
CACHE = {"interval": 16, "positions": "cache"}
REFUSED = {name: policy for name, policy in ALL.items() if policy.share is not None}
REFUSED |= {"moved sinks": jkv.streaming_llm(budget=24, **CACHE)}
KEPT = {name: policy for name, policy in ALL.items() if name not in REFUSED}


@pytest.fixture(scope="module", autouse=True)
def short_programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "SIZES", (4, 16))
        yield


@pytest.fixture(scope="module")
def breaking(model):
    return dataclasses.replace(model, tokenizer=BreakingTokenizer())


def make(model, rows=2, pages=2 * ROW, policies=(R_KV, FULL), **options):
    return jkv.Engine(model, max_running=rows, num_pages=pages, policies=list(policies), **KNOBS, **options)


def converse(engine, policy, between=lambda engine: None, prompt=PROMPT, new=NEW, limits=LIMITS, **settings):
    """The result of each turn; `between` two turns, something else happens."""
    ticket = engine.submit(prompt, policy=policy, max_new_tokens=limits[0], keep=True, **FREE | settings)
    engine.run()
    outs = [engine.result(ticket)]
    for tokens, limit in zip(new, limits[1:], strict=True):
        between(engine)
        ticket = engine.extend(ticket, tokens, max_new_tokens=limit, **FREE)
        engine.run()
        outs.append(engine.result(ticket))
        assert_engine_is_consistent(engine)
    engine.release(ticket)
    assert engine.runner.num_held_pages == engine.scheduler.conversations.num_pages == len(engine.scheduler.conversations) == 0
    return outs


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        if one.trace is not None:
            np.testing.assert_array_equal(one.trace.end, other.trace.end)


def replay(model, out):
    """How far the log-probabilities of all turns are from their replay by the last turn's trace."""
    (whole,) = out.transcripts
    count = len(whole.tokens) - 1
    scored = jkv.score(
        model, whole.tokens[None, 1:], out.trace, prompts=[whole.tokens[:1]], lengths=[count], sampling=out.sampling[0]
    )
    return np.abs(np.asarray(scored.logprobs)[0] - whole.logprobs[1:])[whole.loss_mask[1:]]


# Every policy.


@pytest.fixture(scope="module")
def engines(breaking):
    """For a policy: an engine that may have it."""
    made = {}

    def of(policy, **options):
        key = policy, *options.items()
        if key not in made:
            made.clear()
            made[key] = make(breaking, 2, 2 * ROW, [policy], return_trace=True, **options)
        return made[key]

    return of


@pytest.mark.rounding
@pytest.mark.parametrize("name", KEPT)
def test_the_trace_of_all_turns_replays_what_the_engine_computed(breaking, engines, name):
    outs = converse(engines(KEPT[name]), KEPT[name])
    difference = replay(breaking, outs[-1])
    assert len(difference) == sum(LIMITS)
    assert np.percentile(difference, 99) <= 1e-5
    assert difference.max() <= 1e-4
    for out in outs:  # each turn by itself, as any result
        scored = jkv.score(breaking, out, out.trace)
        assert np.abs(np.asarray(scored.logprobs) - out.logprobs).max() <= 1e-4


@pytest.mark.rounding
@pytest.mark.parametrize("name", [name for name, policy in KEPT.items() if not (policy.steer or policy.read)])
def test_new_tokens_compress_as_tokens_that_the_row_had_drawn(engines, name):
    """Schedules count them all the same, so compactions drop the same slots: one request is forced to draw the conversation."""
    engine = engines(KEPT[name])
    outs = converse(engine, KEPT[name], sampling=jkv.Sampling(seed=2))
    (whole,) = outs[-1].transcripts
    forced = whole.tokens[len(PROMPT) :]
    ticket = engine.submit(PROMPT, policy=KEPT[name], forced_tokens=forced.tolist())
    engine.run()
    out = engine.result(ticket)
    is_drawn = whole.loss_mask[len(PROMPT) :]
    np.testing.assert_allclose(out.logprobs[0][is_drawn], whole.logprobs[len(PROMPT) :][is_drawn], atol=2e-5)
    same = out.trace.end[0] == outs[-1].trace.end[0]
    # The last step of the forced request is followed by no compaction, nor is the last turn's.
    assert same.all()
    assert outs[-1].samples[0].compactions == out.samples[0].compactions


@pytest.mark.parametrize("name", KEPT)
def test_a_row_that_was_in_host_memory_gives_the_same_bits(engines, name):
    def sleep(engine):
        engine.sleep()
        engine.wake()

    engine = engines(KEPT[name])
    assert_same_bits(converse(engine, KEPT[name], sleep), converse(engine, KEPT[name]))


@pytest.mark.rounding
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_rows_of_quantised_pages_go_on(model, kv_dtype):
    def sleep(engine):
        engine.sleep()
        engine.wake()

    engine = make(model, kv_dtype=kv_dtype, return_trace=True)
    outs = converse(engine, R_KV)
    in_floats = dataclasses.replace(outs[-1], trace=outs[-1].trace._replace(kv_format=None))
    assert np.percentile(replay(model, outs[-1]), 90) <= 1e-5  # a rounding may move a number to the next code, as in one turn
    assert np.percentile(replay(model, in_floats), 50) > 1e-4
    assert_same_bits(converse(engine, R_KV, sleep), outs)


@pytest.mark.parametrize("name", REFUSED)
def test_policies_that_cannot_go_on_are_refused_by_name(breaking, name):
    policy = REFUSED[name]
    engine = make(breaking, policies=[policy])
    with pytest.raises(ValueError, match=rf"keep=True needs a row that a later turn can continue; .*{policy.name[:8]}.*Leave"):
        engine.submit(PROMPT, policy=policy, keep=True)
    assert engine.is_idle


# What a turn is.


@pytest.mark.rounding
def test_a_full_cache_gives_what_the_whole_conversation_anew_gives(model):
    engine = make(model)
    outs = converse(engine, jkv.full(), sampling=jkv.Sampling(seed=3), request=8)
    for out in outs[1:]:
        ticket = engine.submit(
            out.prompts[0], max_new_tokens=len(out.tokens[0]), sampling=jkv.Sampling(seed=3), request=8, **FREE
        )
        engine.run()
        anew = engine.result(ticket)
        assert anew.tokens.tolist() == out.tokens.tolist()
        np.testing.assert_allclose(anew.logprobs, out.logprobs, atol=1e-5)


def test_a_transcript_has_every_token_with_its_mask(model):
    outs = converse(make(model), R_KV)
    (whole,) = outs[-1].transcripts
    parts, mask, log_probs = [PROMPT], [False] * len(PROMPT), [0.0] * len(PROMPT)
    for out, new in zip(outs, [*NEW, []], strict=True):
        parts += [out.tokens[0].tolist(), new]
        mask += [True] * len(out.tokens[0]) + [False] * len(new)
        log_probs += out.logprobs[0].tolist() + [0.0] * len(new)
    assert whole.tokens.tolist() == [token for part in parts for token in part]
    assert whole.loss_mask.tolist() == mask
    np.testing.assert_array_equal(whole.logprobs, np.float32(log_probs))
    assert set(whole.versions.tolist()) == {0}
    assert outs[-1].prompts[0].tolist() == whole.tokens[: -LIMITS[-1]].tolist()
    assert [out.samples[0].cached_tokens for out in outs] == [0, 34, 64, 72]
    assert outs[0].transcripts[0].tokens.tolist() == PROMPT + outs[0].tokens[0].tolist()


@pytest.mark.parametrize("policy", [jkv.full(), jkv.r_kv(budget=64, interval=16, window=4)], ids=lambda policy: policy.name)
def test_a_second_turn_prefills_its_new_tokens_alone(model, policy, monkeypatch):
    engine = jkv.Engine(model, max_running=1, max_slots=2048, page_size=16, policies=[policy])
    long = np.tile(RNG.integers(4, 30, 200), 10).tolist()
    ticket = engine.submit(long, policy=policy, max_new_tokens=5, keep=True, **FREE)
    engine.run()
    engine.result(ticket)
    counts, program = [], engine.runner.programs.prefill_chunk

    class Counting:
        def __getattr__(self, name):
            return getattr(original, name)

        def prefill_chunk(self, params, state, row, token, num_new, gate, **settings):
            counts.append(int(num_new[0]))
            return program(params, state, row, token, num_new, gate, **settings)

    original = engine.runner.programs
    monkeypatch.setattr(engine.runner, "programs", Counting())
    ticket = engine.extend(ticket, NEW[2][:20], max_new_tokens=3, **FREE)
    engine.run()
    assert engine.result(ticket).prompts[0].size == 2025
    assert sum(counts) == 20
    assert counts == ([16, 4] if policy.evict is None else [11, 9])  # a compaction is due after the 16th token


@pytest.mark.parametrize("name", ["r_kv", "streaming_llm", "h2o"])
def test_a_long_turn_holds_no_more_pages_than_its_policy_allows(breaking, engines, name):
    policy, held = KEPT[name], []
    engine = engines(policy)
    runner = engine.runner
    ticket = engine.submit(PROMPT, policy=policy, max_new_tokens=9, keep=True, **FREE)
    engine.run()
    with pytest.MonkeyPatch.context() as patch:
        append = turns.append

        def noting(*arguments):
            yield from append(*arguments)
            held.append(runner.num_held_pages)

        patch.setattr(turns, "append", noting)
        ticket = engine.extend(ticket, RNG.integers(4, 30, 100).tolist(), max_new_tokens=9, **FREE)
        engine.run()
    engine.release(ticket)
    engine.take([ticket])
    assert len(held) >= 100 // 16
    assert max(held) <= 4 * -(-(24 + 17) // PAGE), "the budget and a piece"


def test_each_sample_of_a_request_goes_on_by_itself(model):
    engine = make(model, 3, 3 * ROW)
    ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=13, n=3, sampling=jkv.Sampling(seed=1), keep=True, **FREE)
    engine.run()
    first = engine.result(ticket)
    later = [engine.extend(ticket, NEW[0], sample=i, max_new_tokens=9, **FREE) for i in (2, 0)]
    engine.run()
    for i, number in zip((2, 0), later, strict=True):
        out = engine.result(number)
        engine.release(number)
        alone = engine.submit(
            PROMPT, policy=R_KV, max_new_tokens=13, sampling=jkv.Sampling(seed=1), first_sample=i, keep=True, **FREE
        )
        engine.run()
        alone = engine.extend(alone, NEW[0], max_new_tokens=9, **FREE)
        engine.run()
        assert out.transcripts[0].tokens[21:34].tolist() == first.tokens[i].tolist()
        assert_same_bits([out], [engine.result(alone)])
        engine.release(alone)
    assert engine.runner.num_held_pages > 0, "the sample that nobody continued"
    engine.release(ticket)
    assert engine.runner.num_held_pages == 0


def test_a_turn_may_have_other_settings_and_end_by_a_stop_id(model):
    engine = make(model)
    ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=6, sampling=jkv.Sampling(seed=1), keep=True, **FREE)
    engine.run()
    drawn = engine.extend(ticket, NEW[0], max_new_tokens=20, sampling=jkv.Sampling(temperature=0.0), **FREE)
    engine.run()
    out = engine.result(drawn)
    assert out.sampling[0].temperature == 0
    stop = int(out.tokens[0, 4])
    at = out.tokens[0].tolist().index(stop)
    ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=6, sampling=jkv.Sampling(seed=1), keep=True, **FREE)
    engine.run()
    ticket = engine.extend(
        ticket, NEW[0], max_new_tokens=20, sampling=jkv.Sampling(temperature=0.0), stop_ids=[stop], keep=False
    )
    engine.run()
    stopped = engine.result(ticket)
    assert stopped.finish_reason == ["stop"]
    assert stopped.tokens[0].tolist() == out.tokens[0, : at + 1].tolist()
    engine.release(drawn)
    assert engine.runner.num_held_pages == 0, "keep=False leaves no row"


def test_rows_that_run_ahead_keep_the_same(model):
    """A row that ends by a stop id must not be compacted by a chunk that was planned past its end."""
    ends = {"stop_ids": (3, 9, 14, 20)}
    outs = []
    for ahead in (False, True):
        engine, found = make(model, 2, ahead=ahead), []
        for seed in range(6):
            ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=40, sampling=jkv.Sampling(seed=seed), keep=True, **ends)
            engine.submit(PROMPT, policy=R_KV, max_new_tokens=40, **FREE)
            engine.run()
            ticket = engine.extend(ticket, NEW[0], max_new_tokens=12, **ends)
            engine.run()
            found.append(engine.result(ticket))
        outs.append(found)
    assert any(out.transcripts[0].tokens.size < len(PROMPT) + 40 for out in outs[0])
    assert_same_bits(*outs)


# Pressure, failures, weights.


def test_kept_rows_go_to_the_host_before_a_row_is_preempted(model):
    engine = make(model, 2, ROW)
    expected = converse(make(model, 2, 4 * ROW), R_KV)

    def crowd(engine):
        tickets = [engine.submit(PROMPT, max_new_tokens=160, **FREE)]
        while not engine.is_idle:
            engine.step()
            assert_engine_is_consistent(engine)
        assert engine.scheduler.conversations.num_pages == 0, "it was swapped out"
        assert engine.runner.num_held_pages == 0
        assert engine.stats.preemptions == 0
        engine.take(tickets)

    assert_same_bits(converse(engine, R_KV, crowd), expected)


def test_the_least_recently_used_row_goes_first(model):
    engine = make(model, 1, ROW)
    tickets = [engine.submit(PROMPT, policy=R_KV, max_new_tokens=3, keep=True, **FREE) for _ in range(3)]
    engine.run()
    kept = [engine.scheduler.conversations.find(ticket, 0) for ticket in tickets]
    assert engine.scheduler.conversations.swap_out()
    engine.release(99)  # settles what is decided
    assert [one.swapped is not None for one in kept] == [True, False, False]
    later = engine.extend(tickets[1], NEW[0], max_new_tokens=3, **FREE)  # used: the third goes next
    assert engine.scheduler.conversations.swap_out()
    engine.run()
    assert [one.swapped is not None for one in kept] == [True, False, True]
    for ticket in (tickets[0], later, tickets[2]):
        engine.release(ticket)
    assert engine.runner.num_held_pages == 0


def test_a_turn_is_preempted_and_comes_back_bit_for_bit(model):
    expected = converse(make(model, 2, 4 * ROW), jkv.full())

    def crowd(engine):
        engine.submit(PROMPT, max_new_tokens=120, **FREE)
        for _ in range(4):
            engine.step()

    engine = make(model, 2, ROW)
    assert_same_bits(converse(engine, jkv.full(), crowd), expected)
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancelled_turn_frees_the_row(model, steps):
    engine = make(model)
    ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=5, keep=True, **FREE)
    engine.run()
    later = engine.extend(ticket, NEW[0], max_new_tokens=40, **FREE)
    for _ in range(steps):
        engine.step()
    engine.cancel(later)
    with pytest.raises(ValueError, match="ended by 'cancelled'"):
        engine.extend(later, NEW[0])
    engine.run()
    assert engine.runner.num_held_pages == engine.scheduler.reserved == 0
    out = engine.result(later)
    assert out.finish_reason == ["cancelled"]
    assert out.transcripts[0].tokens.size == 21 + 5 + 11 + out.lengths[0]


def test_new_weights_go_on_with_the_keys_of_the_old_ones(model):
    engine = make(model)
    other = jkv.testing.tiny_model(seed=9).params
    ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=5, keep=True, **FREE)
    engine.run()
    engine.update(other)
    ticket = engine.extend(ticket, NEW[0], max_new_tokens=6, **FREE)
    engine.run()
    (whole,) = engine.result(ticket).transcripts
    assert whole.versions.tolist() == [0] * 26 + [1] * 17
    engine.release(ticket)


def test_a_reset_loses_rows_in_the_pool_and_keeps_those_in_host_memory(model):
    engine = make(model)
    expected = converse(make(model), R_KV, new=NEW[:1], limits=LIMITS[:2])
    tickets = [engine.submit(PROMPT, policy=R_KV, max_new_tokens=13, keep=True, **FREE) for _ in range(4)]
    engine.run()
    engine.scheduler.conversations.swap_out()
    engine.scheduler.conversations.swap_out()
    engine.release(99)
    waiting = engine.extend(tickets[1], NEW[0], max_new_tokens=19, **FREE)
    started = engine.extend(tickets[3], NEW[0], max_new_tokens=19, **FREE)
    engine.reset()
    assert engine.runner.num_held_pages == 0
    with pytest.raises(ValueError, match="the pool was lost"):
        engine.extend(tickets[2], NEW[0])
    again = engine.extend(tickets[0], NEW[0], max_new_tokens=19, **FREE)
    engine.run()
    assert_same_bits([engine.result(waiting)], expected[1:])
    assert_same_bits([engine.result(again)], expected[1:])
    out = engine.result(started)
    assert out.finish_reason == ["error"]
    assert "Submit the whole conversation again" in str(out.samples[0].error)
    engine.release(waiting)
    engine.release(again)
    assert engine.runner.num_held_pages == engine.scheduler.reserved == 0


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("count", range(0, 12, 2))
def test_whatever_program_fails_a_reset_repairs_the_engine(model, count, is_before):
    engine = make(model)
    failing = with_failing_programs(engine)
    tickets = [engine.submit(PROMPT, policy=R_KV, max_new_tokens=13, keep=True, **FREE) for _ in range(2)]
    engine.run()
    engine.scheduler.conversations.swap_out()
    engine.release(99)
    later = [engine.extend(ticket, NEW[2], max_new_tokens=19, **FREE) for ticket in tickets]
    failing.fail(count, is_before)
    with pytest.raises(DeviceError):
        engine.run()
    engine.reset()
    engine.run()
    expected = converse(make(model), R_KV, new=NEW[2:], limits=(13, 19))
    for ticket in later:
        out = engine.result(ticket)
        assert out.finish_reason[0] in ("error", "length")
        if out.finish_reason == ["length"]:
            assert_same_bits([out], expected[1:])
        engine.release(ticket)
    assert engine.runner.num_held_pages == engine.scheduler.reserved == 0


# What is refused.


@pytest.fixture(scope="module")
def shared(breaking):
    return make(breaking)


def test_a_ticket_without_a_row_is_refused_by_the_reason(shared):
    engine = shared
    plain = engine.submit(PROMPT, policy=R_KV, max_new_tokens=3, **FREE)
    kept = engine.submit(PROMPT, policy=R_KV, max_new_tokens=3, keep=True, **FREE)
    with pytest.raises(ValueError, match=f"ticket {kept} still runs. Wait"):
        engine.extend(kept, [5])
    engine.run()
    with pytest.raises(ValueError, match=f"ticket {plain} was not. Submit it with keep=True"):
        engine.extend(plain, [5])
    with pytest.raises(ValueError, match="sample must be one of the request's 1; got 1"):
        engine.extend(kept, [5], sample=1)
    with pytest.raises(ValueError, match="it was never given, or its request was not submitted with keep=True"):
        engine.extend(77, [5])
    for wrong in ("a", 1.5, None, True):
        with pytest.raises(ValueError, match="ticket must be a number"):
            engine.extend(wrong, [5])
    later = engine.extend(kept, [5], max_new_tokens=2, **FREE)
    with pytest.raises(ValueError, match="it was extended, and the conversation goes on in the later ticket"):
        engine.extend(kept, [5])
    engine.run()
    engine.release(later)
    with pytest.raises(ValueError, match="it was closed"):
        engine.extend(later, [5])
    assert engine.runner.num_held_pages == 0


def fail(event):
    raise KeyError("callback")


def test_a_failed_request_leaves_no_row(shared):
    ticket = shared.submit(PROMPT, policy=R_KV, max_new_tokens=30, keep=True, on_tokens=fail, **FREE)
    shared.run()
    with pytest.raises(ValueError, match=r"finished by stop or length; that of ticket .* ended by 'error'"):
        shared.extend(ticket, [5])
    assert shared.runner.num_held_pages == 0


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "at least one token id, and no more than the model's"),
        ("text", "Encode texts"),
        (7, "flat list"),
        (None, "flat list"),
        ([[1, 2]], "Flatten it"),
        ([[1], [2, 3]], "Flatten it"),
        ([1.5], "float64"),
        ([True], "bool"),
        ([-1], r"must lie in \[0, .*got -1"),
        ([10**30], r"must lie in \[0, "),
        ([5, 10**6], r"must lie in \[0, .*got 1000000"),
        (range(2**40), "no more than the model's"),
        ([5] * 100_000, "no more than the model's"),
    ],
)
def test_tokens_that_are_none_are_refused_and_the_row_stays(shared, tokens, words):
    ticket = shared.submit(PROMPT, policy=R_KV, max_new_tokens=3, keep=True, **FREE)
    shared.run()
    with pytest.raises(ValueError, match=words):
        shared.extend(ticket, tokens)
    for settings, words_of_settings in (
        ({"policy": jkv.full()}, "continues one sample with its policy; got policy"),
        ({"n": 2}, "got n=2"),
        ({"first_sample": 1}, "got first_sample=1"),
        ({"stop_strings": ["a"]}, "a stop string"),
        ({"max_new_tokens": 10**6}, "A conversation must fit the model's"),
        ({"keep": 1}, "keep must be"),
    ):
        with pytest.raises(ValueError, match=words_of_settings):
            shared.extend(ticket, [5], **settings)
    later = shared.extend(ticket, [5], max_new_tokens=2, **FREE)
    shared.run()
    shared.release(later)
    assert shared.runner.num_held_pages == 0


def test_a_conversation_beyond_the_engine_is_refused(shared):
    ticket = shared.submit(PROMPT, max_new_tokens=3, keep=True, **FREE)
    shared.run()
    with pytest.raises(ValueError, match=f"may fill {MAX_SLOTS} slots"):
        shared.extend(ticket, [5] * 160, max_new_tokens=20)
    shared.release(ticket)


def test_stop_strings_and_odd_keeps_are_refused_at_submit(shared):
    with pytest.raises(ValueError, match="end turns by stop_ids"):
        shared.submit(PROMPT, keep=True, stop_strings=["a"])
    with pytest.raises(ValueError, match="keep must be"):
        shared.submit(PROMPT, keep="yes")


# Random conversations.


def talk(model, engine, rng, num_conversations):
    """Random conversations at once, some cancelled, closed or asleep in between: each equals itself alone, no page is lost."""
    alone = make(model, 1, 4 * ROW, policies=engine.options.policies)
    policies = engine.options.policies
    plans = []
    for _ in range(num_conversations):
        limits = rng.integers(1, 24, int(rng.integers(1, 4)))
        new = [rng.integers(4, 30, int(rng.integers(1, 30))).tolist() for _ in limits[1:]]
        plans.append(
            (policies[rng.integers(len(policies))], rng.integers(4, 30, int(rng.integers(1, 30))).tolist(), new, limits)
        )
    open_turns, done = {}, {}
    todo = list(range(num_conversations))
    while todo or open_turns or not engine.is_idle:
        draw = rng.random()
        if todo and draw < 0.4:
            i = todo.pop()
            policy, prompt, _, limits = plans[i]
            open_turns[i] = engine.submit(prompt, policy=policy, max_new_tokens=int(limits[0]), keep=True, **FREE), 0
        elif open_turns and draw < 0.46:
            i = int(rng.choice(list(open_turns)))
            ticket, _ = open_turns.pop(i)
            engine.cancel(ticket)
            engine.release(ticket)
            engine.take([ticket])
        elif draw < 0.48:
            engine.sleep()
            engine.wake()
        else:
            engine.step()
            assert_engine_is_consistent(engine)
        for i, (ticket, turn) in list(open_turns.items()):
            if not engine.tickets[ticket][0].is_finished or rng.random() < 0.5:
                continue
            _, _, new, limits = plans[i]
            out = engine.result(ticket)
            if turn < len(new):
                later = engine.extend(ticket, new[turn], max_new_tokens=int(limits[turn + 1]), **FREE)
                open_turns[i] = later, turn + 1
            else:
                done[i] = out
                engine.release(ticket)
                del open_turns[i]
    for i, out in done.items():
        policy, prompt, new, limits = plans[i]
        expected = converse(alone, policy, prompt=prompt, new=new, limits=[int(limit) for limit in limits])[-1]
        (got,), (whole,) = out.transcripts, expected.transcripts
        assert got.tokens.tolist() == whole.tokens.tolist()
        np.testing.assert_allclose(got.logprobs, whole.logprobs, atol=1e-5)
    cached = engine.scheduler.prefix_cache.num_pages
    assert int(engine.runner.state.cache.pool.free_top) == engine.num_pages - cached
    assert (engine.scheduler.reserved, len(engine.scheduler.conversations)) == (cached, 0)
    return len(done)


@pytest.mark.parametrize("seed", range(4))
def test_random_conversations_in_a_tight_pool(model, seed):
    policies = [R_KV, jkv.full(), jkv.rpc(interval=16, window=4), jkv.h2o(budget=24), jkv.quest(budget=24, dense_layers=1)]
    engine = make(model, 3, ROW + ROW // 2, policies=policies, prefix_cache=seed % 2 == 1)
    assert talk(model, engine, np.random.default_rng(seed), 10) > 3
