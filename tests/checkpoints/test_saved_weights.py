"""Saved weights that were damaged, cut off or killed are refused by name, and never restored as others."""

import dataclasses
import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints import saved_weights
from jkv.checkpoints.saved_config import read_fields
from tests.support.checkpoints import CONFIGS, GOLDEN
from tests.support.hostile_folders import AT_ONCE

ROOT = Path(__file__).parents[2]


def assert_equal(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A folder of saved weights, not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "weights-and-config"
    jkv.save(model.params, folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def files_in(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, bit):
    """Flips one bit of a file in place; the file as it was."""
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    return whole


def refusals(folder, bits_of):
    """How many flips were tried; each must be a ValueError that names its file."""
    tried = 0
    for path in files_in(folder):
        for bit in bits_of(path.stat().st_size * 8):
            whole = flip(path, bit)
            with pytest.raises(ValueError, match=path.name) as refused:
                jkv.restore(folder)
            assert "again" in str(refused.value)
            path.write_bytes(whole)
            tried += 1
    return tried


def test_every_array_has_a_file_of_its_own(saved, model):
    names = {path.parent.name for path in files_in(saved / "weights")}
    assert {"embedding", "layers.0.query", "layers.1.down", "final_norm"} <= names


def some_bits(bits):
    return [0, bits - 1, random.Random(bits).randrange(bits)]


def a_bit_of_many_bytes(bits):
    rng = random.Random(bits)
    return [8 * byte + rng.randrange(8) for byte in range(0, bits // 8, 1 + bits // 8 // 400)]


@pytest.mark.parametrize(
    ("bits_of", "least"),
    [(some_bits, 100), pytest.param(a_bit_of_many_bytes, 5000, marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_a_flipped_bit_is_refused_by_the_name_of_its_file(copy, model, bits_of, least):
    assert refusals(copy, bits_of) > least
    assert_equal(jkv.restore(copy), model.params)


def test_a_damaged_array_is_named_with_the_rule_and_what_to_do(copy):
    flip(next((copy / "weights" / "layers.1.query").glob("0*")), 300)
    words = r"must have the SHA-256 that it was saved with; weights/layers\.1\.query/0\S* differs, .* Copy the folder"
    with pytest.raises(ValueError, match=words):
        jkv.restore(copy)


def test_a_file_that_is_cut_or_missing_or_a_device_is_named(copy):
    path = next((copy / "weights" / "embedding").glob("0*"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"weights/embedding/0\S* differs"):
        jkv.restore(copy)
    path.unlink()
    with pytest.raises(ValueError, match=r"weights must be complete; weights/embedding/0\S* is missing"):
        jkv.restore(copy)
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"weights must be complete; weights/embedding/0\S* is missing"):
        jkv.restore(copy)


def test_a_configuration_that_was_edited_is_refused(copy):
    file = copy / "jkv.json"
    assert '"rope_theta": 10000.0' in file.read_text()
    file.write_text(file.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 10001.0'))
    with pytest.raises(ValueError, match=r"jkv\.json must be written by this version of jkv and unchanged"):
        jkv.restore(copy)


def with_fields(folder, part, **fields):
    """The folder with fields of a part of jkv.json changed, and the seal of a file that was written so."""
    content = json.loads((folder / "jkv.json").read_text())
    content[part] |= fields
    (folder / "jkv.json").write_text(saved_weights.sealed(content))
    return folder


def nested(depth):
    return [nested(depth - 1)] if depth else []


HUGE = 10**8
HOSTILE = {
    "layers": ("config", {"num_layers": HUGE}, r"config: num_layers must be an integer in \[1, 1024\], got 100000000"),
    "layers-text": ("config", {"num_layers": "2"}, "num_layers must be an integer"),
    "layers-true": ("config", {"num_layers": True}, "num_layers must be an integer"),
    "layers-nested": ("config", {"num_layers": nested(40)}, "num_layers must be an integer"),
    "layers-null": ("config", {"num_layers": None}, "num_layers must be an integer"),
    "vocabulary": ("config", {"vocab_size": 10**12}, "vocab_size must be an integer"),
    "width": ("config", {"width": -1}, "width must be an integer"),
    "heads": ("config", {"num_query_heads": 3}, "num_query_heads must be a multiple of KV heads, got 3"),
    "no-heads": ("config", {"num_kv_heads": 0}, "num_kv_heads must be an integer"),
    "head-size": ("config", {"head_size": 7}, "head_size must be an even integer"),
    "positions": ("config", {"max_positions": 10**15}, "max_positions must be an integer"),
    "family": ("config", {"family": "gpt5"}, "family must be one of llama, .*got 'gpt5'"),
    "family-list": ("config", {"family": ["llama"]}, "family must be one of"),
    "activation": ("config", {"activation": "relu"}, "activation must be one of silu, gelu_tanh"),
    "unknown": ("config", {"colour": 1}, r"config: every field must be one of ModelConfig, got also \['colour'\]"),
    "norm": ("config", {"norm_epsilon": 0}, "norm_epsilon must be a number"),
    "theta": ("config", {"rope_theta": -1.0}, "rope_theta must be a number"),
    "switch": ("config", {"tie_embeddings": 1}, "tie_embeddings must be true or false"),
    "rope": ("config", {"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    "rope-null": ("config", {"rope_scaling": None}, "rope_scaling must be an object"),
    "rope-kind": ("config", {"rope_scaling": {"kind": "spiral"}}, "rope_scaling: kind must be one of"),
    "rope-field": ("config", {"rope_scaling": {"kind": "linear", "x": 1}}, "every field must be one of RopeScaling"),
    "rope-factors": (
        "config",
        {"rope_scaling": {"short_factor": [1.0] * 99}},
        "short_factor and long_factor must have a number",
    ),
    "rope-original": ("config", {"rope_scaling": {"kind": "yarn", "factor": 4.0}}, "original_max_position must be above 0"),
    "windows": ("config", {"window": 8, "window_layers": [1, 0]}, "window_layers must be ascending indices below"),
    "window-layer": (
        "config",
        {"window": 8, "window_layers": [2]},
        "window_layers must be ascending indices below num_layers=2",
    ),
    "window-all": ("config", {"window": 8, "window_layers": [0, 1]}, "a layer must have full attention"),
    "window-none": ("config", {"window_layers": [1]}, "window must be above 0 if"),
    "window-huge": ("config", {"window_layers": [HUGE]}, "window_layers must be a list"),
    "states": ("config", {"state_layers": [1]}, "delta_net must be given if"),
    "delta": (
        "config",
        {"state_layers": [1], "delta_net": {"num_key_heads": 1}},
        "delta_net: num_value_heads must be .*got none",
    ),
    "sharing": ("config", {"num_sharing_layers": 2}, "num_sharing_layers must leave a layer of each kind, got 2 of 2"),
    "ends": ("config", {"end_ids": [32]}, "end_ids must be below vocab_size=32"),
    "ends-nested": ("config", {"end_ids": nested(30)}, "end_ids must be a list"),
    "experts": ("config", {"num_experts": 4}, "num_active_experts must be at most num_experts=4, got 0"),
    "experts-huge": ("config", {"num_experts": HUGE}, "num_experts must be an integer"),
    "softcap": ("config", {"final_softcap": -30.0}, "final_softcap must be a number"),
    "groups": ("config", {"num_expert_groups": 0}, "num_expert_groups must be an integer"),
    "dtype": ("dtypes", {"embedding": "float7"}, "dtypes: embedding must be one of float32, float16, bfloat16, got 'float7'"),
    "dtype-integer": ("dtypes", {"embedding": "int8"}, "dtypes: embedding must be one of"),
    "dtype-object": ("dtypes", {"embedding": {"a": []}}, "dtypes: embedding must be one of"),
    "dtype-other": ("dtypes", {"embedding": "float16"}, r"embedding/\.zarray: dtype must be <f2, .*got '<f4'"),
    "dtype-of-none": ("dtypes", {"layers.7.query": "float32"}, "dtypes must name each weight .*got 'layers.7.query'"),
    "shape": ("config", {"mlp_width": 64}, r"\.zarray: shape must be \[32, 64\], .*got \[32, 48\]"),
    "one-layer-more": ("config", {"num_layers": 3}, "dtypes must name each weight .*'layers.2"),
    "digest": ("sha256", {"weights/_METADATA": 5}, "_METADATA must be a SHA-256"),
    "file-outside": ("sha256", {"weights/../../x": "0" * 64}, "sha256 must name files of weights, got 'weights/../../x'"),
    "file-absolute": ("sha256", {"/etc/passwd": "0" * 64}, "sha256 must name files of weights, got '/etc/passwd'"),
}


@pytest.mark.parametrize(("part", "fields", "message"), HOSTILE.values(), ids=HOSTILE)
def test_nonsense_in_jkv_json_is_refused_at_once_by_name(part, fields, message, copy):
    with_fields(copy, part, **fields)
    for read in (jkv.restore, jkv.load):
        begin = time.process_time()
        with pytest.raises(ValueError, match=f"{copy}.*{message}"):
            read(copy)
        assert time.process_time() - begin < AT_ONCE


@pytest.mark.parametrize("part", ["config", "dtypes", "sha256"])
@pytest.mark.parametrize("value", [None, 5, "x", [], nested(50)], ids=["null", "number", "text", "list", "nested"])
def test_a_part_of_jkv_json_that_is_no_object_is_refused(part, value, copy):
    content = json.loads((copy / "jkv.json").read_text()) | {part: value}
    (copy / "jkv.json").write_text(saved_weights.sealed(content))
    with pytest.raises(ValueError, match=rf"jkv\.json: {part} must be an object"):
        jkv.load(copy)


def test_deep_and_large_jkv_json_is_refused(copy):
    text = (copy / "jkv.json").read_text()
    for config in ("[" * 99 + "]" * 99, "[" * 99_999 + "]" * 99_999, "1" * 9999, "NaN", "1e999"):
        (copy / "jkv.json").write_text(text.replace('"width": 32', f'"width": {config}'))
        with pytest.raises(ValueError, match=r"jkv\.json must be JSON"):
            jkv.load(copy)


def test_an_unlisted_file_and_a_link_out_of_the_folder_are_refused(copy, tmp_path):
    extra = copy / "weights" / "embedding" / "0.1"
    extra.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"must have the files that were saved alone; it has also .*embedding/0\.1"):
        jkv.restore(copy)
    extra.unlink()
    array = copy / "weights" / "embedding" / "0.0"
    (tmp_path / "elsewhere").write_bytes(array.read_bytes())
    array.unlink()
    array.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"0\.0 must lie in its folder, got a link to"):
        jkv.restore(copy)


def test_an_array_whose_own_description_is_nonsense_is_refused(copy):
    name = "weights/embedding/.zarray"
    fields = json.loads((copy / name).read_text())
    for wrong, message in (
        ({"shape": [10**12, 32]}, "shape must be"),
        ({"dtype": "<i8"}, "dtype must be <f4"),
        ({"order": "F"}, "order must be C"),
        ({"chunks": [10**12, 1]}, "chunks must lie in shape"),
        ({"chunks": [0, 1]}, "chunks must be a list"),
        ({"chunks": nested(20)}, "chunks must be a list"),
    ):
        (copy / name).write_text(json.dumps(fields | wrong))
        digest = hashlib.sha256((copy / name).read_bytes()).hexdigest()
        with_fields(copy, "sha256", **{name: digest})
        with pytest.raises(ValueError, match=rf"embedding/\.zarray: {message}"):
            jkv.load(copy)


def test_metadata_that_orbax_cannot_read_are_refused(copy):
    for name, text in (("embedding/.zarray", None), ("_METADATA", "[" * 100_000)):
        file = copy / "weights" / name
        file.write_text(text or json.dumps(json.loads(file.read_text()) | {"chunks": [1, 1]}))
        with_fields(copy, "sha256", **{f"weights/{name}": hashlib.sha256(file.read_bytes()).hexdigest()})
        with pytest.raises(ValueError, match=r"weights must be complete and fit the shardings: [^\n]{1,600}Save it again"):
            jkv.load(copy)


def test_what_restore_would_refuse_is_not_saved(model, tmp_path):
    params = model.params.replace(config=dataclasses.replace(model.params.config, family="gpt5"))
    with pytest.raises(ValueError, match=r"params\.config: family must be one of"):
        jkv.save(params, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_configurations_of_every_family_are_read_as_they_were_written():
    golden = [checkpoint.read_config(file.parent) for file in GOLDEN.glob("*/config.json")]
    for config in [*CONFIGS.values(), *golden]:
        assert read_fields(json.loads(json.dumps(dataclasses.asdict(config))), config.family) == config


def test_a_save_warns_of_nothing(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="absl"):
        jkv.save(model.params, tmp_path)
    assert not caplog.records
    logging.getLogger("absl").warning("others come through")
    assert len(caplog.records) == 1


SAVES = """
import resource, sys
import jkv
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
params = jkv.testing.tiny_model().params
print("saves", flush=True)
jkv.save(params, sys.argv[1])
"""


def start(*words):
    return subprocess.Popen(
        [sys.executable, "-c", SAVES, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def assert_whole_or_refused(folder, params):
    """What a save that was cut off left: all weights, or an error; and the next save works. Whether it was whole."""
    is_whole = (folder / "jkv.json").exists()
    if is_whole:
        assert_equal(jkv.restore(folder), params)
    else:
        with pytest.raises(ValueError, match=r"jkv\.json"):
            jkv.restore(folder)
        if (folder / "weights").exists():
            with pytest.raises(ValueError, match="of a save that did not finish"):
                jkv.save(params, folder)
            with pytest.raises(ValueError, match="of a save that did not finish: save it again"):
                jkv.restore(folder)
            shutil.rmtree(folder / "weights")
        jkv.save(params, folder)
        assert_equal(jkv.restore(folder), params)
    return is_whole


def test_a_save_on_a_full_disk_is_an_error_and_the_next_one_is_whole(model, tmp_path):
    process = start(tmp_path / "saved", 500)
    errors = process.communicate()[1].decode()
    assert process.returncode == 1
    assert "File too large" in errors
    assert not assert_whole_or_refused(tmp_path / "saved", model.params)


def kill_saves(tmp_path, params, moments):
    """Kills a save at shares of the time that one takes; which of them were whole."""
    process = start(tmp_path / "timed")
    process.stdout.readline()
    began = time.monotonic()
    assert process.wait() == 0
    whole = time.monotonic() - began
    outcomes = []
    for i, moment in enumerate(moments):
        process = start(tmp_path / str(i))
        process.stdout.readline()
        time.sleep(whole * moment)
        process.kill()
        process.communicate()
        outcomes.append(assert_whole_or_refused(tmp_path / str(i), params))
    return outcomes


@pytest.mark.parametrize(
    ("moments", "outcomes"),
    [([0.2], {False}), pytest.param([i / 40 for i in range(48)], {False, True}, marks=pytest.mark.slow)],
    ids=["one", "many"],
)
def test_a_save_that_was_killed_is_whole_or_refused(model, tmp_path, moments, outcomes):
    assert set(kill_saves(tmp_path, model.params, moments)) == outcomes


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_save_killed_between_its_weights_and_its_configuration_is_refused(moment, model, tmp_path, monkeypatch):
    def write(path, text):
        if moment == "after":
            Path(path).with_suffix(".part").write_text(text)
        raise KeyboardInterrupt

    monkeypatch.setattr("jkv.checkpoints.saved_weights.write_text", write)
    with pytest.raises(KeyboardInterrupt):
        jkv.save(model.params, tmp_path / "x")
    monkeypatch.undo()
    assert (tmp_path / "x" / "weights").exists()
    assert not assert_whole_or_refused(tmp_path / "x", model.params)
    assert os.listdir(tmp_path) == ["x"]
