"""Where a running sum over values in their order reaches a limit, without sorting them: how distributions are cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num, UInt32

BITS_A_PASS = 4  # on an accelerator, where reading the values again costs more than comparing them with 15 numbers at once


def last_below(bits: UInt32[Array, "*N S"], weight: Num[Array, "*N #S"], limit: Num[Array, "*N"]) -> UInt32[Array, "*N"]:
    """The greatest number t such that the weights of all bits below t sum to less than the limit; 0 where no sum does.

    Where weights are positive, it is the bits of the first value, in ascending order, with which the sum reaches the limit;
    2**32 - 1 where all together do not. `bits` are numbers, weights are at least 0. t is found bit by bit.
    """
    find = partial(_find, bits, weight, limit)
    return jax.lax.platform_dependent(cpu=partial(find, 1), default=partial(find, BITS_A_PASS))


def _find(bits: UInt32[Array, "*N S"], weight: Num[Array, "*N #S"], limit: Num[Array, "*N"], width: int) -> UInt32[Array, "*N"]:
    """`last_below`, with `width` bits of t found in each pass over the values."""

    def narrow(low: UInt32[Array, "*N"], place: UInt32[Array, ""]) -> tuple[UInt32[Array, "*N"], None]:
        trials = [low + (jnp.uint32(digit) << place) for digit in range(1, 1 << width)]
        sums = sum_all([jnp.where(bits < trial[..., None], weight, 0) for trial in trials])
        digit = sum((total < limit).astype(jnp.uint32) for total in sums)
        return low + (digit << place), None

    places = jnp.arange(32 - width, -1, -width, dtype=jnp.uint32)
    unroll = width > 1  # a few passes of two kernels each; a loop would count its turns in kernels of its own
    if unroll:  # without the barrier XLA gives some passes copies of their own, as large as the values
        bits, weight = jax.lax.optimization_barrier((bits, weight))
    return jax.lax.scan(narrow, jnp.zeros(bits.shape[:-1], jnp.uint32), places, unroll=unroll)[0]


def sum_all(arrays: list[Num[Array, "*N S"]]) -> Any:
    """The sums of several arrays over their last axis, as one reduction, which reads what they are made of once."""
    add: Callable[..., Any] = lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True))  # noqa: E731
    zeros = [jnp.zeros((), array.dtype) for array in arrays]
    return jax.lax.reduce(tuple(arrays), tuple(zeros), add, (arrays[0].ndim - 1,))
