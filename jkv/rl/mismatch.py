"""Distance between the distribution that tokens were drawn from and the one that is trained: figures of a batch of rollouts.

With s the log-probability that a token was drawn with (a compressed cache's) and d its dense one, rho = exp(d - s). All figures
are estimates over the sampled tokens, on the host; they show that a budget is too small before a reward does.
"""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.errors import refused
from jkv.rl.ratios import LARGEST, check_pair

LEAST_OVERLAP, LEAST_ESS = 0.9, 0.5  # below these a warning is given
BUCKETS = (0, 64, 256, 1024, 4096, 16384)  # first positions of the buckets
VETO = 1e-4


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of some tokens; all 0, but for `ess`, `overlap`, `p05` and `p01`, which are 1, where the two distributions are equal.

    Attributes:
      tokens: how many.
      k1: mean of s - d, in nats: an estimate of KL(sampled || dense).
      k3: mean of rho - 1 - log rho, in nats: the same with less variance, and never negative.
      chi2: mean of rho^2, less 1: the variance of rho.
      ess: (sum of rho)^2 / (tokens * sum of rho^2): the share of the tokens that importance weights leave effective.
      overlap: mean of min(1, rho): an unbiased estimate of the sum over the vocabulary of the smaller probability, which is
        1 - the total variation distance.
      p05: 5th percentile of min(1, rho). Sparrow (2606.08446) bounds a percentile of each token's whole overlap instead, which
        has lighter tails: `full_overlap`.
      p01: 1st percentile of min(1, rho).
      max_difference: largest |d - s|, in nats.
      veto_rate: the share of tokens with rho below 1e-4, the veto of Sparse-RL (2601.10079).
    """

    tokens: int
    k1: float
    k3: float
    chi2: float
    ess: float
    overlap: float
    p05: float
    p01: float
    max_difference: float
    veto_rate: float


@dataclasses.dataclass(frozen=True)
class Mismatch(Figures):
    """Of all tokens, by sequence, and by position.

    Attributes:
      geometric: `[N]` each sequence's geometric mean of rho; NaN for one without tokens.
      buckets: figures of the positions from one of the bounds to the next; those that hold no token are left out.
    """

    geometric: tuple[float, ...] = ()
    buckets: dict[str, Figures] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, float]:
        """Numbers alone, for a log or JSON: the fields of `Figures`, and a bucket's under "64-255/overlap" and the like."""
        flat = {field.name: getattr(self, field.name) for field in dataclasses.fields(Figures)}
        for name, figures in self.buckets.items():
            flat |= {f"{name}/{field}": value for field, value in dataclasses.asdict(figures).items()}
        return flat


def mismatch(
    dense: Any,
    sampled: Any,
    mask: Any,
    position: Any = None,
    buckets: Sequence[int] = BUCKETS,
    *,
    least_overlap: float = LEAST_OVERLAP,
    least_ess: float = LEAST_ESS,
) -> Mismatch:
    """How far `sampled` is from `dense`, log-probabilities `[N, T]` of the same tokens in nats, where `mask` is True.

    `position` `[N, T]` places tokens in buckets: None counts each completion's own tokens from 0. The first bucket begins with
    the first of `buckets` and the last never ends. log rho is cut at +-20, but for k1 and `max_difference`.

    Warns where the overlap or the effective sample size is below `least_overlap` or `least_ess`: 0 never warns.

    Raises:
      ValueError: arrays of different shapes, what is no log-probability, no token at all, or buckets that do not ascend.

    >>> same = np.log(np.array([[0.5, 0.25]], np.float32))
    >>> found = mismatch(same, same, np.ones((1, 2), bool))
    >>> found.overlap, found.ess, found.k1, found.geometric
    (1.0, 1.0, 0.0, (1.0,))
    """
    check_pair(dense, sampled, mask)
    bounds = [int(bound) for bound in buckets]
    if not bounds or any(a >= b for a, b in itertools.pairwise(bounds)):
        rule = f"buckets must be the first positions of each bucket, ascending; got {tuple(buckets)}."
        raise refused(rule, buckets="invalid")
    mask = np.asarray(mask)
    if not mask.any():
        raise refused("The mask must hold at least one token; it is False everywhere. Leave such a batch out.", mask="missing")
    own = np.cumsum(mask, axis=1) - 1 if position is None else np.asarray(position)
    if own.shape != mask.shape:
        raise refused(f"position must be of the mask's shape, {mask.shape}; got {own.shape}.", position="wrong_type")
    difference = np.where(mask, np.asarray(dense, np.float64), 0) - np.where(mask, np.asarray(sampled, np.float64), 0)
    whole = figures_of(difference[mask])
    found = Mismatch(**dataclasses.asdict(whole), geometric=geometric_means(difference, mask), buckets={})
    for begin, end in zip(bounds, [*bounds[1:], None], strict=True):
        is_in = mask & (own >= begin) & (own < (math.inf if end is None else end))
        if is_in.any():
            found.buckets[f"{begin}-{'' if end is None else end - 1}"] = figures_of(difference[is_in])
    warn(found, least_overlap, least_ess)
    return found


def figures_of(difference: np.ndarray) -> Figures:
    """The figures of tokens whose d - s these are: [n]."""
    bounded = np.clip(difference, -LARGEST, LARGEST)
    rho = np.exp(bounded)
    agreement = np.minimum(1.0, rho)
    p05, p01 = np.percentile(agreement, [5, 1])
    return Figures(
        tokens=len(rho),
        k1=float(-difference.mean()) + 0.0,
        k3=float((rho - 1 - bounded).mean()),
        chi2=float((rho**2).mean() - 1),
        ess=float(rho.sum() ** 2 / (len(rho) * (rho**2).sum())),
        overlap=float(agreement.mean()),
        p05=float(p05),
        p01=float(p01),
        max_difference=float(np.abs(difference).max()),
        veto_rate=float((difference < math.log(VETO)).mean()),
    )


def geometric_means(difference: np.ndarray, mask: np.ndarray) -> tuple[float, ...]:
    """Each row's geometric mean of rho."""
    means = (row[is_token].mean() if is_token.any() else math.nan for row, is_token in zip(difference, mask, strict=True))
    return tuple(math.exp(np.clip(mean, -LARGEST, LARGEST)) for mean in means)


def warn(found: Figures, least_overlap: float, least_ess: float) -> None:
    """Warns of a figure that is too low, and of what raises it."""
    for name, value, least in (("overlap", found.overlap, least_overlap), ("effective sample size", found.ess, least_ess)):
        if value < least:
            warnings.warn(
                f"the {name} of sampled and dense distributions is {value:.3f}, below {least:g}: gradients of the dense policy "
                "are of other data than was sampled. Raise the policy's budget, correct (jkv.rl.correct), or train on what "
                "was sampled by replay (jkv.rl.make_batch(..., replay=True)).",
                stacklevel=3,
            )
