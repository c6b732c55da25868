"""What a row has outside of the pool, rings of windows and recurrent states, goes wherever the row goes."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv.testing import TINY, TinyTokenizer, tiny_model
from tests.support import gemma
from tests.support.mixes import assert_engine_is_consistent
from tests.support.recurrent import recurrent_model

PROMPT, OTHER, MORE = list(range(1, 22)), [4, 4, 9], [9, 8, 7, 6, 5, 4, 5, 6]
MODELS = {
    "windows": tiny_model(1, dataclasses.replace(TINY, num_layers=4, window=6, window_layers=(0, 2)), TinyTokenizer()),
    "states": recurrent_model(),
    "heads-by-group": gemma.random_model(gemma.GEMMA4, TinyTokenizer()),
    "sharing": gemma.random_model(gemma.SHARING, TinyTokenizer()),
}
POLICIES = {"full": jkv.full(), "r_kv": jkv.r_kv(budget=24, interval=8, window=4)}

models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def assert_same(one, other):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)


@models
def test_preempted_and_forked_rows_come_back_bit_for_bit(model):
    def run_in(num_pages):
        engine = jkv.Engine(model, max_running=4, max_slots=64, page_size=4, num_pages=num_pages, poison=True)
        tickets = [engine.submit(PROMPT[i:], max_new_tokens=40, stop_ids=(), n=2) for i in range(3)]
        while not engine.is_idle:
            engine.step()
            assert_engine_is_consistent(engine)
        return engine.stats.preemptions, [engine.result(ticket) for ticket in tickets]

    heads = model.config.num_paged_layers * model.config.num_kv_heads
    (never, quiet), (often, tight) = run_in(heads * 96), run_in(heads * 27)
    assert often > never == 0
    for one, other in zip(quiet, tight, strict=True):
        assert_same(one, other)


@models
@pytest.mark.everyday(where=lambda model, name: name == "r_kv")
@pytest.mark.parametrize("name", POLICIES)
def test_a_row_sleeps_and_goes_on(model, name):
    def outcome(sleeps):
        engine = jkv.Engine(model, max_running=2, max_slots=64, page_size=4, policies=[POLICIES[name]], poison=True)
        ticket = engine.submit(PROMPT, policy=POLICIES[name], max_new_tokens=40, stop_ids=(), n=2)
        engine.step()
        if sleeps:
            engine.sleep()
            engine.wake()
        engine.run()
        return engine.result(ticket)

    assert_same(outcome(True), outcome(False))


@models
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_kept_row_continues_as_the_whole_conversation_would(model, is_swapped):
    engine = jkv.Engine(model, max_running=2, max_slots=128, page_size=4, return_trace=True, poison=True)
    ticket = engine.submit(PROMPT, max_new_tokens=13, stop_ids=(), keep=True)
    engine.run()
    first = engine.result(ticket)
    other = engine.submit(OTHER, max_new_tokens=20, stop_ids=())  # takes its row of the batch
    if is_swapped:
        assert engine.scheduler.kept_rows.swap_out()
    engine.run()
    engine.take([other])
    ticket = engine.extend(ticket, MORE, max_new_tokens=15, stop_ids=())
    engine.run()
    second = engine.result(ticket)
    whole = [*PROMPT, *first.tokens[0].tolist(), *MORE]
    settings = {"page_size": 4, "stop_ids": (), "progress": False, "max_new_tokens": 15}
    plain = jkv.generate(model, [whole], sampling=jkv.Sampling(temperature=0.0), **settings)
    np.testing.assert_array_equal(second.tokens, plain.tokens)
    np.testing.assert_allclose(second.logprobs, plain.logprobs, atol=1e-5)
