"""JSON as expressions of texts: one spelling of each value, but for numbers and an optional space after `,` and `:`.

Characters stand for themselves where JSON allows it, so a rule about a text's characters is one about its spelling.
"""

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from jkv.forms.expressions import (
    EMPTY,
    LAST_CHARACTER,
    NOTHING,
    Either,
    Expression,
    Ranges,
    Repeat,
    chain,
    characters,
    either,
    optional,
    text,
    without,
)
from jkv.forms.numerals import NUMBER

DEPTH = 4  # objects and lists within each other, where nothing says what they hold
COMMA, COLON = text(","), text(":")
GAP = optional(text(" "))
SHORT = {8: r"\b", 9: r"\t", 10: r"\n", 12: r"\f", 13: r"\r", 34: r"\"", 92: r"\\"}  # of characters that stand for no text
CONTROL = [(0, 31)]
NOT_PLAIN = [*CONTROL, (34, 34), (92, 92)]


def spelled(ranges: Ranges) -> Expression:
    """One character of a set, as JSON spells it inside a text."""
    codes = [
        code for low, high in ranges for code in (*range(low, min(high, 31) + 1), *(c for c in (34, 92) if low <= c <= high))
    ]
    escapes = [text(SHORT.get(code, f"\\u{code:04x}")) for code in codes]
    return either([characters(without(ranges, NOT_PLAIN)), *escapes])


CHARACTER = either([characters(without([(0, LAST_CHARACTER)], NOT_PLAIN)), *map(text, SHORT.values())])


def quoted(inner: Expression) -> Expression:
    """A text of JSON with these characters."""
    return chain(text('"'), inner, text('"'))


STRING = quoted(Repeat(CHARACTER))


class Member(NamedTuple):
    """A member of an object."""

    key: Expression  # quoted
    value: Expression
    is_required: bool


def object_of(members: Sequence[Member], others: Member | None = None) -> Expression:
    """Objects with members in this order, and any number of others after them."""
    after, first = EMPTY, EMPTY  # what comes after a member, and at the beginning
    if others is not None:
        pair = chain(others.key, COLON, GAP, others.value)
        after = Repeat(chain(COMMA, GAP, pair))
        first = optional(chain(pair, after))
    for key, value, is_required in reversed(members):
        pair = chain(key, COLON, GAP, value)
        begins, goes_on = chain(pair, after), chain(COMMA, GAP, pair, after)
        first = begins if is_required else Either((begins, first))
        after = goes_on if is_required else Either((goes_on, after))
    return chain(text("{"), first, text("}"))


def array_of(items: Sequence[Expression], rest: Expression | None, least: int, most: int | None) -> Expression:
    """Lists that begin with some items, and go on with any number of others; between `least` and `most` in all."""
    if most is not None and most < least:
        return NOTHING
    items = items if most is None else items[:most]
    num_more = max(0, least - len(items))
    after, left = EMPTY, None if most is None else most - len(items)
    if rest is not None and left != 0:
        after = Repeat(chain(COMMA, GAP, rest), num_more, left)
    elif num_more:
        return NOTHING
    if not items:
        if rest is None or left == 0:
            return text("[]")
        begins = chain(rest, Repeat(chain(COMMA, GAP, rest), max(0, least - 1), None if most is None else most - 1))
        return chain(text("["), begins if least else optional(begins), text("]"))
    for index in range(len(items) - 1, 0, -1):
        more = chain(COMMA, GAP, items[index], after)
        after = more if least > index else optional(more)
    begins = chain(items[0], after)
    return chain(text("["), begins if least else optional(begins), text("]"))


def literal(value: Any) -> Expression:
    """One value; equal numbers are one value."""
    if isinstance(value, dict):
        return object_of([Member(literal(str(key)), literal(each), True) for key, each in value.items()])
    if isinstance(value, list):
        return array_of([literal(each) for each in value], None, len(value), len(value))
    if isinstance(value, float):
        value = Decimal(repr(value))
        return text(str(int(value)) if value == value.to_integral_value() and abs(value) < 10**20 else f"{value:f}")
    return text(json.dumps(value, ensure_ascii=False))


def scalar() -> Expression:
    """A value that holds no others."""
    return Either((STRING, NUMBER, *map(text, ("true", "false", "null"))))


def any_value(depth: int = DEPTH) -> Expression:
    """Any value, with up to `depth` objects and lists within each other."""
    if not depth:
        return scalar()
    inner = any_value(depth - 1)
    return Either((scalar(), any_object(inner), array_of((), inner, 0, None)))


def any_object(value: Expression) -> Expression:
    """Any object whose members have such values."""
    return object_of((), Member(STRING, value, False))
