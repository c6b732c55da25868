"""Quantised pages: 8-bit codes of keys and values, with one scale for each slot's key and one for its value.

A scale belongs to its slot: it moves with the codes when pages are copied and slots are taken, and nothing is quantised
twice. Kernels multiply products with codes by scales: of keys where a slot's log-weight is added, of values on the
probabilities. No page is ever stored dequantised.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

SMALLEST = 2.0**-60  # the largest absolute value of a vector counts as at least this, so that a vector of zeros has a scale


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Format:
    """How a number becomes a code; hashable, and in a pytree a node without leaves.

    Attributes:
      name: as users give it.
      stored: the dtype of the codes' array. Floats of 8 bits are stored as their bits: a CPU's scatter would convert the pool.
      meant: the dtype of a code.
      most: the code of a vector's largest absolute value.
    """

    name: str
    stored: str
    meant: str
    most: float


FORMATS = {
    format.name: format for format in (Format("int8", "int8", "int8", 127.0), Format("fp8", "uint8", "float8_e4m3fn", 448.0))
}


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale"), meta_fields=("format", "dtype"))
@dataclasses.dataclass(frozen=True)
class Quantised:
    """Vectors of H numbers as codes, and their scales.

    Attributes:
      codes: `[*A, H]`, of the format's dtype.
      scale: `[*A]` float32; a number is its code times the scale of its vector.
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
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the numbers."""
        return self.codes.ndim


Numbers = Float[Array, "..."] | Quantised


def quantise(x: Float[Array, "*A H"], format: Format, dtype: Any = None) -> Quantised:
    """Symmetric codes of vectors, each scaled by its largest absolute value.

    Codes are rounded to the nearest (ties to even). A vector with NaN has the scale NaN. `dtype` is that of the numbers; None
    is the array's.
    """
    codes, scale = codes_of(x.astype(jnp.float32), format)
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


def nearest(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest integers, ties to even, of operations that all backends have: Triton's has no rounding."""
    low = jnp.floor(x)
    rest, is_odd = x - low, low - 2 * jnp.floor(low / 2) == 1
    return jnp.where((rest > 0.5) | ((rest == 0.5) & is_odd), low + 1, low)


def zeros(shape: tuple[int, ...], dtype: Any, format: Format | None) -> Numbers:
    """Vectors of zeros in `dtype`, or of a format with the scale zero."""
    if format is None:
        return jnp.zeros(shape, dtype)
    return Quantised(jnp.zeros(shape, format.stored), jnp.zeros(shape[:-1], jnp.float32), format, np.dtype(dtype))


def dequantise(x: Numbers, dtype: Any = None) -> Float[Array, "..."]:
    """The numbers of quantised vectors, in `dtype` or their own; an array of floats as it is."""
    if not isinstance(x, Quantised):
        return x if dtype is None else x.astype(dtype)
    return (numbers_of(x.codes, x.format, jnp.float32) * x.scale[..., None]).astype(x.dtype if dtype is None else dtype)


def numbers_of(codes: Array, format: Format, dtype: Any) -> Float[Array, "..."]:
    """The numbers that codes stand for, without their scale; all of them are exact in bfloat16 too."""
    if format.stored != format.meant:
        codes = jax.lax.bitcast_convert_type(codes, jnp.dtype(format.meant))
    return codes.astype(dtype)


def factors(x: Numbers) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
    """Vectors as the products of a kernel take them, and what multiplies the products: floats and None, or codes and scales."""
    return (numbers_of(x.codes, x.format, x.dtype), x.scale) if isinstance(x, Quantised) else (x, None)


def stored(kv: Any) -> Any:
    """What a pool, or its shapes, stores of vectors: floats, or codes."""
    return kv.codes if isinstance(kv, Quantised) else kv


def scales_of(kv: Any) -> list[Any]:
    """What a pool, or its shapes, stores beside them: nothing, or scales."""
    return [kv.scale] if isinstance(kv, Quantised) else []


def like(kv: Numbers, x: Float[Array, "*A H"]) -> Numbers:
    """Vectors in the form in which a pool stores them."""
    return quantise(x, kv.format, kv.dtype) if isinstance(kv, Quantised) else x.astype(kv.dtype)


def take(kv: Numbers, index: tuple[Any, ...]) -> Numbers:
    """The vectors of a pool at an index of its leading axes, all within bounds."""
    return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), kv)


def put(kv: Numbers, index: tuple[Any, ...], new: Numbers) -> Numbers:
    """The pool with other vectors at an index of its leading axes, all within bounds; `like` gives them the pool's form."""
    return jax.tree.map(lambda x, part: x.at[index].set(part, mode="promise_in_bounds"), kv, new)


def poisoned(kv: Numbers, page: Any) -> Numbers:
    """A pool with NaN in some pages, or in their scales; pages out of its bounds are ignored."""

    def fill(x: Array) -> Array:
        return x.at[page].set(jnp.nan, mode="drop") if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(fill, kv)


def straight_through(x: Float[Array, "*A H"], format: Format) -> Float[Array, "*A H"]:
    """The numbers that a pool of this format gives back; their gradient is that of the numbers themselves."""
    return x + jax.lax.stop_gradient(dequantise(quantise(x, format)) - x)


def vector_bytes(head_size: int, dtype: Any, format: Format | None) -> int:
    """Bytes of one vector in a pool: of the numbers, or of codes and a scale.

    >>> vector_bytes(128, "bfloat16", None), vector_bytes(128, "bfloat16", FORMATS["int8"])
    (256, 132)
    """
    return head_size * jnp.dtype(dtype).itemsize if format is None else head_size + 4
