"""Pallas for NVIDIA GPUs: looks for each key's latest similar key, from the newest others on, and ends once all have theirs.

The mean of all similarities is one product with the sum of the keys, as in plain XLA, so tiles of the similarity matrix are
only compared with the threshold. They are products of the keys themselves, not of unit keys: in bfloat16 they are exact on the
tensor cores, which float32 cannot use, and the norms come in afterwards. A program holds a block of a row's keys. A second
launch subtracts the exempt entries from the totals by comparing all slots with all others, without a product: atomic additions
have no fixed order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels.launch import dot, launch, load, store

BLOCK = 128  # slots per program; half for float32, whose products use no tensor cores, and for wide heads
OTHERS = 64  # slots on the other side of a tile; half for wide heads
CHUNK = 512  # slots at a time in a look for any that concern a block
HEAD_SIZES = (16, 32, 64, 128, 256)
MOST_FLOAT32 = 128  # channels; with 256, threads spill 17 KiB, and the kernel compiles for more than a minute
SPAN = 4  # tiles between two looks at whether keys are left that have found none


def why_not(key: Any, is_filled: Any, threshold: float = 0.5, exempt: int = 1, exempt_first: bool = False) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if key.dtype not in (jnp.float32, jnp.bfloat16):
        return f"keys must be float32 or bfloat16; got {key.dtype}"
    if exempt < 1:
        return f"exempt must be at least 1; got {exempt}. Without an exempt entry, plain XLA is linear in slots"
    if key.shape[2] not in HEAD_SIZES:
        return f"the head size must be a power of two from {HEAD_SIZES[0]} to {HEAD_SIZES[-1]}; got {key.shape[2]}"
    if key.shape[2] > MOST_FLOAT32 and key.dtype == jnp.float32:
        return f"the head size must be at most {MOST_FLOAT32} in float32; got {key.shape[2]}"
    if key.size >= 2**31:
        return f"offsets are 32 bits wide, so keys must be fewer than 2**31 numbers; got {key.size}"
    return None


@functools.partial(jax.jit, static_argnames=("threshold", "exempt", "exempt_first", "interpret"))
def key_redundancy(
    key_RSH: Float[Array, "R S H"],
    is_filled: Bool[Array, "R S"],
    threshold: float,
    exempt: int,
    exempt_first: bool,
    interpret: Any = False,
) -> Float[Array, "R S"]:
    """See `pallas_kernels.key_redundancy`."""
    num_rows, num_slots, head_size = key_RSH.shape
    is_wide = head_size > 128  # with whole tiles, a multiprocessor of an H200 would hold one program, not two
    block = BLOCK // 2 if is_wide or key_RSH.dtype == jnp.float32 else BLOCK
    others = OTHERS // 2 if is_wide else OTHERS
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    slot_RS = jnp.where(is_filled, slot, -1)
    extent, count = jnp.where(is_filled, slot + 1, 0).max(axis=1), is_filled.sum(axis=1)
    filled_RSH = jnp.where(is_filled[..., None], key_RSH, jnp.zeros_like(key_RSH)).astype(jnp.float32)
    inverse_RS = 1 / (jnp.linalg.norm(filled_RSH, axis=-1) + 1e-8)
    unit_RSH = filled_RSH * inverse_RS[..., None]
    total_RS = (unit_RSH * (unit_RSH.sum(axis=1, keepdims=True) - unit_RSH)).sum(axis=-1)

    def run(body: Any, *inputs: Array, name: str, out_dtype: Any) -> Any:
        return launch(
            body,
            *inputs,
            name=name,
            grid=(num_rows, -(-num_slots // block)),
            out_shape=jax.ShapeDtypeStruct((num_rows, num_slots), out_dtype),
            num_warps=4,
            num_stages=3,
            interpret=interpret,
        )

    latest_RS: Any = None
    for turn in range(exempt):
        inputs = extent, key_RSH, slot_RS, inverse_RS, *([] if latest_RS is None else [latest_RS])
        body = functools.partial(look, block, others, threshold, exempt_first and turn == 0)
        latest_RS = run(body, *inputs, name="key_redundancy_look", out_dtype=jnp.int32)
        other_RSH = jnp.take_along_axis(key_RSH, jnp.maximum(latest_RS, 0)[..., None], axis=1, mode="promise_in_bounds")
        value_RS = (unit_RSH * other_RSH.astype(jnp.float32)).sum(axis=-1)
        inputs = extent, slot_RS, inverse_RS, latest_RS, value_RS, total_RS, *([count] if turn == exempt - 1 else [])
        total_RS = run(functools.partial(take_off, block), *inputs, name="key_redundancy_take_off", out_dtype=jnp.float32)
    return total_RS


def look(
    block: int,
    others: int,
    threshold: float,
    takes_first: bool,
    extent_ref: Any,
    key_ref: Any,
    slot_ref: Any,  # -1 where a slot is empty
    inverse_ref: Any,  # of the norm
    *refs: Any,  # what was found before, if anything was; what is found
) -> None:
    """Finds the latest similar slot of each of a block of slots (S) among all others (I), the newest ones first; -1 for none.

    With `takes_first`, none is slot 0, if that is another one and not empty.
    """
    *below_refs, latest_ref = refs
    row, num_slots = pl.program_id(0), slot_ref.shape[1]
    extent, offset_H = load(extent_ref.at[row]), jnp.arange(key_ref.shape[2], dtype=jnp.int32)
    is_float32 = key_ref.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if is_float32 else None
    begin = pl.program_id(1) * block
    where_S = begin + jnp.arange(block, dtype=jnp.int32)
    is_in_S = where_S < num_slots

    def load_slots(ref: Any, where: Any, other: Any) -> Any:
        return load(ref.at[row, where], mask=where < num_slots, other=other)

    def load_keys(where: Any) -> Any:
        """Keys of empty slots too, NaN or not: they find slot -1, and a mask would have to be loaded before them."""
        return load(key_ref.at[row, where[:, None], offset_H[None]], mask=(where < num_slots)[:, None], other=0)

    slot_S, key_SH = load_slots(slot_ref, where_S, -1), load_keys(where_S)
    limit_S = threshold / load_slots(inverse_ref, where_S, 1.0)
    below_S = load_slots(below_refs[0], where_S, -1) if below_refs else None
    is_searching_S = slot_S >= 0 if below_S is None else (slot_S >= 0) & (below_S > 0)

    def compare(is_diagonal: bool, index: Any, latest_S: Any) -> Any:
        where_I = index * others + jnp.arange(others, dtype=jnp.int32)
        slot_I, inverse_I = load_slots(slot_ref, where_I, -1), load_slots(inverse_ref, where_I, 1.0)
        product_SI = dot(key_SH, load_keys(where_I), trans_b=True, precision=precision)
        is_alike_SI = product_SI * inverse_I[None] > limit_S[:, None]
        if is_diagonal:
            is_alike_SI &= where_S[:, None] != where_I[None]
        if below_S is not None:
            is_alike_SI &= slot_I[None] < below_S[:, None]
        return jnp.maximum(latest_S, jnp.where(is_alike_SI, slot_I[None], -1).max(axis=1))

    end = lax.div(extent + (others - 1), jnp.int32(others))
    first = lax.min(pl.program_id(1) * (block // others), end)  # tiles before, on and after the diagonal
    last = lax.min(first + block // others, end)
    zero = jnp.int32(0)
    # The product of float32 takes long to compile, so all of its tiles are one loop.
    parts = [(True, zero, end)] if is_float32 else [(False, zero, first), (True, first, last), (False, last, end)]

    def is_left(carry: tuple[Any, Any]) -> Any:
        upper, latest_S = carry
        return (upper > 0) & (jnp.where(is_searching_S, latest_S, 0).min() < 0)

    def look_at_span(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        upper, latest_S = carry
        lower = lax.max(upper - SPAN, zero)
        for is_diagonal, begins, ends in parts:
            bounds = lax.max(begins, lower), lax.min(ends, upper)
            latest_S = lax.fori_loop(*bounds, functools.partial(compare, is_diagonal), latest_S)
        return lower, latest_S

    _, latest_S = lax.while_loop(is_left, look_at_span, (end, jnp.full((block,), -1, jnp.int32)))
    if takes_first:
        has_first_S = (where_S > 0) & (load_slots(slot_ref, where_S * 0, -1) == 0)
        latest_S = jnp.maximum(latest_S, jnp.where(has_first_S, 0, -1))
    store(latest_ref.at[row, where_S], jnp.where(slot_S >= 0, latest_S, -1), mask=is_in_S)


def take_off(
    block: int,
    extent_ref: Any,
    slot_ref: Any,
    inverse_ref: Any,
    latest_ref: Any,
    value_ref: Any,  # the cosine times the latest similar key's norm
    total_ref: Any,
    *refs: Any,  # the number of filled slots, if the means are wanted; what is left
) -> None:
    """Subtracts each slot's cosine from the total of its latest similar slot, for a block of totals."""
    *count_refs, left_ref = refs
    row, begin, num_slots = pl.program_id(0), pl.program_id(1) * block, latest_ref.shape[1]
    extent = load(extent_ref.at[row])
    where_S = begin + jnp.arange(block, dtype=jnp.int32)

    def load_slots(ref: Any, where: Any, other: Any) -> Any:
        return load(ref.at[row, where], mask=where < num_slots, other=other)

    def look_for_any(index: Any, is_any_C: Any) -> Any:
        latest_C = load_slots(latest_ref, index * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32), -1)
        return is_any_C | ((latest_C >= begin) & (latest_C < begin + block)).astype(jnp.int32)

    def add(index: Any, exempted_SI: Any) -> Any:
        where_I = index * OTHERS + jnp.arange(OTHERS, dtype=jnp.int32)
        latest_I, value_I = load_slots(latest_ref, where_I, -1), load_slots(value_ref, where_I, 0.0)
        return exempted_SI + jnp.where(where_S[:, None] == latest_I[None], value_I[None], 0.0)

    chunks = lax.div(extent + (CHUNK - 1), jnp.int32(CHUNK))
    is_any = lax.fori_loop(0, chunks, look_for_any, jnp.zeros((CHUNK,), jnp.int32)).max() > 0
    trips = jnp.where(is_any, lax.div(extent + (OTHERS - 1), jnp.int32(OTHERS)), jnp.int32(0))
    exempted_SI = lax.fori_loop(0, trips, add, jnp.zeros((block, OTHERS), jnp.float32))
    left_S = load_slots(total_ref, where_S, 0.0) - exempted_SI.sum(axis=1) * load_slots(inverse_ref, where_S, 0.0)
    if count_refs:
        left_S = jnp.where(
            load_slots(slot_ref, where_S, -1) >= 0,
            left_S / jnp.maximum(load(count_refs[0].at[row]), 1).astype(jnp.float32),
            0.0,
        )
    store(left_ref.at[row, where_S], left_S, mask=where_S < num_slots)
