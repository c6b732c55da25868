"""Clients take turns: whoever comes to a long queue of another waits for one of its requests, and keeps its own order."""

import numpy as np

import jkv
from jkv.engine.requests import Request
from jkv.engine.samples import Completion, Sample
from jkv.engine.scheduler import Capacity, Scheduler

PROMPT = np.arange(3, dtype=np.int32)


class Queue:
    """A scheduler of one row, whose samples end as soon as they are admitted."""

    def __init__(self):
        self.scheduler = Scheduler(Capacity(1, 1, 4, num_pages=16, max_running=1))
        self.num_tickets, self.order = 0, []

    def submit(self, client, count, n=1, priority=0):
        """Requests of a client, each of n samples; returns the samples."""
        policy, samples = jkv.streaming_llm(budget=12, interval=8), []
        for ticket in range(self.num_tickets, self.num_tickets + count):
            for i in range(n):
                named = {"client": client, "priority": priority}
                request = Request(PROMPT + ticket % 20, policy, jkv.Sampling(), 0, 0, i, 4, (), **named)
                samples.append(Sample(ticket, i, request, Completion(), policy.most_pages(3, 4, 1, 1, 4)))
                self.scheduler.add(samples[-1])
        self.num_tickets += count
        return samples

    def end(self, sample, reason="stop"):
        sample.completion.finish_reason = reason
        self.scheduler.finish(sample)

    def run(self, count):
        """Serves some samples; returns whose they were."""
        first = len(self.order)
        for _ in range(count):
            for sample in self.scheduler.next().admit.values():
                self.order.append(sample)
                self.end(sample)
        return "".join(sample.request.client for sample in self.order[first:])


def test_nobody_waits_longer_than_a_round_behind_a_long_queue():
    queue = Queue()
    queue.submit("a", 1000)
    assert queue.run(500) == "a" * 500
    queue.submit("b", 3)
    queue.submit("c", 2)
    found = queue.run(12)
    assert found == "bcabcabaaaaa"
    queue.run(493)
    for client in "abc":  # each in its own order
        tickets = [sample.ticket for sample in queue.order if sample.request.client == client]
        assert tickets == sorted(tickets)
    assert len(queue.order) == 1005


def test_samples_of_one_request_stay_together_and_without_names_the_order_is_that_of_arrival():
    queue = Queue()
    queue.submit("a", 2, n=3)
    queue.submit("b", 2)
    assert queue.run(8) == "aaabaaab"
    queue = Queue()
    samples = [*queue.submit("", 3), *queue.submit("", 2, n=2)]
    queue.run(2)
    samples += queue.submit("", 3)
    queue.run(8)
    assert queue.order == samples


def test_a_client_that_has_cancelled_its_queue_starts_anew():
    queue = Queue()
    old = queue.submit("a", 100)
    queue.submit("b", 10)
    for sample in old:
        queue.end(sample, "cancelled")
    assert queue.run(2) == "bb"
    queue.submit("a", 1)
    assert "a" in queue.run(2)
    assert not queue.scheduler._rounds[0]._last.keys() - {"b"}


def test_the_lowest_priority_comes_first_and_clients_take_turns_within_each():
    queue = Queue()
    queue.submit("a", 50)
    queue.submit("z", 2, priority=1)
    assert queue.run(20) == "a" * 20
    queue.submit("b", 30, priority=-5)
    queue.submit("a", 3, priority=-5)
    queue.submit("c", 2, priority=-7)
    assert queue.run(2) == "cc"
    assert queue.run(6) == "bababa"  # "a" waits behind none of its own of another priority
    queue.submit("d", 1, priority=-5)
    assert "d" in queue.run(2)
    queue.run(26)
    queue.submit("e", 1)
    assert queue.run(2) == "ea"  # as if the others had never come
    assert queue.run(31) == "a" * 29 + "zz"
    assert not queue.scheduler._rounds


def test_the_highest_priority_is_preempted_first():
    scheduler = Scheduler(Capacity(1, 1, 4, num_pages=6, max_running=3, chunk=4))
    samples = []
    for ticket, priority in enumerate((5, 0, 3)):
        request = Request(PROMPT + ticket, jkv.full(), jkv.Sampling(), 0, 0, 0, 12, (), priority=priority)
        samples.append(Sample(ticket, 0, request, Completion(), jkv.full().most_pages(3, 12, 1, 1, 4)))
        scheduler.add(samples[-1])
    assert len(scheduler.next().admit) == 3
    gone = []
    for _ in range(3):
        for sample in scheduler.running.values():
            sample.generated += 4
            sample.row.filled = sample.row.filled + 4
        gone += scheduler.next().swap_out.values()
    assert [sample.request.priority for sample in gone] == [5, 3]


def test_a_preempted_sample_keeps_its_rank():
    queue = Queue()
    (old,) = queue.submit("a", 1)
    assert list(queue.scheduler.next().admit.values()) == [old]
    queue.submit("b", 5)
    queue.submit("a", 5)
    queue.scheduler._preempt(0)
    assert queue.scheduler.waiting[0][1] is old
