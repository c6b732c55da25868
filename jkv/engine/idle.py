"""How long the device had nothing to do because the host was busy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jkv.engine.timing import running_seconds


class IdleClock:
    """Seconds in which requests were unfinished and no device program was in flight.

    The host looks whether the newest program has finished, at many moments of a turn. An idle device was busy until some time
    after it was last seen busy, so these are at most the seconds. Host work beside the device does not count, nor does
    compilation.

    Attributes:
      seconds: of turns.
      between: from one turn to the next, such as while results are delivered.
    """

    def __init__(self) -> None:
        self.seconds = self.between = 0.0
        self._busy: float | None = None  # when a program was last seen in flight; None where nothing is unfinished
        self._left: float | None = None  # when the last turn ended

    def begin(self, is_ready: bool) -> None:
        """A turn begins; `is_ready` says whether the newest program has finished."""
        now, left = running_seconds(), self._left
        if left is not None and self._busy is not None and is_ready:
            self.seconds += max(0.0, left - self._busy)
            self.between += now - max(left, self._busy)
        self._busy, self._left = now, None

    def end(self, is_unfinished: bool) -> None:
        """A turn ends; what follows counts only where requests are unfinished."""
        if is_unfinished:
            self._left = running_seconds()
        else:
            self._busy = self._left = None

    def look(self, is_ready: bool) -> None:
        """Notes whether a program is in flight."""
        if not is_ready and self._busy is not None:
            self._busy = running_seconds()

    @contextmanager
    def dispatching(self, is_ready: bool) -> Iterator[None]:
        """A block that dispatches a program; the idle time before it ends here."""
        yield
        now = running_seconds()
        if self._busy is not None:
            self.seconds += now - self._busy if is_ready else 0.0
            self._busy = now

    @contextmanager
    def waiting(self, is_ready: Callable[[], bool]) -> Iterator[None]:
        """A block that waits for programs."""
        was_ready = is_ready()
        yield
        self.look(was_ready)


def is_ready(state: Any) -> bool:
    """Whether the device has finished every program, the last of which returned `state`, or is asleep (None)."""
    return state is None or bool(state.logits.is_ready())
