"""Runtime type checks of public arguments; an error names the argument, and shows its value in a few words."""

import difflib
import numbers
import reprlib
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    tuple: "a list",
    dict: "a table of names and values",
    types.NoneType: "None",
}
DISTRIBUTION = "jkv-cache"  # on PyPI, where `jkv` is another project
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
MOST_SHOWN = 100  # characters of a value in an error
SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = SHOWN.maxlong = MOST_SHOWN


def size(num_bytes: float) -> str:
    """Bytes as text, in powers of ten, to three digits.

    >>> size(1_230_000_000), size(999), size(999_700), size(-5e6)
    ('1.23 GB', '999 B', '1 MB', '-5 MB')
    """
    rounded = float(f"{num_bytes:.3g}")
    unit, scale = next(((unit, scale) for unit, scale in UNITS if abs(rounded) >= scale), ("B", 1.0))
    value = rounded / scale
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "sample"), counted(1200, "sample")
    ('1 sample', '1,200 samples')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that a wrong one is most like, as a sentence with a space before it; empty if none is.

    >>> did_you_mean("rkv", ["full", "r_kv"]), did_you_mean("zzz", ["full", "r_kv"])
    (' Did you mean r_kv?', '')
    """
    close = difflib.get_close_matches(str(name)[:MOST_SHOWN], list(known), 1)
    return f" Did you mean {close[0]}?" if close else ""


def words(text: str) -> list[str]:
    """The parts of a comma-separated list.

    >>> words("r_kv, snap_kv,")
    ['r_kv', 'snap_kv']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def install(extra: str) -> str:
    """How to install an extra.

    >>> install("eval")
    'pip install "jkv-cache[eval]"'
    """
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def shown(value: Any) -> str:
    """A value as an error shows it: at most about a hundred characters, and never an error of its own.

    >>> shown(list(range(10**6))), shown("a" * 10**6)[:3], shown(10**5000)
    ('[0, 1, 2, 3, 4, 5, ...]', "'aa", 'a whole number of 16610 bits')
    """
    if isinstance(value, int) and not -(2**256) < value < 2**256:  # Python refuses to print those of 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    try:
        return SHOWN.repr(value)[: 4 * MOST_SHOWN]
    except BaseException as error:  # a caller's object may raise anything
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"a value of type {type(value).__name__}"


def described(error: BaseException | None) -> str:
    r"""An exception in one line: its type and the first line of its text, which may raise itself.

    >>> described(OSError("The disk is full.\nTry another."))
    'OSError: The disk is full'
    """
    try:
        text = str(error)
    except BaseException as other:
        if isinstance(other, KeyboardInterrupt):
            raise
        text = ""
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0].rstrip('. ')}".rstrip(": ")


def typed(name: str, value: Any, wanted: Any) -> Any:
    """The value as one of the types wanted (an annotation); NumPy's numbers and truth values become Python's.

    Raises:
      ValueError: the value has none of these types, or is too large for a number.

    >>> typed("budget", 64, int | None)
    64
    """
    union = wanted.__args__ if isinstance(wanted, types.UnionType) else (wanted,)
    kinds = [kind.__origin__ if isinstance(kind, types.GenericAlias) else kind for kind in union]
    if bool in kinds and isinstance(value, np.bool_):
        return bool(value)
    if not isinstance(value, bool):
        if int in kinds and isinstance(value, numbers.Integral):
            return int(value)
        if float in kinds and isinstance(value, numbers.Real):
            try:
                return float(value)
            except OverflowError:
                raise ValueError(f"{name} must be a number below 1.8e308; got {shown(value)}.") from None
    plain: Any = tuple(kind for kind in kinds if kind not in (int, float))
    if Any not in plain and not isinstance(value, plain):
        words = (WORDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds)
        raise ValueError(f"{name} must be {' or '.join(words)}; got {shown(value)}.")
    return value


def check_counts(**values: Any) -> None:
    """Refuses counts below one and values that are no whole numbers; None means a default and passes."""
    for name, value in values.items():
        if value is not None and typed(name, value, int) < 1:
            raise ValueError(f"{name} must be at least 1; got {shown(value)}.")


def check_most(most: int, **values: Any) -> None:
    """Refuses counts above a limit; None passes."""
    for name, value in values.items():
        if value is not None and value > most:
            raise ValueError(f"{name} must be at most {most:,}; got {shown(value)}. Lower it.")


def check_length(name: str, values: Any, most: int, unit: str) -> int:
    """The length of a sequence, without a look at its elements.

    Raises:
      ValueError: something that has no length or no order, or more than `most` elements.
    """
    if isinstance(values, str | bytes | bytearray | dict | set | frozenset) or not hasattr(values, "__len__"):
        raise ValueError(f"{name} must be a list of {unit}; got {shown(values)}. Write [...].")
    try:
        length = len(values)
    except (TypeError, OverflowError):  # an array of no dimension; a range of more than 2**63
        raise ValueError(f"{name} must be a list of at most {most:,} {unit}; got {shown(values)}.") from None
    if length > most:
        raise ValueError(f"{name} must be at most {most:,} {unit}; got {length:,}. Pass fewer.")
    return length
