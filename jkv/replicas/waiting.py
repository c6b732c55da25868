"""Which replica gets which waiting items: host arithmetic, without engines or threads.

Items wait here, not at the replicas, so that none waits where rows are full while a row is free elsewhere. The replica with the
fewest claimed pages is served first. It takes, in this order:

1. the rest of groups that it has begun: samples of a prompt share its prefill and its pages;
2. groups that nobody has begun;
3. items of groups that others have begun, since its rows would be idle otherwise.

A group is split from the beginning only if other replicas would have nothing at all to do.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


@dataclasses.dataclass(eq=False)
class Group:
    """The waiting items of one prompt.

    Attributes:
      numbers: the items, in order; some may be removed already.
      count: how many wait.
    """

    numbers: collections.deque[int]
    count: int


class Waiting:
    """All items that wait, by their prompts. No call goes through all of them.

    Attributes:
      fresh: groups that no replica has begun, in order.
      begun: the others, by the replica that has begun them.
    """

    def __init__(self) -> None:
        self.fresh: collections.deque[Group] = collections.deque()
        self.begun: dict[int, collections.deque[Group]] = {}
        self._group: dict[int, Group] = {}  # of each item

    def __len__(self) -> int:
        return len(self._group)

    def add(self, numbers: Sequence[int], is_first: bool = False) -> None:
        """Adds a prompt's items behind the others, or before them."""
        if numbers:
            group = Group(collections.deque(numbers), len(numbers))
            self._group |= dict.fromkeys(numbers, group)
            (self.fresh.appendleft if is_first else self.fresh.append)(group)

    def remove(self, number: int) -> bool:
        """Takes an item out, wherever it is; returns whether it waited."""
        group = self._group.pop(number, None)
        if group is not None:
            group.count -= 1
        return group is not None

    def leave(self, replica: int) -> None:
        """A replica is gone: others begin its groups, before all others."""
        self.fresh.extendleft(reversed(self.begun.pop(replica, ())))

    def take(self, group: Group, count: int) -> list[int]:
        """Takes items out of a group, in order."""
        taken: list[int] = []
        while len(taken) < count:
            number = group.numbers.popleft()
            if self._group.get(number) is group:
                del self._group[number]
                taken.append(number)
        group.count -= count
        return taken

    def drop_empty(self) -> None:
        """Drops first groups whose items are all gone, so that each queue begins with a group, if it has one."""
        for groups in (self.fresh, *self.begun.values()):
            while groups and not groups[0].count:
                groups.popleft()
        self.begun = {replica: groups for replica, groups in self.begun.items() if groups}


class Load(NamedTuple):
    """What a replica has to do.

    Attributes:
      replica: its index.
      pages: the most pages that its unfinished items will hold.
      items: unfinished items.
      rows: items that it decodes together.
    """

    replica: int
    pages: int
    items: int
    rows: int


def assign(waiting: Waiting, loads: Sequence[Load], pages: Callable[[int], int]) -> list[tuple[int, int]]:
    """Takes items, as many as there are free rows, and returns each with its replica: (number, replica).

    Args:
      waiting: changed in place.
      loads: of the replicas that may get items.
      pages: the most pages that an item holds, by its number.

    >>> waiting, loads = Waiting(), [Load(0, 0, 0, 4), Load(1, 0, 0, 4)]
    >>> waiting.add([0, 1]), waiting.add([2, 3])
    (None, None)
    >>> assign(waiting, loads, lambda _: 10)
    [(0, 0), (1, 0), (2, 1), (3, 1)]
    >>> waiting.add([0, 1])
    >>> assign(waiting, loads, lambda _: 10)
    [(0, 0), (1, 1)]
    """
    given: list[tuple[int, int]] = []
    free = [(load.pages, load.items, load.replica, load.rows) for load in loads if load.items < load.rows]
    if not free:
        return given
    heapq.heapify(free)
    num_idle = sum(items == 0 for _, items, _, _ in free)
    while free and len(waiting):
        waiting.drop_empty()
        fresh, begun = waiting.fresh, waiting.begun
        held, items, replica, rows = heapq.heappop(free)
        home = replica if replica in begun or fresh else max(begun, key=lambda other: begun[other][0].count)
        if home not in begun:
            begun[home] = collections.deque([fresh.popleft()])
        group = begun[home][0]
        num_idle -= items == 0
        share = math.ceil(group.count / (1 + max(0, num_idle - len(fresh))))
        count = min(share, rows - items)
        taken = waiting.take(group, count)
        given += [(number, replica) for number in taken]
        if items + count < rows:
            heapq.heappush(free, (held + sum(map(pages, taken)), items + count, replica, rows))
    return given
