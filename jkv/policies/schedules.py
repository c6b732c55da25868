"""When a row is compacted and to how many slots: arithmetic on the host about one row, never about its neighbours.

Time is counted in the row's own generated tokens; 0 is the moment after its prompt. Slots are those of a layer and KV head, on
average where a policy spreads them unevenly.
"""

import dataclasses
from typing import Protocol, runtime_checkable


@runtime_checkable
class Schedule(Protocol):
    """What the engine asks about a row."""

    @property
    def budget(self) -> int | None:
        """Slots that a compaction leaves; None for a number that grows."""
        ...

    @property
    def is_bounded(self) -> bool:
        """Whether a row stops growing, however long it gets."""
        ...

    def target(self, prompt: int, generated: int) -> int | None:
        """Slots that a row keeps at this moment, if it has more; None if it is not the time."""
        ...

    def steps_until_due(self, generated: int) -> int | None:
        """Steps to the next moment at which a row may be compacted between two steps; None if there is none."""
        ...

    def most_slots(self, prompt: int, new: int) -> int:
        """The most slots that a row ever fills in `new` steps, once its prompt is in and compacted."""
        ...


@dataclasses.dataclass(frozen=True)
class Every:
    """Down to `budget` slots at every multiple of `interval` tokens, and once after a longer prompt."""

    budget: int
    interval: int = 128
    is_bounded = True

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.interval < 1:
            raise ValueError(f"interval must be at least 1 generated token; got {self.interval}.")

    def target(self, prompt: int, generated: int) -> int | None:
        return None if generated % self.interval else self.budget

    def steps_until_due(self, generated: int) -> int | None:
        return self.interval - generated % self.interval

    def most_slots(self, prompt: int, new: int) -> int:
        return min(prompt + new, self.budget + self.interval)


@dataclasses.dataclass(frozen=True)
class EachStep:
    """Down to `budget` slots after every token, inside its step (`jkv.cache.in_step_eviction`), and once after a longer
    prompt.
    """

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
    """Down to `budget` slots once, after the prompt; generated tokens all stay."""

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
    """RPC's: every `interval` tokens, after the first `window`, a share of one in `ratio` of them is added to what stays.

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
            raise ValueError(
                f"ratio must lie in [1, interval], as one slot in `ratio` stays; got {self.ratio=}, {self.interval=}."
            )

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


def check_budget(budget: int) -> None:
    """Refuses a budget that is no number of slots."""
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ValueError(f"budget must be a number of slots, at least 1, for each layer and KV head; got {budget!r}.")
