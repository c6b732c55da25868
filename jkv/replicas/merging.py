"""The statistics of several engines as one."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.engine.histograms import Latency
from jkv.engine.stats import RunStats

SIDE_BY_SIDE = ("seconds", "decode_seconds", "prefill_seconds", "swap_seconds", "compile_seconds")  # the longest counts
MEANS = {"amsr": "steps", "kv_bytes_per_sample": "sample_chunks"}  # and what weighs them
ALIKE = ("platform", "page_size")


def merged_stats(runs: Sequence[RunStats]) -> RunStats:
    """The statistics of engines that run side by side: bytes and counts are summed, of seconds the most is taken."""
    if not runs:
        return RunStats()
    out = copy.deepcopy(runs[0])
    for name in (field.name for field in dataclasses.fields(RunStats) if field.name not in ALIKE):
        values = [getattr(run, name) for run in runs]
        if name in SIDE_BY_SIDE:
            setattr(out, name, max(values))
        elif name in MEANS:
            weights = [getattr(run, MEANS[name]) for run in runs]
            setattr(out, name, float(np.dot(values, weights)) / max(sum(weights), 1))
        elif isinstance(values[0], int | float):
            setattr(out, name, sum(values))
        elif isinstance(values[0], Latency):
            getattr(out, name).counts = np.sum([latency.counts for latency in values], axis=0)
    out.idle.seconds, out.idle.between = (max(getattr(run.idle, name) for run in runs) for name in ("seconds", "between"))
    for run in runs[1:]:
        add_counts(out.sharing, run.sharing)
    return out


def add_counts(total: Any, other: Any) -> None:
    """Adds the numbers of a record to another record of its kind, also in records inside; thresholds stay the first's."""
    for field in dataclasses.fields(total):
        mine, theirs = getattr(total, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(mine):
            add_counts(mine, theirs)
        elif isinstance(mine, int | float):
            setattr(total, field.name, mine + theirs)
