"""The scheduler by itself: random turns without a device or a model, against what rows and prefixes hold page by page."""

import numpy as np
import pytest

import jkv
from jkv.engine.requests import Request
from jkv.engine.samples import Completion, RowOutputs, Sample
from jkv.engine.scheduler import CHUNKS, Capacity, Scheduler
from jkv.eviction.scores import Recency

LAYERS, HEADS, PAGE = 2, 2, 4
MOST_PAGES = LAYERS * HEADS * 16  # of a request
POLICIES = [
    jkv.full(),
    jkv.quest(budget=12, dense_layers=1),
    jkv.streaming_llm(budget=12, interval=8),
    jkv.r_kv(budget=16, interval=4, window=4),
    jkv.pyramid_kv(budget=14, interval=8, window=4),
    jkv.snap_kv(budget=10, when="prefill", window=4),
    jkv.rpc(interval=8, window=4),
    jkv.h2o(budget=14),
    jkv.r_kv(budget=16, interval=4, window=4, until="</think>"),
    jkv.Policy("below", jkv.Evict(Recency(), recent=3), jkv.Threshold(0.0, 6, 4)),
]
REWRITING = ("r_kv", "below")  # unbounded, and their compactions rewrite the prompt
PROMPTS = [np.arange(length, dtype=np.int32) for length in (1, 3, 8, 17, 30)]


class FakeRunner:
    """Executes turns on paper: counts the pages that each row and prefix really holds, and refuses what a pool cannot do."""

    def __init__(self, scheduler):
        self.scheduler, self.capacity = scheduler, scheduler.capacity
        self.rows, self.prefixes, self.readers, self.most = {}, {}, {}, 0

    @property
    def held(self):
        return sum(self.rows.values()) + sum(self.prefixes.values())

    def pages(self, sample):
        """Pages of a row without those of its prefix; the compactions of bounded and of some other policies rewrite these."""
        policy, heads = sample.request.policy, sample.row.heads
        whole = policy.num_pages(sample.row.filled, HEADS, PAGE) if heads is None else int(np.ceil(heads / PAGE).sum())
        is_rewritten = (policy.is_bounded or policy.name in REWRITING) and sample.row.compactions > 0
        return whole - (sample.prefix.num_full_pages if sample.reads_prefix and not is_rewritten else 0)

    def execute(self, turn):
        self.release(turn.release)
        for row, sample in turn.swap_out.items():
            sample.row.swapped = FakeSwapped(row in self.readers)
            self.release([row])
        self.free(turn.free)
        for row, sample in turn.admit.items():
            assert row not in self.rows
            assert row < self.capacity.max_running
            prefix = sample.prefix
            if sample.reads_prefix and prefix.row.snapshot is None:
                prefix.row.snapshot = object()
                self.prefixes[id(prefix.row.snapshot)] = prefix.row.num_pages
            if sample.reads_prefix:
                self.readers[row] = prefix.row.snapshot
            sample.row.swapped = None
            prefix.sort(sample)
            self.rows[row] = self.pages(sample)
        self.check()

    def release(self, rows):
        for row in rows:
            del self.rows[row]
            self.readers.pop(row, None)

    def free(self, prefixes):
        for prefix in prefixes:
            start, prefix.row.snapshot = prefix.row.snapshot, None
            assert start is not None, "a prefix was freed twice, or before it was prefilled"
            assert not any(start is other for other in self.readers.values()), "a row reads a freed prefix"
            del self.prefixes[id(start)]

    def reset(self):
        self.rows, self.prefixes, self.readers = {}, {}, {}

    def check(self):
        self.most = max(self.most, self.held)
        assert self.held <= self.capacity.num_pages, "more pages are held than the pool has"

    def decode(self, rng, num_steps):
        """A chunk: rows draw tokens until their limit or an end token; then due rows are compacted."""
        for row, sample in self.scheduler.running.items():
            due = sample.request.policy.steps_until_due(sample.generated)
            assert due is None or num_steps <= due, "a chunk passes a row's compaction"
            count = min(num_steps, sample.remaining)
            is_last = count == sample.remaining or rng.random() < 0.02
            sample.advance(RowOutputs([0] * count, [0.0] * count, [0.0] * count, not is_last, None, None, None, None))
            self.rows[row] = self.pages(sample)
            if is_last:
                sample.completion.finish_reason = "length"
                self.scheduler.finish(sample)
        self.check()
        for row, sample in self.scheduler.running.items():
            if sample.is_due:
                left = None
                if not sample.request.policy.is_planned:  # any number of slots, from those of the window to all
                    held = np.tile(sample.row.filled[:, None], HEADS) if sample.row.heads is None else sample.row.heads
                    left = rng.integers(np.minimum(held, 6), held + 1)
                sample.compact(None, left)
            self.rows[row] = self.pages(sample)
        self.check()


class FakeSwapped:
    """A row in host memory; `is_shared` marks the entries that hold its prefix's pages."""

    def __init__(self, shares):
        self.is_shared = np.array([shares])


def new_sample(rng, index):
    """A random request; few prompts, so that many samples share a prefix."""
    prompt, policy = PROMPTS[rng.integers(len(PROMPTS))], POLICIES[rng.integers(len(POLICIES))]
    limit = int(rng.integers(1, 33))
    request = Request(prompt, policy, jkv.Sampling(), 0, 0, index, limit, ())
    most = policy.most_pages(len(prompt), limit, LAYERS, HEADS, PAGE)
    return Sample(0, index, request, Completion(), most)


def play(seed, num_turns, order="arrival"):
    """Random turns of one scheduler; returns counts of what happened."""
    rng = np.random.default_rng(seed)
    chunk = int(rng.choice(CHUNKS))
    capacity = Capacity(
        LAYERS, HEADS, PAGE, int(rng.integers(MOST_PAGES, 2 * MOST_PAGES)), int(rng.integers(1, 9)), chunk, order
    )
    scheduler = Scheduler(capacity)
    runner = FakeRunner(scheduler)
    samples, admitted, counts = [], [], {"preempted": 0, "forked": 0, "finished": 0, "idle": 0}
    for _ in range(num_turns):
        while len(scheduler.waiting) < 12 and rng.random() < 0.5:
            samples.append(new_sample(rng, len(samples)))
            scheduler.add(samples[-1])
        event = rng.random()
        if event < 0.01:  # new weights
            runner.free(scheduler.renew(scheduler.version + 1))
        elif event < 0.02:  # sleep
            runner.execute(scheduler.sleep())
            assert runner.held == 0
        elif event < 0.06 and scheduler.waiting:  # cancel a waiting or swapped-out sample
            sample = scheduler.waiting[int(rng.integers(len(scheduler.waiting)))][1]
            if not sample.is_finished:
                sample.completion.finish_reason = "cancelled"
                sample.row.swapped = None
                scheduler.finish(sample)
        elif event < 0.065:  # a device program has failed
            assert scheduler.restart(lambda sample: sample.restart(None, scheduler.version) is None) == []
            assert not scheduler.running
            runner.reset()
        if event < 0.1:
            check_totals(scheduler, samples)
        turn = scheduler.next()
        assert (turn.num_steps > 0) == bool(scheduler.running)
        assert scheduler.reserved <= capacity.num_pages
        for sample in turn.swap_out.values():
            assert not sample.request.policy.is_bounded, "a bounded sample was preempted"
            younger = [other for other in scheduler.running.values() if other.rank > sample.rank]
            assert all(other.request.policy.is_bounded for other in younger), "an older sample was preempted first"
        fresh = [sample for sample in turn.admit.values() if sample.generated == 0 and not sample.is_swapped]
        firsts = [sample.rank for sample in fresh if sample.completion.preemptions == 0]
        admitted += [rank for rank in firsts if rank not in admitted]  # after a reset for a second time
        counts["preempted"] += len(turn.swap_out)
        counts["forked"] += sum(sample.is_forking for sample in turn.admit.values())
        runner.execute(turn)
        assert runner.held <= scheduler.reserved, "rows and prefixes hold more than they reserved"
        runner.decode(rng, turn.num_steps)
        counts["idle"] += not scheduler.running
    while scheduler.running or scheduler.waiting:
        runner.execute(scheduler.next())
        runner.decode(rng, CHUNKS[0] if not scheduler.running else scheduler._num_steps())
    rows, prefixes = scheduler.release()
    runner.release(rows)
    runner.free(prefixes)
    assert not runner.rows
    assert not runner.prefixes
    assert not scheduler.prefixes
    assert scheduler.reserved == 0
    assert all(sample.is_finished for sample in samples)
    counts["finished"] = len(samples)
    return counts, admitted


def check_totals(scheduler, samples):
    """What is kept up to date, so that no turn goes through the queue, is what going through it would give."""
    unfinished = [sample for sample in samples if not sample.is_finished]
    waiting = [sample for sample in unfinished if not sample.is_running]
    assert set(waiting) <= {sample for _, sample in scheduler.waiting}
    assert set(scheduler.parked) == {sample for sample in waiting if sample.is_swapped}
    prefixes = set(scheduler.prefixes.values())
    assert {sample.prefix for sample in unfinished} <= prefixes
    for prefix in prefixes:
        assert prefix.fresh == {sample for sample in prefix.samples if sample.is_fresh}
        assert prefix.readers == {sample for sample in prefix.samples if sample.reads_prefix}
        assert prefix.absent == {sample for sample in prefix.samples if sample.is_swapped}
        assert not prefix.is_held or prefix in scheduler.started
        assert prefix.key[0] in (None, *range(scheduler.version))
        assert prefix.row.snapshot is None or all(sample.prefix is prefix for sample in prefix.samples)
    assert {sample for prefix in prefixes for sample in prefix.fresh} == {sample for sample in waiting if sample.is_fresh}
    assert set(scheduler.started) <= prefixes


def check(num_turns, num_schedulers):
    total = {}
    for seed in range(num_schedulers):
        counts, _ = play(seed, num_turns // num_schedulers, order=("arrival", "longest")[seed % 2])
        total = {name: total.get(name, 0) + count for name, count in counts.items()}
    assert total["preempted"] > num_turns / 50
    assert total["forked"] > num_turns / 100
    assert total["finished"] > num_turns / 10


@pytest.mark.parametrize(("num_turns", "num_schedulers"), [(6_000, 12), pytest.param(1_000_000, 100, marks=pytest.mark.slow)])
def test_random_turns_never_exceed_the_pool_and_lose_no_page_and_no_sample(num_turns, num_schedulers):
    check(num_turns=num_turns, num_schedulers=num_schedulers)


def test_samples_are_admitted_in_order_of_arrival():
    for seed in range(4):
        _, admitted = play(seed, 300)
        assert admitted == sorted(admitted)
