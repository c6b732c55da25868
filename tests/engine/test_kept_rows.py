"""Kept rows under pressure, after failures and new weights, and in random conversations: no page and no token is lost."""

import numpy as np
import pytest

import jkv
from jkv.engine.row import Place
from jkv.engine.turns import next_request
from tests.support.faults import with_failing_programs
from tests.support.mixes import assert_engine_is_consistent
from tests.support.turns import FREE, LIMITS, NEW, PROMPT, R_KV, ROW, assert_same_bits, converse, make

pytestmark = pytest.mark.usefixtures("short_prefills")


# Pressure, failures, weights.


def test_kept_rows_go_to_the_host_before_a_row_is_preempted(model):
    engine = make(model, 2, ROW)
    expected = converse(make(model), R_KV)

    def crowd(engine):
        tickets = [engine.submit(PROMPT, max_new_tokens=160, **FREE)]
        while not engine.is_idle:
            engine.step()
            assert_engine_is_consistent(engine)
        assert engine.scheduler.kept_rows.num_pages == 0, "it was swapped out"
        assert engine.runner.num_held_pages == 0
        assert engine.stats.preemptions == 0
        engine.take(tickets)

    assert_same_bits(converse(engine, R_KV, crowd), expected)


def test_the_least_recently_used_row_goes_first(model):
    engine = make(model, 2, ROW)
    tickets = [engine.submit(PROMPT, policy=R_KV, max_new_tokens=3, keep=True, **FREE) for _ in range(3)]
    engine.run()
    kept = [engine.scheduler.kept_rows.find(ticket, 0) for ticket in tickets]
    assert engine.scheduler.kept_rows.swap_out()
    engine.release(99)  # settles what is decided
    assert [one.row.swapped is not None for one in kept] == [True, False, False]
    later = engine.extend(tickets[1], NEW[0], max_new_tokens=3, **FREE)  # used: the third goes next
    assert engine.scheduler.kept_rows.swap_out()
    engine.run()
    assert [one.row.swapped is not None for one in kept] == [True, False, True]
    for ticket in (tickets[0], later, tickets[2]):
        engine.release(ticket)
    assert engine.runner.num_held_pages == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", [jkv.full(), R_KV], ids=["full", "r_kv"])
def test_a_callback_extends_the_request_whose_end_it_sees(model, policy, ahead, caplog):
    """The row is still in the batch then; it is detached at the end of the step, for the turn that waits."""
    outs = []
    for in_callback in (False, True):
        engine, later = make(model, ahead=ahead), []

        def extend(ticket, engine=engine, later=later):
            later.append(engine.extend(ticket, NEW[0], max_new_tokens=5, **FREE))

        def called(event, extend=extend):
            if event.finish_reason:
                extend(event.ticket)

        settings = {"policy": policy, "max_new_tokens": 7, "keep": True, **FREE}
        ticket = engine.submit(PROMPT, on_tokens=called if in_callback else None, **settings)
        engine.submit(PROMPT[:5], max_new_tokens=40, **FREE)
        while not engine.is_idle:
            engine.step()
            assert_engine_is_consistent(engine)
        if not in_callback:
            extend(ticket)
            engine.run()
        outs.append([engine.result(ticket), engine.result(later[0])])
        engine.release(later[0])
        assert engine.runner.num_held_pages == 0
    for one, other in zip(*outs, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert "A step failed" not in caplog.text


def test_a_turn_that_a_callback_queues_may_be_cancelled_before_its_row_is_detached(model):
    engine = make(model)

    def called(event):
        if event.finish_reason:
            engine.cancel(engine.extend(event.ticket, NEW[0], max_new_tokens=5, **FREE))

    engine.submit(PROMPT, policy=R_KV, max_new_tokens=7, keep=True, on_tokens=called, **FREE)
    engine.run()
    assert_engine_is_consistent(engine)
    assert engine.runner.num_held_pages == 0


def test_a_row_of_another_ticket_is_refused_and_breaks_nothing(model):
    engine = make(model)
    tickets = [engine.submit(PROMPT, policy=R_KV, max_new_tokens=3, keep=True, **FREE) for _ in range(2)]
    engine.run()
    rows = [engine.scheduler.kept_rows.find(ticket, 0) for ticket in tickets]
    request = next_request(engine.model, rows[1], NEW[0], jkv.RequestOptions(max_new_tokens=3, stop_ids=()), keep=False)
    with pytest.raises(jkv.InputError, match="once"):
        engine.submit_turn(tickets[0], 0, rows[1], request)
    engine.run()
    for ticket in tickets:
        engine.release(ticket)
    assert engine.runner.num_held_pages == 0


def test_each_sample_has_its_own_reason_for_a_row_that_is_gone(model):
    engine = make(model)
    ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=3, n=2, keep=True, **FREE)
    engine.run()
    later = engine.extend(ticket, NEW[0], max_new_tokens=3, keep=False, **FREE)
    engine.release(ticket)
    for sample, reason in enumerate(("it was extended", "it was closed")):
        with pytest.raises(jkv.InputError, match=reason):
            engine.extend(ticket, NEW[0], sample=sample)
    engine.run()
    engine.take([later])
    assert engine.runner.num_held_pages == 0


def test_a_turn_is_preempted_and_comes_back_bit_for_bit(model):
    expected = converse(make(model), jkv.full())

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
    engine.scheduler.kept_rows.swap_out()
    engine.scheduler.kept_rows.swap_out()
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


@pytest.fixture(scope="module")
def undisturbed(model):
    return converse(make(model), R_KV, new=NEW[2:], limits=(13, 19))


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("count", range(0, 12, 2))
def test_whatever_program_fails_the_engine_is_repaired(model, undisturbed, count, is_before):
    engine = make(model)
    failing = with_failing_programs(engine)
    tickets = [engine.submit(PROMPT, policy=R_KV, max_new_tokens=13, keep=True, **FREE) for _ in range(2)]
    engine.run()
    engine.scheduler.kept_rows.swap_out()
    engine.release(99)
    later = [engine.extend(ticket, NEW[2], max_new_tokens=19, **FREE) for ticket in tickets]
    failing.fail(count, is_before)
    engine.run()
    assert failing.failing is None
    for ticket in later:
        out = engine.result(ticket)
        assert out.finish_reason[0] in ("error", "length")
        if out.finish_reason == ["length"]:
            assert_same_bits([out], undisturbed[1:])
        engine.release(ticket)
    assert engine.runner.num_held_pages == engine.scheduler.reserved == 0


def test_with_copies_no_failed_program_loses_a_row(model, undisturbed):
    """Turns whose rows were in the pool, in a batch with a third that waits, start again wherever the failure comes."""
    engine = make(model, copy_kept=True)
    failing = with_failing_programs(engine)
    for count in range(14):
        tickets = [engine.submit(PROMPT, policy=R_KV, max_new_tokens=13, keep=True, **FREE) for _ in range(3)]
        engine.run()
        conversations = engine.scheduler.kept_rows
        assert len(conversations.at(Place.POOL)) == 3
        assert conversations.host_bytes > 0
        if count % 2:  # one of them has its copy alone
            conversations.swap_out()
        later = [engine.extend(ticket, NEW[2], max_new_tokens=19, **FREE) for ticket in tickets]
        failing.fail(count, count % 3 == 0)
        engine.run()
        assert failing.failing is None
        for ticket in later:
            assert_same_bits([engine.result(ticket)], undisturbed[1:])
            engine.release(ticket)
        assert engine.runner.num_held_pages == engine.scheduler.reserved == conversations.host_bytes == 0
        assert not conversations.dropped["lost"]


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


# Random conversations.


def talk(model, engine, rng, num_conversations):
    """Random conversations at once, some cancelled, closed or asleep in between: each equals itself alone, no page is lost."""
    policies = engine.options.policies
    alone = make(model, 3, ROW + ROW // 2, policies=policies)
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
    assert (engine.scheduler.reserved, len(engine.scheduler.kept_rows)) == (cached, 0)
    return len(done)


@pytest.mark.parametrize("seed", range(4))
def test_random_conversations_in_a_tight_pool(model, seed):
    policies = [R_KV, jkv.full(), jkv.rpc(interval=16, window=4), jkv.h2o(budget=24), jkv.quest(budget=24, dense_layers=1)]
    pace = {"prefill_tokens": 4 if seed > 1 else None}  # piece by piece, while other rows decode
    engine = make(model, 3, ROW + ROW // 2, policies=policies, prefix_cache=seed % 2 == 1, **pace)
    assert talk(model, engine, np.random.default_rng(seed), 10) > 3
