"""Which programs a request will need, so that another thread compiles them while the request waits and others go on.

A runner says which programs a fresh request calls (`jkv.engine.runner.Runner.calls_of`): for the pieces of its prompt, the
compaction of its policy, and chunks of decode steps with its kinds of draws and parts beside those of the rows that run; on one
device also the programs that fork a prompt's row to its samples, keep a row for the next turn, or share pages of the prefix
cache. Chunks of other sizes are replaced by shorter ones until they are compiled. Programs that swap rows on one device compile
after those of the first request, and no request waits for them. The rest compiles at its first call, and all rows wait:
sharing, and compactions that compare sentences.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jkv.checks import described
from jkv.engine import row_moves
from jkv.engine.ahead_of_time import Apart, Call, shape_of
from jkv.engine.requests import Request
from jkv.engine.samples import Sample
from jkv.engine.scheduler import CHUNKS
from jkv.engine.state import Snapshot, State
from jkv.model.sampling import DRAWS

LOGGER = logging.getLogger("jkv")


class Foreseen:
    """Says whether the programs of requests are compiled; until `begin`, all compile at their call, and nothing waits.

    Args:
      calls: of a fresh sample's programs, whatever their arguments hold, by the sample and whether others fork from its prompt.
      later: calls that no request waits for.
      kinds: the kind of draws and the parts of a chunk in which a fresh sample decodes.

    Attributes:
      is_on: whether requests wait for programs; not while a server warms up, as nobody else waits then.
      draws, names: the kind of draws and the parts whose chunks are compiled, and which the next chunks may have.
    """

    def __init__(
        self,
        calls: Callable[[Sample, bool], Iterable[Call]],
        later: Callable[[], Iterable[Call]],
        kinds: Callable[[Sample], tuple[str, set[str]]],
    ) -> None:
        self._apart: Apart | None = None
        self._calls, self._later, self._kinds, self.is_on, self._has_begun = calls, later, kinds, False, False
        self.lower()

    def begin(self, programs: Any, notify: Callable[[], None]) -> Apart:
        """Compiles apart from now on, and calls `notify` in another thread when something is compiled.

        Returns what stands for the programs meanwhile.
        """
        self._apart, self.is_on, self._has_begun = Apart(programs, notify), True, False
        return self._apart

    def end(self) -> None:
        """Ends it."""
        if self._apart is not None:
            self._apart.close()
        self._apart, self.is_on = None, False

    def switch(self, is_on: bool) -> None:
        """Lets requests wait for their programs, or not, where they are compiled apart at all."""
        self.is_on = is_on and self._apart is not None

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
        if self._apart is None:
            return True
        if not self.is_on:
            self._begin_later()
            return True
        try:
            calls, (draws, names) = list(self._calls(sample, is_forked)), self._kinds(sample)
        except Exception as error:  # such as of a caller's function, which the engine blames on the request
            LOGGER.warning("The programs of a request cannot be foreseen, and compile at their call: %s", described(error))
            return True
        if not self._apart.are_ready(calls):
            return False
        self._begin_later()
        self.draws, self.names = draws, names
        return True

    def _begin_later(self) -> None:
        if self._apart is not None and not self._has_begun:
            self._has_begun = True
            for call in self._later():
                self._apart.begin(*call)

    def steps_for(self, call: Callable[[int], Call], num_steps: int) -> int:
        """Decode steps of the next chunk: at most `num_steps`, and fewer while the program of these is being compiled.

        Args:
          call: of a chunk with so many steps.
          num_steps: the most steps.
        """
        apart = self._apart
        if apart is None or not self.is_on or apart.knows(*call(num_steps)):
            return num_steps
        less = next((size for size in CHUNKS if size < num_steps and apart.knows(*call(size))), None)
        if less is None:
            return num_steps
        apart.begin(*call(num_steps))
        return less


def snapshot_of(detach: Callable[..., Any], state: State) -> Snapshot:
    """A detached row's shapes, on the one device of a state."""
    (sharding,) = {x.sharding for x in jax.tree.leaves(state)}
    _, shapes = jax.eval_shape(detach, jax.tree.map(shape_of, state), np.int32(0))
    placed: Snapshot = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type), shapes
    )
    return placed


def moves_of(request: Request, state: State, snapshot: Snapshot, rows: np.ndarray, is_forked: bool) -> Iterator[Call]:
    """The calls that move a request's rows: a prompt's to its samples, and kept ones from and to the batch.

    Args:
      rows: one row, padded as `fork` takes it.
    """
    row = np.int32(0)
    if is_forked or request.keep:
        yield "detach", (state, row), {}
    if is_forked:
        yield "fork", (state, snapshot, rows, request.policy.evicts_in_steps), {}
    if request.keep:
        beside = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), snapshot.beside)  # `row_moves.settle` copies it
        is_own = np.zeros(snapshot.block_table.page_table.shape, bool)
        yield "attach", (state, snapshot._replace(beside=beside), row, is_own), {}
        yield "free", (state, snapshot.block_table), {}


def swaps_of(programs: Any, state: State, snapshot: Snapshot) -> Iterator[Call]:
    """The calls that swap a row out to host memory and in again."""

    def on_host(tree: Any) -> Any:
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)

    table, row = snapshot.block_table.page_table, np.int32(0)
    page = row_moves.pad_block(np.zeros((table.shape[1], 0), np.int32), 0)
    content = jax.eval_shape(programs.read_pages, jax.tree.map(shape_of, state), page)
    yield "snapshot_row", (state, row), {}
    yield "read_pages", (state, page), {}
    yield "attach", (state, on_host(snapshot), row, np.zeros(table.shape, bool)), {}
    yield "write_pages", (state, page, on_host(content)), {}


def piece_moves(state: State, snapshot: Snapshot, num_pages: int) -> Iterator[Call]:
    """The calls that hold, adopt and drop a piece of the prefix cache, of so many pages in each layer and KV head."""
    table, row = snapshot.block_table.page_table, np.int32(0)
    pages = jax.ShapeDtypeStruct((*table.shape[:2], num_pages), table.dtype, sharding=table.sharding)
    yield "hold_pages", (state, row, np.zeros(num_pages, np.int32)), {}
    yield "adopt_pages", (state, row, pages), {}
    yield "drop_pages", (state, pages), {}
