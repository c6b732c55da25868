"""What a service gives its callers: replies, to be waited for by threads and by asyncio, and the tickets of requests.

Tasks of an event loop that wait for events are woken together (`Wakeup`): each call from another thread writes to a socket and
lets two threads compete for the interpreter, which the engine's thread would do for each event of each request.
"""

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from jkv.engine.outputs import Event
from jkv.engine.results import Result

T = TypeVar("T")


class Reply(Future[T], Generic[T]):
    """A `concurrent.futures.Future` that an event loop can await: `reply.result()` in a thread, `await reply` in a task.

    `cancel` drops a call that the owner thread has not begun.
    """

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class Submits(Protocol):
    """What a ticket asks of its service."""

    def cancel(self, ticket: "Ticket") -> None: ...
    def extend(self, ticket: "Ticket", tokens: Any, sample: int, streams: bool, keep: bool, settings: Any) -> "Ticket": ...
    def close_ticket(self, ticket: "Ticket") -> Reply[None]: ...


class Ticket(Reply[Result]):
    """A submitted request. Its result is a `jkv.Result`; iteration, with `for` or `async for`, yields its events as they come.

    Any number of threads and tasks may iterate: each receives all events from the first on, and then the error, if the request
    failed.

    Of a request that was kept, the rows are freed when the conversation goes on, by `close`, or when nobody holds the ticket.

    Attributes:
      service: whose request it is.
      streams: whether events are kept for iteration; without it their text is not made.
      number: the engine's own ticket; -1 until the owner thread has submitted the request.
      keep: whether its rows are kept for a next turn.
      is_closed: whether its caller wants none of them.
    """

    def __init__(self, service: Submits, streams: bool, keep: bool = False) -> None:
        super().__init__()
        self.number = -1
        self.service, self.streams, self.keep, self.is_closed = service, streams, keep, False
        self._events: list[Event] = []
        self._wakers: list[Callable[[], None]] = []

    def cancel(self) -> bool:
        """Asks for the end of the request, which keeps its tokens: the result then has the reason "cancelled".

        Returns whether it was still unfinished. A task that is cancelled while it awaits the ticket does the same.
        """
        if self.done():
            return False
        self.service.cancel(self)
        return True

    def extend(
        self, tokens: Sequence[int], *, sample: int = 0, streams: bool = False, keep: bool = True, **settings: Any
    ) -> "Ticket":
        """The next turn of a request that was submitted with `keep=True` and is finished; see `Engine.extend`.

        Args:
          tokens, sample, keep, settings: see `Engine.extend`.
          streams: whether the turn's ticket yields events.

        Raises:
          ValueError: a request without a kept row (unfinished, failed, cancelled, not kept, closed, extended already), tokens
            that are none, or a turn that the engine can never serve; nothing is changed.
          RuntimeError: the service is closed.
        """
        return self.service.extend(self, tokens, sample, streams, keep, settings)

    def close(self) -> Reply[None]:
        """Frees the rows that the request has left; one that is unfinished leaves none. Its result stays."""
        return self.service.close_ticket(self)

    def receive(self, event: Event) -> None:
        """Adds an event, for all who iterate; the engine's streaming callback."""
        self._events.append(event)
        for wake in tuple(self._wakers):
            wake()

    def __iter__(self) -> Iterator[Event]:
        ready, count = threading.Event(), 0
        with self._waking(ready.set):
            while True:
                ready.clear()
                is_over, events = self._unread(count)
                yield from events
                count += len(events)
                if is_over:
                    break
                if not events:
                    ready.wait()
        self.result()

    async def __aiter__(self) -> AsyncIterator[Event]:
        ready, wakeup, count = asyncio.Event(), wakeup_of_this_loop(), 0
        with self._waking(functools.partial(wakeup.wake, ready)):
            while True:
                ready.clear()
                is_over, events = self._unread(count)
                for event in events:
                    yield event
                count += len(events)
                if is_over:
                    break
                if not events:
                    await ready.wait()
        self.result()

    def _unread(self, count: int) -> tuple[bool, list[Event]]:
        """Whether no event can come any more, and the events after the first `count`."""
        is_over = self.done()  # first: the last event comes before the end
        return is_over, self._events[count:]

    @contextlib.contextmanager
    def _waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Calls `wake` at each event and at the end, inside the block.

        Raises:
          ValueError: a request that was submitted without `streams`.
        """
        if not self.streams:
            raise ValueError("Only a request that was submitted with streams=True has events; call result(), or stream it.")
        self._wakers.append(wake)
        self.add_done_callback(lambda _: wake())
        try:
            yield
        finally:
            self._wakers.remove(wake)


class Wakeup:
    """Wakes tasks of one event loop from any thread: sets their `asyncio.Event`s, all that wait by one call of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock, self._waiting = threading.Lock(), dict[asyncio.Event, None]()

    def wake(self, event: asyncio.Event) -> None:
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


WAKEUPS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Wakeup] = weakref.WeakKeyDictionary()


def wakeup_of_this_loop() -> Wakeup:
    """That of the running event loop."""
    loop = asyncio.get_running_loop()
    return WAKEUPS.setdefault(loop, Wakeup(loop))
