"""ReasonCache (arXiv 2507.21433 v3): a thought that repeats an earlier one shares its pages."""

from collections.abc import Callable
from typing import Any

from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.reasoning.sharing import Share
from jkv.reasoning.thoughts import Filter


@recipe(
    "ReasonCache",
    idea="shares pages: a page of a repeated thought leaves the cache, and the earlier page counts for both",
    arxiv="2507.21433",
)
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
    match: float = 0.0,
    refresh: int | None = 1024,
    pairing: str = "ordinal",
    include_prompt: bool = False,
    interval: int = 16,
) -> Policy:
    """ReasonCache: a page of a thought that repeats an earlier thought leaves the cache, and the earlier page counts for both.

    `jkv.reasoning.sharing.Share` and `jkv.reasoning.thoughts.Filter` describe the settings. Distances of rotated keys (as vLLM
    caches them) mostly measure how far apart two tokens are; `compare_on="raw"` and "values" compare the content.

    Rule (Eqs. 1, 2 and 4 to 6):
      similarity(a, b) = cosine(tokens(a), tokens(b)) * shorter length / longer length
      thoughts a, b are similar if similarity(a, b) > strict - (strict - soft) * m, m the mean of the newer one's similarities
          to all earlier ones, and if their formulas and code are equal
      the i-th pages of similar thoughts are shared if |page_a - page_b| lies below the `percentile` of the last `warm_up`
          distances

    Departures:
      - The paper shares a page by writing it into the page table twice. Reading it once with the logarithm of two added to its
        logits gives the same result up to rounding, and reads less. `bias=False` leaves the logarithm out, which amounts to
        evicting the newer page.
      - The paper leaves some points open. Here a thought ends with a token that holds a blank line, or with two that make one,
        and is compared with all earlier ones of its completion. Lengths are in bytes. Syntax trees are compared for equality,
        which is a tree edit distance of zero. `align_steps` sees only blank lines of one token.
      - A shared page lies entirely inside its thought. The nearest candidate wins, and the page that replaces another is always
        still held. Pages of the prompt never leave. `match`, of ours, also asks for a share of equal tokens, slot by slot.
      - The distances of all requests of an engine go into one threshold, which is set again after every `refresh` of them, so
        that what is shared depends on the traffic. With `refresh=None` the first one stays, and with `threshold` a request
        draws the same tokens in any batch.

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
            refresh=refresh,
        ),
    )
