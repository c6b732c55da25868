"""H2O, Heavy-Hitter Oracle (arXiv 2306.14048): keeps the tokens with the most attention so far, and the recent ones."""

from jkv.eviction.evict import Evict
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import EachStep, Every
from jkv.eviction.scores import AccumulatedMass


@recipe(
    "H2O",
    idea="keeps recent tokens and those with the largest accumulated attention; evicts one token for each new token",
    arxiv="2306.14048",
)
def h2o(budget: int, recent: int | None = None, interval: int = 1, sinks: int = 0, protect_prompt: bool = False) -> Policy:
    """H2O with `budget` slots for each layer and KV head: the last `recent` (default: half) and the heaviest of the others.

    Each decode step evicts the lightest slot; a prompt longer than the budget is compacted once, after prefill. With an
    `interval` above 1, several slots are evicted at a time. Keys keep their true positions. The first `sinks` tokens and, with
    `protect_prompt`, the prompt are never evicted.

    Rule:
      mass(s) = sum over all queries q so far, the prompt's included, of softmax(q . key / sqrt(H))(s)
      keep the last `recent` slots, and the other slots with the largest mass

    Departures:
      - The mass is summed over the query heads of a KV head; the paper has one query head for each.
      - The authors' code has three variants; this is the rule that they share, with budgets fixed in slots. The paper keeps a
        recent half and evicts in each step: a smaller `recent`, or an `interval` above 1, is no rule of the paper.

    Raises:
      ValueError: a setting out of its range, or `recent` above the budget.

    >>> h2o(budget=64).evict.recent
    32
    """
    recent = budget // 2 if recent is None else recent
    schedule = EachStep(budget) if interval == 1 else Every(budget, interval)
    return Policy("h2o", Evict(AccumulatedMass(), sinks=sinks, recent=recent, protect_prompt=protect_prompt), schedule)
