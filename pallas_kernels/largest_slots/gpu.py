"""Pallas for NVIDIA GPUs: one program per row, which holds all its scores in registers.

The lowest score that stays is found bit by bit. Each pass over the scores is a sum in registers; in plain XLA it is a kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.launch import launch, load, store

MOST_SLOTS = 16_384  # a thread holds at most 16 scores, of 1,024 threads
THREAD_SLOTS = 16
LEAST = -(1 << 31)


def why_not(score: Any, count: Any) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if score.dtype != jnp.float32:
        return f"scores must be float32; got {score.dtype}"
    if score.shape[1] > MOST_SLOTS:
        return f"a row must have at most {MOST_SLOTS} slots; got {score.shape[1]}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def largest_slots(
    score: Float[Array, "R S"], count: Int[Array, " R"], interpret: Any = False
) -> tuple[Bool[Array, "R S"], Int[Array, "R S"]]:
    """See `pallas_kernels.largest_slots`."""
    num_slots = score.shape[1]
    out = jax.ShapeDtypeStruct(score.shape, jnp.int32)
    is_largest, slots = launch(
        keep_row,
        *(score, count.astype(jnp.int32)),
        name="largest_slots",
        grid=score.shape[:1],
        out_shape=[out, out],
        num_warps=max(1, pl.next_power_of_2(num_slots) // (32 * THREAD_SLOTS)),
        interpret=interpret,
    )
    return is_largest > 0, slots


def keep_row(score_ref: Any, count_ref: Any, is_kept_ref: Any, slots_ref: Any) -> None:
    """Finds the slots of one row, and writes 1 for each of them and their list."""
    row, num_slots = pl.program_id(0), score_ref.shape[1]
    slot_S = jnp.arange(pl.next_power_of_2(num_slots), dtype=jnp.int32)
    is_slot_S = slot_S < num_slots
    score_S, count = load(score_ref.at[row, slot_S], mask=is_slot_S, other=-jnp.inf), load(count_ref.at[row])
    score_S = jnp.where(score_S == 0, 0.0, jnp.where(score_S > -jnp.inf, score_S, -jnp.inf))  # one zero, and no NaN
    bits_S = lax.bitcast_convert_type(score_S, jnp.int32)
    bits_S = jnp.where(bits_S < 0, bits_S ^ jnp.int32(~LEAST), bits_S)  # whole numbers in the order of the scores

    def narrow(index: Any, lowest: Any) -> Any:
        trial = lowest ^ lax.shift_left(jnp.int32(1), 31 - index)  # the first bit is the sign
        reached = jnp.sum((bits_S >= trial).astype(jnp.int32))
        return jnp.where(reached >= count, trial, lowest)

    lowest = lax.fori_loop(0, 32, narrow, jnp.int32(LEAST))
    is_above_S, is_level_S = bits_S > lowest, bits_S == lowest
    left = count - jnp.sum(is_above_S.astype(jnp.int32))
    is_kept_S = is_above_S | (is_level_S & (jnp.cumsum(is_level_S.astype(jnp.int32)) <= left))
    is_kept_S &= score_S > -jnp.inf
    order_S = jnp.cumsum(is_kept_S.astype(jnp.int32))  # 1 for the first
    num_kept = jnp.sum(is_kept_S.astype(jnp.int32))
    place_S = jnp.where(is_kept_S, order_S - 1, num_kept + slot_S - order_S)  # those that go come last
    store(is_kept_ref.at[row, slot_S], is_kept_S.astype(jnp.int32), mask=is_slot_S)
    store(slots_ref.at[row, place_S], jnp.where(is_kept_S, slot_S, -1), mask=is_slot_S)
