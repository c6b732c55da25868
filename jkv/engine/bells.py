"""Wakes the tasks of an event loop from another thread: all that are waiting to be woken, by one call of the loop.

Each call from another thread writes to a socket and lets two threads compete for the interpreter, which the engine's thread
would do for each event of each request.
"""

import asyncio
import contextlib
import threading
import weakref


class Bell:
    """Sets `asyncio.Event`s of one loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock, self._waiting = threading.Lock(), dict[asyncio.Event, None]()

    def ring(self, event: asyncio.Event) -> None:
        """Sets an event soon; nothing where the loop is closed, and nobody reads any more."""
        with self._lock:
            is_first = not self._waiting
            self._waiting[event] = None
        if is_first and (loop := self._loop()) is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._set_all)

    def _set_all(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for event in waiting:
            event.set()


BELLS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bell] = weakref.WeakKeyDictionary()


def bell_of_this_loop() -> Bell:
    """The bell of the running event loop."""
    loop = asyncio.get_running_loop()
    return BELLS.setdefault(loop, Bell(loop))
