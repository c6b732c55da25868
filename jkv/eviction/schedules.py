"""When a row is compacted, and to how many slots: host arithmetic about one row, independent of the rest of the batch.

Time is counted in the row's own generated tokens; 0 is right after prefill. Slots are per layer and KV head, on average
if a policy spreads them unevenly. `Read` says which pages a decode step reads, where a policy reads fewer than it keeps.
"""

import dataclasses
import math
import numbers
from typing import Protocol, runtime_checkable

from jkv.checks import check_known, check_least, shown
from jkv.errors import InputError, refused
from jkv.eviction.needs import Needs


@runtime_checkable
class Schedule(Protocol):
    """A frozen dataclass that answers these questions about a row; one with a fixed budget has a field `budget`."""

    @property
    def budget(self) -> int | None:
        """Slots that a compaction leaves; None if the number grows with the sequence."""
        ...

    @property
    def is_bounded(self) -> bool:
        """Whether the cache of a row stops growing, however many tokens it generates."""
        ...

    def target(self, prompt: int, generated: int) -> int | None:
        """Slots that a row keeps now, if it has more (`Threshold`: at least); None if no compaction is due."""
        ...

    def steps_until_due(self, generated: int) -> int | None:
        """Decode steps until the row may be compacted between two steps; None if it never is."""
        ...

    def most_slots(self, prompt: int, new: int) -> int:
        """The most slots that a row fills in `new` decode steps after prefill and its compaction."""
        ...


MOST_ASKED = 64  # compactions at which a schedule is asked before it is used
SCHEDULE = ("budget", "is_bounded", "target", "steps_until_due", "most_slots")


@dataclasses.dataclass(frozen=True)
class Every:
    """Compacts to `budget` slots every `interval` generated tokens, and once after a longer prompt."""

    budget: int
    interval: int = 128
    is_bounded = True

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_least(1, " generated token", interval=self.interval)

    def target(self, prompt: int, generated: int) -> int | None:
        return None if generated % self.interval else self.budget

    def steps_until_due(self, generated: int) -> int | None:
        return self.interval - generated % self.interval

    def most_slots(self, prompt: int, new: int) -> int:
        return min(prompt + new, self.budget + self.interval)


@dataclasses.dataclass(frozen=True)
class WholeBlocks(Every):
    """`Every`, to the newest block of `block` tokens and as many others as the budget holds whole."""

    block: int = 1

    def target(self, prompt: int, generated: int) -> int | None:
        newest = (prompt + generated - 1) % self.block + 1  # its tokens so far
        return None if generated % self.interval else newest + (self.budget - newest) // self.block * self.block


@dataclasses.dataclass(frozen=True)
class EachStep:
    """Evicts to `budget` slots inside each decode step (`jkv.cache.in_step_eviction`), and once after a longer prompt."""

    budget: int
    is_bounded = True

    def __post_init__(self) -> None:
        check_budget(self.budget)

    def target(self, prompt: int, generated: int) -> int | None:
        return self.budget

    def steps_until_due(self, generated: int) -> int | None:
        return None

    def most_slots(self, prompt: int, new: int) -> int:
        return min(prompt + new, self.budget + 1)


@dataclasses.dataclass(frozen=True)
class AfterPrompt:
    """Compacts to `budget` slots once, after the prompt; all generated tokens stay."""

    budget: int
    is_bounded = False

    def __post_init__(self) -> None:
        check_budget(self.budget)

    def target(self, prompt: int, generated: int) -> int | None:
        return None if generated else self.budget

    def steps_until_due(self, generated: int) -> int | None:
        return None

    def most_slots(self, prompt: int, new: int) -> int:
        return min(prompt, self.budget) + new


@dataclasses.dataclass(frozen=True)
class Growing:
    """RPC's schedule: after the first `window` tokens, one in `ratio` of every `interval` generated tokens stays.

    The n-th compaction, at `window + n * interval` tokens, leaves the prompt, `n * (interval // ratio)` slots and the last
    `window`: the cache grows, `ratio` times slower than the sequence.
    """

    interval: int
    ratio: int
    window: int
    budget = None
    is_bounded = False

    def __post_init__(self) -> None:
        if not 1 <= self.ratio <= self.interval:
            rule = "{field} must lie in [1, interval], as one slot in `{field}` stays; got {got} and interval={interval}."
            raise InputError(rule, field="ratio", code="out_of_range", got=self.ratio, interval=self.interval)

    def target(self, prompt: int, generated: int) -> int | None:
        cycles, rest = divmod(generated - self.window, self.interval)
        return None if rest or cycles < 1 else prompt + cycles * (self.interval // self.ratio) + self.window

    def steps_until_due(self, generated: int) -> int | None:
        first = self.window + self.interval
        return first - generated if generated < first else self.interval - (generated - first) % self.interval

    def most_slots(self, prompt: int, new: int) -> int:
        cycles = max(0, new - self.window) // self.interval
        if cycles == 0:
            return prompt + new
        kept = self.interval // self.ratio
        before_the_last = prompt + (cycles - 1) * kept + self.interval + self.window
        return max(before_the_last, prompt + cycles * kept + new - cycles * self.interval)


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Every `interval` generated tokens, and once after the prompt, drops each slot whose score is below the threshold.

    The slots of the last `window` tokens stay whatever their score, and so does what `Evict` protects. Nothing else bounds a
    row: its memory follows the text, and how many slots stay in a KV head is known only once they are compacted.
    """

    threshold: float
    window: int
    interval: int = 128
    budget = None
    is_bounded = False

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float) or math.isnan(self.threshold):
            rule = "{field} must be a number, below which a score drops its slot; got {got}."
            raise InputError(rule, field="threshold", code="out_of_range", got=shown(self.threshold))
        check_least(1, " token, as the newest one always stays", window=self.window, interval=self.interval)

    def target(self, prompt: int, generated: int) -> int | None:
        """The fewest slots that may stay; the scores decide about all others."""
        return None if generated % self.interval else self.window

    def steps_until_due(self, generated: int) -> int | None:
        return self.interval - generated % self.interval

    def most_slots(self, prompt: int, new: int) -> int:
        return prompt + new


def check_schedule(name: str, schedule: object) -> None:
    """Refuses what is no schedule, in the name of the policy that has it.

    Raises:
      ValueError: something that is no dataclass, or that lacks one of the methods.
    """
    own = getattr(schedule, "__name__", type(schedule).__name__)
    if not dataclasses.is_dataclass(schedule) or isinstance(schedule, type) or type(schedule).__hash__ is None:
        raise refused(
            f"A schedule is a frozen dataclass; {name}'s {own} is not. Write @dataclasses.dataclass(frozen=True) above its "
            "class.",
            schedule="wrong_type",
        )
    if not isinstance(schedule, Schedule):
        methods = [method for method in SCHEDULE if not hasattr(schedule, method)]
        rule = f"A schedule has {', '.join(SCHEDULE)}; {name}'s {own} lacks {', '.join(methods)}."
        raise refused(rule, schedule="wrong_type")
    if schedule.budget is not None and "budget" not in {field.name for field in dataclasses.fields(schedule)}:
        rule = f"A schedule with a fixed budget has it as a field; {name}'s {own} does not. Write `budget: int`."
        raise refused(rule, schedule="wrong_type")


def check_answers(name: str, schedule: Schedule, prompt: int, new: int) -> None:
    """Asks a schedule about a row, from one compaction to the next for the first ones, and refuses answers that are none.

    Args:
      name: the policy's.
      schedule: the schedule.
      prompt: tokens of the row's prompt.
      new: the most tokens after it.

    Raises:
      ValueError: an answer of another type, or below what it counts.
    """
    ask(name, schedule, "most_slots", prompt, new)
    generated = 0
    for _ in range(MOST_ASKED):
        ask(name, schedule, "target", prompt, generated)
        steps = ask(name, schedule, "steps_until_due", generated)
        if steps is None or generated + steps > new:
            return
        generated += steps


def ask(name: str, schedule: Schedule, method: str, *arguments: int) -> int | None:
    """What a schedule answers.

    Args:
      name: the policy's.
      schedule: the schedule.
      method: which of its methods is asked; only `most_slots` must know a number.
      arguments: the method's.

    Raises:
      ValueError: an answer of another type, or below 1.
    """
    answer: object = getattr(schedule, method)(*arguments)
    may_be_none = method != "most_slots"
    if answer is None and may_be_none:
        return None
    if isinstance(answer, numbers.Integral) and not isinstance(answer, bool) and int(answer) >= 1:
        return int(answer)
    raise refused(
        f"{name}'s {type(schedule).__name__}.{method} must return a whole number, at least 1{', or None' * may_be_none}; got "
        f"{shown(answer)}. Correct it.",
        schedule="wrong_type",
    )


def check_budget(budget: int) -> None:
    """Refuses a budget that is not a number of slots."""
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget < 1 << 48:
        rule = "{field} must be a number of slots, at least 1 and below 2**48, for each layer and KV head; got {got}."
        raise InputError(rule, field="budget", code="out_of_range", got=shown(budget))


@dataclasses.dataclass(frozen=True)
class Read:
    """Which pages a decode step reads (Quest): those that may hold the keys with the largest logits.

    Attributes:
      budget: slots read in a layer and KV head, rounded down to whole pages; the current page is always read.
      dense_layers: how many first layers read all pages; None is `num_dense`.
      over_group: how the query heads of a KV head choose: by the largest of their bounds ("max") or by the mean ("mean").

    Raises:
      ValueError: a field out of its range.
    """

    needs = Needs(bounds=True)
    budget: int
    dense_layers: int | None = None
    over_group: str = "max"

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_least(0, " first layers that read all pages", dense_layers=self.dense_layers)
        check_known(("max", "mean"), over_group=self.over_group)

    def num_dense(self, num_layers: int) -> int:
        """How many first layers of a model read all pages: by default 2, as in Quest's code, and none of fewer than 16."""
        return min(num_layers, (2 if num_layers >= 16 else 0) if self.dense_layers is None else self.dense_layers)
