"""The engine's loop: schedule, run, collect.

In each step (`Engine.step`), the scheduler decides what runs, the runner executes it on the device, and the engine collects
the outputs. `scheduler` assigns rows and pages, `runner` dispatches device programs, `outputs` makes text and events.

- A decode step draws a token from the current logits, appends it, and computes the next logits; `generated` counts these steps.
- A row is due for compaction when its policy's schedule has a target at its own `generated`, and a layer holds more than that.
- A prompt longer than its budget is compacted once, after prefill.
"""

import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jkv import notebook
from jkv.cache.pool import num_pages_of
from jkv.checkpoints.adapters import Adapter
from jkv.checks import described, size
from jkv.engine import mesh as meshes
from jkv.engine import row_moves, turns
from jkv.engine.adapter_store import AdapterStore, in_use, no_places
from jkv.engine.backend import run_to_end
from jkv.engine.clocks import COMPILING, is_ready, running_seconds
from jkv.engine.device_program import let_programs_go
from jkv.engine.drafters import AUTO, places_of
from jkv.engine.faults import blame
from jkv.engine.interrupts import Guard, deferred_interrupts, raise_lost_interrupt
from jkv.engine.kept_rows import KeptRow
from jkv.engine.memory import check_fits, lowered, most_pages, num_pool_pages, page_bytes, page_size_for
from jkv.engine.mesh import place_gate
from jkv.engine.options import EngineOptions
from jkv.engine.outputs import Event, Outputs
from jkv.engine.policy_checks import (
    check_layout,
    check_policy,
    check_request,
    check_speculation,
    gate_of,
    guesses_for,
)
from jkv.engine.prefix_cache import cache_for
from jkv.engine.processes import agreed, spans
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, check_model, make_requests, new_weights, spread_policies
from jkv.engine.results import Result, make_result
from jkv.engine.row import Place
from jkv.engine.runner import Flight, Runner
from jkv.engine.samples import Completion, Sample, Status, samples_of, stop_finder, take_finished
from jkv.engine.scheduler import Capacity, Scheduler
from jkv.engine.stats import RunStats
from jkv.errors import InputError
from jkv.eviction import Needs, Policy
from jkv.forms import Form
from jkv.model import sharding, weights
from jkv.model.params import LowRank, Model, Params
from jkv.model.sampling import Sampling
from jkv.replay.trace import TraceRecorder

LOGGER = logging.getLogger("jkv")
DEFAULT_RUNNING = 8  # rows
TO_RUNNER = (  # that it takes
    *("kernels", "poison", "kv_format", "ahead", "max_stop_ids", "routed_experts"),
    *("largest_prefill", "prefill_tokens", "first_chunk"),
)


class Engine:
    """Runs any number of requests on `max_running` rows over one pool, refilling rows as they finish.

        engine = jkv.Engine(model, max_running=8, max_slots=1024)
        ticket = engine.submit("b=3;c=7;d=b*c;?d", policy=jkv.lag_kv(budget=96))
        for event in engine.stream():
            print(event.text, end="")
        print(engine.result(ticket).text[0])

    Args:
      model_or_params: what `jkv.load` returns, or bare `Params` (prompts are token ids then).
      options: a `jkv.EngineOptions`.
      settings: fields of `jkv.EngineOptions` by name, which replace the same fields of `options`.

    Attributes:
      scheduler: decides which samples run.
      runner: executes steps on the device.
      outputs: collects tokens and emits events.
      tickets: the samples of each request.
      gate: the gate that its policies read, if one does.
      guard: lets one thread at a time use it.

    Raises:
      ValueError: a setting out of its range, or a mesh that the model cannot be split over.
    """

    def __init__(self, model_or_params: Model | Params, options: EngineOptions | None = None, **settings: Any) -> None:
        options = (options or EngineOptions()).changed(settings)
        model, policies = check_model(model_or_params), options.policies
        self.options, self.mesh = options, (mesh := meshes.mesh_for(options.mesh, model.params))
        params, config = model.params, model.config
        check_layout(params, options)
        if mesh is not None:
            params = sharding.shard(params, mesh)
        model = dataclasses.replace(model, params=weights.committed(params))
        sizes_of_adapters = options.max_adapters, options.adapter_rank
        adapters = AdapterStore(model.params, *sizes_of_adapters, mesh) if options.max_adapters else None
        named = spread_policies(policies or (), len(policies or ()), params, options.kv_format)
        self.needs = Needs.of(None if policies is None else named)
        self.gate = gate_of(named)
        for policy in named:
            check_policy(policy, self.needs, model, gate=self.gate)
        gate = None if self.gate is None else place_gate(self.gate.arrays, model.params, mesh)
        page_size = page_size_for(params, options.page_size, options.kv_format)
        max_running, num_shards = options.max_running or DEFAULT_RUNNING, meshes.num_pools(mesh)
        if options.speculate == AUTO:
            drafter = guesses_for(model.params, named, max_running, options.kv_format, bool(options.max_adapters))
            self.options = options = dataclasses.replace(options, speculate=drafter)
        self.max_slots = options.max_slots or min(config.max_positions, 4096)
        drafter = check_speculation(options, named, config, max_running, num_pages_of(self.max_slots, page_size))
        self.page_bytes = page_bytes(model.params, page_size, self.needs.bounds, options.kv_format)
        sizes: Any = {"page_size": page_size, "bytes_per_page": self.page_bytes, "num_shards": num_shards}
        sizes |= {"kv_memory": options.kv_memory, "num_pages": options.num_pages, "kv_format": options.kv_format}
        sizes["places"] = places_of(drafter)
        self.num_pages = num_pool_pages(model.params, max_running, self.max_slots, **sizes)
        heads = config.num_paged_layers, config.num_kv_heads
        self.capacity = Capacity(*heads, page_size, self.num_pages, max_running, options.chunk, options.order, num_shards)
        self.tickets: dict[int, list[Sample]] = {}
        self._ticket, self.guard = itertools.count(), Guard()
        self._flight: Flight | None = None  # a chunk that is dispatched and not read yet
        self.scheduler = Scheduler(self.capacity)
        self.scheduler.kept_rows.copies = options.copy_kept
        self.outputs = Outputs(model, self.tickets, self._finish)
        given: Any = {name: getattr(options, name) for name in TO_RUNNER}
        given |= {"drafter": drafter, "mesh": mesh, "gate": gate, "page_bytes": self.page_bytes, "max_slots": self.max_slots}
        given["adapters"] = adapters
        self.runner = Runner(model, self.capacity, self.needs, self.scheduler.running, **given)
        self.runner.is_traced, self.runner.kept_rows = options.return_trace, self.scheduler.kept_rows
        self.runner.versions = self.scheduler.versions
        if options.prefix_cache:
            piece, num_heads = options.prefix_piece or self.runner.prefill.sizes[-1], heads[0] * heads[1]
            cache = cache_for(piece, page_size, num_heads, self.needs.window)
            self.scheduler.prefix_cache = self.runner.prefix_cache = cache
        self.reset_stats()

    def __repr__(self) -> str:
        pool, waiting = self.num_pages * self.page_bytes, len(self.scheduler.waiting) + len(self.scheduler.held)
        state = "freed, while the engine is asleep" if self.is_asleep else "on the device"
        return "\n".join(
            [
                f"Engine of {self.model}",
                f"  pool: {self.num_pages:,} pages of {self.capacity.page_size} slots, {size(pool)}; {state}",
                f"  rows: {self.capacity.max_running}, of at most {self.max_slots:,} slots in a layer and KV head",
                f"  requests: {len(self.tickets)}; samples: {len(self.scheduler.running)} running, {waiting} waiting",
                f"  so far: {self.stats.tokens:,} tokens, at most {size(self.stats.peak_kv_bytes)} of keys and values held",
            ]
        )

    def _repr_html_(self) -> str:
        return notebook.text(repr(self))

    @property
    def model(self) -> Model:
        """The model with the weights in use."""
        return self.runner.model

    @property
    def version(self) -> int:
        """The version of the weights in use: how often they, or adapters, were replaced, added or removed."""
        return self.runner.version

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests may choose."""
        return () if self.runner.adapters is None else self.runner.adapters.names

    @property
    def is_traced(self) -> bool:
        """Whether samples are traced; may be set while none is unfinished."""
        return self.runner.is_traced

    @is_traced.setter
    def is_traced(self, is_traced: bool) -> None:
        self.runner.is_traced = is_traced

    @property
    def is_asleep(self) -> bool:
        """Whether the pool is freed."""
        return self.runner.state is None

    @property
    def has_weights(self) -> bool:
        """Whether its weights are on the device: neither forgotten by `sleep`, nor donated or deleted."""
        return self.runner.has_weights

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished and no event pending."""
        return not (self.scheduler.running or self.scheduler.waiting or self.scheduler.held or self.outputs.events)

    # Requests.

    def submit(
        self,
        prompt: Any,
        policy: Policy | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        n: int = 1,
        stop_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        first_sample: int = 0,
        on_tokens: Callable[[Event], None] | None = None,
        request: int | None = None,
        forced_tokens: Sequence[int] | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
        prompt_piece: int | None = None,
        parse_special: bool = False,
        model_logprobs: bool = False,
        top_logprobs: int = 0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        min_tokens: int = 0,
        bad_words: Sequence[Sequence[int]] = (),
        form: Form | None = None,
        priority: int = 0,
        keep: bool = False,
    ) -> int:
        """Queues `n` samples of one prompt and returns the request's ticket.

        Args:
          prompt: a text, a list of token ids, or a conversation (a list of messages).
          policy, sampling, max_new_tokens, n, stop_ids, stop_strings, first_sample: see `jkv.RequestOptions`.
          forced_tokens, cache_salt, adapter, prompt_piece, parse_special, model_logprobs, top_logprobs: see there.
          logit_bias, allowed_token_ids, min_tokens, bad_words, form, priority: see there.
          on_tokens: receives an `Event` for each sample and chunk; if it raises, the request ends with the reason "error" and
            the others continue.
          request: a number below 2**32 that identifies the prompt in the random keys; None is a hash of its tokens. With a
            fixed seed, equal prompts of different calls draw equal tokens, unless `request` or `first_sample` differs.
          keep: whether the row of each sample is kept at its end, for a next turn: see `extend` and `release`.

        Raises:
          ValueError: a request that this engine can never serve, with the arithmetic; other requests are not affected.
        """
        options = RequestOptions(
            policy=policy,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            n=n,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            first_sample=first_sample,
            forced_tokens=forced_tokens,
            cache_salt=cache_salt,
            adapter=adapter,
            prompt_piece=prompt_piece,
            parse_special=parse_special,
            model_logprobs=model_logprobs,
            top_logprobs=top_logprobs,
            logit_bias=logit_bias,
            allowed_token_ids=allowed_token_ids,
            min_tokens=min_tokens,
            bad_words=bad_words,
            form=form,
            priority=priority,
        )
        prompts = encode_prompts(self.model, prompt, options.parse_special)
        if len(prompts) != 1:
            rule = "submit takes one {field} at a time; got {got}. Submit each."
            raise InputError(rule, field="prompt", code="too_long", got=len(prompts))
        made = make_requests(self.model, prompts, options, request, self.options.kv_format)
        return self.submit_requests(turns.with_keep(made[0], keep), on_tokens)

    def submit_requests(self, requests: Sequence[Request], on_tokens: Callable[[Event], None] | None = None) -> int:
        """Queues checked requests under one ticket; tickets count from 0."""
        requests = [self.check(request) for request in (agreed(requests) if spans(self.mesh) else requests)]
        with self.guard.changing("submit"):
            ticket = next(self._ticket)
            samples = [self._sample(ticket, i, request, on_tokens) for i, request in enumerate(requests)]
            self.tickets[ticket] = samples
            for sample in samples:
                self.scheduler.add(sample)
        return ticket

    def extend(
        self,
        ticket: int,
        tokens: Sequence[int] | np.ndarray,
        *,
        sample: int = 0,
        keep: bool = True,
        on_tokens: Callable[[Event], None] | None = None,
        **settings: Any,
    ) -> int:
        """Queues the next turn of a request that was kept and is finished; returns the turn's own ticket.

        Only the new tokens are prefilled, into the row that the request left. The result's prompt is everything before the
        completion; `Result.transcripts` has the whole conversation with a loss mask.

        Args:
          ticket: of the last turn; it is extended once.
          tokens: the new token ids, such as a user's message or what a tool returned.
          sample: index of the sample that goes on, where the request had several.
          keep: whether the row is kept again at the end of this turn.
          on_tokens: see `Engine.submit`.
          settings: `max_new_tokens`, `sampling`, `stop_ids`, `forced_tokens`, `model_logprobs` and `top_logprobs` of
            `jkv.RequestOptions`. If it gives no sampling, the turn keeps the sampling and seed of the last turn. It inherits
            nothing else.

        Raises:
          ValueError: a ticket without a kept row (unfinished, failed, cancelled, not kept, closed, extended already), tokens
            that are none, or a turn that this engine can never serve; nothing is changed.
        """
        kept = turns.find(self.tickets, self.scheduler.kept_rows, ticket, sample)
        request = turns.next_request(self.model, kept, tokens, RequestOptions(**settings), keep)
        return self.submit_turn(ticket, sample, kept, request, on_tokens)

    def submit_turn(
        self,
        ticket: int,
        index: int,
        kept: KeptRow,
        request: Request,
        on_tokens: Callable[[Event], None] | None = None,
    ) -> int:
        """Queues a checked request (`jkv.engine.turns.next_request`) of a kept row's next turn.

        Raises:
          ValueError: a request that this engine can never serve, or a row that is gone.
        """
        request, kept_rows = self.check(request), self.scheduler.kept_rows
        kept_rows.check(ticket, index, kept)
        with self.guard.changing("extend"):
            kept_rows.use(ticket, index, kept)
            number = next(self._ticket)
            sample = self._sample(number, 0, request, on_tokens)
            turns.begin(sample, kept)
            self.tickets[number] = [sample]
            self.stats.turns += 1
            self.scheduler.add(sample)
        return number

    def release(self, ticket: int) -> None:
        """Frees the rows that a kept request left, in the pool or in host memory. An unfinished one leaves none at its end.

        Its result stays. Nothing happens where nothing is kept.
        """

        def let_go() -> None:
            for sample in self.tickets.get(ticket, []):
                if not sample.is_finished:
                    sample.request = dataclasses.replace(sample.request, keep=False)
            self.scheduler.kept_rows.release(ticket)
            if not self.is_asleep:
                self.runner.release([])

        self._repaired("release", let_go)

    def cancel(self, ticket: int) -> None:
        """Ends a request's unfinished samples; they keep the tokens they have. Rows and pages are free at the next step.

        Raises:
          ValueError: an unknown ticket.
        """
        samples = samples_of(self.tickets, ticket)
        with self.guard.changing("cancel"):
            for sample in samples:
                if not sample.is_finished:
                    self._finish(sample, "cancelled")
                    self.outputs.emit(sample)

    def step(self) -> list[Event]:
        """One step: schedule, run, collect. Returns the events since the last step, by sample.

        Whatever fails for one sample ends it alone, with the reason "error". A step that fails is repaired.

        Raises:
          ValueError: the engine sleeps or its weights are gone, and a request is unfinished.
          KeyboardInterrupt: Ctrl-C was pressed, any number of times, or a callback raised it. The step is finished first, the
            engine stays usable, and the next call returns this step's events too.
          RuntimeError: an earlier call ended in the middle, because a device program failed; `reset` repairs it. Or another
            thread, or a callback of the step in progress, uses the engine.
        """
        self.guard.check()
        raise_lost_interrupt()
        if self.scheduler.has_unfinished:
            self.runner.check_ready()
        if let_programs_go():
            self.runner.foreseen.forget()
        compiled = COMPILING.seconds
        with deferred_interrupts():
            self._repaired("step", self._run_step)
            self.stats.compile_seconds += COMPILING.seconds - compiled
            raised, self.outputs.raised = self.outputs.raised, None
        if raised is not None:
            raise raised
        return self.outputs.take()

    def _repaired(self, name: str, work: Callable[[], None]) -> None:
        """Runs what changes the device state, for a method of that name; if it fails, repairs the engine."""
        with deferred_interrupts():
            try:
                with self.guard.changing_device(name), self.runner.meter.clock("seconds"):
                    work()
            except BaseException as error:
                if self.guard.failure is not error:  # the call was refused, and nothing has changed
                    raise
                self._repair(error)

    def _repair(self, error: BaseException) -> None:
        """After a step that failed: resets the engine, without the sample that made it fail, once that is known.

        Unfinished samples start again, with the same tokens. If steps fail again, `jkv.engine.faults.Search` finds the sample
        that makes them fail, which ends with the reason "error".

        Raises:
          BaseException: the error, if other processes have parts of the mesh, and would have to repair theirs at the same time;
            or if no sample can have made the step fail. Or the error of a repair that failed.
        """
        if spans(self.mesh):
            raise error
        guilty = self.scheduler.search.failed(error, self.scheduler.running.values())
        for sample in guilty:
            sample.completion.error = error
        LOGGER.warning("A step failed, and its requests start again: %s", described(error))
        self.reset()
        with self.guard.changing("repair"):
            for sample in guilty:
                if not sample.is_finished:  # it had no row yet
                    self._finish(sample, "error")
                    self.outputs.emit(sample)

    def _run_step(self) -> None:
        self.stats.idle.begin(is_ready(self.runner.state))
        if self._flight is not None and not self.scheduler.goes_on(self._flight.rows):
            self._collect()
        actions = self.scheduler.next()
        self.runner.meter.scheduled(actions)
        self.runner.execute(actions)
        num_steps = self.runner.filling.lowered(actions.num_steps)
        # A row whose prompt was cancelled on its way has nothing to decode.
        running = {row: one for row, one in self.scheduler.running.items() if one.status is Status.RUNNING}
        if running:
            flight = self.runner.dispatch(running, num_steps, self._flight)
            if self.runner.ahead and all(sample.can_plan for sample in running.values()):
                self.runner.plan(flight)
                last, self._flight = self._flight, flight
                if last is not None:  # it is read while the next one runs
                    self._collect(last)
            else:
                self._collect(flight)
                self.runner.compact({row: sample for row, sample in running.items() if sample.is_due})
        rows, prefixes = self.scheduler.release()
        self.runner.release(rows)
        self.runner.free(prefixes)
        self.scheduler.passed()
        self.stats.idle.end(is_unfinished=bool(running or self.scheduler.waiting or self.scheduler.held))

    def _collect(self, flight: Flight | None = None) -> None:
        """Counts a chunk, adds its tokens to completions, shares similar pages, and emits events.

        None is the chunk that is dispatched and not read yet, if there is one.
        """
        if flight is None:
            flight, self._flight = self._flight, None
        if flight is None:
            return
        rows, held = self.runner.read(flight)
        assert held <= self.num_pages, "rows hold more pages than were reserved"
        num_steps, meter = flight.num_steps, self.runner.meter
        samples = {row: flight.rows[row] for row in rows}
        plans = {sample: sample.land() for sample in samples.values() if sample.planned}
        for row, sample in samples.items():
            meter.tokens(sample, len(rows[row].tokens))
            with blame(sample):
                sample.advance(rows[row])
            meter.row(sample)
        if self.needs.similarity:
            meter.sentences(self.scheduler.sentence_logs)
        meter.chunk(held, num_steps, sum(len(row.tokens) for row in rows.values()))
        for row, sample in samples.items():
            self.outputs.collect(sample, rows[row], flight.versions[row])
            self.stats.idle.look(is_ready(self.runner.state))
        try:
            self.runner.share()
        finally:  # also where sharing fails: what is finished stays finished, and its events must say so
            self.outputs.emit_collected()
        self.runner.count(flight.compactions)
        for sample, plan in plans.items():
            if not sample.is_finished:
                sample.plan_again(*plan)

    def stream(self) -> Iterator[Event]:
        """Yields events until all requests are finished; the caller may submit and cancel requests meanwhile.

        If the caller stops early, the remaining events come from the next stream or step.
        """
        self.guard.check()
        self.outputs.is_streaming = True
        while not self.is_idle:
            events = collections.deque(self.step())
            try:
                while events:
                    yield events.popleft()
            finally:
                self.outputs.events = [*events, *self.outputs.events]

    def run(self, on_events: Callable[[list[Event]], None] | None = None) -> None:
        """Runs until all requests are finished. Ctrl-C cancels them, after the step in progress; they keep their tokens."""
        self.guard.check()
        with self.guard.owned("run"):
            run_to_end(self, on_events)

    def result(self, ticket: int) -> Result:
        """Returns a finished request's result and drops it; bytes and seconds in `stats` are the engine's since the last reset.

        Raises:
          ValueError: an unknown ticket, or one that is not finished.
        """
        return make_result(self.model, self.take([ticket]), self.stats, self.is_traced)

    def take(self, tickets: Sequence[int]) -> list[Sample]:
        """Returns the samples of finished requests, in order, and drops the requests.

        Raises:
          ValueError: an unknown ticket, or one that is not finished.
        """
        with self.guard.owned("take"):
            return take_finished(self.tickets, tickets)

    def reset_stats(self) -> None:
        """Resets the statistics, and with them the distance thresholds that sharing has measured."""
        self.runner.meter.reset()
        self.runner.sharer.stats = self.stats.sharing

    @property
    def stats(self) -> RunStats:
        """Statistics since the last reset."""
        return self.runner.meter.stats

    # Weights and memory.

    def update(self, params: Params | Mapping[str, Any]) -> None:
        """Uses new weights from the next step on: `Params` (only pointers change), or what `jkv.params_from` converts.

        Nothing compiles.

        It waits for no row: prompts that are half in their rows are prefilled to the end with the old weights first, and rows
        that decode go on with the new ones.

        Weights that are joined where the old ones are not, or the other way round (`jkv.join_weights`), are copied into their
        form first.

        New samples do not start from prompts that the old weights prefilled. Running samples and kept rows keep the keys and
        values that the old weights computed; `Completion.versions` records the weights of each token.

        Raises:
          ValueError: weights of another structure, configuration, shape, type or sharding, or not finite; nothing is changed.
        """
        params = new_weights(self.model.params, params)
        with self.guard.owned("update"):
            self._repaired("update", lambda: self.runner.fill(to_end=True))  # by the old weights, what rows are filled with
            with self.guard.changing_device("update"):
                self.runner.set_params(params)
                self._use_version(self.version + 1)

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Puts a low-rank adapter into a free place; requests with `adapter=name` use it.

        The engine's first adapter compiles the program that writes a place, and the other programs compile again at their
        next use. Later adapters compile nothing.

        Args:
          name: by which requests choose it.
          adapter: a folder of peft (`jkv.load_adapter` describes it), or weights that have an adapter, whose base is not read.

        Raises:
          ValueError: an engine without places (`max_adapters`) or with no free one, a name in use, a bad file, another model's
            adapter, or a rank above `adapter_rank`; nothing is changed.
        """
        adapters = self._adapter_store()
        adapters.check_new(name)
        self._put_adapter("add_adapter", name, adapters.read(adapter))

    def update_adapter(self, name: str, adapter: Adapter) -> None:
        """Replaces an adapter from the next step on, as `update` replaces the weights. Nothing compiles.

        Rows that decode with it go on with the new one; others do not notice. `Completion.versions` records the version behind
        each token, which counts updates of weights and adapters together.

        Raises:
          ValueError: an unknown name, or what `add_adapter` refuses; nothing is changed.
        """
        adapters = self._adapter_store()
        adapters.check_known(name)
        found = adapters.read(adapter)
        with self.guard.owned("update_adapter"):
            self._repaired("update_adapter", lambda: self.runner.fill(to_end=True))  # with what rows are filled with
            self._put_adapter("update_adapter", name, found)

    def remove_adapter(self, name: str) -> None:
        """Frees the place of an adapter, which counts as a version too.

        Raises:
          ValueError: an unknown name, or an adapter that unfinished samples or kept rows use; nothing is changed.
        """
        adapters = self._adapter_store()
        adapters.check_known(name)
        with self.guard.owned("remove_adapter"):
            requests = [one.request for group in self.tickets.values() for one in group if not one.is_finished]
            requests += [kept.request for kept in self.scheduler.kept_rows.all]
            if count := sum(request.adapter == name for request in requests):
                raise in_use(name, count)
            self._repaired("remove_adapter", lambda: self.runner.fill(to_end=True))  # a cancelled sample may still be filled
            with self.guard.changing_device("remove_adapter"):
                self._use_version(self.version + 1, name)
                adapters.remove(name)
                del self.scheduler.versions[name]

    def _adapter_store(self) -> AdapterStore:
        """The adapters; an engine without places for any has none."""
        if self.runner.adapters is None:
            raise no_places()
        return self.runner.adapters

    def _put_adapter(self, method: str, name: str, found: dict[str, LowRank]) -> None:
        with self.guard.changing_device(method):
            self._adapter_store().put(name, found)
            self._use_version(self.version + 1, name)

    def clear_prefix_cache(self) -> None:
        """Clears the prefix cache: no later prompt reuses what it holds now. Its pages are free once no row reads them.

        Nothing else changes: unfinished requests and kept rows continue, and equal prompts of unfinished requests are still
        prefilled once for all of them.
        """
        with self.guard.changing_device("clear_prefix_cache"):
            self.scheduler.clear_prefix_cache()
            self.runner.free([])

    def sleep(self, forget_weights: bool = False) -> None:
        """Frees the pool and the rest of the device state; running and kept rows are swapped out to host memory.

        After `wake`, rows are swapped in again, bit for bit, but pages that they shared become separate copies. The weights
        belong to the caller and stay on the device; with `forget_weights` the engine drops its references, and `update` must
        be called before it runs again.
        """
        with self.guard.owned("sleep"):
            if not self.is_asleep:
                self._repaired("sleep", self._clear_rows)
            with self.guard.changing_device("sleep"):
                if forget_weights:
                    self.runner.set_params(weights.shapes_of(self.model.params))
                if not self.is_asleep:
                    self.stats.idle.end(is_unfinished=False)
                    self.runner.sleep()

    def _clear_rows(self) -> None:
        """Moves all rows to host memory, once they are filled."""
        self._collect()
        self.runner.fill(to_end=True)
        self.runner.execute(self.scheduler.sleep())

    def wake(self) -> None:
        """Allocates an empty pool of the same size; waiting samples are admitted to it."""
        with self.guard.changing_device("wake"):
            if self.is_asleep:
                self.runner.wake()

    def rest(self) -> None:
        """Stops what runs between two steps: nothing, in an engine."""

    def close(self) -> None:
        """Frees the pool and drops what is in it; unfinished requests stay so. The weights belong to the caller."""
        with self.guard.owned("close"):
            if not self.is_asleep:
                self.runner.sleep()

    def copy_rows(self) -> dict[int, bytes]:
        """A copy of each running row, by the ticket of its request; the engine goes on as if nothing had happened.

        Left out are rows that another engine could not go on with: those whose pages are shared by similarity (the record of
        thoughts belongs to one engine), later turns of conversations, and requests of several samples. What is left out, or
        waits, starts again elsewhere, with the same draws.

        Raises:
          ValueError: the engine sleeps.
        """
        if self.is_asleep:
            raise ValueError("Rows are copied from the pool, and a sleeping engine has none. Call wake() first.")
        with self.guard.changing_device("copy_rows"):
            self._collect()  # a chunk that was dispatched ahead
            self.runner.fill(to_end=True)
            alone = {row: one for row, one in self.scheduler.running.items() if len(self.tickets[one.ticket]) == 1}
            return {
                one.ticket: row_moves.pack(one, self.runner.copy_row(row))
                for row, one in alone.items()
                if row_moves.can_move(one)
            }

    def resume_row(self, content: bytes, policy: Policy, on_tokens: Callable[[Event], None] | None = None) -> int:
        """Queues a copied row, to be swapped in as soon as it fits, and returns its request's new ticket.

        Args:
          content: of `copy_rows`, from an engine of the same settings. It is unpickled: take none from strangers.
          policy: that of the sample.
          on_tokens: receives an `Event` for each chunk; the first has all tokens so far.
        """
        sample = row_moves.unpack(content, policy, self.model.tokenizer, on_tokens)
        self.check(sample.request)
        with self.guard.changing("resume_row"):
            sample.ticket = next(self._ticket)
            self.tickets[sample.ticket] = [sample]
            self.scheduler.add(sample)
        return sample.ticket

    def renumber(self, version: int, versions: Mapping[str, int] | None = None) -> None:
        """Lets the weights that a new engine was built with count as a later version than 0; before its first request.

        Args:
          version: the number of changes so far.
          versions: the version of the weights that requests use, by the name of their adapter, "" for none; None means
            `version`.

        Raises:
          ValueError: it has had requests.
        """
        if self.tickets or self.scheduler.prefixes:
            raise ValueError(
                "An engine's weights are numbered before its first request; this one has had some. Make a new one."
            )
        with self.guard.changing_device("renumber"):
            self._use_version(version)
            self.scheduler.versions.update(versions or {})

    def _use_version(self, version: int, adapter: str | None = None) -> None:
        """Numbers the weights in use, of all requests or of an adapter's; nothing starts from what older ones prefilled."""
        self.runner.version = version
        self.runner.free(self.scheduler.renew(version, adapter))

    def reset(self) -> None:
        """Makes an empty pool and starts every unfinished sample again, also after a step that ended in the middle.

        The random keys depend on seed, prompt, sample and position alone, so a sample draws the same tokens again, unless the
        weights were replaced since it started. Its events go on where they stopped; after other weights they start again.
        Finished samples, weights, statistics and sharing's thresholds stay, and kept rows with a copy in host memory; others
        are lost, and turns that continue one end with the reason "error", as do samples that have failed themselves.

        Raises:
          RuntimeError: another thread, or a callback of the step in progress, uses the engine.
        """
        with self.guard.changing_device("reset", is_reset=True):
            self._flight, kept_rows, versions = None, self.scheduler.kept_rows, self.scheduler.versions

            def restart(sample: Sample) -> bool:
                return turns.restart(sample, kept_rows, self.model.tokenizer, versions[sample.request.adapter])

            lost = self.scheduler.restart(restart)
            self.outputs.forget()
            self.runner.reset()
            for sample in lost:
                sample.row.place = Place.NOWHERE
                self._finish(sample, "error")
                self.outputs.emit(sample)

    def check(self, request: Request) -> Request:
        """Refuses a request that this engine can never serve. Returns it, with a limit that was left open lowered to what fits.

        Raises:
          ValueError: the reason, with the arithmetic.
        """
        sizes = {"max_slots": self.max_slots, "num_pages": self.num_pages} | self.capacity.page_sizes
        is_trained = self.scheduler.version > 0 or self.is_asleep
        check_policy(request.policy, self.needs, self.model, is_trained, self.gate)
        self.runner.trials.check(request, self.model)
        request = lowered(self.model.params, request, **sizes)
        check_fits(self.model.params, request, **sizes, bytes_per_page=self.page_bytes)
        check_request(request, self.options, self.adapters)
        turns.check_keep(request)
        return request

    def is_foreseen(self, requests: Sequence[Request]) -> bool:
        """Whether the programs for samples of one prompt are compiled; starts to compile missing ones (`jkv.engine.foreseen`).

        Raises:
          BaseException: the error of a program that failed to compile.
        """
        sample = self._sample(-1, 0, requests[0], None)
        sample.pending = len(sample.request.prompt) - (sample.request.num_kept or sample.request.first_prompt)
        return self.runner.foreseen.is_ready(sample, is_forked=len(requests) > 1)

    def _sample(self, ticket: int, index: int, request: Request, on_tokens: Callable[[Event], None] | None) -> Sample:
        pages = most_pages(self.model.params, request, self.capacity.page_size, self.capacity.num_shards)
        sample = Sample(ticket, index, request, Completion(), pages, on_tokens=on_tokens, submitted=running_seconds())
        sample.stops = stop_finder(self.model.tokenizer, request)
        return sample

    def _finish(self, sample: Sample, reason: str) -> None:
        """Ends a sample that waits, runs or is swapped out; its row, if any, is freed at the end of the step."""
        if sample.planned:  # what is dispatched and not read yet does not count
            sample.land()
        if not self.runner.is_traced:  # a trace ends with what was drawn
            sample.recall()
        completion, config = sample.completion, self.model.config
        completion.finish_reason, completion.seconds = reason, sample.seconds
        for name in ("evicted", "compactions", "cached_tokens"):
            setattr(completion, name, getattr(sample.row, name))
        with blame(sample):
            if sample.generated:
                completion.saved = self.runner.meter.saved(sample)
            if self.runner.is_traced:
                records, num_seen = sample.row.records, len(sample.request.prompt) + sample.generated
                trace = (records and records.trace) or TraceRecorder(config.num_paged_layers, config.num_kv_heads, num_seen)
                given = sample.request.first_prompt, self.capacity.page_size, self.options.kv_format
                completion.trace = trace.finish(num_seen, *given)
        if completion.error is not None:
            completion.finish_reason = "error"
        pages = sample.num_pages(0, *self.capacity.sizes) if sample.is_running else 0
        turns.end(sample, self.scheduler.kept_rows, pages)
        completion.routes = None if sample.row.records is None else sample.row.records.routes
        sample.row.records = sample.row.swapped = sample.sharing = None
        self.scheduler.finish(sample)
