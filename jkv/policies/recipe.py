"""What every recipe does with its settings before it looks at them: a value of another type is refused by name."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from jkv.checks import typed
from jkv.policies.base import Policy

P = ParamSpec("P")


def recipe(build: Callable[P, Policy]) -> Callable[P, Policy]:
    """A recipe whose settings are of the types that it is annotated with; NumPy's numbers become Python's.

    >>> @recipe
    ... def mine(budget: int) -> Policy:
    ...     return Policy("mine")
    >>> mine(budget=2.5)
    Traceback (most recent call last):
    ValueError: mine's budget must be a whole number; got 2.5.
    """
    signature = inspect.signature(build)

    @functools.wraps(build)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Policy:
        given = signature.bind(*args, **kwargs)
        for field, value in given.arguments.items():
            given.arguments[field] = typed(f"{build.__name__}'s {field}", value, signature.parameters[field].annotation)
        return build(*given.args, **given.kwargs)

    return checked
