"""Which cases of each test function run every day, and which file runs first: both follow from measured seconds.

Every function runs at least one case, the shortest. More cases follow while they cover new values of parameters and the
function stays within its limit; the rest is `slow`. A function without a record runs whole, so new tests run at once; an empty
record, `{}`, says that a long function was not measured yet: one case runs.
`tests/seconds.json` is the record; `.ci/run` leaves reports from which this writes it anew:

    .ci/run
    python -m tests.support.selection .cache/seconds/*.xml

What a report does not have stays as it was. `python -m pytest -m "" --junitxml=seconds.xml` measures all cases.
"""

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1]
RECORD = TESTS / "seconds.json"
LIMITS = {  # folder -> seconds of a function, where more than one case may run
    "": 2.0,
    "aot": 0.0,  # a program takes a minute to compile: one of each function, and of each target in `test_kernels.py`
    "repository": 16.0,
}
UNMEASURED = 4.0  # seconds that a case of an empty record is taken for
Seconds = dict[str, dict[str, float]]  # function -> case -> seconds


def split(name: str) -> tuple[str, str]:
    """A test's function and the name of its case, which is empty if it has no parameters."""
    function, bracket, case = name.partition("[")
    return function, case.removesuffix("]") if bracket else ""


def limit_of(function: str) -> float:
    """The seconds that the cases of a function may take."""
    return LIMITS.get(function.partition("/")[0], LIMITS[""])


def choose(cases: Collection[str], measured: Mapping[str, float] | None, limit: float) -> list[str]:
    """The cases of a function that run every day.

    The shortest; then those that cover most new values of parameters a second, until all values are covered or the limit is
    reached. A case without a measurement counts as twice the longest that has one. Without a limit, all cases run.

    >>> choose(["int8-gpu", "int8-tpu", "int4-gpu", "int4-tpu"], {"int8-gpu": 1.0, "int4-tpu": 1.5}, 4.0)
    ['int8-gpu', 'int4-tpu']
    >>> choose(["int8-gpu", "int4-tpu"], {"int4-tpu": 5.0}, 4.0)
    ['int4-tpu']
    >>> choose(["int8-gpu", "int4-tpu"], None, 4.0)
    ['int8-gpu', 'int4-tpu']
    >>> choose(["int8-gpu", "int4-tpu"], {}, 4.0)
    ['int8-gpu']
    """
    known = measured or {}
    unknown = 2 * max(known.values(), default=UNMEASURED)
    seconds = {case: known.get(case, unknown) for case in cases}
    if len(seconds) < 2 or (limit and (measured is None or sum(seconds.values()) <= limit)):
        return list(cases)
    values = {case: set(case.split("-")) for case in cases}
    best = min(seconds, key=seconds.__getitem__)
    chosen, left, missing = [best], limit - seconds[best], set().union(*values.values()) - values[best]
    while missing:
        rates = {case: len(missing & values[case]) / (0.1 + seconds[case]) for case in cases}
        best = max(rates, key=rates.__getitem__)
        if seconds[best] > left:
            break
        chosen.append(best)
        left -= seconds[best]
        missing -= values[best]
    return chosen


def read_record() -> Seconds:
    """The recorded seconds of each function's cases."""
    return json.loads(RECORD.read_text())


def read_report(report: Path) -> Iterable[tuple[str, float]]:
    """Name and seconds of each test below `tests` that passed, of a report of `--junitxml`."""
    for case in ElementTree.parse(report).iter("testcase"):
        where, name = case.get("classname", ""), case.get("name", "")
        if where.startswith("tests.") and not any(child.tag in ("skipped", "failure", "error") for child in case):
            yield f"{where[6:].replace('.', '/')}.py::{name}", float(case.get("time", 0))


def updated(record: Seconds, measured: Iterable[tuple[str, float]]) -> Seconds:
    """The record with new measurements, without functions that are there no more."""
    new = defaultdict(dict, {function: dict(cases) for function, cases in record.items()})
    for name, seconds in measured:
        function, case = split(name)
        new[function][case] = round(seconds, 2)
    known: dict[str, set[str]] = {file: functions_of(TESTS / file) for file in {name.partition("::")[0] for name in new}}
    return {name: new[name] for name in sorted(new) if name.rpartition("::")[2] in known[name.partition("::")[0]]}


def functions_of(file: Path) -> set[str]:
    """The names of the functions of a file, which may be missing."""
    tree = ast.parse(file.read_text() if file.exists() else "")
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def write_record(record: Seconds) -> None:
    """One line a function."""
    lines = [f" {json.dumps(name, ensure_ascii=False)}: {json.dumps(record[name], ensure_ascii=False)}" for name in record]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write_record(updated(read_record(), [one for report in sys.argv[1:] for one in read_report(Path(report))]))
