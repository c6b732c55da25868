"""A chunk of decode steps that is dispatched, and what the host reads of it."""

import dataclasses
from typing import Any

from jkv.engine.samples import Prefix, RowOutputs, Sample


@dataclasses.dataclass
class Flight:
    """A chunk that is dispatched and not read yet.

    Attributes:
      rows: the samples that it decodes, by row.
      outputs: a `ChunkOutputs` on the device.
      num_steps: its decode steps.
      version: of the weights that run it.
      scores: the kinds of scores (`Evict.kinds`) of compactions before it: whose they are, and the counts on the device.
      compactions: those dispatched after it before it was read: the sample and what `Runner._compact_row` returned.
    """

    rows: dict[int, Sample]
    outputs: Any
    num_steps: int
    version: int
    scores: list[tuple[Sample | Prefix, Any]]
    compactions: list[tuple[Sample, Any, Any, Any]] = dataclasses.field(default_factory=list)

    def by_row(self, outputs: Any) -> dict[int, RowOutputs]:
        """The outputs, on the host, of each row that is not finished."""
        log_prob_full = outputs.log_prob if outputs.log_prob_full is None else outputs.log_prob_full
        log_prob_own = outputs.log_prob if outputs.log_prob_own is None else outputs.log_prob_own  # where it was asked for
        counts = outputs.is_real.sum(axis=0)

        def row(i: int) -> RowOutputs:
            tokens, log_probs, full = (x[: counts[i], i].tolist() for x in (outputs.token, outputs.log_prob, log_prob_full))
            dropped, is_read = (None if x is None else x[: counts[i], :, i] for x in (outputs.dropped, outputs.is_read))
            by_step = outputs.steered, outputs.hidden, outputs.experts
            steered, hidden, experts = (None if x is None else x[: counts[i], i] for x in by_step)
            goes_on = bool(outputs.is_running[i])
            own = log_prob_own[: counts[i], i].tolist()
            return RowOutputs(tokens, log_probs, full, goes_on, dropped, is_read, steered, hidden, experts, own)

        return {i: row(i) for i, sample in self.rows.items() if not sample.is_finished}


def alive_after(last: Flight | None, at_first: Any) -> Any:
    """Which rows go on after a chunk that may not be read yet, on the device: [B]; `at_first` where none is in flight."""
    return at_first if last is None else last.outputs.is_running
