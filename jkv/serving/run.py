"""Runs an application on a socket until it is asked to end."""

import asyncio
import contextlib
import dataclasses
import signal
import socket
from typing import Any

import uvicorn

from jkv.engine.engine import Engine
from jkv.engine.scheduler import CHUNKS
from jkv.engine.service import Service
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.model.sampling import Sampling
from jkv.policies import make as make_policy
from jkv.policies.table import streaming_llm
from jkv.serving.access import LOOPBACK, is_loopback
from jkv.serving.app import make_app
from jkv.serving.options import ServerOptions
from jkv.serving.trainer import TrainerOptions, add_routes

BACKLOG = 1024  # connections that wait to be accepted
CUT = Sampling(temperature=1.0, top_p=0.95)  # whose program draws for all that have no penalties
PENALISED = Sampling(temperature=1.0, top_p=0.95, presence_penalty=0.5)
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


def warm_up(service: Service, policy: Policy, is_whole: bool) -> None:
    """Compiles programs before clients come, because an engine compiles in its own thread, which stops every stream.

    The first ones: prefill and a chunk of greedy decode steps. With `is_whole` also what most clients ask for: chunks of every
    size, for any draws, with penalties and without, with the model's own log-probabilities; prompts of every size; a
    compaction; two samples of a prompt; the second turn of a conversation. Others compile at their first use. Not counted.
    """
    asked: Any = {"policy": policy, "max_new_tokens": 2, "stop_ids": (), "model_logprobs": is_whole}
    if not is_whole:
        service.submit([0], sampling=Sampling(temperature=0.0), **asked).result()
    else:
        engine = service.engine
        for sampling in (PENALISED, CUT):  # greedy draws then have the program of the latter
            service.call(lambda engine: engine.runner.lower()).result()
            for steps in CHUNKS:
                one_chunk = streaming_llm(budget=4 * steps, interval=steps)
                service.submit([0], sampling=sampling, **asked | {"policy": one_chunk, "max_new_tokens": steps}).result()
        longer = (policy.target(1, 0) or 0) + 1  # than the budget
        for length in (*engine.runner.prefill_sizes, longer):
            with contextlib.suppress(ValueError):  # the context is too short
                service.submit([0] * length, **asked).result()
        service.submit([0], n=2, **asked).result()
        with contextlib.suppress(ValueError):  # the policy ends with a turn
            first = service.submit([0], keep=True, **asked)
            first.result()
            first.extend([0], max_new_tokens=2, stop_ids=()).result()
    service.call(lambda engine: engine.reset_stats()).result()


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
    is_whole: bool = True,
    trainer: TrainerOptions | None = None,
) -> None:
    """Serves an engine, once it is warm (`is_whole`: see `warm_up`), until SIGINT or SIGTERM; `trainer` adds its endpoints.

    Then nothing new is accepted, and requests in flight have `drain` seconds.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which uvicorn calls once it has ended
    with Service(engine) as service, contextlib.suppress(KeyboardInterrupt):
        warm_up(service, make_policy(options.policy, options.settings), is_whole)
        app = make_app(service, with_own_names(options, place))
        if trainer is not None:
            add_routes(app, trainer)
        make_server(app, drain).run(sockets=[place])
