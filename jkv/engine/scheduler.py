"""Decides which samples run, which wait, and how many decode steps the next chunk has: host arithmetic, no device, no model.

For every step of the engine, `Scheduler.next` returns `Actions` for the runner to execute. The pool never runs out of pages
under a running row:

- A bounded sample reserves at admission the most pages that it will ever hold. It is never preempted.
- An unbounded sample reserves what it may hold after the next chunk. When the reservations exceed the pool, the unbounded
  sample of the highest rank is preempted, usually the youngest: its row is swapped out to host memory, and swapped in again,
  bit for bit, when it fits.
- Samples of one prompt share one prefill: a prefix, which reserves its own pages as long as a sample needs them. An idle prefix
  (no running row reads it) is freed before a sample is preempted.
- Pages of the prefix cache that no row counts as its own are evicted before that, the least recently used first.
- Rows that are kept between turns reserve their pages too; they are swapped out after that, and before a sample is preempted.
- Samples are admitted in the order of their ranks, and none overtakes the first that waits: the lowest priority first, and
  within a priority clients take turns (`jkv.engine.rounds`). Every sample fits an empty pool; others were refused.

A step costs the same however many samples wait: it looks at the first of them, at running rows, and at prefixes and rows that
have started (`started`, `parked`), never at the whole queue.

A chunk ends no later than the next step after which one of its rows may be compacted, and rows are admitted only between
chunks. So a row's compactions never depend on the other rows. It has one step while the host follows a row's form.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jkv.cache.pool import num_pages_of
from jkv.engine.faults import Search, working_for
from jkv.engine.kept_rows import KeptRows
from jkv.engine.memory import STEP_PIECE
from jkv.engine.prefix_cache import PrefixCache, can_reuse, reserve
from jkv.engine.rounds import Rounds
from jkv.engine.row import Place
from jkv.engine.samples import Prefix, Rank, Sample, keeps_prefix, pieces_in_use
from jkv.reasoning.sentences import SentenceLog

CHUNKS = (16, 8, 4, 2, 1)  # decode steps of a chunk
ORDERS = ("arrival", "longest")


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The sizes of an engine.

    Attributes:
      num_layers: L.
      num_kv_heads: K.
      page_size: slots of a page.
      num_pages: pages of the pool.
      max_running: rows.
      chunk: the most decode steps of a chunk.
      order: whom to admit first: "arrival", or "longest" (prompt and limit).
      num_shards: pools of a mesh, each with an equal part of the KV heads and pages.
    """

    num_layers: int
    num_kv_heads: int
    page_size: int
    num_pages: int
    max_running: int
    chunk: int = CHUNKS[0]
    order: str = "arrival"
    num_shards: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """What the number of a row's pages depends on: K, slots of a page, pools."""
        return self.num_kv_heads, self.page_size, self.num_shards

    @property
    def page_sizes(self) -> dict[str, int]:
        """Slots of a page and pools, by the names that checks of a request take."""
        return {"page_size": self.page_size, "num_shards": self.num_shards}


class Actions(NamedTuple):
    """The runner's next actions, in this order; then it decodes a chunk."""

    release: list[int]  # rows of finished samples, whose pages become free
    swap_out: dict[int, Sample]  # rows that go to host memory
    free: list[Prefix]  # prefixes whose pages become free
    admit: dict[int, Sample]  # samples that get a row
    num_steps: int  # decode steps of the chunk; 0 where no row runs


class Scheduler:
    """Assigns rows and pages to samples.

    Attributes:
      running: samples by batch row.
      waiting: a heap of (rank, sample); samples that are finished, or run already, are removed when they reach its top.
      parked: the waiting samples that have started: swapped out, or a later turn of a conversation.
      prefixes: prompts that unfinished samples start from, by key.
      started: the prefixes that have pages, in the pool or in host memory; few, unlike `prefixes`.
      versions: of the weights in use, by the adapter of the requests that use them, which is empty for none; prefixes of other
        weights are not shared.
      prefix_cache: which prompts stay in the pool after their samples.
      kept_rows: rows that are kept between turns.
      search: looks for a sample that makes steps fail, if they do.
      held: samples that wait for it, outside of the queue.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity, self.prefix_cache, self.kept_rows = capacity, PrefixCache(), KeptRows()
        self.running: dict[int, Sample] = {}
        self.waiting: list[tuple[Rank, Sample]] = []
        self.parked: dict[Sample, None] = {}
        self.search, self.held = Search(capacity.chunk), list[Sample]()
        self.prefixes: dict[object, Prefix] = {}
        self.started: dict[Prefix, None] = {}
        self.versions = {"": 0}
        self._num_added, self._rounds = 0, collections.defaultdict[int, Rounds](Rounds)  # of each priority
        self._freed: list[Prefix] = []  # since `next` or `release` was last called
        self._leaving: list[Prefix] = []  # those that were returned, until the runner has freed their pages

    @property
    def version(self) -> int:
        """The version of the model's own weights."""
        return self.versions[""]

    def add(self, sample: Sample) -> None:
        """Queues a sample."""
        request = sample.request
        of_length = -request.most_tokens if self.capacity.order == "longest" else 0
        number = self._rounds[request.priority].add(request.client, sample.ticket)
        sample.rank = Rank(request.priority, of_length, number, self._num_added)
        self._num_added += 1
        self._enter(sample)
        heapq.heappush(self.waiting, (sample.rank, sample))

    def passed(self) -> None:
        """A step has not failed: whoever the search held for it waits in the queue again."""
        if self.search.passed():
            self._queue_held()

    def _queue_held(self) -> None:
        for sample in self.held:
            heapq.heappush(self.waiting, (sample.rank, sample))
        self.held.clear()

    def _enter(self, sample: Sample) -> None:
        """Writes a sample that waits into the records other than the queue."""
        self._attach_prefix(sample)
        if sample.is_swapped or sample.request.num_kept:
            self.parked[sample] = None

    def next(self) -> Actions:
        """The actions of the next step."""
        release, freed = self.release()
        admit = self._admit()
        swap_out = self._make_room()
        freed += self._take_freed()
        if self.prefix_cache.piece:
            self.prefix_cache.spare = self._spare_pages(admit.values())
        return Actions(release, swap_out, freed, admit, self._num_steps())

    def goes_on(self, rows: Mapping[int, Sample]) -> bool:
        """Whether the next step decodes rows of the last chunk and does nothing else, whatever tokens that drew."""
        has_free_row = len(self.running) < self.capacity.max_running
        samples = self.running.values()
        rows_stay = all(not sample.is_finished and not sample.is_filling and sample.remaining > 0 for sample in samples)
        return (
            bool(self.running)
            and self.running.items() <= rows.items()
            and rows_stay
            and not (self.waiting and has_free_row)
            and self.reserved <= self.capacity.num_pages
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether any sample runs or waits; cancelled ones may still be queued."""
        waiting = itertools.chain(self.held, (sample for _, sample in self.waiting))
        return bool(self.running) or any(not sample.is_finished for sample in waiting)

    @property
    def sentence_logs(self) -> list[SentenceLog]:
        """The sentences of every sample and prefix, in host memory; none that waits to start has any."""
        rows = [sample.row for sample in (*self.running.values(), *self.parked)] + [prefix.row for prefix in self.started]
        return [row.records.sentences for row in rows if row.records and row.records.sentences]

    def release(self) -> tuple[list[int], list[Prefix]]:
        """Releases the rows of finished samples; returns these rows, and the prefixes to free since the last call.

        Rows that are kept for a next turn are not among them: they are to be detached.
        """
        rows, released = [row for row, sample in self.running.items() if sample.is_finished and not sample.is_filling], []
        for row in rows:
            sample = self.running.pop(row)
            sample.row.place = Place.NOWHERE
            self._detach_prefix(sample)
            if not self.kept_rows.detach(row, sample.ticket, sample.index):
                released.append(row)
        return released, self._take_freed()

    def finish(self, sample: Sample) -> None:
        """Records that a sample has finished. If it runs, the next `release` frees its row."""
        rounds = self._rounds[sample.rank.priority]
        rounds.finished(sample.request.client)
        if rounds.are_over:
            del self._rounds[sample.rank.priority]
        if sample.row.place is Place.HOST:
            sample.row.place = Place.NOWHERE
        self.parked.pop(sample, None)
        if not sample.is_running:
            self._detach_prefix(sample)

    def sleep(self) -> Actions:
        """Swaps out every row, the highest rank first, and frees every prefix."""
        release, freed = self.release()
        rows = sorted(self.running, key=lambda row: self.running[row].rank, reverse=True)
        swap_out = {row: self._preempt(row) for row in rows}
        for prefix in list(self.started):
            if prefix.is_held:
                self._free(prefix)
        self.prefix_cache.evict_all()
        while self.kept_rows.swap_out():
            pass
        return Actions(release, swap_out, freed + self._take_freed(), {}, 0)

    def restart(self, restart: Callable[[Sample], bool]) -> list[Sample]:
        """Forgets rows and what prefixes have in the pool, and queues what had started again; for an empty pool.

        What waits and has not started stays where it is. `restart` makes a sample ready, or returns False; then it is lost, and
        is among those that are returned.
        """
        had_rows = set(self.running.values())
        samples = [*self.running.values(), *(sample for sample in self.parked if sample not in had_rows)]
        self.running.clear()
        self._queue_held()
        self.parked.clear()
        for sample in samples:
            self._detach_prefix(sample)
        for prefix in (*self.started, *self._freed, *self._leaving):
            prefix.forget()
        self.started.clear()
        self._freed.clear()
        self._leaving.clear()
        self.prefix_cache.forget()
        self.kept_rows.lose()
        unfinished = [sample for sample in samples if not sample.is_finished]
        lost = [sample for sample in unfinished if not restart(sample)]
        for sample in unfinished:
            if sample in lost:
                continue
            self._enter(sample)
            if sample in had_rows:
                heapq.heappush(self.waiting, (sample.rank, sample))
        return lost

    def clear_prefix_cache(self) -> None:
        """Clears the prefix cache: no later prompt starts from its pieces. Pieces in use leave it later."""
        self.prefix_cache.clear(pieces_in_use(self.running))

    def renew(self, version: int, adapter: str | None = None) -> list[Prefix]:
        """Detaches samples that have not started from what older weights prefilled; returns the prefixes to free.

        Only requests of `adapter` have other weights now; None means all requests. The prefix cache then evicts all pieces,
        except pieces that running rows count as their own prompts'. No later prompt matches these, nor pieces of an older
        version of an adapter.
        """
        if adapter is None:
            self.prefix_cache.evict_all(pieces_in_use(self.running))
        is_old = [one for one in self.started if one.key[0] is None and adapter in (None, one.adapter)]
        for prefix in is_old:
            old = prefix.leave()
            old.key = self.versions[prefix.adapter], *prefix.key[1:]
            for sample in old.samples:
                sample.prefix = old
            del self.started[prefix]
            self.started[old] = None
            self.prefixes[old.key] = old
            for one in (prefix, old):
                self._let_go(one)
        self.versions.update(dict.fromkeys(self.versions if adapter is None else (adapter,), version))
        return self._take_freed()

    @property
    def reserved(self) -> int:
        """Pages that running samples, kept rows and prefixes have reserved, and pages of the prefix cache."""
        prefixes = sum(prefix.row.num_pages for prefix in self.started if prefix.is_held)
        total = prefixes + (self.prefix_cache.num_pages if self.prefix_cache.piece else 0)
        total += self.kept_rows.num_pages if self.kept_rows.held else 0
        most = 0
        for sample in sorted(self.running.values(), key=lambda sample: sample.is_filling):  # filled rows, then the others
            total += self._reservation(sample, sample.reads_prefix)
            most = max(most, total + sample.num_passing * sample.is_filling)
        return max(total, most)

    # Admission and preemption.

    def _admit(self) -> dict[int, Sample]:
        """Gives free rows to waiting samples, in order, as long as they fit."""
        free_rows = [row for row in range(self.capacity.max_running) if row not in self.running]
        admitted = {}
        while free_rows and self.waiting:
            sample = self.waiting[0][1]
            if not (sample.is_finished or sample.is_running):
                if not self.search.may_run(sample):
                    if self.search.is_complete:
                        break
                    self.held.append(heapq.heappop(self.waiting)[1])
                    continue
                with working_for([sample]):  # its policy answers
                    fits = self._can_admit(sample)
                if not fits:
                    break
                sample.row.place = Place.BATCH
                self._rounds[sample.rank.priority].admitted(sample.rank.round)
                self.kept_rows.attach(sample.resumes)
                row = free_rows.pop(0)
                admitted[row] = self.running[row] = sample
                self.parked.pop(sample, None)
                sample.prefix.sort(sample)
            heapq.heappop(self.waiting)
        assert self.running or not self.waiting or self.search.is_on, "a sample that fits an empty pool was not admitted"
        return admitted

    def _can_admit(self, sample: Sample) -> bool:
        """Whether a waiting sample fits, once idle pages are freed; decides whether it shares its own prefix."""
        prefix = sample.prefix
        if sample.row.filled is None:
            sample.row.filled = sample.request.first_slots(self.capacity.num_layers)
        if sample.row.swapped is None:
            may_share = not sample.pending and (prefix.is_held or len(prefix.fresh) > 1)
            self._find_pieces(sample)
        else:
            may_share = prefix.is_held and bool(sample.row.swapped.is_shared.any())
        for reads_prefix in (True, False) if may_share else (False,):
            sample.num_shared_pieces = 0
            if sample.row.swapped is None:
                reserve(self.prefix_cache, sample, counts_once=not reads_prefix)
            own = self.kept_rows.pages_of(sample.resumes)
            lasting, passing = self._needed(sample, reads_prefix)
            needed, kept = lasting + passing - own, prefix if reads_prefix else None
            in_use = pieces_in_use(self.running).union(sample.pieces[: sample.num_shared_pieces])
            idle = self.prefix_cache.num_free(in_use) * self.prefix_cache.pages_of_piece
            idle += self.kept_rows.num_pages - own
            idle += sum(one.row.num_pages for one in self.started if one.is_idle and one is not kept)
            if self.reserved + needed - idle <= self.capacity.num_pages:
                while self.reserved + needed > self.capacity.num_pages:
                    is_freed = self._free_idle(sample, kept)
                    assert is_freed, "pages counted as idle cannot be freed"
                sample.reads_prefix, sample.num_passing = reads_prefix, passing
                if reads_prefix:
                    prefix.row.place = Place.POOL
                    self.started[prefix] = None
                return True
        sample.num_shared_pieces = 0
        return False

    def _needed(self, sample: Sample, reads_prefix: bool) -> tuple[int, int]:
        """Pages that admission of a sample takes, with its prefix's if that is not in the pool, and more until it is filled."""
        prefix, request = sample.prefix, sample.request
        needed = self._reservation(sample, reads_prefix)
        if reads_prefix and not prefix.is_held:
            heads, page_size, num_shards = self.capacity.sizes
            prefix.row.filled = request.first_slots(self.capacity.num_layers)
            prefix.row.num_pages = request.policy.num_pages(prefix.row.filled, heads, page_size, num_shards)
            prefix.num_full_pages = request.policy.num_full_pages(prefix.row.filled, heads, page_size)
            needed += prefix.row.num_pages
        if sample.row.swapped is not None or (reads_prefix and prefix.is_held):
            return needed, 0
        shared = sample.num_shared_pieces * self.prefix_cache.pages_of_piece
        return needed, max(0, prefill_pages(sample, self.capacity) - shared - needed)

    def _make_room(self) -> dict[int, Sample]:
        """Preempts the unbounded samples of the highest rank until the next chunk fits the pool."""
        preempted = {}
        while self.reserved > self.capacity.num_pages:
            if self._free_idle():
                continue
            filled = {row: sample for row, sample in self.running.items() if not sample.is_filling}
            unbounded = [row for row, sample in filled.items() if not sample.request.policy.is_bounded]
            last = max(unbounded, key=lambda row: self.running[row].rank)
            self.running[last].completion.preemptions += 1
            preempted[last] = self._preempt(last)
        return preempted

    def _preempt(self, row: int) -> Sample:
        """Takes a sample's row, and queues it to be swapped in again."""
        sample = self.running[row]
        heapq.heappush(self.waiting, (sample.rank, sample))
        self.parked[sample] = None
        del self.running[row]
        sample.row.place, sample.reads_prefix, sample.num_shared_pieces = Place.HOST, False, 0
        sample.prefix.sort(sample)
        return sample

    def _reservation(self, sample: Sample, reads_prefix: bool) -> int:
        """Pages that a running sample may hold after the next chunk, without shared pages of its prefix or the prefix cache."""
        policy, capacity = sample.request.policy, self.capacity
        cached = sample.num_shared_pieces * self.prefix_cache.pages_of_piece
        if policy.is_bounded:
            return sample.most_pages - cached
        growth = sample.pending + policy.most_growth(min(capacity.chunk, sample.remaining), capacity.page_size)
        held = min(sample.num_pages(growth, *capacity.sizes), sample.most_pages)
        return held - cached - (sample.prefix.num_full_pages if reads_prefix and keeps_prefix(policy) else 0)

    def _num_steps(self) -> int:
        """Steps of the next chunk, which must not pass a row's next compaction."""
        if not self.running:
            return 0
        samples = self.running.values()  # their new tokens are prefilled before the chunk
        if any(sample.request.form_on_host for sample in samples):
            return 1  # the next token must be read before the mask of the one after it is made
        due = (sample.request.policy.steps_until_due(sample.clock + sample.pending) for sample in samples)
        limit = min((steps for steps in due if steps), default=self.capacity.chunk)
        return next(steps for steps in CHUNKS if steps <= min(limit, self.capacity.chunk))

    def _spare_pages(self, admitted: Iterable[Sample]) -> int:
        """Pages that nobody has reserved, nor takes while a prompt is prefilled and compacted; for the prefix cache."""
        fresh = [sample for sample in admitted if sample.row.swapped is None]
        more = (prefill_pages(sample, self.capacity) - self._reservation(sample, sample.reads_prefix) for sample in fresh)
        return self.capacity.num_pages - self.reserved - max(0, max(more, default=0))

    # Prefixes.

    def _attach_prefix(self, sample: Sample) -> None:
        """Attaches a sample to the prefix of its prompt under the weights in use."""
        if sample.request.num_kept:  # it starts from its own row
            return
        request = sample.request
        reuses = bool(self.prefix_cache.piece) and not request.num_before and can_reuse(request.policy)
        key = None, request.prefix, reuses  # a row that needs all of its prefill forks from none that skipped some
        sample.prefix = self.prefixes.setdefault(key, Prefix(key))
        sample.prefix.samples.add(sample)
        sample.prefix.sort(sample)

    def _find_pieces(self, sample: Sample) -> None:
        """The keys of a sample's prompt in the prefix cache, under the weights in use."""
        request = sample.request
        version = self.versions[request.adapter]
        if sample.prefix.reuses and sample.pieces_version != (version, self.prefix_cache.num_clears):
            sample.pieces = self.prefix_cache.keys_of(request.prompt, request.cache_salt, version, request.adapter)
            sample.pieces_version = version, self.prefix_cache.num_clears

    def _detach_prefix(self, sample: Sample) -> None:
        """Detaches a sample from its prefix, which is freed if no other sample needs it."""
        prefix = sample.prefix
        prefix.samples.discard(sample)
        sample.reads_prefix = False
        prefix.sort(sample)
        self._let_go(prefix)

    def _let_go(self, prefix: Prefix) -> None:
        """Frees a prefix that no sample needs, and forgets one that has none."""
        if prefix.is_held and not prefix.is_needed:
            self._free(prefix)
        if not prefix.samples:
            self.started.pop(prefix, None)
            self.prefixes.pop(prefix.key, None)

    def _free_idle(self, sample: Sample | None = None, other_than: Prefix | None = None) -> bool:
        """Frees pages that neither a running row nor `sample` needs: of the prefix cache, else of a prefix or a kept row."""
        own = () if sample is None else sample.pieces[: sample.num_shared_pieces]
        if self.prefix_cache.evict(pieces_in_use(self.running).union(own)):
            return True
        idle = next((prefix for prefix in self.started if prefix.is_idle and prefix is not other_than), None)
        if idle is not None:
            self._free(idle)
            return True
        return self.kept_rows.swap_out(None if sample is None else sample.resumes)

    def _free(self, prefix: Prefix) -> None:
        prefix.leave_pool()
        if not prefix.absent:
            self.started.pop(prefix, None)
        self._freed.append(prefix)

    def _take_freed(self) -> list[Prefix]:
        freed, self._freed = self._freed, []
        self._leaving = [prefix for prefix in (*self._leaving, *freed) if prefix.row.snapshot]
        return freed


def prefill_pages(sample: Sample, capacity: Capacity) -> int:
    """Pages that prefill takes before a compaction: of a prompt, or of pieces after it whose reservation has too few."""
    request, first = sample.request, 0
    policy = request.policy
    if not request.num_kept:
        first = capacity.num_layers * capacity.num_kv_heads * num_pages_of(request.first_prompt, capacity.page_size)
    if not (request.num_before and policy.evicts_in_steps):
        return first
    slots = np.minimum(sample.row.filled + sample.pending, policy.layer_budgets(capacity.num_layers) + 1 + STEP_PIECE)
    return max(first, policy.num_pages(slots, *capacity.sizes))
