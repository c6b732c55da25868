"""Prompts enter their rows piece by piece, between the chunks of the rows that decode, so that none of these waits for one.

A row's bits do not depend on it: prompts are cut into the same pieces at any pace, and one piece is one program of one row.
"""

from collections import deque
from collections.abc import Iterator, Mapping

from jkv.engine.faults import working_for
from jkv.engine.samples import Sample, Status

PIECES = 2  # of the largest size that are prefilled between two chunks by default, while rows decode
STEPS = 8  # the most decode steps of a chunk, while prompts wait

Pieces = Iterator[int]  # yields the tokens of each piece before it is dispatched


class Work:
    """Rows that start from one prompt.

    Attributes:
      rows: samples by row.
      pieces: what fills them.
      size: tokens of the next piece, which is not dispatched yet; 0 before the first.
    """

    def __init__(self, rows: Mapping[int, Sample], pieces: Pieces) -> None:
        self.rows, self.pieces, self.size = dict(rows), pieces, 0

    def go_on(self) -> bool:
        """Dispatches a piece; False when the rows are filled."""
        size = next(self.pieces, None)
        self.size = size or 0
        return size is not None


class Filling:
    """Prompts that are not in their rows yet, in the order of admission; one is filled at a time.

    Args:
      running: the scheduler's record of samples by row.
      prefill_tokens: the most tokens of prompts between two chunks.
      first_chunk: the most decode steps of a chunk in which a row draws its first token; None is as many as of others.

    Attributes:
      queue: the prompts; empty while every row decodes.
    """

    def __init__(self, running: Mapping[int, Sample], prefill_tokens: int, first_chunk: int | None = None) -> None:
        self.queue = deque[Work]()
        self._running, self._most, self._first = running, prefill_tokens, first_chunk

    def add(self, rows: Mapping[int, Sample], pieces: Pieces) -> None:
        """Queues a prompt."""
        self.queue.append(Work(rows, pieces))
        for sample in rows.values():
            sample.is_filling = True

    def run(self, *, to_end: bool = False) -> bool:
        """Dispatches as many pieces as may come between two chunks, or all; while no row decodes, at least until one may.

        Returns whether any rows are ready to decode that were not before.
        """
        done, is_any_ready, decodes = 0, False, self._decodes()
        self._drop_cancelled()
        while self.queue and (to_end or not (decodes or is_any_ready) or not done or done + self.queue[0].size <= self._most):
            work = self.queue[0]
            done += work.size
            with working_for(work.rows.values()):
                goes_on = work.go_on()
            if not goes_on:
                self._end(work)
                is_any_ready = True
        return is_any_ready

    def lowered(self, num_steps: int) -> int:
        """Steps of the next chunk: fewer, while prompts wait, or where a row has yet to draw its first token."""
        num_steps = min(num_steps, STEPS) if self.queue else num_steps
        if self._first is None:
            return num_steps
        draws_first = any(one.status is Status.RUNNING and not one.generated for one in self._running.values())
        return min(num_steps, self._first) if draws_first else num_steps

    def clear(self) -> None:
        """Forgets all prompts, whose rows are lost."""
        for work in list(self.queue):
            self._end(work)

    def _decodes(self) -> bool:
        return any(not (sample.is_filling or sample.is_finished) for sample in self._running.values())

    def _drop_cancelled(self) -> None:
        """Fills no rows whose samples have all ended, unless others start from their prompt."""
        for work in list(self.queue):
            samples = list(work.rows.values())
            prefix = samples[0].prefix
            readers = prefix.readers if samples[0].reads_prefix else samples
            if not all(sample.is_finished for sample in (*samples, *readers)):
                continue
            if samples[0].reads_prefix and (prefix.fresh or prefix.absent):
                continue
            self._end(work)
            if samples[0].reads_prefix and prefix.row.snapshot is None:
                prefix.leave_pool()  # what is filled of it goes with the rows

    def _end(self, work: Work) -> None:
        self.queue.remove(work)
        for sample in work.rows.values():
            sample.is_filling = False
