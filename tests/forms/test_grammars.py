"""Forms that the host follows: grammars against other ways to recognise their texts, and schemas that refer to themselves."""

import itertools
import json
import random
import re
import sys

import jsonschema
import numpy as np
import pytest

from jkv import forms
from jkv.errors import InputError
from jkv.forms import automaton
from jkv.forms.form import acceptor_of
from jkv.forms.grammars import Grammar
from jkv.forms.host_walks import HostRules, HostWalk, walker_of
from jkv.forms.tables import ANSWERS, MAY_THINK, THINKS, Table
from jkv.testing import TinyTokenizer
from tests.support.form_texts import END_ID, END_OF_THINKING_ID, SIZE, THINK_ID, TOKENIZER
from tests.support.small_tokenizers import sentence_piece

pytest.importorskip("llguidance")

NESTED = 'start: "a" | "(" start ("," start)* ")"'
NESTED_GBNF = 'root ::= "a" | "(" root ("," root)* ")"'
REGULAR = 'start: WORD (", " WORD)* "."?\nWORD: /[ab]{1,2}/'
TREE = {
    "$defs": {
        "Node": {
            "type": "object",
            "title": "Node",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}], "default": None},
            },
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/Node",
}
KINDS = {  # as pydantic writes a union whose members have a kind
    "$defs": {
        "Leaf": {"type": "object", "properties": {"kind": {"const": "l"}}, "required": ["kind"]},
        "Both": {
            "type": "object",
            "properties": {
                "kind": {"const": "b"},
                "left": {
                    "oneOf": [{"$ref": "#/$defs/Leaf"}, {"$ref": "#/$defs/Both"}],
                    "discriminator": {"propertyName": "kind"},
                    "title": "Left",
                },
            },
            "required": ["kind", "left"],
        },
    },
    "$ref": "#/$defs/Both",
}
DOUBLING = {  # 2**30 schemas once they are merged
    f"d{i}": {"properties": {k: {"$ref": f"#/$defs/d{min(i + 1, 29)}", "type": "object"} for k in "ab"}} for i in range(30)
}
LONG = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 400}}, "required": ["text"]}


def is_nested(text):
    """Whether a text is of NESTED: what is innermost becomes "a", again and again."""
    before = ""
    while before != (before := re.sub(r"\(a(,a)*\)", "a", text)):
        text = before
    return text == "a"


def drawn(form, seed, start=ANSWERS, most=60):
    """Tokens drawn from what the form allows, and whether they end; and the masks that they came from."""
    walk, rng, tokens, masks = HostWalk(walker_of(form, TOKENIZER, SIZE), start), random.Random(seed), [], []
    while len(tokens) < most:
        masks.append(walk.after(tokens).allowed([END_ID]))
        token = END_ID if masks[-1][END_ID] and rng.random() < 0.8 else rng.choice(np.flatnonzero(masks[-1]).tolist())
        if token == END_ID:
            return tokens, True, masks
        tokens.append(token)
    return tokens, False, masks


def test_a_grammar_has_the_texts_that_other_ways_recognise():
    nested, gbnf, regular = forms.grammar(NESTED), forms.grammar(NESTED_GBNF), forms.grammar(REGULAR)
    found = 0
    for length in range(1, 7):
        for text in map("".join, itertools.product("a(,)", repeat=length)):
            found += is_nested(text)
            assert nested.matches(text) == gbnf.matches(text) == is_nested(text), text
        for text in map("".join, itertools.product("ab, .", repeat=min(length, 5))):
            assert regular.matches(text) == (re.fullmatch(r"[ab]{1,2}(, [ab]{1,2})*\.?", text) is not None), text
    assert found == 4  # a, (a), ((a)), (a,a)


@pytest.mark.parametrize("form", [forms.grammar(NESTED), forms.json(TREE)], ids=["grammar", "schema"])
def test_every_token_may_come_that_the_form_can_go_on_after(form):
    pieces = [TOKENIZER.decode([token]).encode() if token >= 256 else bytes([token]) for token in range(END_ID)]
    parser = acceptor_of(form).parser()
    for seed in range(4):
        tokens, _, masks = drawn(form, seed, most=12)
        text = b""
        for token, mask in zip(tokens, masks, strict=False):
            for other, piece in enumerate(pieces):
                if other < 256 or b"\xef\xbf\xbd" not in piece:
                    one = parser.deep_copy()
                    whole = [*text, *piece]
                    assert (one.try_consume_tokens(whole) == len(whole)) == mask[other], (text, piece)
            assert not mask[THINK_ID]
            assert not mask[END_OF_THINKING_ID]
            text += pieces[token]


@pytest.mark.parametrize("schema", [TREE, KINDS], ids=["tree", "kinds"])
def test_texts_of_a_schema_that_refers_to_itself_satisfy_it(schema):
    form, ended, depths = forms.json(schema), 0, set()
    for seed in range(30):
        tokens, is_ended, _ = drawn(form, seed)
        if is_ended:
            text = TOKENIZER.decode(tokens)
            jsonschema.validate(json.loads(text), schema)
            assert form.matches(text)
            assert not re.search(r"[,:]  |[\[{] | [\]}]", text)
            ended, depths = ended + 1, depths | {text.count("{")}
    assert ended >= 10
    assert len(depths) >= 2
    assert not form.matches('{"v": 1, "next": null, "more": 1}')


def test_an_automaton_is_taken_where_there_is_one(monkeypatch):
    monkeypatch.setattr(automaton, "MOST_STATES", 300)
    kinds = {Table: [{"type": "integer"}, {"type": "object", "properties": {"a": {"maxLength": 9}}}], HostRules: [TREE, LONG]}
    for kind, schemas in kinds.items():
        for schema in schemas:
            assert isinstance(walker_of(forms.json(schema), TOKENIZER, SIZE), kind)
    assert isinstance(acceptor_of(forms.json(LONG)), Grammar)


def test_thinking_is_free_before_an_answer():
    form = forms.grammar('start: "\\n"? "x" start | "y"')
    for start, begin in ((THINKS, []), (MAY_THINK, [THINK_ID])):
        walk = HostWalk(walker_of(form, TOKENIZER, SIZE), start).after([*begin, *b"th", THINK_ID])
        assert walk.allowed([END_ID]).sum() == SIZE - 1  # it cannot end within its thinking
        thought = [*begin, *b"th", THINK_ID, END_OF_THINKING_ID]
        for tokens, following in ([], b"\nxy"), (b"\n", b"\nxy"), (b"\n\n", b"\nxy"), (b"\n\n\n", b"x"), (b"\nx", b"\nxy"):
            walk = HostWalk(walker_of(form, TOKENIZER, SIZE), start).after([*thought, *tokens])
            found = {chr(token) for token in np.flatnonzero(walk.allowed([END_ID])).tolist() if token < 256}
            assert found == set(following.decode()), tokens
        assert np.flatnonzero(walk.after([*thought, *b"\nxy"]).allowed([END_ID])).tolist() == [END_ID]
    allowed = HostWalk(walker_of(form, TOKENIZER, SIZE), ANSWERS).allowed([END_ID])
    assert not allowed[THINK_ID]
    assert not allowed[END_ID]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: forms.grammar("start: other"), 'unknown name: "other"'),
        (lambda: forms.grammar("nonsense("), "Expected token ':'"),
        (lambda: forms.grammar("start: start"), "allows none"),
        (lambda: forms.grammar("start: <|im_end|>"), "unknown special token"),
        (lambda: forms.grammar("root ::= x"), "Rule 'x' not found"),
        (lambda: forms.grammar('root ::= "a'), "Unexpected end"),
        (lambda: forms.grammar('{"grammars": []}'), "expecting rule"),
        (lambda: forms.grammar(" "), "must be a grammar"),
        (lambda: forms.grammar(float("nan")), "must be a grammar"),
        (lambda: forms.json(TREE | {"uniqueItems": True}), "uniqueItems"),
        (
            lambda: forms.json(TREE["$defs"]["Node"] | {"$defs": TREE["$defs"], "not": {}, "x-guidance": {"lenient": True}}),
            "not",
        ),
        (lambda: forms.json({"$ref": "#"}), "allows none"),
        (lambda: forms.json(TREE | {"minProperties": 1}), "minProperties"),
        (lambda: forms.json({"properties": {"a": {"$ref": "#"}, "b": {"allOf": [{"minLength": 1}]}}}), "all hold"),
        (lambda: forms.json({"$defs": DOUBLING, "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/d0"}}}), "all hold"),
        (lambda: forms.grammar(f'start: {"(" * 300} "a" {")" * 300}'), ""),
        (lambda: forms.json({"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/no"}}}), "/no"),
        (lambda: forms.json({"properties": {"a": {"$ref": "#"}, "b": {"minimum": float("inf")}}}), "JSON"),
    ],
)
def test_what_is_no_grammar_is_refused(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
    assert caught.value.field == "form"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_space_that_a_text_loses_is_no_part_of_a_grammar():
    tokenizer = sentence_piece("\u2581yes", "yes", "\u2581")
    word, space = (tokenizer.convert_tokens_to_ids(one) for one in ("\u2581yes", "\u2581"))
    walk = HostWalk(walker_of(forms.grammar('start: (" "? "yes")+'), tokenizer, len(tokenizer)), ANSWERS)
    assert walk.allowed([0])[space]
    assert not walk.allowed([0])[word]
    assert walk.after([space]).allowed([0])[word]
    assert walk.after([space, word]).allowed([0])[0]


def test_tokens_that_cannot_write_a_grammar_refuse_it():
    with pytest.raises(InputError, match="model's tokens can write"):
        walker_of(forms.grammar('start: "一"'), TinyTokenizer(), 16)


def test_without_llguidance_what_needs_it_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (lambda: forms.grammar('start: "one of its own"'), lambda: forms.json(TREE | {"description": "another"})):
        with pytest.raises(InputError, match=r"pip install \"jkv-cache\[grammar\]\""):
            make()
    assert forms.json({"type": "integer"}).matches("3")
