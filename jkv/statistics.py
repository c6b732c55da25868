"""Intervals, tests and resampling, for every report: pass@k, shares, means over problems or runs, and paired changes.

A problem is one observation, however many samples it has. Resampling draws from fixed seeds, so a figure is always the same.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jkv.checks import check_counts
from jkv.errors import refused

LEVEL = 0.95  # of every interval in a report
NORMAL = 1.96  # half the width of a 95 % interval, in standard errors of a normal distribution
RESAMPLES = 9_999
ROUNDING = 1e-12  # a smaller spread, as a share of the largest value, is none
MOST_DRAWN = 1 << 20  # values resampled at a time
BISECTIONS = 60  # of an interval's end


def pass_at(right: Bool[np.ndarray, "problems n"], k: int) -> Float[np.ndarray, " problems"]:
    """The chance, for each problem, that one of k of its samples is right, estimated without bias from all n.

    `1 - C(n - c, k) / C(n, k)` with c samples right (Chen et al. 2021, arXiv 2107.03374, equation 1), as a product.

    >>> pass_at(np.array([[True, False, False, False], [False] * 4]), 2)
    array([0.5, 0. ])
    """
    n, wrong = right.shape[1], right.shape[1] - right.sum(axis=1)
    drawn = np.arange(k)
    chance = np.maximum(wrong[:, None] - drawn, 0) / (n - drawn)  # that each of k, drawn one after the other, is wrong
    return 1.0 - chance.prod(axis=1)


def bootstrap(*groups: Float[np.ndarray, " _"], resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % interval of a group's mean, or of the first group's mean less the second's (bias-corrected and accelerated).

    Observations are resampled with replacement, each group by itself (`scipy.stats.bootstrap`, method BCa). For paired
    observations, such as two policies on the same problems, pass their differences as one group. Without spread in any group,
    both ends are the estimate. Memory is bounded: `MOST_DRAWN` values are resampled at a time.

    >>> bootstrap(np.array([0.0, 0.0, 1.0, 1.0]))
    (0.0, 1.0)
    """
    from scipy import stats

    estimate = mean_of(*groups)
    if not any(map(has_spread, groups)):
        return float(estimate), float(estimate)
    batch = max(1, MOST_DRAWN // max(map(len, groups)))
    generator = np.random.default_rng(0)
    found = stats.bootstrap(groups, mean_of, n_resamples=resamples, batch=batch, method="BCa", rng=generator)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def with_interval(values: Float[np.ndarray, " _"], form: str = "+.3f") -> str:
    """A group's mean with its 95 % interval, as text; one observation has no interval.

    >>> with_interval(np.array([0.0, 0.0, 1.0, 1.0]), ".1f"), with_interval(np.array([0.5]))
    ('0.5 [0.0, 1.0]', '+0.500')
    """
    mean = f"{values.mean():{form}}"
    if len(values) < 2:
        return mean
    low, high = bootstrap(values)
    return f"{mean} [{low:{form}}, {high:{form}}]"


def has_spread(values: np.ndarray) -> bool:
    """Whether values differ by more than rounding."""
    return bool(np.ptp(values) > ROUNDING * np.abs(values).max())


def mean_of(*groups: np.ndarray, axis: int = -1) -> Any:
    """The mean of a group, or of the first less that of the second."""
    means = [group.mean(axis=axis) for group in groups]
    return means[0] if len(means) == 1 else means[0] - means[1]


def wilson(right: int, total: int, level: float = LEVEL) -> tuple[float, float]:
    """The Wilson score interval of a share.

    >>> tuple(round(x, 3) for x in wilson(95, 100))
    (0.888, 0.978)
    """
    from scipy import stats

    found = stats.binomtest(int(right), int(total)).proportion_ci(level, method="wilson")
    return float(found.low), float(found.high)


def accuracy_figures(right: Bool[np.ndarray, "problems n"]) -> list[float]:
    """The share of samples that are right and its 95 % interval: Wilson's of one sample a problem, a bootstrap of several."""
    each = right.mean(axis=1)
    interval = wilson(int(right.sum()), len(right)) if right.shape[1] == 1 else share_interval(each)
    return [float(each.mean()), *interval]


def share_interval(each: Float[np.ndarray, " problems"]) -> tuple[float, float]:
    """The 95 % interval of the mean of a share of each problem: a bootstrap, or Wilson's where all are the same.

    >>> tuple(round(x, 3) for x in share_interval(np.zeros(12)))
    (0.0, 0.242)
    """
    return bootstrap(each) if has_spread(each) else wilson(round(float(each.sum())), len(each))


def tango(better: int | float, worse: int | float, total: int) -> tuple[float, float]:
    """The 95 % score interval of a paired difference of shares (Tango 1998), also where no pair differs.

    `better` and `worse` count the pairs that are right on one side alone. The interval holds the differences d with
    `(better - worse - total d)^2 <= NORMAL^2 total (2 q + d - d^2)`, where q is the likeliest share of `worse` for that d.

    >>> tuple(round(x, 3) for x in tango(0, 0, 200))
    (-0.019, 0.019)
    """

    def is_inside(d: float) -> bool:
        linear = (2 * total - better + worse) * d - better - worse
        q = (math.sqrt(linear**2 + 8 * total * worse * d * (1 - d)) - linear) / (4 * total)
        return (better - worse - total * d) ** 2 <= NORMAL**2 * total * (2 * q + d - d**2)

    def end(outside: float) -> float:
        inside = (better - worse) / total
        for _ in range(BISECTIONS):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if is_inside(middle) else (inside, middle)
        return outside

    return end(-1.0), end(1.0)


def paired_change(this: Bool[np.ndarray, "problems n"], base: Bool[np.ndarray, "problems m"]) -> tuple[float, float, float]:
    """How much more of the samples is right than in `base` on the same problems, and its 95 % interval.

    One sample a problem: Tango's, from the pairs that differ. Several: a bootstrap over problems; where all problems have the
    same difference, as if each were one sample, so that no interval has zero width.

    >>> pairs = np.array([[1], [1], [0], [0]], bool), np.ones((4, 1), bool)
    >>> tuple(round(x, 2) for x in paired_change(*pairs))
    (-0.5, -0.85, 0.23)
    """
    difference = this.mean(axis=1) - base.mean(axis=1)
    change = float(difference.mean())
    if this.shape[1] == base.shape[1] == 1 or not has_spread(difference):
        return change, *tango(float(difference.clip(0).sum()), float(-difference.clip(None, 0).sum()), len(difference))
    return change, *bootstrap(difference)


def paired_p(this: Bool[np.ndarray, "problems n"], base: Bool[np.ndarray, "problems m"]) -> float:
    """The exact two-sided p of the paired difference of two policies: by chance, each problem's has either sign.

    It is the share of all signs that make the sum of differences as large as it is. With one sample a problem, this is
    McNemar's exact test.

    >>> paired_p(np.ones((5, 1), bool), np.zeros((5, 1), bool))
    0.0625
    """
    difference = this.sum(axis=1) * base.shape[1] - base.sum(axis=1) * this.shape[1]  # as whole numbers
    difference = difference // max(1, np.gcd.reduce(difference))
    chance = np.ones(1)  # of each sum, from the lowest to the highest
    for step in np.abs(difference[difference != 0]):
        wider = np.zeros(len(chance) + 2 * step)
        wider[: len(chance)] += chance / 2
        wider[2 * step :] += chance / 2
        chance = wider
    highest = len(chance) // 2
    is_as_far = np.abs(np.arange(-highest, highest + 1)) >= abs(difference.sum())
    return min(1.0, float(chance[is_as_far].sum()))


def sign_flip_p(differences: Float[np.ndarray, " _"], resamples: int = RESAMPLES) -> float:
    """The two-sided p of paired differences: by chance, each has either sign (exact for a few, else of random signs).

    >>> sign_flip_p(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    0.0625
    """
    from scipy import stats

    if not has_spread(np.append(differences, -differences)):
        return 1.0
    rng = np.random.default_rng(0)
    found = stats.permutation_test((differences,), mean_of, permutation_type="samples", n_resamples=resamples, rng=rng)
    return float(found.pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """The p of several tests, corrected for their number (Holm 1979), in the same order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(ps)
    corrected = np.maximum.accumulate(np.sort(ps) * np.arange(len(ps), 0, -1)).clip(max=1.0)
    return corrected[np.argsort(order)].tolist()


def half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of independent runs (Student's t); NaN for one run.

    >>> round(half_width([0.5, 0.6, 0.7]), 3)
    0.248
    """
    from scipy import stats

    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def pass_figures(right: Bool[np.ndarray, "problems n"], ks: Sequence[int], seeds: int = 1) -> dict[str, list[float]]:
    """pass@k and its interval, for each k: `{"1": [value, low, high]}`; means over seeds, equal blocks of columns."""
    each = {k: np.mean([pass_at(block, k) for block in np.split(right, seeds, axis=1)], axis=0) for k in ks}
    return {str(k): [float(values.mean()), *share_interval(values)] for k, values in each.items()}


def check_ks(ks: Sequence[int] | None, samples: int) -> list[int]:
    """The k of pass@k, ascending and 1 among them; None takes 1 and the number of samples.

    Raises:
      ValueError: a k that the samples cannot estimate.
    """
    check_counts(samples=samples)
    if wrong := [k for k in ks or () if not isinstance(k, int) or not 1 <= k <= samples]:
        rule = f"pass_at must lie in [1, samples], which is {samples}; got {wrong[0]}. Draw more samples."
        raise refused(rule, pass_at="out_of_range")
    return sorted({1, *((samples,) if ks is None else ks)})
