"""Which implementation of a kernel runs: the best available by default, a named one or a clear error."""

from collections.abc import Callable
from typing import Any


def choose(kernel: str, table: dict[str, Callable[..., Any]], implementation: str | None) -> Callable[..., Any]:
    """The function that `implementation` names; None takes the first of `table`, which is ordered best first.

    Raises:
      ValueError: the kernel has no implementation of that name.
    """
    if implementation is None:
        return next(iter(table.values()))
    if implementation not in table:
        raise ValueError(f"{kernel} has the implementations {sorted(table)}, or None for the best; got {implementation!r}.")
    return table[implementation]
