"""MemShare (ReasonCache's first form, by the same authors): fixed thresholds, and formulas are not compared."""

from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.reasoning.sharing import Share
from jkv.reasoning.thoughts import Filter


@recipe("MemShare, the first version of ReasonCache", idea="shares pages by fixed similarity thresholds")
def mem_share(
    similarity: float = 0.8,
    percentile: float = 80.0,
    warm_up: int = 1024,
    threshold: float | None = None,
    compare_on: str = "rotated",
    bias: bool = True,
    align_steps: bool = False,
    match: float = 0.0,
    refresh: int | None = 1024,
    interval: int = 16,
) -> Policy:
    """MemShare: thoughts whose bags of tokens have a cosine above `similarity` (the paper's 0.8 or 0.9) share their pages.

    Lengths of thoughts and formulas are not compared. The other settings are as in `reason_cache`.

    Rule:
      thoughts a, b are similar if cosine(tokens(a), tokens(b)) > similarity
      the i-th pages of similar thoughts are shared if |page_a - page_b| lies below the threshold

    Departures:
      - The paper's distance threshold of 0.8 has no unit; here it is the share of distances that are small enough,
        `percentile=80`. `threshold` sets a distance instead.

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
        refresh=refresh,
    )
    return Policy("mem_share", share=share)
