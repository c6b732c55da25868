"""Random Attention (arXiv 2609.03430): the prompt, the recent tokens and a random set, which every score has to beat."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import Uniform, default_recent
from jkv.eviction.view import CacheView


@dataclasses.dataclass(frozen=True)
class PromptOrChance:
    """2 for the prompt's first tokens, as many as leave room for `recent` slots and one more; a uniform number for others."""

    recent: int
    chance: Uniform
    needs = Needs()

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.budget is not None
        assert view.prompt_length is not None
        sure = jnp.minimum(view.prompt_length[:, None], view.budget - self.recent - 1)
        return jnp.where(view.position < sure[..., None], 2.0, self.chance(view))


@recipe(
    "Random Attention",
    idea="keeps the prompt, recent tokens and a new random set at every compaction; what any score has to beat",
    arxiv="2609.03430",
)
def random_attention(budget: int, interval: int = 64, recent: int | None = None, seed: int = 0, block: int = 1) -> Policy:
    """The prompt, the last `recent` tokens and a random set, `budget` slots in total for each layer and KV head.

    `recent` is by default 64, or a quarter of a budget below 256. The set is drawn anew for each compaction, layer and KV head.
    Of a prompt that the budget cannot hold, the first tokens stay. `block` is that of `random`.

    Rule:
      keep the last `recent` tokens, and the first min(P, budget - recent - 1) of the P tokens of the prompt
      score of the others = a uniform number that depends on the seed, layer, head, position // block and length alone

    Departures:
      - A compaction is due by the row's own generated tokens; the authors' by the length of the cache.

    Raises:
      ValueError: a setting out of its range.

    >>> random_attention(budget=1024).evict.recent
    64
    """
    recent = default_recent(budget) if recent is None else recent
    return Policy(
        "random_attention", Evict(PromptOrChance(recent, Uniform(seed, block)), recent=recent), Every(budget, interval)
    )
