"""Every notebook runs, and says the same as the script it is paired with."""

import json
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def cells_of_script(text):
    """The cells of a percent script, comment marks of prose removed."""
    body = text.split("# ---\n", 2)[2]
    for cell in body.split("# %%")[1:]:
        mark, _, content = cell.partition("\n")
        is_prose = "[markdown]" in mark
        lines = content.strip().splitlines()
        yield is_prose, "\n".join(line.removeprefix("#").removeprefix(" ") if is_prose else line for line in lines)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_runs(script):
    runpy.run_path(str(script))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_equals_its_script_and_keeps_no_output(script):
    notebook = json.loads(script.with_suffix(".ipynb").read_text())
    cells = [(cell["cell_type"] == "markdown", "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == list(cells_of_script(script.read_text()))
    assert not any(cell.get("outputs") for cell in notebook["cells"])


def test_there_are_notebooks():
    assert len(SCRIPTS) == len(list(FOLDER.glob("*.ipynb"))) >= 1
