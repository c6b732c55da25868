"""Blocks of weights as GGUF files have them: codes of a few bits beside their scales, and the float32 numbers that they mean.

A matrix in blocks is the tensor of a file as it lies: `Blocks`. The types and what they mean
are llama.cpp's (ggml-quants.c); the numbers are those of `gguf.dequantize`, bit by bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class BlockKind(NamedTuple):
    """A type of blocks."""

    kind: int  # its number in GGUF files
    weights: int  # of a block
    bytes: int  # of a block
    decode: Callable[[Any], Any]  # [*B, bytes] -> [*B, weights]
    scales: tuple[int, ...] = (0,)  # the bytes at which a block has a float16 that must be finite


def half(block: Any, at: int) -> Any:
    """The float16 at a byte of each block, in float32, with an axis of one."""
    bits = block[..., at : at + 2].astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(bits[..., :1] | bits[..., 1:] << 8, jnp.float16).astype(jnp.float32)


def nibbles(codes: Any) -> Any:
    """The low four bits of all bytes, and then the high ones."""
    return jnp.concatenate([codes & 15, codes >> 4], axis=-1)


def fifths(block: Any, at: int) -> Any:
    """The fifth bits of 32 codes, in four bytes from `at` on, as 0 or 16."""
    bits = block[..., at : at + 4, None] >> jnp.arange(8, dtype=jnp.uint8) & 1
    return bits.reshape(*bits.shape[:-2], 32) << 4


def floats(codes: Any) -> Any:
    """Codes as float32, exactly."""
    return codes.astype(jnp.float32)


def of_q4_0(block: Any) -> Any:
    """`scale * (code - 8)`."""
    return half(block, 0) * (floats(nibbles(block[..., 2:])) - 8)


def of_q4_1(block: Any) -> Any:
    """`scale * code + low`."""
    return half(block, 0) * floats(nibbles(block[..., 4:])) + half(block, 2)


def of_q5_0(block: Any) -> Any:
    """`scale * (code - 16)`."""
    return half(block, 0) * (floats(nibbles(block[..., 6:]) | fifths(block, 2)) - 16)


def of_q5_1(block: Any) -> Any:
    """`scale * code + low`."""
    return half(block, 0) * floats(nibbles(block[..., 8:]) | fifths(block, 4)) + half(block, 2)


def of_q8_0(block: Any) -> Any:
    """`scale * code`."""
    return half(block, 0) * floats(jax.lax.bitcast_convert_type(block[..., 2:], jnp.int8))


def sub_scales(block: Any) -> tuple[Any, Any]:
    """The scale and the offset of each 32 weights of a block of Q4_K or Q5_K, which has eight of each in six bits."""
    first, second, third = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scale = jnp.concatenate([first & 63, (third & 15) | first >> 6 << 4], axis=-1)
    low = jnp.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return (half(block, 0) * floats(scale))[..., None], (half(block, 2) * floats(low))[..., None]


def of_q4_k(block: Any) -> Any:
    """`scale * code - low`, with the scales of 32 weights."""
    scale, low = sub_scales(block)
    codes = nibbles(block[..., 16:].reshape(*block.shape[:-1], 4, 32)).reshape(*block.shape[:-1], 8, 32)
    return (scale * floats(codes) - low).reshape(*block.shape[:-1], 256)


def of_q5_k(block: Any) -> Any:
    """`scale * code - low`, with the scales of 32 weights, of which bit i of 32 bytes has the fifth bits."""
    scale, low = sub_scales(block)
    codes = nibbles(block[..., 48:].reshape(*block.shape[:-1], 4, 32)).reshape(*block.shape[:-1], 8, 32)
    fifth = (block[..., None, 16:48] >> jnp.arange(8, dtype=jnp.uint8)[:, None] & 1) << 4
    return (scale * floats(codes | fifth) - low).reshape(*block.shape[:-1], 256)


def of_q6_k(block: Any) -> Any:
    """`scale * (code - 32)`, with a scale for 16 weights; a code has 4 bits in half a byte and 2 in a quarter of another."""
    lead = block.shape[:-1]
    low = nibbles(block[..., :128].reshape(*lead, 2, 64)).reshape(*lead, 2, 4, 32)
    high = block[..., 128:192].reshape(*lead, 2, 1, 32) >> jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None] & 3
    codes = (floats(low | high << 4) - 32).reshape(*lead, 16, 16)
    scale = half(block, 208) * floats(jax.lax.bitcast_convert_type(block[..., 192:208], jnp.int8))
    return (scale[..., None] * codes).reshape(*lead, 256)


BLOCKS = {  # by the names of llama.cpp
    "Q4_0": BlockKind(2, 32, 18, of_q4_0),
    "Q4_1": BlockKind(3, 32, 20, of_q4_1, (0, 2)),
    "Q5_0": BlockKind(6, 32, 22, of_q5_0),
    "Q5_1": BlockKind(7, 32, 24, of_q5_1, (0, 2)),
    "Q8_0": BlockKind(8, 32, 34, of_q8_0),
    "Q4_K": BlockKind(12, 256, 144, of_q4_k, (0, 2)),
    "Q5_K": BlockKind(13, 256, 176, of_q5_k, (0, 2)),
    "Q6_K": BlockKind(14, 256, 210, of_q6_k, (208,)),
}


def decoded(rows: Any, kind: str) -> Float[Array, "*B weights"]:
    """The float32 numbers of rows of blocks, uint8 [*B, bytes of a row]."""
    numbers = BLOCKS[kind].decode(rows.reshape(*rows.shape[:-1], -1, BLOCKS[kind].bytes))
    return numbers.reshape(*rows.shape[:-1], -1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("data",), meta_fields=("kind", "dtype", "is_transposed"))
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A matrix in blocks.

    Attributes:
      data: uint8 [F, bytes of a row]; a row has the weights of one output, or of one token of an embedding.
      kind: a key of `BLOCKS`.
      dtype: of the numbers that a product with it gives, and of the rows of an embedding; its own are float32.
      is_transposed: whether the matrix is [D, F], as a projection is, so that the rows of blocks are its columns.
    """

    data: Any
    kind: str
    dtype: Any = np.dtype(np.float32)  # noqa: RUF009
    is_transposed: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        rows, num_bytes = self.data.shape
        weights = num_bytes // BLOCKS[self.kind].bytes * BLOCKS[self.kind].weights
        return (weights, rows) if self.is_transposed else (rows, weights)

    @property
    def ndim(self) -> int:
        """The axes of the matrix."""
        return 2

    @property
    def size(self) -> int:
        """Numbers of the matrix."""
        return math.prod(self.shape)

    @property
    def sharding(self) -> Any:
        """Where it is."""
        return self.data.sharding

    def devices(self) -> Any:
        """The devices that it is on."""
        return self.data.devices()

    @property
    def dequantised(self) -> Any:
        """The matrix in float32."""
        numbers = decoded(jnp.asarray(self.data), self.kind)
        return numbers.T if self.is_transposed else numbers

    def first_rows(self, count: int) -> Any:
        """In float32, of a matrix with at least `count` columns: these of its first row; else the first rows of blocks."""
        numbers = decoded(self.data[:count, : BLOCKS[self.kind].bytes], self.kind)
        return numbers.T if self.is_transposed else decoded(self.data[:1], self.kind)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The numbers as an array of NumPy."""
        return np.asarray(self.dequantised, dtype)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values in these fields."""
        return dataclasses.replace(self, **changes)
