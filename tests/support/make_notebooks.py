"""Makes `notebooks/*.ipynb` from the scripts in that folder: `python -m tests.support.make_notebooks [name ...]`.

Without names it makes all. A notebook has the cells of its script, and of their outputs only the pictures. The cells run in
this process, in order. A picture is the value of the last line of a cell, if it has a PNG representation.
"""

import ast
import base64
import hashlib
import io
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
}


class Cell(NamedTuple):
    """A cell: its text, without comment marks if it is Markdown."""

    is_prose: bool
    source: str


def repository() -> str:
    """The address of the project, from pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"])


def cells_of(script: str) -> Iterator[Cell]:
    """The cells of a script in jupytext's percent format."""
    for cell in script.split("# ---\n", 2)[2].split("# %%")[1:]:
        mark, _, content = cell.partition("\n")
        is_prose, lines = "[markdown]" in mark, content.strip().splitlines()
        yield Cell(is_prose, "\n".join(line.removeprefix("#").removeprefix(" ") if is_prose else line for line in lines))


def run(cells: Sequence[Cell], file: str) -> list[bytes | None]:
    """Runs the cells in a new namespace. Returns the picture of each, or None."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [None if cell.is_prose else show(run_cell(cell.source, names, f"{file}, cell {i}")) for i, cell in enumerate(cells)]


def run_cell(source: str, names: dict[str, Any], where: str) -> Any:
    """The value of the last line of a cell; None if it is not an expression or ends in a semicolon."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.endswith(";") else None
    exec(compile(tree, where, "exec"), names)
    return eval(compile(ast.Expression(last.value), where, "eval"), names) if isinstance(last, ast.Expr) else None


def show(value: Any) -> bytes | None:
    """The PNG of a value, or None. Other representations are computed too, so that an error in them is found."""
    for name in ("_repr_png_", "_repr_html_", "__repr__"):
        if value is not None and hasattr(value, name):
            shown = getattr(value, name)()
            return shown if name == "_repr_png_" else None
    return None


def shrink(picture: bytes) -> bytes:
    """The picture in 256 colours, which takes a third of the bytes."""
    from PIL import Image  # comes with matplotlib

    stream = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(stream, format="png", optimize=True)
    return stream.getvalue()


def notebook(cells: Sequence[Cell], pictures: Sequence[bytes | None]) -> dict[str, Any]:
    """The notebook of cells and their pictures (nbformat 4.5)."""
    made = [make_cell(cell, picture, i) for i, (cell, picture) in enumerate(zip(cells, pictures, strict=True))]
    return {"cells": made, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def make_cell(cell: Cell, picture: bytes | None, index: int) -> dict[str, Any]:
    """One cell; its id is a hash of its index and text."""
    name = hashlib.sha256(f"{index} {cell.source}".encode()).hexdigest()[:8]
    common = {"id": name, "metadata": {}, "source": cell.source.splitlines(keepends=True)}
    if cell.is_prose:
        return {"cell_type": "markdown", **common}
    outputs = []
    if picture:
        data = {"image/png": base64.b64encode(shrink(picture)).decode()}
        outputs = [{"data": data, "metadata": {}, "output_type": "display_data"}]
    return {"cell_type": "code", "execution_count": None, **common, "outputs": outputs}


def main(names: Sequence[str]) -> None:
    """Makes the notebooks of these names, or all."""
    known = {script.stem: script for script in SCRIPTS}
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"A name must be one of {', '.join(known)}; got {', '.join(unknown)}.")
    for script in [known[name] for name in names] or SCRIPTS:
        cells = list(cells_of(script.read_text()))
        made = notebook(cells, run(cells, script.name))
        script.with_suffix(".ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
