"""Every test function has a case that CI runs; which cases these are follows from the record of seconds."""

import json
import os
import re
import shlex
import sys
import tomllib
from collections import defaultdict
from itertools import pairwise

import pytest

from tests.repository.pages import ROOT, run
from tests.support import selection

# What CI cannot run, and why.
ELSEWHERE = {
    "tests/integrations/test_lm_eval.py": "needs lm-eval, which brings torch",
    "tests/integrations/test_page.py": "needs a browser",
    "tests/replicas/test_actors.py": "needs Ray",
}


def lines_of_ci():
    """The runs of pytest in `.ci/run`: the paths that each collects, those that it leaves out, and its expression of marks."""
    usual = shlex.split(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"])
    for text in re.findall(r"-m pytest\b([^\n>&]*)", (ROOT / ".ci" / "run").read_text()):
        words = shlex.split(text)
        given = [*([] if any(word.startswith("addopts=") for word in words) else usual), *words]
        paths = [word for word in words if word.startswith("tests/")]
        ignored = [word.removeprefix("--ignore=") for word in given if word.startswith("--ignore=")]
        yield paths or ["tests"], ignored, [after for word, after in pairwise(given) if word == "-m"][-1]


def is_run(name, marks, line):
    """Whether a line of CI runs a case."""
    paths, ignored, expression = line
    return (
        any(name.startswith(path) for path in paths)
        and not any(name.startswith(path) for path in ignored)
        and bool(eval(expression, {}, defaultdict(bool, dict.fromkeys(marks, True))))
    )


def test_every_function_has_a_case_that_ci_runs(tmp_path):
    environment = os.environ | {"COLLECTED": str(tmp_path / "marks.json"), "XLA_FLAGS": ""}
    options = [
        "-o",
        "addopts=",
        "-o",
        "python_files=test_*.py eight_devices*.py",
        "-m",
        "",
        "-p",
        "tests.support.collected",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    run(sys.executable, "-m", "pytest", "tests", *options, env=environment)
    marks = json.loads((tmp_path / "marks.json").read_text())
    lines = list(lines_of_ci())
    assert len(lines) == 4
    functions = {selection.split(name)[0] for name in marks}
    assert any("eight_devices" in name for name in functions)  # which `tests/engine/test_mesh.py` runs
    ran = {selection.split(name)[0] for name in marks if any(is_run(name, marks[name], line) for line in lines)}
    missing = {name for name in functions - ran if name.partition("::")[0] not in ELSEWHERE}
    assert not missing, "These functions have no case in CI: " + ", ".join(sorted(missing))


def test_every_function_of_the_record_is_there():
    record = selection.read_record()
    missing = record.keys() - selection.updated(record, []).keys()
    assert not missing, f"{sorted(missing)}: write the record anew (tests/support/selection.py)."


CASES = ["int8-gpu-0", "int8-tpu-0", "int4-gpu-0", "int4-tpu-0"]


@pytest.mark.parametrize(
    ("measured", "limit", "chosen"),
    [
        (None, 1.0, CASES),
        ({}, 12.0, ["int8-gpu-0"]),
        (dict.fromkeys(CASES, 0.2), 1.0, CASES),
        (dict.fromkeys(CASES, 2.0), 1.0, ["int8-gpu-0"]),
        (dict.fromkeys(CASES, 2.0) | {"int4-tpu-0": 1.5}, 1.0, ["int4-tpu-0"]),
        (dict.fromkeys(CASES, 1.0), 3.5, ["int8-gpu-0", "int4-tpu-0"]),
        ({"int4-gpu-0": 1.0}, 3.5, ["int4-gpu-0", "int8-tpu-0"]),
        (None, 0.0, ["int8-gpu-0"]),
    ],
    ids=["new", "unmeasured", "short", "long", "shortest", "all_values", "measured_in_part", "one"],
)
def test_cases_are_chosen_by_seconds(measured, limit, chosen):
    assert selection.choose(CASES, measured, limit) == chosen


def test_a_report_renews_what_it_measured(tmp_path):
    report = tmp_path / "seconds.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.repository.test_selection" name="is_run[x-1]" time="3"/>'
        '<testcase classname="tests.repository.test_selection" name="is_run[y-1]" time="9"><failure/></testcase>'
        '<testcase classname="tests.repository.test_selection" name="lines_of_ci" time="0.004"><skipped/></testcase>'
        '<testcase classname="tests.repository.test_gone" name="test_gone" time="9"/>'
        '<testcase classname="jkv.checks" name="jkv.checks.counted" time="9"/></testsuite></testsuites>'
    )
    function = "repository/test_selection.py::is_run"
    before = {function: {"x-1": 1.0, "z-1": 2.0}, "repository/test_selection.py::gone": {"": 1.0}}
    assert selection.updated(before, selection.read_report(report)) == {function: {"x-1": 3.0, "z-1": 2.0}}
