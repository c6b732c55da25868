"""Pallas for TPU: reads whole pages of a row, moves its slots in vector memory, and writes the new pages in place.

A slot is one sublane of a packed tile, which a DMA cannot move, and 16-bit values are half a word. So the key and value of a
16-bit slot are first joined into words, and a slot is one row of words: moving it takes one load and one store, its bits do not
change, and slots may be in any order (a product with a one-hot matrix would spread NaN). All pages of a row are read before
any is written. Meanwhile, reads of the next row and earlier writes are in flight. A row that moves nothing is not read.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

ROWS = 8  # per grid step, at most
STEP_SLOTS = 16384  # per grid step: 64 KiB of scalar memory, double-buffered
BLOCK = 256  # slots that are waited for together, or a page if that is larger
RING = 16  # blocks in flight
RING_BYTES = 2 << 20
STAGED = 512  # slots whose writes are in flight
MOST_BYTES = 8 << 20  # per row
MOST_PAGE_BYTES = 1 << 20
MOST_HEAD_SIZE = 1024
TILE = 16  # slots that a page must be a multiple of: a tile of 16-bit values
UNROLLED = 64  # slots, at most, per iteration of the loop that moves them
EXTENT = 4  # entries of a row's table before its pages: begin and end of the pages to read, and of those to write


def why_not(kv: Any, slots: Any, source: Any, target: Any) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    page_size, head_size = kv.shape[2:]
    if kv.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the pool must be float32 or bfloat16; got {kv.dtype}"
    if head_size % 128 or head_size > MOST_HEAD_SIZE:
        return f"the head size must be a multiple of 128, at most {MOST_HEAD_SIZE}; got {head_size}"
    if page_size % TILE:
        return f"a page must be a multiple of {TILE} slots; got {page_size}"
    if page_size > STAGED * 2:
        return f"a page must have at most {STAGED * 2} slots; got {page_size}"
    if (size := 2 * page_size * head_size * kv.dtype.itemsize) > MOST_PAGE_BYTES:
        return f"a page must have at most {MOST_PAGE_BYTES} bytes; got {size}"
    size = 2 * slots.shape[1] * head_size * kv.dtype.itemsize
    if size > MOST_BYTES:
        return f"a row must have at most {MOST_BYTES} bytes; got {size}"
    if slots.shape[1] > STEP_SLOTS:
        return f"a row must have at most {STEP_SLOTS} slots; got {slots.shape[1]}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def take_slots(
    kv: Float[Array, "P 2 page H"],
    slots: Int[Array, "R S"],
    source: Int[Array, "R MP"],
    target: Int[Array, "R MP"],
    interpret: Any = False,
) -> Float[Array, "P 2 page H"]:
    """See `pallas_kernels.take_slots`."""
    (num_rows, num_slots), (page_size, head_size) = slots.shape, kv.shape[2:]
    is_packed = kv.dtype.itemsize == 2
    block_pages = max(1, BLOCK // page_size)
    block_bytes = 2 * block_pages * page_size * head_size * kv.dtype.itemsize
    num_blocks = pl.cdiv(source.shape[1], block_pages)
    ring = max(1, min(RING, RING_BYTES // block_bytes, num_blocks))
    rows = max(1, min(ROWS, STEP_SLOTS // num_slots, num_rows))
    steps = pl.cdiv(num_rows, rows)
    cores = 2 if steps % 2 == 0 else 1  # of a chip whose two cores share a memory; on other chips, one runs after the other

    is_written = target != 0
    is_moved = (slots >= 0) & jnp.repeat(is_written, page_size, axis=-1)
    read, written = (
        extent_of(jnp.where(is_moved, slots // page_size, -1)),
        extent_of(jnp.where(is_written, jnp.arange(target.shape[1], dtype=jnp.int32), -1)),
    )
    extent = jnp.stack([*read, *written], axis=-1)
    slot = jnp.where(is_moved, slots, extent[:, :1] * page_size)  # any slot that is read
    if is_packed:  # even slots come before odd ones
        slot = slot % 2 * (num_slots // 2) + slot // 2
    table = jnp.concatenate([extent, source, target], axis=-1)
    table = jnp.pad(table, [(0, steps * rows - num_rows), (0, 0)])  # padded rows read and write nothing
    following = jnp.roll(table[::rows], -1, axis=0)
    table = jnp.concatenate([table.reshape(steps, -1), following], axis=1)[:, None]
    slot = jnp.pad(slot, [(0, steps * rows - num_rows), (0, 0)]).reshape(steps, 1, -1)
    steps //= cores

    def this(core: Any, step: Any) -> tuple[Any, ...]:
        return core * steps + step, 0, 0

    words = (1, num_slots, head_size) if is_packed else (2, num_slots, head_size)
    word = jnp.uint32 if is_packed else kv.dtype
    staged = max(2, STAGED // page_size)
    return pl.pallas_call(
        functools.partial(move_rows, steps, rows, block_pages),
        grid=(cores, steps),
        in_specs=[
            pl.BlockSpec((1, 1, table.shape[2]), this, memory_space=pltpu.SMEM),
            pl.BlockSpec((1, 1, slot.shape[2]), this, memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        scratch_shapes=[
            pltpu.VMEM((ring, block_pages, 2, page_size, head_size), kv.dtype),
            pltpu.VMEM(words, word),
            pltpu.VMEM((1, page_size, head_size), word),
            pltpu.VMEM((staged, 2, page_size, head_size), kv.dtype),
            pltpu.SemaphoreType.DMA((ring,)),
            pltpu.SemaphoreType.DMA((staged,)),
            pltpu.SMEM((1,), jnp.int32),
        ],
        input_output_aliases={2: 0},
        # Page ids are in bounds, as XLA's gather assumes too; the bounds check of a DMA takes longer than a page of 16 slots.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        interpret=interpret,
        name="take_slots",
    )(table, slot, kv)


def extent_of(page: Int[Array, "R X"]) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Begin and end of the non-negative entries of each row; 0 and 0 for none."""
    end = jnp.max(page, axis=1) + 1
    begin = jnp.min(jnp.where(page < 0, page.shape[1], page), axis=1)
    return jnp.where(end > 0, begin, 0), end


def move_rows(
    steps: int,
    rows: int,
    block_pages: int,
    # inputs
    table_smem_ref: Any,
    slot_smem_ref: Any,
    unused_hbm_ref: Any,
    # the pool, which is an output and the same as the last input
    kv_hbm_ref: Any,
    # scratch
    ring_vmem_ref: Any,
    words_vmem_ref: Any,
    page_vmem_ref: Any,
    staged_vmem_ref: Any,
    read_semaphores: Any,
    write_semaphores: Any,
    num_written_smem_ref: Any,
) -> None:
    """Moves the slots of some rows, one row after the other."""
    page_size, num_slots = kv_hbm_ref.shape[2], words_vmem_ref.shape[1]
    is_packed, half_page, half_row = kv_hbm_ref.dtype.itemsize == 2, page_size // 2, num_slots // 2
    ring, staged = ring_vmem_ref.shape[0], staged_vmem_ref.shape[0]
    unrolled = math.gcd(page_size, UNROLLED)
    entries = table_smem_ref.shape[2] // (rows + 1)
    max_pages = (entries - EXTENT) // 2
    step = pl.program_id(1)

    def entry(row: Any, index: Any) -> Any:
        return table_smem_ref[0, 0, row * entries + index]

    def pages_of_block(row: Any, block: Any) -> tuple[Any, Any]:
        """Begin and end of the pages of a block that are read, relative to the block."""
        first = block * block_pages
        return lax.max(entry(row, 0) - first, 0), lax.min(entry(row, 1) - first, block_pages)

    def blocks_of(row: Any) -> tuple[Any, Any]:
        return lax.div(entry(row, 0), block_pages), lax.div(entry(row, 1) + block_pages - 1, block_pages)

    def start(row: Any, block: Any) -> None:
        def begin(i: Any, _: None) -> None:
            page, which = entry(row, EXTENT + block * block_pages + i), lax.rem(block, ring)
            pltpu.make_async_copy(kv_hbm_ref.at[page], ring_vmem_ref.at[which, i], read_semaphores.at[which]).start()

        lax.fori_loop(*pages_of_block(row, block), begin, None)

    def start_first(row: Any) -> None:
        """Starts to fetch the first blocks of a row, as many as the ring holds."""
        first, end = blocks_of(row)
        lax.fori_loop(first, lax.min(end, first + ring), lambda block, _: start(row, block), None)

    @pl.when(step == 0)
    def _() -> None:
        num_written_smem_ref[0] = 0
        start_first(0)

    def join(row: Any, block: Any) -> None:
        """Waits for the pages of a block and joins their keys and values, slot by slot."""
        which = lax.rem(block, ring)

        def wait(i: Any, _: None) -> None:
            pltpu.make_async_copy(kv_hbm_ref.at[0], ring_vmem_ref.at[which, i], read_semaphores.at[which]).wait()

        def join_page(i: Any, _: None) -> None:
            page = block * block_pages + i
            if is_packed:
                key_SH, value_SH = (
                    pltpu.bitcast(ring_vmem_ref[which, i, part], jnp.uint32) for part in range(2)
                )  # 2 slots per word
                even, odd = (pl.ds(pl.multiple_of(base + page * half_page, 8), half_page) for base in (0, half_row))
                words_vmem_ref[0, even, :] = low(key_SH) | value_SH << 16
                words_vmem_ref[0, odd, :] = key_SH >> 16 | high(value_SH)
            else:
                words_vmem_ref[:, pl.ds(pl.multiple_of(page * page_size, 8), page_size), :] = ring_vmem_ref[which, i]

        begin, end = pages_of_block(row, block)
        lax.fori_loop(begin, end, wait, None)
        lax.fori_loop(begin, end, join_page, None)

    def wait_for_write(which: Any) -> None:
        pltpu.make_async_copy(staged_vmem_ref.at[which], kv_hbm_ref.at[0], write_semaphores.at[which]).wait()

    def write(row: Any, index: Any) -> None:
        """Fills a page with the row's slots and starts its write."""
        num_written = num_written_smem_ref[0]
        which = lax.rem(num_written, staged)
        pl.when(num_written >= staged)(lambda: wait_for_write(which))

        def move(group: Any, _: None) -> None:
            first = group * unrolled
            for i in range(unrolled):
                slot = pl.ds(slot_smem_ref[0, 0, row * num_slots + index * page_size + first + i], 1)
                if is_packed:
                    own = pl.ds(i % 2 * half_page + group * (unrolled // 2) + i // 2, 1)
                    page_vmem_ref[0, own, :] = words_vmem_ref[0, slot, :]
                else:
                    for part in range(2):
                        staged_vmem_ref[which, part, pl.ds(first + i, 1), :] = words_vmem_ref[part, slot, :]

        lax.fori_loop(0, page_size // unrolled, move, None)
        if is_packed:
            even_SH, odd_SH = page_vmem_ref[0, :half_page, :], page_vmem_ref[0, half_page:, :]
            staged_vmem_ref[which, 0] = pltpu.bitcast(low(even_SH) | odd_SH << 16, staged_vmem_ref.dtype)
            staged_vmem_ref[which, 1] = pltpu.bitcast(even_SH >> 16 | high(odd_SH), staged_vmem_ref.dtype)
        page = entry(row, EXTENT + max_pages + index)
        pltpu.make_async_copy(staged_vmem_ref.at[which], kv_hbm_ref.at[page], write_semaphores.at[which]).start()
        num_written_smem_ref[0] = num_written + 1

    def move_row(row: Any, _: None) -> None:
        def take(block: Any, _: None) -> None:
            join(row, block)
            pl.when(block + ring < end)(lambda: start(row, block + ring))

        first, end = blocks_of(row)
        lax.fori_loop(first, end, take, None)
        pl.when((row + 1 < rows) | (step + 1 < steps))(lambda: start_first(row + 1))

        def write_if_due(index: Any, _: None) -> None:
            pl.when(entry(row, EXTENT + max_pages + index) != 0)(lambda: write(row, index))

        lax.fori_loop(entry(row, 2), entry(row, 3), write_if_due, None)

    lax.fori_loop(0, rows, move_row, None)

    @pl.when(step + 1 == steps)
    def _() -> None:
        lax.fori_loop(0, lax.min(num_written_smem_ref[0], staged), lambda which, _: wait_for_write(which), None)


def low(x: Any) -> Any:
    """The lower half of each word."""
    return x & jnp.uint32(0xFFFF)


def high(x: Any) -> Any:
    """The upper half of each word, in place."""
    return x & jnp.uint32(0xFFFF0000)
