"""Seconds spent compiling, as JAX reports them, so that timings of programs can exclude them."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax


class CompileClock:
    """Seconds spent tracing and compiling in this process since the package was imported, nested spans counted once.

    Attributes:
      seconds: the sum.
      count: programs compiled, or read from JAX's persistent cache.
    """

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        self._spans: list[tuple[float, float]] = []  # disjoint and ascending; the newest may still be enclosed by another

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Adds a duration reported by JAX; reports come as spans end, inner spans first."""
        if not event.startswith("/jax/core/compile/"):
            return
        self.count += event.endswith("backend_compile_duration")
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
