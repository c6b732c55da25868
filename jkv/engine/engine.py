"""The only loop: admit, decode a chunk, compress rows that are due, emit finished rows and free their pages.

Every device program has a fixed shape (`jkv.engine.programs`) and the host sees the device once a chunk. Rules of time, in one
place:
- a step draws a token from the logits at hand, appends it and computes the next logits; `generated` counts these steps;
- a row is due when its policy's schedule says so, by its own `generated`, and it holds more than it is to keep. A chunk never
  steps over such a moment of a row, and rows are admitted between chunks, so a row's compactions never depend on its
  neighbours;
- a prompt longer than its budget is compressed once, after prefill.

Rules of memory, in one place; all are arithmetic on the host, so the pool never runs out under a running row:
- a bounded sample claims at admission the most pages it will ever hold, and is never put aside;
- an unbounded one claims what it holds after the next chunk. When the claims exceed the pool, the youngest is put aside: its
  pages go to host memory, and come back bit for bit when there is room;
- samples that start from the same prompt share one prefill: a prefix, which claims its own pages as long as anyone needs it.
  Prefixes give way first: one that no running row reads is dropped (to host memory, if a sample put aside reads it);
- samples are admitted in order, and nobody overtakes the first that waits. Alone, every sample fits, or it was refused.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jkv.cache.attention import NEVER
from jkv.cache.page_selection import columns_of, pages_read
from jkv.cache.pool import EMPTY, TRASH, num_pages_of
from jkv.checks import check_counts, typed
from jkv.engine import mesh as meshes
from jkv.engine import programs, swap
from jkv.engine.chunk_inputs import Needs, empty_state, for_chunk, row_settings
from jkv.engine.interrupts import deferred_interrupt
from jkv.engine.memory import check_fits, most_pages, num_layer_heads, num_pool_pages, num_row_pages, page_bytes
from jkv.engine.programs import Control
from jkv.engine.requests import (
    Request,
    check_model,
    check_sampling,
    check_weights,
    encode_prompts,
    make_request,
    spread_policies,
)
from jkv.engine.results import Completion, Event, Result, RunStats, make_result
from jkv.engine.samples import Prefix, Sample, Start
from jkv.engine.sharer import Sharer
from jkv.engine.timing import COMPILING, clock
from jkv.model import weights
from jkv.model.params import Model, Params
from jkv.model.sampling import DRAWS, Sampling, request_id
from jkv.policies.base import Evict, Policy
from jkv.reasoning.sentences import map_sentences, new_log
from jkv.reasoning.token_text import StopFinder, TextStream, cut, num_certain
from pallas_kernels.dispatch import platform_of

CHUNKS = (16, 8, 4, 2, 1)  # decode steps a dispatch
PREFILL_SIZES = (16, 64, 256)  # tokens of a prefill program
COMPRESS_SIZES = (1, 4, 16, 64)  # rows of a compaction program
MAP_WIDTH = 32_768  # positions that compaction is told sentences for, at first
ORDERS = ("arrival", "longest")


class Engine:
    """Runs any number of requests on `max_running` rows over one pool, refilling rows as they finish.

        engine = jkv.Engine(model, max_running=8, max_slots=1024)
        ticket = engine.submit("b=3;c=7;d=b*c;?d", policy=jkv.r_kv(budget=128))
        for event in engine.stream():
            print(event.text, end="")
        print(engine.result(ticket).text[0])

    Args:
      model_or_params: what `jkv.load` returns, or bare `Params` (prompts are token ids then).
      max_running: rows decoded together.
      max_slots: the most slots that a request may fill in a layer and KV head: prompt and completion, or, bounded, the
        longer of prompt and budget + interval. It sizes the page tables; None takes the model's positions, at most 4,096.
      page_size: slots of a page.
      kv_memory: bytes of the pool; "auto" takes what the device has free; None takes what full rows need.
      num_pages: pages of the pool, in place of bytes.
      policies: those to come; the engine keeps what they need: as many last queries as they score by, each slot's attention
        mass (H2O, TOVA), bounds of each page (Quest), hidden states (SkipKV), vectors (SEAL). Any policy may be submitted that
        needs no more. None keeps 8 queries, R-KV's and SnapKV's default; what needs more or other things has to be named.
      chunk: decode steps between two looks of the host, at most: 16, 8, 4, 2 or 1.
      order: whom to admit first: "arrival", or "longest" (prompt and limit), which shortens the tail of a batch.
      max_stop_ids: the most stop ids of a request.
      return_trace: whether results carry attention columns for `jkv.score`.
      poison: for tests: freed pages become NaN.
      mesh: devices on which the engine runs tensor-parallel: `jax.sharding.Mesh(devices, ("tensor",))`. KV heads are split over
        them, with their query heads, pages and weights (`jkv.engine.mesh.shard`), so their number must divide the model's KV
        heads,
        MLP width and tokens. Pages and bytes are those of all devices together; a number of pages that does not divide is
        rounded down. Results are those of one device but for rounding: partial sums are added in another order, in the
        weights' type. Policies that compare KV heads with each other (any scope but "head": RPC's and TOVA's own, Ada-KV's) are
        refused, and a score sees the heads of one device. For more rows, run one engine for each replica.

    Attributes:
      stats: a `RunStats` of everything run so far.

    Raises:
      ValueError: a setting out of its range, or a mesh that the model cannot be split over.
    """

    params: Params  # the weights in use
    state: Any = None  # a `State`; None while the engine sleeps

    def __init__(
        self,
        model_or_params: Model | Params,
        *,
        max_running: int = 8,
        max_slots: int | None = None,
        page_size: int = 16,
        kv_memory: int | str | None = None,
        num_pages: int | None = None,
        policies: Sequence[Policy] | None = None,
        chunk: int = CHUNKS[0],
        order: str = "arrival",
        max_stop_ids: int = 8,
        return_trace: bool = False,
        poison: bool = False,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        check_counts(max_running=max_running, max_slots=max_slots, page_size=page_size, num_pages=num_pages)
        if policies is not None and not isinstance(policies, Sequence):
            raise ValueError(f"policies is a list, of the policies to come; got {policies!r}. Write policies=[...].")
        if chunk not in CHUNKS:
            raise ValueError(f"chunk must be one of {CHUNKS}, so that few programs compile; got {chunk}.")
        if order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}; got {order!r}.")
        self.model, self.mesh = check_model(model_or_params), typed("mesh", mesh, jax.sharding.Mesh | None)
        self.programs: Any = programs
        num_shards, params = 1, self.model.params
        if mesh is not None:
            meshes.check_mesh(mesh, self.model.config)
            params = meshes.shard(params, mesh)
            self.programs, num_shards = meshes.programs_on(mesh), mesh.size
        self._use(weights.committed(params))
        self._place, config = weights.place_of(self.params), self.params.config
        max_slots = min(config.max_positions, 4096) if max_slots is None else max_slots
        self.max_running, self.max_slots, self.page_size = max_running, max_slots, page_size
        self.chunk, self.order, self.max_stop_ids = chunk, order, max_stop_ids
        named = [] if policies is None else spread_policies(policies, len(policies))
        self.needs = Needs.of(None if policies is None else named)
        for policy in named:
            self._check_policy(policy)
        self.is_traced = return_trace
        self.num_heads = num_layer_heads(self.params)
        self.page_bytes = page_bytes(self.params, page_size, self.needs.bounds)
        self.num_pages = num_pool_pages(
            self.params,
            max_running,
            max_slots,
            page_size=page_size,
            bytes_per_page=self.page_bytes,
            kv_memory=kv_memory,
            num_pages=num_pages,
            num_shards=num_shards,
        )
        sizes: dict[str, Any] = {
            "num_rows": max_running,
            "num_pages": self.num_pages,
            "max_pages": num_pages_of(max_slots, page_size),
            "page_size": page_size,
            "dtype": self.params.embedding.dtype,
            "poison": poison,
        }
        self._make_state: Callable[[], Any] = functools.partial(empty_state, config, self.needs, **sizes)
        if mesh is not None:
            self._make_state = meshes.state_maker(mesh, config, self.needs, **sizes)
        self.wake()
        cache = self.state.cache
        beside_pages = cache.query_ring, cache.pool.slot_data, cache.pool.hole
        self.row_bytes = sum(x.nbytes for x in jax.tree.leaves(beside_pages))
        self.platform = platform_of(next(iter(self.params.embedding.devices())))
        self.version = 0  # of the weights: how often they were replaced
        self.draws = DRAWS[0]  # the most demanding so far: going back would compile, and save nothing that was not paid
        self.running: dict[int, Sample] = {}  # by batch row
        self.waiting: list[tuple[tuple[int, int], Sample]] = []  # a heap
        self.prefixes: dict[Any, Prefix] = {}
        self.tickets: dict[int, list[Sample]] = {}
        self._ticket, self._serial = itertools.count(), itertools.count()
        self._settings: Control | None = None  # of the rows, on the device; None when the rows have changed
        self._events: list[Event] = []
        self._raised: BaseException | None = None  # by a callback
        # A longer request doubles it, and compiles compaction anew.
        self._map_width = 1 << (min(config.max_positions, MAP_WIDTH) - 1).bit_length()
        self._tells_text = False
        self._sharer = Sharer(self.programs, self.model, page_size, max_running, num_pages_of(max_slots, page_size))
        self.reset_stats()

    # What a caller does.

    def submit(
        self,
        prompt: Any,
        policy: Policy | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        n: int = 1,
        stop_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        on_tokens: Callable[[Event], None] | None = None,
        request: int | None = None,
        first_sample: int = 0,
    ) -> int:
        """Queues `n` samples of one prompt and returns the ticket that stands for them.

        Arguments are those of `jkv.generate`. `on_tokens` hears an `Event` for each sample and chunk; if it raises, the
        request ends with the reason "error" and the others go on. `request` (a number below 2**32) stands for the prompt in
        the random keys; None takes a hash of its tokens. Equal prompts of different calls draw equal tokens, unless `request`
        or `first_sample`, the index of the first of the `n`, tells them apart.

        Raises:
          ValueError: a request that this engine can never serve, with the arithmetic; nothing else is affected.
        """
        check_counts(n=n, max_new_tokens=max_new_tokens)
        prompts = encode_prompts(self.model, prompt)
        if len(prompts) != 1:
            raise ValueError(f"submit takes one prompt at a time; got {len(prompts)}. Submit each.")
        if request is not None and not 0 <= typed("request", request, int) < 2**32:
            raise ValueError(f"request must lie in [0, 2**32), or be None for a hash of the prompt; got {request}.")
        if not 0 <= typed("first_sample", first_sample, int) <= 2**32 - n:
            raise ValueError(f"first_sample must lie in [0, 2**32), with the n samples; got {first_sample}.")
        settings = check_sampling(sampling)
        seed = secrets.randbits(32) if settings.seed is None else settings.seed
        requests = [
            make_request(
                self.model,
                prompts[0],
                policy=spread_policies(policy, 1)[0],
                sampling=settings,
                seed=seed,
                identity=request_id(prompts[0]) if request is None else request,
                sample=sample,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                stop_strings=stop_strings,
            )
            for sample in range(first_sample, first_sample + n)
        ]
        return self.submit_requests(requests, on_tokens)

    def submit_requests(self, requests: Sequence[Request], on_tokens: Callable[[Event], None] | None = None) -> int:
        """Queues checked requests under one ticket; tickets count from 0."""
        for request in requests:
            self.check(request)
        ticket = next(self._ticket)
        self.tickets[ticket] = [self._make_sample(ticket, i, request, on_tokens) for i, request in enumerate(requests)]
        return ticket

    def cancel(self, ticket: int) -> None:
        """Ends a request's unfinished samples; they keep the tokens they have. Rows and pages are free at the next step.

        Raises:
          ValueError: an unknown ticket.
        """
        for sample in self._samples_of(ticket):
            if not sample.is_finished:
                self._finish(sample, "cancelled")
                self._tell(sample, [], [])

    def step(self) -> list[Event]:
        """One turn of the loop; what happened since the last one, by sample.

        Raises:
          KeyboardInterrupt: Ctrl-C was pressed, or a callback raised it (or `SystemExit` and the like). The turn is finished
            all the same, the engine usable, and its events come with the next one's. A second press interrupts at once, and
            may lose the pool.
        """
        if self.running or self.waiting:
            if self.is_asleep:
                raise ValueError("An engine that sleeps has no pool to run requests in; it has some to run. Call wake() first.")
            embedding: Any = self.params.embedding
            if not isinstance(embedding, jax.Array) or embedding.is_deleted():
                raise ValueError("The weights in use are gone: forgotten, donated or deleted. Call update(params) first.")
        compiled = COMPILING.seconds
        with deferred_interrupt() as is_interrupted:
            with clock(self.stats, "seconds"):
                self._free_finished()
                self._admit()
                self._make_room()
                if self.running:
                    self._decode()
                    self._compress([i for i, sample in self.running.items() if sample.is_due])
                self._free_finished()
            self.stats.compile_seconds += COMPILING.seconds - compiled
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        if is_interrupted():
            raise KeyboardInterrupt
        events, self._events = self._events, []
        return events

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing left to do."""
        return not self.running and not self.waiting and not self._events

    def stream(self) -> Iterator[Event]:
        """Every event until all requests are finished; more may be submitted, and any cancelled, meanwhile.

        Events of a stream that was left come with the next one.
        """
        self._tells_text = True
        while not self.is_idle:
            events = collections.deque(self.step())
            try:
                while events:
                    yield events.popleft()
            finally:
                self._events = [*events, *self._events]

    def run(self, on_events: Callable[[list[Event]], None] | None = None) -> None:
        """Finishes everything. Ctrl-C finishes what is there as "cancelled" and returns."""
        while not self.is_idle:
            try:
                events = self.step()
                if on_events:
                    on_events(events)
            except KeyboardInterrupt:
                for ticket in list(self.tickets):  # a callback may take results
                    self.cancel(ticket)

    def result(self, ticket: int) -> Result:
        """A finished request's result, which the engine then forgets; its `stats` but for the tokens are the engine's so far.

        Raises:
          ValueError: an unknown ticket, or one that is not finished.
        """
        return make_result(self.model, self.take([ticket]), self.stats, self.is_traced)

    def take(self, tickets: Sequence[int]) -> list[Sample]:
        """The samples of finished requests, one request after the other; the engine then forgets them.

        Raises:
          ValueError: an unknown ticket, or one that is not finished.
        """
        samples = {ticket: self._samples_of(ticket) for ticket in tickets}
        for ticket, group in samples.items():
            if not all(sample.is_finished for sample in group):
                raise ValueError(f"result takes a finished request; {ticket} still runs. Call run() or stream() first.")
        for ticket in samples:
            del self.tickets[ticket]
        return [sample for group in samples.values() for sample in group]

    def reset_stats(self) -> None:
        """Counts from zero; what sharing learnt of distances is forgotten with it."""
        self.stats = RunStats(platform=self.platform)
        self._sharer.stats = self.stats.sharing

    # Weights and memory.

    def update(self, params: Params) -> None:
        """Takes new weights from the next step on: a change of pointers, which compiles nothing.

        Nobody starts any more from a prompt that the old weights prefilled. Samples that are running go on with the keys that
        the old ones left; `Completion.versions` tells which tokens are whose.

        Raises:
          ValueError: weights of another structure, configuration, shape, type or place, or not finite; nothing is changed.
        """
        weights.check_same(self.params, params)
        check_weights(params)
        self._use(weights.committed(params, self.params))
        self.version += 1
        self._sharer.renew(self.model)
        for _, sample in self.waiting:
            if sample.is_fresh:
                self._let_go(sample)
                sample.prefix = self._prefix_of(sample)

    def _use(self, params: Params) -> None:
        self.params = params
        self.model = dataclasses.replace(self.model, params=params)

    @property
    def is_asleep(self) -> bool:
        """Whether the pool is freed."""
        return self.state is None

    def sleep(self, forget_weights: bool = False) -> None:
        """Frees the pool and all that lies beside it on the device; rows that are running go to host memory.

        `wake` brings them back bit for bit, without the pages that they shared being shared again. Weights stay where they
        are, for they are the caller's; with `forget_weights` the engine lets go of them, and `update` must bring new ones.
        """
        if forget_weights:
            self._use(weights.shapes_of(self.params))
            self._sharer.renew(self.model)
        if self.is_asleep:
            return
        self._free_finished()
        for i in sorted(self.running, key=lambda i: self.running[i].priority, reverse=True):
            self._put_aside(i)
        for prefix in [prefix for prefix in self.prefixes.values() if prefix.is_held]:
            self._give_up(prefix)
        for leaf in jax.tree.leaves((self.state, self._settings)):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        self.state, self._settings = None, None

    def wake(self) -> None:
        """Makes an empty pool again, of the same size; those who wait find their way into it."""
        if self.is_asleep:
            state = self._make_state()
            self.state = state if self.mesh is not None else jax.device_put(state, self._place)

    # Samples.

    def check(self, request: Request) -> None:
        """Refuses what this engine can never serve.

        Raises:
          ValueError: why, with the arithmetic.
        """
        check_fits(self.params, request, max_slots=self.max_slots, num_pages=self.num_pages, page_size=self.page_size)
        self._check_policy(request.policy)
        if len(request.stop_ids) > self.max_stop_ids:
            raise ValueError(
                f"This engine takes at most {self.max_stop_ids} stop ids a request; got {len(request.stop_ids)}. Build it with "
                f"max_stop_ids={len(request.stop_ids)}."
            )

    def _check_policy(self, policy: Policy) -> None:
        self.needs.check(policy, self.model)
        if self.mesh is not None:
            meshes.check_policy(policy, self.mesh.size)

    def _samples_of(self, ticket: int) -> list[Sample]:
        if ticket not in self.tickets:
            raise ValueError(f"No request has the ticket {ticket}: it was never given, or its result was already taken.")
        return self.tickets[ticket]

    def _make_sample(self, ticket: int, index: int, request: Request, on_tokens: Callable[[Event], None] | None) -> Sample:
        tokenizer = self.model.tokenizer
        serial = next(self._serial)
        sample = Sample(
            ticket,
            index,
            request,
            Completion(),
            most_pages=most_pages(self.params, request, self.page_size),
            priority=(-request.most_tokens if self.order == "longest" else 0, serial),
            prefix=Prefix(None),
            on_tokens=on_tokens,
            stops=StopFinder(tokenizer.decode, request.stop_strings) if request.stop_strings else None,
            submitted=time.perf_counter() - COMPILING.seconds,
        )
        sample.prefix = self._prefix_of(sample)
        heapq.heappush(self.waiting, (sample.priority, sample))
        return sample

    def _prefix_of(self, sample: Sample) -> Prefix:
        """The prefix that a fresh sample starts from: that of the weights in use."""
        key = self.version, sample.request.prefix
        prefix = self.prefixes.setdefault(key, Prefix(key))
        prefix.samples.add(sample)
        return prefix

    def _finish(self, sample: Sample, reason: str) -> None:
        """Ends a sample wherever it is; its row, if any, is freed with the others."""
        completion = sample.completion
        completion.finish_reason = reason
        completion.seconds = sample.seconds
        if sample.filled is not None:
            held, seen = self._held_and_seen(sample)
            completion.saved = 1 - held / max(seen, 1)
        sample.aside = sample.sentences = sample.sharing = None
        if self.is_traced:
            seen = len(sample.request.prompt) + sample.generated
            whole = self._new_ends(seen) if completion.ends is None else completion.ends
            completion.ends = whole[..., :seen]
            if completion.reads:
                reads = np.concatenate(completion.reads)
                completion.columns = columns_of(reads, len(sample.request.prompt), self.page_size, NEVER)
                completion.reads = []
            if completion.again is not None:
                completion.columns = completion.again.columns(completion.ends)
                completion.again = None
        if not sample.is_running:
            self._let_go(sample)

    def _tell(self, sample: Sample, tokens: list[int], log_probs: list[float]) -> None:
        """Makes an event of what is new, for the caller of `step` and the request's callback."""
        completion, text = sample.completion, None
        if self.model.tokenizer is not None and (self._tells_text or sample.on_tokens):
            text = self._new_text(sample)
        event = Event(sample.ticket, sample.index, tokens, log_probs, text, completion.finish_reason)
        self._events.append(event)
        if sample.on_tokens is None:
            return
        try:
            sample.on_tokens(event)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._raised = error  # not the request's alone: `step` raises it when nothing can be lost
            completion.error = error
            for other in self.tickets.get(sample.ticket, []):
                other.on_tokens = None
                if not other.is_finished:
                    other.completion.error = error
                    self._finish(other, "error")
                    self._tell(other, [], [])

    def _new_text(self, sample: Sample) -> str:
        """The text that no event has told yet and that no stop string can take back."""
        if sample.text is None:
            sample.text = TextStream(functools.partial(self.model.tokenizer.decode, skip_special_tokens=True))
        sample.text.push(sample.completion.tokens[sample.num_told_tokens :])
        sample.num_told_tokens = len(sample.completion.tokens)
        text, stops = sample.text.text, sample.request.stop_strings
        text = cut(text, stops) if sample.is_finished else text[: num_certain(text, stops)]
        told, sample.num_told = sample.num_told, max(sample.num_told, len(text))
        return text[told:]

    # Memory: claims, prefixes, room. All on the host.

    def _pages(self, num_slots: int) -> int:
        return num_row_pages(self.params, num_slots, self.page_size)

    def _set_filled(self, prefix: Prefix, request: Request) -> None:
        """Settles what a prefix holds, from the request that starts it."""
        size = self.params.config.num_kv_heads, self.page_size
        prefix.filled = request.first_slots(self.params.config.num_layers)
        prefix.num_pages = request.policy.num_pages(prefix.filled, *size)
        prefix.num_full_pages = request.policy.num_full_pages(prefix.filled, *size)

    def _claim(self, sample: Sample, shares: bool) -> int:
        """Pages that a sample in a row may hold until the next look, those of its prefix not counted."""
        if sample.request.policy.is_bounded:
            return sample.most_pages
        policy = sample.request.policy
        slots = sample.filled + policy.most_growth(min(self.chunk, sample.remaining), self.page_size)
        held = min(policy.num_pages(slots, self.params.config.num_kv_heads, self.page_size), sample.most_pages)
        return held - (sample.prefix.num_full_pages if shares else 0)

    def _claimed(self) -> int:
        """Pages spoken for."""
        rows = sum(self._claim(sample, sample.shares) for sample in self.running.values())
        return rows + sum(prefix.num_pages for prefix in self.prefixes.values() if prefix.is_held)

    def _find_room(self, sample: Sample) -> bool:
        """Whether a waiting sample fits now, giving up prefixes that no row reads; settles whether it shares its own."""
        prefix, request = sample.prefix, sample.request
        if sample.filled is None:
            sample.filled = request.first_slots(self.params.config.num_layers)
        if sample.aside is None:
            may_share = prefix.is_held or sum(other.is_fresh for other in prefix.samples) > 1
        else:
            may_share = prefix.is_held and bool(sample.aside.is_shared.any())
        for shares in (True, False) if may_share else (False,):
            needed = self._claim(sample, shares)
            if shares and not prefix.is_held:
                self._set_filled(prefix, request)
                needed += prefix.num_pages
            if sample.aside is None and not (shares and prefix.is_held):  # the whole prompt, until it is compressed
                needed = max(needed, self._pages(len(request.prompt)))
            while self._claimed() + needed > self.num_pages:
                idle = [one for one in self.prefixes.values() if one.is_idle and not (shares and one is prefix)]
                if not idle:
                    break
                self._give_up(idle[0])
            if self._claimed() + needed <= self.num_pages:
                sample.shares = shares
                prefix.is_held |= shares
                return True
        return False

    def _make_room(self) -> None:
        """Puts the youngest unbounded samples aside until the next chunk fits the pool."""
        while self._claimed() > self.num_pages:
            idle = next((prefix for prefix in self.prefixes.values() if prefix.is_idle), None)
            if idle is not None:
                self._give_up(idle)
                continue
            unbounded = [i for i, sample in self.running.items() if not sample.request.policy.is_bounded]
            youngest = max(unbounded, key=lambda i: self.running[i].priority)
            self.running[youngest].completion.preemptions += 1
            self.stats.preemptions += 1
            self._put_aside(youngest)

    def _give_up(self, prefix: Prefix) -> None:
        """Frees a prefix that no row reads, and keeps it in host memory for samples put aside that do."""
        assert prefix.start is not None
        table = prefix.start.page_table
        if prefix.aside is None and any(sample.aside for sample in prefix.samples):
            prefix.aside = swap.read_pages(self.programs, self.state, table, table != TRASH)
        self.state = self.programs.drop(self.state, prefix.start.snapshot.seat)
        prefix.start, prefix.is_held = None, False

    def _let_go(self, sample: Sample) -> None:
        """A sample no longer needs its prefix; the last one frees it."""
        prefix = sample.prefix
        prefix.samples.discard(sample)
        if prefix.is_held and not prefix.is_needed:
            self._give_up(prefix)
        if not prefix.samples:
            self.prefixes.pop(prefix.key, None)

    # Rows.

    def _admit(self) -> None:
        """Fills free rows with those who wait, in their order, as long as there is room."""
        free = [i for i in range(self.max_running) if i not in self.running]
        admitted = []
        while free and self.waiting:
            sample = self.waiting[0][1]
            if not sample.is_finished:
                if not self._find_room(sample):
                    break
                sample.is_running = True
                admitted.append(free.pop(0))
                self.running[admitted[-1]] = sample
            heapq.heappop(self.waiting)
        assert self.running or not self.waiting, "a request that fits alone found no room"
        if admitted:
            self._settings = None
        waited = {i: self.running[i].seconds for i in admitted}
        for (_, is_forking), group in itertools.groupby(admitted, key=self._source):
            if is_forking:
                self._fork(list(group))
                continue
            for i in group:
                self._prefill(i) if self.running[i].aside is None else self._resume(i)
        for i in admitted:
            completion = self.running[i].completion
            if not completion.queued_seconds:
                completion.queued_seconds = waited[i]
                self.stats.started += 1
                self.stats.queued_seconds += completion.queued_seconds

    def _source(self, i: int) -> tuple[int, bool]:
        """What a row starts from, and whether that is a prefix."""
        return id(self.running[i].prefix), self.running[i].is_forking

    def _prefill(self, i: int) -> None:
        """A prompt into its row, compressed if it is longer than the budget."""
        sample = self.running[i]
        prompt = sample.request.prompt
        sample.filled, sample.version = np.full(self.params.config.num_layers, len(prompt)), self.version
        sample.sentences = new_log(self.model, sample.request.policy.sentences)
        if self.is_traced:
            sample.completion.ends = self._new_ends(sample.request.most_tokens)
        with clock(self.stats, "prefill_seconds"):
            for piece in split_prompt(prompt):
                padded = np.zeros((1, next(size for size in PREFILL_SIZES if size >= len(piece))), np.int32)
                padded[0, : len(piece)] = piece
                self.state, hidden = self.programs.prefill_chunk(
                    self.params, self.state, np.asarray([i], np.int32), padded, np.asarray([len(piece)], np.int32)
                )
                if sample.sentences is not None:
                    sample.sentences.take(piece, np.asarray(hidden)[0, : len(piece)])
            self._note_peak(self.num_pages - int(np.sum(self.state.cache.pool.free_top)))
        self._sharer.start(sample)
        self._note_row(sample)
        self.stats.prefills += 1
        if sample.is_due:
            self._compress([i])

    def _fork(self, rows: list[int]) -> None:
        """Rows that start from the same prompt: prefilled once, in the first of them, and copied to all."""
        prefix = self.running[rows[0]].prefix
        if prefix.start is None:
            self._prefill(rows[0])
            self.state, snapshot = self.programs.leave(self.state, np.int32(rows[0]))
            done = dataclasses.replace(self.running[rows[0]].completion)
            prefix.start = Start(snapshot, np.asarray(snapshot.seat.page_table), done, self.running[rows[0]].sentences)
        start = prefix.start
        with clock(self.stats, "prefill_seconds"):
            for owns_all, group in self._by_ownership(rows):
                self.state = self.programs.fork(self.state, start.snapshot, self._pad_rows(group), owns_all)
        for sample in (self.running[i] for i in rows):
            completion, done = sample.completion, start.completion
            sample.filled, completion.is_forked, sample.version = prefix.filled, True, self.version
            completion.compactions, completion.evicted = done.compactions, done.evicted
            sample.sentences = None if start.sentences is None else start.sentences.copy()
            self._sharer.start(sample)
            if done.ends is not None:
                completion.ends = self._new_ends(sample.request.most_tokens)
                count = len(sample.request.prompt)
                completion.ends[..., :count] = done.ends[..., :count]
        self.stats.forks += len(rows)

    def _by_ownership(self, rows: list[int]) -> Iterator[tuple[bool, list[int]]]:
        """Rows that will write into their prompt's pages and must own them, and the others."""
        for owns_all in (False, True):
            group = [i for i in rows if self.running[i].request.policy.evicts_in_steps == owns_all]
            if group:
                yield owns_all, group

    def _put_aside(self, i: int) -> None:
        """Moves a row to host memory, but for the pages of its prefix."""
        sample = self.running.pop(i)
        with clock(self.stats, "swap_seconds"):
            sample.aside = swap.put_aside(self.programs, self.state, i, sample.shared_table)
        sample.is_running, sample.shares = False, False
        self.state = self.programs.release(self.state, self._pad_rows([i]))
        heapq.heappush(self.waiting, (sample.priority, sample))

    def _resume(self, i: int) -> None:
        """Brings a sample back that was put aside, bit for bit."""
        sample = self.running[i]
        assert sample.aside is not None
        with clock(self.stats, "swap_seconds"):
            self.state = swap.bring_back(self.programs, self.state, i, sample.aside, sample.shared_table, sample.prefix.aside)
        sample.aside = None

    def _pad_rows(self, rows: list[int]) -> np.ndarray:
        """Rows for a program that takes as many as there are; the rest are none."""
        return np.pad(np.asarray(rows, np.int32), (0, self.max_running - len(rows)), constant_values=self.max_running)

    def _free_finished(self) -> None:
        """Frees the rows and pages of finished samples."""
        finished = [i for i, sample in self.running.items() if sample.is_finished]
        if finished:
            self.state = self.programs.release(self.state, self._pad_rows(finished))
        for i in finished:
            sample = self.running.pop(i)
            sample.is_running = False
            self._let_go(sample)

    # Decoding.

    def _num_steps(self) -> int:
        """Steps of the next chunk, which must not pass a row's next compaction."""
        due = (sample.request.policy.steps_until_due(sample.generated) for sample in self.running.values())
        limit = min((steps for steps in due if steps), default=self.chunk)
        return next(steps for steps in CHUNKS if steps <= min(limit, self.chunk))

    def _decode(self) -> None:
        """One chunk of all rows."""
        num_steps, control = self._num_steps(), self._control()
        with clock(self.stats, "decode_seconds"):
            is_traced = self.is_traced and self.needs.has_events
            self.state, emitted = self.programs.decode_chunk(
                self.params, self.state, control, num_steps, self.draws, is_traced, self.needs.sentences
            )
            if self.needs.sharing:
                self._sharer.look(self.running, self.state, num_steps, emitted)
            told = jax.device_get(emitted)
            token, log_prob, is_real, held, is_running, dropped, is_read, steered, hidden, log_prob_full = told
            log_prob_full = log_prob if log_prob_full is None else log_prob_full
        assert held <= self.num_pages, "the pool ran out of pages below a claim"
        running = list(self.running.items())
        counts = is_real.sum(axis=0)
        for i, sample in running:
            if self.is_traced and sample.request.policy.moves_sinks:
                sample.note_shift(int(counts[i]))
            if not sample.completion.tokens:
                sample.completion.first_seconds = sample.seconds
            if sample.request.policy.evicts_in_steps:
                sample.note_steps(int(counts[i]), bool(is_running[i]), None if dropped is None else dropped[:, :, i])
            else:
                sample.filled = sample.filled + int(counts[i])
            if sample.sharing is not None:
                sample.sharing.append(token[: counts[i], i].tolist())
                if not sample.sharing.is_over:
                    sample.filled = np.full_like(sample.filled, sample.sharing.layout.num_slots)
            self._note_row(sample)
            if is_read is not None and sample.request.policy.read:
                sample.completion.reads.append(is_read[: counts[i], :, i])
            if steered is not None and sample.request.policy.steer:
                sample.note_steering(steered[: counts[i], i])
            if sample.sentences is not None:
                sample.sentences.take(token[: counts[i], i], hidden[: counts[i], i])
            sample.generated += int(counts[i])
        self._note_sentences()
        self.stats.row_steps += num_steps * self.max_running
        self.stats.tokens += int(counts.sum())
        self._count_bytes(int(held), num_steps)
        drawn = (token, log_prob, log_prob_full)
        news = [(s, *self._collect(s, *(field[: counts[i], i].tolist() for field in drawn))) for i, s in running]
        self.state = self._sharer.decide(self.state)
        for sample, error in self._sharer.failed:
            if not sample.is_finished:
                sample.completion.error = error
                self._finish(sample, "error")
        for sample, tokens, log_probs in news:  # a callback may end others, who keep what they have
            self._tell(sample, tokens, log_probs)

    def _control(self) -> Control:
        """What the next chunk has to know; settings change only with the rows, and stay on the device until then."""
        if self._settings is None:
            demands = [sample.request.sampling.draws for sample in self.running.values()]
            self.draws = max([self.draws, *demands], key=DRAWS.index)
            self._settings = row_settings(
                self.running,
                self.needs,
                self.model,
                num_rows=self.max_running,
                max_stop_ids=self.max_stop_ids,
                page_size=self.page_size,
                sharding=None if self.mesh is None else meshes.everywhere(self.mesh),
            )
        return for_chunk(self._settings, self.running, self.model)

    def _collect(
        self, sample: Sample, tokens: list[int], log_probs: list[float], log_probs_full: list[float]
    ) -> tuple[list[int], list[float]]:
        """Takes a chunk's tokens over into the completion, ends it if it is finished, and returns those that count."""
        request, completion = sample.request, sample.completion
        reason = ""
        if not np.isfinite(log_probs[-1]):
            reason = "nan"
        elif tokens[-1] in request.stop_ids:
            reason = "stop"
        elif sample.generated >= request.max_new_tokens:
            reason = "length"
        kept = sample.stops.find(tokens) if sample.stops else None
        if kept is not None:
            tokens, log_probs, reason = tokens[:kept], log_probs[:kept], "stop"
        completion.tokens += tokens
        completion.log_probs += log_probs
        completion.log_probs_full += log_probs_full[: len(tokens)]
        completion.versions += [sample.version, *[self.version] * len(tokens)][: len(tokens)]  # the first's logits were there
        sample.version = self.version
        if reason:
            self._finish(sample, reason)
        return tokens, log_probs

    def _held_and_seen(self, sample: Sample) -> tuple[float, int]:
        """Pages that a row holds, or reads where its policy chooses, and those that its tokens would fill.

        Heads that compete for a layer's slots may each hold a page more than is counted here.
        """
        policy, config, seen = sample.request.policy, self.params.config, len(sample.request.prompt) + sample.generated
        held = float(config.num_kv_heads * num_pages_of(sample.filled, self.page_size).sum())
        if policy.read is not None:
            dense = min(policy.read.dense_layers, config.num_layers) / config.num_layers
            whole = num_pages_of(seen, self.page_size)
            read = min(whole, pages_read(policy.read.budget, self.page_size))
            held *= dense + (1 - dense) * read / whole
        return held, self._pages(seen)

    def _count_bytes(self, held: int, num_steps: int) -> None:
        stats, rows = self.stats, len(self.running)
        counts = [self._held_and_seen(sample) for sample in self.running.values()]
        saved = 1 - sum(held for held, _ in counts) / max(sum(seen for _, seen in counts), 1)
        stats.steps += num_steps
        stats.amsr += (saved - stats.amsr) * num_steps / stats.steps
        kv_bytes = held * self.page_bytes + self.row_bytes
        stats.kv_bytes += (kv_bytes - stats.kv_bytes) / (stats.chunks + 1)
        held_by_rows = held * self.page_bytes + self.row_bytes * rows / self.max_running
        stats.kv_bytes_per_sample += (held_by_rows - rows * stats.kv_bytes_per_sample) / (stats.sample_chunks + rows)
        stats.chunks += 1
        stats.sample_chunks += rows
        self._note_peak(held)

    def _note_peak(self, held: int) -> None:
        stats, config = self.stats, self.params.config
        stats.peak_kv_bytes = max(stats.peak_kv_bytes, held * self.page_bytes + self.row_bytes)
        seen = sum(len(sample.request.prompt) + sample.generated for sample in self.running.values())
        itemsize = self.params.embedding.dtype.itemsize
        dense = seen * 2 * self.num_heads * config.head_size * itemsize
        stats.dense_kv_bytes = max(stats.dense_kv_bytes, dense)

    def _note_sentences(self) -> None:
        if self.needs.sentences:
            logs = [sample.sentences for sample in (*self.running.values(), *(sample for _, sample in self.waiting))]
            logs += [prefix.start.sentences for prefix in self.prefixes.values() if prefix.start]
            held = sum(log.nbytes for log in logs if log is not None)
            self.stats.peak_sentence_bytes = max(self.stats.peak_sentence_bytes, held)

    def _note_row(self, sample: Sample) -> None:
        num_pages = sample.request.policy.num_pages(sample.filled, self.params.config.num_kv_heads, self.page_size)
        sample.completion.peak_kv_bytes = max(sample.completion.peak_kv_bytes, num_pages * self.page_bytes)

    # Compaction.

    def _compress(self, due: list[int]) -> None:
        """Compacts rows, those of the same policy together, padded to a few sizes."""
        groups: dict[Evict, list[int]] = {}
        for i in due:
            evict = self.running[i].request.policy.evict
            assert evict is not None
            groups.setdefault(evict.as_program, []).append(i)
        with clock(self.stats, "decode_seconds"):
            for evict, members in groups.items():
                for start in range(0, len(members), COMPRESS_SIZES[-1]):
                    self._compress_group(evict, members[start : start + COMPRESS_SIZES[-1]])

    def _compress_group(self, evict: Evict, members: list[int]) -> None:
        size = next(size for size in COMPRESS_SIZES if size >= len(members))
        row = np.full(size, self.max_running, np.int32)
        budget, prompt_length = np.zeros((self.params.config.num_layers, size), np.int32), np.zeros(size, np.int32)
        protected = np.zeros((2, size), np.int32)
        for j, i in enumerate(members):
            sample = self.running[i]
            own: Any = sample.request.policy.evict
            row[j], budget[:, j], prompt_length[j] = i, sample.compacted, len(sample.request.prompt)
            protected[:, j] = own.sinks, own.recent
        logs = [log for log in (self.running[i].sentences for i in members) if log is not None]
        sentences = None
        if evict.needs_similarity:
            longest = max(self.running[i].request.most_tokens for i in members)
            self._map_width = max(self._map_width, 1 << (longest - 1).bit_length())
            sentences = map_sentences(logs, size, self._map_width)
        self.state, dropped, is_left = self.programs.compress(
            self.state, row, budget, prompt_length, protected, evict=evict, is_traced=self.is_traced, sentences=sentences
        )
        if is_left is not None:
            for log, left in zip(logs, np.asarray(is_left), strict=False):
                log.forget(left)
        dropped = None if dropped is None else jax.device_get(dropped)
        for j, i in enumerate(members):
            sample = self.running[i]
            completion = sample.completion
            completion.compactions += 1
            compacted = sample.compacted
            completion.evicted += float((sample.filled - compacted).mean())
            sample.filled = compacted
            if sample.sharing is not None:
                sample.sharing.is_over = True
            if dropped is not None and completion.ends is not None:
                layer, head, slot = np.nonzero(dropped[:, j] != EMPTY)
                now = len(sample.request.prompt) + sample.generated
                completion.ends[layer, head, dropped[layer, j, head, slot]] = now
                if completion.again is not None:
                    is_dropped = np.zeros(completion.ends.shape, bool)
                    is_dropped[layer, head, dropped[layer, j, head, slot]] = True
                    completion.again.drop(is_dropped, now)

    def _new_ends(self, num_columns: int) -> np.ndarray:
        config = self.params.config
        return np.full((config.num_layers, config.num_kv_heads, num_columns), NEVER, np.int32)


def split_prompt(prompt: np.ndarray) -> list[np.ndarray]:
    """The pieces that prefill takes one after the other."""
    return [prompt[start : start + PREFILL_SIZES[-1]] for start in range(0, len(prompt), PREFILL_SIZES[-1])]
