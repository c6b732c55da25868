"""Marks between which models think, in tags, in the harmony format and in Gemma 4's channel, whole and piece by piece."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jkv
from jkv.engine.results import split_text
from jkv.reasoning.marks import CHANNEL, FINAL, HARMONY, TAGS, after_thinking, completion_decoder, marks_of
from jkv.serving.responses import AnswerReader, ReasoningSplitter, message_of, num_reasoning_tokens
from jkv.testing import TINY, TinyTokenizer, tiny_model
from tests.support.small_tokenizers import with_special

TEXT = f"{HARMONY.begin}3*7=1, so <d> is 1.\n<|end|><|start|>assistant{FINAL}d=1 <|x|>"
SPECIAL = ["<|return|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|endoftext|>"]


THOUGHT = "<|channel>thought\n3*7=1, so <d> is 1.\n<channel|>d=1 <|x|>"


@pytest.fixture(scope="module")
def harmony():
    return with_special(SPECIAL)


@pytest.fixture(scope="module")
def gemma():
    return with_special(["<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>"])


def in_pieces(text, cuts, thinks=False, marks=HARMONY):
    splitter = ReasoningSplitter(thinks, marks)
    pieces = np.split(np.array(list(text)), sorted(cuts))
    parts = [splitter.push("".join(piece)) for piece in pieces] + [splitter.finish()]
    return tuple("".join(part) for part in zip(*parts, strict=True))


EXPECTED = "3*7=1, so <d> is 1.", "d=1 <|x|>"


@pytest.mark.parametrize("seed", range(20))
def test_a_harmony_text_is_split_wherever_it_is_cut_into_pieces(seed):
    cuts = np.random.default_rng(seed).integers(0, len(TEXT), 1 + 3 * seed)
    assert in_pieces(TEXT, cuts) == EXPECTED
    assert in_pieces(TEXT, range(len(TEXT))) == EXPECTED
    assert split_text(TEXT, False, HARMONY) == EXPECTED


@pytest.mark.parametrize(
    ("text", "thinks", "expected"),
    [
        (f"{HARMONY.begin}on and on", False, ("on and on", "")),
        (f"{FINAL}at once", False, ("", "at once")),
        ("on<|end|><|start|>assistant" + FINAL + "so", True, ("on", "so")),
        (FINAL + "so", True, ("", "so")),
        (f"on{FINAL}so", True, ("on", "so")),
        ("neither", False, ("", "neither")),
    ],
    ids=["unfinished", "no-thinking", "begun-in-the-prompt", "nothing-thought", "without-an-end", "plain"],
)
def test_parts_may_be_missing(text, thinks, expected):
    assert split_text(text, thinks, HARMONY) == expected
    for cuts in ([], range(len(text))):
        assert in_pieces(text, cuts, thinks) == expected


def test_tags_are_found_as_before():
    assert TAGS.cut("a</think>b</think>c") == ("a", "</think>", "b</think>c")
    assert in_pieces("<think>a</think>b", range(17), marks=TAGS) == ("a", "b")
    assert in_pieces("</think>", [], thinks=True, marks=TAGS) == ("", "")
    assert marks_of(TinyTokenizer()) is TAGS


def test_a_tokenizer_with_the_marks_keeps_them_in_the_text_and_drops_other_special_tokens(harmony):
    assert marks_of(harmony) is HARMONY
    tokens = harmony.encode(TEXT.replace(" <|x|>", "") + "<|return|>", add_special_tokens=False)
    assert completion_decoder(harmony)(tokens) == TEXT.replace(" <|x|>", "")
    begin, *ends = (harmony.encode(mark, add_special_tokens=False) for mark in (HARMONY.begin, *HARMONY.ends))
    count = num_reasoning_tokens(tokens, False, begin, ends)
    assert harmony.decode(tokens[count:]) == "d=1<|return|>"
    assert num_reasoning_tokens(harmony.encode("d=1"), False, begin, ends) == 0
    assert num_reasoning_tokens(tokens[:20], False, begin, ends) == 20


def test_special_tokens_without_a_name_are_dropped_too():
    tokenizer = with_special(SPECIAL)
    tokenizer.backend_tokenizer.add_special_tokens(["<|call|>"])
    assert "<|call|>" not in tokenizer.all_special_tokens
    assert completion_decoder(tokenizer)(tokenizer.encode("<|end|>a<|call|>")) == "<|end|>a"


def test_a_result_is_split_at_the_marks_of_its_tokenizer(harmony):
    model = tiny_model(config=dataclasses.replace(TINY, vocab_size=len(harmony)), tokenizer=harmony)
    tokens = harmony.encode(TEXT.replace(" <|x|>", ""), add_special_tokens=False)
    settings = {"max_new_tokens": len(tokens), "stop_ids": (), "progress": False, "page_size": 4}
    out = jkv.generate(model, ["x"], forced_tokens=[tokens], **settings)
    assert out.reasoning == ["3*7=1, so <d> is 1."]
    assert out.answer == ["d=1"]
    assert out.split(begin=HARMONY.begin + "3", end=" so ")[0] == ("*7=1,", out.text[0].partition(" so ")[2])


@pytest.mark.parametrize("seed", range(5))
def test_a_text_of_gemma_4_is_split_wherever_it_is_cut_into_pieces(seed):
    cuts = np.random.default_rng(seed).integers(0, len(THOUGHT), 1 + 3 * seed)
    for at in (cuts, range(len(THOUGHT))):
        assert in_pieces(THOUGHT, at, marks=CHANNEL) == EXPECTED
    assert split_text(THOUGHT, False, CHANNEL) == EXPECTED


@pytest.mark.parametrize(("end", "thinks"), [(CHANNEL.begin, True), (CHANNEL.begin + "\n<channel|>", False), ("", False)])
def test_a_prompt_of_gemma_4_may_have_begun_to_think_or_say_that_nothing_is_thought(end, thinks):
    assert CHANNEL.is_open("<|turn>user\nx?<turn|>\n<|turn>model\n" + end) == thinks
    expected = ("on", "so") if thinks else ("", "so")
    assert split_text("on<channel|>so" if thinks else "so", thinks, CHANNEL) == expected


def test_a_result_of_gemma_4_is_split_and_counted(gemma):
    assert marks_of(gemma) is CHANNEL
    tokens = gemma.encode(THOUGHT + "<turn|>", add_special_tokens=False)
    assert completion_decoder(gemma)(tokens) == THOUGHT
    begin, *ends = (gemma.encode(mark, add_special_tokens=False) for mark in (CHANNEL.begin, *CHANNEL.ends))
    count = num_reasoning_tokens(tokens, False, begin, ends)
    assert gemma.decode(tokens[count:]) == "d=1 <|x|><turn|>"
    model = tiny_model(config=dataclasses.replace(TINY, vocab_size=len(gemma)), tokenizer=gemma)
    settings = {"max_new_tokens": len(tokens), "stop_ids": (), "progress": False, "page_size": 4}
    out = jkv.generate(model, ["x"], forced_tokens=[tokens], **settings)
    assert (*out.reasoning, *out.answer) == EXPECTED


@pytest.mark.parametrize(
    ("text", "answer"), [(THOUGHT, "d=1 <|x|>"), (TEXT, "d=1 <|x|>"), ("<think>1</think>2", "2"), ("plain", "plain")]
)
def test_graders_read_what_comes_after_the_thinking(text, answer):
    assert after_thinking(text) == answer


FRAGMENTS = ["a", " ", "\n", "<", "|", "</th"]


@pytest.mark.parametrize("marks", [TAGS, HARMONY, CHANNEL], ids=["tags", "harmony", "channel"])
@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans(), st.integers(1, 9))
def test_streamed_parts_add_up_to_those_of_the_whole_text(marks, data, thinks, size):
    text = "".join(data.draw(st.lists(st.sampled_from([marks.begin, marks.begin[:4], *marks.ends, *FRAGMENTS]), max_size=10)))
    splitter = ReasoningSplitter(thinks, marks)
    parts = [splitter.push(text[start : start + size]) for start in range(0, len(text), size)]
    reasoning, content = ("".join(part) for part in zip(*[*parts, splitter.finish()], strict=True))
    message = message_of(text, AnswerReader(marks, thinks, None), includes_reasoning=True)
    assert (reasoning, content) == (message.get("reasoning", ""), message["content"])
    if thinks or text.lstrip().startswith(marks.begin):
        assert (reasoning, content) == split_text(text, thinks, marks)
