"""Any number of threads use an engine that has no thread of its own: one at a time, and those who wait run its turns.

A served engine (`jkv.engine.service`) has an owner thread. A trainer's engine has none: what a thread sets for itself in JAX,
such as a precision or a device, then also holds for the samples that it waits for.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from jkv.engine.backend import Backend
from jkv.engine.outputs import Event

LOOK_SECONDS = 0.2  # between two looks of a thread that waits, which may have been interrupted


class Callers:
    """The threads that use an engine.

    Args:
      engine: runs their requests.
      receive: receives the events of each turn, whoever runs it, before another thread has the engine.
    """

    def __init__(self, engine: Backend, receive: Callable[[list[Event]], None]) -> None:
        self._engine, self._receive, self._num_running = engine, receive, 0
        self._changed = threading.Condition()
        self._is_busy = False  # a thread has the engine
        self._num_asking = 0  # threads that want it between two turns

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The caller's thread has the engine inside the block, after the turn in progress. Blocks do not nest."""
        with self._changed:
            self._num_asking += 1
            try:
                self._changed.wait_for(lambda: not self._is_busy)
                self._is_busy = True
            finally:
                self._num_asking -= 1
        try:
            yield
        finally:
            self._let_go()

    def run(self, is_over: Callable[[], object], on_events: Callable[[list[Event]], None]) -> None:
        """Runs turns, or waits while another thread runs them, until `is_over`.

        Calls of other threads go before the next turn. While another thread has put the engine to sleep, this one waits.

        Args:
          is_over: whether the caller has what it waits for; it is asked between turns.
          on_events: receives the events of the turns that this thread runs.

        Raises:
          RuntimeError: an earlier turn ended in the middle, in this thread or another one.
        """
        with self._running():
            while self._take_turn(is_over):
                try:
                    events = self._engine.step()
                    self._receive(events)
                finally:
                    self._let_go()
                on_events(events)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Counts the threads that run turns or wait for them."""
        with self._changed:
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                is_last = not self._num_running
            if is_last:  # nothing runs between steps while nobody waits
                with self.alone():
                    self._engine.rest()

    def _take_turn(self, is_over: Callable[[], object]) -> bool:
        """Waits until this thread may run a turn; False once it is over."""
        with self._changed:
            while self._is_busy or not is_over():
                if not (self._is_busy or self._num_asking or self._engine.is_asleep):
                    self._is_busy = True
                    return True
                self._changed.wait(LOOK_SECONDS)
        return False

    def _let_go(self) -> None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
