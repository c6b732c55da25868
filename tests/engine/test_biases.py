"""Biases of single tokens, tokens that are never drawn, late ends, and most likely tokens: against logits in float64."""

import numpy as np
import pytest

import jkv
from jkv.engine.clocks import COMPILING
from jkv.errors import InputError
from jkv.testing import TINY, tiny_model
from tests.model.test_numbers import reference_logits

PROMPT, OTHER = [4, 5, 6, 7, 8], [9, 9, 1]
GREEDY = jkv.Sampling(temperature=0.0)
DRAWN = jkv.Sampling(temperature=0.8, seed=3, repetition_penalty=1.3)
BIAS = {3: 5.0, 9: -100.0, 20: 2.5}
ALLOWED = [2, 3, 11, 12, 30]
LENGTH = 40  # of two chunks and a part


@pytest.fixture(scope="module")
def engine():
    return jkv.Engine(tiny_model(), max_running=4, max_slots=96, page_size=4, max_stop_ids=24)


def run(engine, *requests):
    """The results of requests that run together."""
    given = {"max_new_tokens": LENGTH, "stop_ids": (), "sampling": GREEDY}
    tickets = [engine.submit(PROMPT, **given | request) for request in requests]
    engine.run()
    return [engine.result(ticket) for ticket in tickets]


def distributions(engine, out):
    """The model's own log-probabilities before each token, float64 [T, V]."""
    logits = reference_logits(engine.model.params, [*PROMPT, *out.tokens[0].tolist()])[len(PROMPT) - 1 : -1]
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_tokens_are_drawn_from_the_changed_distribution_and_other_rows_from_their_own(engine):
    plain, drawn = run(engine, {}, {"sampling": DRAWN})
    bias = np.array([BIAS.get(token, 0.0) for token in range(TINY.vocab_size)])
    mask = np.where(np.isin(np.arange(TINY.vocab_size), ALLOWED), 0.0, -np.inf)
    changes = [({"logit_bias": BIAS}, bias), ({"allowed_token_ids": ALLOWED}, mask)]
    changes += [({"logit_bias": BIAS, "allowed_token_ids": ALLOWED}, bias + mask)]
    *found, beside = run(engine, *(request for request, _ in changes), {"sampling": DRAWN})
    np.testing.assert_array_equal(beside.tokens, drawn.tokens)
    np.testing.assert_array_equal(beside.logprobs, drawn.logprobs)
    for out, (_, change) in zip(found, changes, strict=True):
        wanted = distributions(engine, out) + change
        wanted -= np.log(np.exp(wanted).sum(axis=-1, keepdims=True))
        assert out.tokens[0].tolist() == wanted.argmax(axis=-1).tolist() != plain.tokens[0].tolist()
        np.testing.assert_allclose(out.logprobs[0], wanted.max(axis=-1), atol=1e-4)


def test_a_request_ends_no_earlier_than_its_least_length(engine):
    (plain,) = run(engine, {})
    ends = sorted(set(plain.tokens[0].tolist()))[:20]
    for least in (0, 1, 20, LENGTH):
        out, beside = run(engine, {"stop_ids": ends, "min_tokens": least}, {"stop_ids": ends})
        tokens = out.tokens[0, : out.lengths[0]].tolist()
        assert not set(tokens[:least]) & set(ends)
        assert len(tokens) >= least
        assert beside.lengths[0] <= 20
        wanted = distributions(engine, out)
        wanted[:least, ends] = -np.inf
        assert tokens == wanted[: len(tokens)].argmax(axis=-1).tolist()


def test_bad_words_do_not_come(engine):
    (plain,) = run(engine, {})
    tokens = plain.tokens[0].tolist()
    words = [tokens[:1], tokens[3:5], tokens[14:18], tokens[20:28]]
    out, beside = run(engine, {"bad_words": words}, {})
    np.testing.assert_array_equal(beside.tokens, plain.tokens)
    wanted, drawn = distributions(engine, out), out.tokens[0].tolist()
    for step in range(LENGTH):
        for *before, last in words:
            if drawn[:step][-len(before) :] == before or not before:
                wanted[step, last] = -np.inf
    assert drawn == wanted.argmax(axis=-1).tolist() != tokens
    guessing = jkv.Engine(engine.model, max_running=4, max_slots=96, page_size=4, max_stop_ids=24, speculate=jkv.ngram())
    np.testing.assert_array_equal(run(guessing, {"bad_words": words})[0].tokens, out.tokens)


@pytest.mark.parametrize("end", [5, 16, 18])
def test_bad_words_are_found_over_chunks(engine, end):
    (plain,) = run(engine, {"sampling": DRAWN})
    tokens = plain.tokens[0].tolist()
    (out,) = run(engine, {"sampling": DRAWN, "bad_words": [tokens[end - 5 : end + 1]]})
    assert out.tokens[0, :end].tolist() == tokens[:end]
    assert out.tokens[0, end] != tokens[end]


def test_the_most_likely_tokens_are_the_models_own_at_any_temperature(engine):
    asked = [{"sampling": DRAWN, "top_logprobs": 20}, {"top_logprobs": 3, "logit_bias": BIAS}, {"model_logprobs": True}]
    first, second, plain = run(engine, *asked)
    assert plain.top_logprobs is None
    for out, count in ((first, 20), (second, 3)):
        own, (top,) = distributions(engine, out), out.top_logprobs
        assert len(top) == LENGTH
        for step, found in enumerate(top):
            best = np.argsort(-own[step])[:count]
            assert list(found) == best.tolist()
            np.testing.assert_allclose(list(found.values()), own[step, best], atol=1e-4)
    assert list(plain.tokens[0]) == [next(iter(one)) for one in run(engine, {"top_logprobs": 1})[0].top_logprobs[0]]


def test_other_values_compile_nothing(engine):
    run(engine, {"logit_bias": BIAS}, {"top_logprobs": 2})
    before = COMPILING.count
    run(engine, {"logit_bias": {1: 2.0}, "min_tokens": 3}, {"top_logprobs": 20}, {"allowed_token_ids": [1]}, {})
    assert COMPILING.count == before


def test_guesses_change_no_token(engine):
    asked = [
        {"logit_bias": BIAS, "top_logprobs": 2},
        {"stop_ids": list(range(20)), "min_tokens": 25},
        {"allowed_token_ids": [1, 2]},
    ]
    expected = run(engine, *asked)
    guessing = jkv.Engine(engine.model, max_running=4, max_slots=96, page_size=4, max_stop_ids=24, speculate=jkv.ngram())
    for out, other in zip(run(guessing, *asked), expected, strict=True):
        np.testing.assert_array_equal(out.tokens, other.tokens)
        np.testing.assert_allclose(out.logprobs, other.logprobs, atol=1e-5)
        assert [list(one) for one in (out.top_logprobs or [[]])[0]] == [list(one) for one in (other.top_logprobs or [[]])[0]]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"logit_bias": {99: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "stop_ids": [1], "min_tokens": 1}, "allowed_token_ids"),
        ({"min_tokens": 41}, "min_tokens"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[99]]}, "bad_words"),
        ({"bad_words": [[1] * 9]}, "bad_words"),
        ({"bad_words": [[1]] * 33}, "bad_words"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"top_logprobs": 65}, "top_logprobs"),
        ({"forced_tokens": [3], "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"forced_tokens": [3], "min_tokens": 1}, "min_tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(engine, settings, field):
    with pytest.raises(InputError) as caught:
        run(engine, settings)
    assert caught.value.field == field
