"""Conversations that the tests of kept rows play, on engines of few shapes."""

import numpy as np

import jkv
from tests.support.mixes import assert_engine_is_consistent

RNG = np.random.default_rng(5)
PROMPT = RNG.integers(4, 30, 21).tolist()
NEW = [RNG.integers(4, 30, count).tolist() for count in (11, 1, 40)]  # less than an interval, one token, several intervals
LIMITS = (13, 19, 7, 20)  # new tokens of each turn
FREE = {"stop_ids": ()}
MAX_SLOTS, PAGE = 192, 4
ROW = 2 * 2 * MAX_SLOTS // PAGE  # pages of a full row
R_KV = jkv.r_kv(budget=24, interval=16, window=4)
FULL = jkv.full()
KNOBS = {"max_slots": MAX_SLOTS, "page_size": PAGE, "chunk": 8, "poison": True}


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
    assert engine.runner.num_held_pages == engine.scheduler.kept_rows.num_pages == len(engine.scheduler.kept_rows) == 0
    return outs


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        if one.trace is not None:
            np.testing.assert_array_equal(one.trace.end, other.trace.end)
