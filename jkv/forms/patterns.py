r"""Regular expressions in Python's syntax (`re`), as expressions of texts.

`\d`, `\w` and `\s` match ASCII only, as in JSON schemas. What no finite automaton has, such as a reference to a group, is
refused by name.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from jkv.checks import shown
from jkv.errors import InputError
from jkv.forms.expressions import (
    EMPTY,
    LAST_CHARACTER,
    SURROGATES,
    Chain,
    Either,
    Expression,
    Ranges,
    Repeat,
    characters,
    union,
    without,
)

DIGIT = [(48, 57)]
WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
SPACE = [(9, 13), (32, 32)]
ALL = [(0, LAST_CHARACTER)]
CATEGORIES = {
    constants.CATEGORY_DIGIT: DIGIT,
    constants.CATEGORY_NOT_DIGIT: without(ALL, DIGIT),
    constants.CATEGORY_WORD: WORD,
    constants.CATEGORY_NOT_WORD: without(ALL, WORD),
    constants.CATEGORY_SPACE: SPACE,
    constants.CATEGORY_NOT_SPACE: without(ALL, SPACE),
}
NEWLINE = [(10, 10)]
BEGINS = (constants.AT_BEGINNING, constants.AT_BEGINNING_STRING)
ENDS = (constants.AT_END, constants.AT_END_STRING)
MOST_CHARACTERS = 10_000  # of a pattern
HAVE_NOT = {  # what Python's syntax has and an automaton has not
    constants.ASSERT: "a lookahead or lookbehind",
    constants.ASSERT_NOT: "a lookahead or lookbehind",
    constants.AT: r"an anchor inside (^ and $ may stand at the ends, \b nowhere)",
    constants.ATOMIC_GROUP: "an atomic group",
    constants.GROUPREF: "a reference to a group",
    constants.GROUPREF_EXISTS: "a reference to a group",
    constants.POSSESSIVE_REPEAT: "a possessive repeat",
}

Leaf = Callable[[Ranges], Expression]


def expression_of(pattern: str, leaf: Leaf = characters, *, is_whole: bool = True) -> Expression:
    """The texts that a pattern matches: as a whole, or anywhere in them, as a pattern of a JSON schema does.

    `leaf` writes one character of a set.

    Raises:
      ValueError: no regular expression, or one with what an automaton has not.
    """
    if len(pattern) > MOST_CHARACTERS:
        rule = "{field} must have at most {most:,} characters as a regular expression; got {got:,}. Shorten it."
        raise InputError(rule, field="form", code="too_long", most=MOST_CHARACTERS, got=len(pattern))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        rule = "{field} must be a regular expression in Python's syntax; got {got}: {error}. Correct it."
        raise InputError(rule, field="form", got=shown(pattern), error=str(error)) from None
    if flags := parsed.state.flags & (re.IGNORECASE | re.MULTILINE | re.LOCALE):
        raise not_regular(f"the flag {re.RegexFlag(flags).name}", pattern)
    rest = Repeat(leaf(ALL))

    def branch(items: Sequence[Any]) -> Expression:
        """An alternative of the whole pattern, at whose ends anchors may stand."""
        items = list(items)
        begins = items[:1] and items[0][0] is constants.AT and items[0][1] in BEGINS
        items = items[1:] if begins else items
        if len(items) == 1 and items[0][0] is constants.BRANCH:  # Python takes out what alternatives begin with
            start = [(constants.AT, BEGINS[0])] if begins else []
            return Either(tuple(branch([*start, *each]) for each in items[0][1][1]))
        ends = items[-1:] and items[-1][0] is constants.AT and items[-1][1] in ENDS
        items = items[:-1] if ends else items
        inner = sequence(items)
        if is_whole:
            return inner
        return Chain((EMPTY if begins else rest, inner, EMPTY if ends else rest))

    def sequence(items: Sequence[Any]) -> Expression:
        return Chain(tuple(item(*each) for each in items))

    def item(name: Any, value: Any) -> Expression:
        if name is constants.BRANCH:
            return Either(tuple(sequence(each) for each in value[1]))
        if name is constants.SUBPATTERN:
            _, added, removed, inner = value
            if added & ~re.ASCII or removed:
                raise not_regular("flags of a group", pattern)
            return sequence(inner)
        if name in (constants.MAX_REPEAT, constants.MIN_REPEAT):
            least, most, inner = value
            return Repeat(sequence(inner), least, None if most is constants.MAXREPEAT else most)
        if name in HAVE_NOT:
            raise not_regular(HAVE_NOT[name], pattern)
        dot = ALL if parsed.state.flags & re.DOTALL else without(ALL, NEWLINE)
        return leaf(without(dot if name is constants.ANY else set_of(name, value), [SURROGATES]))

    return branch(parsed)


def set_of(name: Any, value: Any) -> Ranges:
    """The characters of a part of a pattern that is one character."""
    if name is constants.LITERAL:
        return [(value, value)]
    if name is constants.NOT_LITERAL:
        return without(ALL, [(value, value)])
    if name is constants.RANGE:
        return [value]
    if name is constants.CATEGORY:
        return CATEGORIES[value]
    assert name is constants.IN, name
    is_negated = value[0][0] is constants.NEGATE
    found = union(each for part in value[is_negated:] for each in set_of(*part))
    return without(ALL, found) if is_negated else found


def not_regular(what: str, pattern: str) -> ValueError:
    """The error about a pattern with something that no finite automaton has."""
    rule = "{field} cannot have {what}, which no finite automaton has; got {got}. Write it without."
    return InputError(rule, field="form", code="unsupported", what=what, got=shown(pattern))
