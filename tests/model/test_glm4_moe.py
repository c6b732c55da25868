"""GLM-4.5: its config.json, its tensors, its router, and all of it through the engine and in replay.

Parity with transformers is in `test_decoder.py` (the golden checkpoints `glm4_moe` and `glm4_moe_air`).
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.model_shapes import find_shape
from jkv.model import experts
from jkv.model.eight_bits import quantise_weights
from jkv.testing import adapted, tiny_model
from tests.model.test_decoder import GOLDEN
from tests.support.glm import CONFIG, with_random_biases
from tests.support.mixes import BreakingTokenizer

CASE = GOLDEN / "glm4_moe"
MODEL = with_random_biases(tiny_model(1, CONFIG, BreakingTokenizer()))
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
    [
        {"num_active_groups": 4},
        {"route_scale": 1.0},
        {"normalises_experts": False},
        {"rotary_size": 0},
        {"qk_norm": False},
        {"routes_by_sigmoid": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_feature_changes_what_is_computed(out, change):
    other = MODEL.params.replace(config=dataclasses.replace(CONFIG, **change))
    assert np.abs(np.asarray(jkv.score(other, out, trace=out.trace).logprobs) - out.logprobs).max() > 1e-3


def test_weights_in_8_bits_and_adapters_of_the_shared_block():
    coded = dataclasses.replace(MODEL, params=quantise_weights(MODEL.params, "int8"))
    kinds = {type(x).__name__ for x in (coded.params.layers[1].gate, coded.params.layers[1].experts.gate)}
    assert kinds == {"Codes"}
    assert coded.params.layers[1].experts.choice_bias.dtype == jnp.float32
    for params in (coded.params, adapted(MODEL.params)):
        out = run(params)
        np.testing.assert_allclose(jkv.score(params, out).logprobs, out.logprobs, atol=1e-4)


# The router.


def routed(config, weights, token):
    """Token by token, in float64: the experts in the order of their ratings, and their weights (arXiv 2412.19437)."""
    shares, chosen = [], []
    for x in np.asarray(token, np.float64):
        rating = 1 / (1 + np.exp(-(x @ np.asarray(weights.router, np.float64))))
        choice = rating + np.asarray(weights.choice_bias, np.float64)
        groups = np.split(np.arange(config.num_experts), config.num_expert_groups)
        best = sorted(groups, key=lambda group: -np.sort(choice[group])[-2:].sum())[: config.num_active_groups]
        own = sorted(np.concatenate(best), key=lambda e: -choice[e])[: config.num_active_experts]
        total = rating[own].sum() if config.normalises_experts else 1.0
        shares.append(rating[own] / total * config.route_scale)
        chosen.append(own)
    return np.array(shares), np.array(chosen)


@pytest.mark.parametrize("change", [{}, {"num_active_groups": 1}, {"normalises_experts": False}, {"num_expert_groups": 1}])
def test_the_router_chooses_experts_of_the_best_groups(change):
    config = dataclasses.replace(CONFIG, num_active_experts=2, **change)
    config = dataclasses.replace(config, num_active_groups=min(config.num_active_groups, config.num_expert_groups))
    weights, token = MODEL.params.layers[1].experts, jax.random.normal(jax.random.key(3), (200, CONFIG.width))
    share, expert = experts.route(config, weights, token)
    expected, chosen = routed(config, weights, token)
    np.testing.assert_array_equal(expert, chosen)
    np.testing.assert_allclose(share, expected, rtol=1e-5)
    unbiased = routed(config, weights.replace(choice_bias=jnp.zeros(config.num_experts)), token)[1]
    assert (unbiased != chosen).any()  # so the bias matters


# The configuration.

PUBLISHED = {  # config.json of zai-org/GLM-4.5-Air
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
LARGER = {  # what differs in zai-org/GLM-4.5
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}


@pytest.mark.parametrize(("name", "fields"), [("glm-4.5-air", {}), ("glm-4.5", LARGER)], ids=["air", "larger"])
def test_the_published_configurations_are_the_shapes_of_those_names(tmp_path, name, fields):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | fields))
    assert checkpoint.read_config(tmp_path) == find_shape(name)[1]


def folder_of(folder, **fields):
    """A copy of the golden checkpoint, some fields of its config.json changed, or removed by `...`."""
    shutil.copytree(CASE, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


def test_half_of_a_head_is_rotated_where_nothing_is_said(tmp_path):
    folder = folder_of(tmp_path, rope_parameters=..., rope_theta=10_000.0)
    assert checkpoint.read_config(folder).rotary_size == 8
    assert checkpoint.read_config(folder_of(tmp_path, rope_parameters=..., partial_rotary_factor=1.0)).rotary_size == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp_only_layers": [0], "moe_layer_freq": 2}, r"every field must be known.*\['mlp_only_layers', 'moe_layer_freq'\]"),
        ({"num_experts": 12}, r"every field must be known.*\['num_experts'\]"),
        ({"n_routed_experts": ...}, "n_routed_experts must be an integer .*got none"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok must be at most n_routed_experts=12, got 13"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 experts must be in topk_group=2 of n_group=4 groups"),
        ({"n_group": 5}, "n_routed_experts=12 must be n_group equal groups of at least 2 experts, got n_group=5"),
        ({"n_group": 12}, "n_routed_experts=12 must be n_group equal groups of at least 2 experts, got n_group=12"),
        ({"topk_group": 5}, "topk_group must be at most n_group=4, got 5"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace must be below num_hidden_layers=3, got 3"),
        ({"first_k_dense_replace": 0}, r"must contain model\.layers\.0\.mlp\.shared_experts.* and \d+ more; missing"),
        ({"n_shared_experts": 1}, r"shared_experts\.gate_proj\.weight must have shape \(16, 32\), got \(32, 32\)"),
        ({"n_shared_experts": 0}, "n_shared_experts must be an integer"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be a number"),
        ({"use_qk_norm": False}, "must not contain .*k_norm"),
        ({"attention_bias": False}, "must not contain .*k_proj.bias"),
        ({"quantization_config": {"quant_method": "hqq"}}, "unquantised.*hqq"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jkv.load(str(folder_of(tmp_path, **fields)))


# The tensors.


def test_a_layer_of_multi_token_prediction_is_not_read_and_any_other_is_refused(tmp_path):
    folder, tensors = folder_of(tmp_path), load_file(CASE / "model.safetensors")
    more = {name.replace("layers.2.", "layers.3."): x for name, x in tensors.items() if "layers.2." in name}
    save_file(tensors | more, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"must not contain model\.layers\.3\."):
        jkv.load(str(folder))
    prediction = {"model.layers.3.eh_proj.weight": np.zeros((32, 64), np.float32)}
    save_file(tensors | more | prediction, folder / "model.safetensors")
    one, other = jkv.load(str(folder)), jkv.load(str(CASE))
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_the_bias_of_choices_is_exact_in_every_dtype(tmp_path):
    folder, tensors = folder_of(tmp_path), load_file(CASE / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = 40 + tensors[name]  # of which bfloat16 has 8 bits, too few to tell them apart
    save_file(tensors, folder / "model.safetensors")
    model = jkv.load(str(folder), dtype="bfloat16")
    np.testing.assert_array_equal(model.params.layers[1].experts.choice_bias, tensors[name])
    checkpoint.export(model.params, None, tmp_path / "again")
    again = jkv.load(str(tmp_path / "again"), dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    jkv.save(model.params, tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, jkv.restore(tmp_path / "saved"), model.params)


def test_a_checkpoint_is_written_as_it_was_read(tmp_path):
    model = jkv.load(str(CASE))
    checkpoint.export(model.params, None, tmp_path, dtype=jnp.float32)
    one, other = (load_file(folder / "model.safetensors") for folder in (CASE, tmp_path))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    assert jkv.load(str(tmp_path)).config == model.config
