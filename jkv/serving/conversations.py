"""Conversations that clients go on with by the id of the last response: their rows stay in the engine (`jkv.engine.turns`).

All of it runs in the event loop, but for the end of a request, which the engine's thread announces.
"""

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from jkv.checks import shown
from jkv.engine.kept_rows import ENDS
from jkv.engine.service import Ticket
from jkv.reasoning.marks import marks_of
from jkv.serving.errors import RefusalError
from jkv.serving.jobs import Calls
from jkv.serving.messages import plain
from jkv.serving.options import ServerOptions
from jkv.serving.responses import AnswerReader, message_of


@dataclasses.dataclass(eq=False)
class Stored:
    """A response that a client may go on with.

    Attributes:
      ticket: of its request; None once another response continues it.
      messages: of the conversation, with the messages of its request.
      thinks: whether its prompt ends in thinking.
      calls: how its tool calls are found.
      later: the id of the response that continues it, if one does.
    """

    ticket: Ticket | None
    messages: list[Any]
    thinks: bool
    calls: Calls | None = None
    later: str = ""

    @property
    def reply(self) -> Any:
        """The response's own message, once it is finished."""
        assert self.ticket is not None
        result = self.ticket.result()
        assert result.text is not None
        return plain(message_of(result.text[0], AnswerReader(marks_of(result.tokenizer), self.thinks, self.calls)))


class Answers:
    """Responses that clients may read again, by id, the oldest first.

    Args:
      options: how many there may be, and for how long.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options, self._lock = options, threading.Lock()
        self._found: dict[str, tuple[float, dict[str, Any]]] = {}  # with the time of its end

    def add(self, response: dict[str, Any]) -> None:
        """Stores a finished response, if it is to be stored."""
        if not response["store"]:
            return
        with self._lock:
            self._found[response["id"]] = time.monotonic(), response
            while len(self._found) > self.options.max_conversations:
                del self._found[next(iter(self._found))]

    def find(self, name: str) -> dict[str, Any]:
        """The response with an id.

        Raises:
          RefusalError: 404 where there is none.
        """
        with self._lock:
            end, response = self._found.get(name, (0.0, {}))
            if response and time.monotonic() - end > self.options.conversation_seconds:
                del self._found[name]
                response = {}
        if not response:
            raise RefusalError(
                404, f"Response with id {shown(name)} not found. Send the id of a stored response.", "response_id"
            )
        return response

    def forget(self, name: str) -> None:
        """Forgets a response."""
        with self._lock:
            self._found.pop(name, None)


class Conversations:
    """The responses that are kept, by id, the oldest first; each for a limited time after it was finished.

    Args:
      options: how many there may be, and for how long.
      count: counts a response that is forgotten, by its reason: "expired", "displaced" by later ones, or "unfinished" (it did
        not end by itself).
    """

    def __init__(self, options: ServerOptions, count: Callable[[str], None] = lambda reason: None) -> None:
        self.options, self.count = options, count
        self._stored: dict[str, Stored] = {}

    def __len__(self) -> int:
        """How many have a row, or will have one."""
        return sum(one.ticket is not None for one in self._stored.values())

    def find(self, name: str) -> Stored:
        """The response with an id, finished and not continued yet.

        Raises:
          RefusalError: 404 where there is none, 409 where it runs or another response continues it.
        """
        one, field = self._stored.get(name), "previous_response_id"
        if one is None:
            raise RefusalError(
                404,
                f"Previous response with id {shown(name)} not found: {field} must be the id of a response that was stored, "
                f"finished by itself, and is no older than {self.options.conversation_seconds:g} seconds. Send the whole "
                "conversation without it.",
                field,
                "previous_response_not_found",
            )
        if one.ticket is None:
            raise RefusalError(409, f"{field} must be the last response; {one.later} continues {name}. Send that one.", field)
        if not one.ticket.done():
            raise RefusalError(409, f"{field} must be a finished response; {name} still runs. Wait for its end.", field)
        return one

    def add(self, name: str, one: Stored) -> None:
        """Stores a response whose request is submitted. With more than may be stored, the oldest are forgotten."""
        loop, ticket = asyncio.get_running_loop(), one.ticket
        assert ticket is not None
        self._stored[name] = one
        while len(self) > self.options.max_conversations:
            self.forget(next(name for name, one in self._stored.items() if one.ticket is not None), "displaced")

        def ended(ticket: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the server with it
                loop.call_soon_threadsafe(self._ended, name, ticket)

        ticket.add_done_callback(ended)

    def go_on(self, last: str, name: str) -> None:
        """Notes which response continues another one. Its row is the later one's."""
        one = self._stored[last]
        one.ticket, one.later, one.messages = None, name, []

    def _ended(self, name: str, ticket: Ticket) -> None:
        """Lets a finished response expire, or forgets one that did not end by itself."""
        is_whole = not ticket.cancelled() and ticket.exception() is None and ticket.result().finish_reason[0] in ENDS
        if is_whole:
            seconds = self.options.conversation_seconds
            asyncio.get_running_loop().call_later(seconds, functools.partial(self.forget, name, "expired"))
        else:
            self.forget(name, "unfinished")

    def forget(self, name: str, reason: str = "") -> None:
        """Forgets a response and frees its row; what was forgotten already stays so."""
        one = self._stored.pop(name, None)
        if one is not None and one.ticket is not None:
            if reason:
                self.count(reason)
            with contextlib.suppress(RuntimeError):  # the service is closed
                one.ticket.close()

    def close(self) -> None:
        """Forgets all of them."""
        for name in list(self._stored):
            self.forget(name)
