"""Ctrl-C waits for the end of a device program, which would take the pool with it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether Ctrl-C was pressed inside the block; a second press interrupts as usual.

    An interrupt in the middle of a program would lose the pool, which was donated to it. Only the main thread hears signals.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield lambda: False
        return
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed and callable(before):
            before(number, frame)
        pressed.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
