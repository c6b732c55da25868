"""Numbers of JSON within bounds, as expressions of texts."""

import functools
import math
from decimal import Decimal

import numpy as np

from jkv.forms.automaton import BYTES, DEAD, Automaton, both, smallest
from jkv.forms.expressions import (
    EMPTY,
    NOTHING,
    Chain,
    Either,
    Expression,
    Machine,
    One,
    Repeat,
    bits,
    chain,
    either,
    optional,
    text,
)

MOST_EXPONENT = 2  # digits, so that every number is one of float64
LONGEST_BOUND = 40  # digits of a bound


def digits(first: int = 0, last: int = 9) -> Expression:
    """One digit of a range."""
    return One(bits(48 + first, 48 + last)) if first <= last else NOTHING


ANY = digits()
MINUS, POINT = text("-"), text(".")
NATURAL = Either((text("0"), Chain((digits(1), Repeat(ANY)))))
PLAIN = Chain((NATURAL, optional(Chain((POINT, Repeat(ANY, 1))))))  # without an exponent
EXPONENT = Chain(
    (One(1 << ord("e") | 1 << ord("E")), optional(One(1 << ord("+") | 1 << ord("-"))), Repeat(ANY, 1, MOST_EXPONENT))
)
INTEGER = Chain((optional(MINUS), NATURAL))
NUMBER = Chain((optional(MINUS), PLAIN, optional(EXPONENT)))


def integers(low: int | None, high: int | None) -> Expression:
    """Whole numbers from low to high; None is without bound."""
    if low is None and high is None:
        return INTEGER
    parts = [natural(max(low or 0, 0), high)]
    if low is None or low <= 0:
        parts.append(chain(MINUS, natural(max(-high, 0) if high is not None else 0, None if low is None else -low)))
    return either(parts)


def natural(low: int, high: int | None) -> Expression:
    """Whole numbers from low to high, none below 0."""
    if high is not None and high < low:
        return NOTHING
    first = str(low)
    if high is None:
        return either([of_length(first, "9" * len(first)), chain(digits(1), Repeat(ANY, len(first)))])
    last = str(high)
    shorter = range(len(first), len(last))  # digits
    starts = [first, *("1" + "0" * length for length in shorter)]
    ends = [*("9" * length for length in shorter), last]
    return either(map(of_length, starts, ends))


def of_length(low: str, high: str) -> Expression:
    """Runs of digits between two of the same length."""
    if not low:
        return EMPTY
    a, b, count = low[0], high[0], len(low) - 1
    if a == b:
        return chain(text(a), of_length(low[1:], high[1:]))
    middle = chain(digits(int(a) + 1, int(b) - 1), Repeat(ANY, count, count))
    return either([chain(text(a), of_length(low[1:], "9" * count)), middle, chain(text(b), of_length("0" * count, high[1:]))])


def numbers(low: Decimal | None, high: Decimal | None, is_low_open: bool = False, is_high_open: bool = False) -> Expression:
    """Numbers between two bounds, which are open where they do not count themselves; without exponents where there is one."""
    if low is None and high is None:
        return NUMBER
    above = positive(low, high, is_low_open, is_high_open)
    below = positive(None if high is None else -high, None if low is None else -low, is_high_open, is_low_open)
    return either([above, chain(MINUS, below)])


def positive(low: Decimal | None, high: Decimal | None, is_low_open: bool, is_high_open: bool) -> Expression:
    """Numbers without a sign between two bounds."""
    parts: list[Expression] = [PLAIN]
    if low is not None and (low > 0 or (low == 0 and is_low_open)):
        parts.append(beyond(low, is_low_open))
    if high is not None:
        parts.append(NOTHING if high < 0 else up_to(high, is_high_open))
    return both(*parts)


def split(bound: Decimal) -> tuple[int, str]:
    """The whole part of a bound, and the digits after its point."""
    whole = math.floor(bound)
    return whole, format(bound - whole, "f").partition(".")[2].rstrip("0")


def beyond(bound: Decimal, is_open: bool) -> Expression:
    """Numbers of at least a bound, or above it; also texts that are no numbers."""
    whole, fraction = split(bound)
    after = Chain((ANY, Repeat(ANY)))

    def from_here(rest: str) -> Expression:
        if not rest:
            return chain(Repeat(ANY), digits(1), Repeat(ANY)) if is_open else Repeat(ANY)
        return either(
            [chain(digits(int(rest[0]) + 1), Repeat(ANY)), chain(digits(int(rest[0]), int(rest[0])), from_here(rest[1:]))]
        )

    equal = chain(text(str(whole)), either([chain(POINT, from_here(fraction)), *([] if fraction or is_open else [EMPTY])]))
    return either([chain(natural(whole + 1, None), optional(chain(POINT, after))), equal])


def up_to(bound: Decimal, is_open: bool) -> Expression:
    """Numbers of at most a bound, or below it; also texts that are no numbers."""
    whole, fraction = split(bound)

    def to_here(rest: str) -> Expression:
        if not rest:
            return NOTHING if is_open else Repeat(text("0"))
        less = chain(digits(0, int(rest[0]) - 1), Repeat(ANY))
        return either([less, EMPTY, chain(digits(int(rest[0]), int(rest[0])), to_here(rest[1:]))])

    none = [] if is_open and not fraction else [EMPTY]
    equal = chain(text(str(whole)), either([chain(POINT, to_here(fraction)), *none]))
    below = chain(natural(0, whole - 1), optional(chain(POINT, Repeat(ANY)))) if whole else NOTHING
    return either([below, equal])


@functools.cache
def multiples(step: int) -> Expression:
    """Whole numbers that a number divides, of any sign."""
    # A state for each remainder: built as rows of an automaton, because an expression of it would be far larger.
    class_of = np.zeros(BYTES, np.int32)
    class_of[48:58] = np.arange(1, 11)
    remainder = np.arange(step)[:, None]
    rows = np.concatenate([np.full((step, 1), DEAD), (10 * remainder + np.arange(10)) % step], axis=1)
    machine = smallest(Automaton(rows.astype(np.int32), class_of, remainder[:, 0] == 0, (0,)))
    return chain(optional(MINUS), both(NATURAL, Machine(machine)))
