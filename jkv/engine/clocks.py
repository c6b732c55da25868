"""Clocks that stop while programs compile: seconds of blocks, and of a device that waits for its host."""

import contextlib
import time
from collections.abc import Callable, Iterator
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
