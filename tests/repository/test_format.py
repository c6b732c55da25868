"""Format, lint and types."""

import ast
import sys

import pytest

from tests.repository.pages import ROOT, run


@pytest.mark.parametrize("check", [("format", "--check"), ("check",)], ids=["format", "lint"])
def test_ruff_has_nothing_to_say(check):
    run(sys.executable, "-m", "ruff", *check, ".")


@pytest.mark.slow  # half a minute; `.ci/run` runs it
def test_types_are_consistent():
    run(sys.executable, "-m", "mypy")


SOURCES = sorted([*ROOT.glob("jkv/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_at_most_450_lines_and_a_class_25_methods(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 450, "split the file by ideas"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)]
            assert len(methods) <= 25, f"{node.name} has {len(methods)} methods: split it by tasks"
