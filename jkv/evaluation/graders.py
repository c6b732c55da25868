r"""Whether a completion's answer is the right one: equal text in a box, mathematically equal, or the same choice.

A grader reads one answer from the text after the thinking and compares it with the gold one. Before anything is generated, each
gold answer of the set goes through its grader (`failing_gold`): a grader that marks gold wrong measures itself, not a model.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

from jkv.checks import check_known, install
from jkv.errors import refused
from jkv.evaluation.chains import read_answer
from jkv.evaluation.time_limit import TimeLimited
from jkv.reasoning.marks import after_thinking

LONGEST = 400  # characters of an answer that is parsed; a longer one, gold or found, is compared as text
DEEPEST = 8  # `\text` inside `\text`
MATH_VERIFY = TimeLimited(Path(__file__).with_name("math_worker.py"), seconds=10.0)
WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
IGNORED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\displaystyle|\\\$|\$|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\s|~"
)
GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
DECIMAL = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)")
IN_BASE = re.compile(r"[0-9A-Za-z.]+_(\d+)")
REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\overline\{(\d+)\}")
CHOICE = re.compile(r"\(?([A-Z])\)?[.:]?")
STATED_CHOICE = re.compile(r"(?i:answer)\s*(?:(?i:is)\s*)?(?::\s*)?[*$]*\(?([A-Z])\b\)?")


@dataclasses.dataclass(frozen=True)
class Grader:
    """How an answer is read from a text, None where there is none, and when it is the gold one."""

    read: Callable[[str], str | None]
    matches: Callable[[str, str], bool]
    needs: str = ""  # a package that jkv does not require

    def __call__(self, text: str, gold: str) -> bool:
        """Whether the text's answer is the gold one."""
        found = self.read(text)
        return found is not None and self.matches(found, gold)


def read_box(text: str) -> str | None:
    r"""What the last `\boxed{}` after the thinking holds, with balanced braces; None where there is none, or it is cut off.

    >>> read_box(r"<think>\boxed{1}</think> So \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    text = after_thinking(text)
    start = max(text.rfind(box) for box in (r"\boxed{", r"\fbox{"))
    if start < 0:
        return None
    depth, begin = 0, text.index("{", start)
    for mark in re.finditer(r"(?<!\\)[{}]", text[begin:]):
        depth += 1 if mark[0] == "{" else -1
        if depth == 0:
            return text[begin + 1 : begin + mark.start()].strip()
    return None


def read_choice(text: str) -> str | None:
    r"""The letter in the last box, or, without one, the last that the text states as its answer.

    >>> read_choice(r"</think> \boxed{\text{(C)}}"), read_choice("I doubt A. The answer is (B)."), read_choice("A")
    ('C', 'B', None)
    """
    box = read_box(text)
    if box is not None:
        letter = CHOICE.fullmatch(WORDS.sub(r"\1", box).strip())
        return letter[1] if letter else None
    stated = STATED_CHOICE.findall(after_thinking(text))
    return stated[-1] if stated else None


def normalise(answer: str) -> str:
    r"""An answer in its plainest form: without spaces, degrees, currency, per cent, thousands separators, or `\text`.

    >>> [normalise(answer) for answer in (r"\$1,234.50", r"\dfrac12", r"90^{\circ}", r"2516_{8}", r"\text{Evelyn}.")]
    ['1234.50', '\\frac{1}{2}', '90', '2516_8', 'Evelyn']
    """
    plain = answer
    for _ in range(DEEPEST):  # from the inside out
        plain = WORDS.sub(r"\1", plain)
    plain = IGNORED.sub("", plain).replace("{,}", ",").replace(r"\%", "").rstrip(".").removesuffix("%")
    plain = re.sub(r"\\[dtc]frac", r"\\frac", plain)
    plain = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", plain)
    plain = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", plain)
    plain = re.sub(r"([_^])\{(\w+)\}", lambda m: m[1] + m[2] if m[1] == "_" or len(m[2]) == 1 else m[0], plain)
    return plain.replace(",", "") if GROUPED.fullmatch(plain) else plain


def equal_math(found: str, gold: str) -> bool:
    r"""Whether two answers are mathematically equal; units are not compared, numbers to six decimals.

    Equal text (`normalise`) is right. Else, in this order: words are compared as text alone; plain decimals exactly; numerals
    of a base digit by digit, base included; a set in braces is no tuple or interval; and what is left, math-verify
    parses and compares, in a process of its own that is killed after ten seconds. What takes longer is wrong.
    """
    plain, wanted = normalise(found), normalise(gold)
    if not plain or not wanted:
        return False
    if plain == wanted:
        return True
    if WORDS.fullmatch(gold.strip()):
        return plain.strip("()").casefold() == wanted.strip("()").casefold()
    if max(len(found), len(gold)) > LONGEST:
        return False
    if DECIMAL.fullmatch(plain) and DECIMAL.fullmatch(wanted) and ("%" in found) == ("%" in gold):
        return Decimal(plain) == Decimal(wanted)
    if IN_BASE.fullmatch(plain) or IN_BASE.fullmatch(wanted):
        return False
    if {bracket_of(plain), bracket_of(wanted)} == {"set", "tuple"}:
        return False
    return bool(MATH_VERIFY.ask(as_latex(gold), as_latex(found)))


def bracket_of(plain: str) -> str:
    """The kind of an answer's first bracket: a set, a tuple (or interval), or nothing."""
    return "set" if plain.startswith(r"\{") else "tuple" if plain.startswith(("(", "[")) else ""


def as_latex(answer: str) -> str:
    r"""An answer as math-verify reads it: LaTeX between dollars, without repeating decimals, which it does not parse."""
    plain = answer.replace(r"\$", "").replace("$", "").strip()
    return f"${REPEATING.sub(as_fraction, plain)}$"


def as_fraction(decimal: re.Match[str]) -> str:
    r"""A repeating decimal as a fraction.

    >>> REPEATING.sub(as_fraction, r"0.1\overline{6}")
    '\\frac{15}{90}'
    """
    whole, fixed, again = decimal.groups()
    digits = (whole or "0") + fixed
    return rf"\frac{{{int(digits + again) - int(digits)}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"


GRADERS = {
    "boxed": Grader(read_answer, str.__eq__),
    "math": Grader(read_box, equal_math, needs="math_verify"),
    "choice": Grader(read_choice, str.__eq__),
}


def grader_of(name: str) -> Grader:
    """The grader of that name.

    Raises:
      ValueError: an unknown name, or a package that is not installed.
    """
    check_known(GRADERS, grader=name)
    grader = GRADERS[name]
    if grader.needs and importlib.util.find_spec(grader.needs) is None:
        rule = f"The {name} grader compares with math-verify, which is not installed. Run: {install('eval')}."
        raise refused(rule, grader="unsupported")
    return grader


def failing_gold(answers: Sequence[str], grader: Grader) -> list[int]:
    r"""The indices of gold answers that, written as `\boxed{gold}`, their own grader does not mark right."""
    return [i for i, gold in enumerate(answers) if not grader(rf"\boxed{{{gold}}}", gold)]


def check_gold(answers: Sequence[str], grader: Grader) -> None:
    """Refuses a set that its grader cannot grade.

    Raises:
      ValueError: naming the first five gold answers that are not marked right.
    """
    failing = failing_gold(answers, grader)
    if failing:
        named = ", ".join(f"{i} {answers[i]!r}" for i in failing[:5]) + (", ..." if len(failing) > 5 else "")
        raise refused(
            f"A grader must mark every gold answer right; this one fails {len(failing)} of {len(answers)}: {named}. "
            "Choose another grader, correct the answers, or leave these problems out with skip_ungradable (--skip-ungradable).",
            answers="invalid",
        )
