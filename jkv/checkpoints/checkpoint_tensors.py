"""Which files and tensors a checkpoint has, and which tensor each weight lies in, and where in it.

A tensor may hold several leaves of `Params` (fused projections), and a leaf may be made of several tensors (experts). An
`Origin` turns bounds of a leaf into an index of its tensor, so that no more than a device's part of a weight has to be read.
Blocks of 4 bits (MXFP4) are read as the numbers that they stand for. `jkv.checkpoints.weight_reading` reads, and
`jkv.checkpoints.loading` finds the files and writes them.
"""

import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from jkv.checkpoints.families import find_family
from jkv.checkpoints.family import Family, field_of
from jkv.checkpoints.json_files import AGAIN, OBJECT, Rule, check_fields, find_file, parse_object, read_json, shown
from jkv.errors import refused
from jkv.model.eight_bits import code_axis
from jkv.model.params import ModelConfig
from jkv.model.weight_shapes import leaf_name, weight_shapes

INDEX = "model.safetensors.index.json"
MAX_HEADER = 1 << 24  # bytes; 100,000 tensors need half of this
COMPARED = 1 << 24  # bytes of two tensors at once
CACHE_SCALES = frozenset({"k_scale", "v_scale", "kv_scale", "q_scale"})  # of another engine's 8-bit cache
MAX_NAME = 500  # characters of the name of a tensor
BYTES = {  # of an element, by its name in safetensors headers
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class Stored(NamedTuple):
    """The header of a tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    span: tuple[int, int] = (0, 0)  # its first byte in the file, and the byte after its last


def sizes(most: int) -> Rule:
    """A short list of integers from 0."""
    return Rule(
        f"a list of at most {most} integers from 0 to 2**62",
        lambda value: (
            isinstance(value, list) and len(value) <= most and all(type(x) is int and 0 <= x < 1 << 62 for x in value)
        ),
    )


TENSOR = {
    "dtype": Rule("a dtype of safetensors", lambda value: isinstance(value, str) and bool(re.fullmatch(r"\w{2,16}", value))),
    "shape": sizes(8),
    "data_offsets": sizes(2),
}


# Files


def list_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or the shards of its index."""
    single, index = find_file(folder / "model.safetensors"), find_file(folder / INDEX)
    shards = sorted({folder / name for name in read_index(index).values()}) if index else []
    if single and (shards or [single]) != [single]:
        warnings.warn(
            f"{folder} has model.safetensors and {INDEX}, which names {shards[0].name}: the weights are read from "
            "model.safetensors, as in transformers. Remove what is not of this model.",
            stacklevel=4,
        )
        return [single]
    if not single and not index:
        raise refused(
            f"{folder} must contain model.safetensors or {INDEX}; it has neither. Download the weights, or convert older ones "
            "with save_pretrained of transformers.",
            folder="not_found",
        )
    missing = [file.name for file in shards if find_file(file) is None]
    if missing:
        rule = f"{folder} must contain every shard of {INDEX}; missing: {', '.join(missing)}. Download them."
        raise refused(rule, folder="not_found")
    return [single] if single else shards


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, by the name of the tensor."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        rule = f"{index} must name the shard of each tensor in 'weight_map', got {shown(shards)}. {AGAIN}"
        raise refused(rule, weight_map="invalid")
    for name, file in shards.items():
        if not (isinstance(file, str) and re.fullmatch(r"\w[\w.+-]*\.safetensors", file)):
            raise refused(
                f"{index}: weight_map must name files of its own folder that end with .safetensors, got {shown(file)} for "
                f"{shown(name)}. {AGAIN}",
                weight_map="invalid",
            )
    return shards


# Headers


def list_tensors(files: list[Path]) -> dict[str, Stored]:
    """All tensors in these files, read from the headers, and checked against the index if there is one."""
    stored: dict[str, Stored] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in stored and not is_same(stored[name], tensor):
                raise refused(
                    f"{file}: {name} must be the same in all files, got another in {stored[name].file.name}. Remove the file "
                    "that is not of this model.",
                    **{name: "conflict"},
                )
            stored.setdefault(name, tensor)
    index = find_file(files[0].parent / INDEX)
    shards = read_index(index) if index else {}
    if {*shards.values()} != {file.name for file in files}:
        shards = {}  # an index of other files
    for name, shard in shards.items():
        if name not in stored or (stored[name].file.name != shard and name not in read_header(files[0].parent / shard)):
            found = f"it in {stored[name].file.name}" if name in stored else "it in none"
            rule = f"{index}: {shown(name)} must lie in {shard}, got {found}. Use the index of these shards."
            raise refused(rule, weight_map="invalid")
    return stored


def is_same(one: Stored, other: Stored) -> bool:
    """Whether two tensors have the same shape, dtype and bytes."""
    (begin, end), (start, _) = one.span, other.span
    if one[1:3] != other[1:3]:
        return False
    with open(one.file, "rb") as left, open(other.file, "rb") as right:
        left.seek(begin)
        right.seek(start)
        counts = (min(COMPARED, end - first) for first in range(begin, end, COMPARED))
        return all(left.read(count) == right.read(count) for count in counts)


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, whose data must fill the file without gaps or overlaps."""
    rule = f"{file} must be a safetensors file"
    if find_file(file) is None:
        raise refused(f"{rule}; there is none. Download it.", file="not_found")
    try:
        with open(file, "rb") as stream:
            size, start = os.fstat(stream.fileno()).st_size, stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(MAX_HEADER, size - 8):
                raise refused(
                    f"{rule}, with a header of at most {MAX_HEADER:,} bytes; got {length:,} in a file of {size:,}. {AGAIN}",
                    file="invalid",
                )
            header = parse_object(stream.read(length), f"{file}: the header")
    except OSError as error:
        raise refused(f"{rule}: {error}. {AGAIN}", file="invalid") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refused(f"{rule}, whose __metadata__ has strings alone; got {shown(metadata)}. {AGAIN}", file="invalid")
    if odd := [name for name in header if len(name) > MAX_NAME or not name.isprintable()]:
        message = f"{rule}, whose names are printable and have at most {MAX_NAME} characters; got {shown(odd[0])}. {AGAIN}"
        raise refused(message, file="invalid")
    check_fields(header, dict.fromkeys(header, OBJECT), f"{rule}: the header")
    spans = sorted(check_tensor(header[name], f"{rule}: {name}") for name in header)
    ends = [(0, 0), *spans, (size - 8 - length,) * 2]
    for (_, end), (begin, _) in pairwise(ends):
        if begin != end:
            raise refused(
                f"{rule}, whose tensors fill its {size - 8 - length:,} bytes of data without gaps and overlaps; got an end "
                f"at byte {end:,} and the next begin at {begin:,}. {AGAIN}",
                file="invalid",
            )
    found = {}
    for name, tensor in header.items():
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        found[name] = Stored(file, tuple(tensor["shape"]), tensor["dtype"], (begin, end))
    return found


def check_tensor(fields: dict[str, Any], where: str) -> tuple[int, int]:
    """The first byte of a tensor and the byte after its last."""
    check_fields(fields, TENSOR, where, TENSOR)
    offsets, dtype, shape = fields["data_offsets"], fields["dtype"], fields["shape"]
    begin, end = offsets if len(offsets) == 2 else (0, -1)
    width = BYTES.get(dtype)
    if end < begin or (width is not None and end - begin != width * math.prod(shape)):
        rule = f"{where}: data_offsets must span {dtype} of shape {tuple(shape)}, got {offsets}. {AGAIN}"
        raise refused(rule, data_offsets="invalid")
    return begin, end


MXFP4, FP8, PACKED = "MXFP4", "FP8", "packed integers"  # with their scales, in place of a dtype of safetensors
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
            rule = f"{where} must have its {SCALES.removeprefix('_')}; missing. Download the checkpoint again."
            raise refused(rule, file="missing")
        if blocks.dtype != "U8" or scales.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[-1] != BLOCK_BYTES:
            got = f"{blocks.dtype} of shape {blocks.shape} with scales of {scales.dtype}"
            rule = f"{where} must be bytes, in blocks of {BLOCK_BYTES}, got {got}. Download the checkpoint again."
            raise refused(rule, file="wrong_type")
        if scales.shape != blocks.shape[:-1]:
            raise refused(
                f"{where} must have a scale for each block, {blocks.shape[:-1]}, got {scales.shape}. Download the checkpoint "
                "again.",
                file="does_not_fit",
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


DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}  # by their names in safetensors headers
EXACT = frozenset({"experts.choice_bias"})  # fields in float32, because a bias may be large where scores are nearly equal
Bounds: TypeAlias = Sequence[tuple[int, int]]  # of each axis the first index, and the one after the last


class Part(NamedTuple):
    """A leaf of `Params` inside a tensor of the checkpoint."""

    leaf: int  # index among the leaves
    shape: tuple[int, ...]  # in the file, rows first
    is_transposed: bool  # by its last two axes
    is_interleaved: bool = False  # with the other parts of the tensor, by its last axis
    code_axis: int | None = None  # over which a scale of its codes is found, of a matrix that may be kept in 8 bits
    expert: int | None = None  # whose matrix it is, in a leaf with the matrices of all experts
    is_exact: bool = False  # whether it is float32 whatever the dtype of the others
    stacking_axis: int = 0  # by which the parts of a tensor are stacked: the rows


class Origin(NamedTuple):
    """Where a leaf of `Params`, or an expert's matrix of one, comes from."""

    tensor: str
    parts: list[Part]  # of the tensor
    place: int  # of the leaf among these

    @property
    def part(self) -> Part:
        """The leaf's own part of the tensor."""
        return self.parts[self.place]

    def slices(self, bounds: Bounds) -> tuple[slice, ...]:
        """The index in the tensor of what lies between these bounds of the leaf (without the axis of experts).

        >>> query, key = Part(0, (8, 4), is_transposed=True), Part(1, (2, 4), is_transposed=True)
        >>> Origin("qkv", [query, key], 1).slices([(0, 4), (1, 2)])  # the last channel of key, of all inputs
        (slice(9, 10, None), slice(0, 4, None))
        """
        ends = list(bounds)
        if self.part.is_transposed:
            ends[-2:] = reversed(ends[-2:])
        if self.part.is_interleaved:
            (first, end), count = ends.pop(), len(self.parts)
            return (*(slice(*pair) for pair in ends), slice(first * count + self.place, end * count, count))
        axis = self.part.stacking_axis
        before = sum(part.shape[axis] for part in self.parts[: self.place])
        ends[axis] = ends[axis][0] + before, ends[axis][1] + before
        return tuple(slice(*pair) for pair in ends)


def tensor_parts(config: ModelConfig, family: Family | None = None) -> dict[str, list[Part]]:
    """For each tensor of the checkpoint, the leaves of `Params` that are stacked or interleaved in it; `family` names it."""
    parts: dict[str, list[Part]] = {}
    family = family or find_family(config.family)
    for index, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(weight_shapes(config))[0]):
        name = leaf_name(path)
        tensor, field = family.tensor_of(name, config.expert_layers), field_of(name)
        is_of_expert = "{}" in tensor
        shape = leaf.shape[is_of_expert:]
        is_transposed = len(shape) > 1 and field not in family.untransposed | {"embedding"}
        stored = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
        part = Part(index, stored, is_transposed, field in family.interleaved, code_axis(name), is_exact=field in EXACT)
        if field.startswith("experts."):  # each expert has rows of its own
            part = part._replace(stacking_axis=max(len(stored) - 2, 0))
        for expert in range(leaf.shape[0]) if is_of_expert else (None,):
            parts.setdefault(tensor.format(expert), []).append(part._replace(expert=expert))
    return parts


def stacked_shape(parts: list[Part]) -> tuple[int, ...]:
    """The shape of a tensor of the checkpoint."""
    if parts[0].is_interleaved:
        return (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    shape, axis = parts[0].shape, parts[0].stacking_axis
    return (*shape[:axis], sum(part.shape[axis] for part in parts), *shape[axis + 1 :])


def check_tensors(wanted: Mapping[str, list[Part]], stored: Mapping[str, Stored], config: ModelConfig) -> None:
    """Refuses missing, unexpected and misshapen tensors."""
    family = find_family(config.family)
    unembedding = family.tensors["unembedding"]
    files = ", ".join(sorted({str(tensor.file) for tensor in stored.values()}))
    missing = [name for name in wanted if name not in stored]
    if missing:
        hint = " (or set tie_word_embeddings to true, if they are tied)" if unembedding in missing else ""
        rule = f"{files} must contain {list_some(missing)}; missing. Download the checkpoint again{hint}."
        raise refused(rule, file="missing")
    for name, parts in wanted.items():
        file, shape, dtype, _ = stored[name]
        if shape != stacked_shape(parts):
            rule = f"{file}: {name} must have shape {stacked_shape(parts)}, got {shape}. Use its own config.json."
            raise refused(rule, **{name: "does_not_fit"})
        if dtype not in DTYPES and dtype not in (MXFP4, FP8, PACKED):
            rule = f"{file}: {name} must be one of {', '.join(DTYPES)}, got {dtype}. Convert the weights first."
            raise refused(rule, **{name: "unsupported"})
    if surplus := surplus_tensors(wanted, stored, family, config):
        raise refused(
            f"{files} must not contain {list_some(surplus)}: config.json defines no such weights. Use the config.json "
            "of these weights.",
            file="conflict",
        )


def surplus_tensors(wanted: Collection[str], names: Collection[str], family: Family, config: ModelConfig) -> list[str]:
    """The names that are neither wanted nor known to be of no use."""
    redundant = {family.tensors["unembedding"]} if config.tie_embeddings else set()
    shares = range(config.num_owners, config.num_layers)  # layers whose own keys and values nothing reads
    redundant |= {family.tensor_of(f"layers.{i}.{field}") for i in shares for field in ("key", "value", "key_norm")}
    others = {*names} - {*wanted} - redundant
    return sorted(
        name
        for name in others
        if not name.endswith("rotary_emb.inv_freq")
        and name.rsplit(".", 1)[-1] not in CACHE_SCALES
        and not family.is_prediction(name, config.num_layers, names)
    )


def list_some(names: list[str]) -> str:
    """The first three names of a list, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def joined(pieces: list[np.ndarray], parts: list[Part]) -> np.ndarray:
    """A tensor of a checkpoint, made of its parts; `Origin.slices` finds them in it."""
    if parts[0].is_interleaved:
        return np.stack(pieces, axis=-1).reshape(stacked_shape(parts))
    return np.concatenate(pieces, parts[0].stacking_axis)


def origins_of(wanted: Mapping[str, list[Part]]) -> dict[int, list[Origin]]:
    """For each leaf of `Params`, by its index, where it comes from; of one with matrices of experts, an origin for each."""
    origins: dict[int, list[Origin]] = {}
    for tensor, parts in wanted.items():
        for place, part in enumerate(parts):
            origins.setdefault(part.leaf, []).append(Origin(tensor, parts, place))
    return {leaf: sorted(found, key=lambda origin: origin.part.expert or 0) for leaf, found in origins.items()}
