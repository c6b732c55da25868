"""Which part of a sweep runs every day: `@pytest.mark.everyday(where=...)`; the rest is `slow`."""

from collections.abc import Hashable, Iterable


def in_turn(firsts: Iterable[Hashable], first: Hashable, seconds: Iterable[Hashable], second: Hashable) -> bool:
    """Whether this pair is of the diagonal: each of `firsts` with one of `seconds`, and those in turn.

    >>> [(a, b) for a in "pqr" for b in "xy" if in_turn("pqr", a, "xy", b)]
    [('p', 'x'), ('q', 'y'), ('r', 'x')]
    """
    seconds = list(seconds)
    return list(firsts).index(first) % len(seconds) == seconds.index(second)
