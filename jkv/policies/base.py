"""What a policy is: a frozen, hashable record of parts, each a set of pure functions.

This release has one part, `evict`: which slots stay (a score), when (a schedule) and how many (a budget in slots). The
score is the paper's idea, a function of a `CacheView`; everything else here is the mechanism that every paper shares.
"""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.pool import EMPTY

SCOPES = ("head", "layer", "all")


class CacheView(NamedTuple):
    """What a score may look at: one layer's cache, batch rows independent. Empty slots have position EMPTY (-1).

    Query w of the window is the one of the token W - 1 - w before the newest; a sequence shorter than the window leaves the
    oldest ones meaningless. `budget=None` is the policy's own.
    """

    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S H"]
    position: Int[Array, "B K S"]
    query: Float[Array, "B N W H"] | None = None
    mass: Float[Array, "B K S"] | None = None
    similarity: Float[Array, "B K S"] | None = None
    layer: int | Int[Array, ""] | None = None
    budget: Int[Array, "B K"] | None = None
    prompt_length: Int[Array, " B"] | None = None

    @property
    def is_filled(self) -> Bool[Array, "B K S"]:
        """Which slots hold a token."""
        return self.position != EMPTY

    @property
    def num_seen(self) -> Int[Array, " B"]:
        """Tokens of the sequence so far; the newest one is always in the cache."""
        return self.position.max(axis=(1, 2)) + 1

    @property
    def age(self) -> Int[Array, "B K S"]:
        """Tokens that came after each slot's: 0 for the newest."""
        return self.num_seen[:, None, None] - 1 - self.position


@runtime_checkable
class Score(Protocol):
    """How much each slot is worth: float32, higher is kept. Empty and protected slots are the mechanism's business."""

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]: ...


@dataclasses.dataclass(frozen=True)
class Evict:
    """Keeps the best-scored `budget` slots whenever the schedule says so.

    Attributes:
      score: a hashable function of a `CacheView`; its `window` attribute, if any, says how many last queries it needs.
      interval: generated tokens between compactions of a row.
      sinks: the first positions, never dropped.
      recent: the last positions, never dropped.
      protect_prompt: whether the prompt is never dropped.
      scope: whether every KV head keeps its own slots ("head"), all heads of a layer the same ("layer", by the mean score),
        or all layers and heads the same ("all", by the mean over heads summed over layers). A set that is to be the same
        needs positions that are the same, which holds as long as every compaction has the same scope.
      order: whether kept slots are stored ascending by position, or ("score") best score first and the recent ones last.

    Raises:
      ValueError: a field out of its range.
    """

    score: Score
    interval: int = 128
    sinks: int = 0
    recent: int = 0
    protect_prompt: bool = False
    scope: str = "head"
    order: str = "position"

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval must be at least 1 generated token; got {self.interval}.")
        if self.sinks < 0 or self.recent < 0:
            raise ValueError(f"sinks and recent must be numbers of slots >= 0; got {self.sinks=}, {self.recent=}.")
        if self.scope not in SCOPES:
            raise ValueError(f"scope must be one of {SCOPES}; got {self.scope!r}.")
        if self.order not in ("position", "score"):
            raise ValueError(f"order must be 'position' or 'score'; got {self.order!r}.")

    @property
    def window(self) -> int:
        """Last queries that the score needs."""
        return getattr(self.score, "window", 0)

    def rate(self, view: CacheView) -> Float[Array, "B K S"]:
        """The score with the mechanism's marks: `-inf` for an empty slot, `+inf` for a protected one."""
        score = self.score(view).astype(jnp.float32)
        score = jnp.where(self.is_protected(view), jnp.inf, score)
        return jnp.where(view.is_filled, score, -jnp.inf)

    def is_protected(self, view: CacheView) -> Bool[Array, "B K S"]:
        """Which slots must stay."""
        protected = (view.position < self.sinks) | (view.age < self.recent)
        if self.protect_prompt and view.prompt_length is not None:
            protected |= view.position < view.prompt_length[:, None, None]
        return protected & view.is_filled

    def choose(
        self, score: Float[Array, "L B K S"], position: Int[Array, "L B K S"], budget: Int[Array, "1 B #K"]
    ) -> Int[Array, "L B K S"]:
        """The slots that stay in every layer, EMPTY at the end; `score` as `rate` gives it, ties go to the lower slot."""
        if self.scope == "layer":
            score = jnp.broadcast_to(score.mean(axis=2, keepdims=True), score.shape)
        elif self.scope == "all":
            score = jnp.broadcast_to(score.mean(axis=2, keepdims=True).sum(axis=0, keepdims=True), score.shape)
        ranked = jnp.argsort(-score, axis=-1, stable=True).astype(jnp.int32)
        rank = jnp.arange(score.shape[-1], dtype=jnp.int32)
        is_kept = (rank < budget[..., None]) & (jnp.take_along_axis(score, ranked, axis=-1) > -jnp.inf)
        # A sort key for the slots that stay; the others come last.
        if self.order == "score":
            is_recent = jnp.take_along_axis(score, ranked, axis=-1) == jnp.inf
            place = jnp.where(is_recent, score.shape[-1] + ranked, rank)
        else:
            place = jnp.take_along_axis(position, ranked, axis=-1)
        last = jnp.iinfo(jnp.int32).max
        by_place = jnp.argsort(jnp.where(is_kept, place, last), axis=-1, stable=True)
        count = is_kept.sum(axis=-1, keepdims=True, dtype=jnp.int32)
        return jnp.where(rank < count, jnp.take_along_axis(ranked, by_place, axis=-1), EMPTY)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A method: its name, its budget in slots for each layer and KV head, and its parts; an absent part is None.

    Raises:
      ValueError: a budget too small for the slots that are never dropped, or a missing one.
    """

    name: str
    budget: int | None = None
    evict: Evict | None = None

    def __post_init__(self) -> None:
        if self.evict is None:
            return
        if self.budget is None or self.budget < 1:
            raise ValueError(f"{self.name} needs a budget of at least 1 slot for each layer and KV head; got {self.budget}.")
        protected = self.evict.sinks + self.evict.recent
        if self.budget < protected:
            raise ValueError(
                f"{self.name}'s budget must hold its sinks and recent slots, {self.evict.sinks} + {self.evict.recent} = "
                f"{protected}; got budget={self.budget}. Raise the budget, or lower sinks or the window."
            )

    @property
    def is_bounded(self) -> bool:
        """Whether the cache of a row stops growing."""
        return self.evict is not None

    def is_due(self, generated: int, filled: int) -> bool:
        """Whether a row is to be compacted after its `generated`-th new token, with `filled` slots."""
        return self.evict is not None and generated % self.evict.interval == 0 and filled > self.slots

    def steps_until_due(self, generated: int) -> int | None:
        """Steps from the `generated`-th new token to the next at which the row may be compacted; None if it never is."""
        return None if self.evict is None else self.evict.interval - generated % self.evict.interval

    @property
    def slots(self) -> int:
        """The budget of a policy that has one."""
        assert self.budget is not None, f"{self.name} has no budget"
        return self.budget

    def select(self, view: CacheView) -> Int[Array, "B K S"]:
        """The slots of one layer that would stay, as `take_slots` stores them, EMPTY at the end; pure, jit- and vmap-able.

        Scope "all" sums over the layers given, here one.

        Raises:
          ValueError: a policy that evicts nothing, or a view without the queries that the score needs.
        """
        if self.evict is None:
            raise ValueError(f"{self.name} evicts nothing, so there is nothing to select.")
        if self.evict.window and (view.query is None or view.query.shape[2] < self.evict.window):
            got = "none" if view.query is None else str(view.query.shape[2])
            raise ValueError(f"{self.name} looks at the last {self.evict.window} queries; the view has {got}.")
        budget = jnp.full(view.position.shape[:2], self.slots, jnp.int32) if view.budget is None else view.budget
        return self.evict.choose(self.evict.rate(view)[None], view.position[None], budget[None])[0]
