"""MemShare (the same authors' earlier form of ReasonCache): fixed thresholds, and no look at formulas."""

from jkv.policies.base import Policy
from jkv.policies.recipe import recipe
from jkv.reasoning.sharing import Share
from jkv.reasoning.steps import Filter


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
    `percentile=80`. `threshold` gives a distance instead. Lengths of steps do not count. The other settings are ReasonCache's.

    Raises:
      ValueError: a setting out of its range.

    >>> mem_share().share.filter.soft
    0.8
    """
    alike = Filter(similarity, similarity, structure=False, penalises_length=False)
    share = Share(
        alike,
        percentile,
        warm_up,
        threshold,
        compare_on=compare_on,
        bias=bias,
        align_steps=align_steps,
        match=match,
        interval=interval,
    )
    return Policy("mem_share", share=share)
