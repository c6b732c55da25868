"""Damaged and hostile GGUF files: a ValueError that names the file, in little time and memory."""

import os
import random
import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest

import jkv
from jkv.checkpoints.gguf_header import read_header
from tests.checkpoints.test_gguf_tokenizer import TINY
from tests.support.checkpoints import GOLDEN
from tests.support.gguf_models import write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a good file."""
    file = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_gguf(file, GOLDEN / "qwen2", tokenizer=TINY)
    return file.read_bytes()


def refused(data, message, tmp_path):
    """Checks that these bytes are refused with the file's name."""
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        jkv.load(file)


def replaced(data, at, form, value):
    """The bytes with a number overwritten."""
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


def end_of(data, name):
    """Where the text of a name ends."""
    return data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


HUGE = 2**64 - 1
NUMBERS = {  # after a name or at a place: what is written there
    "version-1": (4, "<I", 1, "version 2 or 3, got version 1"),
    "version-9": (4, "<I", 9, "version 2 or 3, got version 9"),
    "big-endian": (4, ">I", 3, "little-endian GGUF file, got a big-endian one of version 3"),
    "no-tensors": (8, "<Q", 0, "1 to 65,536 tensors"),
    "many-tensors": (8, "<Q", HUGE, "1 to 65,536 tensors, and no more than its header has room for; got 18446744073709551615"),
    "more-tensors": (8, "<Q", 60_000, "1 to 65,536 tensors"),
    "many-fields": (16, "<Q", HUGE, "at most 16,384 fields of metadata"),
    "long-name": (24, "<Q", HUGE, "the name of a field of at most 500 bytes; got 18446744073709551615"),
    "nested": (("tokenizer.ggml.tokens", 4), "<I", 9, "arrays are not nested; got 9"),
    "long-array": (("tokenizer.ggml.tokens", 8), "<Q", 1 << 40, "at most 4,194,304 values of tokenizer.ggml.tokens"),
    "long-text": (("tokenizer.ggml.tokens", 16), "<Q", 1 << 62, "tokenizer.ggml.tokens of at most 67,108,864 bytes"),
    "type-of-a-field": (("qwen2.block_count", 0), "<I", 77, "qwen2.block_count has a type from 0 to 12"),
    "axes": (("blk.0.attn_q.weight", 0), "<I", 2**32 - 1, "blk.0.attn_q.weight has 1 to 4 axes; got 4294967295"),
    "axis": (("blk.0.attn_q.weight", 4), "<Q", HUGE, "blk.0.attn_q.weight must have shape"),
    "quantisation": (
        ("blk.0.attn_q.weight", 20),
        "<I",
        99,
        r"blk.0.attn_q.weight must be of a type.*got an unknown type \(99\)",
    ),
    "gone": (("blk.0.attn_q.weight", 20), "<I", 4, r"got an unknown type \(4\).*Quantise the model again"),
    "odd-offset": (("blk.0.attn_q.weight", 24), "<Q", 33, "multiple of general.alignment=32; got 33"),
    "far-offset": (("blk.0.attn_q.weight", 24), "<Q", 1 << 62, "blk.0.attn_q.weight begins inside of its"),
    "overlap": (("blk.0.attn_q.weight", 24), "<Q", 0, "must begin after .*, at byte"),
}


@pytest.mark.parametrize(("at", "form", "value", "message"), NUMBERS.values(), ids=NUMBERS)
def test_a_wrong_number_is_named(at, form, value, message, whole, tmp_path):
    at = at if isinstance(at, int) else end_of(whole, at[0]) + at[1]
    refused(replaced(whole, at, form, value), message, tmp_path)


def test_what_is_no_gguf_file_is_refused(whole, tmp_path):
    refused(b"", "which begins with b'GGUF'; got b''", tmp_path)
    refused(b"ggjt" + whole[4:], "which begins with b'GGUF'; got b'ggjt'", tmp_path)
    refused(b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer", tmp_path)


def test_a_cut_file_is_refused_wherever_it_ends(whole, tmp_path):
    for size in [*range(0, 400, 7), len(whole) // 2, len(whole) - 4096, len(whole) - 33]:
        refused(whole[:size], "must|split", tmp_path)
    refused(whole[:-100], "must end within the .* bytes, got .*: truncated", tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split.count": 3}, "split.count must be 1, .* got 3. Merge the parts with .*llama-gguf-split --merge"),
        ({"general.alignment": 48}, r"general.alignment must be a power of two in \[8, 1048576\], got 48"),
    ],
    ids=["split", "alignment"],
)
def test_wrong_fields_are_named(fields, message, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, GOLDEN / "qwen2", change=lambda own, stored: own.update(fields))
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        jkv.load(file)


def test_names_that_occur_twice_are_refused(whole, tmp_path):
    refused(whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "tensors have distinct names", tmp_path)
    twice = whole.replace(b"qwen2.attention.head_count", b"qwen2.attention.key_length")
    refused(twice, "fields have distinct names; got 'qwen2.attention.key_length'", tmp_path)


def test_names_that_are_no_text_are_refused(whole, tmp_path):
    refused(whole.replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.p\xff\xff"), "the name of a field in UTF-8", tmp_path)
    refused(whole.replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.\x1b[2"), "the name of a field that is printable", tmp_path)


def test_a_file_of_the_other_byte_order_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "qwen2", endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(ValueError, match=r"big-endian one of version 3. Convert it with gguf-convert-endian"):
        jkv.load(tmp_path / "model.gguf")


def test_what_is_no_regular_file_is_refused(whole, tmp_path):
    os.mkfifo(tmp_path / "fifo.gguf")
    for path in (tmp_path / "fifo.gguf", "/dev/zero"):
        with pytest.raises(ValueError, match="must be a regular file"):
            jkv.load(path)
    (tmp_path / "broken.gguf").symlink_to(tmp_path / "nothing")
    for path in (tmp_path / "none.gguf", "org/none.gguf", tmp_path / "broken.gguf"):
        with pytest.raises(FileNotFoundError, match="must be a GGUF file; there is none"):
            jkv.load(path)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ValueError, match=r"folder.gguf must contain config.json"):
        jkv.load(tmp_path / "folder.gguf")


def test_a_link_and_a_name_without_a_suffix_are_fine(whole, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "sha256-0").write_bytes(whole)
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blobs" / "sha256-0")
    for file in (tmp_path / "model.gguf", tmp_path / "blobs" / "sha256-0"):
        assert jkv.load(file).config.family == "qwen2"
        assert jkv.load(file).name == str(file)


def test_a_large_header_takes_little_time_and_memory(whole, tmp_path):
    """Eight million empty strings: the limit of values is checked before one is read."""
    at = end_of(whole, "tokenizer.ggml.tokens") + 8
    (tmp_path / "model.gguf").write_bytes(whole[:at] + struct.pack("<Q", 1 << 23) + bytes(1 << 26))
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(ValueError, match="at most 4,194,304 values"):
        read_header(tmp_path / "model.gguf")
    seconds, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 5
    assert peak < 1.2 * (1 << 26)


# Random changes


@pytest.fixture(params=["qwen2", "llama_scaled"])
def varied(request, tmp_path):
    """The bytes of a good file, of two architectures."""
    write_gguf(tmp_path / "model.gguf", GOLDEN / request.param, tokenizer=TINY)
    return (tmp_path / "model.gguf").read_bytes()


def flip(whole, count, seed, tmp_path):
    """The numbers of files with random changes of the header that are loaded and refused; any other end is an error."""
    (tmp_path / "model.gguf").write_bytes(whole)
    header = min(tensor.begin for tensor in read_header(tmp_path / "model.gguf").tensors.values())
    rng, file, counts = random.Random(seed), tmp_path / "model.gguf", {"loaded": 0, "refused": 0}
    for index in range(count):
        data, places = bytearray(whole), rng.choices(range(header), k=rng.choice((1, 1, 1, 3)))
        for place in places:
            data[place] ^= 1 << rng.randrange(8) if rng.random() < 0.7 else rng.randrange(1, 256)
        file.write_bytes(data)
        begin = time.perf_counter()
        message, model = "", None
        try:
            model = jkv.load(file)
        except ValueError as error:
            message = str(error)
        assert str(file) in message if model is None else np.isfinite(model.params.embedding).all(), (index, places, message)
        counts["refused" if model is None else "loaded"] += 1
        assert time.perf_counter() - begin < 20, (index, places)
    return counts


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_changes_are_refused_or_give_a_model(varied, tmp_path, count):
    counts = flip(varied, count, count // 5000, tmp_path)
    assert min(counts.values()) > count / 10
