"""Forms of JSON schemas: whatever their tables allow, the library `jsonschema` finds valid, and what it must allow, they do."""

import json

import jsonschema
import pytest

from jkv import forms
from jkv.errors import InputError
from jkv.forms import automaton
from jkv.forms.tables import table_of
from tests.support.form_texts import SCHEMAS, SIZE, TOKENIZER, random_schema, written

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
WRITE = {  # texts that a form must allow
    "members": [
        '{"b": ""}',
        '{"b": "\\b\\t\\n\\f\\r\\"\\\\"}',
        '{"a": -3, "b": "x\u20ac\\n\\"", "c": [1, {"k": null}]}',
        '{"a":1,"b":"","c":0.5e-3}',
    ],
    "map": ["{}", '{"a": true, "b": false}'],
    "open": ['{"id": 1}', '{"x": "y"}', '{"id": 1, "i": "y", "idx": "z"}'],
    "nested": ["[]", '[[], [{}, {"x": null}]]'],
    "pair": ['["a"]', '["a", -0.5e+7]'],
    "pair and more": ['["a", 1]', '["a", 1, 2, 3]'],
    "enum": ['"a"', "1", "2.5", "null", "true", '[1, {"k": "\u00e9\\n"}]', '{"a": [], "b": {}}'],
    "length": ['"\u20ac\u20ac"', '"abcde"', '"\\n\\"\\\\\U0001f600"'],
    "pattern": ['"ab"', '"ab\u20acz"', '"\u20ac\\n"'],
    "pattern of escapes": ['"\\u0001\\n\\"\\\\"'],
    "integers": ["-120", "-9", "0", "7", "99", "1000", "1034"],
    "integers above": ["99", "1000000"],
    "integers below": ["-10", "-99999"],
    "multiples": ["0", "7", "49", "497"],
    "numbers": ["-2.5", "-2.499", "0", "13.7499", "9", "-0.1"],
    "numbers above 0": ["0.0001", "1", "10", "123.0"],
    "numbers of a hundredth": ["0.01", "0.0150", "0.02", "0.020"],
    "one number": ["3", "3.0"],
    "any of": ["12", '{"a": 1}'],
    "references": ["{}", '{"home": {"zip": "01234"}, "work": {"street": "x"}}'],
    "anything": ["null", '{"a": [[1], {"b": "c"}]}'],
}
REFUSE = {  # texts that it must not allow
    "members": ["{}", '{"b": "", "a": 1}', '{"b": "\n"}', '{"b": ""} ', '{"b": "\\x"}', '{"b" : ""}'],
    "closed": ['{"a": 2}', '{"a": 1, "b": 2}', '{"a": 1, "a": 1}'],
    "open": ['{"x": "y", "id": "z"}'],
    "length": ['"a"', '"abcdef"'],
    "pattern": ['"aab"', '"abc"', '""'],
    "integers": ["-121", "1035", "01", "1.0", "+1", ""],
    "integers above": ["98"],
    "multiples": ["8", "504"],
    "numbers": ["-2.51", "13.75", "13.750", "14", "1e1"],
    "numbers above 0": ["0", "0.0", "-1", "-0"],
    "numbers of a hundredth": ["0.009", "0.021", "0.0201"],
    "one of": ["4"],
}
NOT_HONOURED = [
    ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
    ({"type": "object", "properties": {"a": {"not": {}}}}, "$.properties.a"),
    ({"type": "object", "minProperties": 1}, "minProperties"),
    ({"if": {}, "then": {}}, "'if'"),
    ({"typ": "string"}, "Did you mean"),
    ({"type": "strin"}, "types of JSON"),
    ({"type": "string", "format": "phone"}, "known format"),
    ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
    ({"type": "string", "pattern": "("}, "regular expression"),
    ({"type": "string", "pattern": "(?=a)b"}, "lookahead"),
    ({"type": "string", "maxLength": -1}, "maxLength"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "allows none"),
    ({"type": "integer", "minimum": 0.1, "maximum": 0.9}, "allows none"),
    ({"enum": []}, "list of values"),
    (False, "allows none"),
    ({"$ref": "#/$defs/x"}, "own parts"),
    ({"$ref": "http://a.b/c"}, "own parts"),
    ({"$ref": "#"}, "a schema that allows none"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "exclude each other"),
    ({"allOf": [{"maxLength": 1}, {"maxLength": 2}]}, "say maxLength once"),
    ({"oneOf": [{"const": n} for n in range(60)]}, "at most 50"),
    ({"properties": {"a": 3}}, "$.properties.a"),
    ({"properties": [1]}, "properties"),
    ({"minimum": True}, "minimum"),
    ({"items": [{}]}, "prefixItems"),
    ("string", "as a dictionary"),
    ({"const": {1, 2}}, "JSON schema"),
    ({"const": float("nan")}, "JSON schema"),
]


def check_texts(schema, num_texts, length=60):
    """Draws texts of a schema's form, and validates each."""
    table = table_of(forms.json(schema), TOKENIZER, SIZE)
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)
    for seed in range(num_texts):
        text = TOKENIZER.decode(written(table, seed, length))
        assert validator.is_valid(json.loads(text)), text


def test_texts_of_each_keyword_are_valid():
    for schema in SCHEMAS.values():
        check_texts(schema, 8)


@pytest.mark.parametrize("first", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 200, 5))])
def test_texts_of_random_schemas_are_valid(first):
    for seed in range(first, first + 5):
        check_texts(random_schema(seed), 4 if first == 0 else 30)


def test_a_form_allows_what_it_must_and_nothing_else():
    for name, texts in (*WRITE.items(), *REFUSE.items()):
        form, schema = forms.json(SCHEMAS[name]), SCHEMAS[name]
        for text in texts:
            wanted = text in WRITE.get(name, [])
            assert form.matches(text) == wanted, (name, text)
            assert not wanted or jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), (name, text)


def test_any_object_is_one_of_some_depth():
    form = forms.json()
    for text in ("{}", '{"a": {"b": [[1, "x"], {}]}}', '{"a": null}'):
        assert form.matches(text)
    for text in ("[]", "1", "", "{", '{"a": 01}', "{'a': 1}", '{"a": 1,}'):
        assert not form.matches(text)


@pytest.mark.parametrize(("schema", "words"), NOT_HONOURED, ids=str)
def test_what_would_not_be_honoured_is_refused_by_name(schema, words):
    with pytest.raises(InputError) as caught:
        forms.json(schema)
    assert words in str(caught.value)
    assert caught.value.field == "form"


def test_a_form_of_too_many_states_is_refused(monkeypatch):
    monkeypatch.setattr(automaton, "MOST_STATES", 100)
    for pattern in (".{80}", "a{140}|b", "(a|b)*a(a|b){30}"):
        with pytest.raises(InputError, match="at most 100 states"):
            forms.regex(pattern)


def test_what_would_take_too_long_is_refused():
    parts = {
        f"d{i}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{i + 1}", "type": "object"} for k in "ab"}}
        for i in range(30)
    }
    parts["d30"] = {"type": "object"}
    with pytest.raises(InputError, match="schemas, with references"):
        forms.json({"$defs": parts, "$ref": "#/$defs/d0"})
    with pytest.raises(InputError, match="optional parts"):
        forms.regex("(a?){1500}")
    with pytest.raises(InputError, match="states"):
        forms.regex("(a|b)*a(a|b){15}")


def test_equal_forms_are_one():
    assert forms.json({"type": "null"}) == forms.json({"type": "null"}) != forms.json({"type": "boolean"})
    assert len({forms.json(), forms.json(), forms.choice(["a"]), forms.regex("a")}) == 3
