"""Executes the scheduler's actions on the device: prefill, fork, swap, decode, compaction. It owns the device state.

Every program has a fixed shape (`jkv.engine.programs`), the state is donated from each to the next, and the host reads the
device once a chunk.
"""

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jkv.cache.attention import reads_in_place
from jkv.cache.pool import num_pages_of
from jkv.checks import counted, size
from jkv.engine import chunk_inputs, prefix_cache, programs, row_moves
from jkv.engine import mesh as meshes
from jkv.engine.adapter_store import AdapterStore
from jkv.engine.ahead_of_time import Call
from jkv.engine.chunk_inputs import for_chunk, row_settings
from jkv.engine.clocks import is_ready
from jkv.engine.device_program import LEAST_ROWS, device_program, programs_for
from jkv.engine.drafters import Drafter, places_of
from jkv.engine.faults import accuse, blame, working_for
from jkv.engine.filling import PIECES, Filling, Pieces
from jkv.engine.foreseen import Foreseen, moves_of, piece_moves, snapshot_of, swaps_of
from jkv.engine.form_store import FormStore
from jkv.engine.kept_rows import KeptRows
from jkv.engine.memory import state_bytes
from jkv.engine.parts.base import Carried, Rows
from jkv.engine.parts.table import KINDS, Parts, names_on
from jkv.engine.policy_checks import Trials
from jkv.engine.prefix_cache import PrefixCache, can_reuse
from jkv.engine.processes import copy_to_host, host, spans
from jkv.engine.programs import ChunkInputs
from jkv.engine.records import RowOutputs, new_records
from jkv.engine.requests import Request
from jkv.engine.row import Place, Row, SwappedRow
from jkv.engine.row_views import facts_for
from jkv.engine.samples import Completion, Prefix, Sample, pieces_in_use, split_by_ownership
from jkv.engine.scheduler import Actions, Capacity
from jkv.engine.sharer import Sharer
from jkv.engine.state import Snapshot, empty_state
from jkv.engine.stats import Meter
from jkv.eviction import Needs
from jkv.eviction.policy import cutoff_of
from jkv.model import weights
from jkv.model.params import Model, Params
from jkv.model.sampling import DRAWS
from jkv.program_cache import keep_programs
from jkv.reasoning.sentences import map_sentences
from pallas_kernels.choice import choose, lowest_capability
from pallas_kernels.dispatch import platform_of
from pallas_kernels.quantised import Format

LOGGER = logging.getLogger("jkv")
MAP_WIDTH = 32_768  # positions of the sentence map that compaction takes, at first
SIZES = "config", "needs", "num_rows", "num_pages", "max_pages", "page_size", "dtype", "poison", "kv_format", "places"
make_state = device_program(static_argnames=SIZES)(empty_state)  # one program, where each of its arrays would be some


@dataclasses.dataclass
class Flight:
    """A chunk that is dispatched and not read yet.

    Attributes:
      rows: the samples that it decodes, by row.
      outputs: a `ChunkOutputs` on the device.
      num_steps: its decode steps; once it is read, those that were run.
      versions: of the weights that run each row.
      scores: the kinds of scores (`Evict.kinds`) of compactions before it: whose they are, and the counts on the device.
      compactions: those dispatched after it before it was read: the sample and what `Runner._compact_row` returned.
    """

    rows: dict[int, Sample]
    outputs: Any
    num_steps: int
    versions: dict[int, int]
    scores: list[tuple[Sample | Prefix, Any]]
    compactions: list[tuple[Sample, Any, Any, Any]] = dataclasses.field(default_factory=list)

    def by_row(self, outputs: Any) -> dict[int, RowOutputs]:
        """The outputs, on the host, of each row that is not finished."""
        log_prob_full = outputs.log_prob if outputs.log_prob_full is None else outputs.log_prob_full
        log_prob_own = outputs.log_prob if outputs.log_prob_own is None else outputs.log_prob_own  # where it was asked for
        counts = outputs.is_real.sum(axis=0)

        def row(i: int) -> RowOutputs:
            tokens, log_probs, full = (x[: counts[i], i].tolist() for x in (outputs.token, outputs.log_prob, log_prob_full))
            dropped, is_read = (None if x is None else x[: counts[i], :, i] for x in (outputs.dropped, outputs.is_read))
            by_step = outputs.steered, outputs.hidden, outputs.experts
            steered, hidden, experts = (None if x is None else x[: counts[i], i] for x in by_step)
            goes_on = bool(outputs.is_running[i])
            own = log_prob_own[: counts[i], i].tolist()
            num_top = self.rows[i].request.top_logprobs
            top = (outputs.top_token, outputs.top_log_prob) if num_top else (None, None)
            tops = [() if x is None else x[: counts[i], i, :num_top].tolist() for x in top]
            return RowOutputs(tokens, log_probs, full, goes_on, dropped, is_read, steered, hidden, experts, own, *tops)

        return {i: row(i) for i, sample in self.rows.items() if not sample.is_finished}


def by_head(budgets: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """Budgets of each layer, [L], or of each KV head, [L, K], as [L, K]."""
    return np.asarray(np.broadcast_to(budgets.reshape(len(budgets), -1), (len(budgets), num_kv_heads)), np.int32)


def alive_after(last: Flight | None, at_first: Any) -> Any:
    """Which rows go on after a chunk that may not be read yet, on the device: [B]; `at_first` where none is in flight."""
    return at_first if last is None else last.outputs.is_running


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
      largest_prefill: the most tokens of a prefill program; None is the device's largest.
      prefill_tokens: the most tokens of prompts between two chunks; None is two of the largest pieces.
      first_chunk: the most steps of a chunk in which a row draws its first token; None is as many as of others.
      routed_experts: whether programs return the experts that tokens go through.
      drafter: proposes tokens to steps that append several to a row; None for steps of one.
      adapters: the adapters on the device; None without places for any.

    Attributes:
      state: a `jkv.engine.state.State`; None while the engine sleeps.
      programs: `jkv.engine.programs`, or those of the mesh, with their kernels chosen.
      version: the version of the weights: how often they, or adapters, were replaced.
      versions: of the weights of each adapter's requests, the scheduler's.
      is_traced: whether new samples record a trace.
      prefix_cache, kept_rows: the scheduler's.
      filling: prompts that are not in their rows yet.
      sharer: finds pages to share.
      meter: measures bytes and seconds.
      foreseen: knows the programs of requests, where they are compiled by another thread.
      all_alive: which rows go on where no chunk is in flight: all, [B], on the device; None where none ever is.
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
        largest_prefill: int | None = None,
        prefill_tokens: int | None = None,
        first_chunk: int | None = None,
        routed_experts: bool = False,
        drafter: Drafter | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.adapters, self.versions = adapters, {"": 0}
        self.gate, self.routed_experts, self.drafter = gate, routed_experts, drafter
        self._host: Callable[[Any], Any] = host if spans(mesh) else jax.device_get
        self.model, self.capacity, self.needs, self.mesh, self.max_stop_ids = model, capacity, needs, mesh, max_stop_ids
        devices = model.params.embedding.devices()
        self._programs: Any = programs_for(programs if mesh is None else meshes.programs_on(mesh), devices, kernels)
        self.programs = self._programs  # or what stands for them
        self.version, self.is_traced, self.prefix_cache, self.kept_rows = 0, False, PrefixCache(), KeptRows()
        self.platform = platform_of(next(iter(devices)))
        self.prefill = chunk_inputs.prefill_programs(self.platform, lowest_capability(devices), largest_prefill)
        self.filling = Filling(running, prefill_tokens or PIECES * self.prefill.sizes[-1], first_chunk)
        self.held: list[Any] = []  # pages in use after each prefill since the last chunk was read, on the device
        self.scores: list[tuple[Sample | Prefix, Any]] = []  # of compactions since the last chunk was dispatched: see `Flight`
        self.num_rows = max(capacity.max_running, LEAST_ROWS.get(self.platform, 1))
        self.ahead = self.platform != "cpu" if ahead is None else ahead
        self.draws = DRAWS[0]  # the most general kind so far, until `lower`, because another kind compiles again
        self.parts_on: set[str] = set()  # the names of parts that a request has needed; stay for the same reason
        self.foreseen = Foreseen(self.calls_of, self._later_calls, lambda sample: self._kinds_for(self._rows_with(sample)))
        keep_programs()
        config, max_pages = model.config, num_pages_of(max_slots, capacity.page_size)
        sizes: dict[str, Any] = {
            "num_rows": self.num_rows,
            "num_pages": capacity.num_pages,
            "max_pages": max_pages,
            "page_size": capacity.page_size,
            "dtype": model.params.embedding.dtype,
            "poison": poison,
            "kv_format": kv_format,
            "places": places_of(drafter),
        }
        self._make_state: Callable[[], Any] = functools.partial(make_state, config, needs, **sizes)
        self.trials = Trials(make_state.shapes(config, needs, **sizes))
        if mesh is not None:
            self._make_state = meshes.state_maker(mesh, config, needs, **sizes)
        self._place = weights.place_of(model.params)
        everywhere = self._place if mesh is None else meshes.replicated(mesh)
        # On the device, as what a chunk returns is: programs would compile once more for an array of the host.
        self.forms = FormStore(functools.partial(jax.device_put, device=everywhere))
        self.all_alive: Any = jax.device_put(np.ones(self.num_rows, bool), everywhere) if self.ahead else None
        self.wake()
        self._settings: ChunkInputs | None = None  # settings of the rows, on the device; None when the rows have changed
        self._carried = Carried()  # what parts keep on the device
        # A longer request widens it to a power of two; then compaction compiles again.
        self._map_width = 1 << (min(config.max_positions, MAP_WIDTH) - 1).bit_length()
        cache = self.state.cache
        query_shape = 1, self.prefill.sizes[0], config.num_query_heads, config.head_size
        with choose(kernels):
            query = jax.ShapeDtypeStruct(query_shape, model.params.embedding.dtype)
            self._gathers_prompts = cache.tail is not None or not reads_in_place(cache.pool, query)
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
        """Replaces the weights by others of the same shapes; all prefill in progress is finished (`fill(to_end=True)`)."""
        self.model = dataclasses.replace(self.model, params=params)
        self.sharer.set_model(self.model)

    def wake(self) -> None:
        """Allocates an empty pool. What a failed program left unread is forgotten."""
        self.held.clear()
        state = self._make_state()
        self.state = state if self.mesh is not None else jax.device_put(state, self._place)

    def sleep(self) -> None:
        """Frees the pool and the rest of the device state, whatever of it is left."""
        settings = self._settings
        if settings is not None:  # gate and adapters stay, for the engine has no other copy
            settings = settings._replace(parts=settings.parts._replace(gate=None, adapters=None))
        for leaf in jax.tree.leaves((self.state, settings, self._carried)):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        self.state, self._settings, self._carried = None, None, Carried()

    def reset(self) -> None:
        """Replaces the device state, which may be lost, by that of an empty pool."""
        self.filling.clear()
        self.scores.clear()
        self.sharer.forget()
        self.sleep()
        self.wake()

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the device."""
        embedding: Any = next(iter(jax.tree.leaves(self.params.embedding)), None)
        return isinstance(embedding, jax.Array) and not embedding.is_deleted()

    def check_ready(self) -> None:
        if self.state is None:
            raise ValueError("A sleeping engine has no pool, and this one has unfinished requests. Call wake() first.")
        if not self.has_weights:
            raise ValueError(
                "The engine needs weights on the device; its own were forgotten, donated or deleted. Call update(params) first."
            )

    # Its programs.

    def compile_apart(self, notify: Callable[[], None]) -> None:
        """Lets another thread compile what requests will need, and call `notify` whenever it has; until `compile_here`.

        Processes of one mesh must call the same programs, so there each compiles at its call.
        """
        if not spans(self.mesh):
            self._use(self.foreseen.begin(self.programs, notify))

    def compile_here(self) -> None:
        """Ends `compile_apart`."""
        self.foreseen.end()
        self._use(self._programs)

    def _use(self, programs: Any) -> None:
        self.programs = self.sharer.programs = programs

    def _run(self, name: str, args: tuple[Any, ...], settings: Mapping[str, Any]) -> Any:
        return getattr(self.programs, name)(*args, **settings)

    def _prefill_call(self, row: int, token: np.ndarray, count: np.ndarray, parts: Parts, num_pages: int | None) -> Call:
        """Of a piece of a prompt, [1, T]."""
        args = self.params, self.state, np.asarray([row], np.int32), token, count, parts
        return "prefill_chunk", args, {"num_pages": num_pages}

    def _decode_call(self, inputs: ChunkInputs, carried: Carried, num_steps: int, draws: str) -> Call:
        """Of a chunk."""
        is_traced = self.is_traced and self.needs.has_events
        return "decode_chunk", (self.params, self.state, inputs, carried, num_steps, draws, is_traced, self.drafter), {}

    def _compact_call(self, request: Request, row: int, budgets: np.ndarray, sentences: Any, is_alive: Any) -> Call:
        """Of a compaction of one row to budgets by layer, [L], or by KV head, [L, K]."""
        evict = request.policy.evict
        assert evict is not None
        settings = {
            "prompt_length": np.full(1, request.first_prompt, np.int32),
            "protected": np.asarray([[evict.sinks], [evict.recent]], np.int32),
            "evict": evict.static,
            "is_traced": self.is_traced,
            "facts": facts_for(request.policy, self.model),
            "cutoff": cutoff_of(request.policy),
            "sentences": sentences,
            "is_alive": is_alive,
        }
        budgets = by_head(budgets, self.capacity.num_kv_heads)[:, None]
        return "compact", (self.state, np.full(1, row, np.int32), budgets), settings

    def calls_of(self, sample: Sample, is_forked: bool) -> Iterator[Call]:
        """The calls that a fresh sample will make, whatever their arguments hold: see `jkv.engine.foreseen`."""
        if self.state is None:  # asleep
            return
        request, none = sample.request, np.zeros(1, np.int32)
        parts = self._parts_of_prompts(0, sample)
        for num_tokens, num_pages in dict.fromkeys(self._pieces_of(sample)):
            yield self._prefill_call(0, np.zeros((1, num_tokens), np.int32), none, parts, num_pages)
        policy = request.policy
        if policy.evict is not None and not policy.evict.needs.similarity:
            target = policy.target(request.first_prompt, 0)
            if target is None or request.most_tokens > target:
                yield self._compact_call(request, 0, np.zeros(self.capacity.num_layers), None, self.all_alive)
        if self.mesh is None:
            yield from moves_of(request, self.state, self._snapshot, self._pad_rows([0]), is_forked)
        rows = self._rows_with(sample)
        draws, names = self._kinds_for(rows)
        settings, carried = self._settings_for(rows, names)
        inputs = for_chunk(settings, rows)._replace(is_alive=self.all_alive)
        for num_steps in dict.fromkeys((1 if request.form_on_host else self.capacity.chunk, 1)):
            yield self._decode_call(inputs, carried, num_steps, draws)

    def _later_calls(self) -> Iterator[Call]:
        """The calls that hold, adopt and drop pieces of prompts, and swap rows."""
        if self.mesh is None and self.state is not None:
            if self.prefix_cache.piece:
                yield from piece_moves(self.state, self._snapshot, self.prefix_cache.piece // self.capacity.page_size)
            yield from swaps_of(self._programs, self.state, self._snapshot)

    def _pieces_of(self, sample: Sample) -> Iterator[tuple[int, int | None]]:
        """The sizes of the programs that prefill a fresh sample's prompt, and the pages that they read."""
        request, done = sample.request, 0
        if not request.num_kept:
            if self.prefix_cache.piece and can_reuse(request.policy):
                done = self.prefix_cache.num_found(request, self.versions[request.adapter])
            for token, count in chunk_inputs.chunks(request.prompt[done : request.first_prompt], self.prefill):
                done += int(count[0])
                yield token.shape[1], self._pages_to_read(done)
        if sample.pending:
            first = len(request.prompt) - sample.pending
            for token, _ in chunk_inputs.chunks(request.prompt[first : first + sample.next_piece], self.prefill):
                yield token.shape[1], self._pages_to_read(None)

    @functools.cached_property
    def _snapshot(self) -> Snapshot:
        return snapshot_of(self._programs.detach, self.state)

    # A step.

    def execute(self, actions: Actions) -> None:
        """Carries out the scheduler's actions: frees, swaps, and prefills as much as may come before the next chunk."""
        self.release(actions.release)
        if actions.swap_out:
            with self.meter.clock("swap_seconds"):
                for row, sample in actions.swap_out.items():
                    with working_for([sample]):
                        table = sample.prefix.row.page_table
                        sample.row.swapped = row_moves.swap_out(self.programs, self.state, row, table)
                        self.state = self.programs.release(self.state, self._pad_rows([row]))
        self.free(actions.free)
        if actions.admit:
            self._settings = None
        for source, group in itertools.groupby(actions.admit.items(), key=lambda item: item[1].source):
            admitted = dict(group)
            if source is not None:
                self.filling.add(admitted, self._fork(admitted))
                continue
            for row, sample in admitted.items():
                if sample.resumes is not None:
                    self.filling.add({row: sample}, self._resume(row, sample))
                elif sample.is_swapped:
                    with self.meter.clock("swap_seconds"), working_for([sample]):
                        self._swap_in(row, sample)
                else:
                    self.filling.add({row: sample}, self._start(row, sample))
        self.fill()

    # How rows start.

    def _start(self, row: int, sample: Sample) -> Pieces:
        """Prefills a prompt into its row, from where the prefix cache ends, and compacts it if it is longer than the budget.

        Where it enters in pieces, that is its first one, and the others follow.
        """
        prompt, config, done = sample.request.prompt[: sample.request.first_prompt], self.model.config, 0
        filled = sample.request.policy.uncut(len(prompt), config.num_paged_layers)
        asked = self.is_traced, self.routed_experts
        version, records = self.versions[sample.request.adapter], new_records(sample.request, self.model, *asked)
        sample.row = Row(Place.BATCH, filled, version=version, records=records)
        with self.meter.clock("prefill_seconds"):
            if self.prefix_cache.piece:
                self.state, done = prefix_cache.adopt(self.programs, self.state, self.prefix_cache, row, sample)
                self.meter.found(sample, done)
        yield from self._append(row, sample, prompt[done:], done)
        if sample.pieces:
            with self.meter.clock("prefill_seconds"):
                in_use = pieces_in_use(self.meter.running)
                self.state = prefix_cache.keep(self.programs, self.state, self.prefix_cache, row, sample, done, in_use)
        self.sharer.start(sample)
        self.meter.row(sample)
        self.meter.stats.prefills += 1
        yield from self._append_pending(row, sample)

    def _fork(self, admitted: dict[int, Sample]) -> Pieces:
        """Starts rows from the same prompt, which is prefilled once, in the first row, and forked to all."""
        first, sample = next(iter(admitted.items()))
        prefix = sample.prefix
        if prefix.row.snapshot is None:
            one = copy.copy(sample)  # which nobody can cancel while it is prefilled
            one.completion = Completion()
            yield from self._start(first, one)
            self.state, snapshot = self.programs.detach(self.state, np.int32(first))
            prefix.error = prefix.error or one.completion.error
            # Fewer pages than were reserved, if scores decided how many.
            num_pages = min(prefix.row.num_pages, one.num_pages(0, *self.capacity.sizes))
            place, swapped = prefix.row.place, prefix.row.swapped
            prefix.row = dataclasses.replace(one.row, place=place, num_pages=num_pages, snapshot=snapshot, swapped=swapped)
            sample.completion.peak_kv_bytes = max(sample.completion.peak_kv_bytes, one.completion.peak_kv_bytes)
        begin = prefix.row
        with self.meter.clock("prefill_seconds"):
            for owns_all, group in split_by_ownership(admitted):
                self.state = self.programs.fork(self.state, begin.snapshot, self._pad_rows(group), owns_all)
        for sample in admitted.values():
            completion = sample.completion
            completion.is_forked, completion.error = True, completion.error or prefix.error
            records = None if begin.records is None else begin.records.fork_for(sample.request, self.model)
            sample.row = begin.fork(records)
            sample.row.place, sample.row.version = Place.BATCH, self.versions[sample.request.adapter]
            self.sharer.start(sample)
        self.meter.stats.forks += len(admitted)

    def _resume(self, row: int, sample: Sample) -> Pieces:
        """Attaches the row of a sample's last turn, and prefills the new tokens, with compactions where they are due."""
        kept = sample.resumes
        assert kept is not None
        with self.meter.clock("prefill_seconds" if kept.row.snapshot is not None else "swap_seconds"):
            self.state = row_moves.attach(self.programs, self.state, row, kept.row)
        sample.resumes, sample.resumed, sample.row.version = None, kept, self.versions[sample.request.adapter]
        yield from self._append_pending(row, sample)

    def _append_pending(self, row: int, sample: Sample) -> Pieces:
        """Prefills what is left of a sample's prompt, with a compaction before and after wherever one is due."""
        while sample.pending:
            if sample.is_due:
                self.compact({row: sample})
            first = len(sample.request.prompt) - sample.pending
            count = sample.next_piece
            yield from self._append(row, sample, sample.request.prompt[first : first + count])
            sample.count_new(count)
            self.meter.row(sample)
        if sample.is_due:
            self.compact({row: sample})

    def _append(self, row: int, sample: Sample, tokens: np.ndarray, done: int | None = None) -> Pieces:
        """Prefills tokens into a row, after those that it has: the first `done` of its prompt, or None if it has evicted."""
        for token, count in chunk_inputs.chunks(tokens, self.prefill):
            yield int(count[0])
            done = None if done is None else done + int(count[0])
            num_pages = self._pages_to_read(done)
            self.meter.stats.prefilled += int(count[0])
            with self.meter.clock("prefill_seconds"), self.meter.stats.idle.dispatching(is_ready(self.state)):
                call = self._prefill_call(row, token, count, self._parts_of_prompts(row, sample), num_pages)
                self.state, hidden, held, experts = self._run(*call)
                self.held.append(held)
                if sample.row.records is not None:
                    sample.row.records.prefilled(token[0, : count[0]], hidden, experts)

    def _pages_to_read(self, done: int | None) -> int | None:
        """Pages that a piece of a prompt reads of its row, which then has `done` tokens; None for all that it can have."""
        if done is None or not self._gathers_prompts:
            return None
        return chunk_inputs.pages_to_read(done, self.capacity.page_size, self.state.cache.pool.page_table.shape[-1])

    def fill(self, *, to_end: bool = False) -> None:
        """Prefills as much as may come before the next chunk, or all that waits."""
        if self.filling.queue and self.filling.run(to_end=to_end):
            self._settings = None

    def release(self, rows: Sequence[int]) -> None:
        """Frees rows and the pages that only they hold, and detaches, swaps out and frees kept rows."""
        kept = self.kept_rows
        if kept.leaving or kept.swapping or kept.freed:
            self.state = row_moves.settle(self.programs, self.state, kept)
        if rows:
            with self.meter.stats.idle.dispatching(is_ready(self.state)):
                self.state = self.programs.release(self.state, self._pad_rows(rows))

    def free(self, prefixes: Sequence[Prefix]) -> None:
        """Frees prefixes (after a copy to host memory, if a swapped-out sample needs it) and what the prefix cache evicted."""
        for prefix in prefixes:
            assert prefix.row.snapshot is not None
            if prefix.row.swapped is None and prefix.absent:
                prefix.row.swapped = row_moves.copy_out(self.programs, self.state, prefix.row.snapshot, None)
            self.state = row_moves.free(self.programs, self.state, prefix.row)
            prefix.row.records = None
        if self.prefix_cache.piece:
            self.state = prefix_cache.drop(self.programs, self.state, self.prefix_cache)

    def copy_row(self, row: int) -> SwappedRow:
        """A copy of a running row in host memory, with its own copies of pages that it shares."""
        with self.meter.clock("swap_seconds"):
            return row_moves.swap_out(self.programs, self.state, row, None)

    def _swap_in(self, row: int, sample: Sample) -> None:
        """Moves a sample back into a row, bit for bit."""
        assert sample.row.swapped is not None
        prefix = sample.prefix.row
        pages = None if prefix.swapped is None else prefix.swapped.own
        table = prefix.page_table if sample.reads_prefix else None
        self.state = row_moves.swap_in(self.programs, self.state, row, sample.row.swapped, table, pages)
        sample.row.swapped = None
        sample.prefix.sort(sample)

    def dispatch(self, running: dict[int, Sample], num_steps: int, last: Flight | None = None) -> Flight:
        """Dispatches one chunk; `last` is the one before, if its tokens are not read yet."""
        inputs = self._chunk_inputs(running)._replace(is_alive=alive_after(last, self.all_alive))

        def call(steps: int) -> Call:
            return self._decode_call(inputs, self._carried, steps, self.draws)

        num_steps = self.foreseen.steps_for(call, num_steps)
        with self.meter.clock("decode_seconds"), self.meter.stats.idle.dispatching(is_ready(self.state)):
            self.state, outputs, self._carried = self._run(*call(num_steps))
            if self.needs.sharing:
                self.sharer.find_pairs(running, self.state, num_steps, outputs)
        scores, self.scores = self.scores, []
        versions = {row: self.versions[sample.request.adapter] for row, sample in running.items()}
        return Flight(dict(running), outputs, num_steps, versions, scores)

    def plan(self, flight: Flight) -> None:
        """Counts a chunk before its tokens are read, and dispatches the compactions that are then due."""
        copy_to_host((flight.outputs, [kinds for _, kinds in flight.scores]))
        for row, sample in flight.rows.items():
            sample.plan(flight.num_steps)
            if sample.remaining > 0 and sample.is_due:
                with self.meter.clock("decode_seconds"):
                    flight.compactions.append((sample, *self._compact_row(row, sample, flight)))
                sample.row.filled = sample.compacted

    def read(self, flight: Flight) -> tuple[dict[int, RowOutputs], int]:
        """Waits for a chunk; returns the outputs of each row that is not finished, and how many pages were then in use.

        Samples and prompts whose scores could not be ranked before the chunk get an error.
        """
        with self.meter.clock("decode_seconds"), self.meter.stats.idle.waiting(lambda: is_ready(self.state)):
            outputs, held, scores = self._host((flight.outputs, self.held, [kinds for _, kinds in flight.scores]))
        for (owner, _), kinds in zip(flight.scores, scores, strict=True):
            accuse(owner, kinds[0])
        self.held.clear()
        if outputs.num_run is not None:
            flight.num_steps = int(outputs.num_run)
        self.meter.peak(max(map(int, held), default=0))
        if self.drafter is not None:
            self.meter.speculated(flight.rows, outputs)
        return flight.by_row(outputs), int(outputs.held_pages)

    def share(self) -> None:
        """Shares similar pages found during the chunk."""
        if self.needs.sharing:
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
            dropped = None if dropped is None else host(dropped)[:, 0]
            is_left = None if is_left is None else np.asarray(is_left)[0]
            left = None if left is None else host(left)
            with blame(sample):
                sample.compact(dropped, is_left, left)

    def _compact_row(self, row: int, sample: Sample, last: Flight | None = None) -> tuple[Any, Any, Any]:
        """Dispatches one row's compaction; returns what is still on the device: the positions dropped (when traced), those left
        (when sentences are compared), and the slots left in each head (when scores decide how many).

        `last` is the chunk that is not read yet, if any. If the row has ended in it, the device skips the compaction, so that a
        kept row is as its last token left it.
        """
        with working_for([sample]):
            return self._compact(row, sample, last)

    def _compact(self, row: int, sample: Sample, last: Flight | None) -> tuple[Any, Any, Any]:
        request, sentences = sample.request, None
        evict = request.policy.evict
        assert evict is not None
        if evict.needs.similarity:
            assert sample.row.records is not None
            assert sample.row.records.sentences is not None
            self._map_width = max(self._map_width, 1 << (request.most_tokens - 1).bit_length())
            sentences = map_sentences(sample.row.records.sentences, self._map_width)
        with self.meter.stats.idle.dispatching(is_ready(self.state)), self.meter.compaction(lambda: self.state):
            call = self._compact_call(request, row, sample.budgets, sentences, alive_after(last, self.all_alive))
            self.state, dropped, is_left, kinds = self._run(*call)
        self.scores.append((sample.prefix if sample.reads_prefix and sample.is_filling else sample, kinds))
        is_planned = request.policy.is_planned
        return dropped, is_left, None if is_planned else self.programs.filled_slots(self.state, np.int32(row))

    def lower(self) -> None:
        """Chunks serve no more kinds of requests than those that come from now on: see `draws`. For an idle engine."""
        self.draws, self.parts_on = DRAWS[0], set()
        self.foreseen.lower()
        self._settings, self._carried = None, Carried()

    def _rows_of(self, running: Mapping[int, Sample]) -> Rows:
        stores = self.drafter, self.forms, self.adapters
        return Rows(running, self.num_rows, self.model, self.needs, self.gate, self.routed_experts, *stores)

    def _rows_with(self, sample: Sample) -> Rows:
        """The rows that run, with one more, in a free one if there is any."""
        running = dict(self.meter.running)
        row = next((row for row in range(self.capacity.max_running) if row not in running), 0)
        return self._rows_of({**running, row: sample})

    def _parts_of_prompts(self, row: int, sample: Sample) -> Parts:
        """The parts that see the tokens of a prompt, which go to one row."""
        rows = self._rows_of({row: sample})
        return Parts.from_names({name: kind.of(rows) for name, kind in KINDS.items() if kind.sees_prompts and kind.is_on(rows)})

    def _chunk_inputs(self, running: Mapping[int, Sample]) -> ChunkInputs:
        """The inputs of the next chunk; settings stay on the device until the rows change."""
        rows = self._rows_of(running)
        if self._settings is None:
            self.draws, self.parts_on = self._kinds_for(rows)
            self._settings, self._carried = self._settings_for(rows, self.parts_on)
        return for_chunk(self._settings, rows)

    def _kinds_for(self, rows: Rows) -> tuple[str, set[str]]:
        """The kind of draws and the parts of a chunk of these rows: those of theirs, of earlier ones, and those foreseen."""
        draws, names = self.foreseen.draws, self.foreseen.names
        most = max([self.draws, draws, *(request.sampling.draws for request in rows.requests)], key=DRAWS.index)
        return most, self.parts_on | names | names_on(rows)

    def _settings_for(self, rows: Rows, names: Collection[str]) -> tuple[ChunkInputs, Carried]:
        """The settings of these rows, and what their parts keep on the device, placed as a chunk returns it."""
        sharding = None if self.mesh is None else meshes.replicated(self.mesh)
        kept = [KINDS[name].carried(rows) for name in names]
        carried = {name: jax.device_put(x, sharding or self._place) for fields in kept for name, x in fields.items()}
        sizes = {"max_stop_ids": self.max_stop_ids, "page_size": self.capacity.page_size}
        return row_settings(rows, names, **sizes, sharding=sharding), Carried(**carried)

    def _pad_rows(self, rows: Sequence[int]) -> np.ndarray:
        """Row indices padded to all rows of the pool with an index out of range, which programs ignore."""
        return np.pad(np.asarray(rows, np.int32), (0, self.num_rows - len(rows)), constant_values=self.num_rows)
