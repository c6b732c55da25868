"""Texts with scored places: what they say, where they are scored, and what is refused."""

import re
import subprocess
import sys

import pytest

import jkv
from jkv.evaluation.probe_texts import TAIL, chains, docstrings, doses, encoder, manual, stream
from jkv.testing import TinyTokenizer


class Characters:
    """Each character is a token."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [ord(character) for character in text]


def text_of(probe):
    return "".join(map(chr, probe.prompt + probe.rest))


def scored_of(probe):
    """The scored tokens, those that follow each other together."""
    marks = "".join(chr(t) if i in set(probe.scored) else "\0" for i, t in enumerate(probe.rest))
    return [part.strip() for part in marks.split("\0") if part]


def test_passages_lie_in_the_manual_and_are_scored_from_a_place_on():
    probes = stream(Characters(), 5, 400, prompt=30, first=100)
    assert len({text_of(probe) for probe in probes}) == 5
    for probe in probes:
        assert text_of(probe) in manual()
        assert (len(probe.prompt), len(probe.rest)) == (30, 370)
        assert probe.scored == list(range(70, 370))
    assert stream(Characters(), 1, 400)[0].scored[0] == 100 - 32


def test_each_fact_is_said_as_often_as_it_should_and_its_key_is_scored_when_it_is_asked_for():
    probes = doses(Characters(), 3, 3_000, times=(1, 4), seed=1)
    assert [probe.group for probe in probes] == ["said 1 times", "said 4 times"] * 3
    for probe, often in zip(probes, (1, 4) * 3, strict=True):
        document, *questions = text_of(probe).split("\nQuestion: ")
        said = re.findall(r"The pass key of (\w+) is (\d{5})\.", document)
        assert len(set(said)) == 3
        assert all(said.count(fact) == often for fact in said)
        assert 3_000 - 400 < len(document) <= 3_000
        assert not re.search(r"pass key", document[-TAIL // 2 :])  # compactions see filler last
        asked = [re.search(r"of (\w+)\?", question)[1] for question in questions]
        assert scored_of(probe) == [dict(said)[city] for city in asked]


def test_documents_of_one_number_say_the_facts_of_the_others():
    once, often = doses(Characters(), 1, 3_000, times=(1, 2))
    assert scored_of(once) == scored_of(often)
    assert text_of(once) != text_of(often)


def test_solutions_and_verifications_add_up_and_the_last_pass_is_scored():
    probes = chains(Characters(), 4, passes=(0, 1, 2, 3), steps=3)
    for probe in probes:
        text, verified = text_of(probe), int(probe.group.split()[0])
        assert "<" not in text
        start, *more = map(int, re.findall(r"has (\d+)", text.split("How many")[0]))
        totals = [start + sum(more[: i + 1]) for i in range(3)]
        results = [int(x) for x in re.findall(r"(?:=|is|gives \w+) (\d+) \w+\.\n", text)]
        assert results == totals * (verified + 1)
        scored = [int(x) for x in scored_of(probe)]
        assert scored[0] == start
        assert scored[-1] == totals[-1]
        assert set(scored) == {start, *more, *totals}
        assert len(scored) == 1 + 3 * 3 + 1
        assert probe.scored[0] > len(probe.rest) * verified / (verified + 2)


def test_docstrings_are_no_part_of_the_manual_and_nothing_is_imported():
    code = "import sys; from jkv.evaluation.probe_texts import docstrings as d; print(len(d()), 'turtle' in sys.modules)"
    length, is_imported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(length) > 500_000
    assert is_imported == "False"
    blocks = [block for block in docstrings().split("\n\n") if len(block) > 200]
    shared = [block for block in blocks if block in manual()]
    assert len(shared) < 0.01 * len(blocks)


def test_texts_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match=r"The manual has [\d,]+ tokens; got 9 passages of 100000. Lower count or length"):
        stream(Characters(), 9, 100_000)
    with pytest.raises(ValueError, match=r"must lie in a passage; got 32 and 0 of length 16\. Raise length"):
        stream(Characters(), 1, 16)
    with pytest.raises(ValueError, match=r"steps must be below 12, the number of people; got 40"):
        chains(Characters(), 1, steps=40)
    with pytest.raises(ValueError, match=r"Facts said 8 times .* must leave half of 500 tokens to filler. Raise length"):
        doses(Characters(), 1, 500, times=(8,))


def test_real_tokenizers_are_asked_for_no_special_tokens():
    assert encoder(TinyTokenizer())("") == []
    tokenizer = jkv.load("tiny-reasoner").tokenizer
    assert encoder(tokenizer)("a=1") == tokenizer.encode("a=1", add_special_tokens=False)


def test_a_scored_text_without_a_token_is_refused():
    class Letters(Characters):
        def encode(self, text, add_special_tokens=True):
            return [token for token in super().encode(text, add_special_tokens) if not chr(token).isdigit() and token != 32]

    for make in (lambda: doses(Letters(), 1, 4_000), lambda: chains(Letters(), 1)):
        with pytest.raises(ValueError, match="A text that is scored must have a token"):
            make()
