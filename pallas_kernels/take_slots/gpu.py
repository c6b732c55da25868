"""Pallas for NVIDIA GPUs: a program holds a few channels of all slots of a row, reads them all and then writes them in place.

It needs no scratch memory: each byte that moves is read once and written once, and slots that stay are not read.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.launch import barrier, launch, load, store
from pallas_kernels.quantised import Numbers, Quantised
from pallas_kernels.take_slots.reference import addresses

PROGRAM_BYTES = 65536  # keys or values per program, if that gives each slot at least a memory transaction
LEAST_BYTES, SOME_BYTES = 16, 32  # per slot: one load, and one memory transaction
THREAD_BYTES = 128
LEAST_TILE = 128  # slots
MOST_SLOTS = 8192  # the channels of more slots do not fit in the registers of a program


def why_not(kv: Any, slots: Any, source: Any, target: Any) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if not isinstance(kv, Quantised) and kv.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the pool must be float32 or bfloat16; got {kv.dtype}"
    if slots.shape[1] > MOST_SLOTS:
        return f"a row must have at most {MOST_SLOTS} slots; got {slots.shape[1]}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def take_slots(
    kv: Numbers,
    slots: Int[Array, "R S"],
    source: Int[Array, "R MP"],
    target: Int[Array, "R MP"],
    interpret: Any = False,
) -> Numbers:
    """See `pallas_kernels.take_slots`. Scales of quantised pages move like heads of few channels."""
    begin, end = addresses(kv.shape[2], slots, source, target)
    if not isinstance(kv, Quantised):
        return move_slots(kv, begin, end, interpret)
    codes, scale = (move_slots(x, begin, end, interpret) for x in (kv.codes, kv.scale.reshape(*kv.codes.shape[:3], -1)))
    return dataclasses.replace(kv, codes=codes, scale=scale.reshape(kv.scale.shape))


def move_slots(kv: Array, begin: Int[Array, "R S"], end: Int[Array, "R S"], interpret: Any) -> Array:
    """Moves the numbers of slots from the addresses `begin` to `end`."""
    (num_rows, num_slots), head_size, item = begin.shape, kv.shape[3], kv.dtype.itemsize
    slot_bytes = SOME_BYTES if num_slots * SOME_BYTES <= 2 * PROGRAM_BYTES else LEAST_BYTES
    while num_slots * slot_bytes * 2 <= PROGRAM_BYTES and slot_bytes < head_size * item:
        slot_bytes *= 2
    num_slices = pl.cdiv(head_size * item, slot_bytes)
    num_threads = max(32, min(1024, num_slots * slot_bytes // THREAD_BYTES))
    return launch(
        functools.partial(move, num_slices, slot_bytes // item, bool(interpret)),
        begin,
        end,
        kv,
        name="take_slots",
        grid=(num_rows * 2 * num_slices,),
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        num_warps=1 << (num_threads // 32).bit_length() - 1,
        aliases={2: 0},
        interpret=interpret,
    )


def move(num_slices: int, channels: int, is_interpreted: bool, begin_ref: Any, end_ref: Any, _: Any, kv_ref: Any) -> None:
    """Moves a slice of the channels of one row's keys or values. Programs of the same slots are neighbours in the grid."""
    num_slots, (page_size, head_size) = begin_ref.shape[1], kv_ref.shape[2:]
    program = pl.program_id(0)
    row, part = lax.div(program, 2 * num_slices), lax.rem(lax.div(program, num_slices), 2)
    first_channel = lax.rem(program, num_slices) * channels

    def parts(address_ref: Any) -> Iterator[tuple[Any, Any]]:
        """Yields a reference to each tile of the row's channels, and which of its elements move."""
        for begin, size in tiles(num_slots):
            slot_S = begin + lax.broadcasted_iota(jnp.int32, (size,), 0)
            address_S = load(address_ref.at[row, slot_S], mask=slot_S < num_slots, other=0)
            address_SH = jnp.broadcast_to(address_S[:, None], (size, channels))
            channel_SH = first_channel + lax.broadcasted_iota(jnp.int32, (size, channels), 1)
            is_moved_SH = (address_SH >= page_size) & (channel_SH < head_size)
            page_SH, offset_SH = lax.div(address_SH, page_size), lax.rem(address_SH, page_size)
            yield kv_ref.at[page_SH, part, offset_SH, channel_SH], is_moved_SH

    moved = [load(tile_ref, mask=is_moved_SH, other=0) for tile_ref, is_moved_SH in parts(begin_ref)]
    if not is_interpreted:  # the interpreter runs threads in turn
        barrier()
    for (tile_ref, is_moved_SH), moved_SH in zip(parts(end_ref), moved, strict=True):
        store(tile_ref, moved_SH, mask=is_moved_SH)


def tiles(num_slots: int) -> Iterator[tuple[int, int]]:
    """Begin and size of each tile of a row: powers of two, of which the last may exceed the row.

    >>> list(tiles(1150))
    [(0, 1024), (1024, 128)]
    """
    begin = 0
    while begin < num_slots:
        left = num_slots - begin
        size = pl.next_power_of_2(left) if left <= LEAST_TILE else 1 << left.bit_length() - 1
        yield begin, size
        begin += size
