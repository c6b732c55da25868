"""An engine and its service, as a replica uses them: items in, messages out. The same in a thread's process and in an actor."""

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jkv.engine.engine import Engine
from jkv.engine.options import EngineOptions
from jkv.engine.outputs import text_of
from jkv.engine.samples import Sample
from jkv.engine.service import Service, Ticket
from jkv.engine.stats import RunStats
from jkv.eviction import Policy
from jkv.model.params import Model
from jkv.replicas.buckets import check_digests, with_leaves
from jkv.replicas.replica import Facts, Failed, Finished, Item, Lost, Message, Post, Rows


class Worker:
    """Runs items on an engine of its own, whose owner thread posts what has finished.

    Args:
      model: its weights lie where the engine is to run.
      policies: what items name by their index.
      options: the engine's.
      version, digests: of the weights.
      post: receives messages, in the owner thread.

    Raises:
      RuntimeError: the weights have other digests.
    """

    def __init__(
        self,
        model: Model,
        policies: Sequence[Policy],
        options: EngineOptions,
        version: int,
        digests: np.ndarray,
        post: Post,
    ) -> None:
        self.policies, self._post = list(policies), post
        check_digests(model.params, digests, version)
        self.engine = Engine(model, options, policies=self.policies)
        self.engine.renumber(version)
        self.facts, self.version = Facts.of(self.engine), version
        self.tickets: dict[int, Ticket] = {}  # of items that are neither finished nor given up
        self._lock, self._earlier_chunks = threading.Lock(), 0  # those before statistics began again
        self._adding, self._is_traced = threading.Lock(), options.return_trace
        self.service = Service(self.engine, self._collect)

    @property
    def num_chunks(self) -> int:
        """Chunks that the engine has decoded since it was built: whether it goes on."""
        return self._earlier_chunks + self.engine.stats.chunks

    def submit(self, items: Sequence[Item]) -> None:
        """Queues items."""
        with self._adding:
            self._trace(items)
            for item in items:
                self._add(item, lambda item=item: self.service.submit_requests([item.restored(self.policies)]))

    def restore(self, items: Sequence[Item], content: Mapping[int, bytes]) -> None:
        """Queues items whose rows are in a snapshot."""
        with self._adding:
            self._trace(items)
            for item in items:
                policy = self.policies[item.policy]
                self._add(item, lambda item=item, policy=policy: self.service.resume_row(content[item.number], policy))

    def _trace(self, items: Sequence[Item]) -> None:
        """Turns tracing on for items that ask for it, and off for items that do not, if no others are unfinished."""
        is_traced = any(item.is_traced for item in items)
        with self._lock:
            if is_traced == self._is_traced or (self.tickets and not is_traced):
                return
            self._is_traced = is_traced
        with contextlib.suppress(RuntimeError):  # the service has ended, which adding an item reports
            self.service.call(lambda engine: setattr(engine, "is_traced", is_traced))

    def _add(self, item: Item, submit: Any) -> None:
        try:
            ticket = submit()
        except Exception as error:
            self._fail(item.number, error)
            return
        with self._lock:
            self.tickets[item.number] = ticket
        ticket.add_done_callback(functools.partial(self._done, item.number))

    def _collect(self, ticket: int) -> Sample:
        """What a finished request's ticket is given: its sample, with the text."""
        (sample,) = self.engine.take([ticket])
        if self.engine.model.tokenizer is not None:
            text_of(self.engine.model.tokenizer, sample)
        return sample

    def _done(self, number: int, ticket: "Future[Any]") -> None:
        with self._lock:
            is_ours = self.tickets.pop(number, None) is not None
        if not is_ours:  # drained: another replica goes on with it
            return
        if (error := ticket.exception()) is not None:
            self._fail(number, error)
        else:
            self._post(Finished.of(number, ticket.result()))

    def _fail(self, number: int, error: BaseException) -> None:
        """An item's error, or the end of the whole engine."""
        message: Message = Failed(number, error)
        if self.service.failure:
            message = Lost(RuntimeError(self.service.failure))
        self._post(message)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ends items; they come back with the tokens that they have."""
        with self._lock:
            tickets = [self.tickets[number] for number in numbers if number in self.tickets]
        for ticket in tickets:
            ticket.cancel()

    def update(self, leaves: Mapping[int, Any], version: int, digests: np.ndarray) -> None:
        """Uses new weights, and returns once the engine does; unfinished items go on with them.

        Raises:
          RuntimeError: the version does not follow the one before: an update was lost on the way. Or these leaves and those
            that stay have other digests than the weights that were sent.
          ValueError: weights that the engine refuses.
        """

        def apply(engine: Engine) -> None:
            if version != engine.runner.version + 1:
                raise RuntimeError(f"Weights of version {version} came to a replica of version {engine.runner.version}.")
            params = with_leaves(engine.model.params, leaves)
            check_digests(params, digests, version)
            engine.update(params)

        self.service.call(apply).result()

    def snapshot(self) -> dict[int, bytes]:
        """The rows that run now, by item; they go on."""
        rows = self.service.call(Engine.copy_rows).result()
        with self._lock:
            return {number: rows[ticket.number] for number, ticket in self.tickets.items() if ticket.number in rows}

    def drain(self) -> Rows:
        """Takes all items out of the engine; those that run leave their rows."""
        self.service.pause("keep").result()
        content = self.snapshot()
        with self._lock:
            given_up, self.tickets = list(self.tickets.values()), {}
        for ticket in given_up:
            ticket.cancel()
        self.service.resume().result()
        return Rows(frozenset(content), content, is_last=True)

    def reset_stats(self) -> None:
        """Statistics start from zero."""

        def reset(engine: Engine) -> None:
            self._earlier_chunks += engine.stats.chunks
            engine.reset_stats()

        self.service.call(reset)

    def stats(self) -> RunStats:
        """The engine's statistics."""
        return self.service.call(lambda engine: engine.stats).result()

    @property
    def is_resting(self) -> bool:
        """Whether it decodes nothing because it was told so."""
        return self.service.is_paused or self.engine.is_asleep

    def pause(self) -> None:
        """Decodes nothing until `resume`; items wait."""
        self.service.pause("keep").result()

    def resume(self) -> None:
        """Ends a pause."""
        self.service.resume().result()

    def sleep(self, forget_weights: bool) -> None:
        """Frees the pool: see `Engine.sleep`."""
        self.service.call(lambda engine: engine.sleep(forget_weights)).result()

    def wake(self) -> None:
        """Allocates the pool again."""
        self.service.call(lambda engine: engine.wake()).result()

    def reset(self) -> None:
        """Makes an empty pool and starts all items again: see `Engine.reset`."""
        self.service.call(lambda engine: engine.reset()).result()

    def close(self) -> None:
        """Ends the service, and cancels what is unfinished."""
        with self._lock:
            self.tickets = {}
        self.service.close("abort").result()
