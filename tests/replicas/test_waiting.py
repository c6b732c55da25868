"""Who gets what: nothing is lost or given twice, no item waits beside a free row, and groups stay together where they can."""

import collections

import numpy as np
import pytest

from jkv.replicas.waiting import Load, Waiting, assign


def waiting_of(*groups):
    waiting = Waiting()
    for numbers in groups:
        waiting.add(numbers)
    return waiting


def begin(waiting, replica):
    """Lets a replica begin the first group without an item of it."""
    waiting.begun.setdefault(replica, collections.deque()).append(waiting.fresh.popleft())


def drawn(rng):
    """Random groups and loads."""
    sizes = rng.integers(1, 9, size=rng.integers(0, 8))
    numbers = iter(range(sizes.sum()))
    waiting = waiting_of(*([next(numbers) for _ in range(size)] for size in sizes))
    rows = int(rng.integers(1, 9))
    loads = [Load(i, int(rng.integers(0, 50)), int(rng.integers(0, rows + 1)), rows) for i in range(rng.integers(1, 5))]
    for _ in range(len(sizes) // 3):
        begin(waiting, int(rng.integers(len(loads) + 2)))  # some of a replica that is gone
    return waiting, [load._replace(pages=load.pages * (load.items > 0)) for load in loads]


def test_every_free_row_gets_an_item_and_no_item_is_given_twice():
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        waiting, loads = drawn(rng)
        before = [number for number in sorted(waiting._group) if rng.random() < 0.8 or not waiting.remove(number)]
        assert len(waiting) == len(before)
        given = assign(waiting, loads, lambda number: 10)
        left = list(waiting._group)
        assert sorted([*left, *(number for number, _ in given)]) == before
        count = {load.replica: load.items for load in loads}
        for _, replica in given:
            count[replica] += 1
        assert all(count[load.replica] <= load.rows for load in loads)
        assert not left or all(count[load.replica] == load.rows for load in loads)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_a_group_stays_together_where_there_is_one_for_each_replica(num_replicas):
    waiting = waiting_of(*(list(range(4 * i, 4 * i + 4)) for i in range(2 * num_replicas)))
    given = dict(assign(waiting, [Load(i, 0, 0, 8) for i in range(num_replicas)], lambda number: 10))
    assert all(len({given[number] for number in range(4 * i, 4 * i + 4)}) == 1 for i in range(2 * num_replicas))


def test_a_group_is_split_evenly_where_replicas_would_have_nothing_to_do():
    given = assign(waiting_of(list(range(8))), [Load(i, 0, 0, 8) for i in range(4)], lambda number: 10)
    assert [replica for _, replica in given] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_fewest_claimed_pages_are_served_first():
    loads = [Load(0, 90, 1, 4), Load(1, 40, 3, 4), Load(2, 60, 1, 4)]
    assert assign(waiting_of([5], [6]), loads, lambda number: 30) == [(5, 1), (6, 2)]


def test_the_rest_of_a_group_waits_for_its_home_unless_rows_would_be_idle():
    waiting, loads = waiting_of([1, 2], [3]), [Load(0, 0, 3, 4), Load(1, 100, 3, 4)]
    begin(waiting, 1)
    assert assign(waiting, loads, lambda number: 10) == [(3, 0), (1, 1)]
    assert list(waiting._group) == [2]
    assert assign(waiting, loads[:1], lambda number: 10) == [(2, 0)]


def test_groups_of_a_replica_that_is_gone_come_first():
    waiting, loads = waiting_of([1, 2], [3], [4]), [Load(0, 0, 3, 4)]
    begin(waiting, 7)
    waiting.leave(7)
    waiting.add([9], is_first=True)
    assert [assign(waiting, loads, lambda number: 10) for _ in range(6)] == [[(number, 0)] for number in (9, 1, 2, 3, 4)] + [[]]
