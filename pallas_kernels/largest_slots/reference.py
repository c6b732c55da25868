"""Plain XLA: the lowest score that stays is found by its bits, without a sort."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

BITS_A_PASS = 4  # where reading the scores again costs more than comparing them with 15 numbers at once: not on a CPU


def largest_slots(score: Float[Array, "R S"], count: Int[Array, " R"]) -> tuple[Bool[Array, "R S"], Int[Array, "R S"]]:
    """See `pallas_kernels.largest_slots`."""
    num_rows, num_slots = score.shape
    score = jnp.where(score == 0, 0.0, jnp.where(score > -jnp.inf, score, -jnp.inf))  # one zero, and no NaN
    bits = jax.lax.bitcast_convert_type(score, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(bits >= sign, ~bits, bits | sign)  # in the order of the scores
    search = functools.partial(lowest_kept, bits, count)
    run = functools.partial(jax.lax.platform_dependent, cpu=functools.partial(search, 1))
    lowest = run(default=functools.partial(search, BITS_A_PASS))[:, None]
    is_above, is_level = bits > lowest, bits == lowest
    left = count[:, None] - is_above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    is_largest = is_above | (is_level & (is_level.cumsum(axis=-1, dtype=jnp.int32) <= left))
    is_largest &= score > -jnp.inf

    row, slot = jnp.arange(num_rows, dtype=jnp.int32)[:, None], jnp.arange(num_slots, dtype=jnp.int32)
    place = jnp.where(is_largest, is_largest.cumsum(axis=-1, dtype=jnp.int32) - 1, num_slots)
    return is_largest, jnp.full(score.shape, -1, jnp.int32).at[row, place].set(slot, mode="drop")


def lowest_kept(bits: UInt32[Array, "R S"], count: Int[Array, " R"], width: int) -> UInt32[Array, " R"]:
    """The greatest number that at least `count` of a row's bits reach; `width` bits of it are found in each pass."""
    digit = jnp.arange(1, 1 << width, dtype=jnp.uint32)

    def narrow(low_R: UInt32[Array, " R"], place: UInt32[Array, ""]) -> tuple[UInt32[Array, " R"], None]:
        trial_RD = low_R[:, None] + (digit << place)
        reached_RD = (bits[:, None] >= trial_RD[..., None]).sum(axis=-1, dtype=jnp.int32)
        return low_R + ((reached_RD >= count[:, None]).sum(axis=-1, dtype=jnp.uint32) << place), None

    places = jnp.arange(32 - width, -1, -width, dtype=jnp.uint32)
    return jax.lax.scan(narrow, jnp.zeros(bits.shape[:1], jnp.uint32), places, unroll=width > 1)[0]
