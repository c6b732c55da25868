"""Products with codes of 4 bits in a TPU's registers, without a conversion or a multiplication of a single code.

Codes of keys and values come transposed, channels by slots, two a byte (`pallas_kernels.quantised`), each plus 8. A word holds
eight. A shift, a mask and four bits of an exponent turn two of them at once into the bfloat16 `16 + code + 8`, in an order of
channels of their own: queries are brought to that order before the kernel, and outputs back after it. What is added to codes is
taken off their products.

`packed` writes such words, of vectors whose channels a product brought to that order.

Scales multiply products, not codes: each query head stands once for every group, with the channels of that group alone.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as pltpu
from pallas_kernels.quantised import LEAST_SCALE, MOST_SCALE, NAN_BITS, Format, nearest

BYTES = 4  # of a word
SUBLANES = 8
ADDED = 24.0  # to a code: 8 in the pool, and 16 by the exponent
Product = Callable[[Any, Any, Any], Any]  # of `lax.dot_general`, with a float32 result


def reordered(x: Float[Array, "*A H"]) -> Float[Array, "*A H"]:
    """Channels in the order in which `unpacked` has them: byte by byte of a word, low halves, then high ones."""
    half, word, byte = (*range(x.ndim - 1),), x.shape[-1] // 2 // BYTES, x.ndim - 1
    parts = x.reshape(*x.shape[:-1], 2, word, *fields(x.dtype))
    return parts.transpose(*half, byte + 3, byte, byte + 1, byte + 2).reshape(x.shape)


def restored(x: Float[Array, "*A H"]) -> Float[Array, "*A H"]:
    """Channels in their own order; undoes `reordered`."""
    first = x.ndim - 1
    together, apart = fields(x.dtype)
    parts = x.reshape(*x.shape[:-1], apart, 2, x.shape[-1] // 2 // BYTES, together)
    return parts.transpose(*range(first), first + 1, first + 2, first + 3, first).reshape(x.shape)


def fields(dtype: Any) -> tuple[int, int]:
    """How many bytes of a word become numbers of one word, and how many such words there are: (2, 2) or (1, 4)."""
    together = BYTES // jnp.dtype(dtype).itemsize
    return together, BYTES // together


def group_of_channel(head_size: int, group: int, dtype: Any) -> Int[Array, "1 H"]:
    """The group of each channel, in the order of `unpacked`."""
    together, _ = fields(dtype)
    rows = head_size // 2 // BYTES * together  # that are unpacked at once
    index = lax.broadcasted_iota(jnp.int32, (1, head_size), 1)
    turn, row = lax.div(index, rows), lax.rem(index, rows)
    byte = lax.div(turn, 2) + BYTES // together * lax.rem(row, together)
    channel = BYTES * lax.div(row, together) + byte + head_size // 2 * lax.rem(turn, 2)
    return lax.div(channel, group)


def unpacked(words: Int[Array, "W S"], dtype: Any) -> Float[Array, "H S"]:
    """The codes of `4 W` bytes a slot, each plus `ADDED`: exact in bfloat16 and float32."""
    bits = jnp.dtype(dtype).itemsize * 8
    fraction = jnp.finfo(dtype).nmant - 4  # where a code begins: below it, 16 has bits of halves and less
    one = sum(1 << place for place in range(0, 32, bits))  # in every number of a word
    exponent, mask = bits_of_16(dtype) * one, (15 << fraction) * one
    rows = []
    for turn in range(2 * fields(dtype)[1]):
        shift = fraction - 4 * turn
        moved = words << shift if shift >= 0 else lax.shift_right_logical(words, jnp.int32(-shift))
        rows.append(pltpu.bitcast((moved & jnp.int32(mask)) | jnp.int32(exponent), dtype))
    return jnp.concatenate(rows, axis=0)


def packed(x: Float[Array, "H X"], format: Format) -> tuple[Int[Array, "W X"], Int[Array, "groups X"]]:
    """The words of the codes of rotated vectors, and the bits of their groups' scales: what `unpacked` and `scales` read.

    Vectors are columns, float32, with channels in the order of `unpacked` for float32. There every eight rows are of one group.
    """
    assert format.group == SUBLANES * BYTES
    rows = len(x) // (2 * BYTES)
    turns = [x[turn * rows : (turn + 1) * rows] for turn in range(2 * BYTES)]  # byte by byte: its low half, then its high one
    words, bits = jnp.zeros(turns[0].shape, jnp.int32), []
    for half in range(2):
        most = functools.reduce(jnp.maximum, (jnp.abs(turn) for turn in turns[half::2]))
        of_groups = [most[first : first + SUBLANES].max(axis=0, keepdims=True) for first in range(0, rows, SUBLANES)]
        bits += [half_bits(of_group * (1 / format.most)) for of_group in of_groups]
        scale = jnp.concatenate([jnp.broadcast_to(scales(one), (SUBLANES, x.shape[1])) for one in bits[-len(of_groups) :]])
        for byte, turn in enumerate(turns[half::2]):
            code = nearest(jnp.clip(turn / scale, -format.most, format.most)).astype(jnp.int32) + 8
            words = words | (code & 15) << (8 * byte + 4 * half)  # the code of NaN is any
    return words, jnp.concatenate(bits, axis=0)


def numbers(words: Int[Array, "W X"], bits: Int[Array, "groups X"]) -> Float[Array, "H X"]:
    """The rotated vectors of `packed` codes and scales, float32, in the order of `unpacked`."""
    shape = SUBLANES, words.shape[1]
    scale = jnp.concatenate([jnp.broadcast_to(scales(bits[i : i + 1]), shape) for i in range(len(bits))], axis=0)
    return (unpacked(words, jnp.dtype(jnp.float32)) - ADDED) * jnp.concatenate([scale] * BYTES, axis=0)


def half_bits(scale: Float[Array, "..."]) -> Int[Array, "..."]:
    """The bits of scales as float16, rounded to the nearest (ties to even), within the bounds of scales; NaN if not finite."""
    within = lax.bitcast_convert_type(jnp.clip(scale, LEAST_SCALE, MOST_SCALE), jnp.int32)
    rounded = (within + 0xFFF + (within >> 13 & 1)) >> 13  # of 23 bits of a fraction, 10 are left
    return jnp.where(scale < jnp.inf, rounded - (112 << 10), NAN_BITS)


def bits_of_16(dtype: Any) -> int:
    """The bits of the number 16."""
    return (jnp.finfo(dtype).maxexp - 1 + int(math.log2(16))) << jnp.finfo(dtype).nmant


def scales(bits: Int[Array, "groups S"]) -> Float[Array, "groups S"]:
    """The numbers of float16s that are not negative: their bits move to a float32's place."""
    moved = lax.bitcast_convert_type(bits << 13, jnp.float32) * 2.0**112
    return jnp.where(bits < 0x7C00, moved, jnp.nan)


def spread(x_GH: Float[Array, "G H"], group: int) -> Float[Array, "GG H"]:
    """Each row once for every group, which keeps its channels; zeros in the others."""
    of = group_of_channel(x_GH.shape[1], group, x_GH.dtype)
    return jnp.concatenate([jnp.where(of == i, x_GH, jnp.zeros_like(x_GH)) for i in range(x_GH.shape[1] // group)], axis=0)


def logits(
    query_QH: Float[Array, "GG H"], words: Int[Array, "W S"], scale: Float[Array, "groups S"], product: Product
) -> Float[Array, "G S"]:
    """Products of spread queries with keys."""
    key_HS = unpacked(words, query_QH.dtype)
    added_Q1 = ADDED * query_QH.astype(jnp.float32).sum(axis=1, keepdims=True)
    of_group_QS = product(query_QH, key_HS, (((1,), (0,)), ((), ()))) - added_Q1
    heads = len(query_QH) // len(scale)
    return sum(of_group_QS[i * heads : (i + 1) * heads] * scale[i : i + 1] for i in range(len(scale)))


def outputs(
    share_GS: Float[Array, "G S"],
    words: Int[Array, "W S"],
    scale: Float[Array, "groups S"],
    group: int,
    dtype: Any,
    product: Product,
) -> Float[Array, "G H"]:
    """Sums of values, each times its share; of slots whose scales are zero, nothing."""
    value_HS, heads = unpacked(words, dtype), len(share_GS)
    share_QS = jnp.concatenate([share_GS * scale[i : i + 1] for i in range(len(scale))], axis=0).astype(dtype)
    added_Q1 = ADDED * share_QS.astype(jnp.float32).sum(axis=1, keepdims=True)
    of_group_QH = product(share_QS, value_HS, (((1,), (1,)), ((), ()))) - added_Q1
    of = group_of_channel(value_HS.shape[0], group, dtype)
    out_GH: Any = jnp.zeros((heads, value_HS.shape[0]), jnp.float32)
    for i in range(len(scale)):
        out_GH = jnp.where(of == i, of_group_QH[i * heads : (i + 1) * heads], out_GH)
    return out_GH
