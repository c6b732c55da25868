"""Compiles programs before clients come, because an engine compiles in its own thread, which stops every stream."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from jkv.engine.clocks import COMPILING
from jkv.engine.engine import Engine
from jkv.engine.filling import STEPS
from jkv.engine.scheduler import CHUNKS
from jkv.engine.service import Service
from jkv.eviction import Policy
from jkv.model.sampling import Sampling
from jkv.policies.table import streaming_llm
from jkv.serving.errors import RefusalError

LOGGER = logging.getLogger("jkv.serving")
LEVELS = ("most", "first", "all")  # the first one is the default
CUT = Sampling(temperature=1.0, top_p=0.95)  # whose program draws for all that have no penalties
PENALISED = Sampling(temperature=1.0, top_p=0.95, presence_penalty=0.5)
RETRY_SECONDS = 5  # after which a client that came too early may try again
Step = Callable[[], None]


class WarmUp:
    """Requests that make an engine compile its programs; they are not counted.

    Args:
      service: of the engine.
      policy: the server's own.
      level: what is compiled. "first": prefill and a chunk of greedy decode steps. "most": what requests of the server's policy
        need, with any draws that have no penalties (or with them, if the model's own sampling has them), and with the model's
        own log-probabilities: prompts of every size, a compaction, and the chunks that such requests make. "all" adds
        penalties, chunks of every size, two samples of a prompt, and the second turn of a conversation. Whatever is left out
        compiles at its first use.

    Attributes:
      num_done, num_steps: requests that are done, and all.
      error: what ended it early; None if nothing did.
    """

    def __init__(self, service: Service, policy: Policy, level: str) -> None:
        self.error: BaseException | None = None
        self._steps = steps_of(service, policy, level)
        self.num_done, self.num_steps = 0, len(self._steps) + 1
        self._service = service

    @property
    def is_done(self) -> bool:
        """Whether everything is compiled."""
        return self.num_done == self.num_steps

    def run(self) -> None:
        """Compiles."""
        began, programs = time.perf_counter(), COMPILING.count
        self._service.call(lambda engine: engine.runner.foreseen.switch(False)).result()  # nobody waits for the thread yet
        for step in (*self._steps, self._end):
            LOGGER.info("warming up, %d of %d", self.num_done, self.num_steps)
            step()
            self.num_done += 1
        seconds = time.perf_counter() - began
        LOGGER.info("warm after %.1f seconds, %d programs", seconds, COMPILING.count - programs)

    def _end(self) -> None:
        """From now on another thread compiles missing programs, and the figures start at zero."""

        def end(engine: Engine) -> None:
            engine.runner.foreseen.switch(True)
            engine.clear_prefix_cache()
            engine.reset_stats()

        self._service.call(end).result()

    def start(self, ended: Callable[[], None]) -> None:
        """Compiles in a thread of its own, and calls `ended` at the end, whatever ends it."""

        def run() -> None:
            try:
                self.run()
            except BaseException as error:
                self.error = error
            ended()

        threading.Thread(target=run, name="the warm-up", daemon=True).start()

    def check(self) -> None:
        """Refuses a request as long as it lasts.

        Raises:
          RefusalError: 503 with how far it is.
        """
        if not self.is_done:
            message = f"The server is warming up, {self.num_done} of {self.num_steps}. Try again later."
            raise RefusalError(503, message, headers={"retry-after": str(RETRY_SECONDS)})


def steps_of(service: Service, policy: Policy, level: str) -> list[Step]:
    """The requests of a level of `WarmUp`."""
    engine = service.engine
    asked: Any = {"policy": policy, "max_new_tokens": 2, "stop_ids": (), "model_logprobs": level != "first"}

    def submit(length: int = 1, **others: Any) -> Step:
        def step() -> None:
            with contextlib.suppress(ValueError):  # the context is too short
                salt = f"the warm-up's {length}"  # else the prefix cache finds a part of it
                service.submit([0] * length, cache_salt=salt, **asked | others).result()

        return step

    if level == "first":
        return [submit(sampling=Sampling(temperature=0.0))]
    own = engine.model.sampling
    usual = PENALISED if own is not None and own.penalises else CUT
    draws = [PENALISED, CUT] if level == "all" else [usual]  # greedy draws then have the program of the latter
    steps: list[Step] = []
    for sampling in draws:
        steps.append(functools.partial(forget_draws, service))
        steps += [submit(sampling=sampling, **one_chunk(engine, size)) for size in sizes(engine, policy, level)]
    longer = (policy.target(1, 0) or 0) + 1  # than the budget
    steps += [submit(length, sampling=usual) for length in dict.fromkeys((*engine.runner.prefill.sizes, longer))]
    if level == "all":
        steps += [submit(n=2), functools.partial(two_turns, service, asked)]
    return steps


def forget_draws(service: Service) -> None:
    """Lets the engine's next chunks draw for the requests that come from now on alone."""
    service.call(lambda engine: engine.runner.lower()).result()


def two_turns(service: Service, asked: dict[str, Any]) -> None:
    """A conversation, unless the policy ends with a turn."""
    with contextlib.suppress(ValueError):
        first = service.submit([0], keep=True, **asked)
        first.result()
        first.extend([0], max_new_tokens=2, stop_ids=()).result()


def sizes(engine: Engine, policy: Policy, level: str) -> list[int]:
    """Decode steps of the chunks that requests make, each of which is a program.

    A chunk passes no compaction that is due. Rows that no compaction stops make whole chunks, shorter ones for a first token
    and while prompts wait, and chunks of one step while longer ones are being compiled.
    """
    most = engine.options.chunk
    if level == "all" or policy.steps_until_due(0):
        return [size for size in CHUNKS if size <= most]
    return sorted({most, min(most, STEPS), min(most, first_chunk(engine)), 1}, reverse=True)


def first_chunk(engine: Engine) -> int:
    """Decode steps until a row's first token."""
    return engine.options.first_chunk or engine.options.chunk


def one_chunk(engine: Engine, size: int) -> dict[str, Any]:
    """The policy and the limit of a request that makes a chunk of a size, after the one for its first token if that is another.

    A compaction is due at its end, which has nothing to evict yet.
    """
    first = first_chunk(engine)
    steps = size if size <= first else first + size
    return {"policy": streaming_llm(budget=4 * steps, interval=steps), "max_new_tokens": steps}
