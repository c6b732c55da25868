"""Clocks that stop while programs compile: seconds of blocks, and of a device that waits for its host; and histograms of fixed
size, however much they count.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


class CompileClock:
    """Seconds spent tracing and compiling in this process since the package was imported, nested spans counted once.

    Attributes:
      seconds: the sum.
      count: programs compiled, or read from JAX's persistent cache.
    """

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        self._spans: list[tuple[float, float]] = []  # disjoint and ascending; the newest may still be enclosed by another
        self._threads = set[int]()  # whose seconds do not count

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Counts the programs that this thread compiles in the block, and not their seconds, because no other thread waits."""
        self._threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._threads.discard(threading.get_ident())

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Adds a duration reported by JAX; reports come as spans end, inner spans first."""
        if not event.startswith("/jax/core/compile/"):
            return
        self.count += event.endswith("backend_compile_duration")
        if threading.get_ident() in self._threads:
            return
        end = time.perf_counter()
        begin = end - duration_secs
        while self._spans and self._spans[-1][0] >= begin:
            inner = self._spans.pop()
            self.seconds -= inner[1] - inner[0]
        if self._spans:
            begin = max(begin, self._spans[-1][1])
        self._spans.append((begin, end))
        self.seconds += end - begin
        if len(self._spans) > 256:
            del self._spans[:128]


COMPILING = CompileClock()
jax.monitoring.register_event_duration_secs_listener(COMPILING.listen)


def running_seconds() -> float:
    """Seconds on a clock that stops while this process compiles."""
    return time.perf_counter() - COMPILING.seconds


@contextlib.contextmanager
def clock(stats: Any, field: str) -> Iterator[None]:
    """Adds the seconds of a block to `stats.field`, compilation excluded."""
    began, compiled = time.perf_counter(), COMPILING.seconds
    try:
        yield
    finally:
        spent = time.perf_counter() - began - (COMPILING.seconds - compiled)
        setattr(stats, field, getattr(stats, field) + spent)


class IdleClock:
    """Seconds in which requests were unfinished and no device program was in flight.

    At many moments of an engine's step, the host looks whether the newest program has finished. An idle device was busy until
    some time after it was last seen busy, so these seconds are an upper bound. Host work beside the device does not count, nor
    does compilation.

    Attributes:
      seconds: of engine steps.
      between: from one step to the next, such as while results are delivered.
    """

    def __init__(self) -> None:
        self.seconds = self.between = 0.0
        self._busy: float | None = None  # when a program was last seen in flight; None where nothing is unfinished
        self._left: float | None = None  # when the last step ended

    def begin(self, is_ready: bool) -> None:
        """A step begins; `is_ready` says whether the newest program has finished."""
        now, left = running_seconds(), self._left
        if left is not None and self._busy is not None and is_ready:
            self.seconds += max(0.0, left - self._busy)
            self.between += now - max(left, self._busy)
        self._busy, self._left = now, None

    def end(self, is_unfinished: bool) -> None:
        """A step ends; what follows counts only where requests are unfinished."""
        if is_unfinished:
            self._left = running_seconds()
        else:
            self._busy = self._left = None

    def look(self, is_ready: bool) -> None:
        """Notes whether a program is in flight."""
        if not is_ready and self._busy is not None:
            self._busy = running_seconds()

    @contextlib.contextmanager
    def dispatching(self, is_ready: bool) -> Iterator[None]:
        """A block that dispatches a program; the idle time before it ends here."""
        yield
        now = running_seconds()
        if self._busy is not None:
            self.seconds += now - self._busy if is_ready else 0.0
            self._busy = now

    @contextlib.contextmanager
    def waiting(self, is_ready: Callable[[], bool]) -> Iterator[None]:
        """A block that waits for programs."""
        was_ready = is_ready()
        yield
        self.look(was_ready)


def is_ready(state: Any) -> bool:
    """Whether the device has finished every program, the last of which returned `state`, or is asleep (None)."""
    return state is None or bool(state.logits.is_ready())


DOUBLINGS = 24  # the last bucket has all above 2**23
LEAST, DECADES, PER_DECADE = 1e-6, 10, 50  # seconds; a bucket is 4.7 % wide


class Latency:
    """Counts of seconds in buckets on a logarithmic scale."""

    def __init__(self) -> None:
        self.counts = np.zeros(DECADES * PER_DECADE, np.int64)

    def add(self, seconds: float, count: int = 1) -> None:
        """Counts `count` times this many seconds; beyond the scale, the last bucket on that side."""
        bucket = int(PER_DECADE * math.log10(max(seconds, LEAST) / LEAST))
        self.counts[min(bucket, len(self.counts) - 1)] += count

    def quantile(self, share: float) -> float:
        """The seconds that a share of all counts does not exceed, to the middle of a bucket; 0 without counts.

        >>> latency = Latency()
        >>> latency.add(0.01, 99)
        >>> latency.add(1.0)
        >>> round(latency.quantile(0.5), 3), round(latency.quantile(0.999), 1)
        (0.01, 1.0)
        """
        total = self.counts.sum()
        if not total:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self.counts), max(share * total, 1)))
        return LEAST * 10 ** ((bucket + 0.5) / PER_DECADE)


class Counts:
    """Counts of whole numbers in buckets that end at the powers of two."""

    def __init__(self) -> None:
        self.counts, self.total = np.zeros(DOUBLINGS, np.int64), 0

    def add(self, number: int) -> None:
        """Counts a number above 0, or none."""
        self.counts[min(max(number - 1, 0).bit_length(), DOUBLINGS - 1)] += 1
        self.total += number

    def up_to(self, bound: int) -> int:
        """How many were no larger than a power of two.

        >>> counts = Counts()
        >>> for number in (1, 8, 9):
        ...     counts.add(number)
        >>> counts.up_to(1), counts.up_to(8), counts.up_to(16), counts.total
        (1, 2, 3, 18)
        """
        return int(self.counts[: (bound - 1).bit_length() + 1].sum())
