"""The outcome of a course: runs as records, arms as lines of a table, and remarks on their intervals."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jkv.statistics import half_width
from research.grpo.checkpoints import History
from research.grpo.course import Arm, Course

MOMENTS = 10  # parts of a run that a record keeps the means of
COLUMNS = (
    "arm",
    "loss",
    "full cache, first",
    "final (95 %)",
    "own cache, first",
    "final",
    "peak KV kB",
    "saved",
    "tokens/s",
    "overlap, first",
    "last",
    "p05",
    "ESS",
    "kept",
    "ratio off, p99",
    "max",
)
CONTRASTS = "contrast", "own cache (95 %)", "full cache (95 %)", "own cache: seeds where the first is higher"


def record_of(arm: Arm, seed: int, history: History) -> dict[str, Any]:
    """A run as JSON: its evaluations, and the means of its steps in ten parts."""
    parts = [list(part) for part in np.array_split(np.arange(len(history.steps)), min(MOMENTS, len(history.steps)))]
    names = history.steps[0].keys()
    moments = [{name: float(np.mean([history.steps[i][name] for i in part])) for name in names} for part in parts]
    return {
        "arm": arm.name,
        "policy": arm.policy.definition,
        "loss": arm.loss,
        "correction": arm.correction,
        "seed": seed,
        "steps": len(history.steps),
        "evaluations": history.evaluations,
        "moments": moments,
        "ratio_p99": max(step["ratio_p99"] for step in history.steps),
        "ratio_max": max(step["ratio_max"] for step in history.steps),
        "tokens_per_second": float(np.median([step["tokens"] / step["seconds"] for step in history.steps])),
        "peak_kv_bytes": float(np.mean([step["peak_kv_bytes"] for step in history.steps])),
        "dense_kv_bytes": float(np.mean([step["dense_kv_bytes"] for step in history.steps])),
    }


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over runs and half its 95 % interval (Student's t); NaN for one run."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")

    def holds(self, value: float) -> bool:
        """Whether a value lies inside."""
        return abs(value - self.mean) <= self.half


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent runs and how far off it may be.

    >>> print(interval([0.5, 0.6, 0.7]), interval([0.5]))
    0.600 ± 0.248 0.500
    """
    return Interval(float(np.mean(values)), half_width(values))


def by_arm(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The runs of each arm, in the order of the arms."""
    return {name: [run for run in runs if run["arm"] == name] for name in dict.fromkeys(run["arm"] for run in runs)}


def final(runs: Sequence[Mapping[str, Any]], cache: str = "dense", index: int = -1) -> Interval:
    """The reward of an arm's runs in their last evaluation, or another."""
    return interval([run["evaluations"][index][cache] for run in runs])


def row_of(name: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line of the table: means over an arm's runs; for figures of exactness, the worst run."""

    def mean(field: str, *parts: int) -> float:
        chosen = parts or range(len(runs[0]["moments"]))
        return float(np.mean([run["moments"][part][field] for run in runs for part in chosen]))

    loss = runs[0]["loss"] + (f", {runs[0]['correction']}" if runs[0]["loss"] == "dense" else "")
    held, whole = (float(np.mean([run[field] for run in runs])) for field in ("peak_kv_bytes", "dense_kv_bytes"))
    is_exact = runs[0]["loss"] == "replay"
    return [
        name,
        loss,
        f"{final(runs, index=0).mean:.3f}",
        str(final(runs)),
        f"{final(runs, 'own', 0).mean:.3f}",
        str(final(runs, "own")),
        f"{held / 1e3:.0f}",
        f"{1 - held / whole:.0%}",
        f"{np.mean([run['tokens_per_second'] for run in runs]):.0f}",
        f"{mean('overlap', 0):.3f}",
        f"{mean('overlap', -1):.3f}",
        f"{mean('p05'):.3f}",
        f"{mean('ess'):.3f}",
        f"{mean('kept'):.1%}",
        f"{max(run['ratio_p99'] for run in runs):.1e}" if is_exact else "",
        f"{max(run['ratio_max'] for run in runs):.1e}" if is_exact else "",
    ]


def remarks(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Remarks on the table: which arms learnt, and which lie within the interval of the full cache."""
    arms = by_arm(runs)
    firsts = {name: final(own, index=0).mean for name, own in arms.items()}
    sentences = []
    if 2 * max(firsts.values()) < 1:  # rewards are at most 1
        slow = [f"`{name}`" for name, own in arms.items() if final(own).mean <= 2 * firsts[name]]
        where = f"every arm but {' and '.join(slow)}" if slow else "every arm"
        where = "no arm" if len(slow) == len(arms) else where
        sentences = [f"The final reward with the full cache is above twice the first in {where}."]
    others = [name for name in arms if name != "full"]
    if len(arms.get("full", [])) > 1 and others:
        whole = final(arms["full"])
        gaps = {name: final(arms[name]).mean - whole.mean for name in others}
        inside, outside = (
            ", ".join(f"{name} ({gap:+.3f})" for name, gap in gaps.items() if whole.holds(whole.mean + gap) == is_in) or "none"
            for is_in in (True, False)
        )
        sentences.append(f"Means within the 95 % interval of rollouts with the full cache: {inside}; outside of it: {outside}.")
    return sentences


def contrast_rows(runs: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
    """A line for each pair of arms that have runs: the final reward of the first less that of the second, seed by seed."""
    arms = {name: {run["seed"]: run["evaluations"][-1] for run in own} for name, own in by_arm(runs).items()}
    rows = []
    for one, other in pairs:
        shared = sorted(set(arms.get(one, ())) & set(arms.get(other, ())))
        if shared:
            gaps = [[arms[one][seed][cache] - arms[other][seed][cache] for seed in shared] for cache in ("own", "dense")]
            above = sum(gap > 0 for gap in gaps[0])
            rows.append([f"{one} - {other}", *(signed(interval(gap)) for gap in gaps), f"{above} of {len(shared)}"])
    return rows


def signed(change: Interval) -> str:
    """A difference with its sign.

    >>> signed(interval([0.1, 0.2, 0.3])), signed(interval([-0.1]))
    ('+0.200 ± 0.248', '-0.100')
    """
    return str(change) if change.mean < 0 else f"+{change}"


def describe(course: Course, runs: Sequence[Mapping[str, Any]]) -> str:
    """The text above the table: task, sizes and columns."""
    counts = sorted({len(own) for own in by_arm(runs).values()})
    seeds = f"{counts[0]} seed{'s' * (counts[0] > 1)}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    return (
        f"Task {course.task}; {seeds}, {course.steps} updates of {course.prompts} prompts times {course.samples} samples, up "
        f"to {course.max_new_tokens} new tokens. Rewards are of {course.evaluations} prompts, one draw each; KV bytes those of "
        "the pool at its peak, saved beside full caches of the same rows; tokens a second those of the rollouts. Overlap, its "
        "5th percentile over tokens, and effective sample size compare sampled with dense log-probabilities, in the first and "
        "the last tenth, or over the run; kept is the share of tokens that the correction leaves. The replay's ratio is off "
        "by so many nats before its update, in the worst step."
    )
