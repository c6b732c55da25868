"""Quantised pages: codes of keys and values, with scales for each slot's key and value.

Scales belong to their slot: they move with the codes when pages are copied and slots are taken, and nothing is quantised
twice. No page is ever stored dequantised.

Codes of 8 bits have one scale for a vector. Kernels multiply products with codes by scales: of keys where a slot's log-weight
is added, of values on the probabilities. Codes of 4 bits have a scale for each group of channels, and are those of vectors
that Hadamard's matrix has rotated (`pallas_kernels.hadamard`). Attention rotates queries, reads the vectors as they are, and
turns its output back; whoever else reads vectors gets them turned back by `dequantise`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt

from pallas_kernels import hadamard
from pallas_kernels.choice import why_no_fp8

SMALLEST = 2.0**-60  # the largest absolute value of a vector counts as at least this, so that a vector of zeros has a scale
LEAST_SCALE, MOST_SCALE = 2.0**-14, 65504.0  # of a group: the smallest normal and the largest number of float16
NAN_BITS = 0x7E00  # NaN in float16


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Format:
    """How a number becomes a code; hashable, and in a pytree a node without leaves.

    Attributes:
      name: as users give it.
      stored: the dtype of the codes' array. Floats of 8 bits are stored as their bits: a CPU's scatter would convert the pool.
      meant: the dtype of a code.
      most: the code of the largest absolute value of a vector, or of a group.
      group: channels with a scale of their own, of vectors that are rotated, with two codes a byte; None: one scale for all.
    """

    name: str
    stored: str
    meant: str
    most: float
    group: int | None = None


FORMATS = {
    format.name: format
    for format in (
        Format("int8", "int8", "int8", 127.0),
        Format("fp8", "uint8", "float8_e4m3fn", 448.0),
        Format("int4", "uint8", "int4", 7.0, group=32),
    )
}


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale"), meta_fields=("format", "dtype"))
@dataclasses.dataclass(frozen=True)
class Quantised:
    """Vectors of H numbers as codes, and their scales.

    Attributes:
      codes: `[*A, H]`, of the format's dtype; with groups `[*A, H / 2]`, where byte c has the code of channel c in its low
        half and that of channel c + H / 2 in its high half, each plus 8.
      scale: `[*A]` float32; with groups `[*A, H / group]` uint16, the bits of float16. A number is its code times the scale of
        its vector or group.
      format: of the codes.
      dtype: of the numbers that these stand for, in which products are computed.
    """

    codes: Any
    scale: Any
    format: Format
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return self.codes.shape if self.format.group is None else (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def ndim(self) -> int:
        """The number of axes of the numbers."""
        return self.codes.ndim


Numbers = Float[Array, "..."] | Quantised


def quantise(x: Float[Array, "*A H"], format: Format, dtype: Any = None) -> Quantised:
    """Symmetric codes of vectors, or of groups of their rotated channels, each scaled by its largest absolute value.

    Codes are rounded to the nearest (ties to even). A vector with NaN has the scale NaN. `dtype` is that of the numbers; None
    is the array's.

    Raises:
      ValueError: heads that the format cannot take.
    """
    check_head_size(x.shape[-1], format)
    if format.group is None:
        codes, scale = codes_of(x.astype(jnp.float32), format)
    else:
        codes, scale = codes_of_groups(hadamard.rotate(x.astype(jnp.float32)), format)
    return Quantised(codes, scale, format, np.dtype(x.dtype if dtype is None else dtype))


def codes_of(x: Float[Array, "*A H"], format: Format) -> tuple[Array, Float[Array, "*A"]]:
    """The codes of float32 vectors as they are stored, and their scales."""
    codes, scale = rounded(x, format)
    codes = codes.astype(format.meant)
    if format.stored != format.meant:
        codes = jax.lax.bitcast_convert_type(codes, jnp.dtype(format.stored))
    return codes, scale


def rounded(x: Float[Array, "*A H"], format: Format) -> tuple[Float[Array, "*A H"], Float[Array, "*A"]]:
    """The codes of float32 vectors as float32, which a conversion to another float has yet to round, and their scales."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), SMALLEST) * (1 / format.most)  # XLA would turn a division into this
    codes = jnp.clip(x / scale[..., None], -format.most, format.most)
    return nearest(codes) if format.meant == "int8" else codes, scale


def codes_of_groups(x: Float[Array, "*A H"], format: Format) -> tuple[UInt[Array, "*A half"], UInt[Array, "*A groups"]]:
    """The codes of float32 vectors, two a byte, and the bits of their groups' scales.

    A group's scale is a float16 of full precision: numbers below half of the smallest one are zero.
    """
    group_AGC = x.reshape(*x.shape[:-1], -1, format.group)
    most = jnp.max(jnp.abs(group_AGC), axis=-1)
    scale = half_scales(most, format)
    codes = nearest(jnp.clip(group_AGC / scale.astype(jnp.float32)[..., None], -format.most, format.most))
    low, high = jnp.split((codes.reshape(x.shape) + 8).astype(jnp.uint8), 2, axis=-1)
    return low | (high << 4), jax.lax.bitcast_convert_type(scale, jnp.uint16)


def half_scales(most: Float[Array, "..."], format: Format) -> Float[Array, "..."]:
    """The float16 scales of groups with these largest absolute values; NaN where they are not finite."""
    scale = jnp.clip(most * (1 / format.most), LEAST_SCALE, MOST_SCALE)
    return jnp.where(most < jnp.inf, scale, jnp.nan).astype(jnp.float16)


def numbers_of_groups(x: Quantised, dtype: Any) -> Float[Array, "*A H"]:
    """The rotated vectors that codes and scales of groups stand for."""
    scale = jax.lax.bitcast_convert_type(x.scale, jnp.float16).astype(jnp.float32)
    group = numbers_of(x.codes, x.format, jnp.float32).reshape(*scale.shape, -1)
    return (group * scale[..., None]).reshape(x.shape).astype(dtype)


def nearest(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest integers, ties to even, of operations that all backends have: Triton's has no rounding."""
    low = jnp.floor(x)
    rest, is_odd = x - low, low - 2 * jnp.floor(low / 2) == 1
    return jnp.where((rest > 0.5) | ((rest == 0.5) & is_odd), low + 1, low)


def zeros(shape: tuple[int, ...], dtype: Any, format: Format | None) -> Numbers:
    """Vectors of zeros in `dtype`, or of a format with the scale zero."""
    if format is None:
        return jnp.zeros(shape, dtype)
    check_head_size(shape[-1], format)
    if format.group is None:
        codes, scale = jnp.zeros(shape, format.stored), jnp.zeros(shape[:-1], jnp.float32)
    else:
        codes = jnp.zeros((*shape[:-1], shape[-1] // 2), format.stored)
        scale = jnp.zeros((*shape[:-1], shape[-1] // format.group), jnp.uint16)
    return Quantised(codes, scale, format, np.dtype(dtype))


def dequantise(x: Numbers, dtype: Any = None) -> Float[Array, "..."]:
    """The numbers of quantised vectors, in `dtype` or their own; an array of floats as it is."""
    if not isinstance(x, Quantised):
        return x if dtype is None else x.astype(dtype)
    if x.format.group is not None:
        return hadamard.rotate(numbers_of_groups(x, jnp.float32)).astype(x.dtype if dtype is None else dtype)
    return (numbers_of(x.codes, x.format, jnp.float32) * x.scale[..., None]).astype(x.dtype if dtype is None else dtype)


def numbers_of(codes: Array, format: Format, dtype: Any) -> Float[Array, "..."]:
    """The numbers that codes stand for, without their scale; all of them are exact in bfloat16 too."""
    if format.group is not None:
        both = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
        return both.astype(dtype) - jnp.asarray(8, dtype)
    if format.stored != format.meant:
        codes = jax.lax.bitcast_convert_type(codes, jnp.dtype(format.meant))
    return codes.astype(dtype)


def factors(x: Numbers) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
    """Vectors as the products of a kernel take them, and what multiplies the products: floats and None, or codes and scales.

    Codes with groups are multiplied by their scales here, and are still rotated.
    """
    if not isinstance(x, Quantised):
        return x, None
    return (numbers_of_groups(x, x.dtype), None) if x.format.group else (numbers_of(x.codes, x.format, x.dtype), x.scale)


def why_no_codes(kv: Any) -> str | None:
    """Why a Triton kernel cannot convert the codes of a pool, if it has any; None when it can."""
    return why_no_fp8() if isinstance(kv, Quantised) and kv.format.name == "fp8" else None


def is_rotated(x: Any) -> bool:
    """Whether `factors` of these vectors are rotated, so that queries have to be too, and what is read turned back."""
    return isinstance(x, Quantised) and x.format.group is not None


def stored(kv: Any) -> Any:
    """What a pool, or its shapes, stores of vectors: floats, or codes."""
    return kv.codes if isinstance(kv, Quantised) else kv


def scales_of(kv: Any) -> list[Any]:
    """What a pool, or its shapes, stores beside them: nothing, or scales."""
    return [kv.scale] if isinstance(kv, Quantised) else []


def like(kv: Numbers, x: Float[Array, "*A H"]) -> Numbers:
    """Vectors in the form in which a pool stores them."""
    return quantise(x, kv.format, kv.dtype) if isinstance(kv, Quantised) else x.astype(kv.dtype)


def take(kv: Any, index: tuple[Any, ...]) -> Any:
    """The content of a pool, or of anything of its pages, at an index of the leading axes, all within bounds."""
    return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), kv)


def put(kv: Any, index: tuple[Any, ...], new: Any) -> Any:
    """A pool, or anything of its pages, with other content at an index of its leading axes; `like` gives vectors its form.

    All places must be within bounds, and none may come twice. Page 0 is the exception: it may come often, and nothing is
    written there. Where a place may come twice, XLA on a GPU writes numbers of 16 bits by compare-and-swap, so that many writes
    to one place, such as those of masked tokens, wait for each other.
    """
    page, *others = index

    def write(x: Array, part: Array) -> Array:
        where = jnp.where(page == 0, x.shape[0], page), *others
        return x.at[where].set(part, mode="drop", unique_indices=True)

    return jax.tree.map(write, kv, new)


def poisoned(kv: Numbers, page: Any) -> Numbers:
    """A pool with NaN in some pages, or in their scales; pages out of its bounds are ignored."""

    def fill(x: Array) -> Array:
        return x.at[page].set(jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else NAN_BITS, mode="drop")

    return dataclasses.replace(kv, scale=fill(kv.scale)) if isinstance(kv, Quantised) else fill(kv)


def straight_through(x: Float[Array, "*A H"], format: Format) -> Float[Array, "*A H"]:
    """The numbers that a pool of this format gives back; their gradient is that of the numbers themselves."""
    return x + jax.lax.stop_gradient(dequantise(quantise(x, format)) - x)


def vector_bytes(head_size: int, dtype: Any, format: Format | None) -> int:
    """Bytes of one vector in a pool: of the numbers, or of codes and scales.

    Raises:
      ValueError: heads that the format cannot take.

    >>> [vector_bytes(128, "bfloat16", format) for format in (None, FORMATS["int8"], FORMATS["int4"])]
    [256, 132, 72]
    """
    if format is None:
        return head_size * jnp.dtype(dtype).itemsize
    check_head_size(head_size, format)
    return head_size + 4 if format.group is None else head_size // 2 + head_size // format.group * 2


def check_head_size(head_size: int, format: Format) -> None:
    """Refuses heads that a format with groups cannot rotate, or cannot divide into groups.

    Raises:
      ValueError: such a head size.
    """
    if format.group is None or (hadamard.is_power_of_two(head_size) and head_size % format.group == 0):
        return
    works = ", ".join(str(format.group << i) for i in range(4))
    rule = "rotates heads of a power of two of channels" if head_size % format.group == 0 else f"has groups of {format.group}"
    raise ValueError(
        f'kv_dtype="{format.name}" {rule}, so the head size must be {works} and so on; got {head_size}. '
        'Use kv_dtype="int8" or "fp8", which take heads of any size.'
    )
