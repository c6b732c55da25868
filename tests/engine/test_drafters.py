"""Drafters against plain Python, and what an engine refuses of them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jkv
from jkv.engine.drafters import MOST_DRAFTS, Ngram, Proposal, Siblings
from jkv.testing import tiny_model


def by_hand(text: list[int], drafts: int, most: int, least: int) -> list[int]:
    """What followed the last of the longest repetitions, and again from there on where the text ends."""
    for length in range(min(most, len(text) - 1), least - 1, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[len(text) - length :]:
                between = text[end + 1 :]
                return [between[i % len(between)] for i in range(drafts)]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.integers(1, MOST_DRAFTS),
    st.integers(1, 4),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_ngram_proposes_what_followed_the_longest_repetition(text, drafts, least, longer):
    ngram, padded = Ngram(drafts, least + longer, least, history=24), np.full((2, 24), -1)
    padded[0, 24 - len(text) :] = text
    padded[1, :] = np.arange(24) % 5  # a neighbour
    token, count = ngram.propose(jnp.asarray(padded), jnp.arange(2))
    assert token[0, : int(count[0])].tolist() == by_hand(text, drafts, least + longer, least)
    assert token[1].tolist() == [(24 + i) % 5 for i in range(drafts)]


def test_siblings_propose_what_followed_in_any_sample_of_the_prompt():
    texts = [
        [1, 2, 3, 4, 5, 6, 7, 8],  # ends in nothing that it has had
        [9, 9, 7, 8, 5, 3, 4, 1],  # of the same prompt: 5 followed 7, 8
        [0, 7, 8, 2, 2, 6, 3, 0],  # of another prompt
        [4, 1, 9, 2, 7, 4, 1, 4],  # 4, 1 in its own text, which row 1 ends with
    ]
    history, prompt = jnp.asarray(texts), jnp.asarray([0, 0, 2, 0])
    found = Siblings(drafts=2, most=3, least=2, history=8).propose(history, prompt)
    assert found.length.tolist() == [2, 2, 0, 0]
    assert found.token[0].tolist() == [5, 3]
    assert found.token[1].tolist() == [4, 4]  # the last place, where the text ends after one token, which comes again
    own = Ngram(drafts=2, most=3, least=2, history=8).propose(history, prompt)
    assert own.length.tolist() == [0, 0, 0, 0]
    alone = Siblings(drafts=2, most=3, least=2, history=8).propose(history, jnp.asarray([0, 1, 2, 3]))
    assert alone.length.tolist() == own.length.tolist()


@given(st.lists(st.integers(0, 2), min_size=2, max_size=12), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_a_row_s_own_text_goes_before_an_equal_one_of_a_sibling(text, least):
    padded = np.full((2, 12), -1)
    padded[:, 12 - len(text) :] = text
    found = Siblings(3, 4, least, history=12).propose(jnp.asarray(padded), jnp.zeros(2, jnp.int32))
    own = Ngram(3, 4, least, history=12).propose(jnp.asarray(padded), jnp.zeros(2, jnp.int32))
    assert found.length.tolist() == own.length.tolist()
    if int(own.length[0]):
        np.testing.assert_array_equal(found.token, own.token)


@dataclasses.dataclass(frozen=True)
class Constant:
    """Proposes one token again and again."""

    token: int = 1
    count: int = 2
    drafts: Any = 2
    history: Any = 8
    fault: Any = None

    def propose(self, history, prompt):
        if self.fault is not None:
            return self.fault(history)
        rows = len(history)
        return Proposal(jnp.full((rows, self.drafts), self.token, jnp.int32), jnp.full(rows, self.count, jnp.int32))


def raises(history):
    raise KeyError("of its author")


def decides_by_numbers(history):
    return history if history[0, 0] > 3 else -history


@pytest.mark.parametrize(
    ("drafter", "code", "message"),
    [
        (3, "wrong_type", "must be a drafter, such as jkv.ngram"),
        ("ngrams", "unknown_name", "ngram"),
        (Constant(drafts=8), "out_of_range", r"Constant.drafts must be 1 to 7; got 8"),
        (Constant(drafts=0), "out_of_range", r"Constant.drafts must be 1 to 7; got 0"),
        (Constant(history=True), "out_of_range", r"Constant.history must be 1 to 131072; got True"),
        (Constant(token=32), "out_of_range", r"tokens of the vocabulary, 0 to 31; got \[32\]"),
        (Constant(token=-1), "out_of_range", r"tokens of the vocabulary, 0 to 31; got \[-1\]"),
        (Constant(count=3), "out_of_range", "may propose at most 2 tokens"),
        (Constant(fault=raises), "invalid", "propose cannot be traced: KeyError: 'of its author'"),
        (Constant(fault=decides_by_numbers), "invalid", "propose cannot be traced: TracerBoolConversionError"),
        (Constant(fault=lambda history: history), "invalid", r"must return a Proposal of int32 \[2, 2\] and \[2\]"),
        (Constant(fault=lambda history: Proposal(history, history[:, 0])), "invalid", "must return a Proposal"),
    ],
)
def test_an_engine_refuses_what_is_no_drafter(drafter, code, message):
    model = tiny_model()
    with pytest.raises(jkv.InputError, match=message) as error:
        jkv.Engine(model, max_running=2, max_slots=64, page_size=4, speculate=drafter)
    assert (error.value.field, error.value.code) == ("speculate", code)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"drafts": 0}, "drafts"),
        ({"drafts": 8}, "drafts"),
        ({"drafts": 2.5}, "drafts"),
        ({"most": 17}, "most"),
        ({"least": 5}, "least"),
        ({"least": 0}, "least"),
        ({"history": 4}, "history"),
    ],
)
def test_ngram_refuses_numbers_out_of_range(settings, field):
    with pytest.raises(jkv.InputError) as error:
        jkv.ngram(**settings)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (jkv.h2o(budget=16), "h2o evicts by the attention of each step"),
        (jkv.quest(budget=16), "quest chooses pages in each step"),
        (jkv.streaming_llm(budget=16, positions="cache"), "streaming_llm moves its sinks in each step"),
    ],
    ids=["h2o", "quest", "streaming_llm"],
)
def test_an_engine_of_policies_that_decide_in_each_step_is_refused_by_name(policy, reason):
    with pytest.raises(jkv.InputError, match=reason) as error:
        jkv.generate(tiny_model().params, [[1, 2, 3]], policy=policy, max_new_tokens=4, speculate="ngram", page_size=4)
    assert (error.value.field, error.value.code) == ("speculate", "unsupported")
