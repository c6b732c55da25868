"""Texts of forms, drawn from their tables as a model of random weights would, and schemas to draw them from."""

import random

import numpy as np

from jkv.forms.automaton import DEAD, backwards
from jkv.forms.tables import END
from tests.support.small_tokenizers import byte_level

WORDS = rb"""{" ": "," "} ", ,"a }} ]} }] true false null 12 -1 0.5 00 \" \u00 e-1 e" name" yes no </th ink> 2026- -0 T1 :0"""
PIECES = (*WORDS.split(), b'": ', b'", "', b" x", b"\n\n", b"\xc3\xa9", b"\xe2\x82", b"\x82\xac", b"\xf0\x9f\x98")
TOKENIZER = byte_level(*PIECES)
TOKENIZER.add_tokens(["<think>", "</think>"])
END_ID = 256 + len(PIECES)
THINK_ID, END_OF_THINKING_ID = END_ID + 1, END_ID + 2
SIZE = END_ID + 3
ADDRESS = {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}}
SCHEMAS = {  # some of each keyword
    "members": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}},
        "required": ["b"],
    },
    "closed": {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False, "required": ["a"]},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "open": {"type": "object", "properties": {"id": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    "required without a schema": {"type": "object", "required": ["x", "y"]},
    "nested": {"type": "array", "items": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "null"}}}}},
    "counts": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "pair": {"prefixItems": [{"type": "string"}, {"type": "number"}], "items": False, "minItems": 1},
    "pair and more": {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "least of a pair": {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 3},
    "no items": {"type": "array", "items": {"type": "integer"}, "maxItems": 0},
    "enum": {"enum": ["a", 1, 2.5, None, True, [1, {"k": "\u00e9\n"}], {"a": [], "b": {}}]},
    "enum of a type": {"type": ["string", "null"], "enum": ["x", 3, None]},
    "enum with rules": {"enum": ["a", "bbb", "cc"], "minLength": 2},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^(ab|\u20ac)+[^a-y]?$"},
    "pattern anywhere": {"type": "string", "pattern": "z\\d", "maxLength": 6},
    "pattern of escapes": {"type": "string", "pattern": '^[\\n"\\\\\\x01-\\x03]{1,4}$'},
    "integers": {"type": "integer", "minimum": -120, "maximum": 1034},
    "integers above": {"type": "integer", "exclusiveMinimum": 98.5},
    "integers below": {"type": "integer", "exclusiveMaximum": -9},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    "numbers": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 13.75},
    "numbers above 0": {"type": "number", "exclusiveMinimum": 0},
    "numbers of a hundredth": {"type": "number", "minimum": 0.01, "maximum": 0.02},
    "one number": {"type": "number", "minimum": 3, "maximum": 3},
    "types": {"type": ["integer", "string", "array"], "items": {"type": "null"}, "maxLength": 2, "maximum": 9},
    "any of": {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
    "one of": {"oneOf": [{"type": "string"}, {"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 3}]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    "beside any of": {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "references": {
        "$defs": {"address": ADDRESS},
        "properties": {"home": {"$ref": "#/$defs/address"}, "work": {"$ref": "#/$defs/address"}},
    },
    "beside a reference": {
        "definitions": {"n": {"type": "integer"}},
        "$ref": "#/definitions/n",
        "minimum": 4,
        "title": "A number",
    },
    "formats": {"type": "array", "prefixItems": [{"type": "string", "format": name} for name in ("date", "time", "date-time")]},
    "addresses": {
        "prefixItems": [{"type": "string", "format": name} for name in ("email", "uuid", "ipv4", "hostname", "uri")],
        "minItems": 5,
    },
    "anything": True,
    "nothing but an object": {"type": "object"},
    "names": {
        "type": "object",
        "properties": {'"quoted"\n': {"type": "null"}, "\u00e9": {"type": "null"}},
        "required": ['"quoted"\n'],
    },
}


def written(table, seed, length=60, start=0):
    """The tokens of a text that a table allows, drawn at random; after `length` of them, by the shortest way to the end."""
    rng, state, tokens = random.Random(seed), table.starts[start], []
    members = [np.flatnonzero(table.class_of == index) for index in range(table.next.shape[1])]
    far = distances(table)
    while True:
        classes = [index for index in np.flatnonzero(table.next[state] != DEAD).tolist() if index != END]
        if table.next[state, END] != DEAD and (not classes or len(tokens) >= length or rng.random() < 0.3):
            return tokens
        if len(tokens) >= length:
            classes = sorted(classes, key=lambda index: far[table.next[state, index]])[:1]
        index = rng.choice(classes)
        tokens.append(int(rng.choice(members[index])))
        state = table.next[state, index]


def distances(table):
    """The fewest tokens from each state to one in which the text may end."""
    after, before = backwards(table.next[:, 1:])
    far = np.where(table.next[:, END] != DEAD, 0, 10**6)
    for _ in range(len(far)):
        closer = far.copy()
        np.minimum.at(closer, before, far[after] + 1)
        if np.array_equal(closer, far):
            return far
        far = closer
    return far


def random_schema(seed, depth=3):
    """A schema of any of the keywords."""
    rng = random.Random(seed)

    def simple():
        low = rng.choice([-1000, -7.25, -1, 0, 0.125, 3, 99])
        return rng.choice(
            [
                {"type": "null"},
                {"type": "boolean"},
                {"type": "string"},
                {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)},
                {
                    "type": "string",
                    "pattern": rng.choice(["^[a-f]+$", "x.y", "^(no|yes)", "\\d{2,3}$", "^[^\\s]{3}$", "^\\w*$"]),
                },
                {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])},
                {"type": "integer", "minimum": low, "maximum": low + rng.choice([1, 12.5, 3000])},
                {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low},
                {"type": "number", rng.choice(["maximum", "exclusiveMaximum"]): low},
                {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.choice([0.5, 20])},
                {"type": "integer", "multipleOf": rng.randint(1, 30)},
                {"enum": rng.sample(["a", "b\t", 1, -2, 3.5, None, False, [], {"k": [1]}], rng.randint(1, 4))},
                {"const": rng.choice(["x", 0, [1, 2], {"a": None}])},
                True,
            ]
        )

    def schema(depth):
        kind = rng.choice(["simple", "object", "array", "pair", "any", "nullable", "map"]) if depth else "simple"
        if kind == "object":
            names = rng.sample(["id", "name", "\u00e9t\u00e9", "a b", "x", 'q"'], rng.randint(1, 4))
            found = {"type": "object", "properties": {name: schema(depth - 1) for name in names}}
            return (
                found
                | {"required": rng.sample(names, rng.randint(0, len(names)))}
                | rng.choice([{}, {"additionalProperties": False}])
            )
        if kind == "array":
            return {"type": "array", "items": schema(depth - 1), "minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 4)}
        if kind == "pair":
            return {"type": "array", "prefixItems": [schema(depth - 1), schema(0)], "items": rng.choice([False, schema(0)])}
        if kind == "any":
            return {"anyOf": [schema(depth - 1), schema(depth - 1)]}
        if kind == "nullable":
            return {"anyOf": [{"type": "null"}, schema(depth - 1)], "description": "perhaps"}
        return {"type": "object", "additionalProperties": schema(depth - 1)} if kind == "map" else simple()

    return schema(depth)
