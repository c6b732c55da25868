"""Copies of rows' pages to a TPU's vector memory: one buffer is filled while a kernel reads the other, also across rows.

Rows come in grid steps of `ROWS`. Their tables pass through scalar memory, which limits how wide they are and hardly how many,
one line a step: the address of an entry of a tiled table takes longer to compute than a copy takes to start. The last block of
a step starts the copies of the first block of the next one, whose line is there already.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels import mosaic as pltpu

ROWS = 8  # per grid step
STARTED = 8  # pages whose copies start without a branch between them


class Grid(NamedTuple):
    """Steps of rows, on one or two cores."""

    cores: int
    steps: int  # of a core

    def this(self, core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        """Where a step's block begins."""
        return core * self.steps + step, 0, 0

    def following(self, core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        """Where the next step's block begins; after the last step, this one's."""
        return core * self.steps + lax.min(step + 1, self.steps - 1), 0, 0

    def table_specs(self, padded_pages: int) -> list[Any]:
        """Of the tables of this step and of the next one."""
        line = 1, 1, ROWS * padded_pages
        return [pl.BlockSpec(line, at, memory_space=pltpu.SMEM) for at in (self.this, self.following)]

    def lines(self, table: Int[Array, "R MP"]) -> Int[Array, "steps 1 entries"]:
        """The tables of all rows, a line for each step."""
        return table.reshape(self.cores * self.steps, 1, -1)


def grid_of(padded_rows: int) -> Grid:
    """The grid of so many rows. A chip whose two cores share a memory runs both at once; on others, one follows the other."""
    steps = padded_rows // ROWS
    cores = 2 if steps % 2 == 0 else 1
    return Grid(cores, steps // cores)


def scratch_of(block_pages: int, arrays: Any) -> list[Any]:
    """The scratch memory of `Fetch`: two buffers of each array of pages, semaphores, and which buffer is next."""
    buffers = [pltpu.VMEM((2, block_pages, *x.shape[1:]), x.dtype) for x in arrays]
    return [*buffers, pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32)]


class Fetch(NamedTuple):
    """Copies of the pages of a step's rows, a block of pages at a time."""

    first_row: Any  # of this step
    is_first: Any  # whether it is its core's first one
    has_next: Any  # whether another one follows on the core
    tables: tuple[Any, Any]  # of this step and of the next one, in scalar memory
    arrays: list[tuple[Any, Any]]  # of pages, each with its buffers
    semaphores: Any
    num_pages: Any  # (row, index of a block) -> its pages that the row reads

    @property
    def block_pages(self) -> int:
        """How many pages a buffer holds."""
        return self.arrays[0][1].shape[1]

    def start(self, table_ref: Any, local_row: Any, row: Any, index: Any, which: Any) -> None:
        """Starts to copy the pages of a row's block."""
        num_pages, padded_pages = self.num_pages(row, index), table_ref.shape[2] // ROWS
        first = local_row * padded_pages + index * self.block_pages

        def begin(i: Any, offset: int = 0) -> None:
            page = table_ref[0, 0, first + i + offset]
            for hbm_ref, vmem_ref in self.arrays:
                pltpu.make_async_copy(hbm_ref.at[page], vmem_ref.at[which, i + offset], self.semaphores.at[which]).start()

        def begin_several(group: Any, _: None) -> None:
            for offset in range(STARTED):
                begin(group * STARTED, offset)

        num_groups = lax.div(num_pages, STARTED)
        lax.fori_loop(0, num_groups, begin_several, None)
        lax.fori_loop(num_groups * STARTED, num_pages, lambda i, _: begin(i), None)

    def start_first(self, which_smem_ref: Any) -> None:
        """Starts the block of a core's first row; that of another step's first row has been started by the step before."""

        @pl.when(self.is_first)
        def _() -> None:
            which_smem_ref[0] = 0
            self.start(self.tables[0], 0, self.first_row, 0, 0)

    def start_following(self, local_row: Any, index: Any, num_blocks: Any, which: Any) -> None:
        """Starts the block that follows a row's block, of this row, of the next one, or of the next step's first one."""
        is_last, row = index + 1 == num_blocks, self.first_row + local_row
        next_row, next_index = jnp.where(is_last, local_row + 1, local_row), jnp.where(is_last, 0, index + 1)
        is_here = next_row < ROWS
        pl.when(is_here)(lambda: self.start(self.tables[0], next_row, self.first_row + next_row, next_index, which))
        pl.when(~is_here & self.has_next)(lambda: self.start(self.tables[1], 0, row + 1, 0, which))

    def wait(self, num_pages: Any, which: Any) -> None:
        """Waits for as many bytes as that many pages have. A wait has a constant size: 13 pages are waits for 8, 4 and 1."""

        def wait_for(size: int) -> None:
            for _, vmem_ref in self.arrays:
                pages = vmem_ref.at[which, pl.ds(0, size)]
                pltpu.make_async_copy(pages, pages, self.semaphores.at[which]).wait()

        for bit in range(self.block_pages.bit_length()):
            pl.when((num_pages >> bit) & 1 == 1)(functools.partial(wait_for, 1 << bit))


def fetch_of(steps: int, *rest: Any) -> Fetch:
    """The copies of the grid step that runs; `rest` are the fields of `Fetch` that follow the first three."""
    core, step = pl.program_id(0), pl.program_id(1)
    return Fetch((core * steps + step) * ROWS, step == 0, step + 1 < steps, *rest)
