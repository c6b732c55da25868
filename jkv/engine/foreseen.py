"""Which programs a request will need, so that another thread compiles them while the request waits and others go on.

Foreseen are the pieces of its prompt, the compaction of its policy, and chunks of decode steps with its kinds of draws and
parts beside those of the rows that run; on one device also the programs that fork a prompt's row to its samples, or keep a row
for the next turn. Chunks of other sizes are replaced by shorter ones until they are compiled. The rest compiles at its first
call, and all rows wait: small programs that swap rows or hold pieces of prompts, sharing, compactions that compare sentences.
"""

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jkv.checks import described
from jkv.engine import chunk_inputs
from jkv.engine.ahead_of_time import Apart, Call, shape_of
from jkv.engine.chunk_inputs import for_chunk
from jkv.engine.processes import spans
from jkv.engine.requests import Request
from jkv.engine.samples import Sample
from jkv.engine.scheduler import CHUNKS
from jkv.model.sampling import DRAWS

LOGGER = logging.getLogger("jkv")


class Runs(Protocol):
    """What is read of a runner (`jkv.engine.runner.Runner`, which has the meanings)."""

    programs: Any
    sharer: Any
    state: Any
    drafter: Any
    meter: Any
    capacity: Any
    mesh: Any
    prefill: Any
    needs: Any
    all_alive: Any
    draws: str
    is_traced: bool

    @property
    def params(self) -> Any: ...
    def rows_of(self, running: dict[int, Sample]) -> Any: ...
    def kinds_for(self, rows: Any) -> tuple[str, set[str]]: ...
    def settings_for(self, rows: Any, names: Collection[str]) -> tuple[Any, Any]: ...
    def parts_of_prompts(self, row: int, sample: Sample) -> Any: ...
    def compaction_of(self, request: Request) -> dict[str, Any]: ...
    def pages_to_read(self, done: int | None) -> int | None: ...
    def pad_rows(self, rows: Sequence[int]) -> np.ndarray: ...


class Foreseen:
    """Foresees the programs of a runner's requests; until `begin`, it foresees nothing, and programs compile at their call.

    Attributes:
      is_on: whether requests wait for programs; not while a server warms up, as nobody else waits then.
      draws, names: the kind of draws and the parts whose chunks are compiled, and which the next chunks may have.
    """

    def __init__(self, runner: Runs) -> None:
        self._apart: Apart | None = None
        self._runner, self.is_on = runner, False
        self.lower()

    def begin(self, notify: Callable[[], None]) -> None:
        """Compiles apart from now on, and calls `notify` in another thread when something is compiled.

        Processes of one mesh must call the same programs, so there each compiles at its call.
        """
        if spans(self._runner.mesh):
            return
        self._apart = Apart(self._runner.programs, notify)
        self._use(self._apart)
        self.is_on = True

    def end(self) -> None:
        """Ends it."""
        if self._apart is not None:
            self._apart.close()
            self._use(self._apart.programs)
        self._apart, self.is_on = None, False

    def switch(self, is_on: bool) -> None:
        """Lets requests wait for their programs, or not, where they are compiled apart at all."""
        self.is_on = is_on and self._apart is not None

    def _use(self, programs: Any) -> None:
        self._runner.programs = self._runner.sharer.programs = programs

    def lower(self) -> None:
        """Forgets the kinds of earlier requests."""
        self.draws, self.names = DRAWS[0], set[str]()

    def forget(self) -> None:
        """Forgets compiled programs, as JAX has done."""
        if self._apart is not None:
            self._apart.forget()

    def collect(self) -> None:
        """Takes what is compiled by now."""
        if self._apart is not None:
            self._apart.collect()

    def is_ready(self, sample: Sample, is_forked: bool) -> bool:
        """Whether a fresh sample can be queued, and others of its prompt with it; otherwise its programs are being compiled.

        Raises:
          BaseException: what one of them has failed with; the next request tries again.
        """
        if self._apart is None or not self.is_on or self._runner.state is None:
            return True
        try:
            calls, (draws, names) = list(self._calls(sample, is_forked)), self._kinds(sample)
        except Exception as error:  # such as of a caller's function, which the engine blames on the request
            LOGGER.warning("The programs of a request cannot be foreseen, and compile at their call: %s", described(error))
            return True
        if not self._apart.are_ready(calls):
            return False
        self.draws, self.names = draws, names
        return True

    def steps_for(self, inputs: Any, carried: Any, num_steps: int, is_traced: bool) -> int:
        """Decode steps of the next chunk: at most `num_steps`, and fewer while the program of these is being compiled."""
        apart, runner = self._apart, self._runner
        if apart is None or not self.is_on:
            return num_steps

        def call(size: int) -> tuple[Any, ...]:
            given = runner.params, runner.state, inputs, carried, size
            return "decode_chunk", *given, runner.draws, is_traced, runner.drafter

        if apart.knows(*call(num_steps)):
            return num_steps
        less = next((size for size in CHUNKS if size < num_steps and apart.knows(*call(size))), None)
        if less is None:
            return num_steps
        apart.begin(*call(num_steps))
        return less

    def _with_running(self, sample: Sample) -> Any:
        """The rows that run, with one more, in a free one if there is any."""
        running = dict(self._runner.meter.running)
        row = next((row for row in range(self._runner.capacity.max_running) if row not in running), 0)
        return self._runner.rows_of({**running, row: sample})

    def _kinds(self, sample: Sample) -> tuple[str, set[str]]:
        found: tuple[str, set[str]] = self._runner.kinds_for(self._with_running(sample))
        return found

    def _calls(self, sample: Sample, is_forked: bool) -> Iterator[Call]:
        """The calls of a sample's programs, whatever their arguments hold."""
        runner, request = self._runner, sample.request
        parts = runner.parts_of_prompts(0, sample)
        for size, num_pages in dict.fromkeys(self._pieces(sample)):
            piece = np.zeros(1, np.int32), np.zeros((1, size), np.int32), np.zeros(1, np.int32), parts
            yield "prefill_chunk", (runner.params, runner.state, *piece), {"num_pages": num_pages}
        policy = request.policy
        if policy.evict is not None and not policy.evict.needs.similarity:
            target = policy.target(request.first_prompt, 0)
            if target is None or request.most_tokens > target:
                budget = np.zeros((runner.capacity.num_layers, 1, runner.capacity.num_kv_heads), np.int32)
                settings = runner.compaction_of(request) | {"sentences": None, "is_alive": runner.all_alive}
                yield "compact", (runner.state, np.zeros(1, np.int32), budget), settings
        yield from self._moves(request, is_forked)
        rows, (draws, names) = self._with_running(sample), self._kinds(sample)
        settings, carried = runner.settings_for(rows, names)
        inputs = for_chunk(settings, rows)._replace(is_alive=runner.all_alive)
        is_traced = runner.is_traced and runner.needs.has_events
        for size in dict.fromkeys((1 if request.form_on_host else runner.capacity.chunk, 1)):
            given = runner.params, runner.state, inputs, carried, size, draws, is_traced, runner.drafter
            yield "decode_chunk", given, {}

    def _moves(self, request: Request, is_forked: bool) -> Iterator[Call]:
        """The calls that move a request's rows: a prompt's to its samples, and kept ones from and to the batch."""
        runner = self._runner
        state, row = runner.state, np.int32(0)
        if runner.mesh is not None or not (is_forked or request.keep):
            return
        yield "detach", (state, row), {}
        if is_forked:
            yield "fork", (state, self._snapshot, runner.pad_rows([0]), request.policy.evicts_in_steps), {}
        if request.keep:
            beside = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._snapshot.beside)  # `row_moves.settle` copies it
            table = self._snapshot.block_table
            is_own = np.zeros(table.page_table.shape, bool)
            yield "attach", (state, self._snapshot._replace(beside=beside), row, is_own), {}
            yield "free", (state, table), {}

    @functools.cached_property
    def _snapshot(self) -> Any:
        """A detached row's shapes, on the one device."""
        assert self._apart is not None
        state = self._runner.state
        (sharding,) = {x.sharding for x in jax.tree.leaves(state)}
        _, shapes = jax.eval_shape(self._apart.programs.detach, jax.tree.map(shape_of, state), np.int32(0))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type), shapes)

    def _pieces(self, sample: Sample) -> Iterator[tuple[int, int | None]]:
        """The sizes of the programs that prefill a sample's prompt, and the pages that they read."""
        runner, request, done = self._runner, sample.request, 0
        if not request.num_kept:
            for token, count in chunk_inputs.chunks(request.prompt[: request.first_prompt], runner.prefill):
                done += int(count[0])
                yield token.shape[1], runner.pages_to_read(done)
        if sample.pending:
            first = len(request.prompt) - sample.pending
            for token, _ in chunk_inputs.chunks(request.prompt[first : first + sample.next_piece], runner.prefill):
                yield token.shape[1], runner.pages_to_read(None)
