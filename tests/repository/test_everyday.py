"""The list of what runs every day names tests that there are, and no test that pytest could not find any more."""

import ast
import json

import pytest

from tests.support import everyday

CHOSEN = json.loads(everyday.FILE.read_text())


def functions_of(path):
    """The tests of a file, those in classes with the names of these."""
    tree = ast.parse((everyday.TESTS / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", sorted({name.partition("::")[0] for name in CHOSEN}))
def test_every_function_of_the_list_is_there(path):
    names = {name.rpartition("::")[2] for name in CHOSEN if name.startswith(f"{path}::")}
    assert names <= functions_of(path), "Remove them from tests/everyday.json, or write it anew (tests/support/everyday.py)."


def test_cases_are_chosen_from_what_a_report_says(tmp_path):
    report = tmp_path / "seconds.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.engine.test_a" name="test_long[x-1]" time="3"/>'
        '<testcase classname="tests.engine.test_a" name="test_long[y-1]" time="0.5"/>'
        '<testcase classname="tests.engine.test_a" name="test_long[y-2]" time="2.5"/>'
        '<testcase classname="tests.engine.test_a" name="test_short" time="1"/>'
        '<testcase classname="tests.test_b" name="test_longest" time="9"/>'
        '<testcase classname="jkv.checks" name="jkv.checks.counted" time="9"/></testsuite></testsuites>'
    )
    chosen = everyday.choose(everyday.read(report), {"": (3.0, 12.0)})
    assert chosen == {"engine/test_a.py::test_long": ["y-1", "y-2"], "test_b.py::test_longest": []}
