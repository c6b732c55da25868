"""What a policy is: a frozen, hashable record of parts, each a set of pure functions.

`evict` says which slots stay (a score), `schedule` when, and how many. The score is the paper's idea, a function of a
`CacheView`; everything else here is the mechanism that every paper shares.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jkv.cache.moved_sinks import MOST_SINKS
from jkv.cache.pool import EMPTY, num_pages_of
from jkv.policies.schedules import EachStep, Every, Schedule, check_budget
from jkv.reasoning.sentences import Sentences
from jkv.reasoning.sharing import Share
from jkv.reasoning.steering import Steer

SCOPES = ("head", "layer", "all", "compete")


class CacheView(NamedTuple):
    """What a score may look at: caches, batch rows independent, each of one sequence in one layer (`layer`, if it is told).

    Rows may be of different layers: the engine shows all layers of a sequence at once. Empty slots have position EMPTY (-1).

    Slots are in the order in which the policy stores them: ascending by position, unless `Evict.order` says otherwise.
    Query w of the window is the one of the token W - 1 - w before the newest; a sequence shorter than the window leaves the
    oldest ones meaningless. `mass` is the softmax mass of all queries so far, summed over the group. `log_weight` is `ln m` for
    a slot that stands for m. `similarity` is how alike a later sentence is to the slot's, if it is flagged, else 0
    (`jkv.reasoning.sentences`). `budget`, `sinks` and `recent`, where None, are the policy's own. `first_head` is the index of
    the first
    KV head where a view shows some of a layer's: those of one shard of a mesh (`jkv.engine.mesh`).
    """

    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S H"]
    position: Int[Array, "B K S"]
    query: Float[Array, "B N W H"] | None = None
    mass: Float[Array, "B K S"] | None = None
    similarity: Float[Array, "B K S"] | None = None
    layer: int | Int[Array, ""] | Int[Array, " B"] | None = None
    budget: Int[Array, "B K"] | None = None
    prompt_length: Int[Array, " B"] | None = None
    sinks: Int[Array, " B"] | None = None
    recent: Int[Array, " B"] | None = None
    log_weight: Float[Array, "B K S"] | None = None
    first_head: int | Int[Array, ""] | None = None

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
    """Which slots stay: the best-scored. How many, and when, is the schedule's.

    Attributes:
      score: a hashable function of a `CacheView`. Its attributes say what it needs, if anything: `window`, how many last
        queries; `needs_mass`, the accumulated mass; `needs_similarity`, that of sentences. `in_step` says that a decode step
        can compute it: "sum", the accumulated mass, or "last", the mass of the last query. `compares_keys` says that it takes
        each key with each other, for `jkv.plan`.
      sinks: the first positions, never dropped.
      recent: the last positions, never dropped.
      protect_prompt: whether the prompt is never dropped.
      scope: whether every KV head keeps its own slots ("head"), all heads of a layer the same ("layer", by the mean score),
        all layers and heads the same ("all", by the mean over heads summed over layers), or a layer's heads compete for its
        slots ("compete"). A set that is to be the same needs positions that are the same, which holds as long as every
        compaction has the same scope.
      floor: the share of the budget that a competing head keeps in any case.
      order: whether kept slots are stored ascending by position, or ("score") best score first and the recent ones last.

    Raises:
      ValueError: a field out of its range.
    """

    score: Score
    sinks: int = 0
    recent: int = 0
    protect_prompt: bool = False
    scope: str = "head"
    floor: float = 0.2
    order: str = "position"

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 0:
            raise ValueError(f"sinks and recent must be numbers of slots >= 0; got {self.sinks=}, {self.recent=}.")
        if self.scope not in SCOPES:
            raise ValueError(f"scope must be one of {SCOPES}; got {self.scope!r}.")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor is a share of the budget and must lie in [0, 1]; got {self.floor}.")
        if self.order not in ("position", "score"):
            raise ValueError(f"order must be 'position' or 'score'; got {self.order!r}.")

    @property
    def as_program(self) -> "Evict":
        """What a compiled program depends on: `sinks` and `recent` are data (`CacheView`), like budgets."""
        return dataclasses.replace(self, sinks=0, recent=0)

    @property
    def window(self) -> int:
        """Last queries that the score needs."""
        return getattr(self.score, "window", 0)

    @property
    def needs_mass(self) -> bool:
        """Whether the score needs the accumulated mass."""
        return getattr(self.score, "needs_mass", False)

    @property
    def compares_keys(self) -> bool:
        """Whether the score compares each key with each other."""
        return getattr(self.score, "compares_keys", False)

    @property
    def needs_similarity(self) -> bool:
        """Whether the score needs the similarity of sentences."""
        return getattr(self.score, "needs_similarity", False)

    def rate(self, view: CacheView) -> Float[Array, "B K S"]:
        """The score with the mechanism's marks: `-inf` for an empty slot, `+inf` for a protected one."""
        score = self.score(view).astype(jnp.float32)
        score = jnp.where(self.is_protected(view), jnp.inf, score)
        return jnp.where(view.is_filled, score, -jnp.inf)

    def is_protected(self, view: CacheView) -> Bool[Array, "B K S"]:
        """Which slots must stay."""
        sinks = self.sinks if view.sinks is None else view.sinks[:, None, None]
        recent = self.recent if view.recent is None else view.recent[:, None, None]
        protected = (view.position < sinks) | (view.age < recent)
        if self.protect_prompt and view.prompt_length is not None:
            protected |= view.position < view.prompt_length[:, None, None]
        return protected & view.is_filled

    def choose(self, score: Float[Array, "L B K S"], budget: Int[Array, "#L B #K"]) -> Int[Array, "L B K S"]:
        """The slots that stay in every layer, EMPTY at the end; `score` as `rate` gives it, ties go to the lower slot."""
        if self.scope == "layer":
            score = jnp.broadcast_to(score.mean(axis=2, keepdims=True), score.shape)
        elif self.scope == "all":
            score = jnp.broadcast_to(score.mean(axis=2, keepdims=True).sum(axis=0, keepdims=True), score.shape)
        is_kept = compete(score, budget, self.floor) if self.scope == "compete" else largest(score, budget)
        slot = jnp.arange(score.shape[-1], dtype=jnp.int32)
        if self.order == "score":
            in_place = jnp.where(score == jnp.inf, jnp.finfo(jnp.float32).max, -score)  # the protected ones come last
            in_place = jnp.where(is_kept, in_place, jnp.inf)
            slots = jnp.argsort(in_place, axis=-1, stable=True).astype(jnp.int32)
            return jnp.where(slot < is_kept.sum(axis=-1, keepdims=True), slots, EMPTY)
        layer, row, head, _ = jnp.indices(score.shape, dtype=jnp.int32, sparse=True)
        place = jnp.where(is_kept, is_kept.cumsum(axis=-1, dtype=jnp.int32) - 1, score.shape[-1])
        return jnp.full(score.shape, EMPTY, jnp.int32).at[layer, row, head, place].set(slot, mode="drop")


def largest(score: Float[Array, "*N S"], count: Int[Array, "*#N"]) -> Bool[Array, "*N S"]:
    """Which `count` slots score highest, ties going to the lower slot; never one of `-inf`.

    No sort: the lowest score that stays is found bit by bit, from the highest one down.
    """
    score = jnp.where(score == 0, 0.0, jnp.where(score > -jnp.inf, score, -jnp.inf))  # one zero, and no NaN
    bits = jax.lax.bitcast_convert_type(score, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(bits >= sign, ~bits, bits | sign)  # in the order of the scores

    def narrow(low: UInt[Array, "..."], bit: UInt[Array, ""]) -> tuple[UInt[Array, "..."], None]:
        middle = low | bit
        is_enough = (bits >= middle[..., None]).sum(axis=-1, dtype=jnp.int32) >= count
        return jnp.where(is_enough, middle, low), None

    bit = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)[::-1]
    lowest = jax.lax.scan(narrow, jnp.zeros(score.shape[:-1], jnp.uint32), bit)[0][..., None]
    is_above, is_level = bits > lowest, bits == lowest
    left = count[..., None] - is_above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    is_largest = is_above | (is_level & (is_level.cumsum(axis=-1, dtype=jnp.int32) <= left))
    return is_largest & (score > -jnp.inf)


def compete(score: Float[Array, "L B K S"], budget: Int[Array, "#L B #K"], floor: float) -> Bool[Array, "L B K S"]:
    """Which slots stay when a layer's heads share its slots: the best of all, after a floor and what is protected."""
    layers, batch, heads, slots = score.shape
    total = jnp.broadcast_to(budget, (layers, batch, heads)).sum(axis=-1)
    sure = jnp.where(largest(score, least_slots(budget, floor)), jnp.inf, score)
    return largest(sure.reshape(layers, batch, heads * slots), total).reshape(score.shape)


def least_slots(budget: Any, floor: float) -> Any:
    """Slots that a competing head keeps in any case (arrays of JAX or NumPy)."""
    return (budget * round(floor * 1000)) // 1000


@dataclasses.dataclass(frozen=True)
class Read:
    """Which pages a decode step reads (Quest): those that may hold the keys of the largest logits.

    Attributes:
      budget: slots read in a layer and KV head, rounded down to whole pages; at least the current page.
      dense_layers: the first layers, which read everything.
      over_group: whether the query heads of a KV head choose by the largest of their bounds ("max") or the mean of them.

    Raises:
      ValueError: a field out of its range.
    """

    budget: int
    dense_layers: int = 2
    over_group: str = "max"

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers is how many first layers read everything, at least 0; got {self.dense_layers}.")
        if self.over_group not in ("max", "mean"):
            raise ValueError(f"over_group must be 'max' or 'mean'; got {self.over_group!r}.")


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """A method: its name and its parts; an absent part is None.

    Attributes:
      name: what it is called.
      evict: which slots stay.
      schedule: when, and how many.
      pyramid: how many times the mean budget the first layer has, falling in even steps to the last; 1 makes all equal. What
        is never dropped is not counted.
      read: which pages a step reads; None reads all.
      moves_sinks: whether the sinks are read at their place in the cache, right before the slots that are left, and not at
        their true positions (`jkv.cache.moved_sinks`). What is left must be a window.
      steer: what is added to hidden states (`jkv.reasoning.steering`).
      sentences: how sentences are found that are said again, for a score that needs it (`jkv.reasoning.sentences`).
      share: which pages are the same (`jkv.reasoning.sharing`); until the row is compacted, if the policy evicts too.

    Raises:
      ValueError: a budget too small for the slots that are never dropped, or one part without the other.
    """

    name: str
    evict: Evict | None = None
    schedule: Schedule | None = None
    pyramid: float = 1.0
    read: Read | None = None
    moves_sinks: bool = False
    steer: Steer | None = None
    sentences: Sentences | None = None
    share: Share | None = None

    def __post_init__(self) -> None:
        if (self.evict is None) != (self.schedule is None):
            raise ValueError(f"{self.name} needs both evict (which slots stay) and schedule (when, and how many), or neither.")
        if not 1 <= self.pyramid < 2:
            raise ValueError(
                f"pyramid is the first layer's share of the mean budget and must lie in [1, 2); got {self.pyramid}."
            )
        if self.read and self.evict:
            raise ValueError(f"{self.name} cannot evict and choose what to read: compaction moves keys between pages.")
        if self.share is not None:
            self._check_sharing(self.share)
        if (self.sentences is not None) != (self.evict is not None and self.evict.needs_similarity):
            raise ValueError(f"{self.name} needs both sentences and a score that goes by their similarity, or neither.")
        if self.evict is None:
            return
        if self.sentences is not None and self.evict.order != "position":
            raise ValueError(f"{self.name} finds sentences among slots stored by position; got order={self.evict.order!r}.")
        if self.moves_sinks and not self._can_move_sinks:
            raise ValueError(
                f"{self.name} can move 1 to {MOST_SINKS} sinks up to a window without gaps, of the same budget in every layer "
                f"and head, compacted between steps and stored by position; got {self}."
            )
        if self.evicts_in_steps:
            if getattr(self.evict.score, "in_step", None) is None or self.evict.scope not in ("head", "layer"):
                raise ValueError(
                    f"{self.name} cannot evict inside a step, which knows a slot's attention mass alone, by KV head or layer; "
                    f"got {self.evict.score} and scope {self.evict.scope!r}. Use the schedule Every(budget, interval=1)."
                )
            if self.evict.protect_prompt:
                raise ValueError(f"{self.name} cannot protect the prompt in a step. Use Every(budget, interval=1).")
        if self.budget is None:
            if self.pyramid > 1 or self.evict.scope == "compete":
                raise ValueError(f"{self.name} has no fixed budget, so layers or heads cannot divide it; got {self.schedule}.")
            if not self.evict.protect_prompt:
                raise ValueError(f"{self.name}'s schedule counts the prompt as kept: set protect_prompt=True in evict.")
            return
        if self.pyramid > 1 and not self.protected:
            raise ValueError(f"{self.name} leaves its last layers next to nothing: pyramid > 1 needs sinks or recent slots.")
        if self.budget < self.protected:
            raise ValueError(
                f"{self.name}'s budget must hold its sinks and recent slots, {self.evict.sinks} + {self.evict.recent} = "
                f"{self.protected}; got budget={self.budget}. Raise the budget, or lower sinks or the window."
            )

    def _check_sharing(self, share: Share) -> None:
        if self.needs_mass:
            raise ValueError(
                f"{self.name} cannot share pages: it gives up slots inside each step, or goes by their accumulated mass, and "
                "both belong to pages of its own. Share with a policy that compacts between steps by another score: r_kv."
            )
        if self.read is not None or self.moves_sinks:
            raise ValueError(
                f"{self.name} cannot share pages and choose what to read (quest), or move its sinks: both count on pages in "
                "the order of the text."
            )
        if share.align_steps and self.evict is not None:
            raise ValueError(f"{self.name} cannot both evict and start steps on pages of their own: leave align_steps out.")

    def __repr__(self) -> str:
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return f"Policy({', '.join(f'{field.name}={value!r}' for field, value in fields if value != field.default)})"

    @property
    def budget(self) -> int | None:
        """Slots that a compaction leaves in a layer and KV head, on average; None where nothing fixes them."""
        return None if self.schedule is None else self.schedule.budget

    @property
    def protected(self) -> int:
        """Slots that are never dropped, the prompt's not counted."""
        return 0 if self.evict is None else self.evict.sinks + self.evict.recent

    @property
    def evicts_in_steps(self) -> bool:
        """Whether slots are given up inside the decode step (`jkv.cache.in_step_eviction`)."""
        return isinstance(self.schedule, EachStep)

    @property
    def needs_mass(self) -> bool:
        """Whether the engine must keep each slot's attention mass."""
        return self.evicts_in_steps or (self.evict is not None and self.evict.needs_mass)

    @property
    def _can_move_sinks(self) -> bool:
        evict: Any = self.evict
        return (
            0 < evict.sinks <= MOST_SINKS
            and getattr(evict.score, "keeps_window", False)
            and (evict.scope, evict.order, self.pyramid) == ("head", "position", 1)
            and isinstance(self.schedule, Every)
        )

    @property
    def num_moving_sinks(self) -> int:
        """Sinks that are read at their place in the cache."""
        return self.evict.sinks if self.evict is not None and self.moves_sinks else 0

    @property
    def is_bounded(self) -> bool:
        """Whether the cache of a row stops growing."""
        return self.schedule is not None and self.schedule.is_bounded

    def target(self, prompt: int, generated: int) -> int | None:
        """Slots that a row keeps after its `generated`-th token, if it has more; None if it is not the time."""
        return None if self.schedule is None else self.schedule.target(prompt, generated)

    def steps_until_due(self, generated: int) -> int | None:
        """Steps from the `generated`-th new token to the next at which the engine must look; None if it need not."""
        due = [part.steps_until_due(generated) for part in (self.schedule, self.steer, self.share) if part is not None]
        return min((steps for steps in due if steps is not None), default=None)

    def budgets(self, target: int, num_layers: int) -> np.ndarray:
        """Slots of each layer, `num_layers * target` together: [L]."""
        if num_layers == 1 or self.pyramid == 1:
            return np.full(num_layers, target)
        slope = np.linspace(self.pyramid, 2 - self.pyramid, num_layers)
        return self.protected + np.diff(np.rint(np.cumsum(slope) * (target - self.protected)).astype(int), prepend=0)

    def most_slots(self, prompt: int, new: int, num_layers: int) -> np.ndarray:
        """The most slots of each layer's heads, on average, once the prompt is in and compacted: [L]."""
        return self._most(self.layer_budgets(num_layers), prompt, new)

    def most_growth(self, steps: int, page_size: int) -> int:
        """The most slots that so many decode steps add, wherever in a page the row stands."""
        return steps if self.share is None else self.share.align_steps * page_size + self.share.most_slots(steps)

    def widest(self, prompt: int, new: int, num_layers: int, num_kv_heads: int) -> int:
        """The most slots of any layer and KV head."""
        budgets = self.layer_budgets(num_layers)
        if self.evict is not None and self.evict.scope == "compete":
            budgets = num_kv_heads * budgets - (num_kv_heads - 1) * least_slots(budgets, self.evict.floor)
        return max(prompt, int(self._most(budgets, prompt, new).max()))

    def layer_budgets(self, num_layers: int) -> np.ndarray:
        """Slots that the fixed budget leaves in each layer, 0 where there is none: [L]."""
        return np.zeros(num_layers, int) if self.budget is None else self.budgets(self.budget, num_layers)

    def _most(self, budgets: np.ndarray, prompt: int, new: int) -> np.ndarray:
        if self.schedule is None:
            return np.full(len(budgets), prompt + new if self.share is None else self.share.most_slots(prompt + new))
        if self.budget is None:
            return np.full(len(budgets), self.schedule.most_slots(prompt, new))
        schedule: Any = self.schedule
        return np.array([dataclasses.replace(schedule, budget=int(b)).most_slots(prompt, new) for b in budgets])

    def num_pages(self, slots: np.ndarray, num_kv_heads: int, page_size: int) -> int:
        """Pages, at most, of a row whose layers hold `slots` ([L]) slots a KV head, on average over the heads."""
        if self.evict is not None and self.evict.scope == "compete":  # any head's last page may hold a single slot
            return int((num_kv_heads * (slots + page_size - 1) // page_size).sum())
        return int(num_kv_heads * num_pages_of(slots, page_size).sum())

    def num_full_pages(self, slots: np.ndarray, num_kv_heads: int, page_size: int) -> int:
        """Full pages, at least, of such a row."""
        if self.evict is not None and self.evict.scope == "compete":
            return int(np.maximum(0, num_kv_heads * (slots - page_size + 1) // page_size).sum())
        return int(num_kv_heads * (slots // page_size).sum())

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
        if self.evict.needs_mass and view.mass is None:
            raise ValueError(f"{self.name} goes by the accumulated attention mass; the view has none: CacheView(mass=).")
        if self.evict.needs_similarity and view.similarity is None:
            raise ValueError(f"{self.name} goes by the similarity of sentences; the view has none: CacheView(similarity=).")
        budget = view.budget
        if budget is None:
            if self.budget is None:
                raise ValueError(f"{self.name}'s budget grows with the sequence, so the view must say it: CacheView(budget=).")
            budget = jnp.full(view.position.shape[:2], self.budget, jnp.int32)
        return self.evict.choose(self.evict.rate(view)[None], budget[None])[0]


def evict_by(score: Score, budget: int, interval: int = 128, name: str = "", **settings: Any) -> Policy:
    """A policy of your own in one line: keeps the `budget` best slots by `score` every `interval` generated tokens.

    `settings` are those of `Evict` (sinks, recent, scope, ...); the name is the score's unless given.

    Raises:
      ValueError: a setting out of its range.

    >>> evict_by(lambda view: -view.position.astype("float32"), budget=64, name="oldest").budget
    64
    """
    name = name or getattr(score, "__name__", type(score).__name__)
    return Policy(name, Evict(score, **settings), Every(budget, interval))
