r"""Chains of arithmetic modulo 10, and the redundant reasoning that solves them: the task of tiny-reasoner.

A problem defines one-letter variables and asks for one, `b=3;c=7;d=b*c;?d`. Its trace has one thought a paragraph, restates
each formula and its operands' values (a look-up many steps back), restates the answer at the end of each pass, verifies itself
zero to four times, and boxes the answer:

    <think>  b=3  c=7  d=b*c b=3 c=7 3*7=1 d=1  d=1  Wait  b=3  c=7  d=b*c b=3 c=7 d=1  d=1  </think>  \boxed{d=1}

How often it doubts itself follows from the answer (modulo 5), with a floor that keeps traces above 100 tokens, so greedy
traces end and differ in length; one trace in eight draws the number at random, and so does a model that samples.
"""

import dataclasses
import re
import string

import numpy as np

BREAK = "\n\n"
DOUBTS = ("Wait", "Alternatively", "again", "Wait again")  # how the first to fourth verification begins
MIN_DOUBTS = {1: 4, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}  # by the number of derived variables
RANDOM_DOUBTS = 1 / 8
OPERATIONS = {"+": lambda a, b: (a + b) % 10, "-": lambda a, b: (a - b) % 10, "*": lambda a, b: (a * b) % 10}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Definitions in order, each `(name, "")` with a digit or `(name, operator, left, right)`, and the asked name."""

    definitions: tuple[tuple[str, ...], ...]
    asked: str

    @property
    def prompt(self) -> str:
        """The problem as text: what the model reads."""
        return ";".join(f"{name}={''.join(body)}" for name, *body in map(infix, self.definitions)) + f";?{self.asked}"

    @property
    def values(self) -> dict[str, int]:
        """The value of every variable."""
        known: dict[str, int] = {}
        for name, *body in self.definitions:
            known[name] = int(body[0]) if len(body) == 1 else OPERATIONS[body[0]](known[body[1]], known[body[2]])
        return known

    @property
    def answer(self) -> str:
        """The asked variable and its value, `d=1`."""
        return f"{self.asked}={self.values[self.asked]}"


def infix(definition: tuple[str, ...]) -> tuple[str, ...]:
    """`(d, *, b, c)` as `(d, b, *, c)`."""
    return definition if len(definition) == 2 else (definition[0], definition[2], definition[1], definition[3])


def draw_problem(rng: np.random.Generator, low: int = 3, high: int = 14, early: float = 0.2) -> Problem:
    """A random problem of `low` to `high` definitions, three in four of them the largest of three draws.

    A share `early` asks for a variable before the last.
    """
    count = int(np.max(rng.integers(low, high + 1, size=3 if rng.random() < 0.75 else 1)))
    leaves = 2 if count < 6 else int(rng.integers(2, 2 + count // 4 + 1))
    names = [str(x) for x in rng.permutation(list(string.ascii_lowercase))[:count]]
    definitions: list[tuple[str, ...]] = [(name, str(rng.integers(10))) for name in names[:leaves]]
    for i in range(leaves, count):
        left, right = rng.permutation(i)[:2]
        operator = str(rng.choice(["+", "-", "*"], p=[0.4, 0.35, 0.25]))
        definitions.append((names[i], operator, names[left], names[right]))
    is_early = count - leaves > 1 and rng.random() < early
    asked = names[int(rng.integers(leaves, count - 1))] if is_early else names[-1]
    return Problem(tuple(definitions), asked)


def draw_values(rng: np.random.Generator) -> tuple[str, str]:
    """A drill: the values of 4 to 14 variables, and the same again in any order, three times as many, as traces state them."""
    names = rng.permutation(list(string.ascii_lowercase))[: int(rng.integers(4, 15))]
    pairs = [f"{name}={rng.integers(10)}" for name in names]
    asked = rng.choice(pairs, 3 * len(pairs))
    return ";".join(pairs) + ";", "".join(pair + str(rng.choice([" ", BREAK])) for pair in asked)


def draw_steps(rng: np.random.Generator) -> tuple[str, str]:
    """A drill: formulas of 4 to 14 variables, and their thoughts in any order, operands of any value."""
    names = [str(name) for name in rng.permutation(list(string.ascii_lowercase))]
    count = int(rng.integers(4, 15))
    formulas = [
        (name, str(rng.choice(list(OPERATIONS))), *map(str, rng.choice(names, 2, replace=False))) for name in names[:count]
    ]
    steps = [
        write_step(formulas[i], dict(zip(formulas[i][2:], rng.integers(10, size=2).tolist(), strict=True))) + BREAK
        for i in rng.permutation(count)
    ]
    return "".join(f"{name}={left}{operator}{right};" for name, operator, left, right in formulas), "".join(steps)


def num_doubts(problem: Problem, rng: np.random.Generator | None = None) -> int:
    """How many verification passes the trace makes, 0 to 4."""
    derived = sum(len(definition) == 4 for definition in problem.definitions)
    wish = problem.values[problem.asked] % 5
    if rng is not None and rng.random() < RANDOM_DOUBTS:
        wish = int(rng.integers(5))
    return max(wish, MIN_DOUBTS.get(derived, 0))


def write_trace(problem: Problem, doubts: int) -> str:
    """The model's turn, from `<think>` to the boxed answer; each pass goes through all definitions and ends with the answer."""
    values = problem.values
    given = [f"{name}={value}" for name, *body in problem.definitions if len(body) == 1 for value in body]
    derived = [definition for definition in problem.definitions if len(definition) == 4]

    steps = [*given, *(write_step(definition, values) for definition in derived), problem.answer]
    checks = [write_check(definition, values) for definition in derived]
    for doubt in DOUBTS[:doubts]:
        steps += [doubt, *given, *checks, problem.answer]
    return BREAK.join(["<think>", *steps, "</think>", rf"\boxed{{{problem.answer}}}"])


def write_step(definition: tuple[str, ...], values: dict[str, int]) -> str:
    """A thought that finds a value: the formula, its operands' values, the sum, the result.

    >>> write_step(("d", "*", "b", "c"), {"b": 3, "c": 7})
    'd=b*c b=3 c=7 3*7=1 d=1'
    """
    name, operator, left, right = definition
    first, second = values[left], values[right]
    result = OPERATIONS[operator](first, second)
    return f"{name}={left}{operator}{right} {left}={first} {right}={second} {first}{operator}{second}={result} {name}={result}"


def write_check(definition: tuple[str, ...], values: dict[str, int]) -> str:
    """A thought that verifies a value found before: the formula, its operands' values, the value."""
    name, operator, left, right = definition
    return f"{name}={left}{operator}{right} {left}={values[left]} {right}={values[right]} {name}={values[name]}"


def read_answer(text: str) -> str | None:
    r"""What the last `\boxed{}` after the thinking holds, or None.

    >>> read_answer(r"<think>\boxed{d=1}</think> It is \boxed{ d=7 }.")
    'd=7'
    """
    found = re.findall(r"\\boxed\{([^{}]*)\}", text.rpartition("</think>")[2])
    return found[-1].strip() if found else None
