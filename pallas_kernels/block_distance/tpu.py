"""Pallas for TPU: DMAs fill a ring of buffers, one per layer of a pair, well ahead, across pairs and grid steps.

An item is one layer of one pair: 2*K pages, tens of KB if pages are small, so many items must be in flight to keep the memory
busy. A grid step takes eight pairs. Its piece of the table, in scalar memory, also holds the first items of the next step, so
that they can be fetched ahead. Pairs without tokens are not read. The six sums of an item become one lane of the output.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as pltpu
from pallas_kernels import nibbles
from pallas_kernels.block_distance.reference import turn_of_rotated
from pallas_kernels.quantised import Format, Numbers, Quantised, is_rotated, scales_of, stored

PAIRS = 8  # per grid step
LANES = 128
SUBLANES = 8
CHUNK = 32  # slots of a page per addition, at most; of quantised ones, a row of lanes
MOST_UNROLLED = 16  # chunks of an item, at most, that are unrolled
RING_BYTES = 4 << 20
MOST_RING = 32  # items
MOST_BYTES = 12 << 20  # for two items
MOST_TABLE = 32768  # entries of a grid step's piece of the table: 128 KiB of scalar memory, double-buffered


def table_entries(num_layers: int, num_heads: int) -> int:
    """The largest number of entries in a grid step's piece of the table."""
    return (PAIRS * num_layers + MOST_RING) * (2 * num_heads + 1)


def why_not(kv: Any, first: Any, second: Any, num_tokens: Any, angle: Any) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    (_, num_layers, num_heads), (page_size, head_size), tile = first.shape, kv.shape[2:], 32 // stored(kv).dtype.itemsize
    if kv.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the pool must be float32 or bfloat16; got {kv.dtype}"
    if isinstance(kv, Quantised) and page_size % LANES:
        return f"a quantised page must be a multiple of {LANES} slots, for its scales; got {page_size}"
    if is_rotated(kv) and head_size not in (64, 128):
        return f"heads of {kv.format.name} must have 64 or 128 channels; got {head_size}"
    if not is_rotated(kv) and head_size % LANES:
        return f"the head size must be a multiple of {LANES}; got {head_size}"
    if page_size % tile:
        return f"a page of {kv.dtype} must be a multiple of {tile} slots; got {page_size}"
    size = 2 * item_bytes(kv, num_heads)
    if size > MOST_BYTES:
        return f"two layers of a pair must have at most {MOST_BYTES} bytes; got {size}"
    if table_entries(num_layers, num_heads) > MOST_TABLE:
        return f"the pages of {PAIRS} pairs must be at most {MOST_TABLE}; got {table_entries(num_layers, num_heads)}"
    return None


def item_bytes(kv: Any, num_heads: int) -> int:
    """Bytes of vector memory for both pages of all heads. Scales fill tiles of 32 bytes for every slot."""
    return int(4 * num_heads * kv.shape[2] * (stored(kv).shape[3] * stored(kv).dtype.itemsize + 32 * len(scales_of(kv))))


@functools.partial(jax.jit, static_argnames=("interpret",))
def block_distance(
    kv: Numbers,
    first: Int[Array, "I L K"],
    second: Int[Array, "I L K"],
    num_tokens: Int[Array, " I"],
    angle: Float[Array, "I half"] | None,
    interpret: Any = False,
) -> Float[Array, "I L 2 3"]:
    """See `pallas_kernels.block_distance`."""
    (num_pairs, num_layers, num_heads), head_size = first.shape, kv.shape[3]
    pool, format = jax.tree.leaves(kv), kv.format if isinstance(kv, Quantised) else None
    if is_rotated(kv):
        # As XLA stores them, so nothing moves; without the constraint, a pool that fits is copied to vector memory first.
        pool = [pltpu.with_memory_space_constraint(jnp.swapaxes(x, 2, 3), pltpu.HBM) for x in pool]
    items = PAIRS * num_layers  # per grid step
    ring = min(MOST_RING, max(2, RING_BYTES // item_bytes(kv, num_heads)), items)
    steps = -(-num_pairs // PAIRS)
    cores = 2 if steps % 2 == 0 else 1  # of a chip whose two cores share a memory; on other chips, one runs after the other
    tokens = jnp.broadcast_to(num_tokens[:, None, None], (num_pairs, num_layers, 1))
    table = jnp.concatenate([tokens, first, second], axis=-1).reshape(num_pairs * num_layers, -1)
    table = jnp.pad(table, [(0, steps * items - len(table)), (0, 0)]).reshape(
        steps, -1
    )  # padding has no tokens and is not read
    following = jnp.roll(table, -1, axis=0)[:, : table.shape[1] // items * ring]
    table = jnp.concatenate([table, following], axis=1)[:, None]
    steps //= cores
    padded_items = items + -items % LANES

    def this(core: Any, step: Any) -> tuple[Any, ...]:
        return core * steps + step, 0, 0

    in_specs = [
        pl.BlockSpec((1, 1, table.shape[2]), this, memory_space=pltpu.SMEM),
        *[pl.BlockSpec(memory_space=pl.ANY) for _ in pool],
    ]
    inputs = [table, *pool]
    if angle is not None:
        of_pairs = turns(angle, head_size)
        if is_rotated(kv):  # in the order of unpacked channels, to multiply columns from the left
            of_pairs = nibbles.reordered(jnp.swapaxes(nibbles.reordered(turn_of_rotated(angle, head_size)), 1, 2))
        in_specs.append(pl.BlockSpec((PAIRS, *of_pairs.shape[1:]), this))
        inputs.append(jnp.pad(of_pairs, [(0, cores * steps * PAIRS - num_pairs), (0, 0), (0, 0)]))
    out = pl.pallas_call(
        functools.partial(measure, steps, ring, num_heads, format, None if angle is None else angle.shape[1]),
        grid=(cores, steps),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((1, SUBLANES, padded_items), this),
        out_shape=jax.ShapeDtypeStruct((cores * steps, SUBLANES, padded_items), jnp.float32),
        scratch_shapes=[
            *[pltpu.VMEM((ring, 2, num_heads, *x.shape[1:]), x.dtype) for x in pool],
            pltpu.SemaphoreType.DMA((ring,)),
            pltpu.SMEM((1,), jnp.int32),
        ],
        # Page ids are in bounds, as XLA's gather assumes too; the bounds check of a DMA takes longer than a page of 16 slots.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        interpret=interpret,
        name="block_distance",
    )(*inputs)
    sums = jnp.swapaxes(out[:, :6, :items], 1, 2).reshape(-1, num_layers, 2, 3)
    return sums[:num_pairs]


def turns(angle: Float[Array, "I half"], head_size: int) -> Float[Array, "I 3 H"]:
    """The factors of each channel, and of the channels `half` above and below it, in the rotation of a key."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rest = jnp.ones((len(angle), head_size - 2 * angle.shape[1]), angle.dtype)
    none, still = jnp.zeros_like(sin), jnp.zeros_like(rest)
    rows = [cos, cos, rest], [-sin, none, still], [none, sin, still]
    return jnp.stack([jnp.concatenate(row, axis=-1) for row in rows], axis=1)


def measure(
    steps: int,
    ring: int,
    num_heads: int,
    format: Format | None,
    half: int | None,
    # inputs
    table_smem_ref: Any,
    *refs: Any,
) -> None:
    """Measures eight pairs. `half` is the number of rotating channel pairs; if it is given, the turns are among the inputs."""
    arrays, is_transposed = 1 if format is None else 2, format is not None and format.group is not None
    pool_refs, (*turns_refs, out_vmem_ref), ring_refs = refs[:arrays], refs[arrays : -arrays - 2], refs[-arrays - 2 : -2]
    semaphores, which_smem_ref = refs[-2:]
    page_size, head_size = pool_refs[0].shape[3 if is_transposed else 2], pool_refs[0].shape[3]
    chunk, entries = math.gcd(page_size, CHUNK) if format is None else LANES, 2 * num_heads + 1
    items = table_smem_ref.shape[2] // entries - ring
    num_layers = items // PAIRS
    chunks_of_page = page_size // chunk
    step = pl.program_id(1)

    def start(item: Any, which: Any) -> None:
        """Starts to fetch an item of this step or of the next ones, if it has tokens."""

        @pl.when(table_smem_ref[0, 0, item * entries] > 0)
        def _() -> None:
            for i in range(2 * num_heads):
                page = table_smem_ref[0, 0, item * entries + 1 + i]
                for pool_ref, ring_ref in zip(pool_refs, ring_refs, strict=True):
                    to_ref = ring_ref.at[which, i // num_heads, i % num_heads]
                    pltpu.make_async_copy(pool_ref.at[page], to_ref, semaphores.at[which]).start()

    @pl.when(step == 0)
    def _() -> None:
        which_smem_ref[0] = 0
        lax.fori_loop(0, min(ring - 1, steps * items), lambda item, _: start(item, item), None)

    out_vmem_ref[...] = jnp.zeros_like(out_vmem_ref)
    lane_SX = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    quantity_SX = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)

    def turned(key_SH: Any, half: int, pair: Any) -> Any:
        if is_transposed:
            settings = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
            return lax.dot_general(turns_refs[0][pair], key_SH, (((1,), (0,)), ((), ())), **settings)
        stay_1H, above_1H, below_1H = (turns_refs[0][pair, pl.ds(i, 1), :] for i in range(3))
        if 2 * half == head_size:  # both partners are the same channel
            return key_SH * stay_1H + pltpu.roll(key_SH, half, 1) * (above_1H + below_1H)
        above_SH, below_SH = pltpu.roll(key_SH, head_size - half, 1), pltpu.roll(key_SH, half, 1)
        return key_SH * stay_1H + above_SH * above_1H + below_SH * below_1H

    def numbers(which: Any, side: int, head: Any, part: int, begin: Any) -> Any:
        """A chunk of a page in float32: slots by channels, or channels by slots where pages are transposed."""
        slots, page = pl.ds(begin, chunk), (which, side, head, part)
        if is_transposed:
            words, bits = pltpu.bitcast(ring_refs[0][*page, :, slots], jnp.int32), ring_refs[1][*page, :, slots]
            return nibbles.numbers(words, bits.astype(jnp.int32))
        x_SH = ring_refs[0][*page, slots, :]
        if format is None:
            return x_SH.astype(jnp.float32)
        if format.stored != format.meant:
            x_SH = pltpu.bitcast(x_SH, jnp.dtype(format.meant))
        return x_SH.astype(jnp.float32) * ring_refs[1][which, side, head, pl.ds(part, 1), slots].reshape(chunk, 1)

    def sums_of(item: Any, which: Any, num_tokens: Any) -> Any:
        """The six sums of an item, over everything but the lanes."""
        pair = lax.div(item, num_layers)

        def add(index: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            if isinstance(index, int):
                head, begin = index // chunks_of_page, index % chunks_of_page * chunk
            else:
                head = lax.div(index, chunks_of_page)
                begin = pl.multiple_of(lax.rem(index, chunks_of_page) * chunk, chunk)
            added = []
            for part in range(2):
                one_SH, other_SH = (numbers(which, side, head, part, begin) for side in range(2))
                slot_SH = begin + lax.broadcasted_iota(jnp.int32, one_SH.shape, 1 if is_transposed else 0)
                one_SH, other_SH = (jnp.where(slot_SH < num_tokens, x, 0.0) for x in (one_SH, other_SH))
                if half is not None and part == 0:
                    other_SH = turned(other_SH, half, pair)
                added += [one_SH * one_SH, other_SH * other_SH, jnp.square(one_SH - other_SH)]
            return tuple(old + rows_of(new) for old, new in zip(sums, added, strict=True))

        def rows_of(x_SH: Any) -> Any:
            x = x_SH.reshape(-1, SUBLANES, x_SH.shape[1]).sum(axis=0)
            return sum(x[:, i : i + LANES] for i in range(0, x.shape[1], LANES))

        sums = (jnp.zeros((SUBLANES, LANES), jnp.float32),) * 6
        total = num_heads * chunks_of_page
        if total * max(1, chunk // CHUNK) <= MOST_UNROLLED:
            for index in range(total):
                sums = add(index, sums)
        else:
            sums = lax.fori_loop(0, total, add, sums)
        return sums

    def measure_item(item: Any, which: Any) -> Any:
        ahead = lax.select(which == 0, ring - 1, which - 1)
        pl.when(item + ring - 1 < (steps - step) * items)(lambda: start(item + ring - 1, ahead))
        num_tokens = table_smem_ref[0, 0, item * entries]

        @pl.when(num_tokens > 0)
        def _() -> None:
            for ring_ref in ring_refs:
                whole_ref = ring_ref.at[which]
                pltpu.make_async_copy(whole_ref, whole_ref, semaphores.at[which]).wait()  # waits for the bytes of all pages
            sums_SX = jnp.zeros((SUBLANES, LANES), jnp.float32)
            for i, sum_SX in enumerate(sums_of(item, which, num_tokens)):
                sums_SX = jnp.where(quantity_SX == i, jnp.sum(sum_SX, axis=0, keepdims=True), sums_SX)
            total_S1 = jnp.sum(sums_SX, axis=1, keepdims=True)
            lanes = pl.ds(pl.multiple_of(lax.div(item, LANES) * LANES, LANES), LANES)
            is_own_SX = lane_SX == lax.rem(item, LANES)
            out_vmem_ref[0, :, lanes] = jnp.where(is_own_SX, total_S1, out_vmem_ref[0, :, lanes])

        return lax.select(which + 1 == ring, 0, which + 1)

    which_smem_ref[0] = lax.fori_loop(0, items, measure_item, which_smem_ref[0])
