"""Defers Ctrl-C to the end of a device program: an interrupt would lose the pool that was donated to it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed inside the block; a second press interrupts as usual.

    Outside the main thread, which alone receives signals, nothing is deferred.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield lambda: False
        return
    pressed: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if pressed and callable(previous):
            previous(number, frame)
        pressed.append(number)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)
