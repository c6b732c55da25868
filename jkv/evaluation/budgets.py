"""The budgets of a comparison: slots, bytes, or a share of the full cache's length, on average or of each problem."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jkv.errors import refused
from jkv.eviction import Policy
from jkv.eviction.byte_budget import is_bytes

EACH = "each"
LARGE = 1 << 30  # slots that hold whatever a policy protects


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many slots a policy has in each layer and KV head: `slots`, or a `share`; neither for a policy without a budget.

    Or the bytes of a row over all of them, as a text; how many slots that is depends on the model and the pool's format.
    """

    slots: int | None = None
    share: float | None = None
    is_each: bool = False  # whether the share is of each problem's own length, not of their mean
    num_bytes: str | None = None

    @property
    def slots_or_large(self) -> int:
        """The slots; for a share, whose slots are not known yet, more than any policy protects."""
        return LARGE if self.slots is None else self.slots

    def slots_for(self, lengths: Sequence[float]) -> list[int]:
        """The slots for each problem, from the lengths that the full cache reaches.

        >>> Budget(share=0.5).slots_for([100, 300]), Budget(share=0.5, is_each=True).slots_for([100, 300])
        ([100, 100], [50, 150])
        """
        if self.share is None:
            return [self.slots_or_large] * len(lengths)
        of = lengths if self.is_each else [float(np.mean(lengths))] * len(lengths)
        return [round(self.share * length) for length in of]


def parse_budget(budget: str | int) -> Budget:
    """A budget as a user writes it.

    Raises:
      ValueError: neither slots nor bytes nor a share.

    >>> parse_budget("25% each")
    Budget(slots=None, share=0.25, is_each=True, num_bytes=None)
    """
    text = str(budget).strip()
    number, percent, rest = text.partition("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if percent and 0 < value <= 100 and rest.strip() in ("", EACH):
        return Budget(share=value / 100, is_each=bool(rest.strip()))
    if text.isdigit() and value >= 1:
        return Budget(slots=int(text))
    if is_bytes(text):
        return Budget(num_bytes=text)
    raise refused(
        f'A budget is a number of slots, bytes of a row such as "64MB", or a share of the mean length such as "25%" or of each '
        f'problem\'s own such as "25% {EACH}"; got {budget!r}.',
        budget="invalid",
    )


def parse_mean_budget(budget: str | int) -> Budget:
    """A budget that all texts have in common: slots, or a share of their mean length.

    Raises:
      ValueError: neither of them.
    """
    found = parse_budget(budget)
    if found.num_bytes is not None:
        rule = f"Budgets here are slots or a share of the mean length; got {budget!r}. Give slots."
        raise refused(rule, budget="unsupported")
    if found.is_each:
        rule = f'All texts have one budget here, slots or a share of the mean length; got {budget!r}. Drop "{EACH}".'
        raise refused(rule, budget="unsupported")
    return found


def least_policy(make: Callable[[int], Policy], slots: int, prompt: int) -> Policy:
    """The policy of a prompt of so many tokens with `slots`, or with the fewest above that it accepts."""

    def attempt(budget: int) -> Policy | None:
        try:
            policy = make(budget)
        except ValueError:
            return None
        return policy if prompt <= policy.longest_prompt else None

    refused, accepted = slots, LARGE
    if (policy := attempt(max(1, slots))) is not None:
        return policy
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        refused, accepted = (refused, middle) if attempt(middle) else (middle, accepted)
    return make(accepted)
