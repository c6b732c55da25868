"""Replicas as one engine: what a caller such as `generate`, `Rollout` or `jkv eval` asks of a `jkv.Engine`, of many.

Samples go to whichever replica has room (`jkv.replicas.dispatcher`). They come back whole, so an event comes once for each
sample, at its end. Between two calls of `step` replicas decode on; `rest` stops them.
"""

import contextlib
import itertools
import queue
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jkv.engine.backend import run_to_end
from jkv.engine.clocks import running_seconds
from jkv.engine.memory import most_pages
from jkv.engine.outputs import Event, Outputs
from jkv.engine.requests import Request
from jkv.engine.results import Result, make_result
from jkv.engine.samples import Completion, Sample, samples_of, take_finished
from jkv.engine.service import Reply
from jkv.engine.stats import RunStats
from jkv.model.params import Model, Params
from jkv.replay.trace import TraceRecorder
from jkv.replicas.dispatcher import Open
from jkv.replicas.replica import Finished, Item

NO_ROWS = (
    "A conversation of several turns goes on in the row that its last turn has left, and replicas keep no rows. "
    'Use a mesh without the axis "data", or max_turns=1.'
)
TICK = 0.1  # seconds that `step` waits for a sample to finish, and so between two looks for Ctrl-C
STATS_SECONDS = 1.0  # for which statistics of replicas that decode count as new


class Caller:
    """One caller's samples on `jkv.Replicas`; for one thread at a time.

    Args:
      replicas: run the samples of this caller and of others.

    Attributes:
      tickets: the samples of each request.
    """

    def __init__(self, replicas: Any) -> None:
        self.replicas, self.options, self.tickets = replicas, replicas.options, dict[int, list[Sample]]()
        self._is_traced = self.options.return_trace
        self._ticket, self._outputs = itertools.count(), Outputs(replicas.model, self.tickets, self._end_early)
        self._new: list[Sample] = []  # that no replica has yet
        self._open: dict[int, Sample] = {}  # the others that have not come back, by number
        self._numbers: dict[Sample, int] = {}  # of each of these
        self._done: queue.SimpleQueue[tuple[int, Reply[Finished]]] = queue.SimpleQueue()

    def check(self, request: Request) -> Request:
        """Refuses a request that no replica can serve. Returns it, with a limit that was left open lowered to what fits.

        Raises:
          ValueError: the reason, with the arithmetic.
        """
        if request.keep:
            raise ValueError(NO_ROWS)
        return self.replicas.check(request)

    def submit_requests(self, requests: Sequence[Request], on_tokens: Callable[[Event], None] | None = None) -> int:
        """Queues requests under one ticket; tickets count from 0."""
        requests = [self.check(request) for request in requests]
        ticket, params, page_size = next(self._ticket), self.replicas.model.params, self.replicas.facts.page_size
        given: Any = {"on_tokens": on_tokens, "submitted": running_seconds()}
        self.tickets[ticket] = [
            Sample(ticket, i, request, Completion(), most_pages(params, request, page_size), **given)
            for i, request in enumerate(requests)
        ]
        self._new += self.tickets[ticket]
        return ticket

    def step(self) -> list[Event]:
        """Lets the replicas decode until a sample is finished, or a moment longer; returns the events since the last step.

        Raises:
          ValueError: the replicas sleep, and a sample is unfinished.
          KeyboardInterrupt: a callback raised it (or `SystemExit` and the like).
          RuntimeError: a replica could not finish a sample, which ends with the reason "error"; or all replicas are lost.
        """
        if self.replicas.is_asleep and (self._new or self._open):
            raise ValueError("The replicas are asleep. Call wake() first.")
        self.replicas.enter(self)
        self._send()
        error = self._receive(TICK)
        raised, self._outputs.raised = self._outputs.raised or error, None
        if raised is not None:
            raise raised
        return self._outputs.take()

    def _send(self) -> None:
        """Gives waiting samples to the dispatcher; the samples of one prompt go as a group, which shares its prefill."""
        groups: dict[Any, list[Open]] = {}
        for sample in self._new:
            number, reply = next(self.replicas.numbers), Reply[Finished]()
            item = Item.of(number, sample.request, self.replicas.policies, self._is_traced)
            self._open[item.number], self._numbers[sample] = sample, number
            reply.add_done_callback(lambda reply, number=item.number: self._done.put((number, reply)))
            groups.setdefault(sample.request.prefix, []).append(Open(item, sample.most_pages, reply))
        self._new = []
        try:
            if groups:
                self.replicas.submit(list(groups.values()))
        except RuntimeError as error:
            for one in (one for group in groups.values() for one in group):
                one.reply.set_exception(error)

    def _receive(self, seconds: float) -> BaseException | None:
        """Takes what has finished, and waits so long for the first; returns the error of a sample that could not finish."""
        failed = None
        with contextlib.suppress(queue.Empty):
            while self._open:
                number, reply = self._done.get(timeout=seconds)
                seconds = 0
                sample = self._open.pop(number)
                del self._numbers[sample]
                error = None if reply.cancelled() else reply.exception()
                if sample.is_finished:  # a callback has ended it
                    continue
                if reply.cancelled():
                    self._end(sample, "cancelled")
                elif error is not None:
                    sample.completion.error, failed = error, error
                    self._end(sample, "error")
                else:
                    reply.result().land(sample)
                self._outputs.emit(sample)
        return failed

    def _end(self, sample: Sample, reason: str) -> None:
        """Ends a sample that no replica has finished."""
        completion, config = sample.completion, self.replicas.model.config
        completion.finish_reason, completion.seconds = reason, sample.seconds
        if self._is_traced:
            recorder = TraceRecorder(config.num_paged_layers, config.num_kv_heads, len(sample.request.prompt))
            given = sample.request.first_prompt, self.replicas.facts.page_size, self.options.kv_format
            completion.trace = recorder.finish(len(sample.request.prompt), *given)

    def _end_early(self, sample: Sample, reason: str) -> None:
        """Ends a sample whose callback has raised, wherever it is."""
        self._end(sample, reason)
        self._new = [other for other in self._new if other is not sample]
        self._cancel([sample])

    def cancel(self, ticket: int) -> None:
        """Ends a request's unfinished samples; they keep the tokens they have. Replicas rest until the next step.

        Raises:
          ValueError: an unknown ticket.
        """
        samples = samples_of(self.tickets, ticket)
        self._send()
        self.rest()
        with contextlib.suppress(RuntimeError):  # closed: they have come back
            self._cancel(samples)
        while not all(sample.is_finished for sample in samples):
            self._receive(TICK)

    def _cancel(self, samples: Sequence[Sample]) -> None:
        """Ends the samples that replicas have."""
        self.replicas.cancel([self._numbers[sample] for sample in samples if sample in self._numbers])

    def abandon(self) -> None:
        """Ends all that is unfinished, without waiting for it, and uses the replicas no more."""
        self._new = []
        if self._open:
            with contextlib.suppress(RuntimeError):  # closed
                self.replicas.cancel(list(self._open))
        self.replicas.leave(self)

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished and no event pending."""
        return not self._new and not self._open and not self._outputs.events

    def rest(self) -> None:
        """Until the next `step`, samples stay where they are; replicas that nobody else waits for decode nothing."""
        self.replicas.leave(self)

    def take(self, tickets: Sequence[int]) -> list[Sample]:
        """Returns the samples of finished requests, in order, and drops the requests.

        Raises:
          ValueError: an unknown ticket, or one that is not finished.
        """
        return take_finished(self.tickets, tickets)


class Front(Caller):
    """One caller's samples on `jkv.Replicas`, with the methods of a `jkv.Engine`; for one thread at a time.

    Args:
      replicas: run the samples of this caller and of others.
      is_owner: whether the replicas end with this object.
    """

    def __init__(self, replicas: Any, is_owner: bool = False) -> None:
        super().__init__(replicas)
        self._stats, self._stats_time = RunStats(), -STATS_SECONDS
        self._close = weakref.finalize(self, replicas.close) if is_owner else None

    def run(self, on_events: Callable[[list[Event]], None] | None = None) -> None:
        """Runs until all requests are finished. Ctrl-C cancels them; they keep their tokens."""
        run_to_end(self, on_events)

    def result(self, ticket: int) -> Result:
        """Returns a finished request's result and drops it: see `Engine.result`."""
        return make_result(self.model, self.take([ticket]), self.stats, self.is_traced)

    def extend(self, ticket: int, tokens: Sequence[int], **settings: Any) -> int:
        """Refuses a next turn, which needs a kept row."""
        raise ValueError(NO_ROWS)

    def release(self, ticket: int) -> None:
        """Nothing: replicas keep no rows for a next turn."""

    @property
    def stats(self) -> RunStats:
        """Statistics of all replicas since they had nothing to do; while they decode, up to a second old."""
        is_late = time.monotonic() - self._stats_time >= STATS_SECONDS
        if is_late or not (self._new or self._open):
            self._stats, self._stats_time = self.replicas.stats, time.monotonic()
        return self._stats

    def reset_stats(self) -> None:
        """Nothing: replicas start from zero when they had nothing to do."""

    @property
    def is_traced(self) -> bool:
        """Whether samples that are submitted from now on carry traces."""
        return self._is_traced

    @is_traced.setter
    def is_traced(self, is_traced: bool) -> None:
        self._is_traced = is_traced

    # Weights and memory.

    @property
    def model(self) -> Model:
        """The model with the weights in use; of replicas in other processes, with their shapes."""
        return self.replicas.newest_model

    @property
    def version(self) -> int:
        """Of the weights in use: how often they were replaced."""
        return self.replicas.version

    def update(self, params: Params) -> None:
        """Uses new weights everywhere: see `jkv.Replicas.update`."""
        self.replicas.update(params)

    def sleep(self, forget_weights: bool = False) -> None:
        """Frees the pools: see `jkv.Replicas.sleep`."""
        self.replicas.sleep(forget_weights)

    def wake(self) -> None:
        """Allocates the pools again."""
        self.replicas.wake()

    @property
    def is_asleep(self) -> bool:
        """Whether the pools are freed."""
        return self.replicas.is_asleep

    def reset(self) -> None:
        """Makes empty pools, and starts every unfinished sample again: see `Engine.reset`."""
        self.replicas.ask("reset")

    def close(self) -> None:
        """Ends the replicas, if they are this object's own."""
        if self._close is not None:
            self._close()
