"""Which implementation of a kernel runs: the best for the platform by default, a named one or a clear error."""

import functools
from collections.abc import Callable
from typing import Any

import jax

PLATFORMS = ("cpu",)  # names of implementations that are for one platform only


def choose(
    kernel: str, table: dict[str, Callable[..., Any]], implementation: str | None, **settings: Any
) -> Callable[..., Any]:
    """The function that `implementation` names, its settings bound; None takes the platform's compiled for, else the reference.

    Raises:
      ValueError: the kernel has no implementation of that name.
    """
    if implementation is not None and implementation not in table:
        raise ValueError(f"{kernel} has the implementations {sorted(table)}, or None for the best; got {implementation!r}.")
    table = {name: functools.partial(run, **settings) for name, run in table.items()}
    if implementation is None:
        own = {platform: table[platform] for platform in PLATFORMS if platform in table}
        if not own:
            return table["reference"]
        return functools.partial(jax.lax.platform_dependent, default=table["reference"], **own)
    return table[implementation]
