"""Prompts enter their rows between the chunks of the rows that decode: nobody waits for them, and no token depends on it."""

import itertools

import jax
import numpy as np
import pytest

import jkv
from jkv.engine import chunk_inputs, filling
from jkv.model.weight_shapes import init_params
from tests.engine.test_engine import play
from tests.support.faults import with_failing_programs
from tests.support.mixes import PROMPTS, Expected, assert_engine_is_consistent, make_engine
from tests.support.simulator import ROW, Schedule
from tests.support.soak import soak

PIECE = 8
LONG = (np.arange(60) * 7 % 31).tolist()  # eight pieces
SHORT = [5, 1, 9]
R_KV = jkv.r_kv(budget=16, interval=8, window=4)
FREE = {"stop_ids": (), "sampling": jkv.Sampling(seed=3)}


@pytest.fixture(scope="module", autouse=True)
def short_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_inputs, "OF_CPU", chunk_inputs.PrefillPrograms((PIECE,), 8))
        yield


def make(model, prefill_tokens=PIECE, rows=3, pages=3 * ROW, **options):
    return make_engine(model, rows, pages, prefill_tokens=prefill_tokens, **options)


def with_a_row_that_decodes(engine):
    """Its ticket; its prompt is in its row."""
    ticket = engine.submit(SHORT, R_KV, max_new_tokens=61, **FREE)
    engine.step()
    return ticket


def is_filling(engine):
    return [sample.is_filling for sample in engine.scheduler.running.values()]


def results(engine, tickets):
    engine.run()
    assert_engine_is_consistent(engine)
    outs = [engine.result(ticket) for ticket in tickets]
    engine.step()
    assert engine.runner.num_held_pages == 0
    return [(out.tokens.tolist(), out.logprobs.tolist()) for out in outs]


@pytest.mark.parametrize("ahead", [False, True])
def test_between_two_chunks_at_most_so_many_tokens_are_prefilled_while_rows_decode(model, ahead):
    engine = make(model, 2 * PIECE, ahead=ahead)
    first = with_a_row_that_decodes(engine)
    log, programs = [], engine.runner.programs
    chunk, decode = programs.prefill_chunk, programs.decode_chunk

    class Logged:
        def __getattr__(self, name):
            return getattr(programs, name)

        def prefill_chunk(self, *args, **options):
            log.append(int(args[4][0]))
            return chunk(*args, **options)

        def decode_chunk(self, params, state, inputs, carried, num_steps, *options):
            log.append((num_steps, int(np.sum(np.asarray(inputs.remaining) > 0))))
            return decode(params, state, inputs, carried, num_steps, *options)

    engine.runner.programs = Logged()
    second = engine.submit(LONG, max_new_tokens=4, **FREE)
    engine.run()
    pieces = [entry for entry in log if isinstance(entry, int)]
    assert sum(pieces) == len(LONG)
    chunks = [i for i, entry in enumerate(log) if isinstance(entry, tuple)]
    between = [sum(log[i + 1 : j]) for i, j in itertools.pairwise(chunks)]
    assert max(between) <= 2 * PIECE
    waiting = [log[i] for i in chunks if i < max(i for i, entry in enumerate(log) if isinstance(entry, int))]
    assert len(waiting) >= 2
    assert all(steps <= filling.STEPS and rows == 1 for steps, rows in waiting)  # the other row decodes on
    assert [engine.result(ticket).lengths[0] for ticket in (first, second)] == [61, 4]


@pytest.mark.rounding
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", [None, R_KV, jkv.h2o(budget=14)], ids=["full", "r_kv", "h2o"])
def test_tokens_are_the_same_bit_for_bit_at_any_pace(model, policy, ahead):
    def run(prefill_tokens):
        engine = make(model, prefill_tokens, ahead=ahead, return_trace=True)
        tickets = [with_a_row_that_decodes(engine)]
        tickets += [
            engine.submit(LONG, policy, max_new_tokens=4, n=2, **FREE),
            engine.submit(PROMPTS[4], policy, max_new_tokens=20),
        ]
        engine.step()
        assert any(is_filling(engine)) == (prefill_tokens == PIECE)
        return results(engine, tickets)

    assert run(PIECE) == run(1 << 20)


@pytest.mark.parametrize("ahead", [False, True])
def test_random_mixes_change_no_request_and_lose_no_page(model, ahead):
    expected, rng = Expected(model), np.random.default_rng(2)
    engine = make(model, rows=4, pages=ROW + ROW // 2, return_trace=True, ahead=ahead)
    for _ in range(12):
        play(engine, rng, expected)
        assert_engine_is_consistent(engine)
        assert engine.runner.num_held_pages == 0
    soak(engine, expected, rng, operations=200, check_every=5)
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_schedules_of_faults_lose_nothing(model, seed):
    Schedule(model, Expected(model), seed, prefill_tokens=PIECE).run()


@pytest.mark.parametrize("n", [1, 2])
def test_a_cancelled_prompt_is_dropped_on_the_way_and_others_go_on(model, n):
    engine = make(model)
    alone = results(engine, [with_a_row_that_decodes(engine)])
    first = with_a_row_that_decodes(engine)
    tickets = [engine.submit(LONG, max_new_tokens=4, n=n, **FREE)]
    engine.step()
    assert any(is_filling(engine))
    engine.cancel(tickets[0])
    before = engine.stats.prefills
    engine.step()
    assert not any(is_filling(engine))
    assert engine.stats.prefills == before
    assert results(engine, [first]) == alone
    assert engine.result(tickets[0]).finish_reason == ["cancelled"] * n


def test_a_prompt_submitted_as_its_cancelled_group_is_dropped_is_prefilled_anew(model):
    """The callback of another row submits it in the turn that drops the group, before the rows are released."""
    asked = {"max_new_tokens": 4, "n": 2, **FREE}
    engine = make(model)
    alone = results(engine, [engine.submit(LONG, **asked)])
    engine, again = make(model), []

    def submit_again(event):
        if not any(is_filling(engine)) and not again and group:
            again.append(engine.submit(LONG, **asked))

    group = []
    engine.submit(SHORT, R_KV, max_new_tokens=61, on_tokens=submit_again, **FREE)
    engine.step()
    group.append(engine.submit(LONG, **asked))
    engine.step()
    assert any(is_filling(engine))
    engine.cancel(group[0])
    engine.step()
    assert again
    assert results(engine, again) == alone


def test_the_first_of_a_group_may_be_cancelled_while_the_prompt_of_all_is_filled(model):
    """The prompt is longer than the budget, so it must still be compacted for the others."""

    def start(prefill_tokens):
        engine = make(model, prefill_tokens, rows=4)
        first = with_a_row_that_decodes(engine)
        group = [engine.submit(LONG, R_KV, max_new_tokens=12, first_sample=i, **FREE) for i in range(3)]
        return engine, first, group

    engine, first, group = start(1 << 20)
    expected = results(engine, [first, *group])
    engine, first, group = start(PIECE)
    engine.step()
    assert is_filling(engine) == [False, True, True, True]
    engine.cancel(group[0])
    assert results(engine, [first, *group[1:]]) == [expected[0], *expected[2:]]


@pytest.mark.parametrize("event", ["sleep", "reset", "update", "failure"])
def test_what_comes_while_a_prompt_is_filled_changes_no_token(model, event):
    def run(prefill_tokens):
        engine = make(model, prefill_tokens)
        tickets = [with_a_row_that_decodes(engine), engine.submit(LONG, max_new_tokens=4, **FREE)]
        engine.step()
        if event == "sleep":
            engine.sleep()
            assert not engine.runner.filling.queue
            engine.wake()
        elif event == "reset":
            engine.reset()
            assert not engine.runner.filling.queue
        elif event == "failure":
            with_failing_programs(engine).fail(2, False)
            engine.run()
        else:
            engine.update(jax.tree.map(lambda leaf: leaf, model.params))
        return results(engine, tickets)

    assert run(PIECE) == run(1 << 20)


def test_a_prompt_on_its_way_ends_under_the_weights_that_began_it(model):
    engine = make(model)
    with_a_row_that_decodes(engine)
    ticket = engine.submit(LONG, max_new_tokens=4, **FREE)
    engine.step()
    engine.update(init_params(model.config, jax.random.key(3)))
    (sample,) = engine.tickets[ticket]
    assert not sample.is_filling
    assert sample.row.version == 0
    engine.run()
    assert engine.result(ticket).lengths[0] == 4


def test_prompts_are_prefilled_at_once_where_no_row_decodes(model):
    engine = make(model)
    engine.submit(LONG, max_new_tokens=4, **FREE)
    engine.step()
    assert is_filling(engine) == [False] or not is_filling(engine)


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", 1 << 25])
def test_bad_numbers_are_refused(value):
    with pytest.raises((ValueError, TypeError), match="prefill_tokens"):
        jkv.EngineOptions(prefill_tokens=value)


def test_rows_decode_as_soon_as_they_are_filled_in_the_order_of_arrival(model):
    """On an idle engine too: nobody's first token waits for the last prompt."""
    engine, pieces, firsts = make(model), 0, {}
    chunk = engine.runner.programs.prefill_chunk

    class Counted:
        def __getattr__(self, name):
            return getattr(programs, name)

        def prefill_chunk(self, *args, **options):
            nonlocal pieces
            pieces += 1
            return chunk(*args, **options)

    programs, engine.runner.programs = engine.runner.programs, Counted()
    prompts = [[first, *LONG[:39]] for first in (1, 2, 3)]  # of five pieces each
    tickets = [engine.submit(prompt, max_new_tokens=12, **FREE) for prompt in prompts]
    while not engine.is_idle:
        for event in engine.step():
            firsts.setdefault(event.ticket, pieces)
    assert list(firsts) == tickets
    assert [firsts[ticket] for ticket in tickets] == [5, 10, 15]


@pytest.mark.parametrize(("first_chunk", "tokens"), [(None, [8, 8, 8, 8]), (2, [2, 8, 8, 8, 6])])
def test_the_first_chunk_of_a_row_may_be_short(model, first_chunk, tokens):
    engine = make(model, first_chunk=first_chunk)
    engine.submit(SHORT, max_new_tokens=32, **FREE)
    counts = [len(event.tokens) for event in engine.stream() if event.tokens]
    assert counts == tokens


def test_a_first_chunk_of_another_size_is_refused(model):
    with pytest.raises(jkv.InputError, match="first_chunk must be one of") as error:
        make(model, first_chunk=3)
    assert (error.value.field, error.value.code) == ("first_chunk", "out_of_range")
