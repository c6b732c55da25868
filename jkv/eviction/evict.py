"""Which slots stay: the mechanism that all scores share, that is protection, scope, ranking and the order of storage."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels as kernels
from jkv.cache.pool import EMPTY
from jkv.checks import check_between, check_known, check_least, typed
from jkv.errors import InputError
from jkv.eviction.needs import Needs
from jkv.eviction.view import CacheView, Numbers, Score, check_score, scores_of
from jkv.model.sharding import HEADS
from pallas_kernels.largest_slots import ROUNDING

SCOPES = ("head", "layer", "all", "compete")
SAFEGUARDS = ("blend", "floor")


class Limits(NamedTuple):
    """What each row never drops, as data: rows with other limits run in the same program."""

    sinks: Int[Array, " B"]  # first positions
    recent: Int[Array, " B"]  # last positions


class Cutoff(NamedTuple):
    """Below which score each row drops its slots, whatever its budget, as data."""

    threshold: Float[Array, " B"]
    window: Int[Array, " B"]  # the slots of so many last positions stay

    def __call__(self, score: Float[Array, "B K S"], age: Int[Array, "B K S"]) -> Float[Array, "B K S"]:
        """The scores of `Evict.rate`, with `-inf` for the slots to drop; protected ones have `+inf` and stay."""
        stays = (score >= self.threshold[:, None, None]) | (age < self.window[:, None, None])
        return jnp.where(stays, score, -jnp.inf)


def protection(window: int, sinks: int, recent: int | None, protect_prompt: bool) -> dict[str, Any]:
    """What a recipe's settings protect: `recent` is by default the `window`, whose tokens get no score.

    Raises:
      ValueError: `recent` leaves tokens of the window that no score ranks.
    """
    if recent is not None and recent < window:
        rule = "{field} must be at least the window, {window} tokens, which get no score; got {got}."
        raise InputError(rule, field="recent", code="out_of_range", window=window, got=recent)
    return {"sinks": sinks, "recent": window if recent is None else recent, "protect_prompt": protect_prompt}


@dataclasses.dataclass(frozen=True)
class Evict:
    """Which slots stay: those with the best scores. The schedule decides when, and how many.

    Attributes:
      score: how much each slot is worth; a frozen dataclass (`jkv.eviction.view.Score`).
      sinks: how many first positions are never dropped.
      recent: how many last positions are never dropped.
      protect_prompt: whether the prompt is never dropped.
      scope: "head": each KV head keeps its own slots. "layer": all heads of a layer keep the same slots, by the mean score.
        "all": all layers and heads keep the same slots, by the mean over heads, summed over layers. "compete": the heads of a
        layer compete for its slots. Scopes "layer" and "all" need the same positions in every head, which holds if every
        compaction has the same scope.
      floor: the share of the budget that a competing head always keeps.
      safeguard: how it does. "blend": its number of slots is `floor` times the budget plus the rest of what it wins from the
        others. "floor": its best slots are sure, and all others compete.
      order: how kept slots are stored: "position", ascending, or "score", best first and protected ones last.

    Raises:
      ValueError: a field out of its range, or a score that declares no needs.
    """

    score: Score | Any  # Any: a wrong type must reach `check_score`, which names it
    sinks: int = 0
    recent: int = 0
    protect_prompt: bool = False
    scope: str = "head"
    floor: float = 0.2
    order: str = "position"
    safeguard: str = "blend"

    def __post_init__(self) -> None:
        check_score(self.score)
        for field in ("sinks", "recent"):
            check_least(0, " slots", **{field: typed(field, getattr(self, field), int)})
        check_known(SCOPES, scope=self.scope)
        check_between(0, 1, " of the budget", floor=self.floor)
        check_known(SAFEGUARDS, safeguard=self.safeguard)
        check_known(("position", "score"), order=self.order)

    @property
    def needs(self) -> Needs:
        """What the score needs."""
        return self.score.needs

    @property
    def static(self) -> "Evict":
        """The part that a program is compiled for: `sinks` and `recent` are zero here and passed as data (`Limits`)."""
        return dataclasses.replace(self, sinks=0, recent=0)

    def rate(self, view: CacheView, limits: Limits | None = None) -> Float[Array, "B K S"]:
        """The scores, `-inf` for empty slots and `+inf` for protected ones; `limits` default to `sinks` and `recent`."""
        return self.rate_and_carry(view, limits)[0]

    def rate_and_carry(self, view: CacheView, limits: Limits | None = None) -> tuple[Float[Array, "B K S"], Numbers]:
        """The scores of `rate`, and the numbers that each slot carries to the next compaction, by the names of `Needs.carried`.

        Raises:
          ScoreError: what the score returns is none.
        """
        score, carried = scores_of(self.score, view)
        score = jnp.where(self.is_protected(view, limits), jnp.inf, score)
        carried = {name: jnp.where(view.is_filled, number, 0.0) for name, number in carried.items()}
        return jnp.where(view.is_filled, score, -jnp.inf), carried

    def is_protected(self, view: CacheView, limits: Limits | None = None) -> Bool[Array, "B K S"]:
        """Which slots must stay; `limits` default to `sinks` and `recent`."""
        sinks = self.sinks if limits is None else limits.sinks[:, None, None]
        recent = self.recent if limits is None else limits.recent[:, None, None]
        protected = (view.position < sinks) | (view.age < recent)
        if self.protect_prompt and view.prompt_length is not None:
            protected |= view.position < view.prompt_length[:, None, None]
        return protected & view.is_filled

    def kinds(self, score: Float[Array, "B K S"], view: CacheView, limits: Limits | None = None) -> Int[Array, "B 3"]:
        """How many slots that are not protected have a score of NaN, an infinite one, and another one; `score` is `rate`'s."""
        is_free = view.is_filled & ~self.is_protected(view, limits)
        of_kind = jnp.stack([jnp.isnan(score), jnp.isinf(score), jnp.isfinite(score)], axis=-1)
        return (of_kind & is_free[..., None]).sum(axis=(1, 2), dtype=jnp.int32)

    def choose(
        self,
        score: Float[Array, "L B K S"],
        budget: Int[Array, "#L B #K"],
        first_head: int | Int[Array, ""] | None = None,
    ) -> Int[Array, "L B K S"]:
        """The slots that stay in each layer, padded with EMPTY; `score` is what `rate` returns. Ties go to the lower slot.

        `first_head` is the index of the first head here, where a mesh splits a layer's heads over its axis `HEADS`. If the
        scope compares heads, every shard gathers the scores of all heads and chooses for all; the heads then share one budget.
        """
        if first_head is not None and self.scope != "head":
            scores = jax.lax.all_gather(score, HEADS, axis=2, tiled=True)
            return jax.lax.dynamic_slice_in_dim(self.choose(scores, budget[..., :1]), first_head, score.shape[2], axis=2)
        if self.scope == "layer":
            score = jnp.broadcast_to(score.mean(axis=2, keepdims=True), score.shape)
        elif self.scope == "all":
            score = jnp.broadcast_to(score.mean(axis=2, keepdims=True).sum(axis=0, keepdims=True), score.shape)
        if self.scope == "compete":  # of the slots that stay, all do
            score = jnp.where(self.compete(score, budget), score, -jnp.inf)
            budget = jnp.full_like(budget, score.shape[-1])
        is_kept, in_order = largest_slots(score, budget)
        if self.order == "score":
            in_place = jnp.where(score == jnp.inf, jnp.finfo(jnp.float32).max, -score)  # the protected ones come last
            in_place = tied(jnp.where(is_kept, in_place, jnp.inf))
            slots = jnp.argsort(in_place, axis=-1, stable=True).astype(jnp.int32)
            return jnp.where(in_order == EMPTY, EMPTY, slots)
        return in_order

    def compete(self, score: Float[Array, "L B K S"], budget: Int[Array, "#L B #K"]) -> Bool[Array, "L B K S"]:
        """Which slots stay when the heads of a layer compete for the slots that it has in all."""
        of_heads = jnp.broadcast_to(budget, score.shape[:3])
        if self.safeguard == "floor":
            sure = largest(score, least_slots(of_heads, self.floor))
            return best_of_layer(jnp.where(sure, jnp.inf, score), of_heads)
        # In thousandths of a slot, and rounded along the heads, so that the numbers add up.
        protected = (score == jnp.inf).sum(axis=-1, dtype=jnp.int32)
        won = jnp.maximum(best_of_layer(score, of_heads).sum(axis=-1, dtype=jnp.int32) - protected, 0)
        sure = round(self.floor * 1000) * jnp.maximum(of_heads - protected, 0)
        share = jnp.cumsum((1000 - round(self.floor * 1000)) * won + sure, axis=-1)
        return largest(score, protected + jnp.diff((share + 500) // 1000, axis=-1, prepend=0))


def fault_of(kinds: Any, name: str) -> ValueError | None:
    """Why no slot can be ranked by a row's scores, given `Evict.kinds` on the host, summed over layers; None if they can be.

    NaN in any slot is a fault, as it has no rank. Some slots may have infinite scores, but not all.
    """
    nan, infinite, finite = (int(kind) for kind in kinds)
    if nan:
        got = f"NaN in {nan:,} of {nan + infinite + finite:,} slots"
    elif infinite and not finite:
        got = f"infinity in all of {infinite:,} slots"
    else:
        return None
    return ValueError(
        f"{name}'s scores must be numbers, and finite in some slot, of filled slots that are not protected; got {got} of "
        "a row. Check divisions, logarithms and roots in the score, and what it reads of empty slots."
    )


def best_of_layer(score: Float[Array, "L B K S"], budget: Int[Array, "L B K"]) -> Bool[Array, "L B K S"]:
    """The best slots of all heads of a layer together, as many as their budgets are in all."""
    return largest(score.reshape(*score.shape[:2], -1), budget.sum(axis=-1)).reshape(score.shape)


def largest(score: Float[Array, "*N S"], count: Int[Array, "*#N"]) -> Bool[Array, "*N S"]:
    """Which `count` slots score highest; never a slot of `-inf`. Ties, up to `ROUNDING`, go to the lower slot."""
    return largest_slots(score, count)[0]


def largest_slots(score: Float[Array, "*N S"], count: Int[Array, "*#N"]) -> tuple[Bool[Array, "*N S"], Int[Array, "*N S"]]:
    """Which `count` slots score highest, and the list of them, padded with EMPTY (`pallas_kernels.largest_slots`).

    Where tokens repeat, slots have equal scores up to rounding, and rounding depends on the shape of a batch. So the scores
    that are within `ROUNDING` of the lowest one kept are ties, and go to the lower slot.
    """
    rows = jnp.broadcast_to(count, score.shape[:-1]).reshape(-1)
    is_largest, slots = kernels.largest_slots(score.reshape(-1, score.shape[-1]), rows, tolerance=ROUNDING)
    return is_largest.reshape(score.shape), slots.reshape(score.shape)


def tied(x: Float[Array, "*N S"]) -> Int[Array, "*N S"]:
    """Numbers in the order of `x`, equal where a number exceeds the next lower one by at most `ROUNDING` of its size."""
    order = jnp.argsort(x, axis=-1)
    ascending = jnp.take_along_axis(x, order, axis=-1)
    is_more = jnp.diff(ascending, axis=-1) > ROUNDING * jnp.abs(ascending[..., :-1])
    number = jnp.pad(is_more.cumsum(axis=-1, dtype=jnp.int32), [(0, 0)] * (x.ndim - 1) + [(1, 0)])
    return jnp.take_along_axis(number, jnp.argsort(order, axis=-1), axis=-1)


def least_slots(budget: Any, floor: float) -> Any:
    """Slots that a competing head always keeps; JAX or NumPy arrays."""
    return (budget * round(floor * 1000)) // 1000
