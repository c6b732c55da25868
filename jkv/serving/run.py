"""Runs an application on a socket until it is asked to end."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
from typing import Any

import uvicorn

from jkv.engine.engine import Engine
from jkv.engine.service import Service
from jkv.errors import refused
from jkv.policies import make as make_policy
from jkv.serving.access import LOOPBACK, is_loopback
from jkv.serving.app import make_app
from jkv.serving.options import ServerOptions
from jkv.serving.trainer import TrainerOptions, add_routes
from jkv.serving.warm_up import LEVELS, WarmUp

LOGGER = logging.getLogger("jkv.serving")
BACKLOG = 1024  # connections that wait to be accepted
LAST_SECONDS = 5  # in which clients receive what there is, once their requests were cancelled at the end


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 takes a free one.

    Raises:
      ValueError: the address is taken, or is none of this machine.
    """
    if not 0 <= port < 1 << 16:
        raise refused(f"--port must lie in [0, 65536), 0 takes a free one; got {port}.", port="out_of_range")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)  # who comes before the server is ready waits
    except (OSError, OverflowError) as error:
        rule = f"--host and --port must be a free address of this machine; got {host} and {port}: {error}. Give another."
        raise refused(rule, host="conflict") from None
    return found


class DrainingServer(uvicorn.Server):
    """A server whose open requests have `drain` seconds to end, once it is asked to end itself.

    Then they are cancelled, and their clients receive the tokens so far, with the reason "abort".
    """

    def __init__(self, config: uvicorn.Config, drain: float) -> None:
        super().__init__(config)
        self.drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts nothing new, and waits for what is open."""
        app: Any = self.config.app
        timer = asyncio.get_running_loop().call_later(self.drain, app.state.server.end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def make_server(app: Any, drain: float) -> DrainingServer:
    """A server of an application, with `drain` seconds for open requests at its end."""
    settings: Any = {"log_level": "warning", "access_log": False, "server_header": False, "ws": "none", "lifespan": "on"}
    return DrainingServer(uvicorn.Config(app, timeout_graceful_shutdown=round(drain) + LAST_SECONDS, **settings), drain)


def with_own_names(options: ServerOptions, place: socket.socket) -> ServerOptions:
    """The options; a server that only this machine reaches may be called by this machine's own names, and those given."""
    address = place.getsockname()[0]
    if not is_loopback(address):
        return options
    return dataclasses.replace(options, hosts=tuple({*LOOPBACK, address, *options.hosts}))


def run(
    engine: Engine,
    options: ServerOptions,
    place: socket.socket,
    drain: float,
    level: str = LEVELS[0],
    trainer: TrainerOptions | None = None,
) -> None:
    """Serves an engine until SIGINT or SIGTERM; `trainer` adds its endpoints.

    Until it is warm (`level`: see `WarmUp`), requests are refused, and the server ends at once when it is asked to. Later,
    nothing new is accepted then, and requests in flight have `drain` seconds.

    Raises:
      BaseException: what failed in the warm-up.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which uvicorn calls once it has ended
    with Service(engine, compiles_apart=True) as service:
        app = make_app(service, with_own_names(options, place))
        if trainer is not None:
            add_routes(app, trainer)
        server, warm_up = make_server(app, drain), WarmUp(service, make_policy(options.policy, options.settings), level)
        app.state.server.warm_up = warm_up

        def ended() -> None:
            if warm_up.error is None:
                LOGGER.info("ready at %s", address_of(place))
            else:
                server.should_exit = True

        warm_up.start(ended)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[place])
        if warm_up.error is not None:
            raise warm_up.error
        if not warm_up.is_done:
            leave_at_once()


def address_of(place: socket.socket) -> str:
    """The address of a socket as clients write it."""
    host, port = place.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def leave_at_once() -> None:
    """Ends the process while the engine's thread compiles, which nothing interrupts; nobody has been served yet."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
