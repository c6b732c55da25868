"""Random eviction: the baseline that any score has to beat."""

from jkv.policies.base import Evict, Policy
from jkv.policies.recipe import recipe
from jkv.policies.schedules import Every
from jkv.policies.scores import Uniform


@recipe
def random(budget: int, interval: int = 128, seed: int = 0, recent: int = 1) -> Policy:
    """`budget` slots drawn anew at every compaction, each KV head its own, all equally likely but the last `recent`.

    The draw depends on the seed, layer, head, positions and length alone, so a row's does not depend on its neighbours.

    Raises:
      ValueError: a setting out of its range.

    >>> random(budget=64).name
    'random'
    """
    return Policy("random", Evict(Uniform(seed), recent=recent), Every(budget, interval))
