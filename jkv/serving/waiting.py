"""Waits of an endpoint: for results, for a client that goes away, and for the end of what it left."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request

from jkv.engine.results import Result
from jkv.engine.service import Ticket


async def gathered(tickets: Sequence[Ticket]) -> list[Result]:
    """The results of requests."""
    return [await ticket for ticket in tickets]


async def until_gone(request: Request, work: Awaitable[Any]) -> Any:
    """What the work returns, unless the client goes away first.

    Raises:
      ClientDisconnect: it went.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # else their ends are reported as errors that nobody read


def when_all_end(tickets: Sequence[Ticket], act: Callable[[], None]) -> None:
    """Calls `act` once all requests have ended: at once, or in the thread that ends the last one."""
    open_ones, lock = len(tickets), threading.Lock()

    def ended(_: Any) -> None:
        nonlocal open_ones
        with lock:
            open_ones -= 1
            is_last = open_ones == 0
        if is_last:
            act()

    if not tickets:
        act()
    for ticket in tickets:
        ticket.add_done_callback(ended)
