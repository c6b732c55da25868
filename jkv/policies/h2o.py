"""H2O, Heavy-Hitter Oracle (arXiv 2306.14048): keeps what has drawn the most attention so far, and what is recent."""

from jkv.policies.base import Evict, Policy
from jkv.policies.recipe import recipe
from jkv.policies.schedules import EachStep, Every
from jkv.policies.scores import AccumulatedMass


@recipe
def h2o(budget: int, recent: int | None = None, interval: int = 1) -> Policy:
    """H2O with `budget` slots for each layer and KV head: the last `recent` (default: half of them) and the heaviest others.

    A slot's weight is the softmax mass of all queries so far, the prompt's included, summed over the query heads of its KV
    head (the paper has one query head for each). After every token the lightest goes; a prompt longer than the budget is cut
    once, at its end. Every `interval` tokens instead, several go at a time. Keys keep their true positions. The authors' code
    has three forms that differ; this is the rule that they share, with budgets fixed in slots.

    Raises:
      ValueError: a setting out of its range, or `recent` above the budget.

    >>> h2o(budget=64).evict.recent
    32
    """
    recent = budget // 2 if recent is None else recent
    schedule = EachStep(budget) if interval == 1 else Every(budget, interval)
    return Policy("h2o", Evict(AccumulatedMass(), recent=recent), schedule)
