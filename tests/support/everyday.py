"""Which cases of the tests that take long run every day: of each test function, up to a few seconds of cases.

`tests/everyday.json` has the functions that take longer than that, each with its cases for every day; its other cases are
`slow`. A file has a limit, too, within which its shortest functions come first. A run of all tests measures them anew; one of
the everyday tests makes the choice shorter, and leaves what it did not run:

    python -m pytest -m "" --junitxml=seconds.xml
    python -m tests.support.everyday seconds.xml

A function with the mark `everyday` is left as it is.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1]
FILE = TESTS / "everyday.json"
LIMITS = {  # folder -> seconds of a function and of a file
    "": (3.0, 15.0),
    "aot": (16.0, 60.0),
    "integrations": (16.0, 60.0),
    "repository": (16.0, 60.0),  # one rule for every file is no sweep
}


def split(name: str) -> tuple[str, str]:
    """A test's function and the name of its case, which is empty if it has no parameters."""
    function, bracket, case = name.partition("[")
    return function, case.removesuffix("]") if bracket else ""


def everyday_cases(seconds: Mapping[str, float], limit: float) -> list[str]:
    """The cases that cover most values of parameters a second, until every value is covered or the limit is reached.

    >>> everyday_cases({"int8-gpu": 1.0, "int8-tpu": 2.0, "int4-gpu": 1.0, "int4-tpu": 1.5}, 4.0)
    ['int4-tpu', 'int8-gpu']
    >>> everyday_cases({"": 5.0}, 4.0)
    []
    """
    chosen: dict[str, float] = {}
    missing = {value for case in seconds for value in case.split("-")}
    while missing:
        rates = {case: len(missing.intersection(case.split("-"))) / (0.1 + taken) for case, taken in seconds.items()}
        best = max(rates, key=lambda case: (rates[case], case))
        if sum(chosen.values()) + seconds[best] > limit:
            break
        chosen[best] = seconds[best]
        missing.difference_update(best.split("-"))
    return sorted(chosen)


def choose(seconds: Mapping[str, float], limits: Mapping[str, tuple[float, float]] = LIMITS) -> dict[str, list[str]]:
    """Function -> its cases for every day, of the functions whose cases do not all run then.

    `seconds` are of each test, by its name as pytest writes it, below `tests`. `limits` are those of folders in `tests`; "" has
    those of all others.
    """
    files: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for name, taken in sorted(seconds.items()):
        function, case = split(name)
        files[function.partition("::")[0]][function][case] = taken
    chosen: dict[str, list[str]] = {}
    for file, functions in files.items():
        limit, left = limits.get(file.partition("/")[0], limits[""])
        for function, cases in sorted(functions.items(), key=lambda item: sum(item[1].values())):
            is_short = sum(cases.values()) <= min(limit, left)
            every = list(cases) if is_short else everyday_cases(cases, min(limit, left))
            left -= sum(cases[case] for case in every)
            if len(every) < len(cases):
                chosen[function] = every
    return dict(sorted(chosen.items()))


def renewed(
    before: Mapping[str, list[str]], seconds: Mapping[str, float], limits: Mapping[str, tuple[float, float]] = LIMITS
) -> dict[str, list[str]]:
    """The choice after a run. A function of which no other cases ran than those chosen before gets no more of them.

    >>> renewed({"a.py::f": ["1"], "a.py::g": ["1"], "a.py::h": []}, {"a.py::f[1]": 1.0, "a.py::g[1]": 1.0, "a.py::g[2]": 1.0})
    {'a.py::f': ['1'], 'a.py::h': []}
    """
    chosen, ran = choose(seconds, limits), {split(name) for name in seconds}
    for function, cases in before.items():
        if all(case in cases for of, case in ran if of == function):
            chosen.setdefault(function, cases)
    return dict(sorted(chosen.items()))


def read(report: Path) -> dict[str, float]:
    """The seconds of each test below `tests` in a report of `--junitxml`."""
    cases = ElementTree.parse(report).iter("testcase")
    named = ((case.get("classname", ""), case.get("name", ""), float(case.get("time", 0))) for case in cases)
    return {f"{where[6:].replace('.', '/')}.py::{name}": taken for where, name, taken in named if where.startswith("tests.")}


def write(seconds: Mapping[str, float]) -> None:
    """Writes `tests/everyday.json`."""
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps(renewed(before, seconds), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write(read(Path(sys.argv[1])))
