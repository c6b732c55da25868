"""Indices and safetensors headers that name other files, or describe their file wrongly."""

import json
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jkv.checkpoints import loading as checkpoint
from tests.support import checkpoint_fuzz
from tests.support.checkpoints import assert_equal, change_tensors, golden_copy
from tests.support.hostile_folders import refused, with_text


def read_index(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "/etc/passwd",
        "/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        5,
        None,
        "x.bin",
    ],
    ids=repr,
)
def test_an_index_may_name_only_files_of_its_folder(name, tmp_path):
    index = read_index(golden_copy(tmp_path / "model", "qwen2"))
    shutil.copy(tmp_path / "model" / "model-00001-of-00002.safetensors", tmp_path / "other.safetensors")
    index["weight_map"]["model.embed_tokens.weight"] = name
    with_text(tmp_path / "model", "model.safetensors.index.json", json.dumps(index))
    refused(tmp_path / "model", r"index\.json: weight_map must name files of its own folder.*model\.embed_tokens")


def test_a_tensor_must_lie_where_the_index_says(tmp_path):
    index = read_index(golden_copy(tmp_path, "qwen2"))
    name = "model.embed_tokens.weight"
    index["weight_map"][name] = "model-00002-of-00002.safetensors"
    with_text(tmp_path, "model.safetensors.index.json", json.dumps(index))
    refused(tmp_path, rf"'{name}' must lie in model-00002-of-00002\.safetensors, got it in model-00001")


def test_a_tensor_in_two_shards_is_not_that_of_the_last(tmp_path):
    golden_copy(tmp_path, "qwen2")
    first, last = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    tensors = load_file(first)
    save_file(load_file(last) | {"model.embed_tokens.weight": -tensors["model.embed_tokens.weight"]}, last)
    refused(tmp_path, r"model-00002.*model\.embed_tokens\.weight must be the same in all files, got another in model-00001")


def test_a_tensor_may_lie_in_two_shards_if_both_are_equal(tmp_path):
    golden_copy(tmp_path, "qwen2")
    expected = checkpoint.load(tmp_path).params
    first, last = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    name = "model.embed_tokens.weight"
    save_file(load_file(last) | {name: load_file(first)[name]}, last)
    assert_equal(checkpoint.load(tmp_path).params, expected)
    index = read_index(tmp_path)
    index["weight_map"][name] = last.name
    with_text(tmp_path, "model.safetensors.index.json", json.dumps(index))
    assert_equal(checkpoint.load(tmp_path).params, expected)


def test_scales_of_another_engines_cache_are_not_read(tmp_path):
    def add(tensors):
        for name in ("k_scale", "v_scale", "k_proj.k_scale", "attn.v_scale"):
            tensors[f"model.layers.0.self_attn.{name}"] = np.ones(1, np.float32)

    expected = checkpoint.load(golden_copy(tmp_path)).params
    change_tensors(tmp_path / "model.safetensors", add)
    assert_equal(checkpoint.load(tmp_path).params, expected)


@pytest.mark.parametrize("case", ["llama_scaled", "qwen2"])
def test_tensors_of_a_model_without_its_head_have_no_prefix(case, tmp_path):
    expected = checkpoint.load(golden_copy(tmp_path, case)).params
    tensors = {}
    for file in tmp_path.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert_equal(checkpoint.load(tmp_path).params, expected)


def test_one_file_is_read_before_an_index_of_others(tmp_path):
    golden_copy(tmp_path, "qwen2")
    tensors = load_file(tmp_path / "model-00001-of-00002.safetensors") | load_file(
        tmp_path / "model-00002-of-00002.safetensors"
    )
    save_file({name: -tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"has model\.safetensors and .*which names model-00001.*as in transformers"):
        assert float(checkpoint.load(tmp_path).params.embedding[0, 0]) == -float(tensors["model.embed_tokens.weight"][0, 0])
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}  # as other tools write it
    with_text(tmp_path, "model.safetensors.index.json", json.dumps(index))
    assert float(checkpoint.load(tmp_path).params.embedding[0, 0]) == -float(tensors["model.embed_tokens.weight"][0, 0])


def with_header(file, change):
    """Rewrites a safetensors file with its header changed."""
    header, data = checkpoint_fuzz.read_header(file)
    text = change(header)
    text = (text if isinstance(text, str) else json.dumps(header)).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


NORM, GATE = "model.norm.weight", "model.layers.0.mlp.gate_proj.weight"
HEADERS = {
    "overlap": (lambda h: h[NORM].update(data_offsets=h[GATE]["data_offsets"][:1] * 2), "must span F32"),
    "moved": (lambda h: h[NORM].update(data_offsets=[x + 4 for x in h[NORM]["data_offsets"]]), "without gaps and overlaps"),
    "backwards": (lambda h: h[NORM].update(data_offsets=h[NORM]["data_offsets"][::-1]), "must span"),
    "beyond": (lambda h: h[NORM].update(data_offsets=[2**60, 2**60 + 128]), "without gaps"),
    "huge-shape": (lambda h: h[NORM].update(shape=[2**31, 2**31]), "must span"),
    "overflowing-shape": (lambda h: h[NORM].update(shape=[2**61, 8]), "must span"),
    "negative-shape": (lambda h: h[NORM].update(shape=[-32]), "shape must be a list"),
    "float-shape": (lambda h: h[NORM].update(shape=[32.0]), "shape must be a list"),
    "other-dtype": (lambda h: h[NORM].update(dtype="F16"), "must span F16"),
    "other-dtype-of-that-size": (lambda h: h[NORM].update(dtype="I32"), "must be one of F32.*got I32"),
    "unknown-dtype": (lambda h: h[NORM].update(dtype="F31"), "must be one of F32.*got F31"),
    "no-dtype": (lambda h: h[NORM].pop("dtype") and None, "dtype must be .*got none"),
    "tensor-list": (lambda h: h.update({NORM: []}), "must be an object"),
    "two-names": (lambda h: json.dumps(h)[:-1] + ', "model.norm.weight": ' + json.dumps(h[NORM]) + "}", "occurs twice"),
    "control-character": (lambda h: h.update({"\x1b[2J": h.pop(NORM)}), "names are printable"),
    "metadata": (lambda h: h.update(__metadata__={"a": 1}), "strings alone"),
    "not-json": (lambda h: "{" * 99, "must be JSON"),
}


@pytest.mark.parametrize(("change", "message"), HEADERS.values(), ids=HEADERS)
def test_a_bad_header_is_refused_with_its_tensor(change, message, tmp_path):
    file = golden_copy(tmp_path) / "model.safetensors"
    with_header(file, change)
    refused(tmp_path, rf"{file}.*{message}")


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 2**32, 2**24 + 1, 0], ids=str)
def test_a_header_of_impossible_length_is_refused_at_once(length, tmp_path):
    file = golden_copy(tmp_path) / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    refused(tmp_path, rf"{file}.* must be (a safetensors file, with a header of at most|JSON)")


def test_the_weights_of_a_model_of_other_shapes_are_refused(tmp_path):
    golden_copy(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: np.repeat(tensor, 2, axis=-1) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    refused(tmp_path, r"model\.safetensors: .* must have shape .*got.*config\.json")
