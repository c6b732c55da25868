"""The dispatcher with replicas of paper: whatever ends in between, each item is finished once, or its error says why."""

import threading

import numpy as np
import pytest

import jkv
from jkv.engine.requests import RequestOptions, make_requests
from jkv.engine.samples import Completion
from jkv.engine.service import Reply
from jkv.engine.stats import RunStats
from jkv.replicas.dispatcher import MOST_MOVES, Dispatcher, Open
from jkv.replicas.replica import Facts, Failed, Finished, Item, Lost, Rows, Updated

FACTS = Facts(max_running=2, max_slots=64, num_pages=100, page_size=4, page_bytes=1)
DIGESTS = np.zeros((1, 2), np.uint32)
SECONDS = 20


class Paper:
    """A replica that finishes items when it is told to, and remembers what it was asked for."""

    def __init__(self, index, post, version):
        self.index, self.post, self.version, self.facts = index, post, version, FACTS
        self.items, self.restored, self.updates, self.is_closed = [], [], [], False
        self.came = threading.Event()

    def submit(self, items):
        self.items += [item.number for item in items]
        self.came.set()

    def restore(self, items, content):
        self.restored += [(item.number, content) for item in items]
        self.submit(items)

    def cancel(self, numbers):
        for number in numbers:
            self.finish(number, "cancelled")

    def update(self, change):
        self.updates.append((change.content, change.version))

    def drain(self):
        self.post(Rows(frozenset(self.items[:1]), "rows", is_last=True))

    def finish(self, number, reason="length"):
        self.post(Finished(number, Completion([1], finish_reason=reason), 1))

    def reset_stats(self):
        pass

    def ask(self, call, seconds):
        return RunStats()

    def close(self):
        self.is_closed = True


class PaperCarrier:
    """Replicas of paper; `started` has all that were ever made."""

    name, num_starts = "paper", 1

    def __init__(self, count):
        self.count, self.started, self.version, self.refuses = count, [], 0, False

    def start(self, index, post):
        if self.refuses:
            raise RuntimeError("no room")
        self.started.append(Paper(index, post, self.version))
        return self.started[-1]

    def use(self, change):
        pass

    def close(self):
        pass


@pytest.fixture
def carrier():
    return PaperCarrier(2)


@pytest.fixture
def dispatcher(carrier):
    dispatcher = Dispatcher(carrier, restarts=0)
    yield dispatcher
    dispatcher.close()
    assert all(replica.is_closed for replica in carrier.started)


def submit(dispatcher, model, count, first=0):
    """Groups of one item; their replies by number."""
    request = make_requests(model, [np.array([5, 1])], RequestOptions(max_new_tokens=4))[0][0]
    items = [Open(Item.of(i, request, [jkv.full()], is_traced=False), 10, Reply()) for i in range(first, first + count)]
    dispatcher.call(dispatcher.submit, [[one] for one in items]).result()
    settle(dispatcher)
    return {one.item.number: one.reply for one in items}


def settle(dispatcher):
    """Waits until the dispatcher has done all that is queued, and what followed from it."""
    for _ in range(2):
        dispatcher.call(lambda: None).result(SECONDS)


def test_items_wait_here_until_a_row_is_free(dispatcher, carrier, model):
    replies = submit(dispatcher, model, 6)
    one, two = carrier.started
    assert [sorted(one.items), sorted(two.items)] == [[0, 2], [1, 3]]
    two.finish(3)
    settle(dispatcher)
    assert two.items == [1, 3, 4]
    for replica, number in [(one, 0), (one, 2), (two, 1), (two, 4), (one, 5)]:
        settle(dispatcher)
        replica.finish(number)
    assert [replies[i].result(SECONDS).number for i in range(6)] == list(range(6))


def test_a_lost_replica_leaves_its_rows_and_items_to_others_and_is_not_heard_any_more(dispatcher, carrier, model):
    replies = submit(dispatcher, model, 4)
    one, two = carrier.started
    rows = Rows(frozenset({0}), "rows")
    one.post(rows)
    one.post(Lost(OSError("gone")))
    one.finish(2)  # too late: another does it
    two.finish(1)
    two.finish(3)
    settle(dispatcher)
    assert two.items == [1, 3, 0, 2]
    assert two.restored == [(0, "rows")]
    assert not replies[2].done()
    two.finish(0)
    two.finish(2)
    two.finish(2)  # twice is once
    assert [replies[i].result(SECONDS).number for i in range(4)] == list(range(4))


def test_a_retired_replica_leaves_its_rows_to_others(dispatcher, carrier, model):
    submit(dispatcher, model, 2)
    _, two = carrier.started
    reply = Reply()
    dispatcher.call(dispatcher.drain, 0, reply).result()
    reply.result(SECONDS)
    settle(dispatcher)
    assert [number for number, _ in two.restored] == [0]
    for index, got in ((0, "the others are"), (7, "the others are"), (1, "it is the last")):
        reply = Reply()
        dispatcher.call(dispatcher.drain, index, reply).result()
        with pytest.raises(ValueError, match=got):
            reply.result(SECONDS)


def test_a_replica_with_old_weights_gets_no_items(dispatcher, carrier, model):
    one, two = carrier.started
    reply = Reply()
    dispatcher.call(dispatcher.update, "change", DIGESTS, reply).result()
    one.post(Updated(1))
    submit(dispatcher, model, 3)
    assert [one.items, two.items] == [[0, 1], []]
    assert not reply.done()
    two.post(Updated(1))
    reply.result(SECONDS)
    settle(dispatcher)
    assert two.items == [2]
    assert one.updates == two.updates == [("change", 1)]


def test_a_replica_that_is_lost_during_an_update_does_not_hold_it_up(dispatcher, carrier):
    one, two = carrier.started
    reply = Reply()
    dispatcher.call(dispatcher.update, "change", DIGESTS, reply).result()
    one.post(Updated(1))
    two.post(Lost(OSError("gone")))
    reply.result(SECONDS)
    reply = Reply()
    dispatcher.call(dispatcher.update, "more", DIGESTS, reply).result()
    one.post(Lost(OSError("gone too")))
    with pytest.raises(RuntimeError, match=r"All replicas are lost; the last by .*gone too"):
        reply.result(SECONDS)


def test_a_restarted_replica_gets_the_weights_that_came_while_it_started(carrier, model):
    dispatcher = Dispatcher(carrier, restarts=1)
    one, two = carrier.started
    replies = [Reply(), Reply()]
    one.post(Lost(OSError("gone")))  # the carrier still starts another with version 0, as if it had begun before the update
    for change, reply in zip("ab", replies, strict=True):
        dispatcher.call(dispatcher.update, change, DIGESTS, reply).result()
    two.post(Updated(1))
    two.post(Updated(2))
    deadline = threading.Event()
    while len(carrier.started) < 3 or not carrier.started[2].updates:
        assert not deadline.wait(0.01)
    three = carrier.started[2]
    assert three.updates == [("a", 1)]
    assert not replies[0].done()
    three.post(Updated(1))
    settle(dispatcher)
    assert three.updates == [("a", 1), ("b", 2)]
    three.post(Updated(2))
    replies[1].result(SECONDS)
    dispatcher.close()


def test_an_item_that_every_replica_is_lost_with_ends_with_an_error():
    carrier = PaperCarrier(1)
    dispatcher = Dispatcher(carrier, restarts=MOST_MOVES + 2)
    reply = submit(dispatcher, jkv.testing.tiny_model(), 1)[0]
    for i in range(MOST_MOVES + 1):
        assert carrier.started[i].came.wait(SECONDS)
        carrier.started[i].post(Lost(OSError("gone")))
        while len(carrier.started) < i + 2:
            threading.Event().wait(0.01)
    with pytest.raises(RuntimeError, match=f"lost with {MOST_MOVES + 1} replicas"):
        reply.result(SECONDS)
    dispatcher.close()


def test_when_all_are_lost_every_item_says_so(dispatcher, carrier, model):
    replies = submit(dispatcher, model, 5)
    for replica in carrier.started:
        replica.post(Lost(OSError("gone")))
    for reply in replies.values():
        with pytest.raises(RuntimeError, match="All replicas are lost"):
            reply.result(SECONDS)
    with pytest.raises(RuntimeError, match="All replicas are lost"):
        submit(dispatcher, model, 1, first=9)


def test_an_error_of_one_item_is_its_own_and_cancelled_ones_come_back(dispatcher, carrier, model):
    replies = submit(dispatcher, model, 5)
    one, _ = carrier.started
    one.post(Failed(0, ValueError("bad")))
    with pytest.raises(ValueError, match="bad"):
        replies[0].result(SECONDS)
    settle(dispatcher)
    dispatcher.call(dispatcher.cancel, [1, 2, 3, 4]).result()
    assert {replies[i].result(SECONDS).completion.finish_reason for i in (1, 2, 3, 4)} == {"cancelled"}
    last = submit(dispatcher, model, 6, first=10)
    dispatcher.call(dispatcher.cancel, [15]).result()
    assert last[15].cancelled()


def test_a_replica_that_does_not_start_closes_the_others():
    carrier = PaperCarrier(2)
    start = carrier.start

    def refuse_the_second(index, post):
        carrier.refuses = index == 1
        return start(index, post)

    carrier.start = refuse_the_second
    with pytest.raises(RuntimeError, match="no room"):
        Dispatcher(carrier, restarts=0)
    assert carrier.started[0].is_closed


def test_what_is_unfinished_at_the_end_gets_an_error(carrier, model):
    dispatcher = Dispatcher(carrier, restarts=0)
    reply = submit(dispatcher, model, 1)[0]
    dispatcher.close()
    with pytest.raises(RuntimeError, match="closed before"):
        reply.result(SECONDS)
    with pytest.raises(RuntimeError, match="Make others"):
        dispatcher.call(lambda: None)
