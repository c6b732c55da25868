"""The README is short, its commands work, and its tree is the tree of the package."""

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
    command = re.search(r"^\.venv/bin/jkv (generate .*)$", README, flags=re.MULTILINE)[1]
    assert cli.main(shlex.split(command)) == 0
    captured = capsys.readouterr()
    assert captured.out.rstrip().endswith("\\boxed{g=7}")
    assert int(re.search(r"(\d+) tokens evicted", captured.err)[1]) > 0


def names_in_tree(text):
    """The packages and modules in the tree below `jkv/`: what is named before two spaces and a remark."""
    (tree,) = blocks(text, "text")
    lines = [line.strip() for line in tree.splitlines() if line.startswith("  ")]
    return [name for line in lines for name in re.findall(r"(?:^|(?<=\s))\w+(?:/|\.py)(?=\s|$)", line)]


def test_its_tree_is_that_of_the_package():
    package = ROOT / "jkv"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    files = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert sorted(names_in_tree(README)) == sorted(folders | files)
