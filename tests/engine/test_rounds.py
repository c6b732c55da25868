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

    def submit(self, client, count, n=1):
        """Requests of a client, each of n samples; returns the samples."""
        policy, samples = jkv.streaming_llm(budget=12, interval=8), []
        for ticket in range(self.num_tickets, self.num_tickets + count):
            for i in range(n):
                request = Request(PROMPT + ticket % 20, policy, jkv.Sampling(), 0, 0, i, 4, (), client=client)
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
    assert not queue.scheduler._rounds._last.keys() - {"b"}


def test_a_preempted_sample_keeps_its_rank():
    queue = Queue()
    (old,) = queue.submit("a", 1)
    assert list(queue.scheduler.next().admit.values()) == [old]
    queue.submit("b", 5)
    queue.submit("a", 5)
    queue.scheduler._preempt(0)
    assert queue.scheduler.waiting[0][1] is old
