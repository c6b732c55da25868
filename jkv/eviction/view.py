"""What an author of a policy writes, a `Score`, and what the score may read, a `CacheView`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.pool import EMPTY
from jkv.errors import refused
from jkv.eviction.needs import Needs
from jkv.model.rotary import Rope
from jkv.resuming import digest_of_code

OPTIONAL = (
    "query",
    "mass",
    "similarity",
    "carried",
    "rope",
    "projected_norm",
    "calibration",
    "gate",
)  # fields that a score must declare

Numbers = dict[str, Float[Array, "B K S"]]  # of each slot, by name
# The scores, or with `Needs.carried` a pair: the scores, and numbers of each slot that the next compaction sees if it is kept.
Scored = Float[Array, "B K S"] | tuple[Float[Array, "B K S"], Numbers]


class CacheView(NamedTuple):
    """What a score may read. Each batch row is one layer of one sequence. An empty slot has the position EMPTY (-1).

    Batch rows are independent. They may be of different layers: the engine shows all layers of a sequence at once.

    Slots are in the order in which the policy stores them: ascending by position, unless `Evict.order` is "score". Whatever a
    score may read of empty slots, except positions, may be NaN.

    Attributes:
      key: keys, rotated for their true positions.
      value: values.
      position: index of the slot's token in the sequence.
      query: the last W queries, oldest first; `query[:, :, W - 1]` is the newest token's. In a sequence shorter than W the
        oldest ones are meaningless. None unless `Needs.window` asks for them.
      mass: softmax mass from all queries so far, summed over the query heads of a KV head. None unless `Needs.mass`.
      carried: what the score returned for the slot at the last compaction, by the names of `Needs.carried`; 0 for a slot
        written since. None without names.
      similarity: cosine between the slot's sentence and a later one that repeats it, 0 if none does
        (`jkv.reasoning.sentences`). None unless `Needs.similarity`.
      layer: index of the layer, one for all batch rows or one for each.
      budget: slots that the row keeps in this layer for each KV head, protected ones included. A row may have fewer slots.
        With scope "compete", the heads together keep K times this.
      prompt_length: tokens of the prompt.
      log_weight: `ln m` for a slot with multiplicity m (`jkv.reasoning.sharing`). None when nothing is shared.
      first_head: index of the view's first KV head, if a mesh splits the heads of a layer (`jkv.engine.mesh`).
      rope: the rotary embedding of each batch row. None unless `Needs.rope`.
      projected_norm: the L1 norm of the slot's value after the layer's output projection, mean over the query heads of its KV
        head. None unless `Needs.projected`.
      calibration: the arrays of the policy's calibration, of each batch row's layer. None unless `Needs.calibration`.
      gate: what the policy's gate (`jkv.eviction.gate`) computed from the hidden state when the slot was written. None unless
        `Needs.gate`.
      sink: the learned sink of each query head, a logit without a slot that the model's attention has in the denominator of its
        softmax (gpt-oss). A score that computes attention from queries and keys adds it (`jkv.eviction.scores.attention`);
        `mass` has it already. None in models without.
    """

    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S H"]
    position: Int[Array, "B K S"]
    query: Float[Array, "B N W H"] | None = None
    mass: Float[Array, "B K S"] | None = None
    similarity: Float[Array, "B K S"] | None = None
    carried: Numbers | None = None
    layer: int | Int[Array, ""] | Int[Array, " B"] | None = None
    budget: Int[Array, "B K"] | None = None
    prompt_length: Int[Array, " B"] | None = None
    log_weight: Float[Array, "B K S"] | None = None
    first_head: int | Int[Array, ""] | None = None
    rope: Rope | None = None
    projected_norm: Float[Array, "B K S"] | None = None
    calibration: Any = None
    gate: Float[Array, "B K S"] | None = None
    sink: Float[Array, "B N"] | None = None

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
        """How many tokens came after the slot's: 0 for the newest."""
        return self.num_seen[:, None, None] - 1 - self.position


@runtime_checkable
class Score(Protocol):
    """How much each slot is worth: float32, higher is kept. Scores of empty and protected slots are ignored.

    Elsewhere NaN is an error, and so are scores that are infinite for all other slots of a row: its request ends with the
    reason "error". Some may be infinite.

    A score is a frozen dataclass, so that policies can be hashed and compared by value. It declares what it reads:

        @dataclasses.dataclass(frozen=True)
        class KeyNorm:
            needs = jkv.Needs()

            def __call__(self, view):
                return jnp.linalg.norm(view.key.astype(jnp.float32), axis=-1)
    """

    @property
    def needs(self) -> Needs: ...

    def __call__(self, view: CacheView) -> Scored: ...


@dataclasses.dataclass(frozen=True)
class FunctionScore:
    """A plain function as a score, with what it reads; `jkv.evict_by` makes it."""

    function: Callable[[CacheView], Scored]
    needs: Needs

    def __repr__(self) -> str:
        return f"FunctionScore({name_of(self)}, code={digest_of_code(self.function)!r}, needs={self.needs!r})"

    def __call__(self, view: CacheView) -> Any:
        try:
            return self.function(view)
        except (AttributeError, TypeError, ValueError) as error:
            hint = undeclared(view)
            if not hint or isinstance(error, jax.errors.JAXTypeError):  # the latter: it was traced
                raise
            raise refused(f"{name_of(self)} failed: {error}.{hint}", view="missing") from error


def undeclared(view: CacheView) -> str:
    """Which optional fields a view lacks, and how a score asks for them, with a space before it; empty if it has them all."""
    if not (absent := [field for field in OPTIONAL if getattr(view, field) is None]):
        return ""
    return (
        f" A score is given what it declares; this view has no {', no '.join(absent)}. If it reads one of them, pass "
        "evict_by(..., needs=): jkv.Needs(window=8) for the last 8 queries, jkv.Needs(mass=True) for the attention so far."
    )


class ScoreError(ValueError):
    """What a score returned is no score."""


def name_of(score: Score) -> str:
    """The name that its author gave to a score."""
    if isinstance(score, FunctionScore):
        return str(getattr(score.function, "__name__", "the score"))
    return type(score).__name__


def scores_of(score: Score, view: CacheView) -> tuple[Float[Array, "B K S"], Numbers]:
    """What a score returns for a view: the scores, and the numbers that each slot carries on, by their names.

    Raises:
      ScoreError: it returns something else, of another type or shape.
    """
    name, needs, result = name_of(score), score.needs, score(view)
    if isinstance(result, tuple) != bool(needs.carried):
        got = ("a pair" if len(result) == 2 else f"a tuple of {len(result)}") if isinstance(result, tuple) else "one array"
        raise ScoreError(
            f"{name} must return the score alone, or a pair, (score, carried), if it declares names of numbers to carry, such "
            f'as Needs(carried=("last",)); it declares {needs} and returns {got}. Correct either.'
        )
    parts = result if isinstance(result, tuple) else (result, {})
    if len(parts) != 2:
        raise ScoreError(f"{name} must return a pair, (score, carried); got a tuple of {len(parts)}. Return two values.")
    numbers, carried = parts
    if not isinstance(carried, dict) or set(carried) != set(needs.carried):
        got = f"the names {', '.join(map(str, carried))}" if isinstance(carried, dict) else type(carried).__name__
        wanted = ", ".join(f'"{one}": ...' for one in needs.carried)
        raise ScoreError(
            f"{name} must return the numbers to carry by their names, (score, {{{wanted}}}), as its needs declare them; got "
            f"{got}."
        )
    check_numbers_of_slots(f"{name} must return float32 [B, K, S], a score of each slot", numbers, view)
    for one in needs.carried:
        check_numbers_of_slots(f'{name} must return float32 [B, K, S] as "{one}", a number of each slot', carried[one], view)
    return numbers, {one: carried[one] for one in needs.carried}


def check_numbers_of_slots(rule: str, numbers: Any, view: CacheView) -> None:
    """Refuses what is not one float32 number of each slot; `rule` begins the error.

    Raises:
      ScoreError: no array, or one of another type or shape.
    """
    expected, shape, dtype = view.position.shape, getattr(numbers, "shape", None), getattr(numbers, "dtype", None)
    rule = f"{rule}, here {expected}"
    if shape is None or dtype is None:
        hint = undeclared(view) if numbers is None else ""
        raise ScoreError(f"{rule}; got {type(numbers).__name__}. Return an array of JAX.{hint}")
    if shape != expected:
        raise ScoreError(f"{rule}; got the shape {shape}. Give each slot one number.")
    if dtype == jnp.bool_:
        raise ScoreError(f"{rule}; got a mask of booleans. Give the slots to keep a higher score: jnp.where(mask, 1.0, 0.0).")
    if dtype != jnp.float32:
        raise ScoreError(f"{rule}; got {dtype}. Compute in float32, as of view.key.astype(jnp.float32).")


def check_score(score: object) -> None:
    """Refuses what is no score, by name.

    Raises:
      ValueError: something that is no frozen dataclass, or that declares no needs.
    """
    name = getattr(score, "__name__", type(score).__name__)
    if not callable(score):
        rule = f"A score is called with a CacheView and returns float32 [B, K, S]; {name} cannot be called."
        raise refused(rule, score="wrong_type")
    if not dataclasses.is_dataclass(score) or isinstance(score, type) or type(score).__hash__ is None:
        raise refused(
            f"A score is a frozen dataclass; {name} is not. Write @dataclasses.dataclass(frozen=True) above its class, or give "
            "a plain function to jkv.evict_by.",
            score="wrong_type",
        )
    if not isinstance(score, Score) or not isinstance(score.needs, Needs):
        raise refused(
            f"A score declares what it reads; {name} does not. Write `needs = jkv.Needs()` in its class, or "
            "`needs = jkv.Needs(window=8)` if it reads the last 8 queries.",
            score="wrong_type",
        )
