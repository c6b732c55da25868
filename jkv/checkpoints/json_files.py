"""Reads the JSON files of a checkpoint folder under limits, because a checkpoint may be damaged or hostile.

A file must be a regular file of its folder. Its size, the number of its values and its depth are bounded before or while it is
parsed, so memory and time are too. `jkv.checkpoints.family` checks the fields.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jkv.errors import refused

AGAIN = "The file is damaged, incomplete or a git-lfs pointer. Download or copy it again."
CORRECT = "Correct the field, or download the file again."
MAX_BYTES = 1 << 26  # the tokenizer.json of Gemma 3, with 262,144 tokens, has half of this
MAX_VALUES = 1 << 22
MAX_DEPTH = 64
Folder: TypeAlias = str | os.PathLike[str]


class Rule(NamedTuple):
    """What a field of a JSON file must be."""

    wanted: str  # completes "must be"
    holds: Callable[[Any], bool]


# Files


def find_file(file: Path, folder: Path | None = None) -> Path | None:
    """The same path if there is such a file, None if there is none. `folder` is the checkpoint's; None means the file's own.

    Links may lead to a file of the folder, or to the blobs of the Hugging Face cache that the folder is a snapshot of.

    Raises:
      ValueError: the file is a device, a pipe, a folder and the like, or a link to one of these or out of the folder.
    """
    if not os.path.lexists(file):
        return None
    try:
        root, target = Path(os.path.realpath(folder or file.parent)), Path(os.path.realpath(file, strict=True))
        is_regular = stat.S_ISREG(os.stat(target).st_mode)
    except OSError as error:
        rule = f"{file} must be a readable file, got a broken link or no permission: {error}. {AGAIN}"
        raise refused(rule, file="invalid") from error
    if not is_regular:
        rule = f"{file} must be a regular file, got a folder, device, pipe or socket. Copy the file itself there."
        raise refused(rule, file="invalid")
    places = [root]
    if root.parent.name == "snapshots" and root.parents[1].name.startswith("models--"):  # hub cache
        places += [root.parents[1] / "blobs", root.parents[2] / "blobs"]  # of the model, and shared by all
    if not any(target.is_relative_to(place) for place in places):
        raise refused(f"{file} must lie in its folder, got a link to {target}. Copy the file itself there.", file="invalid")
    return file


def read_bytes(file: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file with at most `limit` bytes.

    Raises:
      ValueError: the file is missing, larger, or refused by `find_file`.
    """
    if find_file(file) is None:
        raise refused(
            f"{file.parent} must contain {file.name}; it has none. Pass a folder in the form of Hugging Face; "
            "jkv.load takes one of jkv.save too.",
            file="not_found",
        )
    try:
        # A pipe that took the place of the file since must not block.
        with open(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = b"" if size > limit else stream.read(size + 1)
    except OSError as error:
        raise refused(f"{file} must be readable: {error}. {AGAIN}", file="invalid") from error
    if max(size, len(data)) > limit:
        rule = f"{file} must have at most {limit:,} bytes, got {size:,}. Download or copy the right file."
        raise refused(rule, file="too_long")
    return data


def read_json(file: Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: the file is missing, no regular file, too large, too deep, or not one JSON object with distinct names.
    """
    return parse_object(read_bytes(file, limit), str(file))


# Parsing


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object that these bytes are; error messages begin with `where`.

    NaN, infinity, names that occur twice and deep nesting are refused, and by Python integers of more than 4,300 digits.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        rule = f"{where} must have at most {MAX_VALUES:,} values, got more. Download or copy the right file."
        raise refused(rule, file="too_long")
    try:
        fields = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=distinct,
            parse_constant=refuse_constant,
            parse_float=parse_finite,
        )
    except RecursionError:
        raise refused(f"{where} must be JSON of at most {MAX_DEPTH} levels, got more. {AGAIN}", file="bad_json") from None
    except ValueError as error:
        raise refused(f"{where} must be JSON: {error}. {AGAIN}", file="bad_json") from error
    if not isinstance(fields, dict):
        raise refused(f"{where} must contain a JSON object, got a {type(fields).__name__}. {AGAIN}", file="wrong_type")
    if depth(fields) > MAX_DEPTH:
        raise refused(f"{where} must be JSON of at most {MAX_DEPTH} levels, got {depth(fields)}. {AGAIN}", file="too_long")
    return fields


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Refuses a name that occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in fields if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} occurs twice in one object")
    return fields


def refuse_constant(name: str) -> Any:
    """Python accepts NaN and Infinity, which are not JSON."""
    raise ValueError(f"numbers must be finite, got {name}")


def parse_finite(text: str) -> float:
    """A number with a fraction or an exponent."""
    number = float(text)
    if number - number != 0:  # infinity, as of 1e999
        raise ValueError(f"numbers must be finite, got {shown(text)}")
    return number


def depth(value: Any) -> int:
    """The levels of nested objects and lists."""
    level, levels = [value], 0
    while level:
        levels += 1
        inner = [item.values() if type(item) is dict else item for item in level]
        level = [item for items in inner for item in items if type(item) in (dict, list)]
    return levels


# Rules


def shown(value: Any) -> str:
    """A value as an error message shows it, cut to a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def printable(error: object) -> str:
    """The text of a library's error on one line, without control characters from the file."""
    text = " ".join(str(error).split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)[:500]


def check_fields(fields: Mapping[str, Any], rules: Mapping[str, Rule], where: str, required: Iterable[str] = ()) -> None:
    """Refuses fields that break their rule, and missing ones. Fields without a rule are ignored."""
    for name in required:
        if name not in fields:
            raise refused(f"{where}: {name} must be {rules[name].wanted}, got none. {CORRECT}", **{name: "missing"})
    for name in fields.keys() & rules.keys():
        if not rules[name].holds(fields[name]):
            rule = f"{where}: {name} must be {rules[name].wanted}, got {shown(fields[name])}. {CORRECT}"
            raise refused(rule, **{name: "invalid"})


def integer(low: int, high: int) -> Rule:
    """An integer in [low, high]; true and 2.0 are none."""
    return Rule(f"an integer in [{low}, {high}]", lambda value: type(value) is int and low <= value <= high)


def whole(low: int, high: int) -> Rule:
    """An integer in [low, high], or a number without a fraction, as 50.0; true is none."""
    return Rule(
        f"a whole number in [{low}, {high}]",
        lambda value: type(value) in (int, float) and low <= value <= high and value == int(value),
    )


def number(low: float, high: float) -> Rule:
    """A number in (low, high]; true is none."""
    return Rule(f"a number in ({low:g}, {high:g}]", lambda value: type(value) in (int, float) and low < value <= high)


def at_least(low: float, high: float) -> Rule:
    """A number in [low, high]; true is none."""
    return Rule(f"a number in [{low:g}, {high:g}]", lambda value: type(value) in (int, float) and low <= value <= high)


def nullable(rule: Rule) -> Rule:
    """The rule, or null."""
    return Rule(f"{rule.wanted} or null", lambda value: value is None or rule.holds(value))


def list_of(rule: Rule, most: int, least: int = 0) -> Rule:
    """A list of values that hold to the rule."""
    return Rule(
        f"a list of {least} to {most} values, each {rule.wanted}",
        lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(rule.holds, value)),
    )


def either(first: Rule, second: Rule) -> Rule:
    """One of two rules."""
    return Rule(f"{first.wanted} or {second.wanted}", lambda value: first.holds(value) or second.holds(value))


SWITCH = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a string", lambda value: isinstance(value, str))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
