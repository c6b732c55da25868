"""A policy that evicts until a token: after it, a row keeps all its tokens."""

import numpy as np
import pytest

import jkv
from jkv.testing import TinyTokenizer, tiny_model

KNOBS = {"stop_ids": (), "page_size": 4, "progress": False, "max_new_tokens": 60}
PROMPT = list(range(1, 30))
BUDGET, INTERVAL = 16, 8


@pytest.fixture(scope="module")
def model():
    return tiny_model(tokenizer=TinyTokenizer())


def r_kv(until=None):
    return jkv.r_kv(budget=BUDGET, interval=INTERVAL, window=4, until=until)


def test_nothing_is_evicted_after_the_token(model):
    plain = jkv.generate(model, PROMPT, policy=r_kv(), **KNOBS)
    tokens = plain.tokens[0].tolist()
    # One that first comes in the middle, so that there are compactions before it and after.
    when = next(i for i in range(20, 50) if tokens[i] not in tokens[:i])
    until = model.tokenizer.decode([tokens[when]])
    out = jkv.generate(model, PROMPT, policy=r_kv(until), return_trace=True, **KNOBS)
    np.testing.assert_array_equal(out.tokens[0, : when + 1], tokens[: when + 1])
    last = when // INTERVAL * INTERVAL  # the last compaction before it
    assert out.stats.compactions == 1 + last // INTERVAL < plain.stats.compactions
    ends = out.trace.end[0].reshape(-1, out.trace.end.shape[-1])
    held = (ends > len(PROMPT) + len(tokens)).sum(axis=-1)
    np.testing.assert_array_equal(held, BUDGET + len(tokens) - last)
    replayed = np.asarray(jkv.score(model, out, trace=out.trace).logprobs)
    assert np.percentile(np.abs(replayed - out.logprobs), 99) <= 1e-5
    beside = jkv.generate(model, [PROMPT, [5, 1], PROMPT[:9]], policy=r_kv(until), **KNOBS)
    np.testing.assert_array_equal(beside.tokens[0], out.tokens[0])


def test_it_may_need_the_memory_of_all_tokens():
    policy = r_kv("</think>")
    assert not policy.is_bounded
    assert policy.most_slots(30, 1000, 2).tolist() == [1030, 1030]
    assert r_kv().most_slots(30, 1000, 2).tolist() == [BUDGET + INTERVAL] * 2


def test_what_is_no_token_or_cannot_be_waited_for_is_refused(model):
    with pytest.raises(ValueError, match="r_kv's until must be one token of the model's tokenizer; 'no token' is not"):
        jkv.generate(model, PROMPT, policy=r_kv("no token"), **KNOBS)
    schedule = jkv.EachStep(64)
    with pytest.raises(ValueError, match="can keep all tokens after until='a' only if it evicts between steps"):
        jkv.Policy("mine", jkv.h2o(64).evict, schedule, until="a")


@pytest.mark.parametrize("num_pages", [64, 90])
def test_rows_that_rewrite_a_shared_prompt_reserve_its_pages(model, num_pages):
    """They share the prompt's pages until their first compaction, and then hold copies; 64 pages are those of one row."""
    policy = r_kv("</think>")
    engine = jkv.Engine(model, max_running=4, max_slots=64, page_size=4, num_pages=num_pages, policies=[policy], chunk=8)
    ticket = engine.submit(PROMPT, policy, jkv.Sampling(seed=3), max_new_tokens=32, n=4, stop_ids=())
    while not engine.is_idle:
        engine.step()
        assert engine.runner.num_held_pages <= engine.scheduler.reserved
    assert engine.stats.forks > 0
    assert engine.runner.num_held_pages == 0
    assert np.isfinite(engine.result(ticket).logprobs).all()
