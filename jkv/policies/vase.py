"""VaSE (arXiv 2606.03928): keeps slots whose values have a large range, and draws the others by their attention."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.checks import check_between
from jkv.eviction.evict import Evict, largest
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import AttentionMass, default_recent, uniform
from jkv.eviction.view import CacheView

SURE = 1e6  # above every sum of a logarithm and a Gumbel number


@dataclasses.dataclass(frozen=True)
class LargeRangeOrDrawn:
    """Slots of the largest range of values first, and then a draw without replacement by attention.

    Attributes:
      mass: the attention; slots are drawn in proportion to it.
      share: of the budget that the range of values fills, sinks included.
      sinks: first positions, which count as the largest.
      seed: of the draws.
    """

    mass: AttentionMass
    share: float
    sinks: int
    seed: int

    def __post_init__(self) -> None:
        check_between(0, 1, " of the budget", share=self.share)

    @property
    def needs(self) -> Needs:
        """The queries of the attention."""
        return self.mass.needs

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.budget is not None
        value = view.value.astype(jnp.float32)
        spread = value.max(axis=-1) - value.min(axis=-1)
        spread = jnp.where(view.position < self.sinks, jnp.inf, spread)
        is_old = view.is_filled & (view.age >= self.mass.window)
        count = (view.budget * round(1000 * self.share)) // 1000
        is_large = largest(jnp.where(is_old, spread, -jnp.inf), count)
        return jnp.where(is_large, SURE, drawn_score(self.mass(view), uniform(view, self.seed)))


def drawn_score(weight: Float[Array, "*N"], drawn: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """The n largest of these are a draw of n without replacement in proportion to the weights; `drawn` is uniform in [0, 1)."""
    least = jnp.finfo(jnp.float32).tiny
    return jnp.log(jnp.maximum(weight, least)) - jnp.log(-jnp.log(jnp.maximum(drawn, least)))


@recipe("VaSE", idea="keeps slots whose values have a large range, and draws the others by attention", arxiv="2606.03928")
def vase(
    budget: int,
    interval: int = 64,
    window: int | None = None,
    share: float = 0.25,
    sinks: int = 4,
    pool: int = 5,
    seed: int = 0,
    protect_prompt: bool = False,
) -> Policy:
    """VaSE with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    The last `window` tokens (by default 64, or a quarter of a budget below 256) always stay, and so does the prompt with
    `protect_prompt`.

    Rule:
      range(s) = the largest less the smallest channel of the slot's value; infinite for the first `sinks` tokens
      keep the share * budget slots before the window with the largest range
      a(s) = mean-pool over `pool` slots of the mean over the last `window` queries and their heads of
          softmax over the slots before the window of q . key / sqrt(H)
      draw the others without replacement, in proportion to a

    Departures:
      - With `protect_prompt`, slots of the prompt may have the largest range and stay for it; the authors leave them out.
      - Draws depend on the seed, layer, head, position and length alone, so they are batch-invariant.
      - A compaction is due by the row's own generated tokens; the authors' by the length of the cache.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> vase(budget=1024).evict.recent
    64
    """
    window = default_recent(budget) if window is None else window
    score = LargeRangeOrDrawn(AttentionMass(window, pool, "mean", over_group="mean"), share, sinks, seed)
    return Policy("vase", Evict(score, recent=window, protect_prompt=protect_prompt), Every(budget, interval))
