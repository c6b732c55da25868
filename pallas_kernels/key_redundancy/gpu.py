"""Pallas for NVIDIA GPUs: each tile of the similarity matrix is computed once, for the sum and the latest similar key.

The products take the keys themselves, not unit keys: in bfloat16 they are exact on the tensor cores, which float32 cannot use;
the norms divide afterwards. A program holds a block of a row's keys and loops over the others. A second launch subtracts the
exempt entries from the totals by comparing all slots with all others, without a product: atomic additions have no fixed order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels.launch import dot, launch, load, store

BLOCK = 128  # slots per program; half for float32, whose products use no tensor cores
OTHERS = 64  # slots on the other side of a tile


def why_not(key: Any, is_filled: Any, threshold: float = 0.5, exempt: int = 1, exempt_first: bool = False) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if key.dtype not in (jnp.float32, jnp.bfloat16):
        return f"keys must be float32 or bfloat16; got {key.dtype}"
    if exempt < 1:
        return f"exempt must be at least 1; got {exempt}. Without an exempt entry, plain XLA is linear in slots"
    if key.shape[2] not in (16, 32, 64, 128):
        return f"the head size must be a power of two from 16 to 128; got {key.shape[2]}"
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
    num_rows, num_slots, _ = key_RSH.shape
    block = BLOCK // 2 if key_RSH.dtype == jnp.float32 else BLOCK
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    slot_RS = jnp.where(is_filled, slot, -1)
    extent = jnp.where(is_filled, slot + 1, 0).max(axis=1)
    filled_RSH = jnp.where(is_filled[..., None], key_RSH, jnp.zeros_like(key_RSH)).astype(jnp.float32)
    norm_RS = jnp.linalg.norm(filled_RSH, axis=-1) + 1e-8

    def run(body: Any, *inputs: Array, name: str, out_dtypes: tuple[Any, ...]) -> Any:
        return launch(
            body,
            *inputs,
            name=name,
            grid=(num_rows, -(-num_slots // block)),
            out_shape=[jax.ShapeDtypeStruct((num_rows, num_slots), dtype) for dtype in out_dtypes],
            num_warps=4,
            num_stages=3,
            interpret=interpret,
        )

    inputs = extent, key_RSH, slot_RS, norm_RS
    latest_RS: Any = None
    total_RS: Any = None
    for turn in range(exempt):
        latest_RS, value_RS, *totals = run(
            functools.partial(look, block, threshold, exempt_first, turn),
            *inputs,
            *([] if latest_RS is None else [latest_RS]),
            name="key_redundancy_look",
            out_dtypes=(jnp.int32, jnp.float32) + ((jnp.float32,) if turn == 0 else ()),
        )
        total_RS = totals[0] if turn == 0 else total_RS
        (total_RS,) = run(
            functools.partial(take_off, block),
            extent,
            latest_RS,
            value_RS,
            total_RS,
            name="key_redundancy_take_off",
            out_dtypes=(jnp.float32,),
        )
    count_R1 = jnp.maximum(is_filled.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)
    return jnp.where(is_filled, total_RS / count_R1, 0.0)


def look(
    block: int,
    threshold: float,
    exempt_first: bool,
    turn: int,
    extent_ref: Any,
    key_ref: Any,
    slot_ref: Any,  # -1 where a slot is empty
    norm_ref: Any,
    *refs: Any,
) -> None:
    """Compares a block of slots (S) with all others (I), the older ones first."""
    below_ref, latest_ref, value_ref, *total_refs = (None, *refs) if turn == 0 else refs
    row, num_slots = pl.program_id(0), slot_ref.shape[1]
    extent, offset_H = load(extent_ref.at[row]), jnp.arange(key_ref.shape[2], dtype=jnp.int32)
    precision = lax.Precision.HIGHEST if key_ref.dtype == jnp.float32 else None
    begin = pl.program_id(1) * block
    where_S = begin + jnp.arange(block, dtype=jnp.int32)
    is_in_S = where_S < num_slots

    def load_slots(ref: Any, where: Any, other: Any) -> Any:
        return load(ref.at[row, where], mask=where < num_slots, other=other)

    def load_keys(where: Any, is_filled: Any) -> Any:
        return load(key_ref.at[row, where[:, None], offset_H[None]], mask=is_filled[:, None], other=0)

    slot_S, norm_S = load_slots(slot_ref, where_S, -1), load_slots(norm_ref, where_S, 1.0)
    key_SH, limit_S = load_keys(where_S, slot_S >= 0), threshold * norm_S
    below_S = None if below_ref is None else load_slots(below_ref, where_S, -1)

    def compare(is_diagonal: bool, index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        latest_S, value_S, total_S = carry
        where_I = index * OTHERS + jnp.arange(OTHERS, dtype=jnp.int32)
        slot_I, norm_I = load_slots(slot_ref, where_I, -1), load_slots(norm_ref, where_I, 1.0)
        other_key_IH = load_keys(where_I, slot_I >= 0)
        similarity_SI = dot(key_SH, other_key_IH, trans_b=True, precision=precision) * (1.0 / norm_I)[None]
        is_alike_SI = similarity_SI > limit_S[:, None]
        if is_diagonal:
            is_other_SI = where_S[:, None] != where_I[None]
            similarity_SI, is_alike_SI = jnp.where(is_other_SI, similarity_SI, 0.0), is_alike_SI & is_other_SI
        if below_S is not None:
            is_alike_SI &= slot_I[None] < below_S[:, None]
        newest_S = jnp.where(is_alike_SI, slot_I[None], -1).max(axis=1)
        newest_value_S = jnp.where(slot_I[None] == newest_S[:, None], similarity_SI, 0.0).sum(axis=1)
        is_found_S = newest_S >= 0
        if exempt_first and turn == 0:  # slot 0 is exempt if no similar key was found
            first_S = jnp.where(where_I[None] == 0, similarity_SI, 0.0).sum(axis=1)
            newest_value_S = jnp.where(is_found_S | (index > 0), newest_value_S, first_S)
            is_found_S |= index == 0
        latest_S, value_S = jnp.maximum(latest_S, newest_S), jnp.where(is_found_S, newest_value_S, value_S)
        return latest_S, value_S, total_S + similarity_SI.sum(axis=1) if total_refs else total_S

    zero_S = jnp.zeros((block,), jnp.float32)
    carry = jnp.full((block,), -1, jnp.int32), zero_S, zero_S
    end = jnp.where(begin < extent, lax.div(extent + (OTHERS - 1), jnp.int32(OTHERS)), jnp.int32(0))
    first = lax.min(pl.program_id(1) * (block // OTHERS), end)  # tiles before, on and after the diagonal
    last = lax.min(first + block // OTHERS, end)
    spans = [(False, jnp.int32(0), first), (True, first, last), (False, last, end)]
    if key_ref.dtype == jnp.float32:  # its product takes long to compile
        spans = [(True, jnp.int32(0), end)]
    for is_diagonal, lower, upper in spans:
        carry = lax.fori_loop(lower, upper, functools.partial(compare, is_diagonal), carry)
    latest_S, value_S, total_S = carry
    store(latest_ref.at[row, where_S], latest_S, mask=is_in_S)
    store(value_ref.at[row, where_S], jnp.where(slot_S >= 0, value_S / norm_S, 0.0), mask=is_in_S)
    for total_ref in total_refs:
        store(total_ref.at[row, where_S], total_S / norm_S, mask=is_in_S)


def take_off(block: int, extent_ref: Any, latest_ref: Any, value_ref: Any, total_ref: Any, left_ref: Any) -> None:
    """Subtracts each slot's value from the total of its latest similar key, for a block of totals."""
    row, begin, num_slots = pl.program_id(0), pl.program_id(1) * block, latest_ref.shape[1]
    extent = load(extent_ref.at[row])
    where_S = begin + jnp.arange(block, dtype=jnp.int32)

    def add(index: Any, exempted_SI: Any) -> Any:
        where_I = index * OTHERS + jnp.arange(OTHERS, dtype=jnp.int32)
        is_in_I = where_I < num_slots
        latest_I = jnp.maximum(load(latest_ref.at[row, where_I], mask=is_in_I, other=-1), 0)
        value_I = load(value_ref.at[row, where_I], mask=is_in_I, other=0.0)
        return exempted_SI + jnp.where(where_S[:, None] == latest_I[None], value_I[None], 0.0)

    trips = jnp.where(begin < extent, lax.div(extent + (OTHERS - 1), jnp.int32(OTHERS)), jnp.int32(0))
    exempted_SI = lax.fori_loop(0, trips, add, jnp.zeros((block, OTHERS), jnp.float32))
    total_S = load(total_ref.at[row, where_S], mask=where_S < num_slots, other=0.0)
    store(left_ref.at[row, where_S], total_S - exempted_SI.sum(axis=1), mask=where_S < num_slots)
