"""Which functions the tests check by their annotations: those that write shapes."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from beartype import beartype

SHAPES = re.compile(r"\b(Float|Int|UInt|Bool|Array|Key)\d*\[")


def writes_shapes(function: Callable[..., Any]) -> bool:
    """Whether an annotation of a function has a shape."""
    return bool(SHAPES.search(str(inspect.signature(function))))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its annotations checked, if one of them has a shape; the others are left to mypy.

    A function inside of another one is made anew by each call of that one, so by each trace, and making a check takes 2 ms.
    """
    return beartype(function) if writes_shapes(function) else function
