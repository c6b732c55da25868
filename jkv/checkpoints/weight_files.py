"""Finds the safetensors files of a checkpoint folder, and reads their headers under the limits of `jkv.checkpoints.json_files`.

The index may name only files of its folder, each tensor must lie where the index says and nowhere else, and each header must
describe its file exactly. So a file is never read in the place of another.
"""

import math
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jkv.checkpoints.json_files import AGAIN, OBJECT, Rule, check_fields, find_file, parse_object, read_json, shown

INDEX = "model.safetensors.index.json"
MAX_HEADER = 1 << 24  # bytes; 100,000 tensors need half of this
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
        raise ValueError(
            f"{folder} must contain model.safetensors or {INDEX}; it has both, and the index names {shards[0].name}. Remove "
            "the one that is not of this model."
        )
    if not single and not index:
        raise ValueError(
            f"{folder} must contain model.safetensors or {INDEX}; it has neither. Download the weights, or convert older ones "
            "with save_pretrained of transformers."
        )
    missing = [file.name for file in shards if find_file(file) is None]
    if missing:
        raise ValueError(f"{folder} must contain every shard of {INDEX}; missing: {', '.join(missing)}. Download them.")
    return [single] if single else shards


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, by the name of the tensor."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index} must name the shard of each tensor in 'weight_map', got {shown(shards)}. {AGAIN}")
    for name, file in shards.items():
        if not (isinstance(file, str) and re.fullmatch(r"\w[\w.+-]*\.safetensors", file)):
            raise ValueError(
                f"{index}: weight_map must name files of its own folder that end with .safetensors, got {shown(file)} for "
                f"{shown(name)}. {AGAIN}"
            )
    return shards


# Headers


def list_tensors(files: list[Path]) -> dict[str, Stored]:
    """All tensors in these files, read from the headers, and checked against the index if there is one."""
    stored: dict[str, Stored] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in stored:
                raise ValueError(
                    f"{file}: {name} must lie in one file, got it also in {stored[name].file.name}. Remove the file "
                    "that is not of this model."
                )
            stored[name] = tensor
    index = find_file(files[0].parent / INDEX)
    for name, shard in read_index(index).items() if index else ():
        if name not in stored or stored[name].file.name != shard:
            found = f"it in {stored[name].file.name}" if name in stored else "it in none"
            raise ValueError(f"{index}: {shown(name)} must lie in {shard}, got {found}. Use the index of these shards.")
    return stored


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, whose data must fill the file without gaps or overlaps."""
    rule = f"{file} must be a safetensors file"
    if find_file(file) is None:
        raise ValueError(f"{rule}; there is none. Download it.")
    try:
        with open(file, "rb") as stream:
            size, start = os.fstat(stream.fileno()).st_size, stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(MAX_HEADER, size - 8):
                raise ValueError(
                    f"{rule}, with a header of at most {MAX_HEADER:,} bytes; got {length:,} in a file of {size:,}. {AGAIN}"
                )
            header = parse_object(stream.read(length), f"{file}: the header")
    except OSError as error:
        raise ValueError(f"{rule}: {error}. {AGAIN}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{rule}, whose __metadata__ has strings alone; got {shown(metadata)}. {AGAIN}")
    if odd := [name for name in header if len(name) > MAX_NAME or not name.isprintable()]:
        raise ValueError(
            f"{rule}, whose names are printable and have at most {MAX_NAME} characters; got {shown(odd[0])}. {AGAIN}"
        )
    check_fields(header, dict.fromkeys(header, OBJECT), f"{rule}: the header")
    spans = sorted(check_tensor(header[name], f"{rule}: {name}") for name in header)
    ends = [(0, 0), *spans, (size - 8 - length,) * 2]
    for (_, end), (begin, _) in pairwise(ends):
        if begin != end:
            raise ValueError(
                f"{rule}, whose tensors fill its {size - 8 - length:,} bytes of data without gaps and overlaps; got an end "
                f"at byte {end:,} and the next begin at {begin:,}. {AGAIN}"
            )
    return {name: Stored(file, tuple(header[name]["shape"]), header[name]["dtype"]) for name in header}


def check_tensor(fields: dict[str, Any], where: str) -> tuple[int, int]:
    """The first byte of a tensor and the byte after its last."""
    check_fields(fields, TENSOR, where, TENSOR)
    offsets, dtype, shape = fields["data_offsets"], fields["dtype"], fields["shape"]
    begin, end = offsets if len(offsets) == 2 else (0, -1)
    width = BYTES.get(dtype)
    if end < begin or (width is not None and end - begin != width * math.prod(shape)):
        raise ValueError(f"{where}: data_offsets must span {dtype} of shape {tuple(shape)}, got {offsets}. {AGAIN}")
    return begin, end
