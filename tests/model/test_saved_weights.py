"""Saved weights that were damaged, cut off or killed are refused by name, and never restored as others."""

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

    monkeypatch.setattr("jkv.model.saved_weights.write_text", write)
    with pytest.raises(KeyboardInterrupt):
        jkv.save(model.params, tmp_path / "x")
    monkeypatch.undo()
    assert (tmp_path / "x" / "weights").exists()
    assert not assert_whole_or_refused(tmp_path / "x", model.params)
    assert os.listdir(tmp_path) == ["x"]
