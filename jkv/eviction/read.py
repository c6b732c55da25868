"""Which pages a decode step reads, as a part of a policy."""

import dataclasses

from jkv.checks import check_known, check_least
from jkv.eviction.needs import Needs
from jkv.eviction.schedules import check_budget


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
