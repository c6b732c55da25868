"""Expressions of texts: what a form is before it becomes an automaton (`jkv.forms.automaton`).

They are made of sets of symbols. A symbol is a byte, or from 256 on what a vocabulary adds (`jkv.forms.vocabulary`). Sets are
bits of a whole number. An expression may be part of several others, and then shares states of the automaton with them.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

Ranges = Sequence[tuple[int, int]]  # of characters, first and last, in ascending order

LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # which UTF-8 does not write
LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, LAST_CHARACTER)  # characters of one byte, of two, and so on


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """A set of texts."""


@dataclasses.dataclass(frozen=True, eq=False)
class One(Expression):
    """One symbol of a set."""

    symbols: int


@dataclasses.dataclass(frozen=True, eq=False)
class Chain(Expression):
    """One after the other."""

    parts: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Either(Expression):
    """One of several; nothing at all where there is none."""

    parts: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(Expression):
    """At least `least` and at most `most` times; None is without limit."""

    part: Expression
    least: int = 0
    most: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Machine(Expression):
    """What an automaton accepts (`jkv.forms.automaton.Automaton`)."""

    automaton: Any


EMPTY: Expression = Chain(())
NOTHING: Expression = Either(())


def chain(*parts: Expression) -> Expression:
    """One after the other."""
    return parts[0] if len(parts) == 1 else Chain(parts)


def either(parts: Iterable[Expression]) -> Expression:
    """One of several."""
    parts = tuple(parts)
    return parts[0] if len(parts) == 1 else Either(parts)


def optional(part: Expression) -> Expression:
    """It, or nothing."""
    return Either((part, EMPTY))


def bits(first: int, last: int) -> int:
    """The symbols from first to last.

    >>> bin(bits(2, 4))
    '0b11100'
    """
    return (1 << (last + 1)) - (1 << first)


def text(value: str | bytes) -> Expression:
    """One text."""
    value = value.encode() if isinstance(value, str) else value
    return chain(*(One(1 << byte) for byte in value))


def characters(ranges: Ranges) -> Expression:
    """One character of a set, in UTF-8."""
    return either(
        chain(*(One(bits(first, last)) for first, last in each))
        for low, high in without(ranges, [SURROGATES])
        for each in utf8_ranges(low, high)
    )


def utf8_ranges(low: int, high: int) -> Iterable[tuple[tuple[int, int], ...]]:
    """The UTF-8 of a range of characters, as sequences of ranges of bytes.

    >>> list(utf8_ranges(ord("a"), ord("ÿ")))
    [((97, 127),), ((194, 195), (128, 191))]
    """
    for last in LAST_OF_LENGTH:
        if low <= last < high:
            yield from utf8_ranges(low, last)
            yield from utf8_ranges(last + 1, high)
            return
    for place in range(1, len(chr(low).encode())):  # the lowest 6 bits of each byte after the first
        mask = (1 << 6 * place) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                yield from utf8_ranges(low, low | mask)
                yield from utf8_ranges((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from utf8_ranges(low, (high & ~mask) - 1)
                yield from utf8_ranges(high & ~mask, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


def union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, joined where they meet."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found


def without(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The characters of ranges that are in none of the others.

    >>> without([(1, 9)], [(3, 4), (9, 12)])
    [(1, 2), (5, 8)]
    """
    found = []
    for low, high in union(ranges):
        for first, last in union(others):
            if last < low or first > high:
                continue
            if first > low:
                found.append((low, first - 1))
            low = last + 1
        if low <= high:
            found.append((low, high))
    return found
