"""Sealed pages: a full page that nobody writes again becomes one record of codes, whose scales belong to its rows and columns.

The rule is KVarN's (arXiv 2606.03458; released code: github.com/huawei-csl/KVarN). Keys and values are rotated by Hadamard's
matrix. The page of one layer, row and KV head is a tile of slots by channels. Alternating divisions by standard deviations
(Sinkhorn's scheme) balance its rows and columns; then a row of the balanced tile, the channel of keys and the slot of values,
is rounded to equally spaced numbers between its extremes:

    key[s, c]   = (code[s, c] * scale[c] + zero[c]) * of_slot[s]
    value[s, c] = (code[s, c] * scale[s] + zero[s]) * of_channel[c]

Departures from the released code: channel c shares its byte with channels a half or a quarter of the head away, not with its
neighbours; deviations are those of the whole population; and a ratio rises if it is a ten-thousandth larger, or rounding would
decide where the scheme stops.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from pallas_kernels import hadamard, quantised
from pallas_kernels.quantised import NAN_BITS, Format, Numbers

ITERATIONS = 16  # of Sinkhorn's scheme
STEP = (0.7, 2.0)  # by which one iteration may divide a row or column
LOG_SCALES = (-0.3, 10.0)  # the logarithm of a row's or column's divisor
TARGETS = (1e-3, 1e3)  # the deviation that all rows and columns are to have
LEAST_DEVIATION = 1e-8  # of a row or column of equal numbers
LEAST_STEP = 1e-10  # between two codes
NO_RISE = 1.0001  # times the least ratio: rounding does not end the scheme, or another program would choose other scales
MOST_SCALE = 65504.0  # the largest number of float16
PAGES = (16, 32, 64, 128)  # slots


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SealedFormat(Format):
    """How a full page becomes a record.

    Attributes:
      page: slots of a page.
      key_bits, value_bits: of a code: 2, 4 or 8.
    """

    page: int = 128
    key_bits: int = 4
    value_bits: int = 2


SEALED = {name: SealedFormat(name, "uint8", "uint8", 0.0, value_bits=bits) for name, bits in (("kvarn", 2), ("kvarn-k4v4", 4))}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("key", "value", "scales"),
    meta_fields=("format", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class Records:
    """Sealed pages.

    Attributes:
      key: `[*A, page, H * bits / 8]` codes; with n a byte, byte i has those of channels i, i + H / n and so on, low first.
      value: likewise.
      scales: `[*A, 2, (H + page) * 3 / 2]`, the bits of float16s: those of `Scales` in their order, in two rows. With as many
        slots as channels the first row belongs to keys and the second to values, and a TPU pads nothing.
      format: of the records.
      dtype: of the numbers that they stand for, in which products are computed.
    """

    key: Any
    value: Any
    scales: Any
    format: SealedFormat
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers, `[*A, 2, page, H]`."""
        return *self.key.shape[:-2], 2, self.key.shape[-2], self.key.shape[-1] * 8 // self.format.key_bits

    @property
    def ndim(self) -> int:
        """The number of axes of the numbers."""
        return len(self.shape)


class Scales(NamedTuple):
    """What the codes of a page are multiplied with, and what is added to them."""

    key_step: Float[Array, "*A H"]  # of channels
    key_zero: Float[Array, "*A H"]
    of_key_slot: Float[Array, "*A page"]
    value_step: Float[Array, "*A page"]  # of slots
    value_zero: Float[Array, "*A page"]
    of_value_channel: Float[Array, "*A H"]


Pages = Numbers | Records


# The rule.


def seal(numbers: Float[Array, "*A 2 page H"], format: SealedFormat, dtype: Any = None) -> Records:
    """The records of full pages of keys and values. A page with NaN has NaN. `dtype` is that of the numbers; None: the array's.

    Raises:
      ValueError: heads that the format cannot take.
    """
    check_head_size(numbers.shape[-1], format)
    turned = hadamard.rotate(numbers.astype(jnp.float32))
    key, of_key_slot, key_step, key_zero = codes_of(jnp.swapaxes(turned[..., 0, :, :], -1, -2), format.key_bits)
    value, of_value_channel, value_step, value_zero = codes_of(turned[..., 1, :, :], format.value_bits)
    return Records(
        packed(jnp.swapaxes(key, -1, -2), format.key_bits),
        packed(value, format.value_bits),
        in_two_rows(Scales(key_step, key_zero, of_key_slot, value_step, value_zero, of_value_channel)),
        format,
        np.dtype(numbers.dtype if dtype is None else dtype),
    )


def codes_of(
    tile: Float[Array, "*A X S"], bits: int
) -> tuple[UInt[Array, "*A X S"], Float[Array, "*A S"], Float[Array, "*A X"], Float[Array, "*A X"]]:
    """The codes of tiles, each row by itself, with the scales of columns, and the steps and zero points of rows."""
    of_row, of_column = (jnp.exp(x) for x in balanced(tile))
    even = tile / of_row[..., None] / of_column[..., None, :]
    low, high = even.min(axis=-1), even.max(axis=-1)
    step = jnp.maximum((high - low) / (2**bits - 1), LEAST_STEP)
    codes = jnp.clip(jnp.round((even - low[..., None]) / step[..., None]), 0, 2**bits - 1)
    return codes.astype(jnp.uint8), of_column, of_row * step, of_row * low


def balanced(tile: Float[Array, "*A X S"]) -> tuple[Float[Array, "*A X"], Float[Array, "*A S"]]:
    """The logarithms of the divisors of rows and columns that make their deviations most alike.

    Of the divisors seen, those with the least ratio of the largest deviation to the smallest; a tile whose ratio rises is left.
    """
    of_rows, of_columns = deviations(tile)
    target = jnp.minimum(of_rows.min(axis=-1), of_columns.min(axis=-1))
    target = jnp.clip(target, *TARGETS)[..., None] + 1e-6

    def improve(carry: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], None]:
        rows, columns, best_rows, best_columns, least, is_over = carry
        of_rows, of_columns = deviations(tile / jnp.exp(rows)[..., None] / jnp.exp(columns)[..., None, :])
        largest = jnp.maximum(of_rows.max(axis=-1), of_columns.max(axis=-1))
        ratio = largest / jnp.maximum(jnp.minimum(of_rows.min(axis=-1), of_columns.min(axis=-1)), LEAST_DEVIATION)
        is_over = is_over | (ratio > least * NO_RISE)
        is_best = ~is_over[..., None]
        best_rows, best_columns = jnp.where(is_best, rows, best_rows), jnp.where(is_best, columns, best_columns)
        rows, columns = (
            jnp.where(is_best, jnp.clip(x + jnp.log(jnp.clip(deviation / target, *STEP)), *LOG_SCALES), x)
            for x, deviation in ((rows, of_rows), (columns, of_columns))
        )
        return (rows, columns, best_rows, best_columns, jnp.where(is_over, least, ratio), is_over), None

    rows, columns = jnp.zeros_like(of_rows), jnp.zeros_like(of_columns)
    least, is_over = jnp.full(target.shape[:-1], jnp.inf, jnp.float32), jnp.zeros(target.shape[:-1], bool)
    start: tuple[Any, ...] = rows, columns, rows, columns, least, is_over
    end, _ = jax.lax.scan(improve, start, None, length=ITERATIONS)
    return end[2], end[3]


def deviations(tile: Float[Array, "*A X S"]) -> tuple[Float[Array, "*A X"], Float[Array, "*A S"]]:
    """The standard deviations of rows and of columns."""
    return tile.std(axis=-1), tile.std(axis=-2)


def unsealed(records: Records, dtype: Any = None) -> tuple[Float[Array, "*A page H"], Float[Array, "*A page H"]]:
    """The keys and values that records stand for, in `dtype` or their own."""
    of = scales_of(records)
    key, value = (
        unpacked(x, bits, jnp.float32) for x, bits in zip((records.key, records.value), bits_of(records), strict=True)
    )
    key = (key * of.key_step[..., None, :] + of.key_zero[..., None, :]) * of.of_key_slot[..., None]
    value = (value * of.value_step[..., None] + of.value_zero[..., None]) * of.of_value_channel[..., None, :]
    key, value = (hadamard.rotate(x).astype(records.dtype if dtype is None else dtype) for x in (key, value))
    return key, value


def straight_through(numbers: Float[Array, "*A 2 page H"], format: SealedFormat) -> Float[Array, "*A 2 page H"]:
    """The numbers that sealed pages give back; their gradient is that of the numbers themselves."""
    back = jnp.stack(unsealed(seal(jax.lax.stop_gradient(numbers), format)), axis=-3)
    return numbers + jax.lax.stop_gradient(back - numbers)


# Storage.


def packed(codes: UInt[Array, "*A S H"], bits: int) -> UInt[Array, "*A S bytes"]:
    """Codes, several a byte."""
    parts = jnp.split(codes, 8 // bits, axis=-1)
    return functools.reduce(jnp.bitwise_or, (part << (bits * i) for i, part in enumerate(parts)))


def unpacked(codes: UInt[Array, "*A S bytes"], bits: int, dtype: Any) -> Float[Array, "*A S H"]:
    """The codes as numbers; all of them are exact in bfloat16."""
    parts = [((codes >> (bits * i)) & (2**bits - 1)).astype(dtype) for i in range(8 // bits)]
    return jnp.concatenate(parts, axis=-1)


def bits_of(records: Records) -> tuple[int, int]:
    """The bits of a key's code and of a value's."""
    return records.format.key_bits, records.format.value_bits


def half_bits(x: Float[Array, "*A"]) -> UInt[Array, "*A"]:
    """The bits of the nearest float16: a CPU's scatter would convert an array of float16."""
    return jax.lax.bitcast_convert_type(jnp.clip(x, -MOST_SCALE, MOST_SCALE).astype(jnp.float16), jnp.uint16)


def in_two_rows(scales: Scales) -> UInt[Array, "*A 2 S"]:
    """The bits of scales, as records have them."""
    bits = jnp.concatenate([half_bits(x) for x in scales], axis=-1)
    return bits.reshape(*bits.shape[:-1], 2, -1)


def scales_of(records: Records) -> Scales:
    """The scales of records, as float32."""
    numbers = jax.lax.bitcast_convert_type(records.scales, jnp.float16).astype(jnp.float32)
    flat = numbers.reshape(*numbers.shape[:-2], -1)
    return Scales(*jnp.split(flat, places(*records.shape[-2:])[1:], axis=-1))


def places(page: int, head_size: int) -> list[int]:
    """Where each part of `Scales` begins among the scales of a page.

    >>> places(16, 32)
    [0, 32, 64, 80, 96, 112]
    """
    sizes = head_size, head_size, page, page, page
    return [0, *itertools.accumulate(sizes)]


# Pools of any form.


def zeros(shape: tuple[int, ...], dtype: Any, format: Format | None) -> Pages:
    """The pages of an empty pool `[P, 2, page, H]`: numbers in `dtype`, or codes with scales of zero.

    Raises:
      ValueError: heads or pages that the format cannot take.
    """
    if not isinstance(format, SealedFormat):
        return quantised.zeros(shape, dtype, format)
    check_head_size(shape[-1], format)
    if shape[2] != format.page:
        raise ValueError(f"A pool of {format.name} needs pages of {format.page} slots; got {shape[2]}. Change one of them.")
    arrays: Any = {name: jnp.zeros(*one) for name, one in arrays_of(shape[0], shape[-1], format).items()}
    return Records(**arrays, format=format, dtype=np.dtype(dtype))


def arrays_of(num_pages: int, head_size: int, format: SealedFormat) -> dict[str, tuple[tuple[int, ...], Any]]:
    """The shapes and dtypes of the arrays of so many records."""
    page = format.page
    return {
        "key": ((num_pages, page, head_size * format.key_bits // 8), jnp.uint8),
        "value": ((num_pages, page, head_size * format.value_bits // 8), jnp.uint8),
        "scales": ((num_pages, 2, (head_size + page) * 3 // 2), jnp.uint16),
    }


def poisoned(kv: Pages, page: Any) -> Pages:
    """A pool with NaN in some pages, or in their scales; pages out of its bounds are ignored."""
    if not isinstance(kv, Records):
        return quantised.poisoned(kv, page)
    return dataclasses.replace(kv, scales=kv.scales.at[page].set(NAN_BITS, mode="drop"))


def page_bytes(head_size: int, dtype: Any, format: Format | None, page: int) -> int:
    """Bytes of the keys and values of a page.

    Raises:
      ValueError: heads that the format cannot take.

    >>> [page_bytes(128, "bfloat16", format, 128) for format in (None, *SEALED.values())]
    [65536, 13824, 17920]
    """
    if not isinstance(format, SealedFormat):
        return 2 * page * quantised.vector_bytes(head_size, dtype, format)
    check_head_size(head_size, format)
    codes = page * head_size * (format.key_bits + format.value_bits) // 8
    return codes + 2 * 3 * (page + head_size)


def check_head_size(head_size: int, format: SealedFormat) -> None:
    """Refuses heads that cannot be rotated, or whose codes do not fill bytes.

    Raises:
      ValueError: such a head size.
    """
    if head_size < 16 or not hadamard.is_power_of_two(head_size):
        raise ValueError(
            f'kv_dtype="{format.name}" rotates heads of a power of two of channels, so the head size must be 16, 32, 64, 128 '
            f'and so on; got {head_size}. Use kv_dtype="int8" or "fp8", which take heads of any size.'
        )


def check_page(format: SealedFormat) -> None:
    """Refuses pages that are too small for scales of their own, or larger than a chunk of decode steps leaves time to seal.

    Raises:
      ValueError: such a page size.
    """
    if format.page not in PAGES:
        works = ", ".join(map(str, PAGES))
        raise ValueError(
            f'kv_dtype="{format.name}" has pages of {works} slots; got page_size={format.page}. Choose one of them.'
        )
