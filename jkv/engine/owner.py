"""What the thread that owns an engine does: commands from a queue, and turns as long as a request is unfinished."""

import functools
import logging
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from jkv.checks import described
from jkv.engine.guard import Guard
from jkv.engine.interrupts import call
from jkv.engine.outputs import Event
from jkv.engine.requests import Request
from jkv.engine.results import Result
from jkv.engine.samples import Sample
from jkv.engine.tickets import Reply, Ticket
from jkv.model.params import Model, Params

LOGGER = logging.getLogger("jkv")
T = TypeVar("T")
Submit = Callable[[Callable[[Event], None] | None], int]  # submits to the engine, with a streaming callback; returns its ticket


class Loop(Protocol):
    """What a service calls of an engine."""

    tickets: dict[int, list[Sample]]
    _guard: Guard

    @property
    def model(self) -> Model: ...
    @property
    def stats(self) -> Any: ...
    @property
    def is_idle(self) -> bool: ...
    @property
    def is_asleep(self) -> bool: ...
    def check(self, request: Request) -> Request: ...
    def release(self, ticket: int) -> None: ...
    def step(self) -> list[Event]: ...
    def cancel(self, ticket: int) -> None: ...
    def result(self, ticket: int) -> Result: ...
    def take(self, tickets: Sequence[int]) -> list[Sample]: ...
    def update(self, params: Params) -> None: ...
    def wake(self) -> None: ...
    def reset(self) -> None: ...


class Owner:
    """What the owner thread does: all commands in the queue, then a turn, as long as a request is unfinished.

    Args:
      engine: the engine.
      collect: what a finished request's ticket is given, of the engine's number; None is its result.

    Attributes:
      paused: the mode of a pause, or empty.
    """

    def __init__(self, engine: Loop, collect: Callable[[int], Any] | None = None) -> None:
        self.engine, self.paused, self.collect = engine, "", collect or engine.result
        self.tickets: dict[int, Ticket] = {}  # unfinished, by the engine's number
        self.later: OrderedDict[Ticket, Submit] = OrderedDict()  # submitted during a pause
        self.quiet: list[Reply[None]] = []  # replies to be given when the engine is idle
        self.closing: list[Reply[None]] = []  # replies to be given when the thread has let go of the engine
        self.queue: queue.SimpleQueue[tuple[Reply[Any], Callable[[], None]]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.refusal = ""  # why no command is taken any more
        self.is_ending = False

    def put(self, reply: Reply[T], command: Callable[[], None]) -> Reply[T]:
        """Queues a command, whose reply is `reply`.

        Raises:
          RuntimeError: the service is closed, or its engine cannot be repaired.
        """
        with self.lock:
            if self.refusal:
                raise RuntimeError(self.refusal)
            self.queue.put((reply, command))
        return reply

    def run(self, started: Reply[None]) -> None:
        """The thread's whole life."""
        try:
            with self.engine._guard.owned("serve"):
                started.set_result(None)
                while not (self.is_ending and self.engine.is_idle):
                    self.obey()
                    if self.has_turn:
                        self.turn()
                    elif self.engine.is_idle:
                        self.settle(None)
            self.end("The service is closed. Call serve() again for another.", is_failure=False)
        except BaseException as error:
            if started.done():
                LOGGER.exception("The service ended")
                self.end(
                    f"The service ended, because its engine could not be repaired: {described(error)}. Make another engine.",
                    is_failure=True,
                )
            else:
                started.set_exception(error)

    @property
    def has_turn(self) -> bool:
        """Whether there is a turn to run."""
        return self.paused != "keep" and not self.engine.is_asleep and not self.engine.is_idle

    def obey(self) -> None:
        """Runs all commands in the queue; waits for one if there is nothing else to do."""
        if not self.has_turn and not (self.quiet and self.engine.is_idle):
            self.do(*self.queue.get())
        while not self.queue.empty():
            self.do(*self.queue.get())

    def do(self, reply: Reply[Any], command: Callable[[], None]) -> None:
        """Runs a command. If it leaves the engine broken, requests start again before the next one."""
        try:
            command()
        except BaseException as error:
            conclude(reply, error)
        if self.engine._guard.failure is not None:
            self.engine.reset()

    def turn(self) -> None:
        """One turn of the engine, which repairs what fails in it. If the engine cannot run (it has no pool or no weights), all
        requests end with that error.
        """
        try:
            events = self.engine.step()
        except ValueError as error:
            for number, ticket in list(self.tickets.items()):
                self.engine.cancel(number)
                self.engine.take([number])
                del self.tickets[number]
                give(ticket.set_exception, error)
            return
        for number in dict.fromkeys(event.ticket for event in events if event.finish_reason):
            if number in self.tickets and all(sample.is_finished for sample in self.engine.tickets[number]):
                self.deliver(number)

    def deliver(self, number: int) -> None:
        """Gives a finished request's ticket its result."""
        fulfil(self.tickets.pop(number), functools.partial(self.collect, number))

    def abort(self, number: int) -> None:
        """Cancels a request; its tokens so far are its result."""
        self.engine.cancel(number)
        self.deliver(number)

    # Commands.

    def submit(self, ticket: Ticket, submit: Submit) -> None:
        """Submits a request, or keeps it until a pause ends."""
        if self.paused:
            self.later[ticket] = submit
        else:
            self.start(ticket, submit)

    def start(self, ticket: Ticket, submit: Submit) -> None:
        """Submits a request to the engine."""
        try:
            ticket.number = submit(ticket.receive if ticket.streams else None)
        except BaseException as error:
            give(ticket.set_exception, error)
            return
        self.tickets[ticket.number] = ticket
        if ticket.is_closed:
            self.engine.release(ticket.number)
        elif ticket.keep:
            weakref.finalize(ticket, self.drop, ticket.number).atexit = False

    def release(self, ticket: Ticket) -> None:
        """Frees the rows that a request has left, or lets it leave none."""
        ticket.is_closed = True
        if ticket.number >= 0:  # else it waits for the end of a pause
            self.engine.release(ticket.number)

    def drop(self, number: int) -> None:
        """Frees what a ticket that nobody holds has left. Any thread may collect it, also inside of `put`: no lock is taken."""
        reply: Reply[None] = Reply()
        self.queue.put((reply, functools.partial(answer, reply, functools.partial(self.engine.release, number))))

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request; one that waits for the end of a pause never starts."""
        if ticket in self.later:
            self.start(ticket, self.later.pop(ticket))
        if ticket.number in self.tickets:
            self.abort(ticket.number)

    def pause(self, mode: str, reply: Reply[None]) -> None:
        """Starts a pause; the reply is given when it is in effect. A service that closes keeps on until it is idle."""
        if not self.is_ending:
            self.paused = mode
        if mode == "abort":
            for number in list(self.tickets):
                self.abort(number)
        self.quiet.append(reply)
        if self.paused == "keep":
            self.engine.stats.idle.end(is_unfinished=False)  # what follows is no time in which a device waits for its host
            self.settle(None)

    def resume(self) -> None:
        """Ends a pause and submits what came in the meantime, in order. What came after a close stays refused."""
        if self.is_ending:
            return
        self.paused = ""
        self.settle(None)
        while self.later:
            self.start(*self.later.popitem(last=False))

    def close(self, mode: str, reply: Reply[None]) -> None:
        """Ends the thread once the engine is idle, with what a pause has kept waiting; the reply is given at the end."""
        self.closing.append(reply)
        self.resume()
        self.is_ending, self.paused = True, "wait"
        self.engine.wake()
        if mode == "abort":
            for number in list(self.tickets):
                self.abort(number)

    def leave(self, reply: Reply[None]) -> None:
        """Closes for a handle that is given up: cancels unfinished requests, unless a close has promised to finish them."""
        self.close("wait" if self.is_ending else "abort", reply)

    def settle(self, error: Exception | None) -> None:
        """Answers those who wait for an idle engine."""
        quiet, self.quiet = self.quiet, []
        for reply in quiet:
            conclude(reply, error)

    def end(self, refusal: str, is_failure: bool) -> None:
        """Refuses all that is queued or comes later."""
        with self.lock:
            self.refusal = refusal
        error = RuntimeError(refusal)
        while not self.queue.empty():
            conclude(self.queue.get()[0], error)
        for ticket in (*self.tickets.values(), *self.later):
            conclude(ticket, error)
        self.tickets.clear()
        self.later.clear()
        self.settle(None if self.is_ending else error)
        for reply in self.closing:
            conclude(reply, error if is_failure else None)


def answer(reply: Reply[T], function: Callable[[], T]) -> None:
    """Calls a function for a reply, unless the caller has cancelled it."""
    if reply.set_running_or_notify_cancel():
        fulfil(reply, function)


def fulfil(reply: Reply[T], function: Callable[[], T]) -> None:
    """Gives a reply what a function returns or raises."""
    try:
        result = function()
    except BaseException as error:
        give(reply.set_exception, error)
    else:
        give(reply.set_result, result)


def conclude(reply: Reply[Any], error: BaseException | None) -> None:
    """Ends a reply, if nobody has cancelled it."""
    if reply.done() or not (reply.running() or reply.set_running_or_notify_cancel()):
        return
    if error is None:
        give(reply.set_result, None)
    else:
        give(reply.set_exception, error)


def give(set_outcome: Callable[[Any], None], outcome: Any) -> None:
    """Ends a reply; `concurrent.futures` logs what a callback raises, but exits."""
    if error := call(set_outcome, outcome):
        LOGGER.warning("A callback of a request raised, which changes nothing: %s", described(error))
