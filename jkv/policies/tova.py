"""TOVA (arXiv 2401.06104): evicts what the newest token attends to least."""

from jkv.eviction.evict import Evict
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import EachStep, Every
from jkv.eviction.scores import AttentionMass


@recipe("TOVA", idea="after each token, evicts the token with the lowest attention from the newest query", arxiv="2401.06104")
def tova(budget: int, interval: int = 1, sinks: int = 0, recent: int = 0, protect_prompt: bool = False) -> Policy:
    """TOVA with `budget` slots for each layer and KV head: after each token, the slots that its query attends to most.

    The KV heads of a layer keep the same tokens. A prompt longer than the budget is compacted once, by its last query. The
    newest token may be evicted right away. The first `sinks` tokens, the last `recent` and, with `protect_prompt`, the prompt
    are never evicted.

    Rule:
      score = mean over all query heads of the layer of softmax(q . key / sqrt(H)), q of the newest token,
          over all slots, its own included

    Departures:
      - With an `interval` above 1, several slots are evicted at a time by the query of the last token, which is not the paper's
        rule.

    Raises:
      ValueError: a setting out of its range.

    >>> tova(budget=64).evict.scope
    'layer'
    """
    score = AttentionMass(window=1, over_group="mean", candidates="all")
    schedule = EachStep(budget) if interval == 1 else Every(budget, interval)
    evict = Evict(score, sinks=sinks, recent=recent, protect_prompt=protect_prompt, scope="layer")
    return Policy("tova", evict, schedule)
