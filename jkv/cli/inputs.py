"""What commands read: prompts, problems, settings, and checks of where they will write."""

import argparse
import ast
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jkv.checks import install, shown

EXAMPLES = """\
examples:
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e"
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy r_kv --budget 64 --set interval=16 --set window=4
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy r_kv --budget 64 --html kept.html
  jkv generate --file prompts.txt --policy streaming_llm --budget 128 --out completions.jsonl
  jkv eval --config configs/experiments/tiny.toml --out results
  jkv analyze completions.jsonl --model tiny-reasoner
  jkv analyze --policies full,r_kv --budgets 256 --out results
  jkv steer --problems 100 --out steer.safetensors
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy seal --set vector=steer.safetensors
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy reason_cache --set percentile=100 --page-size 4
  jkv plan r1-llama-8b --device h200 --policy r_kv --budget 1024 --length 16384
  jkv policies
"""


def examples_of(command: str) -> str:
    """The examples of one command."""
    title, *lines = EXAMPLES.splitlines()
    return "\n".join([title, *(line for line in lines if line.startswith(f"  jkv {command}"))])


LOOKS: dict[str, Any] = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}


def words(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def read_settings(budget: int | None, pairs: Iterable[str]) -> dict[str, Any]:
    """Policy settings from `--budget` and `--set name=value`."""
    settings: dict[str, Any] = {} if budget is None else {"budget": budget}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, such as interval=16; got {shown(pair)}.")
        try:
            settings[name.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two where it is nested too deep
            settings[name.strip()] = text.strip()
    return settings


def read_prompts(prompt: str | None, file: Path | None) -> list[Any]:
    """The prompts of the command line or of a file."""
    if (prompt is None) == (file is None):
        raise ValueError("generate takes one prompt or --file FILE; got " + ("neither." if prompt is None else "both."))
    if file is None:
        return [prompt]
    from jkv.reports import read_json_lines
    from jkv.text_files import read_text

    if file.suffix == ".json":
        raise ValueError(
            f"Prompts are one a line, or JSON lines in a file that ends in .jsonl; got {file}. Rename or convert it."
        )
    lines = [line for line in read_text(file).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file} must hold at least one prompt, one a line; it is empty.")
    if file.suffix != ".jsonl":
        return lines
    prompts = [record["prompt"] for record in read_json_lines(file, ("prompt",))]
    for i, one in enumerate(prompts):
        if not isinstance(one, str | list):
            raise ValueError(f"A prompt is a string or a list of token ids; prompt {i} of {file} is {shown(one)}.")
    return prompts


def check_target(path: Path, option: str = "--out") -> None:
    """Refuses to start what could not be written at its end."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise ValueError(f"{option} must be a file in a folder that exists; got {path}.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option} must be a file that may be written; {path} may not. Give another.")
    if path.exists() and stat.S_ISFIFO(path.stat().st_mode):  # to open one that nobody reads takes for ever
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            raise ValueError(f"{option} must be a file, or a pipe that is read; nothing reads {path}. Give another.") from None


def make_folder(path: Path) -> None:
    """Makes the folder of `--out`, before work that would be lost without it.

    Raises:
      ValueError: a file is in its place, or it may not be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out must be a folder that can be made; got {path}: {error.strerror}. Give another.") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"--out must be a folder that may be written; {path} may not. Give another.")


def check_plotting() -> None:
    """Refuses to start what would fail at its end."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--out draws a picture with matplotlib, which is not installed. Run: {install('eval')}.")
