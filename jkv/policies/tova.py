"""TOVA (arXiv 2401.06104): drops whatever the newest token attends to least."""

from jkv.policies.base import Evict, Policy
from jkv.policies.recipe import recipe
from jkv.policies.schedules import EachStep, Every
from jkv.policies.scores import AttentionMass


@recipe
def tova(budget: int, interval: int = 1, keep_newest: bool = False) -> Policy:
    """TOVA with `budget` slots for each layer and KV head: after each token, those that its query attends to most.

    The softmax runs over all slots, the token's own among them, and is averaged over all query heads of a layer, whose KV
    heads keep the same tokens; a prompt longer than the budget is compacted once, by its last query. The newest token may be
    dropped at once, unless `keep_newest`. Every `interval` tokens instead of each, several go at a time, by the query of the
    last: another rule than the paper's.

    Raises:
      ValueError: a setting out of its range.

    >>> tova(budget=64).evict.scope
    'layer'
    """
    score = AttentionMass(window=1, over_group="mean", candidates="all")
    schedule = EachStep(budget) if interval == 1 else Every(budget, interval)
    return Policy("tova", Evict(score, recent=int(keep_newest), scope="layer"), schedule)
