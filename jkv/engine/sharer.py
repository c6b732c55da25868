"""Sharing for all rows of an engine: looks for repeated steps while the device decodes, has pages measured, and decides.

The measuring program is queued behind the chunk in progress, so the device goes on from one to the other, and the host has the
distances when it has the chunk's tokens.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.engine.programs import State
from jkv.engine.samples import Sample
from jkv.engine.timing import clock
from jkv.model.decoder import rotary_frequency
from jkv.model.params import Model
from jkv.reasoning.sharing import Pair, Sharing, SharingStats, Threshold, distances

NUM_PAIRS = 64  # pairs of pages that one program measures


@dataclasses.dataclass
class Row:
    """A row that decides after the chunk in progress, and the pages measured for it."""

    index: int
    sample: Sample
    sharing: Sharing
    pairs: list[Pair]


class Sharer:
    """What sharing knows about an engine: thresholds, and what is being measured."""

    def __init__(self, programs: Any, model: Model, page_size: int, num_rows: int, max_pages: int) -> None:
        self.programs = programs  # the engine's: `jkv.engine.programs`, or those of a mesh
        self.page_size, self.num_rows, self.max_pages = page_size, num_rows, max_pages
        self.stats = SharingStats()  # the engine's
        self.failed: list[tuple[Sample, Exception]] = []  # whose stage 1 raised, in the chunk in progress
        self.renew(model)
        self._rows: list[Row] = []
        self._squares: list[tuple[int, Any]] = []  # programs that measure, and how many pairs are real

    def renew(self, model: Model) -> None:
        """Goes on with other weights."""
        self.model = model
        self._embedding = functools.cache(lambda: np.asarray(model.params.embedding, np.float32))

    def start(self, sample: Sample) -> None:
        """Begins a row whose policy shares, its prompt in the pool and not yet compressed."""
        share, request = sample.request.policy.share, sample.request
        if share is None:
            return
        identity = request.identity, request.sample
        sample.sharing = Sharing(share, self.model, request.prompt, self.page_size, self.stats, self._embedding, identity)
        sample.sharing.is_over = bool((sample.filled < len(request.prompt)).any())

    def look(self, running: Mapping[int, Sample], state: State, num_steps: int, outputs: Any) -> None:
        """While a chunk of `num_steps` runs: looks at the tokens before it, and has pages measured that are decided on after.

        `state` is the one that the chunk will leave, `emitted` what it will tell.
        """
        self._rows, self.failed = [], []
        with clock(self.stats, "filter_seconds"):
            for i, sample in running.items():
                sharing = sample.sharing
                if sharing is None or sharing.is_over:
                    continue
                now = sample.generated + num_steps
                try:
                    sharing.find_similar()
                except Exception as error:  # an encoder of the caller's; the engine ends this sample when the chunk is in
                    self.failed.append((sample, error))
                    continue
                pairs = [] if now % sharing.share.interval else sharing.candidates(now)
                if pairs:
                    self._rows.append(Row(i, sample, sharing, pairs))
        self.stats.filter_waits += bool(outputs.token.is_ready())
        self._squares = []
        rows = [row for row in self._rows if row.sharing.share.random is None]
        for is_raw in (False, True):  # two programs: with and without a turn
            self._measure(state, [row for row in rows if (row.sharing.share.compare_on == "raw") == is_raw], is_raw)

    def _measure(self, state: State, rows: list[Row], is_raw: bool) -> None:
        """Queues the programs that measure some rows' pairs."""
        numbers = []
        for row in rows:
            layout = row.sharing.layout
            place = {page: entry for entry, page in enumerate(layout.table)}
            for pair in row.pairs:
                shift = layout.first[pair.page] - layout.first[pair.kept]
                numbers.append((row.index, place[pair.page], place[pair.kept], layout.count[pair.page], shift))
        for start in range(0, len(numbers), NUM_PAIRS):
            some = np.asarray(numbers[start : start + NUM_PAIRS], np.int32)
            index, first, second, count, shifts = np.pad(some, [(0, NUM_PAIRS - len(some)), (0, 0)]).T
            angle = shifts[:, None] * self._frequency if is_raw else None
            self._squares.append((len(some), self.programs.measure_pages(state, index, first, second, count, angle)))

    @functools.cached_property
    def _frequency(self) -> np.ndarray:
        """Radians per position of each rotating pair of channels."""
        return np.asarray(rotary_frequency(self.model.config))

    def decide(self, state: State) -> State:
        """The state after what was measured, and is near enough, is shared; samples and their traces follow."""
        if not self._rows:
            return state
        kept: list[tuple[int, np.ndarray, np.ndarray]] = []
        with clock(self.stats, "measure_seconds"):
            none = np.zeros((0, self.model.config.num_layers, 2, 3), np.float32)
            squares, start = np.concatenate([none, *(np.asarray(block)[:count] for count, block in self._squares)]), 0
            # As they were measured: those at random not at all, those of raw keys last.
            for row in sorted(self._rows, key=lambda row: row.sharing.share.compare_on == "raw"):
                count = len(row.pairs) if row.sharing.share.random is None else 0
                mine, start = squares[start : start + count], start + count
                if not row.sample.is_finished:
                    kept += self._decide_row(row, mine)
        self._rows, self._squares = [], []
        if not kept:
            return state
        row_index = np.full(self.num_rows, self.num_rows, np.int32)
        entries, log_weight = np.zeros((2, self.num_rows, self.max_pages))
        for j, (i, order, weight) in enumerate(kept):
            row_index[j], entries[j], log_weight[j] = i, order, weight
        return self.programs.take_pages(state, row_index, entries.astype(np.int32), log_weight.astype(np.float32))

    def _decide_row(self, row: Row, squares: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """One row's decision: which entries of its table stay, and for how many each stands; nothing if all stay."""
        stats, sharing, layout = self.stats, row.sharing, row.sharing.layout
        before = list(layout.table)
        if sharing.share.random is not None:
            shared = sharing.decide_at_random(row.pairs)
        else:
            threshold = stats.thresholds.setdefault(sharing.share, Threshold(sharing.share))
            known, num_tokens = threshold.value, np.array([layout.count[pair.page] for pair in row.pairs])
            distance, relative = distances(sharing.share, squares, num_tokens, self.model.config.num_kv_heads)
            threshold.observe(distance.tolist(), relative.tolist())
            stats.candidates += len(row.pairs)
            if known is None:
                return []
            stats.judged += len(row.pairs)
            shared = sharing.decide(row.pairs, distance, relative, known)
        if not shared:
            return []
        stats.shared += len(shared)
        row.sample.share(shared)
        return [(row.index, *sharing.entries(before, self.max_pages))]
