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
      numbers: the items, in order.
      home: the replica that has begun the group; None if none has.
    """

    numbers: list[int]
    home: int | None = None


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


def assign(groups: Sequence[Group], loads: Sequence[Load], pages: Callable[[int], int]) -> list[tuple[int, int]]:
    """Takes items out of groups, as many as there are free rows, and returns each with its replica: (number, replica).

    Args:
      groups: of waiting items, in order; changed in place.
      loads: of the replicas that may get items.
      pages: the most pages that an item holds, by its number.

    >>> assign([Group([0, 1]), Group([2, 3])], [Load(0, 0, 0, 4), Load(1, 0, 0, 4)], lambda _: 10)
    [(0, 0), (1, 0), (2, 1), (3, 1)]
    >>> assign([Group([0, 1])], [Load(0, 0, 0, 4), Load(1, 0, 0, 4)], lambda _: 10)
    [(0, 0), (1, 1)]
    """
    given: list[tuple[int, int]] = []
    free = [(load.pages, load.items, load.replica, load.rows) for load in loads if load.items < load.rows]
    if not free:
        return given
    heapq.heapify(free)
    num_idle = sum(items == 0 for _, items, _, _ in free)
    fresh = collections.deque(group for group in groups if group.numbers and group.home is None)
    begun: dict[int, collections.deque[Group]] = {}
    for group in groups:
        if group.numbers and group.home is not None:
            begun.setdefault(group.home, collections.deque()).append(group)
    while free and (fresh or begun):
        held, items, replica, rows = heapq.heappop(free)
        home = replica if replica in begun or fresh else max(begun, key=lambda other: len(begun[other][0].numbers))
        group = begun[home][0] if home in begun else fresh.popleft()
        num_idle -= items == 0
        share = math.ceil(len(group.numbers) / (1 + max(0, num_idle - len(fresh))))
        count = min(share, rows - items)
        taken, group.numbers[:] = group.numbers[:count], group.numbers[count:]
        given += [(number, replica) for number in taken]
        if group.home is None:
            group.home = replica
            begun[replica] = collections.deque([group])
        if not group.numbers:
            begun[home].popleft()
            if not begun[home]:
                del begun[home]
        if items + count < rows:
            heapq.heappush(free, (held + sum(map(pages, taken)), items + count, replica, rows))
    return given
