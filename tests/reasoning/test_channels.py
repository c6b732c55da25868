"""The harmony format: thinking, texts and calls of golden texts, however they are cut into pieces."""

import json

import numpy as np
import pytest

from jkv.reasoning.channels import LONGEST_HEAD, ChannelReader
from jkv.reasoning.tool_calls import CallPiece, Thought

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
ARGUMENTS = json.dumps({"city": 'Zürich "HB"\n', "days": 3})
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
CALLED = ("call", "weather", ARGUMENTS)
GOLDEN = {  # the text, and its parts
    "a call": (f"{ANALYSIS}So.{NEXT}{CALL}<|call|>", [("thought", "So."), CALLED]),
    "a call whose end token is left out": (f"{ANALYSIS}So.{NEXT}{CALL}", [("thought", "So."), CALLED]),
    "without the thinking": (CALL, [CALLED]),
    "without the constraint": (CALL.replace(" <|constrain|>json", ""), [CALLED]),
    "constrained to code": (CALL.replace("<|constrain|>json", "code"), [CALLED]),
    "the recipient first": (
        f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        [CALLED],
    ),
    "the recipient first after thinking": (
        f"{ANALYSIS}So.{NEXT} to=functions.weather<|channel|>analysis<|message|>{ARGUMENTS}",
        [("thought", "So."), CALLED],
    ),
    "without the name space": (CALL.replace("functions.", ""), [CALLED]),
    "a function that is not known": (CALL.replace("weather", "other"), [("call", "other", ARGUMENTS)]),
    "another recipient": (CALL.replace("functions.weather", "python"), [("thought", ARGUMENTS)]),
    "a preamble": (
        f"{ANALYSIS}One.{NEXT}<|channel|>commentary<|message|>I look. {NEXT}{ANALYSIS}Two.{NEXT}{CALL}",
        [("thought", "One."), ("text", "I look."), ("thought", "\nTwo."), CALLED],
    ),
    "a preamble, then the answer": (
        f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL} Rain.\n",
        [("text", "I look.\nRain.")],
    ),
    "an answer": (f"{ANALYSIS}So.{NEXT}{FINAL}Rain.<|return|>", [("thought", "So."), ("text", "Rain.")]),
    "no end of the thinking": (f"{ANALYSIS}So.{FINAL}Rain.", [("thought", "So."), ("text", "Rain.")]),
    "two calls": (
        f"{CALL}<|call|><|start|>assistant{CALL.replace('weather', 'now')}",
        [CALLED, ("call", "now", ARGUMENTS)],
    ),
    "no arguments": ("<|channel|>commentary to=functions.now json<|message|> ", [("call", "now", "{}")]),
    "arguments that are no JSON": (f"{CALL[:-3]}, oh", [("call", "weather", f"{ARGUMENTS[:-3]}, oh")]),
    "a call of another's": (f"<|start|>user{FINAL}hi{NEXT}{FINAL}Rain.", [("thought", "hi"), ("text", "Rain.")]),
    "thinking that breaks off": (f"{ANALYSIS}So. <|en", [("thought", "So. <|en")]),
    "a head that breaks off": (f"{ANALYSIS}So.{NEXT}<|channel|>comm", [("thought", "So.")]),
    "no head": (" Rain <b>. ", [("text", "Rain <b>.")]),
    "an endless head": ("<|channel|>" + "a" * LONGEST_HEAD, [("text", "a" * LONGEST_HEAD)]),
    "nothing": ("", []),
}


def parts_of(text, cuts=(), **options):
    """The parts of a text that comes in pieces; pieces of one part joined."""
    reader, parts, ends = ChannelReader({"weather": {}}, **options), [], [*cuts, len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        for one in reader.read(text[start:end], is_last=False) + (reader.read("", is_last=True) if end == len(text) else []):
            kind = "thought" if isinstance(one, Thought) else "text"
            if isinstance(one, CallPiece):
                if one.name is not None:
                    assert one.index == sum(part[0] == "call" for part in parts)
                    parts.append(("call", one.name, ""))
                parts[-1] = (*parts[-1][:2], parts[-1][2] + one.arguments)
            elif parts and parts[-1][0] == kind:
                parts[-1] = kind, parts[-1][1] + (one.text if kind == "thought" else one)
            else:
                parts.append((kind, one.text if kind == "thought" else one))
    return parts


@pytest.mark.parametrize("name", GOLDEN)
def test_the_golden_texts_have_their_parts_however_they_are_cut(name):
    text, expected = GOLDEN[name]
    rng = np.random.default_rng(0)
    assert parts_of(text) == expected
    for size in (1, 2, 3, 7):
        assert parts_of(text, range(size, len(text), size)) == expected, size
    for _ in range(20):
        assert parts_of(text, sorted(rng.integers(0, len(text) + 1, 4).tolist())) == expected


def test_any_text_has_the_same_parts_however_it_is_cut():
    rng = np.random.default_rng(1)
    words = [
        "<|start|>",
        "assistant",
        "<|channel|>",
        "final",
        "analysis",
        "commentary",
        " to=functions.f",
        "<|message|>",
        " x ",
    ]
    words += ["<|end|>", "<|call|>", "\n", "<|", "{}", "a" * 246, "to=", "<|constrain|>json"]
    for _ in range(300):
        text = "".join(rng.choice(words, rng.integers(1, 24)))
        expected = parts_of(text)
        assert parts_of(text, range(len(text))) == expected
        assert parts_of(text, sorted(rng.integers(0, len(text) + 1, 5).tolist())) == expected


def test_a_prompt_may_have_begun_to_think():
    assert parts_of(f"on{NEXT}{CALL}", thinks=True) == [("thought", "on"), CALLED]
    assert parts_of(f"{NEXT}{FINAL}so", thinks=True) == [("text", "so")]


def test_one_call_is_left_where_there_may_be_no_more():
    text, (one, _) = GOLDEN["two calls"]
    assert parts_of(text, has_many=False) == [one]


def test_arguments_grow_while_the_model_writes():
    reader = ChannelReader(set())
    pieces = [one for char in CALL for one in reader.read(char, is_last=False)]
    assert [piece.name for piece in pieces] == ["weather"] + [None] * (len(pieces) - 1)
    assert len(pieces) > 20
