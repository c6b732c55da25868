"""A handle to an engine that a thread of its own owns, for any number of threads and asyncio tasks.

    with engine.serve() as service:
        tickets = [service.submit(prompt, policy=jkv.r_kv(budget=128)) for prompt in prompts]
        texts = [ticket.result().text[0] for ticket in tickets]      # or: await ticket
        for event in service.submit(prompts[0], streams=True):       # or: async for
            print(event.text, end="")

One thread makes all calls of the engine; the handle puts commands into its queue. The thread runs turns as long as a request is
unfinished, and otherwise waits for a command.
"""

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jkv.engine import row_copies, turns
from jkv.engine.conversations import ENDS, KeptRow
from jkv.engine.outputs import Event
from jkv.engine.owner import Owner, answer
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, make_requests
from jkv.engine.tickets import Reply, Ticket
from jkv.eviction import Policy
from jkv.model.params import Model, Params

MODES = ("keep", "wait", "abort")
T = TypeVar("T")


class Service:
    """A handle to a served engine (`Engine.serve`); any number of threads and asyncio tasks may use it.

    Every method but `submit` returns a `Reply`, for threads (`service.update(params).result()`) and tasks
    (`await service.update(params)`). A context manager, also with `async with`: at its end unfinished requests are cancelled,
    unless `close("wait")` was called.

    Args:
      engine: the `jkv.Engine`.
      collect: what a finished request's ticket is given in place of a `jkv.Result`: a function of the engine's ticket, which
        takes the request's samples (`Engine.take`). The owner thread calls it.

    Attributes:
      engine: the `jkv.Engine`. Its attributes may be read; calls of other threads than the owner's are refused.
    """

    def __init__(self, engine: Any, collect: Callable[[int], Any] | None = None) -> None:
        self.engine = engine
        self._owner, started = Owner(engine, collect), Reply[None]()
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
            raise ValueError(f"submit takes one prompt at a time; got {len(prompts)}. Submit each.")
        groups = make_requests(model, prompts, options, request, self.engine.options.kv_format)
        return self.submit_requests(turns.kept(groups[0], keep), streams)

    def submit_requests(self, requests: Sequence[Request], streams: bool = False) -> Ticket:
        """Submits checked requests under one ticket.

        Raises:
          ValueError: a request that the engine can never serve.
          RuntimeError: the service is closed.
        """
        requests, owner = [self.engine.check(request) for request in requests], self._owner
        ticket = Ticket(self, streams, any(request.keep for request in requests))
        owner.put(ticket, functools.partial(owner.submit, ticket, functools.partial(self.engine.submit_requests, requests)))
        return ticket

    def resume_row(self, content: bytes, policy: Policy) -> Ticket:
        """Goes on with a row that was copied from another engine of the same settings (`jkv.engine.row_copies`).

        Raises:
          RuntimeError: the service is closed.
        """
        ticket, owner = Ticket(self, streams=False), self._owner
        submit = functools.partial(row_copies.resume_row, self.engine, content, policy)
        owner.put(ticket, functools.partial(owner.submit, ticket, submit))
        return ticket

    def kept_row(self, ticket: Ticket, sample: int = 0) -> KeptRow:
        """What a finished request left for a next turn.

        Raises:
          ValueError: it left nothing; the message has the reason.
        """
        rule = "extend continues a finished request of this service that was kept"
        if ticket._service is not self:
            raise ValueError(f"{rule}; got a ticket of another one. Call its own extend.")
        if not ticket.done():
            raise ValueError(f"{rule}; this one still runs. Wait for its result.")
        if ticket.exception() is not None:
            raise ValueError(f"{rule}; this one failed: {ticket.exception()!r}. Submit the conversation again.")
        if not ticket.keep or ticket.is_closed:
            got = "is closed" if ticket.keep else "was not"
            raise ValueError(f"{rule}; this one {got}. Submit the conversation again, with keep=True.")
        reasons = ticket.result().finish_reason
        if isinstance(sample, bool) or not isinstance(sample, int) or not 0 <= sample < len(reasons):
            raise ValueError(f"sample must be one of the request's {len(reasons)}; got {sample!r}.")
        if reasons[sample] not in ENDS:
            raise ValueError(
                f"{rule}, by {' or '.join(ENDS)}; this one ended by {reasons[sample]!r}. Submit the conversation again."
            )
        return self.engine.scheduler.conversations.find(ticket.number, sample)

    def extend_request(self, ticket: Ticket, request: Request, row: KeptRow, sample: int = 0, streams: bool = False) -> Ticket:
        """Submits a checked request (`jkv.engine.turns.next_request`) of a kept row's next turn.

        Raises:
          ValueError: a request that the engine can never serve.
          RuntimeError: the service is closed.
        """
        request, owner = self.engine.check(request), self._owner
        later = Ticket(self, streams, request.keep)

        def submit(on_tokens: Callable[[Event], None] | None) -> int:  # which holds the last ticket, and so its row, until then
            return turns.submit_turn(self.engine, ticket.number, sample, row, request, on_tokens)

        owner.put(later, functools.partial(owner.submit, later, submit))
        return later

    def _extend(self, ticket: Ticket, tokens: Any, sample: int, streams: bool, keep: bool, settings: Any) -> Ticket:
        row = self.kept_row(ticket, sample)
        request = turns.next_request(self.engine.model, row, tokens, RequestOptions(**settings), keep)
        return self.extend_request(ticket, request, row, sample, streams)

    def _close(self, ticket: Ticket) -> Reply[None]:
        reply: Reply[None] = Reply()
        return self._owner.put(reply, functools.partial(answer, reply, functools.partial(self._owner.release, ticket)))

    def _cancel(self, ticket: Ticket) -> None:
        reply: Reply[None] = Reply()
        with contextlib.suppress(RuntimeError):  # closed: the request has ended
            self._owner.put(reply, functools.partial(self._owner.cancel, ticket))

    def call(self, function: Callable[[Any], T]) -> Reply[T]:
        """What a function of the engine returns; the owner thread calls it between two turns.

        >>> import jkv
        >>> with jkv.Engine(jkv.testing.tiny_model(), max_running=1, max_slots=32).serve() as service:
        ...     service.call(lambda engine: len(engine.tickets)).result()
        0
        """
        reply: Reply[T] = Reply()
        return self._owner.put(reply, functools.partial(answer, reply, functools.partial(function, self.engine)))

    def update(self, params: Params) -> Reply[None]:
        """Uses new weights from the next turn on, as `Engine.update` does; unfinished requests go on with them.

        For weights that change between requests only, pause with "wait" or "abort" before, and resume afterwards.
        """
        return self.call(lambda engine: engine.update(params))

    def pause(self, mode: str = "keep") -> Reply[None]:
        """Runs nothing from the reply on, until `resume`. Requests that are submitted meanwhile wait.

        Args:
          mode: what becomes of unfinished requests: "keep" (they go on after the pause), "wait" (they are finished first), or
            "abort" (they are cancelled, and keep their tokens).

        Raises:
          ValueError: another mode.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}.")
        reply: Reply[None] = Reply()
        return self._owner.put(reply, functools.partial(self._owner.pause, mode, reply))

    def resume(self) -> Reply[None]:
        """Ends a pause."""
        reply: Reply[None] = Reply()
        return self._owner.put(reply, functools.partial(answer, reply, self._owner.resume))

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
        if mode not in MODES[1:]:
            raise ValueError(f"mode must be one of {', '.join(MODES[1:])}; got {mode!r}.")
        reply: Reply[None] = Reply()
        try:
            return self._owner.put(reply, functools.partial(self._owner.close, mode, reply))
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


def serve(engine: Any) -> Service:
    """Starts a thread that owns the engine, and returns the handle that other threads and asyncio tasks use.

    Raises:
      RuntimeError: another thread uses the engine.
    """
    return Service(engine)


def end_thread(owner: Owner, thread: threading.Thread) -> None:
    """Cancels unfinished requests, unless `close("wait")` was called, and waits until the thread has ended."""
    reply: Reply[None] = Reply()
    with contextlib.suppress(RuntimeError):  # it has ended
        owner.put(reply, functools.partial(owner.leave, reply))
    if thread is not threading.current_thread():
        thread.join()
