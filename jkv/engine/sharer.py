"""Page sharing for all rows of an engine: finds repeated thoughts while the device decodes, measures their pages, and decides.

The measuring program is queued behind the chunk in progress: the device runs one after the other without a gap, and the host
gets the distances with the chunk's tokens.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.engine.clocks import clock
from jkv.engine.faults import blame
from jkv.engine.samples import Sample
from jkv.engine.state import State
from jkv.model.params import Model
from jkv.model.rotary import rotary_frequency
from jkv.reasoning.sharing import Pair, Sharing, SharingStats, Threshold, distances

NUM_PAIRS = 64  # pairs of pages that one program measures


@dataclasses.dataclass
class SharingRow:
    """A row that decides after the chunk in progress, and the pages measured for it."""

    index: int
    sample: Sample
    sharing: Sharing
    pairs: list[Pair]


class Sharer:
    """Finds, measures and shares similar pages of all rows."""

    def __init__(self, programs: Any, model: Model, page_size: int, num_rows: int, max_pages: int) -> None:
        self.programs = programs  # the engine's: `jkv.engine.programs`, or a mesh's
        self.page_size, self.num_rows, self.max_pages = page_size, num_rows, max_pages
        self.stats = SharingStats()  # the engine's
        self.set_model(model)
        self.forget()

    def forget(self) -> None:
        """Forgets the chunk in progress."""
        self._rows: list[SharingRow] = []
        self._squares: list[tuple[int, Any]] = []  # number of pairs and squared distances of each measuring program

    def set_model(self, model: Model) -> None:
        """Replaces the weights."""
        self.model = model
        self._embedding = functools.cache(lambda: np.asarray(model.params.embedding, np.float32))

    def start(self, sample: Sample) -> None:
        """Starts to track a row whose policy shares pages, after prefill."""
        share, request = sample.request.policy.share, sample.request
        if share is None:
            return
        identity = request.identity, request.sample
        sample.sharing = Sharing(share, self.model, request.prompt, self.page_size, self.stats, self._embedding, identity)
        sample.sharing.is_over = bool((sample.row.filled < len(request.prompt)).any())

    def find_pairs(self, running: Mapping[int, Sample], state: State, num_steps: int, outputs: Any) -> None:
        """While a chunk of `num_steps` runs, finds candidates in the tokens before it, and queues their measurement.

        `state` and `outputs` are the results of the chunk, which is still running.
        """
        self.forget()
        with clock(self.stats, "filter_seconds"):
            for i, sample in running.items():
                sharing = sample.sharing
                if sharing is None or sharing.is_over:
                    continue
                now = sample.generated + num_steps
                pairs: list[Pair] = []
                with blame(sample):  # a caller's encoder, for example
                    sharing.find_similar()
                    pairs = [] if now % sharing.share.interval else sharing.candidates(now)
                if pairs:
                    self._rows.append(SharingRow(i, sample, sharing, pairs))
        self.stats.filter_waits += bool(outputs.token.is_ready())
        rows = [row for row in self._rows if row.sharing.share.random is None]
        for is_raw in (False, True):  # two programs: with and without rotation to a common position
            self._measure(state, [row for row in rows if (row.sharing.share.compare_on == "raw") == is_raw], is_raw)

    def _measure(self, state: State, rows: list[SharingRow], is_raw: bool) -> None:
        """Queues the programs that measure the pairs of `rows`."""
        pair_inputs = []
        for row in rows:
            layout = row.sharing.layout
            place = {page: entry for entry, page in enumerate(layout.table)}
            for pair in row.pairs:
                shift = layout.first[pair.page] - layout.first[pair.kept]
                pair_inputs.append((row.index, place[pair.page], place[pair.kept], layout.count[pair.page], shift))
        for start in range(0, len(pair_inputs), NUM_PAIRS):
            block = np.asarray(pair_inputs[start : start + NUM_PAIRS], np.int32)
            index, first, second, count, shifts = np.pad(block, [(0, NUM_PAIRS - len(block)), (0, 0)]).T
            angle = shifts[:, None] * self._frequency if is_raw else None
            measured = self.programs.measure_pages(
                state, index, first, second, count, angle, unrotated=self.model.config.unrotated
            )
            self._squares.append((len(block), measured))

    @functools.cached_property
    def _frequency(self) -> np.ndarray:
        """Radians per position of each rotated pair of channels."""
        return np.asarray(rotary_frequency(self.model.config))

    def decide(self, state: State) -> State:
        """Shares the measured pages that are near enough; returns the new state and updates samples and traces."""
        if not self._rows:
            return state
        kept: list[tuple[int, np.ndarray, np.ndarray]] = []
        with clock(self.stats, "measure_seconds"):
            none = np.zeros((0, self.model.config.num_paged_layers, 2, 3), np.float32)
            squares, start = np.concatenate([none, *(np.asarray(block)[:count] for count, block in self._squares)]), 0
            # In the order of measurement: rows that share at random have none, rows that compare raw keys come last.
            for row in sorted(self._rows, key=lambda row: row.sharing.share.compare_on == "raw"):
                count = len(row.pairs) if row.sharing.share.random is None else 0
                row_squares, start = squares[start : start + count], start + count
                if not row.sample.is_finished:
                    with blame(row.sample):
                        kept += self._decide_row(row, row_squares)
        self._rows, self._squares = [], []
        if not kept:
            return state
        row_index = np.full(self.num_rows, self.num_rows, np.int32)
        entries, log_weight = np.zeros((2, self.num_rows, self.max_pages))
        for j, (i, order, weight) in enumerate(kept):
            row_index[j], entries[j], log_weight[j] = i, order, weight
        return self.programs.take_pages(state, row_index, entries.astype(np.int32), log_weight.astype(np.float32))

    def _decide_row(self, row: SharingRow, squares: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """One row's decision: its index, the table entries that stay, and their log-multiplicities; empty if all stay."""
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
