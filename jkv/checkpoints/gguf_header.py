"""Reads the header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata and a table of tensors.

A file may be damaged or hostile. Every count and length is compared with the bytes that are left before anything of that size
is built, so time and memory are bounded by `MAX_HEADER`. `jkv.checkpoints.gguf_files` makes a model of it.
"""

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jkv.checkpoints.json_files import AGAIN, CORRECT, MAX_VALUES, find_file, shown
from jkv.errors import refused

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 1 << 26  # bytes; 262,144 tokens with their merges need a fifth of this
MAX_FIELDS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_NAME = 500  # bytes of the name of a field or tensor
MAX_AXES = 4
MAX_ALIGNMENT = 1 << 20
STRING, ARRAY = 8, 9
NUMBERS = {  # numpy's names of the other types of values; 7 is a switch
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}


class GgufTensor(NamedTuple):
    """The entry of a tensor in the table."""

    shape: tuple[int, ...]  # rows first; the file has them last
    kind: int  # of quantisation
    begin: int  # byte of the file


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a file. Arrays of numbers are numpy's, arrays of strings are lists."""

    file: Path
    size: int  # bytes of the file
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class Cursor:
    """Reads values one after the other, never beyond the end."""

    def __init__(self, data: bytes, file: Path) -> None:
        self.data, self.file, self.at = data, file, 0

    def failure(self, rule: str, got: object) -> ValueError:
        """The error of a broken rule."""
        return ValueError(f"{self.file} must be a GGUF file, {rule}; got {shown(got)} at byte {self.at:,}. {AGAIN}")

    def take(self, size: int, what: str) -> bytes:
        """The next bytes."""
        if size > len(self.data) - self.at:
            raise self.failure(f"whose header is complete and has at most {MAX_HEADER:,} bytes", f"{size:,} bytes of {what}")
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, form: str, what: str) -> int:
        """The next integer."""
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, most: int, least_size: int, what: str) -> int:
        """The number of items that follow, each of at least `least_size` bytes."""
        found = self.unpack("<Q", f"the number of {what}")
        if found > min(most, (len(self.data) - self.at) // least_size):
            raise self.failure(f"with at most {most:,} {what}, and no more than its header has room for", found)
        return found

    def text(self, most: int, what: str) -> str:
        """The next string."""
        size = self.unpack("<Q", f"the length of {what}")
        if size > most:
            raise self.failure(f"with {what} of at most {most:,} bytes", size)
        raw = self.take(size, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.failure(f"with {what} in UTF-8", raw[:40]) from error

    def name(self, what: str) -> str:
        """The next string, which must be printable."""
        name = self.text(MAX_NAME, what)
        if not name.isprintable() or not name:
            raise self.failure(f"with {what} that is printable and not empty", name)
        return name

    def value(self, kind: int, what: str) -> Any:
        """The next value of a type."""
        if kind == STRING:
            return self.text(MAX_HEADER, what)
        if kind == ARRAY:
            inner = self.unpack("<I", f"the type of {what}")
            if inner == STRING:
                return [self.text(MAX_HEADER, what) for _ in range(self.count(MAX_VALUES, 8, f"values of {what}"))]
            form = self.number_type(inner, what)
            count = self.count(MAX_HEADER, form.itemsize, f"values of {what}")
            return np.frombuffer(self.take(count * form.itemsize, what), form)
        form = self.number_type(kind, what)
        scalar = np.frombuffer(self.take(form.itemsize, what), form)[0]
        return float(str(scalar)) if form.kind == "f" else scalar.item()  # 1e-05, not 9.99999974e-06

    def number_type(self, kind: int, what: str) -> np.dtype:
        """The dtype of a type of numbers."""
        if kind not in NUMBERS:
            raise self.failure(f"in which {what} has a type from 0 to 12, and arrays are not nested", kind)
        return np.dtype(NUMBERS[kind])


def read_header(file: Path) -> GgufHeader:
    """The header of a GGUF file.

    Raises:
      ValueError: it is no regular file, no GGUF file, damaged, big-endian, or one part of several.
    """
    file = Path(os.path.realpath(file))  # whoever names a file may name a link
    if find_file(file) is None:
        raise FileNotFoundError(f"{file} must be a GGUF file; there is none. Check the path.")
    try:
        # A pipe that took the place of the file since must not block.
        with open(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read(MAX_HEADER)
    except OSError as error:
        raise refused(f"{file} must be readable: {error}. {AGAIN}", file="invalid") from error
    cursor = Cursor(data, file)
    check_version(cursor)
    num_tensors = cursor.unpack("<Q", "the number of tensors")
    metadata = read_metadata(cursor)
    if not 0 < num_tensors <= min(MAX_TENSORS, (len(data) - cursor.at) // 24):
        raise cursor.failure(f"with 1 to {MAX_TENSORS:,} tensors, and no more than its header has room for", num_tensors)
    check_split(metadata, file)
    return GgufHeader(file, size, metadata, read_table(cursor, num_tensors, metadata, size))


def check_version(cursor: Cursor) -> None:
    """Refuses what does not begin as a GGUF file of a known version and byte order."""
    magic = cursor.data[:4]
    if magic != MAGIC:
        raise cursor.failure(f"which begins with {MAGIC!r}", magic)
    cursor.at = 4
    version = cursor.unpack("<I", "the version")
    if version & 0xFFFF == 0:
        raise refused(
            f"{cursor.file} must be a little-endian GGUF file, got a big-endian one of version {version >> 24}. Convert it "
            "with gguf-convert-endian of the package gguf.",
            file="unsupported",
        )
    if version not in VERSIONS:
        raise refused(
            f"{cursor.file} must be a GGUF file of version {' or '.join(map(str, VERSIONS))}, got version {version}. Convert "
            "the model again with llama.cpp's convert_hf_to_gguf.py.",
            file="unsupported",
        )


def read_metadata(cursor: Cursor) -> dict[str, Any]:
    """The metadata by name."""
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(MAX_FIELDS, 13, "fields of metadata")):
        name = cursor.name("the name of a field")
        if name in metadata:
            raise cursor.failure("whose fields have distinct names", name)
        metadata[name] = cursor.value(cursor.unpack("<I", f"the type of {name}"), name)
    return metadata


def check_split(metadata: dict[str, Any], file: Path) -> None:
    """Refuses one part of a model that was split."""
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise refused(
            f"{file}: split.count must be 1, a whole model in one file; got {shown(parts)}. Merge the parts with llama.cpp's "
            "`llama-gguf-split --merge`, and pass that file.",
            **{"split.count": "unsupported"},
        )


def read_table(cursor: Cursor, count: int, metadata: dict[str, Any], size: int) -> dict[str, GgufTensor]:
    """The tensors by name, each of which begins inside of the file."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise refused(
            f"{cursor.file}: general.alignment must be a power of two in [8, {MAX_ALIGNMENT}], got {shown(alignment)}. "
            f"{CORRECT}",
            **{"general.alignment": "invalid"},
        )
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = cursor.name("the name of a tensor")
        if name in tensors:
            raise cursor.failure("whose tensors have distinct names", name)
        num_axes = cursor.unpack("<I", f"the number of axes of {name}")
        if not 1 <= num_axes <= MAX_AXES:
            raise cursor.failure(f"in which {name} has 1 to {MAX_AXES} axes", num_axes)
        shape = struct.unpack(f"<{num_axes}Q", cursor.take(8 * num_axes, f"the shape of {name}"))[::-1]
        kind = cursor.unpack("<I", f"the type of {name}")
        begin = cursor.unpack("<Q", f"the offset of {name}")
        if begin % alignment:
            raise cursor.failure(f"in which the offset of {name} is a multiple of general.alignment={alignment}", begin)
        tensors[name] = GgufTensor(shape, kind, begin)
    start = -(-cursor.at // alignment) * alignment  # of the data
    for name, tensor in tensors.items():
        if not start + tensor.begin < size:
            raise cursor.failure(f"in which {name} begins inside of its {size:,} bytes", start + tensor.begin)
        tensors[name] = tensor._replace(begin=start + tensor.begin)
    return tensors
