"""The tables of families in `docs/models.md` and of their files in `docs/files.md`, made of the tests that pytest collects.

`python -m tests.support.model_table` writes them. A test that is marked `tested(column)` shows a family in that column: the
family of its golden checkpoint or model, or the one that the mark names. The suite runs the tests;
`tests/repository/test_model_table.py` fails where a page says another thing than they do.
"""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jkv.checkpoints.families import FAMILIES
from jkv.checkpoints.model_shapes import find_shape
from jkv.reports import markdown

ROOT = Path(__file__).parents[2]
PAGE, FILE_PAGE, GOLDEN = ROOT / "docs" / "models.md", ROOT / "docs" / "files.md", ROOT / "tests" / "support" / "golden"
TABLE = re.compile(r"(<!-- tested -->\n).*?(<!-- /tested -->)", flags=re.DOTALL)
MOST_NAMES = 6  # in a cell
COLUMNS = ("prompt", "64 decode steps", "batch and replay", "quantised pages", "mesh", "ahead of time")
PROMPT, STEPS = COLUMNS[:2]  # of a checkpoint in safetensors, whose logits these compare
SAFETENSORS, FORMATS = "safetensors", ("FP8", "GPTQ", "AWQ", "int4", "GGUF", "adapter")  # columns of the table of files
EVERY = "*"  # in place of a golden checkpoint: what holds for each family
FILES = (
    *("tests/model/test_decoder.py", "tests/model/test_golden.py"),
    *("tests/support/eight_devices_golden.py", "tests/aot/test_programs.py", "tests/engine/test_prompts.py"),
    *(f"tests/checkpoints/test_{name}.py" for name in ("fp8_tensors", "packed_tensors", "gguf_files", "gguf_real")),
)


class Claim(NamedTuple):
    """What one test shows: a family, in a column."""

    family: str
    checkpoint: str  # a golden one; empty where the test has another model
    column: str
    value: str  # such as a policy or a target; empty for a plain yes


class Collector:
    """A plugin of pytest that keeps what marked tests stand for."""

    def __init__(self) -> None:
        self.found: set[Claim] = set()

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            for mark in item.iter_markers("tested"):
                given = item.callspec.params if hasattr(item, "callspec") else {}
                self.found.add(claim_of(given, *mark.args, **mark.kwargs))


def claim_of(
    given: dict[str, Any],
    column: str,
    *,
    model: str | None = None,
    golden: str | None = None,
    value: str | None = None,
    shows: str = "",
) -> Claim:
    """What a test with these parameters shows: by its `golden`, `model` or `shape`, or by what its mark names.

    `value` is the parameter whose value it shows, or `shows` is what it shows.
    """
    if column not in COLUMNS + FORMATS:
        raise ValueError(f"A column must be one of {COLUMNS + FORMATS}; got {column!r}. Correct the mark.")
    of_value = shows if value is None else str(given[value])
    if golden or "golden" in given:
        checkpoint = golden or str(given["golden"])
        return Claim(EVERY if checkpoint == EVERY else family_of(checkpoint), checkpoint, column, of_value)
    return Claim(find_shape(model or given.get("model") or given["shape"])[1].family, "", column, of_value)


def family_of(checkpoint: str) -> str:
    """The family of a golden checkpoint."""
    return json.loads((GOLDEN / checkpoint / "config.json").read_text())["model_type"]


def collect() -> set[Claim]:
    """What all marked tests stand for, from a process of its own."""
    command = [sys.executable, "-m", "tests.support.model_table", "--collect"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pytest must collect {', '.join(FILES)}; it failed.\n{done.stdout}{done.stderr}")
    return {Claim(*row) for row in json.loads(done.stdout.splitlines()[-1])}


def table_of(found: set[Claim]) -> str:
    """The table: a line for each family, and in each column what all of its checkpoints are tested with."""
    checkpoints = defaultdict(set)
    for path in sorted(GOLDEN.iterdir()):
        if path.is_dir():
            checkpoints[family_of(path.name)].add(path.name)
    lines = [
        (family, len(own), *(cell(found, family, own, column) for column in COLUMNS)) for family, own in checkpoints.items()
    ]
    order = list(FAMILIES)
    return markdown(("family", "checkpoints", *COLUMNS), sorted(lines, key=lambda line: order.index(line[0])))


def file_table_of(found: set[Claim]) -> str:
    """The table of files: a line for each family, and in each column what its files of a format are compared by."""
    lines = []
    for family in FAMILIES:
        own = [one for one in found if one.family in (family, EVERY)]
        compared = {one.column for one in own}
        logits = "logits, greedy tokens" if {PROMPT, STEPS} <= compared else "-"
        cells = (", ".join(sorted({one.value for one in own if one.column == column})) or "-" for column in FORMATS)
        lines.append((family, logits, *cells))
    return markdown(("family", SAFETENSORS, *FORMATS), lines)


def cell(found: set[Claim], family: str, checkpoints: set[str], column: str) -> str:
    """What a family is tested with: values that all of its checkpoints have; where some have none, how many do."""
    own = [one for one in found if (one.family, one.column) == (family, column)]
    if not own:
        return "-"
    values = sorted({one.value for one in own} - {""})
    by_checkpoint = {name: {one.value for one in own if one.checkpoint == name} for name in checkpoints}
    has = [name for name, some in by_checkpoint.items() if some]
    if has:
        values = [value for value in values if all(value in by_checkpoint[name] for name in has)]
    said = f"{len(values)} policies" if len(values) > MOST_NAMES else ", ".join(values) or "yes"
    return said if len(has) in (0, len(checkpoints)) else f"{said} ({len(has)} of {len(checkpoints)})"


def page_with(page: str, table: str) -> str:
    """The page with the table between its marks.

    >>> page_with("a\\n<!-- tested -->\\nold\\n<!-- /tested -->", "new")
    'a\\n<!-- tested -->\\nnew\\n<!-- /tested -->'
    """
    if not TABLE.search(page):
        raise ValueError("The page must have <!-- tested --> and <!-- /tested --> around its table; it has not. Add them.")
    return TABLE.sub(lambda found: f"{found[1]}{table.rstrip()}\n{found[2]}", page)


def main() -> None:
    """Writes the pages; with `--collect`, prints what the tests stand for."""
    if "--collect" in sys.argv:
        collector = Collector()
        options = "--collect-only", "-qq", "-n0", "-m", "", "-o", "addopts=", "-p", "no:cacheprovider"
        code = pytest.main([*options, *FILES], [collector])
        print(json.dumps(sorted(collector.found)))
        sys.exit(int(code))
    found = collect()
    for page, table in ((PAGE, table_of(found)), (FILE_PAGE, file_table_of(found))):
        page.write_text(page_with(page.read_text(), table))


if __name__ == "__main__":
    main()
