"""`jkv.Replicas`: engines of one model behind one front, for more rows than one engine holds.

They are a `jkv.engine.backend.Backend`, as one engine is: so `generate`, `Rollout` and `jkv eval` run on either. Samples go to
whichever replica has room (`jkv.replicas.dispatcher`). They come back whole, so an event comes once for each sample, at its
end. Between two calls of `step` replicas decode on; `rest` stops them.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from jkv.checkpoints.adapters import Adapter
from jkv.checks import check_counts, check_known, counted, typed
from jkv.engine.adapter_store import AdapterPlaces, in_use, no_places
from jkv.engine.backend import run_to_end
from jkv.engine.clocks import running_seconds
from jkv.engine.engine import Engine
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.memory import check_fits, lowered, most_pages
from jkv.engine.options import EngineOptions
from jkv.engine.outputs import Event, Outputs
from jkv.engine.policy_checks import check_request
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, check_model, make_requests, new_weights, spread_policies
from jkv.engine.results import Result, make_result
from jkv.engine.samples import Completion, Sample, samples_of, take_finished
from jkv.engine.service import Reply, Service
from jkv.engine.stats import RunStats, merged_stats
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.model import weights
from jkv.model.joined import separate_weights
from jkv.model.params import LowRank, Model, Params
from jkv.model.sharding import num_parts
from jkv.policies import full
from jkv.progress import progress_bar
from jkv.replay.trace import TraceRecorder
from jkv.replicas.dispatcher import Dispatcher, Open
from jkv.replicas.options import RayOptions, RequestSettings
from jkv.replicas.replica import Carrier, Finished, Item
from jkv.replicas.threads import ThreadCarrier, places_of
from jkv.replicas.waiting import Load
from jkv.replicas.worker import digests_of

CARRIERS = ("threads", "ray")
NO_ROWS = (
    "A conversation of several turns goes on in the row that its last turn has left, and replicas keep no rows. "
    'Use a mesh without the axis "data", or max_turns=1.'
)
TICK = 0.1  # seconds that `step` waits for a sample to finish, and so between two looks for Ctrl-C
STATS_SECONDS = 1.0  # for which statistics of replicas that decode count as new
BUSY_SECONDS = 10.0  # after which an actor's statistics are left out
T = TypeVar("T")


class Shared:
    """What all sessions of the same replicas have in common, beside the dispatcher.

    Args:
      sent: digests of the weights that all replicas use; None where that is not known.
      adapters: the names of adapters, and what fits their places; None without places.

    Attributes:
      update: the reply of the newest update.
      updating: held while weights, or an adapter, are sent.
      waiting: held while replicas begin to rest, or to decode again.
      every: all sessions, by their `id`.
      sessions: those that wait for samples.
      is_resting: whether the replicas decode nothing, because no session waits.
      is_asleep: whether the pools are freed.
    """

    def __init__(self, sent: np.ndarray, adapters: AdapterPlaces | None) -> None:
        self.sent: np.ndarray | None = sent
        self.adapters, self.every = adapters, weakref.WeakValueDictionary[int, Replicas]()
        self.update: Reply[None] | None = None
        self.updating, self.waiting = threading.Lock(), threading.Lock()
        self.sessions = weakref.WeakSet[Replicas]()
        self.is_resting = self.is_asleep = False


class Replicas:
    """Engines of one model that share the prompts of a call; tokens are those that one of them would draw alone.

        mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), ("data", "tensor"))
        with jkv.Replicas(model, mesh=mesh, policies=[jkv.r_kv(budget=1024)], max_running=32) as replicas:
            out = replicas.generate(prompts, n=8)

    Items (one sample each) go to the replica with the fewest claimed pages that has a free row. The samples of a prompt stay
    together, since they share its prefill, unless rows would be idle. If a replica is lost, its items go on at others, with
    equal tokens. Any number of threads may call `generate`, `stream`, `update` and `retire`. Requests that are submitted one by
    one, as to a `jkv.Engine`, are for one thread at a time; others take a `session` each.

    Args:
      model_or_params: what `jkv.load` returns, or bare `Params` (prompts are token ids then).
      options: a `jkv.EngineOptions` for each replica.
      mesh: devices of this process, with the axes "data" (replicas) and "tensor" (devices of each): an engine for each row.
      num_replicas: in place of a mesh: one engine for each device, or several on each; with Ray, the number of actors.
      carrier: "threads" of this process, or actors of "ray" (extra `ray`; `ray.init` comes first, else Ray starts here).
      policies: the policies of later calls, which replicas receive once; None is the full cache alone. A policy of your own is
        compiled once in each process.
      restarts: how often a replica is started again after it was lost.
      ray: `jkv.replicas.options.RayOptions`: devices, timeouts and snapshots of actors.
      settings: fields of `jkv.EngineOptions` by name, which replace the fields of `options`. They count per replica:
        `max_running=32` is 32 rows on each.

    Attributes:
      policies: of the calls.
      options: of each engine.
      facts: sizes of each engine.
      tickets: the samples of each request that was submitted here.
      is_traced: whether samples that are submitted from now on carry traces.

    Raises:
      ValueError: settings that an engine refuses, a mesh that the model cannot be split over, devices that replicas cannot
        share evenly, or a policy that cannot be sent to another process.
      RuntimeError: a replica did not start in time.
    """

    def __init__(
        self,
        model_or_params: Model | Params,
        options: EngineOptions | None = None,
        *,
        mesh: Mesh | None = None,
        num_replicas: int | None = None,
        carrier: str = "threads",
        policies: Sequence[Policy] | None = None,
        restarts: int = 1,
        ray: RayOptions | None = None,
        **settings: Any,
    ) -> None:
        model = check_model(model_or_params)
        options = (options or EngineOptions()).changed(settings, inspect.signature(Replicas).parameters)
        check_counts(num_replicas=num_replicas)
        given = options.policies if policies is None else EngineOptions(policies=policies).policies
        given = [full()] if given is None else given
        self.policies = spread_policies(given, len(given), model.params, options.kv_format)
        self.options = options
        check_known(CARRIERS, carrier=carrier)
        if ray is not None and carrier != "ray":
            rule = f'ray= has settings of actors; got carrier={carrier!r}. Write carrier="ray", or leave it out.'
            raise refused(rule, ray="conflict")
        if (num_parts(mesh) if mesh is not None else (ray or RayOptions()).tensor) > 1:
            model = dataclasses.replace(model, params=separate_weights(model.params))  # a mesh splits these alone
        made: Carrier
        if carrier == "ray":
            made = ray_carrier(model, self.policies, options, mesh, num_replicas, ray or RayOptions())
        else:
            made = ThreadCarrier(model, self.policies, options, places_of(mesh, num_replicas))
        self._model = dataclasses.replace(model, params=weights.shapes_of(model.params))  # which keeps no weights alive
        sizes = options.max_adapters, options.adapter_rank
        adapters = AdapterPlaces(self._model.params, *sizes) if options.max_adapters else None
        self._numbers, self._shared = itertools.count(), Shared(digests_of(model.params), adapters)
        self._carrier, self._dispatcher = made, Dispatcher(made, typed("restarts", restarts, int))
        self._end = weakref.finalize(self, self._dispatcher.close)
        self.facts = next(iter(self._dispatcher.members.values())).replica.facts  # type: ignore[union-attr]
        self._begin()

    def _begin(self, other: "Replicas | None" = None) -> None:
        """Starts without samples; `other` is the session whose replicas these are, which end when nobody holds either."""
        self._other, self.is_traced, self.tickets = other, self.options.return_trace, dict[int, list[Sample]]()
        self._ticket, self._outputs = itertools.count(), Outputs(self._model, self.tickets, self._end_early)
        self._new: list[Sample] = []  # that no replica has yet
        self._open: dict[int, Sample] = {}  # the others that have not come back, by number
        self._sent: dict[Sample, int] = {}  # the number of each of these
        self._done: queue.SimpleQueue[tuple[int, Reply[Finished]]] = queue.SimpleQueue()
        self._stats, self._stats_time = RunStats(), -STATS_SECONDS
        self._shared.every[id(self)] = self

    def session(self) -> "Replicas":
        """The same replicas with separate requests, for another thread that submits. Its `close` ends the replicas for all."""
        session = copy.copy(self)
        session._begin(self)
        return session

    def __repr__(self) -> str:
        return f"Replicas({counted(self._carrier.count, 'replica')}, carrier={self._carrier.name!r}, version={self.version})"

    # Calls of many prompts.

    def generate(
        self, prompts: Any, *, prompt_mask: Any = None, progress: bool | None = None, **settings: Unpack[RequestSettings]
    ) -> Result:
        """Completions of one prompt or a list of them, as `jkv.generate` returns them: prompt-major, whoever made them.

        In `stats`, bytes and counts are totals over all replicas since they were last idle, and seconds are the longest of any
        replica.

        Args:
          prompts: a text, a list of token ids or a conversation (a list of messages), or a list of these.
          prompt_mask: of padded rows of token ids: see `jkv.generate`.
          progress: whether to show a bar; None shows it in a terminal or notebook.
          settings: fields of `jkv.RequestOptions`. `policy` is one of `policies`, or a list of one for each prompt; None is the
            first of them.

        Ctrl-C ends the items of this call and raises KeyboardInterrupt.

        Raises:
          ValueError: bad input, refused before anything is sent.
          RuntimeError: all replicas are lost, or those that had an item.
        """
        groups = self.requests(prompts, settings, prompt_mask)
        with self._call() as session:
            tickets = [session.submit_requests(group) for group in groups]
            with progress_bar(sum(map(len, groups)), progress, "replicas") as show:
                while not session.is_idle:
                    show(session.step())
            return make_result(self._model, session.take(tickets), session.stats, session.is_traced)

    def stream(
        self, prompts: Any, *, prompt_mask: Any = None, **settings: Unpack[RequestSettings]
    ) -> Iterator[tuple[int, Result]]:
        """Yields each sample as soon as it is finished: its index in the order of `generate`, and its result.

        Statistics are per sample; of the engines' statistics, only `platform` and page size are there. If the caller stops
        early, the others are cancelled.
        """
        groups = self.requests(prompts, settings, prompt_mask)
        run = dataclasses.replace(merged_stats([]), page_size=self.facts.page_size)
        with self._call() as session:
            for group in groups:
                for request in group:
                    session.submit_requests([request])
            while not session.is_idle:
                for event in session.step():
                    yield event.ticket, make_result(self._model, session.take([event.ticket]), run, session.is_traced)

    def requests(self, prompts: Any, settings: Mapping[str, Any], prompt_mask: Any = None) -> list[list[Request]]:
        """The checked requests of each prompt."""
        policy = settings.get("policy")
        options = RequestOptions(**{**settings, "policy": self.policies[0] if policy is None else policy})  # type: ignore[arg-type]
        ids = encode_prompts(self._model, prompts, options.parse_special, prompt_mask)
        groups = make_requests(self._model, ids, options, kv_format=self.options.kv_format)
        return [[self.check(request) for request in group] for group in groups]

    @contextlib.contextmanager
    def _call(self) -> "Iterator[Replicas]":
        """A session for one call; what is unfinished at the end of the block is cancelled."""
        session = self.session()
        try:
            yield session
        finally:
            session._new = []
            with contextlib.suppress(RuntimeError):  # closed
                session._cancel(list(session._open))
            session.rest()

    # Requests one by one, as of an engine.

    def check(self, request: Request) -> Request:
        """Refuses what no replica could serve; all have the same sizes. Returns the request with a limit that fits.

        Raises:
          ValueError: the reason, with the arithmetic.
        """
        if request.keep:
            raise refused(NO_ROWS, request="unsupported")
        if request.policy not in self.policies:
            raise refused(
                f"Replicas receive their policies once; got {request.policy.name} with settings that are not in policies="
                f"[{', '.join(policy.name for policy in self.policies)}]. Give it to jkv.Replicas(policies=[...]).",
                policy="conflict",
            )
        facts, params = self.facts, self._model.params
        sizes = {"max_slots": facts.max_slots, "num_pages": facts.num_pages, "page_size": facts.page_size}
        request = lowered(params, request, **sizes)
        check_fits(params, request, **sizes, bytes_per_page=facts.page_bytes)
        check_request(request, self.options, self.adapters)
        return request

    def submit_requests(self, requests: Sequence[Request], on_tokens: Callable[[Event], None] | None = None) -> int:
        """Queues requests under one ticket; tickets count from 0."""
        requests = [self.check(request) for request in requests]
        ticket, params, page_size = next(self._ticket), self._model.params, self.facts.page_size
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
        if self.is_asleep and (self._new or self._open):
            raise ValueError("The replicas are asleep. Call wake() first.")
        self._resume()
        self._send()
        error = self._receive(TICK)
        raised, self._outputs.raised = self._outputs.raised or error, None
        if raised is not None:
            raise raised
        return self._outputs.take()

    def _send(self) -> None:
        """Gives waiting samples to the dispatcher; the samples of one prompt go as a group, which shares its prefill."""
        groups: dict[Any, list[Open]] = {}
        done = self._done  # which the dispatcher may hold; this session ends when nobody else does
        for sample in self._new:
            number, reply = next(self._numbers), Reply[Finished]()
            item = Item.of(number, sample.request, self.policies, self.is_traced)
            self._open[number], self._sent[sample] = sample, number
            reply.add_done_callback(lambda reply, number=number: done.put((number, reply)))
            groups.setdefault(sample.request.prefix, []).append(Open(item, sample.most_pages, reply))
        self._new = []
        try:
            if groups:
                self._dispatcher.call(self._dispatcher.submit, list(groups.values())).result()
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
                del self._sent[sample]
                error = None if reply.cancelled() else reply.exception()
                if sample.is_finished:  # a callback has ended it
                    continue
                if reply.cancelled():
                    self._finish(sample, "cancelled")
                elif error is not None:
                    sample.completion.error, failed = error, error
                    self._finish(sample, "error")
                else:
                    reply.result().land(sample)
                self._outputs.emit(sample)
        return failed

    def _finish(self, sample: Sample, reason: str) -> None:
        """Ends a sample that no replica has finished."""
        completion, config = sample.completion, self._model.config
        completion.finish_reason, completion.seconds = reason, sample.seconds
        if self.is_traced:
            recorder = TraceRecorder(config.num_paged_layers, config.num_kv_heads, len(sample.request.prompt))
            given = sample.request.first_prompt, self.facts.page_size, self.options.kv_format
            completion.trace = recorder.finish(len(sample.request.prompt), *given)

    def _end_early(self, sample: Sample, reason: str) -> None:
        """Ends a sample whose callback has raised, wherever it is."""
        self._finish(sample, reason)
        self._new = [other for other in self._new if other is not sample]
        self._cancel([self._sent[sample]] if sample in self._sent else [])

    def cancel(self, ticket: int) -> None:
        """Ends a request's unfinished samples; they keep the tokens they have. Replicas rest until the next step.

        Raises:
          ValueError: an unknown ticket.
        """
        samples = samples_of(self.tickets, ticket)
        self._send()
        self.rest()
        with contextlib.suppress(RuntimeError):  # closed: they have come back
            self._cancel([self._sent[sample] for sample in samples if sample in self._sent])
        while not all(sample.is_finished for sample in samples):
            self._receive(TICK)

    def _cancel(self, numbers: Sequence[int]) -> None:
        """Ends the items of these numbers, which come back with the tokens that they have."""
        if numbers:
            self._dispatcher.call(self._dispatcher.cancel, numbers)

    @property
    def is_idle(self) -> bool:
        """Whether no request of this session is unfinished and no event pending."""
        return not self._new and not self._open and not self._outputs.events

    def run(self, on_events: Callable[[list[Event]], None] | None = None) -> None:
        """Runs until all requests are finished. Ctrl-C cancels them; they keep their tokens."""
        run_to_end(self, on_events)

    def result(self, ticket: int) -> Result:
        """Returns a finished request's result and drops it: see `jkv.Engine.result`."""
        return make_result(self._model, self.take([ticket]), self.stats, self.is_traced)

    def take(self, tickets: Sequence[int]) -> list[Sample]:
        """Returns the samples of finished requests, in order, and drops the requests.

        Raises:
          ValueError: an unknown ticket, or one that is not finished.
        """
        return take_finished(self.tickets, tickets)

    def extend(self, ticket: int, tokens: Sequence[int] | np.ndarray, **settings: Any) -> int:
        """Refuses a next turn, which needs a kept row."""
        raise refused(NO_ROWS, ticket="unsupported")

    def release(self, ticket: int) -> None:
        """Nothing: replicas keep no rows for a next turn."""

    def _resume(self) -> None:
        """Lets the replicas decode, because this session waits for samples."""
        shared = self._shared
        with shared.waiting:
            shared.sessions.add(self)
            if shared.is_resting:
                shared.is_resting = False
                self._ask(Service.resume)

    def rest(self) -> None:
        """Until the next `step`, samples stay where they are; replicas for which no session waits stop after their steps."""
        shared = self._shared
        with shared.waiting, contextlib.suppress(RuntimeError):  # closed
            shared.sessions.discard(self)
            if not shared.sessions and not shared.is_resting and self._dispatcher.open:
                self._ask(Service.pause)
                shared.is_resting = True

    # Replicas.

    def _ask(self, call: Callable[[Service], Reply[T]], seconds: float = math.inf) -> list[T]:
        """What a method of each replica's service returns; those that cannot be asked any more are left out."""
        replicas = self._dispatcher.call(self._dispatcher.replicas).result()
        with concurrent.futures.ThreadPoolExecutor(max(1, len(replicas))) as pool:
            answers = list(pool.map(lambda replica: replica.ask(call, seconds), replicas))
        return [answer for answer in answers if answer is not None]

    @property
    def stats(self) -> RunStats:
        """Bytes and counts of all replicas since they had nothing to do, and the most seconds of any.

        While samples of this session are decoded, up to a second old.
        """
        is_late = time.monotonic() - self._stats_time >= STATS_SECONDS
        if is_late or not (self._new or self._open):
            runs = self._ask(lambda service: service.call(lambda engine: engine.stats), BUSY_SECONDS)
            self._stats, self._stats_time = merged_stats(runs), time.monotonic()
        return self._stats

    def reset_stats(self) -> None:
        """Nothing: replicas start from zero when they had nothing to do."""

    @property
    def loads(self) -> list[Load]:
        """What each replica has to do."""
        return self._dispatcher.call(self._dispatcher.loads).result()

    def retire(self, replica: int) -> None:
        """Ends one replica, such as one whose machine is to be given back; its unfinished samples go on at the others.

        Raises:
          ValueError: no such replica, or the last.
        """
        reply: Reply[None] = Reply()
        self._dispatcher.call(self._dispatcher.drain, replica, reply).result()
        reply.result()

    # Weights and memory.

    @property
    def model(self) -> Model:
        """The model with the newest weights; of replicas in other processes, with their shapes."""
        return self._carrier.model

    @property
    def version(self) -> int:
        """The version of the newest weights: 0 at first, plus 1 for each `update` and each change of an adapter."""
        return self._dispatcher.version

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may choose."""
        return () if self._shared.adapters is None else self._shared.adapters.names

    def update(self, params: Params | Mapping[str, Any]) -> None:
        """Uses new weights everywhere, and returns when all replicas do; unfinished samples go on with them.

        They are `Params`, or what `jkv.params_from` converts.

        The versions of a sample's tokens (`Result.policy_version`) never descend. Only arrays with other values than before
        travel: of an adapter whose base stays, the adapter alone.

        Each replica compares digests before it uses new weights; one that has others than were sent is started again. If this
        call is interrupted or fails, `version` is the number of the newest weights all the same, whether or not they are these;
        the next call sends everything.

        Raises:
          ValueError: weights of another structure, shape, type or sharding than the first, or not finite; nothing is changed.
          RuntimeError: all replicas are lost.
        """
        params = new_weights(self._model.params, params)
        digests, shared = digests_of(params), self._shared
        with shared.updating:
            sent, shared.sent = shared.sent, None  # until all have replied
            is_new = np.ones(len(digests), bool) if sent is None else (digests != sent).any(axis=1)
            content = self._carrier.put({i: leaf for i, leaf in enumerate(jax.tree.leaves(params)) if is_new[i]})
            reply: Reply[None] = Reply()
            with deferred_interrupts():  # `version` counts these weights as soon as they are on their way
                shared.update = reply
                self._dispatcher.call(self._dispatcher.update, content, digests, reply).result()
            reply.result()
            shared.sent = digests

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Puts an adapter into a free place of every replica, and returns when all have it: see `jkv.Engine.add_adapter`.

        A replica that is started again begins with all adapters. An interrupted call still adds the adapter.

        Raises:
          ValueError: see there; nothing is changed.
          RuntimeError: all replicas are lost.
        """
        with self._changing_adapters() as adapters:
            adapters.check_new(name)
            found = adapters.read(adapter)
            with deferred_interrupts():
                adapters.places[name] = adapters.place_for(name)
                reply = self._send_adapter(name, found)
            reply.result()

    def update_adapter(self, name: str, adapter: Adapter) -> None:
        """Replaces an adapter in every replica; unfinished samples go on with the new one: see `jkv.Engine.update_adapter`.

        Raises:
          ValueError: an unknown name, or what `add_adapter` refuses; nothing is changed.
          RuntimeError: all replicas are lost.
        """
        with self._changing_adapters() as adapters:
            adapters.check_known(name)
            found = adapters.read(adapter)
            with deferred_interrupts():
                reply = self._send_adapter(name, found)
            reply.result()

    def remove_adapter(self, name: str) -> None:
        """Frees the place of an adapter in every replica.

        Raises:
          ValueError: an unknown name, or an adapter that unfinished samples of any session use; nothing is changed.
          RuntimeError: all replicas are lost.
        """
        with self._changing_adapters() as adapters:
            adapters.check_known(name)
            with deferred_interrupts():
                place = adapters.places.pop(name)  # from here on new requests are refused
                sessions = [session for ref in self._shared.every.valuerefs() if (session := ref()) is not None]
                samples = [one for session in sessions for one in (*session._new, *session._open.values())]
                if count := sum(one.request.adapter == name for one in samples):
                    adapters.places[name] = place
                    raise in_use(name, count)
                reply = self._send_adapter(name, None)
            reply.result()

    @contextlib.contextmanager
    def _changing_adapters(self) -> Iterator[AdapterPlaces]:
        """The places, which nobody else changes inside the block."""
        if self._shared.adapters is None:
            raise no_places()
        with self._shared.updating:
            yield self._shared.adapters

    def _send_adapter(self, name: str, found: Mapping[str, LowRank] | None) -> Reply[None]:
        """Brings an adapter to all replicas, by way of host memory, and replies when all use it; None removes it."""
        self._shared.update = reply = Reply[None]()
        self._dispatcher.call(self._dispatcher.update, jax.device_get(found), None, reply, name).result()
        return reply

    def clear_prefix_cache(self) -> None:
        """Empties the prefix cache of each replica: see `jkv.Engine.clear_prefix_cache`."""
        self._ask(Service.clear_prefix_cache)

    def sleep(self, forget_weights: bool = False) -> None:
        """Frees the pools of all replicas; running rows are swapped out to host memory. See `jkv.Engine.sleep`."""
        if forget_weights:
            with self._shared.updating:
                if self._shared.update is not None:  # which may have been interrupted, and be on its way
                    concurrent.futures.wait([self._shared.update])
                self._shared.sent = None  # the next update brings all
                self._carrier.forget()
        self._ask(lambda service: service.call(lambda engine: engine.sleep(forget_weights)))
        self._shared.is_asleep = True

    def wake(self) -> None:
        """Allocates the pools again."""
        if self.is_asleep:
            self._ask(lambda service: service.call(Engine.wake))
            self._shared.is_asleep = False

    @property
    def is_asleep(self) -> bool:
        """Whether the pools are freed."""
        return self._shared.is_asleep

    def reset(self) -> None:
        """Makes empty pools, and starts every unfinished sample again: see `jkv.Engine.reset`."""
        self._ask(lambda service: service.call(Engine.reset))

    def close(self) -> None:
        """Ends all replicas, and what is unfinished."""
        self._end()

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ray_carrier(
    model: Model,
    policies: Sequence[Policy],
    options: EngineOptions,
    mesh: Mesh | None,
    num_replicas: int | None,
    ray: RayOptions,
) -> Carrier:
    """The carrier of actors; Ray is imported here alone.

    Raises:
      ValueError: a mesh, no number of replicas, or a policy that cannot be sent.
      ImportError: Ray is not installed.
    """
    if mesh is not None or num_replicas is None:
        raise refused(
            'With carrier="ray" each replica has the devices of its own process: give num_replicas=, and '
            f"ray=RayOptions(tensor=...) for several devices each; got mesh={'a mesh' if mesh is not None else None}, "
            f"num_replicas={num_replicas}.",
            num_replicas="missing",
        )
    from jkv.replicas.actors import RayCarrier

    return RayCarrier(model, policies, options, num_replicas, ray)
