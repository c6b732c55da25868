"""MemShare (the same authors' earlier form of ReasonCache): fixed thresholds, and no look at formulas."""

import dataclasses

from jkv.policies.base import Policy
from jkv.policies.reason_cache import reason_cache
from jkv.policies.recipe import recipe


@recipe
def mem_share(
    similarity: float = 0.8,
    percentile: float = 80.0,
    warm_up: int = 1024,
    threshold: float | None = None,
    compare_on: str = "rotated",
    bias: bool = True,
    align_steps: bool = False,
    match: float = 0.75,
    interval: int = 16,
) -> Policy:
    """MemShare: steps whose bags of tokens have a cosine above a fixed `similarity` (its 0.8 or 0.9), pages below a distance.

    Its distance threshold of 0.8 has no unit in the paper; it is taken as the share of distances that are small enough,
    `percentile=80`. `threshold` gives a distance instead. Lengths count as in ReasonCache, whose other settings it has.

    Raises:
      ValueError: a setting out of its range.

    >>> mem_share().share.filter.soft
    0.8
    """
    policy = reason_cache(
        similarity,
        similarity,
        percentile,
        warm_up,
        compare_on,
        None,
        bias,
        align_steps,
        structure=False,
        threshold=threshold,
        match=match,
        interval=interval,
    )
    return dataclasses.replace(policy, name="mem_share")
