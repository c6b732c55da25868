"""What a policy requires of an engine, as one record: each score and part declares its own, and the policy's is their union.

The policy checks it, the engine allocates by it, and the planner counts it.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

from jkv.checks import check_known
from jkv.errors import InputError, refused

DEFAULT_WINDOW = 8  # queries: the default of R-KV and SnapKV
IN_STEP = ("", "sum", "last")
OF_ONE_SCORE = ("in_step", "keeps_window")
NOT_KEPT = ("compares_keys", "rope", "projected", "calibration")  # an engine keeps nothing for them


def amount(need: int | str | tuple[str, ...]) -> int:
    """How much of something a need asks for: of names, their number; of a text, whether there is one."""
    return need if isinstance(need, int) else len(need)


def check_carried(names: Any) -> None:
    """Refuses what does not name the numbers that slots carry.

    Raises:
      ValueError: no tuple of names, or a name that is given twice.
    """
    is_names = isinstance(names, tuple) and all(isinstance(name, str) and name.isidentifier() for name in names)
    if not is_names or len(set(names)) < len(names):
        raise refused(
            f'Needs.carried names the numbers of a slot, each once, such as carried=("last", "longest"); got {names!r}.',
            carried="wrong_type",
        )


class Needing(Protocol):
    """Whatever declares its needs, such as a policy."""

    @property
    def needs(self) -> "Needs": ...


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a score reads besides keys, values and positions, and what the engine keeps for the other parts of a policy.

    A score of your own declares `window`, `mass`, `carried`, `compares_keys`, `rope`, `projected` and `gate`; `Needs()` says
    that it reads no more than keys, values, positions, the prompt's length and the budget.

    Attributes:
      window: how many of the last queries the score reads (`CacheView.query`).
      mass: whether it reads the attention mass of each slot (`CacheView.mass`).
      carried: the names of numbers that each slot carries from one compaction to the next. The score reads the last
        compaction's as `CacheView.carried["name"]`, and returns a pair: the score, and a dict of the numbers to carry.
      similarity: whether it reads the similarity of sentences (`CacheView.similarity`), which the policy's `sentences` finds.
      compares_keys: whether it compares each key with each other. Nothing is kept for it, but `jkv.plan` counts the time.
      bounds: whether the engine keeps the smallest and largest key of each page.
      moving_sinks: whether a row's sinks are read at their place in the cache.
      steering: whether vectors are added to hidden states.
      sharing: whether slots have a multiplicity.
      aligning: whether thoughts start on pages of their own.
      rope: whether it reads the model's rotary embedding (`CacheView.rope`).
      projected: whether it reads the norm of each value after the output projection (`CacheView.projected_norm`).
      calibration: whether it reads what was measured of the model (`CacheView.calibration`), which the policy holds.
      gate: whether it reads the number that the policy's gate computed when the slot was written (`CacheView.gate`).
      in_step: how a decode step can compute the score by itself: "sum" if the score is the accumulated attention mass, "last"
        if it is the mass from the last query, and "" if it cannot.
      keeps_window: whether the slots that the score keeps, apart from the sinks, are always the most recent ones.

    Raises:
      ValueError: a field out of its range.

    >>> Needs(window=8) | Needs(window=4, mass=True)
    Needs(window=8, mass=True)
    """

    window: int = 0
    mass: bool = False
    carried: tuple[str, ...] = ()
    similarity: bool = False
    compares_keys: bool = False
    bounds: bool = False
    moving_sinks: bool = False
    steering: bool = False
    sharing: bool = False
    aligning: bool = False
    rope: bool = False
    projected: bool = False
    calibration: bool = False
    gate: bool = False
    in_step: str = ""
    keeps_window: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 0:
            raise refused(f"Needs.window is a number of queries, at least 0; got {self.window!r}.", window="wrong_type")
        check_carried(self.carried)
        check_known(IN_STEP, in_step=self.in_step)

    def __or__(self, other: "Needs") -> "Needs":
        """The needs of both. `in_step` and `keeps_window` describe one score, so a union drops them.

        For the numbers that slots carry, a union takes the policy with more of them, because a row has one policy at a time.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name not in OF_ONE_SCORE]
        return Needs(**{name: max(getattr(self, name), getattr(other, name), key=amount) for name in names})

    def __repr__(self) -> str:
        fields = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        return f"Needs({', '.join(f'{name}={value!r}' for name, value, default in fields if value != default)})"

    @classmethod
    def of(cls, policies: Iterable[Needing] | None) -> "Needs":
        """The union of the needs of policies; None is taken as policies with a short window and no other needs."""
        if policies is None:
            return cls(window=DEFAULT_WINDOW)
        union = cls()
        for policy in policies:
            union |= policy.needs
        return union

    @property
    def carried_slots(self) -> dict[str, str]:
        """The name in `Pool.slot_data` of each number that slots carry; rows of other policies use the same arrays."""
        return {name: f"carried {i}" for i, name in enumerate(self.carried)}

    @property
    def has_events(self) -> bool:
        """Whether a decode step makes decisions that a trace must record."""
        return self.mass or self.bounds or self.steering

    def check(self, name: str, needs: "Needs") -> None:
        """Refuses a policy that needs more than an engine with these needs keeps.

        Raises:
          ValueError: what is missing, and how to get it.
        """
        kept, wanted = vars(self), vars(needs)
        missing = [field for field in wanted if field not in NOT_KEPT and amount(wanted[field]) > amount(kept[field])]
        if missing:
            asked, built = (", ".join(f"{field}={values[field]}" for field in missing) for values in (wanted, kept))
            rule = (
                "{name} needs {asked}; this engine was built with {built}. Name the {field} when you build the engine: "
                "policies=[...]."
            )
            raise InputError(rule, field="policy", code="unsupported", name=name, asked=asked, built=built)
