"""ReasonCache (arXiv 2507.21433 v3): pages of a reasoning step that repeats an earlier one are shared with it."""

from collections.abc import Callable
from typing import Any

from jkv.policies.base import Policy
from jkv.policies.recipe import recipe
from jkv.reasoning.sharing import Share
from jkv.reasoning.steps import Filter


@recipe
def reason_cache(
    strict: float = 0.9,
    soft: float = 0.7,
    percentile: float = 80.0,
    warm_up: int = 1024,
    compare_on: str = "rotated",
    cap: float | None = None,
    bias: bool = True,
    align_steps: bool = False,
    structure: bool = True,
    encoder: str | Callable[..., Any] = "tokens",
    metric: str = "euclid",
    threshold: float | None = None,
    match: float = 0.75,
    pairing: str = "ordinal",
    include_prompt: bool = False,
    interval: int = 16,
) -> Policy:
    """ReasonCache: a page of a step that says an earlier one again leaves the cache, and the earlier page counts for both.

    Stage 1 (`jkv.reasoning.steps`, Eqs. 1 and 2 there) finds steps that are alike by their tokens, between a `strict` and a
    `soft`
    threshold, and drops those whose formulas or code differ. Stage 2 (Eqs. 4 to 6) measures the pages of both, ordinal by
    ordinal, and shares those below the `percentile` of the first `warm_up` distances. Settings are described at
    `jkv.reasoning.sharing.Share`.

    What the paper leaves open, as decided here: a step ends with a token that holds a blank line and is compared with all
    earlier ones of its completion; lengths are in bytes; trees are compared for equality, which is what a tree edit distance of
    zero says; pages lie wholly inside their steps and have at least `match` of their tokens in common, for pages whose texts
    are shifted against each other are no repetition; the nearest candidate wins, and what stands in is always a page still
    held; distances of all requests of an engine go into one warm-up, after which the threshold stays; the prompt's pages never
    leave. Rotated keys (as vLLM caches them) are mostly a distance in time; "raw" and "values" compare what was said.

    The paper shares a page by writing it into the table twice. Reading it once with the logarithm of two added to its logits is
    the same to rounding, and reads less. `bias=False` leaves that out, which makes it eviction of the newer page.

    Raises:
      ValueError: a setting out of its range.

    >>> reason_cache().share.percentile
    80.0
    """
    return Policy(
        "reason_cache",
        share=Share(
            Filter(strict, soft, structure, encoder),
            percentile,
            warm_up,
            threshold,
            cap,
            compare_on,
            metric,
            bias,
            align_steps,
            match,
            pairing,
            include_prompt,
            interval,
        ),
    )
