"""A handle to an engine that a thread of its own owns, for any number of threads and asyncio tasks.

    with jkv.Service(engine) as service:
        tickets = [service.submit(prompt, policy=jkv.r_kv(budget=128)) for prompt in prompts]
        texts = [ticket.result().text[0] for ticket in tickets]      # or: await ticket
        for event in service.submit(prompts[0], streams=True):       # or: async for
            print(event.text, end="")

One thread makes all calls of the engine (`Owner`). The handle (`Service`) and the futures that it returns (`Ticket`, `Reply`)
put commands into its queue. The thread runs steps as long as a request is unfinished, and otherwise waits for a command.

Tasks of an event loop that wait for events are woken together (`Wakeup`): each call from another thread writes to a socket and
lets two threads compete for the interpreter, which the engine's thread would do for each event of each request.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from jkv.checks import check_known, described, typed
from jkv.engine import turns
from jkv.engine.engine import Engine
from jkv.engine.interrupts import call
from jkv.engine.kept_rows import KeptRow
from jkv.engine.outputs import Event
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, make_requests
from jkv.engine.results import Result
from jkv.errors import InputError, refused
from jkv.eviction import Policy
from jkv.model.params import Model, Params

LOGGER = logging.getLogger("jkv")
MODES = ("keep", "wait", "abort")
T = TypeVar("T")
Submit = Callable[[Callable[[Event], None] | None], int]  # submits to the engine, with a streaming callback; returns its ticket


class Reply(Future[T], Generic[T]):
    """A `concurrent.futures.Future` that an event loop can await: `reply.result()` in a thread, `await reply` in a task.

    `cancel` drops a call that the owner thread has not begun.
    """

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class Ticket(Reply[Result]):
    """A submitted request. Its result is a `jkv.Result`; iteration, with `for` or `async for`, yields its events as they come.

    Any number of threads and tasks may iterate: each receives all events from the first on, and then the error, if the request
    failed.

    The next turn takes over the row of a request that was kept. Otherwise the row is freed by `close`, or when nobody holds the
    ticket any more.

    Attributes:
      service: whose request it is.
      streams: whether events are kept for iteration; without it their text is not made.
      number: the engine's own ticket; -1 until the owner thread has submitted the request.
      keep: whether its rows are kept for a next turn.
      is_closed: whether its caller wants none of them.
      requests: the requests whose programs must be compiled before they are submitted.
    """

    def __init__(self, service: "Service", streams: bool, keep: bool = False, requests: Sequence[Request] = ()) -> None:
        super().__init__()
        self.requests = requests
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
        with contextlib.suppress(RuntimeError):  # closed: the request has ended
            self.service._command(lambda owner: owner.cancel(self))
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
        row = self.service.kept_row(self, sample)
        request = turns.next_request(self.service.engine.model, row, tokens, RequestOptions(**settings), keep)
        return self.service.extend_request(self, request, row, sample, streams)

    def close(self) -> Reply[None]:
        """Frees the rows that the request has left; one that is unfinished leaves none. Its result stays."""
        return self.service._command(lambda owner: owner.release(self))

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
            rule = "Only a request that was submitted with streams=True has events; call result(), or stream it."
            raise refused(rule, streams="missing")
        self._wakers.append(wake)
        self.add_done_callback(lambda _: wake())
        try:
            yield
        finally:
            self._wakers.remove(wake)


class Service:
    """A handle to an engine that a thread of its own owns; any number of threads and asyncio tasks may use it.

    `update`, `clear_prefix_cache`, `pause`, `resume`, `call` and `close` return a `Reply`, for threads
    (`service.update(params).result()`) and tasks (`await service.update(params)`); methods that submit return a `Ticket`. It is
    a context manager, also with `async with`: at its end unfinished requests are cancelled, unless `close("wait")` was called.

    Args:
      engine: the `jkv.Engine`.
      collect: what a finished request's ticket is given in place of a `jkv.Result`: a function of the engine's ticket, which
        takes the request's samples (`Engine.take`). The owner thread calls it.
      compiles_apart: whether another thread compiles missing programs, so that only requests that need them wait.
        `jkv.engine.foreseen` lists the programs for which all requests still wait.

    Attributes:
      engine: the `jkv.Engine`. Its attributes may be read; calls of other threads than the owner's are refused.
    """

    def __init__(self, engine: Engine, collect: Callable[[int], Any] | None = None, *, compiles_apart: bool = False) -> None:
        self.engine = engine
        self._owner, started = Owner(engine, collect, typed("compiles_apart", compiles_apart, bool)), Reply[None]()
        self._encoding = threading.Lock()
        thread = threading.Thread(target=self._owner.run, args=(started,), name="the owner of the engine", daemon=True)
        thread.start()
        started.result()
        self._end = weakref.finalize(self, end_thread, self._owner, thread)  # also when the interpreter ends

    def submit(
        self,
        prompt: Any,
        options: RequestOptions | None = None,
        *,
        request: int | None = None,
        streams: bool = False,
        keep: bool = False,
        **settings: Any,
    ) -> Ticket:
        """Submits `n` samples of one prompt. The prompt is encoded and checked in the caller's thread.

        Args:
          prompt, request, keep: see `Engine.submit`; `Ticket.extend` submits the next turn.
          options: a `jkv.RequestOptions`.
          streams: whether the ticket yields events.
          settings: fields of `jkv.RequestOptions` by name, in place of `options`.

        Raises:
          ValueError: a request that the engine can never serve.
          RuntimeError: the service is closed.
        """
        model: Model = self.engine.model
        options = options or RequestOptions(**settings)
        with self._encoding:  # tokenizers change settings of their own while they encode
            prompts = encode_prompts(model, prompt, options.parse_special)
        if len(prompts) != 1:
            rule = "submit takes one {field} at a time; got {got}. Submit each."
            raise InputError(rule, field="prompt", code="too_long", got=len(prompts))
        groups = make_requests(model, prompts, options, request, self.engine.options.kv_format)
        return self.submit_requests(turns.with_keep(groups[0], keep), streams)

    def submit_requests(self, requests: Sequence[Request], streams: bool = False) -> Ticket:
        """Submits checked requests under one ticket.

        Raises:
          ValueError: a request that the engine can never serve.
          RuntimeError: the service is closed.
        """
        requests = [self.engine.check(request) for request in requests]
        ticket = Ticket(self, streams, any(request.keep for request in requests), requests)
        return self._start(ticket, functools.partial(self.engine.submit_requests, requests))

    def resume_row(self, content: bytes, policy: Policy) -> Ticket:
        """Goes on with a row that was copied from another engine of the same settings (`jkv.engine.row_moves`).

        Raises:
          RuntimeError: the service is closed.
        """
        return self._start(Ticket(self, streams=False), functools.partial(self.engine.resume_row, content, policy))

    def kept_row(self, ticket: Ticket, sample: int = 0) -> KeptRow:
        """What a finished request left for a next turn.

        Raises:
          ValueError: it left nothing; the message has the reason.
        """
        if ticket.service is not self:
            rule = "extend continues a request of its own service; got a ticket of another one. Call that one's extend."
            raise refused(rule, ticket="conflict")
        if ticket.is_closed:
            raise refused("extend continues a kept request; this one is closed. Submit it again.", ticket="conflict")
        if ticket.done() and (error := ticket.exception()) is not None:
            rule = f"extend continues a finished request; this one failed: {described(error)}. Submit it again."
            raise refused(rule, ticket="conflict")
        sample = typed("sample", sample, int)
        turns.check_end(sample, ticket.keep, ticket.result().finish_reason if ticket.done() else None)
        return self.engine.scheduler.kept_rows.find(ticket.number, sample)

    def extend_request(self, ticket: Ticket, request: Request, row: KeptRow, sample: int = 0, streams: bool = False) -> Ticket:
        """Submits a checked request (`jkv.engine.turns.next_request`) of a kept row's next turn.

        Raises:
          ValueError: a request that the engine can never serve.
          RuntimeError: the service is closed.
        """
        request = self.engine.check(request)

        def submit(on_tokens: Callable[[Event], None] | None) -> int:  # which holds the last ticket, and so its row, until then
            return self.engine.submit_turn(ticket.number, sample, row, request, on_tokens)

        return self._start(Ticket(self, streams, request.keep, [request]), submit)

    def _start(self, ticket: Ticket, submit: Submit) -> Ticket:
        """Queues a request; the owner thread submits it."""
        self._owner.put(ticket, lambda: self._owner.submit(ticket, submit))
        return ticket

    def call(self, function: Callable[[Engine], T]) -> Reply[T]:
        """What a function of the engine returns; the owner thread calls it between two steps.

        >>> import jkv
        >>> with jkv.Service(jkv.Engine(jkv.testing.tiny_model(), max_running=1, max_slots=32)) as service:
        ...     service.call(lambda engine: len(engine.tickets)).result()
        0
        """
        return self._command(lambda owner: function(owner.engine))

    def _command(self, function: "Callable[[Owner], T]") -> Reply[T]:
        """What a function of the owner returns; its thread calls it between two steps.

        Raises:
          RuntimeError: the service is closed.
        """
        owner, reply = self._owner, Reply[T]()
        return owner.put(reply, lambda: answer(reply, lambda: function(owner)))

    def update(self, params: Params | Mapping[str, Any]) -> Reply[None]:
        """Uses new weights from the next step on, as `Engine.update` does; unfinished requests go on with them.

        For weights that change between requests only, pause with "wait" or "abort" before, and resume afterwards.
        """
        return self.call(lambda engine: engine.update(params))

    def clear_prefix_cache(self) -> Reply[None]:
        """Clears the prefix cache, so that no later prompt reuses what it holds now: see `Engine.clear_prefix_cache`."""
        return self.call(Engine.clear_prefix_cache)

    def pause(self, mode: str = "keep") -> Reply[None]:
        """Runs nothing from the reply on, until `resume`. Requests that are submitted meanwhile wait.

        Args:
          mode: what becomes of unfinished requests: "keep" (they go on after the pause), "wait" (they are finished first), or
            "abort" (they are cancelled, and keep their tokens). A later pause or `resume` answers this one at once. A service
            that closes finishes or cancels them as `close` says.

        Raises:
          ValueError: another mode.
        """
        check_known(MODES, mode=mode)
        reply: Reply[None] = Reply()
        return self._owner.put(reply, functools.partial(self._owner.pause, mode, reply))

    def resume(self) -> Reply[None]:
        """Ends a pause."""
        return self._command(Owner.resume)

    @property
    def is_paused(self) -> bool:
        """Whether requests that come now wait for `resume`."""
        return bool(self._owner.paused)

    def close(self, mode: str = "abort") -> Reply[None]:
        """Ends the service; its engine may be used directly again from the reply on.

        Args:
          mode: whether unfinished requests are cancelled first ("abort") or finished ("wait"), also where a pause has kept them
            waiting. What is submitted later is refused. Neither a pause nor the end of a `with` block breaks off the second; a
            later `close("abort")` does.

        Raises:
          ValueError: another mode.
        """
        check_known(MODES[1:], mode=mode)
        reply: Reply[None] = Reply()
        try:
            self._owner.put_close(reply, functools.partial(self._owner.close, mode, reply))
        except RuntimeError:  # it is closed
            reply.set_result(None)
        return reply

    @property
    def failure(self) -> str:
        """Why it takes no more requests; empty as long as it does."""
        return self._owner.refusal

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    async def __aenter__(self) -> "Service":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._end)


class Owner:
    """What the owner thread does: all commands in the queue, then a step, as long as a request is unfinished.

    Args:
      engine: the engine.
      collect: what a finished request's ticket is given, of the engine's number; None is its result.

    Attributes:
      paused: the mode of a pause, or empty.
    """

    def __init__(self, engine: Engine, collect: Callable[[int], Any] | None = None, compiles_apart: bool = False) -> None:
        self.compiles_apart = compiles_apart
        self.engine, self.paused, self.collect = engine, "", collect or engine.result
        self.tickets: dict[int, Ticket] = {}  # unfinished, by the engine's number
        self.later: OrderedDict[Ticket, Submit] = OrderedDict()  # submitted during a pause
        self.compiling: dict[Ticket, Submit] = {}  # requests whose programs are being compiled
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

    def put_close(self, reply: Reply[None], command: Callable[[], None]) -> None:
        """Queues a command that closes. Its reply is given at the end, also if the end comes before the command.

        Raises:
          RuntimeError: the service is closed, or its engine cannot be repaired.
        """
        with self.lock:
            if self.refusal:
                raise RuntimeError(self.refusal)
            self.closing.append(reply)
            self.queue.put((reply, command))

    def run(self, started: Reply[None]) -> None:
        """The thread's whole life."""
        try:
            with self.engine.guard.owned("serve"):
                if self.compiles_apart:
                    self.engine.runner.compile_apart(self.notify)
                started.set_result(None)
                while not (self.is_ending and self.engine.is_idle and not self.compiling):
                    self.obey()
                    if self.has_step:
                        self.step()
                    elif self.is_quiet:
                        self.settle(None)
                self.engine.runner.compile_here()
            self.end("The service is closed. Make another jkv.Service.", is_failure=False)
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
    def has_step(self) -> bool:
        """Whether there is a step to run."""
        return self.paused != "keep" and not self.engine.is_asleep and not self.engine.is_idle

    @property
    def is_quiet(self) -> bool:
        """Whether no request is unfinished. A sleeping engine, which runs no step, may have cancelled ones to clear away."""
        return not self.compiling and (self.engine.is_idle or (self.engine.is_asleep and not self.tickets))

    def obey(self) -> None:
        """Runs all commands in the queue; waits for one if there is nothing else to do."""
        if not self.has_step and not (self.quiet and self.is_quiet):
            self.do(*self.queue.get())
        while not self.queue.empty():
            self.do(*self.queue.get())

    def do(self, reply: Reply[Any], command: Callable[[], None]) -> None:
        """Runs a command. If it leaves the engine broken, requests start again before the next one."""
        try:
            command()
        except BaseException as error:
            conclude(reply, error)
        if self.engine.guard.failure is not None:
            self.engine.reset()

    def step(self) -> None:
        """One step of the engine, which repairs what fails in it. If the engine cannot run (it has no pool or no weights), all
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
        """Submits a request to the engine, or keeps it until its programs are compiled."""
        try:
            is_foreseen = not ticket.requests or self.engine.is_foreseen(ticket.requests)
        except BaseException as error:
            give(ticket.set_exception, error)
            return
        if is_foreseen:
            self.begin(ticket, submit)
        else:
            self.compiling[ticket] = submit

    def notify(self) -> None:
        """Wakes the owner thread when a program is compiled. The compiling thread calls it."""
        self.queue.put((Reply[None](), self.start_compiled))

    def start_compiled(self) -> None:
        """Submits the requests whose programs are all compiled; other requests may have changed which programs they need."""
        self.engine.runner.foreseen.collect()
        compiling, self.compiling = self.compiling, {}
        for ticket, submit in compiling.items():
            self.start(ticket, submit)

    def begin(self, ticket: Ticket, submit: Submit) -> None:
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
        """Ends a request; one that is not submitted yet is submitted and cancelled at once, so that it has a result."""
        for waiting in (self.later, self.compiling):
            if ticket in waiting:
                self.begin(ticket, waiting.pop(ticket))
        if ticket.number in self.tickets:
            self.abort(ticket.number)

    def pause(self, mode: str, reply: Reply[None]) -> None:
        """Starts a pause; the reply is given when it is in effect. A service that closes keeps on until it is idle."""
        if not reply.set_running_or_notify_cancel():
            return
        if not self.is_ending:
            self.paused = mode
            if mode == "abort":
                self.abort_all()
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
        if not reply.set_running_or_notify_cancel():
            return
        self.resume()
        self.is_ending, self.paused = True, "wait"
        self.engine.wake()
        if mode == "abort":
            self.abort_all()

    def abort_all(self) -> None:
        """Cancels all requests, except requests that wait for the end of a pause."""
        for ticket in (*self.tickets.values(), *self.compiling):
            self.cancel(ticket)

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
        for reply in self.closing:
            conclude(reply, error if is_failure else None)
        while not self.queue.empty():
            conclude(self.queue.get()[0], error)
        for ticket in (*self.tickets.values(), *self.later, *self.compiling):
            conclude(ticket, error)
        self.tickets.clear()
        self.compiling.clear()
        self.later.clear()
        self.settle(None if self.is_ending else error)


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


def end_thread(owner: Owner, thread: threading.Thread) -> None:
    """Cancels unfinished requests, unless `close("wait")` was called, and waits until the thread has ended."""
    reply: Reply[None] = Reply()
    with contextlib.suppress(RuntimeError):  # it has ended
        owner.put_close(reply, functools.partial(owner.leave, reply))
    if thread is not threading.current_thread():
        thread.join()


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
