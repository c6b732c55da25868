"""Where a kernel lives: a folder of known file names and one line in the table, from which everything else finds it."""

import ast
import filecmp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pallas_kernels import KERNELS

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "pallas_kernels"
REQUIRED = {"__init__.py", "reference.py", "shapes.py"}
OPTIONAL = {
    "cpu.py",
    "gpu.py",
    "tpu.py",
    "native.py",
    "native.cc",
    "pallas.py",
    "pieces.py",
}  # `pallas`: what gpu and tpu share
ORDER = (
    {
        "blocks",
        "choice",
        "dispatch",
        "hadamard",
        "launch",
        "mosaic",
        "models",
        "native_library",
        "native_target",
        "nibbles",
        "prebuilt",
        "quantised",
        "sinks",
        "timing",
    },
    {"peers"},
    {"bench"},
)  # the folders lie below `peers`
DOUBLED = {
    "__init__.py": '''
"""Twice each number."""
from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.doubled import gpu, reference

IMPLEMENTATIONS = {
    "gpu": Implementation(gpu.doubled, "cuda", gpu.why_not),
    "reference": Implementation(reference.doubled),
}


def doubled(x, *, implementation=None):
    return call("doubled", IMPLEMENTATIONS, implementation, x)
''',
    "reference.py": "def doubled(x):\n    return x + x\n",
    "gpu.py": """
import jax

from pallas_kernels.launch import launch


def why_not(x):
    return None


def doubled(x, interpret=False):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return launch(body, x, name="doubled", grid=(), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)
""",
    "shapes.py": """
import jax.numpy as jnp

from pallas_kernels.models import Case, of

CASES = (Case("rows"),)


def arguments(model, workload):
    return (of(workload.dtype, workload.batch, model.head_size),)


def values(model, workload):
    return tuple(jnp.ones(x.shape, x.dtype) for x in arguments(model, workload))


def num_bytes(model, workload):
    return 2 * workload.batch * model.head_size * jnp.dtype(workload.dtype).itemsize
""",
}
USE = """
import sys
import jax, jax.numpy as jnp
import pytest
import pallas_kernels
from pallas_kernels import KERNELS, bench, choice, dispatch
from pallas_kernels.doubled import gpu

assert pallas_kernels.__file__.startswith({folder!r})
x = jnp.arange(8.0)
assert (pallas_kernels.doubled(x) == 2 * x).all()
assert (gpu.doubled(x, interpret=True) == 2 * x).all()
table = KERNELS["doubled"].implementations
assert {{platform: dispatch.best(table, platform, x) for platform in dispatch.PLATFORMS}} == {{
    "cpu": "reference", "tpu": "reference", "cuda": "gpu"
}}
texts = {{}}
for platform in ("cpu", "tpu"):
    with choice.compiling_for(platform):
        texts[platform] = jax.jit(pallas_kernels.doubled).trace(x).lower(lowering_platforms=(platform,)).as_text()
assert all("stablehlo.add" in text and "custom_call" not in text for text in texts.values())
assert bench.main(["doubled", "--batch", "2", "--slots", "16"]) == 0
tests = [f"tests/pallas_kernels/test_{{name}}.py" for name in ("dispatch", "models", "bench")] + ["tests/aot/test_kernels.py"]
sys.exit(pytest.main([*tests, "-o", "addopts=", "-k", "doubled", "-v", "-p", "no:cacheprovider", "--rootdir=."]))
"""


def test_every_kernel_s_folder_has_the_same_file_names_and_a_line_in_the_table():
    folders = {path.parent.name: path.parent for path in PACKAGE.glob("*/__init__.py")}
    assert set(folders) == set(KERNELS)
    for folder in folders.values():
        names = {path.name for path in folder.iterdir() if path.suffix in (".py", ".cc")}
        assert names >= REQUIRED, folder
        assert names <= REQUIRED | OPTIONAL, folder


def test_modules_import_downwards_only():
    """The ground modules, then the kernels' folders, peers, bench; a folder imports no other folder."""
    for path in PACKAGE.rglob("*.py"):
        own, *inner = path.relative_to(PACKAGE).with_suffix("").parts
        if own == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module] if node.module != "pallas_kernels" else [f"pallas_kernels.{x.name}" for x in node.names]
            for name in modules:
                top, *rest = name.split(".")
                assert top != "jkv", path
                if top == "pallas_kernels" and rest and rest[0] != "KERNELS":
                    assert rest[0] == own if inner and rest[0] in KERNELS else rank(rest[0]) <= rank(own), (path, name)


def rank(module):
    """Ground modules, folders, peers, bench."""
    return next((2 * i for i, names in enumerate(ORDER) if module in names), 1)


def test_a_new_kernel_touches_its_folder_and_one_line(tmp_path):
    """A kernel with a GPU form and a reference: calls, dispatch, benchmark and every test that goes over the table find it."""
    for folder in ("pallas_kernels", "tests/pallas_kernels", "tests/aot"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "support").mkdir()
    of_the_run = (
        "__init__.py",
        "conftest.py",
        "seconds.json",
        "support/__init__.py",
        "support/selection.py",
        "support/shapes.py",
    )
    for file in ("pyproject.toml", *(f"tests/{name}" for name in of_the_run)):
        shutil.copy(ROOT / file, tmp_path / file)
    folder, table = tmp_path / "pallas_kernels" / "doubled", tmp_path / "pallas_kernels" / "__init__.py"
    folder.mkdir()
    for name, text in DOUBLED.items():
        (folder / name).write_text(text.lstrip())
    line = "from pallas_kernels.doubled import doubled as doubled\n"
    before = "from pallas_kernels.key_redundancy import"
    assert table.read_text().count(before) == 1
    table.write_text(table.read_text().replace(before, line + before))

    compared = filecmp.dircmp(PACKAGE, tmp_path / "pallas_kernels", ignore=["__pycache__"])
    assert (compared.right_only, compared.diff_files, compared.left_only) == (["doubled"], ["__init__.py"], [])
    added = set(table.read_text().splitlines()) - set((PACKAGE / "__init__.py").read_text().splitlines())
    assert added == {line.strip()}

    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", USE.format(folder=str(tmp_path))]
    checked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    rows = [line for line in checked.stdout.splitlines() if line.startswith("| doubled | rows |")]
    assert len(rows) == 2
    assert any("| reference |" in row and "0.0e+00" in row for row in rows)
    assert any("not timed: it is for cuda" in row for row in rows)
    found = re.findall(r"tests/\S*?test_(\w+)\.py::\S*doubled\S* (PASSED|SKIPPED)", checked.stdout)
    assert {name for name, outcome in found if outcome == "PASSED"} >= {"dispatch", "models", "bench"}
    assert "kernels" in {name for name, _ in found}  # compiles for devices, or is skipped without their compilers
    assert not re.search(r"doubled-tpu", checked.stdout)  # it has no kernel there
