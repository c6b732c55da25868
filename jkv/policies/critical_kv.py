"""CriticalKV (arXiv 2502.03805): half of the budget by attention, the other half by attention times projected values."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.checks import check_between
from jkv.eviction.evict import Evict, largest, protection
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import AttentionMass
from jkv.eviction.view import CacheView

SURE = 1e30  # above every weighted mass
EPSILON = 1e-4  # added to the mass, so that large values count even without attention


@dataclasses.dataclass(frozen=True)
class MassThenOutput:
    """Slots of the largest attention mass first, the others by the mass times the norm of the projected value.

    Attributes:
      mass: the attention mass.
      share: of the budget that the mass alone fills, the slots of the window included.
    """

    mass: AttentionMass
    share: float

    def __post_init__(self) -> None:
        check_between(0, 1, " of the budget", share=self.share)

    @property
    def needs(self) -> Needs:
        """The queries of the attention, and the projected values."""
        return self.mass.needs | Needs(projected=True)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.budget is not None
        assert view.projected_norm is not None
        is_old = view.is_filled & (view.age >= self.mass.window)
        mass = jnp.where(is_old, self.mass(view), -jnp.inf)
        count = (view.budget * round(1000 * self.share)) // 1000 - self.mass.window
        is_sure = largest(mass, jnp.maximum(count, 0))
        weighted = jnp.where(is_old, (mass + EPSILON) * view.projected_norm, -jnp.inf)
        return jnp.where(is_sure, SURE, weighted)


@recipe(
    "CriticalKV",
    idea="as `snap_kv` for half of the budget; the rest also by the norm of each value after the output projection",
    arxiv="2502.03805",
)
def critical_kv(
    budget: int,
    interval: int = 128,
    window: int = 8,
    pool: int = 7,
    share: float = 0.5,
    sinks: int = 0,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """CriticalKV with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    The last `window` tokens always stay. The first `sinks` tokens, the last `recent` (by default the window) and, with
    `protect_prompt`, the prompt are never evicted. A compaction multiplies each value by the output projection of every query
    head that reads it: as many operations as that projection takes for the same number of tokens.

    Rule:
      a = the attention mass of `snap_kv`, from the last `window` queries
      keep the window and the slots of the largest a, share * budget in all
      score of the others = (a + 1e-4) * mean over the query heads of |W_o v|_1

    Departures:
      - The authors compact the prompt once; this compacts while decoding, as `snap_kv` does here.
      - Slots that are protected besides the window may be among the slots with the largest a.
      - Max-pooling gives neighbours the same a. Where not all of them fit, the earlier slots stay; the authors, and kvpress,
        take what `torch.topk` returns, which promises no order.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> critical_kv(budget=1024).needs
    Needs(window=8, projected=True)
    """
    score = MassThenOutput(AttentionMass(window, pool), share)
    return Policy("critical_kv", Evict(score, **protection(window, sinks, recent, protect_prompt)), Every(budget, interval))
