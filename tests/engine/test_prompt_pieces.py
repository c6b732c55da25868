"""Prompts that enter in pieces: a row never holds more than its budget and an interval, or the first piece."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv.testing import tiny_model
from tests.engine.test_kept_policies import KEPT, REFUSED
from tests.support.mixes import BreakingTokenizer, assert_engine_is_consistent
from tests.support.policies import build
from tests.support.turns import FREE, PAGE

PROMPT = np.random.default_rng(8).integers(4, 30, 150).tolist()
PIECE, NEW = 30, 20
EVICTING = {name: one for name, one in KEPT.items() if one.evict is not None or one.evicts_in_steps}
EVICTING["tri_attention"] = build("tri_attention", tiny_model(), protect_prompt=False)  # whose budget need not hold a piece
EVERYDAY = ("r_kv", "h2o", "streaming_llm", "cur", "skip_kv")
pytestmark = pytest.mark.usefixtures("short_prefills")


def make(model, policy, pages=96, **options):
    knobs = {"max_running": 2, "max_slots": 192, "page_size": PAGE, "chunk": 8, "poison": True, "num_pages": 2 * 2 * pages}
    return jkv.Engine(model, policies=[policy], **knobs | options)


def run(engine, prompt=PROMPT, **settings):
    ticket = engine.submit(prompt, **{"max_new_tokens": NEW} | FREE | settings)
    engine.run()
    assert_engine_is_consistent(engine)
    return engine.result(ticket)


@pytest.fixture(scope="module")
def breaking(model):
    return dataclasses.replace(model, tokenizer=BreakingTokenizer())


@pytest.mark.rounding
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in EVERYDAY)) for name in EVICTING])
def test_a_prompt_in_pieces_is_one_that_was_drawn(breaking, name):
    """The same tokens, forced after the first piece, are dropped and read alike; the trace replays all of them."""
    policy = EVICTING[name]
    engine = make(breaking, policy, return_trace=True)
    sampling = jkv.Sampling(seed=2)
    out = run(engine, policy=policy, prompt_piece=PIECE, sampling=sampling)
    forced = [*PROMPT[PIECE:], *out.tokens[0].tolist()]
    drawn = run(engine, PROMPT[:PIECE], policy=policy, forced_tokens=forced, max_new_tokens=len(forced))
    np.testing.assert_allclose(out.logprobs[0], drawn.logprobs[0, -NEW:], atol=2e-5)
    replayed = np.asarray(jkv.score(breaking, out, trace=out.trace).logprobs)
    assert np.percentile(np.abs(replayed - out.logprobs), 99) <= 1e-5
    whole = run(engine, policy=policy, sampling=sampling)
    assert np.abs(whole.logprobs[0, 0] - out.logprobs[0, 0]) > 1e-6  # its first token has seen the evictions


@pytest.mark.parametrize("name", ["r_kv", "h2o"])
def test_it_needs_the_pages_of_a_piece_where_the_whole_prompt_has_none(model, name):
    policy = {"r_kv": jkv.r_kv(budget=24, interval=8, window=4), "h2o": jkv.h2o(budget=16)}[name]
    engine = make(model, policy, pages=9, max_slots=36)  # 36 slots for 150 tokens
    with pytest.raises(ValueError, match=r"this one fills 150 \(150 prompt tokens"):
        engine.submit(PROMPT, policy=policy, max_new_tokens=NEW)
    held, starts = [], engine.runner.programs.prefill_chunk

    class Watched:
        def __getattr__(self, other):
            return getattr(programs, other)

        def prefill_chunk(self, *args, **settings):
            out = starts(*args, **settings)
            held.append(int(out[2]))
            return out

    programs = engine.runner.programs
    engine.runner.programs = Watched()
    out = run(engine, policy=policy, prompt_piece=PIECE)
    assert out.lengths.tolist() == [NEW]
    assert len(held) >= 10
    assert max(held) <= 2 * 2 * 9
    assert out.samples[0].compactions >= 10


@pytest.mark.parametrize("ahead", [False, True])
def test_samples_and_pace_change_nothing(model, ahead):
    policy = jkv.r_kv(budget=24, interval=8, window=4)
    settings = {"policy": policy, "prompt_piece": PIECE, "sampling": jkv.Sampling(seed=2)}
    engine = make(model, policy, ahead=ahead)
    alone = [run(engine, first_sample=i, **settings).tokens[0].tolist() for i in range(3)]
    assert run(engine, n=3, **settings).tokens.tolist() == alone
    slow = make(model, policy, ahead=ahead, prefill_tokens=4)
    assert run(slow, n=3, **settings).tokens.tolist() == alone
    slow.submit(PROMPT, n=2, max_new_tokens=NEW, **FREE | settings)
    slow.step()
    slow.step()
    slow.reset()
    slow.run()
    assert slow.result(max(slow.tickets)).tokens.tolist() == alone[:2]
    kept = run(engine, keep=True, **settings)
    assert kept.tokens[0].tolist() == alone[0]
    assert kept.transcripts[0].loss_mask.sum() == NEW


def test_a_short_prompt_and_a_policy_that_evicts_nothing_enter_whole(model):
    engine = make(model, jkv.r_kv(24, 8, 4), prefix_cache=True)
    for settings in ({"policy": jkv.full(), "prompt_piece": PIECE}, {"policy": jkv.r_kv(24, 8, 4), "prompt_piece": 150}):
        (sample,) = engine.tickets[engine.submit(PROMPT, max_new_tokens=NEW, **settings)]
        assert sample.pending == 0


@pytest.mark.parametrize("name", [name for name, one in REFUSED.items() if one.evict is not None])
def test_policies_that_cannot_take_more_tokens_are_refused_by_name(breaking, name):
    engine = make(breaking, REFUSED[name])
    with pytest.raises(ValueError, match="prompt_piece needs a row that new tokens can continue"):
        engine.submit(PROMPT, policy=REFUSED[name], max_new_tokens=NEW, prompt_piece=PIECE)


@pytest.mark.parametrize("value", [0, -3, 2.5, "8"])
def test_bad_sizes_are_refused(value):
    with pytest.raises((ValueError, TypeError), match="prompt_piece"):
        jkv.RequestOptions(prompt_piece=value)


def test_generate_takes_it(model):
    policy = jkv.r_kv(budget=24, interval=8, window=4)
    out = jkv.generate(model, PROMPT, policy, prompt_piece=PIECE, max_new_tokens=4, page_size=PAGE, **FREE)
    whole = jkv.generate(model, PROMPT, policy, max_new_tokens=4, page_size=PAGE, **FREE)
    assert out.stats.peak_kv_bytes < 0.4 * whole.stats.peak_kv_bytes
