"""AMS (arXiv 2605.23200): cuts the cache into segments, which share the budget by attention; any score picks within them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.checks import check_between, check_least
from jkv.errors import InputError
from jkv.eviction.evict import protection, tied
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import AttentionMass, default_recent
from jkv.eviction.view import CacheView, Numbers, scores_of
from jkv.policies.around import inner
from pallas_kernels.largest_slots import ROUNDING

CREDIT = "credit"


@dataclasses.dataclass(frozen=True)
class QuotaOfSegments:
    """The priority of each slot, when segments pick slots in turns and each picks its best slot first; see the rule of `ams`.

    Attributes:
      score: ranks the slots of a segment.
      mass: the attention that cuts and weighs segments.
      share: the share of all attention at which a segment ends.
      shortest, longest: limits of a segment, in slots.
      each: slots that every segment keeps before attention counts.
      mix: the weight of the current attention; the credit has weight 1 - mix.
      decay: the factor of the old credit at each compaction.
    """

    score: Any
    mass: AttentionMass
    share: float
    shortest: int
    longest: int
    each: int
    mix: float
    decay: float

    def __post_init__(self) -> None:
        check_between(0, 1, ", as a weight does", share=self.share, mix=self.mix, decay=self.decay)
        check_least(1, " slot of a segment", shortest=self.shortest)
        check_least(0, " slots", each=self.each)
        if self.longest < self.shortest:
            rule = "{field} must be at least shortest, {shortest} slots; got {got}."
            raise InputError(rule, field="longest", code="out_of_range", shortest=self.shortest, got=self.longest)

    @property
    def needs(self) -> Needs:
        """What the score needs, the queries of the attention, and the credit, carried with the score's own numbers."""
        own = self.score.needs
        return dataclasses.replace(own | self.mass.needs, carried=(*own.carried, CREDIT))

    def __call__(self, view: CacheView) -> tuple[Float[Array, "B K S"], Numbers]:
        assert view.carried is not None
        is_past = view.is_filled & (view.age >= self.mass.window)
        mass = of_sum(jnp.where(is_past, self.mass(view), 0.0))
        credit = jnp.where(is_past, self.decay * view.carried[CREDIT] + (1 - self.decay) * mass, 0.0)
        used = of_sum(self.mix * mass + (1 - self.mix) * of_sum(credit))
        start, weight = segments(used, is_past, self.share, self.shortest, self.longest)
        score, carried = scores_of(self.score, view)
        rank = rank_in_segment(score, start, is_past)
        beyond = (rank - self.each).astype(jnp.float32)
        turn = jnp.where(beyond < 0, 2.0 - beyond, weight / (jnp.maximum(beyond, 0.0) + 0.5))
        return jnp.where(is_past & jnp.isnan(score), jnp.nan, turn), carried | {CREDIT: credit}


def of_sum(x: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """Each slot's share of the sum over the slots; zeros where that is zero."""
    return x / jnp.maximum(x.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def segments(
    mass: Float[Array, "B K S"], is_past: Bool[Array, "B K S"], share: float, shortest: int, longest: int
) -> tuple[Int[Array, "B K S"], Float[Array, "B K S"]]:
    """The first slot of each slot's segment, and the segment's mass; slots outside `is_past` come after all segments.

    A segment ends with the slot at which its mass reaches `share`, but has `shortest` to `longest` slots; the last segment may
    be shorter. A mass that equals `share` up to rounding has reached it.
    """
    num_slots = mass.shape[-1]
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    running = jnp.cumsum(mass, axis=-1)
    by_mass = int(1 / share) + -(-num_slots // longest) if share else num_slots
    most = min(-(-num_slots // shortest), by_mass + 2)

    def cut(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        begin, start, weight = carry
        before = jnp.where(slot < begin, mass, 0.0).sum(axis=-1, keepdims=True)
        is_short = running - before < share * (1 - ROUNDING)
        end = jnp.clip(1 + is_short.sum(axis=-1, keepdims=True, dtype=jnp.int32), begin + shortest, begin + longest)
        is_in = is_past & (slot >= begin) & (slot < end)
        own = jnp.where(is_in, mass, 0.0).sum(axis=-1, keepdims=True)
        return end, jnp.where(is_in, begin, start), jnp.where(is_in, own, weight)

    begin = jnp.zeros((*mass.shape[:-1], 1), jnp.int32)
    nowhere = jnp.full(mass.shape, num_slots, jnp.int32)
    _, start, weight = jax.lax.fori_loop(0, most, cut, (begin, nowhere, jnp.zeros_like(mass)))
    return start, weight


def rank_in_segment(
    score: Float[Array, "B K S"], start: Int[Array, "B K S"], is_past: Bool[Array, "B K S"]
) -> Int[Array, "B K S"]:
    """A slot's rank in its segment, 0 for the highest score; scores equal up to rounding rank by slot, the lower slot first.

    Past slots must be the first slots of a row.
    """
    limits = jnp.finfo(jnp.float32)
    level = tied(jnp.clip(jnp.where(is_past, score, limits.min), limits.min, limits.max))
    order = jnp.lexsort((-level, start), axis=-1)
    return (jnp.argsort(order, axis=-1) - start).astype(jnp.int32)


@recipe(
    "AMS",
    idea="shares the budget among segments by their attention; another policy's score picks within them",
    arxiv="2605.23200",
)
def ams(
    budget: int,
    interval: int = 128,
    around: str | Policy = "r_kv",
    window: int | None = None,
    share: float = 0.02,
    shortest: int = 32,
    longest: int = 1024,
    each: int = 8,
    mix: float = 0.7,
    decay: float = 0.8,
    sinks: int = 4,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """AMS with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    `around` is the policy whose score picks slots within a segment: any policy with a score, or the name of one that needs no
    file and evicts every `interval` tokens, which is then made with this budget and window. Segments are cut by the attention
    of the last `window` queries (by default 32, or a quarter of a budget below 128). Each slot carries its credit from one
    compaction to the next, in 4 bytes. The first `sinks` tokens, the last `recent` (by default the window, or the other
    policy's if that is longer) and, with `protect_prompt`, the prompt are never evicted.

    Rule:
      mass = mean-pool over 5 slots of the mean over the last `window` queries and their heads of
          softmax over all that the query saw of q . key / sqrt(H), for the slots before the window, over its sum
      credit = decay * credit of the last compaction, 0 for later slots, + (1 - decay) * mass
      used = mix * mass + (1 - mix) * credit / sum of credit
      a segment ends with the slot at which its sum of `used` reaches `share`, and has `shortest` to `longest` slots
      each segment keeps its `each` best slots, and the rest of the budget goes to segments in proportion to `used`

    Departures:
      - Shares of the budget are rounded by Webster's method: the segment with the largest used / (slots beyond `each` + 1/2)
        gets the next slot, its best remaining one. So the shares always add up, and if the budget is too small for `each`,
        the segments' numbers of slots differ by at most one. The authors round each share, and then add or remove single
        slots, from the first segment on.
      - The authors' newer code cuts at fixed multiples of `share` and joins segments that are too short. Here a segment begins
        with a mass of 0, as in the paper and in their older code.
      - The slots of the window always stay and belong to no segment; the authors give them the largest mass.

    Raises:
      ValueError: a setting out of its range, a policy without a score, or a budget smaller than what is protected.

    >>> ams(budget=512, around="snap_kv").evict.recent
    32
    """
    window = min(32, default_recent(budget)) if window is None else window
    other = inner(around, "ams", budget=budget, window=window)
    mass = AttentionMass(window, pool=5, pooling="mean", over_group="mean", candidates="causal")
    score = QuotaOfSegments(other.evict.score, mass, share, shortest, longest, each, mix, decay)
    guard = protection(max(window, other.needs.window), sinks, recent, protect_prompt)
    evict = dataclasses.replace(other.evict, score=score, order="position", **guard)
    return dataclasses.replace(other, name="ams", evict=evict, schedule=Every(budget, interval))
