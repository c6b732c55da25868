"""Pallas for TPU: reads whole pages of a row, moves its slots in vector memory, and writes the new pages in place.

A slot is one sublane of a packed tile, which a DMA cannot move, and 16-bit values are half a word. So the key and value of a
16-bit slot are first joined into words, and a slot is one row of words: moving it takes one load and one store, its bits do not
change, and slots may be in any order (a product with a one-hot matrix would spread NaN). All pages of a row are read before
any is written. Meanwhile, reads of the next row and earlier writes are in flight. A row that moves nothing is not read.

The codes of a quantised slot fill half of its words. Their upper halves take the halves of its two scales, in four lanes, so
that a slot with its scales is one row too. Pages of 4-bit codes are transposed, slots in lanes, as XLA stores them: turned
round, the words of a slot's codes and scales are one row of lanes.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels import mosaic as pltpu
from pallas_kernels.quantised import Numbers, Quantised, is_rotated, stored

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
LANES = 128
UNROLLED = 64  # slots, at most, per iteration of the loop that moves them
EXTENT = 4  # entries of a row's table before its pages: begin and end of the pages to read, and of those to write


def why_not(kv: Any, slots: Any, source: Any, target: Any) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    (page_size, head_size), itemsize = kv.shape[2:], stored(kv).dtype.itemsize
    if kv.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the pool must be float32 or bfloat16; got {kv.dtype}"
    if isinstance(kv, Quantised) and page_size % LANES:
        return f"a quantised page must be a multiple of {LANES} slots, for its scales; got {page_size}"
    if is_rotated(kv) and head_size not in (64, 128):
        return f"heads of {kv.format.name} must have 64 or 128 channels; got {head_size}"
    if not is_rotated(kv) and (head_size % LANES or head_size > MOST_HEAD_SIZE):
        return f"the head size must be a multiple of {LANES}, at most {MOST_HEAD_SIZE}; got {head_size}"
    if page_size % TILE:
        return f"a page must be a multiple of {TILE} slots; got {page_size}"
    if page_size > STAGED * 2:
        return f"a page must have at most {STAGED * 2} slots; got {page_size}"
    if (size := 2 * page_size * stored(kv).shape[3] * itemsize) > MOST_PAGE_BYTES:
        return f"a page must have at most {MOST_PAGE_BYTES} bytes; got {size}"
    slot_bytes = 4 * LANES if is_rotated(kv) else 2 * head_size * max(2, itemsize)  # a slot of codes is a row of words too
    if (size := slots.shape[1] * slot_bytes) > MOST_BYTES:
        return f"a row must have at most {MOST_BYTES} bytes; got {size}"
    if slots.shape[1] > STEP_SLOTS:
        return f"a row must have at most {STEP_SLOTS} slots; got {slots.shape[1]}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def take_slots(
    kv: Numbers,
    slots: Int[Array, "R S"],
    source: Int[Array, "R MP"],
    target: Int[Array, "R MP"],
    interpret: Any = False,
) -> Numbers:
    """See `pallas_kernels.take_slots`."""
    (num_rows, num_slots), (page_size, head_size) = slots.shape, kv.shape[2:]
    pool, treedef = jax.tree.flatten(kv)  # numbers, or codes and scales
    itemsize, is_transposed = pool[0].dtype.itemsize, is_rotated(kv)
    if is_transposed:
        pool = [jnp.swapaxes(x, 2, 3) for x in pool]  # as XLA stores them, so nothing moves
    packed = 1 if is_transposed else 4 // itemsize  # slots per word of a tile
    is_joined = is_transposed or packed > 1  # key and value in the same words
    block_pages = max(1, BLOCK // page_size)
    block_bytes = block_pages * math.prod(pool[0].shape[1:]) * itemsize
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
    slot = slot % packed * (num_slots // packed) + slot // packed  # of 2, even slots come before odd ones
    table = jnp.concatenate([extent, source, target], axis=-1)
    table = jnp.pad(table, [(0, steps * rows - num_rows), (0, 0)])  # padded rows read and write nothing
    following = jnp.roll(table[::rows], -1, axis=0)
    table = jnp.concatenate([table.reshape(steps, -1), following], axis=1)[:, None]
    slot = jnp.pad(slot, [(0, steps * rows - num_rows), (0, 0)]).reshape(steps, 1, -1)
    steps //= cores

    def this(core: Any, step: Any) -> tuple[Any, ...]:
        return core * steps + step, 0, 0

    lanes = LANES if is_transposed else head_size
    words = (1 if is_joined else 2, num_slots, lanes)
    word = jnp.uint32 if is_joined else pool[0].dtype
    staged = max(2, STAGED // page_size)
    hbm = [pl.BlockSpec(memory_space=pl.ANY) for _ in pool]
    out = pl.pallas_call(
        functools.partial(move_rows, steps, rows, block_pages, packed, len(pool)),
        grid=(cores, steps),
        in_specs=[
            pl.BlockSpec((1, 1, table.shape[2]), this, memory_space=pltpu.SMEM),
            pl.BlockSpec((1, 1, slot.shape[2]), this, memory_space=pltpu.SMEM),
            *hbm,
        ],
        out_specs=hbm,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pool],
        scratch_shapes=[
            *[pltpu.VMEM((ring, block_pages, *x.shape[1:]), x.dtype) for x in pool],
            *[pltpu.VMEM((staged, *x.shape[1:]), x.dtype) for x in pool],
            pltpu.VMEM(words, word),
            pltpu.VMEM((1, page_size, lanes), word),
            pltpu.SemaphoreType.DMA((ring,)),
            pltpu.SemaphoreType.DMA((staged,)),
            pltpu.SMEM((1,), jnp.int32),
        ],
        input_output_aliases={2 + i: i for i in range(len(pool))},
        # Page ids are in bounds, as XLA's gather assumes too; the bounds check of a DMA takes longer than a page of 16 slots.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        interpret=interpret,
        name="take_slots",
    )(table, slot, *pool)
    return jax.tree.unflatten(treedef, [jnp.swapaxes(x, 2, 3) for x in out] if is_transposed else out)


def extent_of(page: Int[Array, "R X"]) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Begin and end of the non-negative entries of each row; 0 and 0 for none."""
    end = jnp.max(page, axis=1) + 1
    begin = jnp.min(jnp.where(page < 0, page.shape[1], page), axis=1)
    return jnp.where(end > 0, begin, 0), end


def move_rows(
    steps: int,
    rows: int,
    block_pages: int,
    packed: int,
    arrays: int,
    # inputs
    table_smem_ref: Any,
    slot_smem_ref: Any,
    *refs: Any,
) -> None:
    """Moves the slots of some rows, one row after the other. The pool is an output, and the same as the inputs before."""
    *refs, words_vmem_ref, page_vmem_ref, read_semaphores, write_semaphores, num_written_smem_ref = refs  # type: ignore[assignment]
    pool_refs, ring_refs, staged_refs = (refs[i * arrays : (i + 1) * arrays] for i in range(1, 4))
    (ring_vmem_ref, *ring_scales), (staged_vmem_ref, *staged_scales) = ring_refs, staged_refs
    page_size, (num_parts, num_slots, num_lanes) = page_vmem_ref.shape[1], words_vmem_ref.shape
    is_transposed, is_joined = bool(staged_scales) and packed == 1, num_parts == 1
    page_part, row_part = page_size // packed, num_slots // packed
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
            for pool_ref, ring_ref in zip(pool_refs, ring_refs, strict=True):
                pltpu.make_async_copy(pool_ref.at[page], ring_ref.at[which, i], read_semaphores.at[which]).start()

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
            for pool_ref, ring_ref in zip(pool_refs, ring_refs, strict=True):
                pltpu.make_async_copy(pool_ref.at[0], ring_ref.at[which, i], read_semaphores.at[which]).wait()

        def join_page(i: Any, _: None) -> None:
            page = block * block_pages + i
            if packed == 1:
                own = pl.ds(pl.multiple_of(page * page_size, 8), page_size)
                if is_transposed:
                    words_vmem_ref[0, own, :] = rows_of_page(ring_vmem_ref.at[which, i], ring_scales[0].at[which, i])
                else:
                    words_vmem_ref[:, own, :] = ring_vmem_ref[which, i]
                return
            key_SH, value_SH = (pltpu.bitcast(ring_vmem_ref[which, i, part], jnp.uint32) for part in range(2))
            if ring_scales:
                page_vmem_ref[0] = lanes_of(ring_scales[0][which, i], num_lanes)
            for turn in range(packed):
                place = pl.ds(pl.multiple_of(turn * row_part + page * page_part, 8), page_part)
                if packed == 2:
                    words_vmem_ref[0, place, :] = key_SH >> 16 | high(value_SH) if turn else low(key_SH) | value_SH << 16
                else:
                    codes_SH = byte(key_SH, turn) | byte(value_SH, turn) << 8
                    words_vmem_ref[0, place, :] = codes_SH | page_vmem_ref[0, pl.ds(turn, page_part, stride=packed), :]

        begin, end = pages_of_block(row, block)
        lax.fori_loop(begin, end, wait, None)
        lax.fori_loop(begin, end, join_page, None)

    def wait_for_write(which: Any) -> None:
        for staged_ref, pool_ref in zip(staged_refs, pool_refs, strict=True):
            pltpu.make_async_copy(staged_ref.at[which], pool_ref.at[0], write_semaphores.at[which]).wait()

    def write(row: Any, index: Any) -> None:
        """Fills a page with the row's slots and starts its write."""
        num_written = num_written_smem_ref[0]
        which = lax.rem(num_written, staged)
        pl.when(num_written >= staged)(lambda: wait_for_write(which))

        def move(group: Any, _: None) -> None:
            first = group * unrolled
            for i in range(unrolled):
                slot = pl.ds(slot_smem_ref[0, 0, row * num_slots + index * page_size + first + i], 1)
                if is_joined:
                    own = pl.ds(i % packed * page_part + group * (unrolled // packed) + i // packed, 1)
                    page_vmem_ref[0, own, :] = words_vmem_ref[0, slot, :]
                else:
                    for part in range(2):
                        staged_vmem_ref[which, part, pl.ds(first + i, 1), :] = words_vmem_ref[part, slot, :]

        lax.fori_loop(0, page_size // unrolled, move, None)
        parts = [page_vmem_ref[0, turn * page_part : (turn + 1) * page_part, :] for turn in range(packed)]
        if packed == 2:
            even_SH, odd_SH = parts
            staged_vmem_ref[which, 0] = pltpu.bitcast(low(even_SH) | odd_SH << 16, staged_vmem_ref.dtype)
            staged_vmem_ref[which, 1] = pltpu.bitcast(even_SH >> 16 | high(odd_SH), staged_vmem_ref.dtype)
        elif packed == 4:
            for half in range(2):
                codes_SH = functools.reduce(jnp.bitwise_or, (byte(x, half) << 8 * turn for turn, x in enumerate(parts)))
                staged_vmem_ref[which, half] = pltpu.bitcast(codes_SH, staged_vmem_ref.dtype)
            for turn, part_SH in enumerate(parts):
                page_vmem_ref[0, pl.ds(turn, page_part, stride=packed), :] = part_SH
            staged_scales[0][which] = scales_in(page_vmem_ref[0])
        elif is_transposed:
            store_page(page_vmem_ref[0], staged_vmem_ref.at[which], staged_scales[0].at[which])
        page = entry(row, EXTENT + max_pages + index)
        for staged_ref, pool_ref in zip(staged_refs, pool_refs, strict=True):
            pltpu.make_async_copy(staged_ref.at[which], pool_ref.at[page], write_semaphores.at[which]).start()
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


def byte(x: Any, index: int) -> Any:
    """A byte of each word, as a word."""
    return x >> 8 * index & jnp.uint32(0xFF)


def lanes_of(scale: Any, head_size: int) -> Any:
    """The scales of a page's keys and values, `[2, page]`, as the upper halves of words in the first lanes of its slots."""
    words_2S = pltpu.bitcast(scale, jnp.uint32)
    halves_4S = jnp.concatenate([high(words_2S), words_2S << 16], axis=0)
    rest = jnp.zeros((head_size - len(halves_4S), scale.shape[1]), jnp.uint32)
    return jnp.concatenate([halves_4S, rest], axis=0).T


def scales_in(words_SH: Any) -> Any:
    """The scales of slots from their words: the inverse of `lanes_of`."""
    halves_XS = words_SH[:, :LANES].T
    return pltpu.bitcast(high(halves_XS[:2]) | halves_XS[2:4] >> 16, jnp.float32)


def rows_of_page(codes_ref: Any, scale_ref: Any) -> Any:
    """A transposed page, codes `[2, bytes, page]` and bits of scales `[2, groups, page]`, as a row of words for each slot."""
    codes = [pltpu.bitcast(codes_ref[part], jnp.uint32) for part in range(2)]
    scales = [pltpu.bitcast(scale_ref[part].astype(jnp.int32), jnp.uint32) for part in range(2)]
    words_XS = jnp.concatenate([*codes, *scales], axis=0)
    rest = jnp.zeros((LANES - len(words_XS), words_XS.shape[1]), jnp.uint32)
    return jnp.concatenate([words_XS, rest], axis=0).T


def store_page(words_SX: Any, codes_ref: Any, scale_ref: Any) -> None:
    """Writes the codes and scales of slots from their rows of words: the inverse of `rows_of_page`."""
    words_XS, word, groups = words_SX.T, codes_ref.shape[1] // 4, scale_ref.shape[1]
    for part in range(2):
        codes_ref[part] = pltpu.bitcast(words_XS[part * word : (part + 1) * word], codes_ref.dtype)
        first = 2 * word + part * groups
        scale_ref[part] = pltpu.bitcast(words_XS[first : first + groups], jnp.int32).astype(scale_ref.dtype)
