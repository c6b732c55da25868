"""Weights in FP8 (float8_e4m3fn) with scales, as DeepSeek, Qwen and compressed-tensors store them, read as numbers.

A matrix has one scale, one for each row, or one for each block of 128 by 128 numbers. Products are computed in float32, and
kept in the dtype of the model, or in 8 bits with scales of jkv's own (`weight_dtype` of `jkv.load`). Scales of activations are
not read: jkv computes with floats.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jkv.checkpoints.checkpoint_tensors import DTYPES, FP8, Stored
from jkv.checkpoints.json_files import shown
from jkv.errors import refused

F8 = "F8_E4M3"  # in safetensors headers
WEIGHT = ".weight"
SCALES = ("_scale_inv", "_scale")  # after the name of a matrix, or of the tensor of all experts of a layer; both multiply
UNREAD = (".input_scale", ".activation_scale", ".input_scale_inv")
BLOCK = 128  # of rows and columns, where config.json does not say it


def fp8_block(quantised: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block, of a `quantization_config` of weights in FP8; None for any other."""
    method, block = quantised.get("quant_method"), quantised.get("weight_block_size")
    if method == "compressed-tensors":
        groups = quantised.get("config_groups")
        found = groups.values() if isinstance(groups, dict) else ()
        weights: list[Any] = [one.get("weights") if isinstance(one, dict) else None for one in found]
        if not weights or not all(isinstance(one, dict) for one in weights):
            return None
        if {(one.get("type"), one.get("num_bits")) for one in weights} != {("float", 8)}:
            return None
        block = next((one["block_structure"] for one in weights if one.get("block_structure")), None)
    elif method != "fp8":
        return None
    if block is None:
        return BLOCK, BLOCK
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    return (block[0], block[1]) if is_pair else None


def with_fp8(stored: Mapping[str, Stored], block: tuple[int, int]) -> dict[str, Stored]:
    """The tensors of a checkpoint, with one for each matrix in FP8 and its scales.

    Raises:
      ValueError: a matrix without scales, or scales of another shape or dtype.
    """
    found = {name: tensor for name, tensor in stored.items() if not name.endswith(UNREAD)}
    for name, tensor in stored.items():
        if tensor.dtype != F8 or not (name.endswith(WEIGHT) or len(tensor.shape) == 3):
            continue
        scale = scale_name(name, stored)
        if scale is None:
            names = " or ".join(name + ending for ending in SCALES)
            raise refused(f"{tensor.file}: {name} in FP8 must have {names}; missing. Download it again.", **{name: "missing"})
        shape, dtype = stored[scale].shape, stored[scale].dtype
        if dtype not in DTYPES or shape not in scale_shapes(tensor.shape, block):
            raise refused(
                f"{tensor.file}: {scale} must be floats, one for the matrix, for each row, or for each block of {block}, got "
                f"{dtype} of shape {shown(shape)}. Choose another checkpoint of this model.",
                **{scale: "does_not_fit"},
            )
        del found[scale]
        found[name] = tensor._replace(dtype=FP8)
    return found


def scale_name(weight: str, names: Mapping[str, Any]) -> str | None:
    """The tensor with the scales of a matrix, or of all experts of a layer."""
    return next((weight + ending for ending in SCALES if weight + ending in names), None)


def scale_shapes(shape: tuple[int, ...], block: tuple[int, int]) -> set[tuple[int, ...]]:
    """The shapes that the scales of a matrix may have; for several matrices, the first axis is their number."""
    if len(shape) not in (2, 3):
        return set()
    *lead, rows, columns = shape
    blocks = -(-rows // block[0]), -(-columns // block[1])
    own: set[tuple[int, ...]] = {(), (rows,), (rows, 1), blocks} | (set() if lead else {(1,)})
    return {(*lead, *one) for one in own | {(1, 1)}}


def read_fp8(
    read: Callable[[str], np.ndarray], weight: str, names: Mapping[str, Any], block: tuple[int, int]
) -> Float[np.ndarray, "*experts rows columns"]:
    """A matrix, or the matrices of all experts of a layer, in float32; `read` gets codes and scales by name."""
    codes, scale = read(weight), read(scale_name(weight, names) or "").astype(np.float32)
    *lead, rows, columns = codes.shape
    own = scale.shape[len(lead) :]
    if own == (rows,) and rows > 1:
        scale = scale[..., None]
    elif own in ((), (1,), (1, 1)):
        scale = scale.reshape(*lead, 1, 1)
    elif own != (rows, 1):
        scale = np.repeat(np.repeat(scale, block[0], -2), block[1], -1)[..., :rows, :columns]
    return codes.astype(np.float32) * scale


def read_codes(tensor: Stored) -> np.ndarray:
    """The numbers of a matrix in FP8, without its scales; safetensors has no such dtype for NumPy."""
    begin, end = tensor.span
    with open(tensor.file, "rb") as stream:
        stream.seek(begin)
        return np.frombuffer(stream.read(end - begin), jnp.float8_e4m3fn).reshape(tensor.shape)
