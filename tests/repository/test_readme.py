"""The README is short, its commands work, its numbers are measured, and the table of packages is complete."""

import json
import re
import shlex

from jkv import cli
from tests.repository.pages import ROOT, blocks

README = (ROOT / "README.md").read_text()
MOST_WORDS = 900


def test_it_is_short():
    assert len(README.split()) < MOST_WORDS


def test_its_first_example_has_six_lines_and_answers(capsys):
    first = blocks(README, "python")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 6
    exec(compile(first, "README.md", "exec"), {})
    assert "\\boxed{d=1}" in capsys.readouterr().out


def test_its_first_command_generates_with_a_compressed_cache(capsys):
    command = re.search(r"\.venv/bin/jkv (generate .*)$", README, flags=re.MULTILINE)[1]
    assert cli.main(shlex.split(command)) == 0
    captured = capsys.readouterr()
    assert captured.out.rstrip().endswith("\\boxed{g=7}")
    assert int(re.search(r"(\d+) tokens evicted", captured.err)[1]) > 0


def test_the_table_of_packages_names_each_once():
    folders = {f"jkv/{path.parent.name}/" for path in ROOT.glob("jkv/*/__init__.py")}
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Packages")[2].partition("##")[0]
    named = [
        name
        for line in table.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`([\w/]+/)`", line.partition(" | ")[0])
    ]
    functions = {"jkv/rollout/"}  # named below the table
    assert sorted(named) == sorted(folders - functions | {"pallas_kernels/", "research/"})


def test_its_two_first_commands_each_make_their_own_environment():
    first, second = [block.strip() for block in blocks(README, "sh")][:2]
    for command in (first, second):
        assert command.count("\n") == 0
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -q ")
    assert ".venv/bin/jkv generate " in first
    assert second.endswith(".venv/bin/python -m pytest")


def test_its_numbers_are_those_of_the_records():
    rows = json.loads((ROOT / "results" / "device-nvidia-h200.json").read_text())["rows"]
    full, _, many = (row for row in rows if row["part"] == "stress")
    assert f"**{many['tokens_per_second'] / full['tokens_per_second']:.1f} times the tokens per second**" in README
    assert f"as {many['batch']} rows fit in place of {full['batch']}" in README
    page = (ROOT / "docs" / "results.md").read_text()
    faster = re.findall(
        r"^\| smollm2-135m \| full cache, batch \d+ \| transformers \|.*?\| ([\d.]+) \|", page, flags=re.MULTILINE
    )
    found = [float(cell.split("|")[-1]) for cell in faster]
    assert len(found) == 3
    assert f"**{min(found):.1f} to {max(found):.1f} times**" in README
