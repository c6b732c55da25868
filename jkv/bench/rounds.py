"""The timer of every benchmark: seconds without compiling, contenders in turns, and the median of several rounds."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jkv.engine.clocks import COMPILING
from jkv.model.sampling import Sampling

GREEDY = Sampling(temperature=0.0)  # whatever a model's makers say: the lengths are forced


@dataclasses.dataclass
class Seconds:
    """Wall time of a block without what it spent compiling, and that part; both are known when the block has ended."""

    running: float = 0.0
    compiling: float = 0.0


@contextlib.contextmanager
def timer() -> Iterator[Seconds]:
    """Times a block.

    >>> with timer() as seconds:
    ...     time.sleep(0.01)
    >>> seconds.running >= 0.01, seconds.compiling
    (True, 0.0)
    """
    seconds, began, compiled = Seconds(), time.perf_counter(), COMPILING.seconds
    yield seconds
    seconds.compiling = COMPILING.seconds - compiled
    seconds.running = time.perf_counter() - began - seconds.compiling


def seconds_of(call: Callable[[], Any], after: Any = None) -> float:
    """Seconds until the arrays that a call returns are there; the timer starts once the arrays of `after` are."""
    jax.block_until_ready(after)
    with timer() as seconds:
        jax.block_until_ready(call())
    return seconds.running


def in_turns(contenders: Mapping[Any, Callable[[], Any]], rounds: int, warm_up: bool = True) -> dict[Any, list[Any]]:
    """What each contender's calls return, one a round, in turns; a warm-up calls each once more before, and is left out."""
    results: dict[Any, list[Any]] = {name: [] for name in contenders}
    for turn in range(rounds + warm_up):
        for name, call in contenders.items():
            result = call()
            results[name] += [result] if turn >= warm_up else []
    return results


def medians_in_turns(contenders: Mapping[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """The median of each contender's seconds, after a warm-up."""
    return {name: statistics.median(seconds) for name, seconds in in_turns(contenders, rounds).items()}


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and how far apart the largest and the smallest are as a share of it.

    >>> median_and_spread([90.0, 100.0, 120.0])
    (100.0, 0.3)
    """
    middle = statistics.median(values)
    return middle, round((max(values) - min(values)) / middle, 3) if middle else 0.0
