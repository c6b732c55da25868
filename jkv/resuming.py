"""What a resumed run must have in common with the run that began it: digests and settings, compared by name.

A run that is written to be resumed records what it is of: digests of the model's weights, tokenizer and configuration
(`Model.digests`), a digest of its data, and its settings. A second start computes the same again, and `check_same` refuses what
differs. `docs/evaluation.md` lists the commands that can be resumed, with what each of them compares.
"""

import hashlib
import json
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jkv.checks import shown
from jkv.errors import refused


def plain(value: Any) -> Any:
    """A value as a JSON file gives it back; what JSON does not know is its text.

    >>> plain({"budgets": (1, 2), "file": Path("mine.jsonl")})
    {'budgets': [1, 2], 'file': 'mine.jsonl'}
    """
    return json.loads(json.dumps(value, default=str))


def digest_of(value: Any) -> str:
    """Identifies a value that JSON can write: 16 hexadecimal digits, whatever the order of a table's names.

    >>> digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    True
    """
    return hashlib.blake2s(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def digest_of_files(paths: Collection[Path]) -> str:
    """Identifies the contents of files and their names, whatever folder they are in."""

    def sha256(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return digest_of(sorted((path.name, sha256(path)) for path in paths))


def digest_of_code(function: Any) -> str:
    """Identifies what a plain function does, in one version of Python: its instructions, names and constants.

    Neither its place in a file nor what it calls; empty for what has no code of its own, such as a partial function.

    >>> digest_of_code(lambda x: x + 1) == digest_of_code(lambda x: x + 1) != digest_of_code(lambda x: x + 2)
    True
    """

    def content(code: Any) -> Any:
        if isinstance(code, types.CodeType):
            return [code.co_code.hex(), code.co_names, [content(constant) for constant in code.co_consts]]
        return sorted(map(repr, code)) if isinstance(code, frozenset) else repr(code)

    code = getattr(function, "__code__", None)
    return "" if code is None else digest_of(content(code))


def check_same(what: str, before: Mapping[str, Any], now: Mapping[str, Any], fix: str, free: Collection[str] = ()) -> None:
    """Refuses to resume a run of something else.

    Args:
      what: was written before, with its verb, such as "out.json holds another comparison".
      before: what it is of, as read from a file.
      now: what a run is of that would go on with it.
      fix: what to do about it.
      free: names that may differ.

    Raises:
      ValueError: fields that differ, with both values, or that the file lacks because an older version of jkv wrote it.

    >>> check_same("out.json holds another run", {"weights": "0f"}, {"weights": "0f", "seed": 1}, "Give another --out.")
    Traceback (most recent call last):
    jkv.errors.InputError: out.json holds another run, or the same: an older version of jkv wrote it without seed, so that \
nobody can tell. Give another --out.
    """
    now = plain(now)
    names = [name for name in dict.fromkeys((*now, *before)) if name not in free]
    missing = [name for name in names if name in now and name not in before]
    differ = [name for name in names if name not in missing and before[name] != now.get(name)]
    if differ:
        each = "; ".join(f"{name} then {shown(before[name])}, now {shown(now.get(name))}" for name in differ)
        raise refused(f"{what}, by {', '.join(differ)} ({each}). {fix}", path="conflict")
    if missing:
        raise refused(
            f"{what}, or the same: an older version of jkv wrote it without {', '.join(missing)}, so that nobody can tell. "
            f"{fix}",
            path="conflict",
        )
