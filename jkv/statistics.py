"""pass@k of several samples a problem, with bootstrap intervals that treat a problem, not a sample, as one observation."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float

from jkv.checks import check_counts

RESAMPLES = 10_000


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


def bootstrap(values: Float[np.ndarray, " problems"], resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % interval of the mean over problems: percentiles of means of problems drawn anew, with replacement.

    Nothing is drawn anew within a problem. Every call with as many problems draws the same ones, so differences of two policies
    (`values` of one less the other's) are paired.

    >>> bootstrap(np.array([0.0, 0.0, 1.0, 1.0]))
    (0.0, 1.0)
    """
    low, high = np.percentile(draws(len(values), resamples) @ values, [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=2)
def draws(problems: int, resamples: int) -> Float[np.ndarray, "resamples problems"]:
    """How much each problem weighs in each resample; rows sum to 1."""
    chosen = np.random.default_rng(0).multinomial(problems, np.full(problems, 1 / problems), size=resamples)
    return chosen / problems


def figures(right: Bool[np.ndarray, "problems n"], ks: Sequence[int]) -> dict[str, list[float]]:
    """pass@k and its interval, for each k: `{"1": [value, low, high]}`."""
    each = {k: pass_at(right, k) for k in ks}
    return {str(k): [float(values.mean()), *bootstrap(values)] for k, values in each.items()}


def check_ks(ks: Sequence[int] | None, samples: int) -> list[int]:
    """The k of pass@k, ascending and 1 among them; None takes 1 and the number of samples.

    Raises:
      ValueError: a k that the samples cannot estimate.
    """
    check_counts(samples=samples)
    if wrong := [k for k in ks or () if not isinstance(k, int) or not 1 <= k <= samples]:
        raise ValueError(f"pass_at must lie in [1, samples], which is {samples}; got {wrong[0]}. Draw more samples.")
    return sorted({1, *((samples,) if ks is None else ks)})
