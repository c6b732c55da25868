"""Padded prompts, as tokenizers return them: taken with their mask wherever prompts are, and refused without it."""

import asyncio
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import jkv
from jkv.integrations.sampler import JkvSampler
from jkv.model.padding import check_not_padded, without_padding

LEFT = [[1, 1, 5, 6], [5, 6, 7, 8]]
RIGHT = [[5, 6, 1, 1], [5, 6, 7, 8]]
BARE = [[5, 6], [5, 6, 7, 8]]
LEFT_MASK, RIGHT_MASK = [[0, 0, 1, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [1, 1, 1, 1]]
SETTINGS = {"sampling": jkv.Sampling(seed=5), "max_new_tokens": 6, "stop_ids": ()}
SIZES = {"max_running": 2, "max_slots": 64, "page_size": 4}


class PaddingTokenizer(jkv.testing.TinyTokenizer):
    """One whose padding token is 1."""

    pad_token_id = 1


@pytest.fixture(scope="module")
def chatty():
    return jkv.testing.tiny_model(tokenizer=PaddingTokenizer())


@pytest.fixture(scope="module")
def expected(chatty):
    return jkv.generate(chatty, BARE, **SIZES, **SETTINGS)


def generated(model, prompts, **mask):
    return jkv.generate(model, prompts, **SIZES, **SETTINGS, **mask)


def rolled_out(model, prompts, **mask):
    rollout = jkv.Rollout(model, max_prompt_tokens=8, max_new_tokens=6, pad_id=1, **SIZES)
    return rollout(prompts, seed=5, stop_ids=(), **mask)


def conversed(model, prompts, **mask):
    rollout = jkv.Rollout(model, max_prompt_tokens=8, max_new_tokens=6, pad_id=1, **SIZES)
    return rollout.converse(prompts, lambda turn: None, seed=5, stop_ids=(), **mask)


def on_replicas(model, prompts, **mask):
    with jkv.Replicas(model, num_replicas=1, **SIZES) as replicas:
        return replicas.generate(prompts, **SETTINGS, **mask)


ENTRIES = {"generate": generated, "rollout": rolled_out, "converse": conversed, "replicas": on_replicas}
KINDS = {"lists": list, "numpy": np.array, "jax": jnp.array, "rows": lambda rows: [np.array(row) for row in rows]}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_rows_that_look_padded_are_refused_and_taken_with_their_mask(chatty, expected, entry):
    for kind in KINDS.values():
        with pytest.raises(ValueError, match=r"row 0 of 2 begins with the padding token 1. .* attention_mask as prompt_mask="):
            entry(chatty, kind(LEFT))
    with pytest.raises(ValueError, match=r"row 0 of 2 ends with the padding token 1"):
        entry(chatty, np.array(RIGHT))
    for rows, mask in ((LEFT, LEFT_MASK), (RIGHT, np.array(RIGHT_MASK, bool)), (jnp.array(LEFT), jnp.array(LEFT_MASK, float))):
        out = entry(chatty, rows, prompt_mask=mask)
        assert [prompt.tolist() for prompt in out.prompts] == BARE
        np.testing.assert_array_equal(out.tokens, expected.tokens)
    encoding = transformers.BatchEncoding({"input_ids": np.array(LEFT), "attention_mask": np.array(LEFT_MASK)})
    np.testing.assert_array_equal(entry(chatty, encoding).tokens, expected.tokens)
    with pytest.raises(ValueError, match=r"got \{'input_ids'"):
        entry(chatty, {"input_ids": BARE})
    whole = entry(chatty, LEFT, prompt_mask=np.ones((2, 4), int))
    assert [prompt.tolist() for prompt in whole.prompts] == LEFT


def test_scores_of_padded_prompts_are_those_of_the_prompts(chatty, expected):
    tokens = expected.tokens
    told = jkv.score(chatty, tokens, prompts=BARE).logprobs
    for rows, mask in ((LEFT, LEFT_MASK), (np.array(RIGHT), np.array(RIGHT_MASK))):
        with pytest.raises(ValueError, match="with the padding token 1"):
            jkv.score(chatty, tokens, prompts=rows)
        np.testing.assert_allclose(jkv.score(chatty, tokens, prompts=rows, prompt_mask=mask).logprobs, told, atol=1e-5)
        np.testing.assert_allclose(jkv.score(chatty.params, tokens, prompts=rows, prompt_mask=mask).logprobs, told, atol=1e-5)
    with pytest.raises(ValueError, match="prompt_mask is of prompts="):
        jkv.score(chatty, expected, prompt_mask=LEFT_MASK)


def test_requests_of_a_trainer_s_sampler_are_no_padded_rows(chatty):
    async def sample():
        sampler = JkvSampler(chatty, **SIZES)
        await sampler.start()
        try:
            return await sampler.sample(LEFT)
        finally:
            await sampler.stop()

    with pytest.raises(ValueError, match=r"row 0 of 2 begins with the padding token 1"):
        asyncio.run(sample())


@pytest.mark.parametrize(
    ("prompts", "mask", "message"),
    [
        (LEFT, [[0, 1, 0, 1], [1, 1, 1, 1]], "only before or after the tokens; row 0 has some at 2"),
        (LEFT, [[0, 0, 0, 0], [1, 1, 1, 1]], "at least one token; row 0 has none"),
        (LEFT, [[0, 0, 1, 2], [1, 1, 1, 1]], r"got \[0, 1, 2\]"),
        (LEFT, [[0, 0, 1], [1, 1, 1]], r"int64\[2, 4\] with a mask \[2, 3\]"),
        (BARE, LEFT_MASK, "rows of several lengths"),
        ([[1.0, 5.0]], [[0, 1]], "float64"),
        ([[[5]]], [[[1]]], r"int64\[1, 1, 1\]"),
        (["a text"], [[1]], "token ids"),
        ("a text", [1], "A prompt mask is of token ids"),
        (LEFT, [[None, 1, 1, 1]] * 2, "got"),
    ],
)
def test_a_mask_that_says_something_else_is_refused(chatty, prompts, mask, message):
    with pytest.raises(ValueError, match=message):
        generated(chatty, prompts, prompt_mask=mask)


def test_a_single_row_has_a_mask_too():
    assert [row.tolist() for row in without_padding([1, 1, 5], [0, 0, 1])] == [[5]]
    assert [row.tolist() for row in without_padding(jnp.array([[1, 1, 5]]), jnp.array([[0, 1, 1]]))] == [[1, 5]]


def test_what_no_tokenizer_pads_is_not_refused(chatty, model):
    for prompts in ([[1, 5], [5, 6, 7]], ["text", "more"], [[{"role": "user", "content": "1"}]], [[5, 1, 6]], [[1]], [1, 1, 5]):
        check_not_padded(chatty, prompts)
    check_not_padded(model, LEFT)  # nobody knows its padding token
    check_not_padded(None, LEFT)
    begins = jkv.testing.tiny_model(tokenizer=PaddingTokenizer())
    begins.tokenizer.bos_token_id = 1
    check_not_padded(begins, [[1, 5, 6], [1, 7, 8]])  # each begins with the token that begins every text
    with pytest.raises(ValueError, match="row 1 of 2 begins"):
        check_not_padded(begins, [[1, 5, 6], [1, 1, 8]])


def test_without_a_padding_token_rows_padded_with_end_tokens_are_refused():
    config, end = dataclasses.replace(jkv.testing.TINY, end_ids=(2,)), 2
    model = jkv.testing.tiny_model(config=config, tokenizer=jkv.testing.TinyTokenizer())
    assert getattr(model.tokenizer, "pad_token_id", None) is None
    check_not_padded(model, [[end, 5, 6], [7, 8, end]])
    for row in ([end, end, 5], [5, end, end]):
        with pytest.raises(ValueError, match="with the padding token"):
            check_not_padded(model, [row, [5, 6, 7]])
