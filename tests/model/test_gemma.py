"""Gemma 3 and 4: their config.json, their tensors, and what they compute, through the engine and in replay.

Parity with transformers is in `test_decoder.py` (the golden checkpoints `gemma3` and `gemma4`).
"""

import dataclasses
import functools
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
from jkv.engine.chunk_inputs import PrefillPrograms
from jkv.engine.memory import window_bytes
from jkv.model import decoder
from jkv.model.experts import route
from jkv.model.norms import norm
from jkv.model.rotary import rotary_frequency
from jkv.testing import TinyTokenizer, adapted, tiny_model, unfolded
from research.tasks.train import packed_attention
from tests.model.test_decoder import GOLDEN
from tests.support.gemma import EXPERTS, GEMMA3, GEMMA4, SHARING, random_model

CONFIGS = {"gemma3": GEMMA3, "gemma4": GEMMA4, "experts": EXPERTS, "sharing": SHARING}
MODELS = {name: random_model(config, TinyTokenizer()) for name, config in CONFIGS.items()}
PROMPTS = [list(range(1, 22)), [4, 4, 9], [7]]
KNOBS = {"max_new_tokens": 40, "page_size": 4, "chunk": 8, "stop_ids": (), "progress": False, "poison": True}
models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def run(model, prompts=PROMPTS, **settings):
    return jkv.generate(model, prompts, **{"sampling": jkv.Sampling(seed=1)} | KNOBS | settings)


@functools.cache
def drawn(name):
    """Tokens that a model has drawn."""
    return run(MODELS[name], return_trace=True)


CHANGES = {
    "gemma3": [
        {"norms_around": False},
        {"norm_offset": 0.0},
        {"attention_scale": 0.0},
        {"activation": "silu"},
        {"scales_embedding": False},
        {"final_softcap": 0.0},
        {"window_theta": None},
        {"window_scaling": None},
    ],
    "gemma4": [{"value_norm": False}, {"has_layer_scale": False}, {"rope_scaling": GEMMA3.rope_scaling}],
    "experts": [
        {"num_experts": 0, "mlp_width": EXPERTS.shared_width, "shared_width": 0, "norms_experts": False},
        {"num_active_experts": 1},
    ],
    "sharing": [{"layer_input_width": 0}],
}


def as_configured(params, config):
    """The weights that a configuration computes with, without others."""
    names = {
        "norms_around": ("after_attention_norm", "after_mlp_norm"),
        "has_layer_scale": ("layer_scale",),
        "num_experts": ("experts",),
    }
    gone = dict.fromkeys(name for switch, fields in names.items() if not getattr(config, switch) for name in fields)
    inputs = params.layer_inputs if config.layer_input_width else None
    return params.replace(config=config, layers=tuple(x.replace(**gone) for x in params.layers), layer_inputs=inputs)


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name in CHANGES for change in CHANGES[name]],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_each_feature_changes_what_is_computed(name, change):
    model, out = MODELS[name], drawn(name)
    other = as_configured(model.params, dataclasses.replace(model.config, **change))
    assert np.abs(np.asarray(jkv.score(other, out, trace=out.trace).logprobs) - out.logprobs).max() > 1e-3


def test_a_norm_multiplies_in_float32_and_rounds_once():
    """As the makers do, and Llama does not; bfloat16 shows the difference."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((7, 64), (64,)))
    wide, offset = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    unit = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6)
    for config in (GEMMA3, GEMMA4):
        expected = jnp.asarray(unit * (config.norm_offset + offset), jnp.bfloat16)
        assert (np.asarray(norm(config, x, weight)) == np.asarray(expected)).mean() > 0.999
    plain = dataclasses.replace(GEMMA4, norm_offset=None)
    assert (np.asarray(norm(plain, x, weight)) == np.asarray(jnp.asarray(unit * offset, jnp.bfloat16))).mean() < 0.9
    assert norm(GEMMA4, x, None).dtype == jnp.bfloat16


def test_embeddings_are_scaled_by_the_rounded_root_of_the_width():
    """The root of 3,072 is 55.43, and 55.5 in bfloat16."""
    params = tiny_model(config=dataclasses.replace(GEMMA3, width=3072, num_layers=2, window_layers=(0,))).params
    table = params.embedding.astype(jnp.bfloat16)
    got = decoder.embed(params.replace(embedding=table), jnp.asarray([[3, 5]]))
    np.testing.assert_array_equal(got[0], table[jnp.asarray([3, 5])] * jnp.bfloat16(55.5))


def test_layers_have_their_own_heads_and_values():
    """In full attention one head of 16 channels, whose value is the normalised product with the key matrix."""
    params, x = MODELS["gemma4"].params, jax.random.normal(jax.random.key(0), (2, 3, GEMMA4.width))
    query, key, value, _ = decoder.project(GEMMA4, params.layers[1], x)
    assert (query.shape, key.shape, value.shape) == ((2, 3, 4, 16), (2, 3, 1, 16), (2, 3, 1, 16))
    product = np.asarray(x, np.float64) @ np.asarray(params.layers[1].key, np.float64)
    unit = product / np.sqrt((product**2).mean(axis=-1, keepdims=True) + GEMMA4.norm_epsilon)
    np.testing.assert_allclose(value[..., 0, :], unit, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(key[..., 0, :], unit * np.asarray(params.layers[1].key_norm), rtol=1e-4, atol=1e-5)
    query, key, value, _ = decoder.project(GEMMA4.in_windows, params.layers[0], x)
    assert (query.shape, key.shape, value.shape) == ((2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8))
    assert [layer.value is None for layer in params.layers] == [False, True, False, True]


def test_a_quarter_of_the_pairs_turns_with_the_frequencies_of_the_whole_head():
    frequency = np.asarray(rotary_frequency(GEMMA4))
    np.testing.assert_allclose(frequency, [1, 100 ** (-2 / 16), 0, 0, 0, 0, 0, 0], rtol=1e-6)


def test_experts_are_those_of_the_normalised_hidden_state_and_have_scales():
    """The router of one token, written out in float64."""
    weights, rng = MODELS["experts"].params.layers[0].experts, np.random.default_rng(0)
    token, scale, of_expert = rng.standard_normal((5, 32)), rng.standard_normal(32), rng.random(4)
    weights = weights.replace(router_scale=jnp.asarray(scale), expert_scale=jnp.asarray(of_expert))
    unit = token / np.sqrt((token**2).mean(axis=-1, keepdims=True) + EXPERTS.norm_epsilon)
    logits = (unit * scale * 32**-0.5) @ np.asarray(weights.router, np.float64)
    chosen = np.argsort(-logits, axis=-1)[:, :2]
    share = np.exp(np.take_along_axis(logits, chosen, axis=-1))
    share = share / share.sum(axis=-1, keepdims=True) * of_expert[chosen]
    got, expert = route(EXPERTS, weights, jnp.asarray(token, jnp.float32))
    np.testing.assert_array_equal(expert, chosen)
    np.testing.assert_allclose(got, share, rtol=1e-4)


# Layers that share.


def test_layers_that_share_store_nothing_and_are_no_layers_of_a_trace():
    assert (SHARING.paged_layers, SHARING.num_ring_layers) == ((1, 3), 2)
    assert [SHARING.owner_of(layer) for layer in range(6)] == [0, 1, 2, 3, 2, 3]
    params = MODELS["sharing"].params
    assert [layer.key is None for layer in params.layers] == [False] * 4 + [True] * 2
    assert params.layers[5].gate.shape == (32, 96)
    engine = jkv.Engine(MODELS["sharing"], max_running=2, max_slots=64, page_size=4)
    assert engine.runner.state.cache.pool.page_table.shape[0] == 2
    assert run(MODELS["sharing"], return_trace=True).trace.end.shape[1] == 2


@pytest.mark.parametrize("layer", [4, 5], ids=["windowed", "full"])
def test_a_layer_that_shares_reads_what_its_owner_has_stored(layer):
    """A change of its owner's keys alone changes what it computes: the owner's own output is taken out of the way."""
    model, owner = MODELS["sharing"], SHARING.owner_of(layer)
    layers = list(model.params.layers)
    layers[owner] = layers[owner].replace(out=0 * layers[owner].out)
    other = [*layers]
    other[owner] = layers[owner].replace(key=layers[owner].key[:, ::-1])
    one, two = (dataclasses.replace(model, params=model.params.replace(layers=tuple(x))) for x in (layers, other))
    out = run(one, return_trace=True)
    assert np.abs(np.asarray(jkv.score(one, out, trace=out.trace).logprobs) - out.logprobs).max() < 1e-4
    assert np.abs(np.asarray(jkv.score(two, out, trace=out.trace).logprobs) - out.logprobs).max() > 1e-3


def test_a_computation_that_does_not_know_them_is_refused():
    token = jnp.zeros((1, 4), jnp.int32)
    config = dataclasses.replace(SHARING, window=0, window_layers=())
    params = tiny_model(config=config).params
    with pytest.raises(ValueError, match="the last 2 of this one reuse an earlier layer's"):
        decoder.forward(params, token, token, packed_attention, jnp.ones((1, 4, 4), bool))


# Through the engine.


@models
def test_a_long_prompt_enters_in_pieces(model, monkeypatch):
    prompt = np.random.default_rng(0).integers(4, 30, 90).tolist()
    out = run(model, prompts=[prompt])
    monkeypatch.setattr("jkv.engine.chunk_inputs.OF_CPU", PrefillPrograms((16, 64), 8))
    in_pieces = run(model, prompts=[prompt])
    np.testing.assert_array_equal(in_pieces.tokens, out.tokens)
    np.testing.assert_allclose(jkv.score(model, out).logprobs, out.logprobs, atol=1e-4)


@models
def test_weights_may_be_adapted_unfolded_and_quantised(model):
    params = adapted(model.params)
    out = jkv.generate(params, PROMPTS, **{"sampling": jkv.Sampling(seed=1)} | KNOBS)
    other = jkv.generate(unfolded(model.params), PROMPTS, **{"sampling": jkv.Sampling(seed=1)} | KNOBS)
    np.testing.assert_array_equal(other.tokens, run(model).tokens)
    np.testing.assert_allclose(jkv.score(params, out).logprobs, out.logprobs, atol=1e-4)
    eight = jkv.quantise_weights(model.params, "int8")
    out = jkv.generate(eight, PROMPTS, **{"sampling": jkv.Sampling(seed=1)} | KNOBS)
    np.testing.assert_allclose(jkv.score(eight, out).logprobs, out.logprobs, atol=1e-4)


def test_each_group_of_layers_counts_with_its_own_heads():
    model = MODELS["gemma4"]
    engine = jkv.Engine(model, max_running=3, max_slots=64, page_size=4)
    assert window_bytes(model.params, 3, 4) == 2 * 3 * 2 * 8 * 2 * 8 * 4  # layers, rows, heads, slots, two, channels, bytes
    assert engine.runner.state.cache.windows.kv.shape == (1 + 2 * 3 * 2 * 2, 2, 4, 8)
    assert engine.runner.state.cache.pool.kv.shape[2:] == (4, 16)
    plan = jkv.plan(model, jkv.DEVICES["h200"], length=128, prompt=8, batch=3, page_size=4)
    built = jkv.Engine(model, policies=[jkv.full()], **plan.engine).runner.state
    assert plan.own.state_bytes == sum(x.nbytes for x in jax.tree.leaves(built))
    out = run(model, prompts=[PROMPTS[0]], page_size=1, max_new_tokens=20)
    assert out.stats.dense_kv_bytes == (2 * 41 * 1 * 16 + 2 * 6 * 2 * 8) * 2 * 4


# The configurations.

GEMMA3_1B = {  # config.json of google/gemma-3-1b-it
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
OUTER = {  # of google/gemma-3-27b-it
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": False},
}
LINEAR = {"factor": 8.0, "rope_type": "linear"}
GEMMA3_27B = OUTER | {
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": LINEAR,
        "sliding_window": 1024,
    }
}
GEMMA3_4B = OUTER | {
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": LINEAR,
        "sliding_window": 1024,
    }
}
GEMMA4_31B = {  # the fields that the makers' conversion to transformers writes for google/gemma-4-31B-it
    "architectures": ["Gemma4ForConditionalGeneration"],
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "video_token_id": 258884,
    "audio_token_id": 258881,
    "audio_config": None,
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": 32,
        "num_experts": None,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}
E4B = {
    "attention_k_eq_v": False,
    "global_head_dim": 512,
    "hidden_size": 2560,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 10240,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
}
E2B = E4B | {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}
A4B = {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}
OF_GEMMA4 = {
    f"gemma4-{name}": GEMMA4_31B | {"text_config": GEMMA4_31B["text_config"] | fields}
    for name, fields in {"31b": {}, "26b-a4b": A4B, "e4b": E4B, "e2b": E2B}.items()
}
PUBLISHED = OF_GEMMA4 | {"gemma3-1b": GEMMA3_1B, "gemma3-4b": GEMMA3_4B, "gemma3-27b": GEMMA3_27B}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configuration_is_the_shape_of_that_name(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert checkpoint.read_config(tmp_path) == find_shape(name)[1]


def folder_of(folder, case="gemma3", **fields):
    """A copy of a golden checkpoint, some fields of its config.json changed."""
    shutil.copytree(GOLDEN / case, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


REFUSED = [
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
    ("gemma3", {"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
    ("gemma3", {"hidden_act": "gelu"}, "hidden_act must be"),
    ("gemma3", {"attention_bias": True}, "attention_bias must be false in Gemma3"),
    ("gemma3", {"altup_num_inputs": 4}, r"every field must be known.*\['altup_num_inputs'\]"),
    ("gemma3", {"layer_types": ["sliding_attention"] * 3}, "a layer must have full attention"),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "the RoPE type must be one of"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be null or 'vision'"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 32}}}, "layers of one kind must have the same"),
    (
        "gemma4",
        {"per_layer_config": {"1": {"num_key_value_heads": 3}, "3": {"num_key_value_heads": 3}}},
        "a multiple of KV heads",
    ),
    ("gemma4", {"per_layer_config": {"1": {"hidden_size": 3}}}, "per_layer_config must be an object with head_dim"),
    ("gemma4", {"hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input must be vocab_size=96, got 262144"),
    ("gemma4", {"num_kv_shared_layers": 3}, "must leave a layer of each kind that stores.*got none of full_attention among"),
    ("gemma4", {"num_kv_shared_layers": 4}, "must leave a layer of each kind that stores"),
    ("gemma4_moe", {"top_k_experts": 9}, "top_k_experts must be at most num_experts"),
    ("gemma4_moe", {"num_experts": None}, "top_k_experts must be at most num_experts"),
    ("gemma4_moe", {"enable_moe_block": False}, "must not contain model.layers.0.experts.down_proj"),
]


@pytest.mark.parametrize(
    ("case", "fields", "message"), REFUSED, ids=[f"{case}-{next(iter(fields))}" for case, fields, _ in REFUSED]
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, case, fields, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jkv.load(str(folder_of(tmp_path, case, **fields)))


@pytest.mark.parametrize("case", ["gemma3", "gemma4", "gemma4_moe", "gemma4_sharing"])
def test_a_checkpoint_is_written_as_it_was_read(tmp_path, case):
    model = jkv.load(str(GOLDEN / case))
    checkpoint.export(model.params, None, tmp_path, dtype=jnp.float32)
    one, other = (load_file(folder / "model.safetensors") for folder in (GOLDEN / case, tmp_path))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    assert jkv.load(str(tmp_path)).config == model.config
    jkv.save(model.params, tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, jkv.restore(tmp_path / "saved"), model.params)


def test_keys_and_values_of_layers_that_share_are_not_read(tmp_path):
    """Some checkpoints have them, though nothing reads them."""
    folder_of(tmp_path, "gemma4_sharing")
    stored = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.3.self_attn.{name}": np.ones(3, np.float32) for name in ("k_proj.weight", "v_proj.weight")}
    save_file(stored | extra, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, jkv.load(str(tmp_path)).params, jkv.load(str(GOLDEN / "gemma4_sharing")).params)
    save_file(stored | {"model.layers.2.self_attn.k_proj.bias": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"must not contain model\.layers\.2\.self_attn\.k_proj\.bias"):
        jkv.load(str(tmp_path))


# The text model inside of a multimodal checkpoint.


def in_images(folder, case="gemma3", prefix="model.language_model.", fields=(), tensors=()):
    """A golden checkpoint as the text part of one that reads images."""
    folder_of(folder, case)
    text = json.loads((folder / "config.json").read_text())
    name, architecture = {"gemma3": "Gemma3", "gemma4": "Gemma4"}[case], f"{case.capitalize()}ForConditionalGeneration"
    outer = {"architectures": [architecture], "model_type": name.lower(), "text_config": text, "vision_config": {"depth": 3}}
    (folder / "config.json").write_text(json.dumps(outer | dict(fields)))
    stored = load_file(folder / "model.safetensors")
    stored = {name.replace("model.", prefix, 1): value for name, value in stored.items()}
    extra = {"vision_tower.patches": np.zeros(3, np.float32), "model.vision_tower.patches": np.zeros(3, np.float32)}
    extra = extra if case == "gemma3" else {"model.vision_tower.patches": np.zeros(3, np.float32)}
    save_file(stored | extra | dict(tensors), folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("case", "prefix"),
    [("gemma3", "model.language_model."), ("gemma3", "language_model.model."), ("gemma4", "model.language_model.")],
)
def test_the_text_model_of_a_multimodal_checkpoint_is_loaded(tmp_path, case, prefix):
    one, other = jkv.load(in_images(tmp_path, case, prefix)), jkv.load(str(GOLDEN / case))
    assert one.config == dataclasses.replace(other.config, end_ids=one.config.end_ids)
    jax.tree.map(np.testing.assert_array_equal, one.params.layers, other.params.layers)
    np.testing.assert_array_equal(one.params.embedding, other.params.embedding)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": {"speech_config": {}}}, r"every field must be known for Gemma3ForCond.*\['speech_config'\]"),
        ({"fields": {"architectures": ["Gemma3ForSequenceClassification"]}}, "architectures must be.*ForConditionalGeneration"),
        ({"fields": {"text_config": {"model_type": "gemma2"}}}, "text_config: model_type must be 'gemma3_text'"),
        ({"fields": {"text_config": 3}}, "text_config must be an object"),
        ({"fields": {"tie_word_embeddings": False}}, "tie_word_embeddings must be the same in text_config"),
        ({"fields": {"quantization_config": {"quant_method": "hqq"}}}, "unquantised.*hqq"),
        ({"tensors": {"model.norm.weight": np.ones(32, np.float32)}}, "must have one tensor model.norm.weight"),
        ({"tensors": {"model.extra_tower.x": np.ones(32, np.float32)}}, "must not contain model.extra_tower.x"),
    ],
    ids=["field", "class", "text-model", "no-object", "tied", "quantised", "twice", "surplus"],
)
def test_a_multimodal_checkpoint_that_is_not_understood_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jkv.load(in_images(tmp_path, **change))


def test_the_tokenizer_of_a_text_model_may_have_the_token_of_images(tmp_path):
    """The tokenizer of Gemma 3 1B has one token more than the model, for images."""
    from jkv.checkpoints.tokenizer_files import check_size

    check_size(GEMMA3.vocab_size + 1, "here", GEMMA3)
    for size, config in ((GEMMA3.vocab_size + 2, GEMMA3), (GEMMA4.vocab_size + 1, GEMMA4)):
        with pytest.raises(ValueError, match=f"at most vocab_size={config.vocab_size} tokens"):
            check_size(size, "here", config)
    engine = jkv.Engine(MODELS["gemma3"], max_running=1, max_slots=16, page_size=4)
    with pytest.raises(ValueError, match="32"):
        engine.submit([1, GEMMA3.vocab_size], max_new_tokens=1)
