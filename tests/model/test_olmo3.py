"""OLMo-3: its config.json, its norms, and RoPE by the kind of layer, through the engine and in replay.

Parity with transformers is in `test_decoder.py` (the golden checkpoint `olmo3`).
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.model_shapes import find_shape
from jkv.model import decoder
from jkv.testing import TinyTokenizer, tiny_model
from tests.model.test_decoder import GOLDEN
from tests.support.olmo3 import CONFIG, with_random_norms

CASE = GOLDEN / "olmo3"
MODEL = with_random_norms(tiny_model(1, CONFIG, TinyTokenizer()))
PROMPTS = [list(range(1, 22)), [4, 4, 9], [7]]
KNOBS = {"max_new_tokens": 40, "page_size": 4, "chunk": 8, "stop_ids": (), "progress": False, "poison": True}


def run(model=MODEL, **settings):
    return jkv.generate(model, PROMPTS, **{"sampling": jkv.Sampling(seed=1)} | KNOBS | settings)


@pytest.fixture(scope="module")
def out():
    """Tokens that the model has drawn."""
    return run(return_trace=True)


@pytest.mark.parametrize(
    "change",
    [{"norms_after": False}, {"window_theta": None}, {"window_scaling": None}, {"rope_theta": 90.0}],
    ids=lambda change: next(iter(change)),
)
def test_each_feature_changes_what_is_computed(out, change):
    other = MODEL.params.replace(config=dataclasses.replace(CONFIG, **change))
    assert np.abs(np.asarray(jkv.score(other, out, trace=out.trace).logprobs) - out.logprobs).max() > 1e-3


def test_queries_and_keys_have_one_norm_over_all_heads():
    weights, x = MODEL.params.layers[0], jax.random.normal(jax.random.key(0), (2, 3, CONFIG.width))
    query, key, *_ = decoder.project(CONFIG, weights, x)
    for got, matrix, norm in ((query, weights.query, weights.all_query_norm), (key, weights.key, weights.all_key_norm)):
        flat = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64)
        expected = flat / np.sqrt((flat**2).mean(axis=-1, keepdims=True) + CONFIG.norm_epsilon) * np.asarray(norm, np.float64)
        np.testing.assert_allclose(got.reshape(flat.shape), expected, rtol=1e-5, atol=1e-6)


# The configuration and the tensors.

PUBLISHED = {  # config.json of allenai/Olmo-3-7B-Think
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_cache": False,
    "vocab_size": 100278,
}


def test_the_published_configuration_is_the_shape_of_that_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert checkpoint.read_config(tmp_path) == find_shape("olmo3-7b")[1]


def folder_of(folder, **fields):
    """A copy of the golden checkpoint, some fields of its config.json changed."""
    shutil.copytree(CASE, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_window_of_all_positions_keeps_the_rope_of_its_layers(tmp_path):
    config = checkpoint.read_config(folder_of(tmp_path, sliding_window=4096))
    assert (config.window, config.window_layers, config.window_theta) == (4096, (0, 2), 50.0)


YARN = json.loads((CASE / "config.json").read_text())["rope_parameters"]["full_attention"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_qkv": 8.0}, r"every field must be known.*\['clip_qkv'\]"),
        ({"attention_bias": True}, "attention_bias must be false in Olmo3"),
        (
            {"rope_parameters": {"full_attention": YARN, "chunked_attention": YARN}},
            "must have an object for.*chunked_attention",
        ),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": 3}}, "must have an object for"),
        (
            {"rope_parameters": {"full_attention": YARN | {"factor": 0.5}, "sliding_attention": YARN}},
            "rope_parameters: full_attention: factor must be",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "a layer must have full attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jkv.load(str(folder_of(tmp_path, **fields)))


def test_a_checkpoint_is_written_as_it_was_read(tmp_path):
    model = jkv.load(str(CASE))
    checkpoint.export(model.params, None, tmp_path, dtype=jnp.float32)
    one, other = (load_file(folder / "model.safetensors") for folder in (CASE, tmp_path))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    assert jkv.load(str(tmp_path)).config == model.config
