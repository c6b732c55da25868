"""Runtime type checks of public arguments; an error names the argument, and shows its value in a few words."""

import difflib
import numbers
import os
import reprlib
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

from jkv.errors import InputError

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    tuple: "a list",
    dict: "a table of names and values",
    types.NoneType: "None",
    os.PathLike: "a path",
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


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that a wrong one is most like, as a sentence with a space before it; empty if none is.

    `cutoff` is how alike they must be; 1 is equal.

    >>> did_you_mean("rkv", ["full", "r_kv"]), did_you_mean("zzz", ["full", "r_kv"])
    (' Did you mean r_kv?', '')
    """
    close = difflib.get_close_matches(str(name)[:MOST_SHOWN], list(known), 1, cutoff)
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
    if isinstance(value, int) and not -(2**256) < value < 2**256:  # Python refuses to print 4,300 digits
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


def typed(field: str, value: Any, wanted: Any, whose: str = "") -> Any:
    """The value as one of the types wanted (an annotation); NumPy's numbers and truth values become Python's.

    `whose` stands before the name in an error, such as "r_kv's ".

    Raises:
      InputError: the value has none of these types, or is too large for a number.

    >>> typed("budget", 64, int | None)
    64
    """
    union = wanted.__args__ if isinstance(wanted, types.UnionType) else (wanted,)
    kinds = [kind.__origin__ if isinstance(kind, types.GenericAlias) else kind for kind in union]
    if bool in kinds and isinstance(value, np.bool_):
        return bool(value)
    rule = "{whose}{field} must be {kinds}; got {got}."
    if not isinstance(value, bool):
        if int in kinds and isinstance(value, numbers.Integral):
            return int(value)
        if float in kinds and isinstance(value, numbers.Real):
            try:
                return float(value)
            except OverflowError:
                most = "a number below 1.8e308"
                raise InputError(rule, field=field, code="out_of_range", whose=whose, kinds=most, got=shown(value)) from None
    plain: Any = tuple(kind for kind in kinds if kind not in (int, float))
    if Any not in plain and not isinstance(value, plain):
        known = " or ".join(WORDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds)
        raise InputError(rule, field=field, code="wrong_type", whose=whose, kinds=known, got=shown(value))
    return value


def check_list(field: str, values: Any) -> list[Any]:
    """The elements of a list or another iterable; one value by itself, a text or None is refused.

    >>> check_list("policies", "r_kv")
    Traceback (most recent call last):
    jkv.errors.InputError: policies must be a list; got 'r_kv'. Put it into brackets.
    """
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise InputError(
            "{field} must be a list; got {got}. Put it into brackets.", field=field, code="wrong_type", got=shown(values)
        )
    return list(values)


def out_of_range(field: str, limits: str, value: Any) -> InputError:
    """The error about a value that must `limits`, such as "lie in (0, 1]"."""
    rule = "{field} must {limits}; got {got}."
    return InputError(rule, field=field, code="out_of_range", limits=limits, got=shown(value))


def check_counts(**values: Any) -> None:
    """Refuses counts below one and values that are no whole numbers; None means a default and passes."""
    for field, value in values.items():
        if value is not None and typed(field, value, int) < 1:
            raise out_of_range(field, "be at least 1", value)


def check_most(most: int, **values: Any) -> None:
    """Refuses counts above a limit; None passes."""
    for field, value in values.items():
        if value is not None and value > most:
            rule = "{field} must be at most {most:,}; got {got}. Lower it."
            raise InputError(rule, field=field, code="out_of_range", most=most, got=shown(value))


def check_memory(kv_memory: Any) -> int:
    """Bytes of a pool that are given as a number."""
    if isinstance(kv_memory, str):
        rule = '{field} must be a number of bytes, or "auto" for the free memory; got {got}.'
        raise InputError(rule, field="kv_memory", code="wrong_type", got=shown(kv_memory))
    num_bytes: int = typed("kv_memory", kv_memory, int)
    check_counts(kv_memory=num_bytes)
    return num_bytes


def check_between(least: float, most: float, why: str = "", **values: float | None) -> None:
    """Refuses numbers outside of [least, most], and NaN; None passes. `why` follows the interval, such as ", 1 keeps all".

    >>> check_between(0, 1, share=2.0)
    Traceback (most recent call last):
    jkv.errors.InputError: share must lie in [0, 1]; got 2.0.
    """
    for field, value in values.items():
        if value is not None and not least <= value <= most:
            raise out_of_range(field, f"lie in [{least:g}, {most:g}]{why}", value)


def check_least(least: int, unit: str = "", **values: float | None) -> None:
    """Refuses numbers below a limit, and NaN; None passes. `unit` follows the limit, such as " generated token"."""
    for field, value in values.items():
        if value is not None and not value >= least:
            raise out_of_range(field, f"be at least {least}{unit}", value)


def check_known(known: Iterable[Any], **names: Any) -> None:
    """Refuses names that are none of the known ones, which the error lists.

    >>> check_known(("head", "layer"), scope="heads")
    Traceback (most recent call last):
    jkv.errors.InputError: scope must be one of head, layer; got 'heads'. Did you mean head?
    """
    known = list(map(str, known))
    for field, name in names.items():
        if name not in known:
            rule, near = "{field} must be one of {known}; got {got}.{near}", did_you_mean(name, known)
            raise InputError(rule, field=field, code="unknown_name", known=", ".join(known), got=shown(name), near=near)


def need_tokenizer(tokenizer: Any, why: str, fix: str = "Take a model that has one.") -> None:
    """Refuses a model without a tokenizer; `why` one is needed, such as "Answers are read from text"."""
    if tokenizer is None:
        rule = "{why}, and this model has no tokenizer. {fix}"
        raise InputError(rule, field="model", code="unsupported", why=why, fix=fix)


def check_length(field: str, values: Any, most: int, unit: str, whose: str = "") -> int:
    """The length of a sequence, without a look at its elements.

    Raises:
      InputError: something that has no length or no order, or more than `most` elements.
    """
    rule, about = "{whose}{field} must be a list of {unit}; got {got}. Write [...].", {"whose": whose, "unit": unit}
    if isinstance(values, str | bytes | bytearray | dict | set | frozenset) or not hasattr(values, "__len__"):
        raise InputError(rule, field=field, code="wrong_type", **about, got=shown(values))
    try:
        length = len(values)
    except (TypeError, OverflowError):  # an array of no dimension; a range of more than 2**63
        rule = "{whose}{field} must be a list of at most {most:,} {unit}; got {got}."
        raise InputError(rule, field=field, code="wrong_type", **about, most=most, got=shown(values)) from None
    if length > most:
        rule = "{whose}{field} must be at most {most:,} {unit}; got {got:,}. Pass fewer."
        raise InputError(rule, field=field, code="too_long", **about, most=most, got=length)
    return length
