"""Forced tokens: a given text decoded under a policy, by the engine itself."""

import numpy as np
import pytest

import jkv
from jkv.engine import programs
from jkv.testing import TINY, tiny_model

PROMPT = [4, 5, 6, 7, 8]
POLICIES = {
    "full": jkv.full(),
    "r_kv": jkv.r_kv(budget=16, interval=8, window=4),
    "h2o": jkv.h2o(budget=16),
    "streaming_llm": jkv.streaming_llm(budget=16, interval=8, positions="cache"),
    "quest": jkv.quest(budget=16),
}


def random_text(seed, length=60):
    """Token ids that no model would draw."""
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, length).tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_log_probs_of_a_forced_text_are_those_of_its_replay(name):
    model, text = tiny_model(), random_text(0)
    out = jkv.generate(model, PROMPT, POLICIES[name], forced_tokens=text, page_size=4, return_trace=True)
    assert out.tokens[0].tolist() == text
    assert out.finish_reason == ["length"]
    np.testing.assert_allclose(out.logprobs, jkv.score(model, out, trace=out.trace).logprobs, atol=2e-5)
    assert (name == "full") == np.allclose(out.logprobs, jkv.score(model, out).logprobs, atol=2e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_forcing_what_a_run_drew_changes_nothing(name):
    model = tiny_model()
    settings = {"sampling": jkv.Sampling(temperature=0.9, seed=3), "max_new_tokens": 50, "stop_ids": (), "page_size": 4}
    drawn = jkv.generate(model, PROMPT, POLICIES[name], **settings)
    forced = jkv.generate(model, PROMPT, POLICIES[name], forced_tokens=drawn.tokens[0].tolist(), **settings)
    np.testing.assert_array_equal(forced.tokens, drawn.tokens)
    np.testing.assert_array_equal(forced.logprobs, drawn.logprobs)


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_draws_continue_after_the_forced_tokens(count):
    model = tiny_model()
    settings = {"sampling": jkv.Sampling(temperature=0.9, seed=3), "max_new_tokens": 40, "stop_ids": ()}
    drawn = jkv.generate(model, PROMPT, **settings)
    begun = jkv.generate(model, PROMPT, forced_tokens=drawn.tokens[0, :count].tolist(), **settings)
    np.testing.assert_array_equal(begun.tokens, drawn.tokens)
    other = [(drawn.tokens[0, 0] + 1) % TINY.vocab_size, *drawn.tokens[0, 1:count]]
    assert jkv.generate(model, PROMPT, forced_tokens=other, **settings).tokens[0, :count].tolist() == other


def test_rows_without_forced_tokens_are_not_affected():
    model = tiny_model()
    engine = jkv.Engine(model, max_running=4, max_slots=128)
    texts = [random_text(1, 20), None, random_text(2, 33), None]
    settings = [{"forced_tokens": text} if text else {"max_new_tokens": 30, "stop_ids": ()} for text in texts]
    tickets = [engine.submit([*PROMPT, i], **own) for i, own in enumerate(settings)]
    engine.run()
    for i, (ticket, text) in enumerate(zip(tickets, texts, strict=True)):
        tokens = engine.result(ticket).tokens[0].tolist()
        assert tokens == (text or jkv.generate(model, [*PROMPT, i], **settings[i]).tokens[0].tolist())


def test_a_stop_token_ends_a_sample_only_where_it_was_drawn():
    model, text = tiny_model(), [9, 3, 9, 9] * 9  # 3 stops, also as the last token of a chunk
    runs = [jkv.generate(model, PROMPT, POLICIES["h2o"], forced_tokens=text, stop_ids=ids) for ids in [(3,), ()]]
    assert runs[0].tokens[0].tolist() == text
    np.testing.assert_array_equal(runs[0].logprobs, runs[1].logprobs)  # a step that ends a sample evicts nothing
    drawn = jkv.generate(model, PROMPT, max_new_tokens=30, stop_ids=()).tokens[0].tolist()
    last = drawn[20]
    begun = jkv.generate(model, PROMPT, forced_tokens=drawn[:20], max_new_tokens=30, stop_ids=(last,))
    assert begun.tokens[0].tolist() == drawn[:21]
    assert begun.finish_reason == ["stop"]


def test_every_prompt_may_have_its_own_text_and_every_sample_its_own_draws():
    model, texts = tiny_model(), [random_text(1, 12), random_text(2, 20)]
    out = jkv.generate(model, [PROMPT, PROMPT[::-1]], forced_tokens=texts, n=2)
    assert [row[: len(text)].tolist() for row, text in zip(out.tokens[::2], texts, strict=True)] == texts
    assert out.lengths.tolist() == [12, 12, 20, 20]
    sampling = jkv.Sampling(temperature=1.0, seed=0)
    two = jkv.generate(model, PROMPT, forced_tokens=texts[0], n=2, max_new_tokens=30, stop_ids=(), sampling=sampling).tokens
    assert two[0, :12].tolist() == two[1, :12].tolist()
    assert two[0, 12:].tolist() != two[1, 12:].tolist()


def test_other_texts_compile_nothing():
    model = tiny_model()
    engine = jkv.Engine(model, max_running=2, max_slots=128)
    engine.submit(PROMPT, forced_tokens=random_text(1, 31))
    engine.run()
    before = programs.decode_chunk.num_compiled()
    engine.submit(PROMPT, forced_tokens=random_text(2, 31))
    engine.run()
    assert programs.decode_chunk.num_compiled() == before


def test_a_preempted_sample_is_forced_to_the_end():
    model, texts = tiny_model(), [random_text(seed, 60) for seed in range(4)]
    engine = jkv.Engine(model, max_running=4, max_slots=128, page_size=4, num_pages=200)
    tickets = [engine.submit([*PROMPT, i], forced_tokens=text) for i, text in enumerate(texts)]
    engine.run()
    assert engine.stats.preemptions > 0
    assert [engine.result(ticket).tokens[0].tolist() for ticket in tickets] == texts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forced_tokens": []}, "at least one token; that of prompt 0 is empty"),
        ({"forced_tokens": [1.5]}, r"must be a flat list of token ids; that of prompt 0 is float64\[1\]"),
        ({"forced_tokens": "text"}, "must be a flat list of token ids; that of prompt 0 is 'text'"),
        ({"forced_tokens": [1, 32]}, r"in \[0, 32\); that of prompt 0 holds 32"),
        ({"forced_tokens": [-1]}, r"in \[0, 32\); that of prompt 0 holds -1"),
        ({"forced_tokens": [[1], [2]]}, "got 2 lists for 1 prompts"),
        ({"forced_tokens": [1, 2, 3], "max_new_tokens": 2}, "got 3 of them for prompt 0, and max_new_tokens=2"),
        ({"forced_tokens": [1], "sampling": jkv.Sampling(top_k=2)}, "cuts none of them"),
        ({"forced_tokens": [1] * 5000}, "positions"),
    ],
)
def test_forced_tokens_that_cannot_be_taken_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        jkv.generate(tiny_model(), PROMPT, **settings)


def test_forced_tokens_and_stop_strings_are_refused():
    model = jkv.load("tiny-reasoner")
    with pytest.raises(ValueError, match="stop_strings would cut forced tokens"):
        jkv.generate(model, "b=3;?b", forced_tokens=[1], stop_strings=["x"])
