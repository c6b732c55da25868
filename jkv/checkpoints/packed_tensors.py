"""Weights in packed integers of 4 or 8 bits, as GPTQ, AWQ and compressed-tensors store them, read as numbers.

Each int32 has the codes of several weights. A weight is (code - zero point) * scale, with a scale and a zero point for each
group of inputs of an output channel. Products are computed in float32, and kept in the dtype of the model, or in 8 bits with
scales of jkv's own (`weight_dtype` of `jkv.load`).

| method | codes | packed along | zero points | groups of inputs |
|---|---|---|---|---|
| GPTQ (arXiv 2210.17323) | `qweight [in, out]` | in | `qzeros`, less 1 in the first format | `g_idx`, or in order |
| AWQ (arXiv 2306.00978) | `qweight [in, out]` | out, as 0 2 4 6 1 3 5 7 | `qzeros` | in order |
| compressed-tensors | `weight_packed [out, in]` | in | `weight_zero_point`, or the middle | `weight_g_idx`, or in order |
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from jkv.checkpoints.checkpoint_tensors import DTYPES, PACKED, Stored
from jkv.checkpoints.json_files import CORRECT, OBJECT, TEXT, Rule, check_fields, integer, nullable, shown
from jkv.errors import refused

WORD = 32  # bits of an int32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the codes of an int32, where the channels 0 2 4 6 1 3 5 7 follow each other
GROUP = integer(-1, 1 << 16)
BITS = Rule("4 or 8", lambda value: type(value) is int and value in (4, 8))


def only(*values: Any) -> Rule:
    """The rule of a field that has one of these values."""
    return Rule(" or ".join(map(shown, values)), lambda given: any(type(given) is type(one) and given == one for one in values))


NOTHING = Rule("empty", lambda value: not value)
RULES: Mapping[str, Mapping[str, Rule]] = {  # of quantization_config, by its quant_method
    "gptq": {"bits": BITS, "group_size": GROUP, "checkpoint_format": only("gptq", "gptq_v2"), "dynamic": NOTHING},
    "awq": {"bits": only(4), "group_size": GROUP, "version": only("gemm", "GEMM"), "zero_point": only(True)},
    "compressed-tensors": {"format": only("pack-quantized"), "config_groups": OBJECT},
}
WEIGHTS = {  # of compressed-tensors, in a group of config_groups
    "num_bits": BITS,
    "type": only("int"),
    "strategy": only("group", "channel", "tensor"),
    "group_size": nullable(GROUP),
    "dynamic": nullable(only(False)),
}
NEEDED = {"gptq": ("bits", "group_size"), "awq": ("bits", "group_size"), "compressed-tensors": ("format", "config_groups")}


class Packing(NamedTuple):
    """How the weights of a checkpoint are packed."""

    method: str  # quant_method
    bits: int  # of a code
    group: int  # inputs that have a scale together; -1 is all
    zero_offset: int = 0  # of the zero points that are stored

    @property
    def codes(self) -> int:
        """The codes in an int32."""
        return WORD // self.bits

    @property
    def names(self) -> tuple[str, str, str, str]:
        """The endings of the tensors of a matrix: codes, scales, zero points and groups."""
        if self.method == "compressed-tensors":
            return ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx"
        return ".qweight", ".scales", ".qzeros", ".g_idx"


def packing_of(quantised: Mapping[str, Any], where: str) -> Packing | None:
    """How the weights of a checkpoint with this `quantization_config` are packed; None for another method.

    Raises:
      ValueError: a setting that is not supported.
    """
    method = str(quantised.get("quant_method"))
    is_int = method == "compressed-tensors" and quantised.get("format") not in ("float-quantized", "naive-quantized")
    if method not in ("gptq", "awq") and not is_int:
        return None
    where = f"{where}: quantization_config of {method}"
    check_fields(quantised, {**RULES[method], "quant_method": TEXT}, where, NEEDED[method])
    if method != "compressed-tensors":
        is_first = method == "gptq" and quantised.get("checkpoint_format", "gptq") == "gptq"
        return Packing(method, quantised["bits"], quantised["group_size"], int(is_first))
    found = set()
    for name, group in quantised["config_groups"].items():
        weights = group.get("weights") if isinstance(group, dict) else None
        check_fields({"weights": weights}, {"weights": OBJECT}, f"{where}: {name}", ("weights",))
        assert weights is not None
        check_fields(weights, WEIGHTS, f"{where}: {name}: weights", ("num_bits", "type", "strategy"))
        in_groups = weights["strategy"] == "group"
        found.add(Packing(method, weights["num_bits"], (weights.get("group_size") or -1) if in_groups else -1))
    if len(found) != 1:
        rule = f"{where}: all groups of config_groups must have the same bits and group_size, got {len(found)} kinds. {CORRECT}"
        raise refused(rule, quantization_config="unsupported")
    return found.pop()


def with_packed(stored: Mapping[str, Stored], packing: Packing) -> dict[str, Stored]:
    """The tensors of a checkpoint, with one for each packed matrix, as [outputs, inputs].

    Raises:
      ValueError: a part of a matrix that is missing, or has another shape or dtype.
    """
    ends = packing.names
    found = dict(stored)
    for name in [name.removesuffix(ends[0]) for name in stored if name.endswith(ends[0])]:
        parts = [found.pop(name + end, None) for end in ends]
        found.pop(f"{name}.weight_shape", None)
        codes, scales, zeros, _ = parts
        assert codes is not None
        where = f"{codes.file}: {name}"
        for part, end in ((scales, ends[1]), (zeros, ends[2])):
            if part is None and (end == ends[1] or packing.method != "compressed-tensors"):
                raise refused(f"{where}{end} must be there, beside {ends[0]}; missing. Download it again.", file="missing")
        if codes.dtype != "I32" or len(codes.shape) != 2:
            raise refused(
                f"{where}{ends[0]} must be a matrix of I32, got {codes.dtype} of shape {codes.shape}. Download it again.",
                file="wrong_type",
            )
        outputs, inputs = matrix_shape(codes.shape, packing)
        size = inputs if packing.group == -1 else packing.group
        if size < 1 or inputs % size:
            raise refused(
                f"{where}: group_size must divide the {inputs} inputs, got {packing.group}. Choose another checkpoint of this "
                "model.",
                group_size="does_not_fit",
            )
        wanted = part_shapes(outputs, inputs, inputs // size, packing)
        for part, end, shapes in zip(parts[1:], ends[1:], wanted, strict=True):
            dtypes = tuple(DTYPES) if end == ends[1] else ("I32",)
            if part is not None and (part.shape not in shapes or part.dtype not in dtypes):
                raise refused(
                    f"{where}{end} must be {' or '.join(dtypes)} of shape {shapes[0]}, got {part.dtype} of shape {part.shape}. "
                    "Use its own config.json, or choose another checkpoint of this model.",
                    file="does_not_fit",
                )
        found[f"{name}.weight"] = Stored(codes.file, (outputs, inputs), PACKED)
    return found


def matrix_shape(shape: tuple[int, ...], packing: Packing) -> tuple[int, int]:
    """The outputs and inputs of a matrix whose packed codes have this shape."""
    rows, columns = shape
    if packing.method == "gptq":
        return columns, rows * packing.codes
    return (columns * packing.codes, rows) if packing.method == "awq" else (rows, columns * packing.codes)


def part_shapes(outputs: int, inputs: int, groups: int, packing: Packing) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The shapes that scales, zero points and the groups of inputs may have."""
    if packing.method == "compressed-tensors":
        scales = ((outputs, groups), (outputs,), (1,), ()) if groups == 1 else ((outputs, groups),)
        return scales, ((-(-outputs // packing.codes), groups),), ((inputs,),)
    return ((groups, outputs),), ((groups, -(-outputs // packing.codes)),), ((inputs,),)


def unpacked(words: np.ndarray, bits: int, axis: int) -> UInt8[np.ndarray, "rows columns"]:
    """The codes in int32 numbers, the lowest bits first, along an axis.

    >>> unpacked(np.array([[0x76543210]], np.int32), 4, axis=1)
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    words = np.swapaxes(words.astype(np.int32, copy=False).view(np.uint32), axis, -1)
    codes = (words[..., None] >> np.arange(0, WORD, bits, dtype=np.uint32)).astype(np.uint8) & np.uint8((1 << bits) - 1)
    return np.swapaxes(codes.reshape(*words.shape[:-1], -1), axis, -1)


def read_packed(
    read: Callable[[str], np.ndarray], weight: str, names: Mapping[str, Stored], packing: Packing
) -> Float[np.ndarray, "outputs inputs"]:
    """A matrix in float32; `read` gives its parts by their names.

    Raises:
      ValueError: an input of a group that there is not.
    """
    name, (of_codes, of_scales, of_zeros, of_groups) = weight.removesuffix(".weight"), packing.names
    codes: np.ndarray = unpacked(read(name + of_codes), packing.bits, 0 if packing.method == "gptq" else 1)
    scales: np.ndarray = read(name + of_scales).astype(np.float32)
    if packing.method == "compressed-tensors":
        zeros: np.ndarray = np.full((len(codes), 1), 1 << packing.bits - 1, np.uint8)
        if name + of_zeros in names:
            zeros = unpacked(read(name + of_zeros), packing.bits, 0)[: len(codes)]
        scales = scales if scales.ndim == 2 else scales.reshape(-1, 1)
    else:
        zeros = unpacked(read(name + of_zeros), packing.bits, 1)
        if packing.method == "awq":
            codes, zeros = (one.reshape(len(one), -1, 8)[..., AWQ_ORDER].reshape(one.shape) for one in (codes, zeros))
        codes, scales, zeros = codes.T, scales.T, zeros[:, : codes.shape[1]].T
    outputs, inputs = codes.shape
    size = inputs if packing.group == -1 else packing.group
    groups = np.arange(inputs) // size
    if name + of_groups in names:
        groups = read(name + of_groups)
        if groups.min() < 0 or groups.max() >= inputs // size:
            found = shown(sorted({int(groups.min()), int(groups.max())}))
            rule = f"{name}{of_groups} must have groups from 0 to {inputs // size - 1}, got {found}. Download it again."
            raise refused(rule, file="out_of_range")
    zeros = zeros.astype(np.float32) + np.float32(packing.zero_offset)
    zeros, scales = (np.broadcast_to(one, (outputs, inputs // size)) for one in (zeros, scales))
    return (codes.astype(np.float32) - zeros[:, groups]) * scales[:, groups]
