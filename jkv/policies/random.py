"""Random eviction: the baseline that every score has to beat."""

from jkv.policies.evict import Evict
from jkv.policies.policy import Policy
from jkv.policies.recipe import recipe
from jkv.policies.schedules import Every
from jkv.policies.scores import Uniform


@recipe("baseline", idea="keeps a new random set at every compaction")
def random(
    budget: int,
    interval: int = 128,
    seed: int = 0,
    recent: int = 1,
    sinks: int = 0,
    protect_prompt: bool = False,
    block: int = 1,
) -> Policy:
    """Keeps the last `recent` tokens and a random set, `budget` slots in total, drawn anew for each compaction and KV head.

    The first `sinks` tokens and, with `protect_prompt`, the prompt stay too. For a fair comparison, protect the same tokens as
    the policy beside it. With `block=page_size`, whole pages of the text stay or go; one block may be cut to fill the budget,
    and keeps its first tokens.

    Rule:
      score = a uniform number that depends on the seed, layer, head, position // block and length alone, so it is
          batch-invariant

    Raises:
      ValueError: a setting out of its range.

    >>> random(budget=64).name
    'random'
    """
    evict = Evict(Uniform(seed, block), sinks=sinks, recent=recent, protect_prompt=protect_prompt)
    return Policy("random", evict, Every(budget, interval))
