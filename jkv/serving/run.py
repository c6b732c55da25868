"""Runs an application on a socket until it is asked to end."""

import contextlib
import signal
import socket
from typing import Any

import uvicorn

from jkv.engine.service import Service
from jkv.policies import Policy
from jkv.policies import make as make_policy
from jkv.serving.app import make_app
from jkv.serving.options import ServerOptions

BACKLOG = 1024  # connections that wait to be accepted


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 takes a free one.

    Raises:
      ValueError: the address is taken, or is none of this machine.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port must lie in [0, 65536), 0 takes a free one; got {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)  # who comes before the server is ready waits
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--host and --port must be a free address of this machine; got {host} and {port}: {error}. Give another."
        ) from None
    return found


def make_server(app: Any, drain: float) -> uvicorn.Server:
    """A server whose requests in flight have `drain` seconds to end, once it is asked to end itself."""
    settings: Any = {"log_level": "warning", "access_log": False, "server_header": False, "ws": "none", "lifespan": "on"}
    return uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=max(1, round(drain)), **settings))


def warm_up(service: Service, policy: Policy) -> None:
    """Compiles the first programs, so that no client waits for them; others compile when they are first used. Not counted."""
    service.submit([0], policy=policy, max_new_tokens=2, stop_ids=()).result()
    service.call(lambda engine: engine.reset_stats()).result()


def run(engine: Any, options: ServerOptions, place: socket.socket, drain: float) -> None:
    """Serves an engine, once it is warm, until SIGINT or SIGTERM.

    Then nothing new is accepted, and requests in flight have `drain` seconds.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which uvicorn calls once it has ended
    with engine.serve() as service, contextlib.suppress(KeyboardInterrupt):
        warm_up(service, make_policy(options.policy, options.settings))
        make_server(make_app(service, options), drain).run(sockets=[place])
