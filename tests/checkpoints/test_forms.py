"""Forms of model files that people have: logits are those of transformers, and replay gives what the engine computed."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jkv
from jkv.checkpoints import loading as checkpoint
from tests.support.checkpoints import GOLDEN, assert_equal, config_folder, dense_logits, golden_copy

FORMS = Path(__file__).parents[1] / "support" / "forms"
CASES = sorted(path.name for path in FORMS.iterdir() if path.is_dir())
NEW = "llama_bias", "qwen3_moe_sparse"  # with other arithmetic than a golden checkpoint


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_are_those_of_transformers(case):
    model, reference = jkv.load(FORMS / case), np.load(FORMS / case / "reference.npz")
    size = len(reference["prompt"])
    logits = dense_logits(model.params, np.concatenate([reference["prompt"], reference["greedy"]]))
    np.testing.assert_allclose(logits[:size], reference["prompt_logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[size - 1 : -1], reference["decode_logits"], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(logits[size - 1 : -1].argmax(-1), reference["greedy"])


@pytest.mark.parametrize("case", NEW)
def test_the_engine_draws_the_tokens_of_transformers_and_replay_agrees(case, tmp_path):
    model, reference = jkv.load(FORMS / case), np.load(FORMS / case / "reference.npz")
    prompt = reference["prompt"].tolist()
    settings = {"max_new_tokens": 48, "page_size": 4, "stop_ids": (), "progress": False}
    full = jkv.generate(model, prompt, sampling=jkv.Sampling(temperature=0.0), **settings)
    assert full.tokens[0].tolist() == reference["greedy"][:48].tolist()
    policy = jkv.r_kv(budget=16, interval=8, protect_prompt=False)
    out = jkv.generate(model, prompt, policy=policy, return_trace=True, **settings)
    replayed = np.asarray(jkv.score(model, out, trace=out.trace).logprobs)
    np.testing.assert_allclose(replayed, out.logprobs, rtol=0, atol=1e-4)
    checkpoint.export(model.params, None, tmp_path, dtype=jnp.float32)
    assert_equal(jkv.load(tmp_path).params, model.params)


def test_layers_without_experts_are_those_that_the_file_lists():
    config = jkv.load(FORMS / "qwen3_moe_sparse").config
    assert (config.expert_layers, config.dense_layers, config.dense_width) == ((1,), (0, 2, 3), 48)


# Longrope by the length of the text


def test_longrope_has_its_short_factors_in_a_model_of_its_original_context():
    """As transformers computes a text of this length; with all positions, jkv takes the long factors."""
    prompt = np.load(GOLDEN / "phi3_longrope" / "reference.npz")["prompt"][:16]
    expected = np.load(FORMS / "phi3_short.npz")["short_logits"]
    short, long = (jkv.load(GOLDEN / "phi3_longrope", max_positions=most) for most in (16, None))
    np.testing.assert_allclose(dense_logits(short.params, prompt), expected, rtol=0, atol=1e-4)
    assert np.abs(dense_logits(long.params, prompt) - expected).max() > 1
    assert short.config.max_positions == 16


@pytest.mark.parametrize("most", [0, 257])
def test_a_model_has_no_more_positions_than_its_file_says(most):
    with pytest.raises(ValueError, match=f"max_positions must be from 1 to the 256 positions of the model; got {most}"):
        jkv.load(GOLDEN / "phi3_longrope", max_positions=most)


def test_su_is_an_older_name_of_longrope(tmp_path):
    fields = json.loads((GOLDEN / "phi3_longrope" / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    plain = {name: rope[name] for name in ("short_factor", "long_factor")}
    outside = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps(fields | outside | {"rope_scaling": plain | {"type": "su"}}))
    assert checkpoint.read_config(tmp_path) == checkpoint.read_config(GOLDEN / "phi3_longrope")


# Texts that may be as long as a window, or as an original context


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": 88}),
        ("phi3", {"sliding_window": 88}),
        ("qwen2", {"sliding_window": 88, "use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", {"sliding_window": 88, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}),
    ],
    ids=["mistral", "phi3", "qwen2", "qwen3"],
)
def test_a_window_in_all_layers_is_full_attention_in_texts_of_its_length(family, fields, tmp_path):
    folder = config_folder(tmp_path, family, **fields)
    with pytest.warns(UserWarning, match="at most 88 tokens in place of 256, because every layer has a sliding window"):
        config = checkpoint.read_config(folder)
    assert (config.max_positions, config.window_layers) == (88, ())


def test_a_windowed_checkpoint_runs_texts_of_its_window_alone(tmp_path):
    with pytest.warns(UserWarning, match="sliding window"):
        model = jkv.load(golden_copy(tmp_path, "mistral", sliding_window=88))
    assert_equal(model.params.embedding, jkv.load(GOLDEN / "mistral").params.embedding)
    with pytest.raises(ValueError, match="88"):
        jkv.generate(model, [1] * 80, max_new_tokens=9, progress=False)


SCALED = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 2.0,
    "original_max_position_embeddings": 88,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def test_ministral_3_is_a_mistral_with_yarn_up_to_its_original_context(tmp_path):
    names = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    plain = golden_copy(tmp_path / "plain", "mistral", rope_parameters=SCALED)
    with pytest.warns(UserWarning, match="at most 88 tokens in place of 256, because queries are scaled"):
        config = checkpoint.read_config(golden_copy(tmp_path / "scaled", "mistral", **names, rope_parameters=SCALED))
    other = checkpoint.read_config(plain)
    assert (config.max_positions, config.rope_scaling) == (88, other.rope_scaling)
    assert config.rope_scaling.attention_factor == 1
    (tmp_path / "one").mkdir()
    unscaled = golden_copy(tmp_path / "one", "mistral", **names, rope_parameters=SCALED | {"llama_4_scaling_beta": 0})
    assert checkpoint.read_config(unscaled).max_positions == 256


# The text model of a checkpoint that also reads images


def in_images(folder, **fields):
    """The golden Mistral inside of a checkpoint of `Mistral3ForConditionalGeneration`, without its tower."""
    golden_copy(folder, "mistral")
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    whole |= {
        "vision_config": {"hidden_size": 16},
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    }
    (folder / "config.json").write_text(json.dumps(whole | fields))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {name: np.zeros(2, np.float32) for name in ("vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_text_model_of_mistral_3_is_loaded(tmp_path):
    expected = jkv.load(GOLDEN / "mistral").params
    assert_equal(jkv.load(in_images(tmp_path)).params, expected)
    in_images(tmp_path, tie_word_embeddings=True)  # which counts, so that the unembedding must be the embedding
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal"):
        jkv.load(tmp_path)
