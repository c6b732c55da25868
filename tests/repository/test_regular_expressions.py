"""No regular expression of the package takes more than linear time: each is timed on pumped texts of growing length."""

import importlib
import itertools
import pkgutil
import re
import time

import pytest

import jkv
from jkv.reasoning.steering import CHECK_WORDS, patterns_of

OPTIONAL = ("integrations", "replicas.actors", "__main__", "math_worker")
WHOLE = {  # only ever matched with the whole text: a search with it would begin again at each character
    "jkv.evaluation.graders.CHOICE", "jkv.evaluation.graders.DECIMAL", "jkv.evaluation.graders.GROUPED",
    "jkv.evaluation.graders.IN_BASE",
}  # fmt: skip
FIRST = ("", "a", "```", "```a", "answer", "answer is", "^{", "\\text", "1", "-1", "1.", "_{", "\\boxed{", "<!-- bench x -->\n")
AGAIN = (
    *" \t\na1.,-+({}[\\$`^_=:*<|",
    *(
        "is",
        "answer",
        "$$",
        "```",
        "\\text{",
        "\\frac",
        "\\overline{",
        "\\[",
        "\\(",
        "^{",
        "a=",
        "-of-",
        "1-of-",
        "9.",
        "Wait",
        "\\|",
    ),
    *("<!-- bench x -->\n", "<!-- policies -->\n", "<!-- accuracy -->"),
)
LAST = ("", "\0", "a")
SIZE, QUICK, SLOW = 1_500, 5e-5, 3e-3  # characters, seconds
STEEP = {"jkv.reasoning.formulas.LATEX": 800}  # linear from 2,000 characters on, with 2,000 steps for each: fewer of them


def patterns():
    """Every compiled pattern of the package's modules, by name."""
    found = {f"keyword {i}": pattern for i, pattern in enumerate(patterns_of((*CHECK_WORDS, "再")))}
    for module in pkgutil.walk_packages(jkv.__path__, "jkv."):
        if not any(part in module.name for part in OPTIONAL):
            names = vars(importlib.import_module(module.name)).items()
            found |= {f"{module.name}.{name}": one for name, one in names if isinstance(one, re.Pattern)}
    return found


PATTERNS = patterns()


def seconds(pattern, name, text):
    start = time.process_time()
    if name in WHOLE:
        pattern.fullmatch(text)
    else:
        for _ in pattern.finditer(text):
            pass
    return time.process_time() - start


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in STEEP else ()) for name in PATTERNS])
def test_a_pattern_takes_linear_time(name):
    for first, again, last in itertools.product(FIRST, AGAIN, LAST):

        def taken(factor, first=first, again=again, last=last):
            text = first + again * (factor * STEEP.get(name, SIZE) // len(again)) + last
            return min(seconds(PATTERNS[name], name, text) for _ in range(2))

        if taken(1) > QUICK and taken(4) > SLOW:
            # 4 times as long if it is linear, 16 if it is quadratic; a busy machine may take longer once.
            assert any(taken(16) < 9 * taken(4) for _ in range(5)), (first, again, last)


def test_the_patterns_are_found():
    assert {"jkv.reports.MARKED", "jkv.reasoning.formulas.LATEX", "jkv.evaluation.graders.STATED_CHOICE"} <= PATTERNS.keys()
