"""What a class keeps for itself stays in its file, and whoever works with an engine says so in its types."""

import ast

import pytest

from tests.repository.test_imports import FILES, name_of

OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
PARTS = {"engine", "runner", "scheduler", "service", "replicas", "session", "worker"}  # arguments of these names have a type


def private_names(tree):
    """The private names that a file defines: methods, functions, and attributes that its classes set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def is_own(node):
    """Whether an attribute is of `self` or `cls`."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def strangers(tree, known):
    """The private attributes of other files' classes that a file uses, with the line."""
    own = set(private_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in known - own and not is_own(node):
            yield node.lineno, ast.unparse(node)


def test_no_file_uses_a_private_attribute_of_another():
    trees = {name_of(path): ast.parse(path.read_text()) for path in FILES}
    names = {name for tree in trees.values() for name in private_names(tree)}
    known = {name for name in names if name.startswith("_") and not name.startswith("__")} - OF_TUPLES
    assert len(known) > 100
    found = [f"{name}, line {line}: {what}" for name, tree in trees.items() for line, what in strangers(tree, known)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["engine._guard.check()", "other = engine\nother._guard = None"])
def test_such_a_use_is_found(text):
    assert [what for _, what in strangers(ast.parse(text), {"_guard"})]
    assert not list(strangers(ast.parse("class A:\n    def f(self):\n        self._guard = 1\n\n\nA()._guard"), {"_guard"}))


def test_nothing_takes_an_engine_of_any_type():
    found = [
        f"{name_of(path)}, line {node.lineno}: {node.arg}"
        for path in FILES
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if node.arg in PARTS and node.annotation is not None and ast.unparse(node.annotation) == "Any"
    ]
    assert not found, "\n".join(found)
