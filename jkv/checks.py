"""Runtime type checks of public arguments; an error names the argument."""

import numbers
import types
from typing import Any

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    tuple: "a list",
    dict: "a table of names and values",
    types.NoneType: "None",
}


def typed(name: str, value: Any, wanted: Any) -> Any:
    """The value as one of the types wanted (an annotation); NumPy's numbers become Python's.

    Raises:
      ValueError: the value has none of these types.

    >>> typed("budget", 64, int | None)
    64
    """
    union = wanted.__args__ if isinstance(wanted, types.UnionType) else (wanted,)
    kinds = [kind.__origin__ if isinstance(kind, types.GenericAlias) else kind for kind in union]
    if not isinstance(value, bool):
        if int in kinds and isinstance(value, numbers.Integral):
            return int(value)
        if float in kinds and isinstance(value, numbers.Real):
            return float(value)
    plain: Any = tuple(kind for kind in kinds if kind not in (int, float))
    if Any not in plain and not isinstance(value, plain):
        words = (WORDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds)
        raise ValueError(f"{name} must be {' or '.join(words)}; got {value!r}.")
    return value


def check_counts(**values: Any) -> None:
    """Refuses counts below one and values that are no whole numbers; None means a default and passes."""
    for name, value in values.items():
        if value is not None and typed(name, value, int) < 1:
            raise ValueError(f"{name} must be at least 1; got {value!r}.")
