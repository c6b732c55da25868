"""On a CPU with compiled kernels, a row has the same bits in engines of other sizes, and in steps of several tokens."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.engine import policy_checks
from jkv.engine.drafters import Proposal
from jkv.engine.policy_checks import guesses_for
from jkv.model import row_invariance
from jkv.testing import TINY, TinyTokenizer, tiny_model
from pallas_kernels.block_product.native import why_no_library
from pallas_kernels.choice import choose
from pallas_kernels.quantised import FORMATS
from pallas_kernels.row_product import native
from tests.support.gguf_models import in_blocks
from tests.support.recurrent import recurrent_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 1, 2], [3] * 11]
WHOLE = dataclasses.replace(TINY, width=64, head_size=32, num_query_heads=2, num_kv_heads=1)  # vectors without a rest
WINDOWED = dataclasses.replace(WHOLE, num_layers=4, window=6, window_layers=(0, 2))
MODELS = {name: tiny_model(1, config, TinyTokenizer()) for name, config in {"plain": WHOLE, "windows": WINDOWED}.items()}
MODELS["blocks"] = jkv.Model(in_blocks(MODELS["plain"].params), TinyTokenizer())
SETTINGS = {"max_slots": 96, "page_size": 4, "stop_ids": (), "temperature": 1.0, "seed": 2}


@dataclasses.dataclass(frozen=True)
class Always:
    """Always proposes the same token."""

    drafts: int = 3
    history: int = 8

    def propose(self, history, prompt):
        num_rows = len(history)
        return Proposal(jnp.full((num_rows, self.drafts), 29, jnp.int32), jnp.full(num_rows, self.drafts, jnp.int32))


@pytest.fixture(autouse=True)
def has_kernels():
    if reason := native.why_no_library() or why_no_library():
        pytest.skip(reason)


@pytest.mark.rounding
@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_in_engines_of_other_sizes(name):
    """24 tokens pass at once in the largest steps here, which XLA's sums would add up in another order than one.

    With guesses, the ring of a window is longer, and its slots lie in another order.
    """
    policies = jkv.r_kv(budget=12, interval=4, window=4), jkv.full(), jkv.full()
    sampling = [jkv.Sampling(temperature=temperature, seed=2) for temperature in (1.0, 0.6, 1.3)]

    def log_probs(**settings):
        engine = jkv.Engine(MODELS[name], max_slots=96, page_size=4, policies=policies, **settings)
        each = zip(PROMPTS, policies, sampling, strict=True)
        tickets = [engine.submit(*one, max_new_tokens=30, stop_ids=()) for one in each]
        engine.run()
        return [np.asarray(engine.result(ticket).logprobs) for ticket in tickets], engine.stats

    alone, _ = log_probs(max_running=1)
    guessed = {"max_running": 3, "speculate": jkv.ngram(7, most=2, least=1)}
    sizes = (
        ({"max_running": 24},) if name == "blocks" else ({"max_running": 3}, {"max_running": 7}, {"max_running": 24}, guessed)
    )
    for settings in sizes:
        found, stats = log_probs(**settings)
        assert stats.drafted > 0 or settings is not guessed
        expected = log_probs(**guessed | {"max_running": 1})[0] if settings is guessed and name == "windows" else alone
        for own, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(other, own)


@pytest.mark.rounding
def test_wrong_guesses_soon_stop_and_steps_without_guesses_pass_one_token(monkeypatch):
    settings = SETTINGS | {"max_running": 1, "max_new_tokens": 60}
    plain, guessed = (jkv.generate(MODELS["plain"], PROMPTS[0], speculate=one, **settings) for one in (None, Always()))
    np.testing.assert_array_equal(guessed.logprobs, plain.logprobs)
    assert 3 * 3 <= guessed.stats.drafted <= 8 * 3  # of up to 59 steps that could have guessed 3 tokens
    monkeypatch.setattr(row_invariance, "holds", lambda *args: False)
    assert jkv.generate(MODELS["plain"], PROMPTS[0], speculate=Always(4), **settings).stats.drafted > 40 * 4


def test_auto_guesses_as_many_tokens_as_a_step_takes_in_little_more_time(monkeypatch):
    model = MODELS["plain"]
    assert [drafts_for(model, rows) for rows in (1, 2, 4, 5, 8, 64)] == [7, 3, 1, 0, 0, 0]
    engine = jkv.Engine(model, max_running=2, speculate="auto")
    assert engine.options.speculate == jkv.ngram(3)
    by_step = [jkv.h2o(budget=16)]
    for settings in ({"max_running": 64}, {"max_running": 1, "policies": by_step}):
        assert jkv.Engine(model, speculate="auto", **settings).options.speculate is None
    monkeypatch.setattr(policy_checks, "own_platform", lambda: "cuda")
    assert [drafts_for(model, rows) for rows in (1, 8, 16, 32)] == [3, 3, 1, 0]


def drafts_for(model, rows):
    found = guesses_for(model.params, [], rows)
    return 0 if found is None else found.drafts


def test_it_holds_for_what_adds_up_in_one_order():
    plain = MODELS["plain"].params
    codes = jkv.quantise_weights(plain, "int8")
    for params, kv_format, rows, holds in (
        (plain, None, 32, True),
        (codes, None, 32, True),
        (MODELS["blocks"].params, None, 32, True),
        (plain, FORMATS["int8"], 8, True),
        (plain, None, 33, False),
        (plain, FORMATS["int4"], 8, False),
        (recurrent_model().params, None, 8, False),
        (tiny_model().params, None, 8, False),  # heads of 8
    ):
        assert row_invariance.holds(params, kv_format, rows) == holds, (kv_format, rows)
    with choose("reference"):
        assert not row_invariance.holds(plain, None, 8)
