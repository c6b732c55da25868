"""Text, JSON and TOML of files that may be anything: a device, a pipe, too large, no text, nested a hundred thousand deep.

Whatever is wrong is a ValueError, or the system's own error, that names the file.
"""

import json
import stat
import tomllib
from pathlib import Path
from typing import Any

from jkv.errors import refused

MOST_BYTES = 1 << 30  # of a file that is read as a whole
MOST_SETTINGS = 1 << 20  # of one with settings
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def check_file(path: Path, most: int = MOST_BYTES) -> None:
    """Refuses what is no regular file, before it is opened: a pipe without a writer would never open, a device never end.

    Raises:
      ValueError: another kind of file, or more than `most` bytes.
      OSError: no such file, or none that this user may see.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise refused(f"{path} must be a regular file; it is {kind}. Write its content to a file.", path="invalid")
    if found.st_size > most:
        raise refused(f"{path} must have at most {most:,} bytes; it has {found.st_size:,}. Split the file.", path="too_long")


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """A file's text; a byte order mark is no part of it.

    Raises:
      ValueError: bytes that are not UTF-8, or what `check_file` refuses.
    """
    check_file(path, most)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise refused(f"{path} must be UTF-8 text; {error}. Convert the file.", path="invalid") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file of settings.

    Raises:
      ValueError: text that is no TOML, or what `read_text` refuses.
    """
    text = read_text(path, MOST_SETTINGS)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits is a plain ValueError
        raise refused(f"{path} must be TOML: {reason(error)}. Correct the file.", path="invalid") from None


def read_json(path: Path, fields: tuple[str, ...] = ()) -> Any:
    """The value in a JSON file; with `fields`, an object that has them.

    Raises:
      ValueError: text that is no JSON, a value that is no such object, or what `read_text` refuses.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"{path} must be JSON: {reason(error)}. Correct the file.", path="bad_json") from None
    if fields and not (isinstance(value, dict) and all(field in value for field in fields)):
        named = " and ".join(f'"{field}"' for field in fields)
        raise refused(f"{path} must be a JSON object with {named}; it is not. Correct the file.", path="invalid")
    return value


def reason(error: Exception) -> str:
    """What a parser says, in a few words."""
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)[:200]
