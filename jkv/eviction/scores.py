"""Scores that policies share."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels as kernels
from jkv.checks import check_known, check_least
from jkv.errors import InputError, refused
from jkv.eviction.needs import Needs
from jkv.eviction.view import CacheView
from pallas_kernels.largest_slots import ROUNDING
from pallas_kernels.replay_attention.reference import softmax_beside


@dataclasses.dataclass(frozen=True)
class Recency:
    """Newer is better."""

    needs = Needs(keeps_window=True)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        return view.position.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Random numbers in [0, 1), a function of the seed, layer, KV head, position and sequence length only.

    Each block of `block` positions has one number.
    """

    seed: int = 0
    block: int = 1
    needs = Needs()

    def __post_init__(self) -> None:
        check_least(1, " position that has a random number", block=self.block)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        return uniform(view, self.seed, self.block)


@dataclasses.dataclass(frozen=True)
class UniformBlocks:
    """`Uniform` with 2 for all tokens of a block that holds one of the first `sinks` or the last `recent` tokens."""

    chance: Uniform
    sinks: int
    recent: int
    needs = Needs()

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        number = view.position // self.chance.block
        first_recent = (view.num_seen - self.recent) // self.chance.block
        stays = (number * self.chance.block < self.sinks) | (number >= first_recent[:, None, None])
        return jnp.where(stays, 2.0, self.chance(view))


def uniform(view: CacheView, seed: int, block: int = 1) -> Float[Array, "B K S"]:
    """A number in [0, 1) for each slot that depends on the seed, layer, KV head, position and sequence length only.

    Slots of one block (position // block) have one number.
    """
    key = jax.random.key(seed)

    def draw(position: Array, head: Array, num_seen: Array, layer: Array) -> Float[Array, ""]:
        return jax.random.uniform(functools.reduce(jax.random.fold_in, (layer, num_seen, head, position), key))

    head = jnp.arange(view.position.shape[1], dtype=jnp.int32)
    head = head if view.first_head is None else head + view.first_head
    over_slots = jax.vmap(draw, in_axes=(0, None, None, None))
    over_heads = jax.vmap(over_slots, in_axes=(0, 0, None, None))
    return jax.vmap(over_heads, in_axes=(0, None, 0, 0))(view.position // block, head, view.num_seen, layer_of(view))


@dataclasses.dataclass(frozen=True)
class BlockMean:
    """Gives each slot the mean of another score over the remaining slots of its block of `block` positions.

    Slots must be in order of position.
    """

    score: Any
    block: int

    @property
    def needs(self) -> Needs:
        """What the other score needs; it must carry no numbers."""
        return self.score.needs

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        number = view.position // self.block
        begins = jnp.diff(number, axis=-1, prepend=-2) != 0
        score = jnp.where(view.is_filled, self.score(view), 0.0)

        def join(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
            is_new = other[0]
            return one[0] | is_new, *(jnp.where(is_new, b, a + b) for a, b in zip(one[1:], other[1:], strict=True))

        _, total, count = jax.lax.associative_scan(join, (begins, score, jnp.ones_like(score)), axis=-1)
        # The last slot of each block has the block's sum. In: blocks 0 0 0 1 1 -> Out: 2 2 2 4 4
        slot = jnp.arange(score.shape[-1], dtype=jnp.int32)
        ends = jnp.roll(begins, -1, axis=-1).at[..., -1].set(True)
        last = jax.lax.cummin(jnp.where(ends, slot, slot[-1]), axis=2, reverse=True)
        return jnp.take_along_axis(total / count, last, axis=-1)


def by_blocks(score: Any, block: int) -> Any:
    """A score, or for `block` above 1 its mean over each block of `block` positions.

    Raises:
      ValueError: a block below 1.
    """
    check_least(1, " position, whose slots have one score", block=block)
    return score if block == 1 else BlockMean(score, block)


def layer_of(view: CacheView) -> Int[Array, " B"]:
    """The layer of each batch row; 0 where the view does not say."""
    layer = jnp.asarray(0 if view.layer is None else view.layer, jnp.int32)
    return jnp.broadcast_to(layer, view.num_seen.shape)


def default_recent(budget: int) -> int:
    """How many recent tokens a policy keeps by default: 64, or a quarter of a budget below 256."""
    return max(1, min(64, budget // 4))


@dataclasses.dataclass(frozen=True)
class AccumulatedMass:
    """The softmax mass of each slot from all queries so far, summed over the query heads of its KV head.

    In a model with learned sinks the softmax has them in its denominator (`jkv.cache.attention`).
    """

    needs = Needs(mass=True, in_step="sum")

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.mass is not None
        return view.mass


@dataclasses.dataclass(frozen=True)
class AttentionMass:
    """The softmax mass of each slot from the last `window` queries, 0 to 1: their mean, pooled over neighbouring slots.

    In a model with learned sinks the sink of a query head is one more candidate of its softmax, which gets no score.

    Attributes:
      window: how many queries. The slots of the last `window` tokens get no score unless `candidates` is "all".
      pool: how many neighbouring slots are pooled, an odd number; 1 pools nothing.
      pooling: "max", or "mean" with slots that are no candidates counted as 0.
      over_group: "max" takes the largest logit over a KV head's query heads, "mean" averages their softmaxes, and
        "max-probability" takes the largest of their softmaxes, which is then divided by its sum over the slots.
      candidates: which slots the softmax runs over. "past": those before the window. "thought": those, without the prompt's.
        "causal": for each query all that it saw, and the slots before the window get a score. "all": likewise, and all slots
        get one.
      pool_first: whether each query's shares are pooled before the mean over the queries, instead of the mean.
      repeat_newest: whether the newest query counts twice and the oldest not at all (an accident of RPC's released code).
    """

    window: int
    pool: int = 1
    pooling: str = "max"
    over_group: str = "max"
    candidates: str = "past"
    repeat_newest: bool = False
    pool_first: bool = False

    def __post_init__(self) -> None:
        check_least(1, " last query, which scores", window=self.window)
        if not 1 <= self.pool < WIDEST_POOL or self.pool % 2 == 0:
            rule = "{field} must be an odd number of slots, at least 1 and below {most:,}; got {got}."
            raise InputError(rule, field="pool", code="out_of_range", most=WIDEST_POOL, got=self.pool)
        for field, known in MASS_SETTINGS.items():
            check_known(known, **{field: getattr(self, field)})
        if self.keeps_rows and self.candidates not in ("past", "thought"):
            raise refused(
                'over_group="max-probability" and pool_first=True score the slots before the window; got '
                f"candidates={self.candidates!r}.",
                candidates="conflict",
            )

    @property
    def keeps_rows(self) -> bool:
        """Whether each query's shares of all slots are needed, and not only their mean."""
        return self.over_group == "max-probability" or self.pool_first

    @property
    def needs(self) -> Needs:
        """The queries; a decode step computes the plain mass from its own query by itself."""
        is_plain = (self.window, self.pool, self.over_group, self.candidates) == (1, 1, "mean", "all")
        return Needs(window=self.window, in_step="last" if is_plain else "")

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        batch, heads, num_slots, head_size = view.key.shape
        rows = (batch * heads, num_slots)
        assert view.query is not None
        query, is_seen = view.query[:, :, -self.window :], is_query(view, self.window)
        if self.repeat_newest:
            query = jnp.concatenate([query[:, :, 1:], query[:, :, -1:]], axis=2)
            is_seen = jnp.concatenate([is_seen[:, 1:], is_seen[:, -1:]], axis=1)
        is_scored = view.is_filled
        if self.candidates != "all":
            is_scored &= view.age >= self.window
        if self.candidates == "thought":
            assert view.prompt_length is not None
            is_scored &= view.position >= view.prompt_length[:, None, None]
        if self.keeps_rows:
            return self._of_rows(view, query, is_seen, is_scored)
        sees_all = self.candidates in ("causal", "all")
        mass = kernels.attention_mass(
            query.reshape(batch * heads, -1, self.window, head_size),
            view.key.reshape(*rows, head_size),
            (view.is_filled if sees_all else is_scored).reshape(rows),
            jnp.repeat(is_seen, heads, axis=0),
            view.age.reshape(rows) if sees_all else None,
            None if view.log_weight is None else view.log_weight.reshape(rows),
            None if view.sink is None else view.sink.reshape(batch * heads, -1),
            over_group=self.over_group,
        ).reshape(view.position.shape)
        return self._pooled(mass, is_scored)

    def _of_rows(
        self, view: CacheView, query: Float[Array, "B Q W H"], is_seen: Bool[Array, "B W"], is_scored: Bool[Array, "B K S"]
    ) -> Float[Array, "B K S"]:
        """The score from each query's shares, `[B, K, G, W, S]` at most: the window is short."""
        batch, heads, _, size = view.key.shape
        grouped = query.reshape(batch, heads, -1, self.window, size).astype(jnp.float32)
        logits = jnp.einsum("bkgwh,bksh->bkgws", grouped, view.key.astype(jnp.float32), precision="highest") * size**-0.5
        if view.log_weight is not None:
            logits += view.log_weight[:, :, None, None]
        where, sink = is_scored[:, :, None], sinks_by_group(view)
        if self.over_group == "max":
            share = attention(logits.max(axis=2), where, None if sink is None else sink.max(axis=2)[..., None, None])
        else:
            share = attention(logits, where[:, :, None], None if sink is None else sink[..., None, None])
            share = share.mean(axis=2) if self.over_group == "mean" else share.max(axis=2)
        total = share.sum(axis=-1, keepdims=True)
        share = share / jnp.where(total > 0, total, 1.0)
        if self.pool_first:
            share = jax.vmap(self._pooled, in_axes=(2, None), out_axes=2)(share, is_scored)
        count = jnp.maximum(is_seen.sum(axis=-1), 1).astype(jnp.float32)[:, None, None]
        mean = jnp.where(is_seen[:, None, :, None], share, 0.0).sum(axis=2) / count
        return jnp.where(is_scored, mean, -jnp.inf) if self.pool_first else self._pooled(mean, is_scored)

    def _pooled(self, mass: Float[Array, "B K S"], is_scored: Bool[Array, "B K S"]) -> Float[Array, "B K S"]:
        """Each slot's mass with its neighbours'."""
        if self.pooling == "mean":
            return mean_pool(jnp.where(is_scored, mass, 0.0), self.pool)
        return max_pool(jnp.where(is_scored, mass, -jnp.inf), self.pool)


def less(one: Float[Array, "*N"], other: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """`one - other`, and exactly 0 where both are equal up to `ROUNDING`: the rest would be rounding errors alone."""
    difference = one - other
    return jnp.where(jnp.abs(difference) < ROUNDING * jnp.maximum(jnp.abs(one), jnp.abs(other)), 0.0, difference)


def sinks_by_group(view: CacheView) -> Float[Array, "B K G"] | None:
    """The learned sinks of each KV head's query heads; None in models without."""
    return None if view.sink is None else view.sink.reshape(*view.key.shape[:2], -1)


def attention(
    logits: Float[Array, "*B S"], where: Bool[Array, "*#B S"], sink: Float[Array, "*#B 1"] | None = None
) -> Float[Array, "*B S"]:
    """The softmax over slots, with the model's learned sink in the denominator; all zeros where there is no slot."""
    if sink is None:
        return jax.nn.softmax(logits, axis=-1, where=where)
    return softmax_beside(sink, logits, where)


WIDEST_POOL = 4_096  # the scores are padded by half of it
MASS_SETTINGS = {
    "pooling": ("max", "mean"),
    "over_group": ("max", "mean", "max-probability"),
    "candidates": ("past", "thought", "causal", "all"),
}


def is_query(view: CacheView, window: int) -> Bool[Array, "B W"]:
    """Which of the last `window` queries exist; a sequence may be shorter than the window."""
    return jnp.arange(window, dtype=jnp.int32) >= window - view.num_seen[:, None]


def max_pool(x: Float[Array, "B K S"], width: int) -> Float[Array, "B K S"]:
    """The largest of `width` (odd) neighbouring slots, the slot itself in the middle."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, width), (1, 1, 1), "SAME")


def mean_pool(x: Float[Array, "B K S"], width: int) -> Float[Array, "B K S"]:
    """The mean of `width` (odd) neighbouring slots; beyond the ends are zeros."""
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, width), (1, 1, 1), "SAME") / width
