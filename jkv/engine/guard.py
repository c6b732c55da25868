"""Lets one thread at a time use an engine, and remembers a change that ended in the middle."""

import contextlib
import os
import threading
from collections.abc import Iterator

from jkv.checks import described
from jkv.engine.interrupts import deferred_interrupts

RESET = "Call reset(): unfinished samples then start again, with the same random draws."


class Guard:
    """Protects the agreement of host records and device state.

    Attributes:
      failure: what ended a change in the middle; None as long as host and device agree.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._changes = 0  # in progress, one inside the other
        self._lock, self._process = threading.RLock(), os.getpid()
        self._owner = ""  # the thread that has the lock

    @contextlib.contextmanager
    def owned(self, name: str) -> Iterator[None]:
        """The caller's thread owns the engine inside the block.

        Raises:
          RuntimeError: another thread owns it, or the process was forked.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"An engine belongs to the process that made it, because a fork copies no device; {name}() was called in a "
                "fork of it. Make an engine in each process, and start processes with the method 'spawn'."
            )
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"An engine serves one thread at a time; {name}() was called by {threading.current_thread().name} while "
                f"{self._owner} runs it. Give each thread its own engine, or let one thread make all calls."
            )
        try:
            self._owner = threading.current_thread().name
            yield
        finally:
            self._lock.release()

    def check(self) -> None:
        """Refuses to go on after a change that ended in the middle.

        Raises:
          RuntimeError: host and device no longer agree; names the cause and the way out.
        """
        if self.failure is not None:
            cause = described(self.failure)
            raise RuntimeError(f"A step of this engine ended in the middle ({cause}), so its pool is lost. {RESET}")

    @contextlib.contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """The block changes host records; a caller's callback may do so during a step. Ctrl-C is deferred.

        Raises:
          RuntimeError: as in `owned` and `check`.
        """
        with self.owned(name):
            self.check()
            with deferred_interrupts():
                self._changes += 1
                try:
                    yield
                except BaseException as error:
                    self.failure = error
                    raise
                finally:
                    self._changes -= 1

    @contextlib.contextmanager
    def changing_device(self, name: str, *, is_reset: bool = False) -> Iterator[None]:
        """The block changes the device state too.

        Raises:
          RuntimeError: as in `owned` and `check`; or a callback called it.
        """
        with self.owned(name):
            if self._changes:
                raise RuntimeError(
                    f"A callback may submit, extend and cancel requests; it called {name}() inside a call of the engine. Call "
                    f"{name}() after that call."
                )
            if is_reset:
                self.failure = None
            with self.changing(name):
                yield
