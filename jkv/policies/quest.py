"""Quest (arXiv 2406.10774): reads, at each step, only the pages that may matter; forgets nothing and frees nothing."""

from jkv.policies.base import Policy, Read
from jkv.policies.recipe import recipe


@recipe
def quest(budget: int, dense_layers: int = 2, over_group: str = "max") -> Policy:
    """Quest: each query reads about `budget` slots of each layer and KV head, whole pages, the current one always among them.

    A page is worth the most that any key between the smallest and largest of its keys, channel by channel, could give the
    query; bounds are kept as keys are appended. Query heads of a KV head read the same pages, by the largest (or, "mean", the
    mean) of their bounds; the authors choose for each query head. The first `dense_layers` layers read everything. `budget` is
    rounded down to whole pages, at least one. No memory is saved: the cache is as large as the full one's, and the bounds come
    on top; what is saved is reading.

    Raises:
      ValueError: a setting out of its range.

    >>> quest(budget=1024).is_bounded
    False
    """
    return Policy("quest", read=Read(budget, dense_layers, over_group))
