"""Pairs of policies that a comparison tests, named before it runs, so that p can be corrected for their number."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jkv.checks import counted
from jkv.errors import refused
from jkv.evaluation.compare import Outcome, budget_cell, points
from jkv.reports import markdown
from jkv.statistics import holm, paired_change, paired_p

COLUMNS = "contrast", "budget", "difference (95 %)", "p", "p, corrected"


@dataclasses.dataclass(frozen=True)
class Contrast:
    """One policy's accuracy less another's at one budget, on the same problems."""

    this: Outcome
    other: Outcome
    difference: list[float]  # with its 95 % interval
    p: float  # exact, of this test alone
    corrected: float  # by Holm's method, for all contrasts of the comparison


def check_contrasts(contrasts: Sequence[Any], policies: Sequence[str]) -> None:
    """Refuses what names no two policies of the comparison.

    Raises:
      ValueError: a contrast that is no pair of different names, or a name that does not run.
    """
    for pair in contrasts:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(name, str) for name in pair)
            or len(set(pair)) < 2
        ):
            rule = f'A contrast is a pair of different policies, such as ["r_kv", "snap_kv"]; got {pair!r}.'
            raise refused(rule, contrasts="invalid")
        for name in pair:
            if name not in ("full", *policies):
                rule = f"A contrast is between policies that run, {', '.join(policies)}; got {name}. Add it to them."
                raise refused(rule, contrasts="unknown_name")


def find_contrasts(outcomes: Sequence[Outcome], pairs: Sequence[Sequence[str]]) -> list[Contrast]:
    """Each pair at each budget that both have; a policy without a budget is compared at each of the other's."""
    tests = [
        (this, other)
        for one, two in pairs
        for this in outcomes
        for other in outcomes
        if (this.policy, other.policy) == (one, two) and has_same_size(this, other)
    ]
    ps = [paired_p(this.rights, other.rights) for this, other in tests]
    return [
        Contrast(this, other, list(paired_change(this.rights, other.rights)), p, corrected)
        for (this, other), p, corrected in zip(tests, ps, holm(ps), strict=True)
    ]


def has_same_size(this: Outcome, other: Outcome) -> bool:
    """Whether two outcomes are of one budget, or either of none; equal bytes may be different slots."""
    if this.budget is None or other.budget is None:
        return True
    if this.num_bytes is not None or other.num_bytes is not None:
        return this.num_bytes == other.num_bytes
    if this.share is None and other.share is None:
        return this.budget == other.budget
    return (this.share, this.is_each) == (other.share, other.is_each)


def section(contrasts: Sequence[Contrast]) -> str:
    """The contrasts in Markdown: how many there are, and a table."""
    rows = [
        (
            f"{one.this.policy} - {one.other.policy}",
            one.this.num_bytes or budget_cell(one.this) or budget_cell(one.other),
            points(one.difference),
            p_cell(one.p),
            p_cell(one.corrected),
        )
        for one in contrasts
    ]
    head = f"{counted(len(contrasts), 'contrast')}, named before the run. p is exact, and corrected for all of them (Holm)."
    return f"{head}\n\n{markdown(COLUMNS, rows)}"


def p_cell(p: float) -> str:
    """A p to three decimals.

    >>> p_cell(0.04), p_cell(1e-9)
    ('0.040', '< 0.001')
    """
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
