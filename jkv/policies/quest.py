"""Quest (arXiv 2406.10774): each decode step reads only the pages that may matter; it evicts nothing."""

from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Read


@recipe(
    "Quest",
    idea="keeps every token; each step reads only the pages with the highest bounds on attention, so no memory is freed",
    arxiv="2406.10774",
    published={"dense_layers": 2},
)
def quest(budget: int, dense_layers: int | None = None, over_group: str = "max") -> Policy:
    """Quest: each query reads about `budget` slots of each layer and KV head, in whole pages, always with the current page.

    Pages are ranked by an upper bound of their logits: the largest logit that any key between the page's smallest and largest
    key, channel by channel, can have with the query. Bounds are updated as keys are appended. The first `dense_layers` layers
    read all pages: by default 2, and none of a model with fewer than 16 layers. `budget` is rounded down to whole pages, at
    least one. Quest saves reads but no memory: the cache is as large as the full one, and the bounds come on top.

    Rule:
      bound(page) = sum over channels c of max(q[c] * smallest(page)[c], q[c] * largest(page)[c])
      read the pages with the largest bounds, about `budget` slots, and the current page

    Departures:
      - Query heads of a KV head read the same pages, by the largest (or, with `over_group="mean"`, the mean) of their bounds;
        the authors choose for each query head.
      - The authors keep two dense layers in models with 32 layers; in a small model, two would be a large part.

    Raises:
      ValueError: a setting out of its range.

    >>> quest(budget=1024).is_bounded
    False
    """
    return Policy("quest", read=Read(budget, dense_layers, over_group))
