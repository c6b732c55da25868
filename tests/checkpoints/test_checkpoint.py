"""Reading and writing weights: parity, damage, names and exports."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints import saved_weights
from research.tasks import vocabulary
from tests.support.checkpoints import (
    CASES,
    CONFIGS,
    GOLDEN,
    SMALL,
    assert_equal,
    change_tensors,
    config_folder,
    dense_logits,
    families,
    golden_copy,
    random_params,
)

# Parity


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    reference = np.load(GOLDEN / case / "reference.npz")
    params = checkpoint.load(GOLDEN / case).params
    logits = dense_logits(params, np.concatenate([reference["prompt"], reference["greedy"]]))
    size = len(reference["prompt"])
    np.testing.assert_allclose(logits[:size], reference["prompt_logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[size - 1 : -1], reference["decode_logits"], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(logits[size - 1 : -1].argmax(-1), reference["greedy"])


@families
def test_transformers_reads_an_export_and_computes_the_same(config, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    params, tokens = random_params(config), np.random.default_rng(0).integers(0, config.vocab_size, 80)
    checkpoint.export(params, None, tmp_path / "export", dtype=jnp.float32)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(dense_logits(params, tokens), expected, rtol=0, atol=1e-4)
    theirs.save_pretrained(tmp_path / "again")
    assert_equal(checkpoint.load(tmp_path / "again").params, params)


# Weights


def test_weights_are_float32_on_cpu_and_any_dtype_on_request():
    shipped = checkpoint.load(GOLDEN / "qwen3").params
    asked = checkpoint.load(GOLDEN / "qwen3", dtype=jnp.bfloat16).params
    assert {leaf.dtype for leaf in jax.tree.leaves(shipped)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(asked)} == {jnp.dtype("bfloat16")}
    assert_equal(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), asked), shipped)


def test_off_cpu_the_dtype_is_the_checkpoints_own(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert checkpoint.load(GOLDEN / "qwen3").params.embedding.dtype == jnp.bfloat16
    assert checkpoint.load(GOLDEN / "phi3").params.embedding.dtype == jnp.float32


def test_an_integer_dtype_is_refused():
    with pytest.raises(ValueError, match="float32, bfloat16 or float16; got int8"):
        checkpoint.load(GOLDEN / "phi3", dtype=jnp.int8)


def test_a_weight_too_large_for_the_dtype_is_refused(tmp_path):
    def enlarge(tensors):
        tensors["model.norm.weight"][0] = 1e6

    change_tensors(golden_copy(tmp_path) / "model.safetensors", enlarge)
    checkpoint.load(tmp_path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight must be finite.*float16.*float32"):
        checkpoint.load(tmp_path, dtype=jnp.float16)


DOWN = "model.layers.1.mlp.down_proj.weight"
DAMAGE = {
    "missing": (lambda tensors: tensors.pop(DOWN), f"model.safetensors must contain {DOWN}"),
    "no-unembedding": (lambda tensors: tensors.pop("lm_head.weight"), "must contain lm_head.weight.*tie_word_embeddings"),
    "shape": (lambda tensors: tensors.update({DOWN: np.zeros((48, 32), np.float32)}), rf"{DOWN} .*\(32, 48\), got \(48, 32\)"),
    "dtype": (lambda tensors: tensors.update({DOWN: tensors[DOWN].astype(np.int8)}), f"{DOWN} must be one of F32.*got I8"),
    "surplus": (lambda tensors: tensors.update({"model.extra": np.zeros(1)}), "must not contain model.extra"),
    "nan": (lambda tensors: tensors[DOWN].__setitem__((0, 0), np.nan), f"model.safetensors: {DOWN} must be finite.*NaN"),
    "infinity": (lambda tensors: tensors[DOWN].__setitem__((0, 0), -np.inf), f"model.safetensors: {DOWN} must be finite"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_bad_tensors_are_named(change, message, tmp_path):
    change_tensors(golden_copy(tmp_path) / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path)


def test_rotary_frequencies_in_old_files_are_ignored(tmp_path):
    change_tensors(
        golden_copy(tmp_path) / "model.safetensors",
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}),
    )
    assert_equal(checkpoint.load(tmp_path).params, checkpoint.load(GOLDEN / "llama_scaled").params)


def test_a_tied_unembedding_may_lie_in_the_file_but_not_differ(tmp_path):
    file = golden_copy(tmp_path, "llama_tied") / "model.safetensors"
    change_tensors(file, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert checkpoint.load(tmp_path).params.unembedding is None
    change_tensors(file, lambda tensors: tensors.update({"lm_head.weight": -tensors["lm_head.weight"]}))
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal.*tie_word_embeddings"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 500, -1], ids=["empty", "no-header", "half-a-header", "last-byte-missing"])
def test_a_cut_shard_is_named(size, tmp_path):
    shard = golden_copy(tmp_path, "qwen2") / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{shard.name} must be a safetensors file.*again"):
        checkpoint.load(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    (golden_copy(tmp_path, "qwen2") / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"every shard.*missing: model-00002-of-00002\.safetensors"):
        checkpoint.load(tmp_path)


def test_an_index_without_shards_is_refused(tmp_path):
    (golden_copy(tmp_path, "qwen2") / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match=r"index\.json must name the shard"):
        checkpoint.load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must contain model\.safetensors or"):
        checkpoint.load(config_folder(tmp_path))


# Names


@pytest.mark.parametrize(
    "name", ["no-such-model", "./missing/folder", "/missing/folder", "a/b/c", Path("missing/folder")], ids=repr
)
def test_an_unknown_name_lists_the_shipped_ones_and_never_reaches_the_network(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("reached the network"))
    monkeypatch.setattr(checkpoint.resources, "files", lambda _: tmp_path)
    shutil.copytree(GOLDEN / "phi3", tmp_path / "assets" / "tiny-shipped")
    with pytest.raises(FileNotFoundError, match=r"tiny-shipped.*Check the name"):
        checkpoint.load(name)


def test_a_shipped_name_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.resources, "files", lambda _: tmp_path)
    shutil.copytree(GOLDEN / "phi3", tmp_path / "assets" / "tiny-shipped")
    model = checkpoint.load("tiny-shipped")
    assert model.name == "tiny-shipped"
    assert model.tokenizer is None
    assert_equal(model.params, checkpoint.load(str(GOLDEN / "phi3")).params)


def fake_hub(monkeypatch, folder):
    """A hub whose every repository is this folder; returns the record of what was asked of it."""
    asked = []

    def download(name, allow_patterns, **_):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_a_hub_name_is_fetched_weights_last(monkeypatch):
    asked = fake_hub(monkeypatch, GOLDEN / "qwen2")
    assert checkpoint.load("org/name-1.5B").name == "org/name-1.5B"
    assert [name for name, _ in asked] == ["org/name-1.5B"] * 2
    assert not any("safetensors" in pattern for pattern in asked[0][1])
    assert asked[1][1] == ["*.safetensors"]


def test_weights_of_a_refused_hub_model_are_not_fetched(tmp_path, monkeypatch):
    asked = fake_hub(monkeypatch, config_folder(tmp_path, hidden_act="gelu"))
    with pytest.raises(ValueError, match="gelu"):
        checkpoint.load("org/name")
    assert len(asked) == 1


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_what_to_do(monkeypatch):
    def download(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=r"'org/name' is not a local folder.*no route.*download it first"):
        checkpoint.load("org/name")


# Export


@families
def test_an_export_is_read_back_bit_for_bit(config, tmp_path):
    params = random_params(config)
    checkpoint.export(params, None, tmp_path, dtype=jnp.float32)
    assert_equal(checkpoint.load(tmp_path).params, params)


def test_an_export_is_bfloat16_with_its_tokenizer_unless_told_otherwise(tmp_path):
    params, tokenizer = random_params(CONFIGS["qwen3-tied"]), vocabulary.make_tokenizer()
    checkpoint.export(params, tokenizer, tmp_path / "new" / "folder")
    model = checkpoint.load(tmp_path / "new" / "folder")
    assert_equal(model.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params))
    text = "a=3;b=a*a;?b<think>"
    assert model.tokenizer.encode(text) == tokenizer.encode(text)
    assert {tensor.dtype.name for tensor in load_file(tmp_path / "new" / "folder" / "model.safetensors").values()} == {
        "bfloat16"
    }


def test_an_export_that_its_family_cannot_express_is_refused(tmp_path):
    params = random_params(dataclasses.replace(SMALL, qkv_bias=True))
    with pytest.raises(ValueError, match=r"llama checkpoint .* with out_bias=True in place of False\. Correct it"):
        checkpoint.export(params, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("write", ["export", "save"])
def test_weights_that_do_not_fit_their_configuration_are_not_written(write, tmp_path):
    params = random_params(SMALL).replace(unembedding=None)
    with pytest.raises(ValueError, match=r"unembedding must have shape \(32, 96\).*got None"):
        checkpoint.export(params, None, tmp_path) if write == "export" else saved_weights.save(params, tmp_path)
    assert not any(tmp_path.iterdir())
