"""Which implementation of a kernel runs: the best for the platform by default, a named one or a clear error."""

import functools
from collections.abc import Callable
from typing import Any

import jax

PLATFORMS = ("cpu",)  # names of implementations that are for one platform only


def choose(kernel: str, table: dict[str, Callable[..., Any]], implementation: str | None) -> Callable[..., Any]:
    """The function that `implementation` names; None takes that of the platform compiled for, and else the reference.

    Raises:
      ValueError: the kernel has no implementation of that name.
    """
    if implementation is None:
        own = {platform: table[platform] for platform in PLATFORMS if platform in table}
        if not own:
            return table["reference"]
        return functools.partial(jax.lax.platform_dependent, default=table["reference"], **own)
    if implementation not in table:
        raise ValueError(f"{kernel} has the implementations {sorted(table)}, or None for the best; got {implementation!r}.")
    return table[implementation]
