"""Executes the scheduler's turns on the device: prefill, fork, swap, decode, compaction. It owns the device state.

Every program has a fixed shape (`jkv.engine.programs`), the state is donated from each to the next, and the host reads the
device once a chunk.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jkv.cache.pool import NULL_PAGE, num_pages_of
from jkv.checks import counted, size
from jkv.engine import kept_rows, prefill, prefix_reuse, programs, starts, swap
from jkv.engine import mesh as meshes
from jkv.engine.chunk_inputs import count_rows, empty_state, for_chunk, row_settings
from jkv.engine.clocks import is_ready
from jkv.engine.conversations import Conversations
from jkv.engine.device_program import LEAST_ROWS
from jkv.engine.faults import accuse, blame, working_for
from jkv.engine.filling import PIECES, Filling
from jkv.engine.flight import Flight, alive_after
from jkv.engine.kernels import programs_for
from jkv.engine.memory import state_bytes
from jkv.engine.model_facts import facts_for
from jkv.engine.policy_checks import Trials
from jkv.engine.prefix_cache import PrefixCache
from jkv.engine.processes import copy_to_host, host
from jkv.engine.programs import ChunkInputs
from jkv.engine.samples import Prefix, RowOutputs, Sample
from jkv.engine.scheduler import Capacity, Turn
from jkv.engine.sharer import Sharer
from jkv.engine.stats import Meter
from jkv.eviction import Needs
from jkv.eviction.policy import cutoff_of
from jkv.model import weights
from jkv.model.params import Model, Params
from jkv.model.routes import RouteRecorder
from jkv.model.sampling import DRAWS
from jkv.reasoning.sentences import map_sentences
from jkv.replay.trace import TraceRecorder
from pallas_kernels.choice import lowest_capability
from pallas_kernels.dispatch import platform_of
from pallas_kernels.quantised import Format

LOGGER = logging.getLogger("jkv")
MAP_WIDTH = 32_768  # positions of the sentence map that compaction takes, at first


class Runner:
    """The device side of an engine.

    Args:
      model: its weights are committed to their devices (`jkv.model.weights.committed`).
      capacity: rows, pages and page size.
      needs: the data that the device keeps for policies.
      running: the scheduler's record of samples by row.
      page_bytes: bytes of a page.
      max_slots: the most slots of a row in a layer and KV head.
      max_stop_ids: the most stop ids of a request.
      mesh: the devices of a tensor-parallel engine.
      kernels: kernels chosen by hand; None for the best.
      poison: for tests: freed pages become NaN.
      gate: the arrays of the gate that all steps compute, on the device or mesh.
      kv_format: how the pool quantises keys and values; None if it does not.
      ahead: whether a chunk may be dispatched before the last one is read; None is True except on a CPU.
      prefill_tokens: the most tokens of prompts between two chunks; None is two of the largest pieces.
      routed_experts: whether programs return the experts that tokens go through.

    Attributes:
      state: a `jkv.engine.programs.State`; None while the engine sleeps.
      programs: `jkv.engine.programs`, or those of the mesh, with their kernels chosen.
      version: the version of the weights: how often they were replaced.
      is_traced: whether new samples record a trace.
      prefix_cache, conversations: the scheduler's.
      filling: prompts that are not in their rows yet.
      sharer: finds pages to share.
      meter: measures bytes and seconds.
      trials: tries policies before requests with them are admitted.
    """

    state: Any = None

    def __init__(
        self,
        model: Model,
        capacity: Capacity,
        needs: Needs,
        running: Mapping[int, Sample],
        *,
        page_bytes: int,
        max_slots: int,
        max_stop_ids: int,
        mesh: jax.sharding.Mesh | None = None,
        kernels: str | None = None,
        poison: bool = False,
        gate: Any = None,
        kv_format: Format | None = None,
        ahead: bool | None = None,
        prefill_tokens: int | None = None,
        routed_experts: bool = False,
    ) -> None:
        self.gate, self.routed_experts = gate, routed_experts
        self.model, self.capacity, self.needs, self.mesh, self.max_stop_ids = model, capacity, needs, mesh, max_stop_ids
        devices = model.params.embedding.devices()
        self.programs: Any = programs_for(programs if mesh is None else meshes.programs_on(mesh), devices, kernels)
        self.version, self.is_traced, self.prefix_cache, self.conversations = 0, False, PrefixCache(), Conversations()
        self.platform = platform_of(next(iter(devices)))
        self.prefill_sizes = prefill.sizes_for(self.platform, lowest_capability(devices))
        self.filling = Filling(running, prefill_tokens or PIECES * self.prefill_sizes[-1])
        self.held: list[Any] = []  # pages in use after each prefill since the last chunk was read, on the device
        self.scores: list[tuple[Sample | Prefix, Any]] = []  # of compactions since the last chunk was dispatched: see `Flight`
        self.num_rows = max(capacity.max_running, LEAST_ROWS.get(self.platform, 1))
        self.ahead = self.platform != "cpu" if ahead is None else ahead
        self.draws = DRAWS[0]  # the most general kind so far; never lowered, because another kind compiles again
        self.is_forcing = False  # whether a request has had forced tokens; stays so for the same reason
        self.is_penalising = False  # whether a request has had penalties; likewise
        self.returns_own = False  # whether a request has asked for the model's own log-probabilities; likewise
        config, max_pages = model.config, num_pages_of(max_slots, capacity.page_size)
        sizes: dict[str, Any] = {
            "num_rows": self.num_rows,
            "num_pages": capacity.num_pages,
            "max_pages": max_pages,
            "page_size": capacity.page_size,
            "dtype": model.params.embedding.dtype,
            "poison": poison,
            "kv_format": kv_format,
        }
        self._make_state: Callable[[], Any] = functools.partial(empty_state, config, needs, **sizes)
        self.trials = Trials(self._make_state)
        if mesh is not None:
            self._make_state = meshes.state_maker(mesh, config, needs, **sizes)
        self._place = weights.place_of(model.params)
        everywhere = self._place if mesh is None else meshes.replicated(mesh)
        # On the device, as what a chunk returns is: programs would compile once more for an array of the host.
        self._all_alive: Any = jax.device_put(np.ones(self.num_rows, bool), everywhere) if self.ahead else None
        self.wake()
        self._settings: ChunkInputs | None = None  # settings of the rows, on the device; None when the rows have changed
        self._generated: Any = None  # how often each row has drawn each token, on the device; None without penalties
        # A longer request widens it to a power of two; then compaction compiles again.
        self._map_width = 1 << (min(config.max_positions, MAP_WIDTH) - 1).bit_length()
        cache = self.state.cache
        row_arrays = *cache.beside, cache.query_ring, cache.pool.slot_data, cache.pool.vacant_slot
        self.meter = Meter(
            config,
            running,
            itemsize=model.params.embedding.dtype.itemsize,
            page_size=capacity.page_size,
            page_bytes=page_bytes,
            row_bytes=sum(x.nbytes for x in jax.tree.leaves(row_arrays)),
            state_bytes=state_bytes(config, 1, model.params.embedding.dtype),
            max_running=capacity.max_running,
            platform=self.platform,
        )
        LOGGER.info(
            "%s: %s weights on %s; a pool of %d pages of %d slots, %s, for %s of at most %d slots",
            model.name or config.family,
            model.params.embedding.dtype,
            ", ".join(sorted(str(device) for device in devices)),
            capacity.num_pages,
            capacity.page_size,
            size(capacity.num_pages * page_bytes),
            counted(capacity.max_running, "row"),
            max_slots,
        )
        self.sharer = Sharer(self.programs, model, capacity.page_size, self.num_rows, max_pages)

    @property
    def params(self) -> Params:
        """The weights in use."""
        return self.model.params

    @property
    def num_held_pages(self) -> int:
        """Pages of the pool in use; waits for the device."""
        return self.capacity.num_pages - int(np.sum(self.state.cache.pool.free_top))

    # Weights and memory.

    def set_params(self, params: Params) -> None:
        """Replaces the weights by others of the same shapes; the old ones have prefilled what rows are filled with."""
        self.model = dataclasses.replace(self.model, params=params)
        self.sharer.set_model(self.model)

    def wake(self) -> None:
        """Allocates an empty pool. What a failed program left unread is forgotten."""
        self.held.clear()
        state = self._make_state()
        self.state = state if self.mesh is not None else jax.device_put(state, self._place)

    def sleep(self) -> None:
        """Frees the pool and the rest of the device state, whatever of it is left."""
        for leaf in jax.tree.leaves((self.state, self._settings, self._generated)):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        self.state, self._settings, self._generated = None, None, None

    def reset(self) -> None:
        """Replaces the device state, which may be lost, by that of an empty pool."""
        self.filling.clear()
        self.scores.clear()
        self.sharer.forget()
        self.sleep()
        self.wake()

    def check_ready(self) -> None:
        if self.state is None:
            raise ValueError("A sleeping engine has no pool, and this one has unfinished requests. Call wake() first.")
        embedding: Any = self.params.embedding
        if not isinstance(embedding, jax.Array) or embedding.is_deleted():
            raise ValueError(
                "The engine needs weights on the device; its own were forgotten, donated or deleted. Call update(params) first."
            )

    # A turn.

    def execute(self, turn: Turn) -> None:
        """Carries out the scheduler's turn: frees, swaps, and prefills as much as may come before the next chunk."""
        self.release(turn.release)
        if turn.swap_out:
            with self.meter.clock("swap_seconds"):
                for row, sample in turn.swap_out.items():
                    with working_for([sample]):
                        sample.swapped = swap.swap_out(self.programs, self.state, row, sample.prefix.page_table)
                        self.state = self.programs.release(self.state, self.pad_rows([row]))
        self.free(turn.free)
        if turn.admit:
            self._settings = None
        for source, group in itertools.groupby(turn.admit.items(), key=lambda item: item[1].source):
            admitted = dict(group)
            if source is not None:
                self.filling.add(admitted, starts.fork(self, admitted))
                continue
            for row, sample in admitted.items():
                if sample.resumes is not None:
                    self.filling.add({row: sample}, kept_rows.resume(self, row, sample))
                elif sample.is_swapped:
                    with self.meter.clock("swap_seconds"), working_for([sample]):
                        self._swap_in(row, sample)
                else:
                    self.filling.add({row: sample}, starts.start(self, row, sample))
        self.fill()

    def fill(self, *, to_end: bool = False) -> None:
        """Prefills as much as may come before the next chunk, or all that waits."""
        if self.filling.run(to_end=to_end):
            self._settings = None

    def release(self, rows: Sequence[int]) -> None:
        """Frees rows and the pages that only they hold, and detaches, swaps out and frees kept rows."""
        self.state = kept_rows.settle(self.programs, self.state, self.conversations)
        if rows:
            with self.meter.stats.idle.dispatching(is_ready(self.state)):
                self.state = self.programs.release(self.state, self.pad_rows(rows))

    def free(self, prefixes: Sequence[Prefix]) -> None:
        """Frees prefixes (after a copy to host memory, if a swapped-out sample needs it) and what the prefix cache evicted."""
        for prefix in prefixes:
            assert prefix.start is not None
            table = prefix.start.page_table
            if prefix.swapped is None and prefix.absent:
                prefix.swapped = swap.read_pages(self.programs, self.state, table, table != NULL_PAGE)
            self.state = self.programs.free(self.state, prefix.start.snapshot.block_table)
            prefix.start = None
        self.state = prefix_reuse.drop(self.programs, self.state, self.prefix_cache)

    def copy_row(self, row: int) -> swap.SwappedRow:
        """A copy of a running row in host memory, with its own copies of pages that it shares."""
        with self.meter.clock("swap_seconds"):
            return swap.swap_out(self.programs, self.state, row, None)

    def _swap_in(self, row: int, sample: Sample) -> None:
        """Moves a sample back into a row, bit for bit."""
        assert sample.swapped is not None
        table = sample.prefix.page_table if sample.shares else None
        self.state = swap.swap_in(self.programs, self.state, row, sample.swapped, table, sample.prefix.swapped)
        sample.swapped, sample.is_swapped = None, False
        sample.prefix.sort(sample)

    def dispatch(self, running: dict[int, Sample], num_steps: int, last: Flight | None = None) -> Flight:
        """Dispatches one chunk; `last` is the one before, if its tokens are not read yet."""
        is_traced = self.is_traced and self.needs.has_events
        inputs = self._chunk_inputs(running)._replace(is_alive=alive_after(last, self._all_alive))
        with self.meter.clock("decode_seconds"), self.meter.stats.idle.dispatching(is_ready(self.state)):
            given = self.draws, is_traced, self.needs.similarity, self.gate, self._generated, self.routed_experts
            self.state, outputs = self.programs.decode_chunk(
                self.params, self.state, inputs, num_steps, *given, self.returns_own
            )
            self._generated, outputs = outputs.generated, outputs._replace(generated=None)
            if self.needs.sharing:
                self.sharer.find_pairs(running, self.state, num_steps, outputs)
        scores, self.scores = self.scores, []
        return Flight(dict(running), outputs, num_steps, self.version, scores)

    def plan(self, flight: Flight) -> None:
        """Counts a chunk before its tokens are read, and dispatches the compactions that are then due."""
        copy_to_host((flight.outputs, [kinds for _, kinds in flight.scores]))
        for row, sample in flight.rows.items():
            sample.plan(flight.num_steps)
            if sample.remaining > 0 and sample.is_due:
                with self.meter.clock("decode_seconds"):
                    flight.compactions.append((sample, *self._compact_row(row, sample, flight)))
                sample.filled = sample.compacted

    def read(self, flight: Flight) -> tuple[dict[int, RowOutputs], int]:
        """Waits for a chunk; returns the outputs of each row that is not finished, and how many pages were then in use.

        Samples and prompts whose scores could not be ranked before the chunk get an error.
        """
        with self.meter.clock("decode_seconds"), self.meter.stats.idle.waiting(lambda: is_ready(self.state)):
            outputs, held, scores = host((flight.outputs, self.held, [kinds for _, kinds in flight.scores]))
        for (owner, _), kinds in zip(flight.scores, scores, strict=True):
            accuse(owner, kinds[0])
        self.held.clear()
        self.meter.peak(max(map(int, held), default=0))
        return flight.by_row(outputs), int(outputs.held_pages)

    def share(self) -> None:
        """Shares similar pages found during the chunk."""
        self.state = self.sharer.decide(self.state)

    def compact(self, due: dict[int, Sample]) -> None:
        """Compacts rows, each by one program of one row, so that no row's rounding depends on how many are due.

        The host reads nothing back before all of them are dispatched.
        """
        with self.meter.clock("decode_seconds"):
            self.count([(sample, *self._compact_row(row, sample)) for row, sample in due.items()])

    def count(self, compactions: Sequence[tuple[Sample, Any, Any, Any]]) -> None:
        """Counts dispatched compactions, once what they return is there."""
        for sample, dropped, is_left, left in compactions:
            if sample.is_finished:
                continue
            numbers = None if dropped is None else host(dropped)[:, 0], None if left is None else host(left)
            with blame(sample):
                if sample.sentences is not None and is_left is not None:
                    sample.sentences.forget(np.asarray(is_left)[0])
                sample.compact(*numbers)

    def _compact_row(self, row: int, sample: Sample, last: Flight | None = None) -> tuple[Any, Any, Any]:
        """Dispatches one row's compaction; returns what is still on the device: the positions dropped (when traced), those left
        (when sentences are compared), and the slots left in each head (when scores decide how many).

        If `last`, a chunk that is not read yet, has ended the row, the row stays as its last token left it, for a next turn.
        """
        with working_for([sample]):
            return self._compact(row, sample, last)

    def _compact(self, row: int, sample: Sample, last: Flight | None) -> tuple[Any, Any, Any]:
        request, sentences = sample.request, None
        evict = request.policy.evict
        assert evict is not None
        if evict.needs.similarity:
            assert sample.sentences is not None
            self._map_width = max(self._map_width, 1 << (request.most_tokens - 1).bit_length())
            sentences = map_sentences(sample.sentences, self._map_width)
        with self.meter.stats.idle.dispatching(is_ready(self.state)), self.meter.compaction(lambda: self.state):
            self.state, dropped, is_left, kinds = self.programs.compact(
                self.state,
                np.full(1, row, np.int32),
                np.asarray(sample.budgets, np.int32)[:, None],
                np.full(1, request.first_prompt, np.int32),
                np.asarray([[evict.sinks], [evict.recent]], np.int32),
                evict=evict.static,
                is_traced=self.is_traced,
                sentences=sentences,
                facts=facts_for(request.policy, self.model),
                cutoff=cutoff_of(request.policy),
                is_alive=alive_after(last, self._all_alive),
            )
        self.scores.append((sample.prefix if sample.shares and sample.is_filling else sample, kinds))
        is_planned = request.policy.is_planned
        return dropped, is_left, None if is_planned else self.programs.filled_slots(self.state, np.int32(row))

    def lower(self) -> None:
        """Chunks serve no more kinds of requests than those that come from now on: see `draws`. For an idle engine."""
        self.draws, self.is_forcing, self.is_penalising, self.returns_own = DRAWS[0], False, False, False
        self._settings = self._generated = None

    def _chunk_inputs(self, running: dict[int, Sample]) -> ChunkInputs:
        """The inputs of the next chunk; settings stay on the device until the rows change."""
        if self._settings is None:
            requests = [sample.request for sample in running.values()]
            self.draws = max([self.draws, *(request.sampling.draws for request in requests)], key=DRAWS.index)
            self.is_forcing |= any(len(request.forced) for request in requests)
            self.is_penalising |= any(request.sampling.penalises for request in requests)
            self.returns_own |= any(request.model_logprobs for request in requests)
            sharding = None if self.mesh is None else meshes.replicated(self.mesh)
            is_prompted = None
            if self.is_penalising:
                is_prompted, generated = count_rows(running, self.num_rows, self.model.config.vocab_size)
                self._generated = jax.device_put(generated, sharding or self._place)  # as a chunk returns it
            self._settings = row_settings(
                running,
                self.needs,
                self.model,
                num_rows=self.num_rows,
                max_stop_ids=self.max_stop_ids,
                page_size=self.capacity.page_size,
                is_prompted=is_prompted,
                sharding=sharding,
            )
        return for_chunk(self._settings, running, self.model, self.is_forcing)

    def new_trace(self, sample: Sample) -> TraceRecorder | None:
        """A trace recorder for a sample, if samples are traced."""
        config, policy = self.model.config, sample.request.policy
        if not self.is_traced:
            return None
        size = config.num_paged_layers, config.num_kv_heads, sample.request.most_tokens
        return TraceRecorder(*size, sinks=policy.num_moving_sinks, steer=policy.steer)

    def new_routes(self) -> RouteRecorder | None:
        """A recorder of a sample's experts, if they are returned."""
        return RouteRecorder() if self.routed_experts else None

    def pad_rows(self, rows: Sequence[int]) -> np.ndarray:
        """Row indices padded to all rows of the pool with an index out of range, which programs ignore."""
        return np.pad(np.asarray(rows, np.int32), (0, self.num_rows - len(rows)), constant_values=self.num_rows)
