"""Defers Ctrl-C, because a step that ends in the middle loses what the host and the device know of each other.

`changing_device` marks a block whose failure leaves them apart.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jkv.checks import described


class Presses:
    """The presses of Ctrl-C that the outermost block has deferred."""

    def __init__(self) -> None:
        self.count = 0
        self.in_callback = False

    def handle(self, number: int, frame: Any) -> None:
        """Counts a press; the second one interrupts a caller's function, which may never return."""
        self.count += 1
        if self.count > 1 and self.in_callback:
            self.in_callback = False
            raise KeyboardInterrupt

    def __bool__(self) -> bool:
        return self.count > 0


DEFERRED: list[Presses] = []  # of the outermost block, if any
ENDING: list[int] = []  # the presses inside `ending_at_interrupt`, after a 0 for the block


@contextlib.contextmanager
def deferred_interrupts(*, ends_here: bool = False) -> Iterator[Presses]:
    """Yields the presses of Ctrl-C inside the block, which may be any number; none of them interrupts it.

    Blocks nest, and the outermost one counts for all. When it ends, it passes a press on to the handler that was there before,
    unless the press `ends_here`: then the caller has acted on it, and only `ending_at_interrupt` sees it. Outside the
    main thread, which alone receives signals, nothing is deferred.
    """
    previous = signal.getsignal(signal.SIGINT)
    if not is_main_thread() or previous is None:
        yield Presses()
        return
    if DEFERRED:
        presses = DEFERRED[0]
        was_in_callback, presses.in_callback = presses.in_callback, False  # a callback may call the engine
        try:
            yield presses
        finally:
            presses.in_callback = was_in_callback
        return
    presses = Presses()
    signal.signal(signal.SIGINT, presses.handle)
    DEFERRED.append(presses)
    try:
        yield presses
    finally:
        DEFERRED.clear()
        signal.signal(signal.SIGINT, previous)
        if presses and (ENDING or not ends_here):
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """A press of Ctrl-C ends the block by a KeyboardInterrupt, also where `generate` would return what is finished.

    For programs that call the engine many times, such as a benchmark. Where Ctrl-C is not Python's own, nothing changes.
    """
    if not is_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler or ENDING:
        yield
        return

    def handle(number: int, frame: Any) -> None:
        ENDING.append(number)
        raise KeyboardInterrupt

    ENDING.append(0)
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ENDING.clear()


def ignore_interrupts() -> None:
    """For a program that ends: later presses of Ctrl-C would print tracebacks of its end."""
    if is_main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def raise_lost_interrupt() -> None:
    """Raises a KeyboardInterrupt that Python dropped, because it came in a callback of the garbage collector."""
    if len(ENDING) > 1 and is_main_thread():
        raise KeyboardInterrupt


def call(function: Callable[..., Any], *arguments: Any) -> BaseException | None:
    """Calls a caller's function and returns what it raised; a second press of Ctrl-C inside it is a KeyboardInterrupt."""
    presses = DEFERRED[0] if DEFERRED and is_main_thread() else Presses()
    try:
        try:
            presses.in_callback = True
            function(*arguments)
        finally:
            presses.in_callback = False
    except BaseException as error:
        return error
    return None


def is_interrupt(error: BaseException) -> bool:
    """Whether a caller's function was interrupted by its user, in the thread that receives signals."""
    return isinstance(error, KeyboardInterrupt) and is_main_thread()


def is_main_thread() -> bool:
    """Whether this thread receives signals."""
    return threading.current_thread() is threading.main_thread()


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
