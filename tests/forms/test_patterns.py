"""Automata of regular expressions against Python's own `re`."""

import itertools
import random
import re

import pytest

from jkv import forms
from jkv.errors import InputError
from jkv.forms.automaton import automaton_of, product
from jkv.forms.expressions import LAST_CHARACTER, characters
from jkv.forms.patterns import expression_of

PATTERNS = [
    *(
        "a*b",
        "(a|b)*abb",
        "a{2,3}",
        "a{2,}b?",
        "(ab?){0,2}",
        "[a-c]+?",
        "[^ab]",
        ".",
        "a|",
        "(?:a|bc)*",
        "(?P<x>a)b",
        "^ab$",
        "^a|b$",
    ),
    *(
        r"\d\D?",
        r"\w+",
        r"\s|\S\S",
        r"[\d\-b]",
        r"(a|ab)(c|bcd)?",
        r"\x61\.",
        "[^\\W\\d]",
        "(?s)a.",
        "é+|€",
        "[à-ü]",
        "\\Aa\\Z",
    ),
    *("(a*)*", "(a|b|ab)*c?", "((a{1,2}){1,2}){1,2}", "a(?:)b", "😀?[^\\n]", "(|a)(|b)"),
]
LETTERS = ["a", "b", "c", "é", "€", "1", " ", "\n", ".", "-", "😀", "_"]
REFUSED = [
    "(",
    "a**",
    "[b-a]",
    "\\p{L}",
    "(a)\\1",
    "(?=a)",
    "(?<!a)b",
    "a\\b",
    "a^b",
    "(?i)a",
    "(?>a)",
    "a*+",
    "(?(1)a|b)",
    "a{70000}{70000}",
]


def every_text(length):
    return ("".join(letters) for count in range(length + 1) for letters in itertools.product(LETTERS, repeat=count))


@pytest.mark.parametrize("length", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_an_automaton_accepts_what_python_matches(length):
    texts = list(every_text(length))
    for pattern in PATTERNS:
        form, wanted = forms.regex(pattern), re.compile(pattern, re.ASCII)
        for text in texts:  # Python's $ also matches before a line's end
            assert form.matches(text) == (wanted.fullmatch(text) is not None), (pattern, text)


def test_random_patterns_are_those_of_python():
    rng = random.Random(0)

    def pattern(depth):
        if not depth:
            return rng.choice(["a", "b", "[ab]", "[^a]", ".", r"\d", "é"])
        kind, parts = rng.randrange(4), [pattern(depth - 1) for _ in range(rng.randint(1, 3))]
        return (
            f"(?:{parts[0]}){rng.choice(['*', '+', '?', '{1,2}', '{2}'])}"
            if kind == 0
            else f"({'|'.join(parts)})"
            if kind == 1
            else "".join(parts)
        )

    texts = list(every_text(2)) + ["".join(rng.choices(LETTERS[:5], k=rng.randint(3, 7))) for _ in range(300)]
    for _ in range(60):
        one = pattern(3)
        form, wanted = forms.regex(one), re.compile(one, re.ASCII)
        assert [text for text in texts if form.matches(text)] == [text for text in texts if wanted.fullmatch(text)], one


def test_a_pattern_of_a_schema_matches_anywhere():
    for pattern in ("b", "^b", "b$", "^b$", "^a|b$", "a|^b", "ab?"):
        machine, wanted = automaton_of(expression_of(pattern, is_whole=False)), re.compile(pattern)
        for text in every_text(3):
            if not text.endswith("\n"):
                assert machine.accepts(text.encode()) == (wanted.search(text) is not None), (pattern, text)


def test_characters_are_written_in_utf_8_and_nothing_else_is():
    machine = automaton_of(characters([(0, LAST_CHARACTER)]))
    edges = (0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, LAST_CHARACTER)
    assert all(machine.accepts(chr(code).encode()) for code in edges)
    for wrong in (b"", b"\x80", b"\xc0\x80", b"\xc2", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff", b"aa"):
        assert not machine.accepts(wrong)
    rng = random.Random(1)
    for _ in range(50):
        low, high = sorted(rng.choices(range(0x11000), k=2))
        part = automaton_of(characters([(low, high)]))
        for code in {low, high, low - 1, high + 1, *rng.choices(range(0x11000), k=20)} - {-1}:
            if not 0xD800 <= code <= 0xDFFF:
                assert part.accepts(chr(code).encode()) == (low <= code <= high)


def test_automata_are_the_smallest():
    for pattern, states in [
        ("a*", 1),
        ("(a|b)*abb", 4),
        ("(ab|cb)d", 4),
        ("(?:abc|xbc|ybc)+", 4),
        ("a{0,9}", 10),
        ("(a{2})*b|(a{2})*c", 3),
    ]:
        machine = automaton_of(expression_of(pattern))
        assert len(machine.next) == states, pattern
        both = product(machine, automaton_of(expression_of(f"(?:{pattern})|{pattern}")), lambda x, y: x != y)
        assert not len(both.next)


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_no_regular_expression_is_refused(pattern):
    with pytest.raises(InputError) as caught:
        forms.regex(pattern)
    assert caught.value.field == "form"


@pytest.mark.parametrize("texts", [[], "yes", [""], [1], None], ids=str)
def test_a_choice_has_texts(texts):
    with pytest.raises(InputError, match="to choose from"):
        forms.choice(texts)


def test_a_choice_is_one_of_its_texts():
    form = forms.choice(["yes", "yesterday", "no", "né"])
    assert [form.matches(text) for text in ("yes", "yesterday", "no", "né", "yester", "n", "", "yesno")] == [True] * 4 + [
        False
    ] * 4
