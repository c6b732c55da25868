"""Weights in MXFP4 (OCP Microscaling Formats specification 1.0), dequantised as they are read.

A tensor `name` is stored as `name_blocks`, `[*rows, blocks, 16]` bytes of two numbers each, the first in the low four bits, and
`name_scales`, `[*rows, blocks]`, a byte for each block of 32 numbers. A number is E2M1: a sign, two bits of exponent with bias
1 and one bit of mantissa. A scale is E8M0: a power of two with bias 127, where 255 is no number. Their products are exact in
bfloat16. The last two axes of the tensor are swapped on disk, so that blocks run along the inner axis of a product.
"""

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from jkv.checkpoints.weight_files import Stored

MXFP4 = "MXFP4"  # in place of a dtype of safetensors
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
E2M1 = np.array(  # by their four bits
    [
        sign * ((mantissa / 2) if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))
        for sign in (1.0, -1.0)
        for exponent in range(4)
        for mantissa in range(2)
    ],
    np.float32,
)


def dequantised(
    blocks: UInt8[np.ndarray, "*rows blocks 16"], scales: UInt8[np.ndarray, "*rows blocks"]
) -> Float[np.ndarray, "*rows columns"]:
    """The numbers, in bfloat16; NaN where a scale is none."""
    exponent = np.where(scales == 255, 0, scales.astype(np.int32) - 127)
    scale = np.where(scales == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponent))
    number = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], -1)
    with np.errstate(over="ignore"):  # infinity, which the reader of the tensor refuses
        return (number * scale[..., None]).astype(jnp.bfloat16).reshape(*blocks.shape[:-2], -1)


def with_mxfp4(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a checkpoint, with one for each pair of blocks and scales.

    Raises:
      ValueError: blocks without scales, or either of another shape or dtype.
    """
    found = dict(stored)
    for name in [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]:
        blocks, scales = found.pop(name + BLOCKS), found.pop(name + SCALES, None)
        where = f"{blocks.file}: {name}{BLOCKS}"
        if scales is None:
            raise ValueError(f"{where} must have its {SCALES.removeprefix('_')}; missing. Download the checkpoint again.")
        if blocks.dtype != "U8" or scales.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[-1] != BLOCK_BYTES:
            got = f"{blocks.dtype} of shape {blocks.shape} with scales of {scales.dtype}"
            raise ValueError(f"{where} must be bytes, in blocks of {BLOCK_BYTES}, got {got}. Download the checkpoint again.")
        if scales.shape != blocks.shape[:-1]:
            raise ValueError(
                f"{where} must have a scale for each block, {blocks.shape[:-1]}, got {scales.shape}. Download the checkpoint "
                "again."
            )
        *rows, num_blocks, _ = blocks.shape
        shape = *rows[:-1], num_blocks * 2 * BLOCK_BYTES, rows[-1]
        found[name] = Stored(blocks.file, shape, MXFP4)
    return found


def read_mxfp4(read: Callable[[str], np.ndarray], name: str) -> np.ndarray:
    """A tensor in bfloat16, dequantised matrix by matrix; `read` gives the blocks and the scales by their names."""
    blocks, scales = read(name + BLOCKS), read(name + SCALES)
    *lead, rows, num_blocks, _ = blocks.shape
    out = np.empty((math.prod(lead), rows, num_blocks * 2 * BLOCK_BYTES), jnp.bfloat16)
    pairs = blocks.reshape(len(out), rows, num_blocks, -1), scales.reshape(len(out), rows, num_blocks)
    for target, *pair in zip(out, *pairs, strict=True):
        target[...] = dequantised(*pair)
    return np.swapaxes(out.reshape(*lead, *out.shape[1:]), -1, -2)
