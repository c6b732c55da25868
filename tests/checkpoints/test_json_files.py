"""JSON files that are damaged, too large, or no regular files of their folder."""

import os
import shutil
import socket

import pytest

from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.json_files import MAX_VALUES, find_file, read_json
from research.tasks import vocabulary
from tests.support import checkpoint_fuzz
from tests.support.checkpoints import GOLDEN, assert_equal, golden_copy
from tests.support.hostile_folders import refused

BAD_JSON = {
    "nan": ('{"a": NaN}', "must be finite, got NaN"),
    "infinity": ('{"a": -Infinity}', "must be finite, got -Infinity"),
    "overflow": ('{"a": 1e999}', "must be finite"),
    "twice": ('{"vocab_size": 1, "vocab_size": 2}', "'vocab_size' occurs twice"),
    "deep": ('{"a": ' + "[" * 100 + "]" * 100 + "}", "at most 64 levels, got 101"),
    "very-deep": ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "at most 64 levels"),
    "digits": ('{"a": ' + "9" * 5000 + "}", "must be JSON"),
    "surrogates": (b'{"a": "\xed\xa0\x80"}', "must be JSON"),
    "zeros": (b"\0" * 100, "must be JSON"),
    "large": (b" " * ((1 << 20) + 1), "at most 1,048,576 bytes, got 1,048,577"),
    "list": ("[]", "must contain a JSON object, got a list"),
}


@pytest.mark.parametrize(("text", "message"), BAD_JSON.values(), ids=BAD_JSON)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_bad_json_is_refused_at_once(text, message, name, tmp_path):
    golden_copy(tmp_path)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(tmp_path, f"{tmp_path / name}.*{message}")


def test_a_file_of_many_values_is_refused_before_it_is_parsed(tmp_path):
    (tmp_path / "a.json").write_text("[" + "[]," * (MAX_VALUES // 2) + "[]]")
    with pytest.raises(ValueError, match=f"at most {MAX_VALUES:,} values"):
        read_json(tmp_path / "a.json")


# Places


def make_special(path, kind):
    if kind == "socket":
        os.chdir(path.parent)  # the name of a socket is short
        socket.socket(socket.AF_UNIX).bind(path.name)
    else:
        checkpoint_fuzz.place_special(path, kind)


SPECIAL = ("fifo", "folder", "socket", "/dev/zero", "/dev/full", "loop", "nowhere", "/etc/hostname", "/proc/self/environ")


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_json_file_that_is_no_regular_file_of_the_folder_is_refused_at_once(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # restored after a socket
    golden_copy(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make_special(tmp_path / name, kind)
    refused(tmp_path, rf"{tmp_path / name} must (be a (regular|readable) file|lie in its folder)")


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "nowhere"])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_weights_that_are_no_regular_files_are_refused_at_once(name, kind, tmp_path):
    golden_copy(tmp_path, "qwen2")
    (tmp_path / name).unlink()
    make_special(tmp_path / name, kind)
    refused(tmp_path, rf"{tmp_path / name} must be a (regular|readable) file")


def test_weights_of_another_folder_are_not_read_through_a_link(tmp_path):
    golden_copy(tmp_path / "other")
    golden_copy(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors").symlink_to("../other/model.safetensors")
    refused(tmp_path / "model", r"model\.safetensors must lie in its folder, got a link to .*other")


@pytest.mark.parametrize("is_shared", [False, True], ids=["blobs", "blobs-shared-by-models"])
def test_a_snapshot_of_the_hub_cache_is_links_and_loads(is_shared, tmp_path):
    repository, revision = tmp_path / "models--org--name", "0123abc"
    snapshot, blobs, store = repository / "snapshots" / revision, repository / "blobs", tmp_path / "blobs" / "ab"
    for folder in (snapshot, blobs, store):
        folder.mkdir(parents=True)
    golden_copy(tmp_path / "model", "qwen2")
    vocabulary.make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    for number, file in enumerate(sorted(path for path in (tmp_path / "model").rglob("*") if path.is_file())):
        link = snapshot / file.relative_to(tmp_path / "model")
        shutil.copy(file, (store if is_shared else blobs) / str(number))
        if is_shared:
            (blobs / str(number)).symlink_to(f"../../blobs/ab/{number}")
        link.symlink_to(f"../../blobs/{number}")
    model = checkpoint.load(snapshot)
    assert model.tokenizer is not None
    assert_equal(model.params, checkpoint.load(tmp_path / "model").params)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../model/config.json")
    refused(snapshot, r"config\.json must lie in its folder")


def test_a_link_inside_of_the_folder_and_a_link_to_the_folder_are_fine(tmp_path):
    golden_copy(tmp_path / "model")
    (tmp_path / "model" / "config.json").rename(tmp_path / "model" / "mine.json")
    (tmp_path / "model" / "config.json").symlink_to("mine.json")
    (tmp_path / "link").symlink_to("model")
    assert_equal(checkpoint.load(tmp_path / "link").params, checkpoint.load(GOLDEN / "llama_scaled").params)
    assert find_file(tmp_path / "link" / "absent") is None
