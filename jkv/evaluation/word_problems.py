r"""Word problems in English that are solved step by step and then verified in other words, for models that read English.

    Ann has 12 books. Ben has 5 more than Ann. How many books does Ben have?

    Let us go step by step.
    Ann has 12 books.
    Ben has 12 + 5 = 17 books.

    Hmm, I should make sure. ...
    So Ben has 17 books. \boxed{17}

Numbers that a probe scores stand in <>, which `without_marks` removes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NAMES = ("Ann", "Ben", "Carl", "Dora", "Emma", "Fred", "Gina", "Hugo", "Iris", "Jack", "Kate", "Liam")
OPENINGS = "Hmm, I should make sure.\n", "Wait, let me verify this.\n", "Let me check once more.\n"
THINGS = ("apples", "books", "coins", "stamps", "shells", "marbles", "cards", "stones")


class WordProblem(NamedTuple):
    """People who each have some more things than the one before; asked is what the last one has."""

    people: Sequence[str]
    thing: str
    start: int
    more: Sequence[int]

    @property
    def prompt(self) -> str:
        """The problem, and the words that begin a solution."""
        text = f"{self.people[0]} has {self.start} {self.thing}."
        for before, who, extra in zip(self.people, self.people[1:], self.more, strict=False):
            text += f" {who} has {extra} more than {before}."
        return text + f" How many {self.thing} does {self.people[-1]} have?\n\nLet us go step by step.\n"

    @property
    def answer(self) -> str:
        """How many things the last one has."""
        return str(self.start + sum(self.more))


def draw_word_problem(rng: np.random.Generator, steps: int) -> WordProblem:
    """A problem of so many steps, fewer than there are names."""
    people, thing = rng.choice(NAMES, steps + 1, replace=False).tolist(), str(rng.choice(THINGS))
    return WordProblem(people, thing, int(rng.integers(11, 60)), rng.integers(2, 30, steps).tolist())


def write_solution(problem: WordProblem, passes: int) -> str:
    """A solution, so many verifications, a blank line after each, and the answer."""
    last = one_pass(problem, passes) + f"So {problem.people[-1]} has< {problem.answer}> {problem.thing}.\n"
    return "".join(without_marks(one_pass(problem, done)) + "\n" for done in range(passes)) + last


def write_trace(problem: WordProblem, passes: int) -> str:
    """The solution with the answer in a box, as graders read it."""
    return without_marks(write_solution(problem, passes)) + rf"\boxed{{{problem.answer}}}"


def one_pass(problem: WordProblem, done: int) -> str:
    """The steps of a solution (`done` is 0) or of a verification, in one of three wordings; numbers stand in <>."""
    people, now = problem.people, problem.start
    text = "" if done == 0 else OPENINGS[done % len(OPENINGS)]
    text += f"{people[0]} has< {now}> {problem.thing}.\n"
    for other, who, extra in zip(people, people[1:], problem.more, strict=False):
        wordings = (
            f"{who} has< {now}> +< {extra}> =",
            f"Adding< {extra}> to what {other} has,< {now}>, gives {who}",
            f"{who} has< {extra}> more than {other}, who has< {now}>, which is",
        )
        now += extra
        text += f"{wordings[done % len(wordings)]}< {now}> {problem.thing}.\n"
    return text


def without_marks(text: str) -> str:
    """The text without <>."""
    return text.translate({ord("<"): None, ord(">"): None})
