"""Reading, refusing, writing and restoring checkpoints."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jkv.model import checkpoint, saved_weights
from jkv.model.decoder import forward, unembed
from jkv.model.families import FAMILIES
from jkv.model.params import ModelConfig
from jkv.model.rope_scaling import RopeScaling
from jkv.model.rotary import rotary_frequency
from jkv.model.weight_shapes import weight_shapes
from jkv.replay.columns import dense_columns
from jkv.replay.score import hidden_states
from jkv.tasks import vocabulary
from tests.support import gemma, glm, learned_sinks, olmo3, recurrent

GOLDEN = Path(__file__).parents[1] / "support" / "golden"
CASES = ("llama_scaled", "llama_tied", "qwen2", "qwen3", "phi3")
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
SMALL = ModelConfig(
    family="llama",
    vocab_size=96,
    width=32,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=8,
    mlp_width=48,
    max_positions=256,
)
CONFIGS = {  # every family, and every feature of the configuration at least once
    "llama-linear": dataclasses.replace(SMALL, rope_scaling=RopeScaling("linear", 4.0), rope_theta=500.0),
    "llama-llama3": dataclasses.replace(SMALL, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 32), rope_theta=100.0),
    "qwen2-one-kv-head": dataclasses.replace(SMALL, family="qwen2", qkv_bias=True, num_kv_heads=1, end_ids=(95,)),
    "qwen3-tied": dataclasses.replace(SMALL, family="qwen3", qk_norm=True, head_size=16, tie_embeddings=True, end_ids=(3, 7)),
    "qwen3-yarn": dataclasses.replace(
        SMALL,
        family="qwen3",
        qk_norm=True,
        rope_scaling=RopeScaling("yarn", 8.0, 1.0, 1.0, 32, 2.0, 0.5, 1.5, False),
        rope_theta=100.0,
    ),
    "qwen3-window": dataclasses.replace(SMALL, family="qwen3", qk_norm=True, window=64, window_layers=(1,)),
    "qwen3-experts": dataclasses.replace(SMALL, family="qwen3_moe", qk_norm=True, num_experts=4, num_active_experts=2),
    "glm": glm.CONFIG,
    "glm-air": dataclasses.replace(
        glm.CONFIG, qk_norm=False, num_expert_groups=1, num_active_groups=1, route_scale=1.0, num_dense_layers=0, dense_width=0
    ),
    "gpt-oss": dataclasses.replace(learned_sinks.CONFIG, head_size=16, vocab_size=96, window=0, window_layers=()),
    "gpt-oss-yarn": dataclasses.replace(
        learned_sinks.CONFIG,
        window=64,
        rope_scaling=RopeScaling("yarn", 8.0, 1.0, 1.0, 512, 2.0, 1.0, 1.5, False),
        rope_theta=100.0,
    ),
    "mistral": dataclasses.replace(SMALL, family="mistral", head_size=16),
    "olmo3": olmo3.CONFIG,
    "olmo3-full": dataclasses.replace(olmo3.CONFIG, window=0, window_layers=(), window_theta=None, window_scaling=None),
    "gemma3": gemma.GEMMA3,
    "gemma3-full": dataclasses.replace(
        gemma.GEMMA3, window=0, window_layers=(), window_theta=None, window_scaling=None, attention_scale=0.0
    ),
    "gemma4": gemma.GEMMA4,
    "gemma4-equal": dataclasses.replace(gemma.GEMMA4, window_head_size=0, window_kv_heads=0, keys_are_values=False),
    "gemma4-experts": gemma.EXPERTS,
    "gemma4-sharing": gemma.SHARING,
    "phi3-longrope": dataclasses.replace(
        SMALL,
        family="phi3",
        rotary_size=4,
        rope_scaling=RopeScaling(
            "longrope", original_max_position=32, attention_factor=1.25, short_factor=(1.0, 2.0), long_factor=(1.5, 9.0)
        ),
    ),
    "qwen3_5": recurrent.CONFIG,
    "qwen3_5_moe": dataclasses.replace(
        recurrent.CONFIG,
        family="qwen3_5_moe_text",
        num_experts=4,
        num_active_experts=2,
        normalises_experts=True,
        mlp_width=16,
        shared_width=24,
        gates_shared=True,
    ),
    "qwen3_5-all-rotated": dataclasses.replace(recurrent.CONFIG, rotary_size=0, state_layers=(1, 2, 3), end_ids=(3,)),
    "smollm3": dataclasses.replace(SMALL, family="smollm3", tie_embeddings=True, layers_without_rope=(1,)),
    "phi3-all-heads": dataclasses.replace(SMALL, family="phi3", num_kv_heads=4, norm_epsilon=1e-5),
    "phi3-partial": dataclasses.replace(SMALL, family="phi3", rotary_size=4, tie_embeddings=True),
}
families = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def dense_attention(layer, query, key, value, cache):
    """Plain causal attention, written out (`jkv.model.decoder.Attend`)."""
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), value), cache


def dense_logits(params, tokens):
    """Logits `[T, V]` of one sequence."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(dense_forward(params, jnp.asarray(tokens)[None])[0])


@jax.jit
def dense_forward(params, tokens):
    if params.config.unpaged_layers or params.config.has_sinks:  # what `dense_attention` has not
        return unembed(params, hidden_states(params, tokens, dense_columns(params.config, *tokens.shape)))
    hidden, _ = forward(params, tokens, jnp.arange(tokens.shape[1])[None], dense_attention, None)
    return unembed(params, hidden)


def random_params(config, seed=0, dtype=np.float32):
    """Weights that are all random, norms and biases too."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape).astype(dtype)), weight_shapes(config))


def config_folder(folder, family="llama", **fields):
    """A folder with a config.json alone."""
    names = {"architectures": [FAMILIES[family].architecture], "model_type": family}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(names | TINY | fields))
    return folder


def golden_copy(folder, case="llama_scaled", **fields):
    """A golden checkpoint to damage, some fields of its config.json changed."""
    shutil.copytree(GOLDEN / case, folder, dirs_exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def change_tensors(file, change):
    """Rewrites a safetensors file with its tensors changed in place by `change`."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def assert_equal(params, others):
    """Same configuration (that is part of the tree), dtypes and bits."""
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(others), strict=True):
        assert leaf.dtype == other.dtype, path
        np.testing.assert_array_equal(leaf, other, err_msg=str(path))


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


# Configuration


def test_fields_of_a_config_reach_the_model_config(tmp_path):
    folder = config_folder(tmp_path, "phi3", partial_rotary_factor=0.75, rope_theta=250_000.0, rms_norm_eps=1e-3, head_dim=None)
    assert checkpoint.read_config(folder) == ModelConfig(
        family="phi3",
        vocab_size=96,
        width=32,
        num_layers=2,
        num_query_heads=4,
        num_kv_heads=2,
        head_size=8,
        mlp_width=48,
        max_positions=256,
        rope_theta=250_000.0,
        rotary_size=6,
        norm_epsilon=1e-3,
    )


YARN = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
LONGROPE = {
    "rope_scaling": {
        "type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": [1, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    }
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10_000.0, RopeScaling()),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, RopeScaling()),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, RopeScaling("linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, 5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0} | LLAMA3},
            7.0,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 32),
        ),
        (YARN, 1e6, RopeScaling("yarn", 4.0, original_max_position=64, attention_factor=0.1 * math.log(4) + 1)),
        (
            {
                "rope_parameters": YARN["rope_scaling"]
                | {"rope_theta": 7.0, "beta_fast": 9, "beta_slow": 2, "attention_factor": 2}
            },
            7.0,
            RopeScaling("yarn", 4.0, original_max_position=64, beta_fast=9.0, beta_slow=2.0, attention_factor=2.0),
        ),
        (
            {"rope_scaling": YARN["rope_scaling"] | {"mscale": 0.5, "mscale_all_dim": 1.0, "truncate": False}},
            10_000.0,
            RopeScaling(
                "yarn",
                4.0,
                original_max_position=64,
                attention_factor=(0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
                truncates=False,
            ),
        ),
    ],
    ids=["absent", "old-plain", "oldest-linear", "old-llama3", "new-llama3", "yarn", "yarn-of-all", "yarn-of-mscales"],
)
def test_rope_of_old_and_new_files_is_read(fields, theta, scaling, tmp_path):
    config = checkpoint.read_config(config_folder(tmp_path, **fields))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_yarn_extends_the_positions_of_a_model_that_says_how_many_it_had(tmp_path):
    """As Qwen asks its users to write config.json: max_position_embeddings stays that of training."""
    assert checkpoint.read_config(config_folder(tmp_path, **YARN, max_position_embeddings=64)).max_positions == 4 * 64


def test_longrope_takes_the_long_factors_where_a_model_has_more_positions_than_it_had(tmp_path):
    """Phi's files give the original context outside of rope_scaling. Factors of 88 positions: `phi3_longrope` in the parity."""
    config = checkpoint.read_config(config_folder(tmp_path / "a", "phi3", **LONGROPE))
    factor = math.sqrt(1 + math.log(256 / 32) / math.log(32))
    short, long = (1.0, 1.5, 2.0, 3.0), (2.0, 3.0, 4.0, 5.0)
    scaling = RopeScaling("longrope", original_max_position=32, attention_factor=factor, short_factor=short, long_factor=long)
    assert config.rope_scaling == scaling
    plain = 1e4 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(rotary_frequency(config), plain / np.array(long), rtol=1e-6)
    outside = {name: value for name, value in LONGROPE["rope_scaling"].items() if not name.startswith("original")}
    fields = {"rope_scaling": outside, "original_max_position_embeddings": 256}
    config = checkpoint.read_config(config_folder(tmp_path / "b", "phi3", **fields))
    assert config.rope_scaling.attention_factor == 1
    np.testing.assert_allclose(rotary_frequency(config), plain / np.array(short), rtol=1e-6)


def test_smollm3_has_no_rope_in_every_fourth_layer_unless_it_says_which(tmp_path):
    assert checkpoint.read_config(config_folder(tmp_path, "smollm3", num_hidden_layers=8)).layers_without_rope == (3, 7)
    config = checkpoint.read_config(config_folder(tmp_path, "smollm3", no_rope_layer_interval=2, no_rope_layers=[0, 1]))
    assert config.layers_without_rope == (0,)


REFUSED = {
    "another-architecture": (
        "llama",
        {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
        "Gemma.*LlamaForCausalLM",
    ),
    "another-head": ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "unknown-model-type": ("llama", {"architectures": [], "model_type": "mamba9"}, "mamba9"),
    "no-model-type": ("llama", {"model_type": None}, "model_type None"),
    "quantised": ("qwen2", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised.*gptq"),
    "window-phi3": ("phi3", {"sliding_window": 255}, "full.*sliding_window=255 below 256"),
    "window-qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        "a layer must have full attention.*sliding_window=64 in all",
    ),
    "window-llama": (
        "llama",
        {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
        "sliding_attention.*sliding_window=64",
    ),
    "window-qwen3-moe": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 64}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "full.*sliding_window=64",
    ),
    "chunked": ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    "attention-bias": ("llama", {"attention_bias": True}, "attention_bias must be false"),
    "attention-bias-qwen3": ("qwen3", {"attention_bias": True}, "attention_bias must be false in Qwen3"),
    "mlp-bias": ("llama", {"mlp_bias": True}, "mlp_bias must be false"),
    "activation": ("llama", {"hidden_act": "gelu"}, "silu.*gelu"),
    "odd-rotary": ("phi3", {"partial_rotary_factor": 0.625}, "even, got 5"),
    "heads": ("llama", {"num_key_value_heads": 3}, "multiple of KV heads, got 4 and 3"),
    "half-a-yarn": ("qwen2", {"rope_scaling": {"rope_type": "yarn", "beta_fast": 2.0}}, "factor must be .*got none"),
    "inverted-yarn": ("qwen2", YARN | {"rope_scaling": YARN["rope_scaling"] | {"beta_fast": 0.5}}, "beta_slow must be below"),
    "window-and-yarn": (
        "qwen2",
        YARN | {"max_position_embeddings": 64, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        "full attention.*sliding_window=64 in all",
    ),
    "yarn-of-llama3": (
        "qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "low_freq_factor": 2.0}},
        "low_freq_factor must not",
    ),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "RoPE.*dynamic"),
    "half-a-longrope": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
        "long_factor must.*got none",
    ),
    "short-longrope": ("phi3", LONGROPE | {"partial_rotary_factor": 0.5}, "short_factor.*length 2, got 4"),
    "longrope-by-zero": (
        "phi3",
        {"rope_scaling": LONGROPE["rope_scaling"] | {"long_factor": [1.0, 1.0, 1.0, 0.0]}},
        "long_factor must be a list",
    ),
    "two-originals": ("phi3", LONGROPE | {"original_max_position_embeddings": 64}, "original_max_position_embeddings must be"),
    "long-longrope": ("llama", LONGROPE | {"head_dim": 4}, "short_factor.*2 rotated pairs.*got 4"),
    "rope-of-fewer-layers": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must have an entry for each of the 2.*got 1"),
    "half-rotated": ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers must be"),
    "window-smollm3": ("smollm3", {"use_sliding_window": True, "sliding_window": 64, "no_rope_layers": [0, 0]}, "in all of"),
    "unknown-rope": (
        "llama",
        {"rope_scaling": {"rope_type": "banana"}},
        "RoPE.*default, linear, llama3, longrope, yarn.*banana",
    ),
    "half-a-rope": ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "wrong-type": ("llama", {"vocab_size": "96"}, "vocab_size.*int"),
}


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_decoder_cannot_do_is_refused_before_weights_are_looked_for(family, fields, message, tmp_path):
    folder = config_folder(tmp_path, family, **fields)
    with pytest.raises(ValueError, match=f"(?s){folder / 'config.json'}.*{message}"):
        checkpoint.load(folder)


HARMLESS = {
    "window-off-qwen2": ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}),
    "window-in-no-layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    "window-wide-qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 0}),
    "window-wide-phi3": ("phi3", {"sliding_window": 256}),
    "window-none-phi3": ("phi3", {"sliding_window": None}),
    "no-architectures": ("llama", {"architectures": None}),
    "no-quantisation": ("llama", {"quantization_config": None}),
    "biases-off": ("llama", {"attention_bias": False, "mlp_bias": False}),
}


@pytest.mark.parametrize(("family", "fields"), HARMLESS.values(), ids=HARMLESS)
def test_fields_that_change_nothing_are_not_refused(family, fields, tmp_path):
    assert checkpoint.read_config(config_folder(tmp_path, family, **fields)).family == family


def test_a_partial_rotary_factor_counts_only_where_transformers_heeds_it(tmp_path):
    assert checkpoint.read_config(config_folder(tmp_path, "llama", partial_rotary_factor=0.5)).rotary_size == 0


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "lla'], ids=["empty", "list", "cut"])
def test_a_damaged_config_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json must.*JSON.*again"):
        checkpoint.load(tmp_path)


def test_code_beside_a_checkpoint_is_never_run(tmp_path):
    folder = golden_copy(tmp_path / "model", "phi3", auto_map={"AutoConfig": "evil.Config"})
    vocabulary.make_tokenizer().save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Tokenizer: pass\n")
    assert checkpoint.load(folder).tokenizer is not None
    with pytest.raises(ValueError, match=r"architecture.*evil"):
        checkpoint.load(golden_copy(folder, "phi3", model_type="evil", auto_map={"AutoConfig": "evil.Config"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"tokenizer_class": "Tokenizer"}))
    golden_copy(folder, "phi3")
    checkpoint.load(folder)
    assert not (tmp_path / "ran").exists()


# End tokens and tokenizer


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, True, (5, 6)),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, True, (0,)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, True, (7,)),
        (None, {"eos_token_id": [7, 8]}, True, (7, 8)),
        (None, {}, True, (0,)),
        (None, {}, False, ()),
    ],
    ids=["generation-list", "generation-zero", "generation-null", "config", "tokenizer", "nowhere"],
)
def test_end_tokens_come_from_the_first_file_that_has_them(generation, config, tokenizer, expected, tmp_path):
    folder = config_folder(tmp_path, **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert checkpoint.read_end_ids(folder, vocabulary.make_tokenizer() if tokenizer else None) == expected


def test_the_tokenizer_of_another_model_is_refused_with_numbers(tmp_path):
    folder = config_folder(tmp_path, vocab_size=63)
    vocabulary.make_tokenizer().save_pretrained(folder)
    with pytest.raises(ValueError, match=f"vocab_size=63 tokens, got {vocabulary.SIZE}"):
        checkpoint.load(folder)


def test_a_generic_tokenizer_splits_as_its_file_says_whatever_the_models_family(tmp_path):
    tokenizer = vocabulary.make_tokenizer()
    config = ModelConfig("qwen2", vocabulary.SIZE, 16, 1, 2, 1, 8, 16, 256, qkv_bias=True, tie_embeddings=True)
    params = random_params(config)
    checkpoint.export(params, tokenizer, tmp_path / "model")
    loaded = checkpoint.load(tmp_path / "model").tokenizer
    text = "b=3;c=7;?c<think>\n\nWait again"
    assert loaded.encode(text) == tokenizer.encode(text)


def test_a_tokenizer_whose_ids_have_gaps_is_measured_by_its_largest_id(tmp_path):
    size = vocabulary.SIZE
    folder = config_folder(tmp_path, vocab_size=size)
    tokenizer = vocabulary.make_tokenizer()
    tokenizer.save_pretrained(folder)
    text, entry = (folder / "tokenizer.json").read_text(), f'"z": {tokenizer.convert_tokens_to_ids("z")},'
    assert entry in text
    (folder / "tokenizer.json").write_text(text.replace(entry, f'"z": {size},'))
    with pytest.raises(ValueError, match=f"vocab_size={size} tokens, got {size + 1}"):
        checkpoint.load(folder)


def test_a_damaged_tokenizer_is_named(tmp_path):
    folder = golden_copy(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{folder}/tokenizer\.json must be JSON.*again"):
        checkpoint.load(folder)


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
    with pytest.raises(ValueError, match="float32, float16, bfloat16; got int8"):
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
    with pytest.raises(ValueError, match=r"llama checkpoint.*qkv_bias=True.*qkv_bias=False"):
        checkpoint.export(params, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("write", ["export", "save"])
def test_weights_that_do_not_fit_their_configuration_are_not_written(write, tmp_path):
    params = random_params(SMALL).replace(unembedding=None)
    with pytest.raises(ValueError, match=r"unembedding must have shape \(32, 96\).*got None"):
        checkpoint.export(params, None, tmp_path) if write == "export" else saved_weights.save(params, tmp_path)
    assert not any(tmp_path.iterdir())


# Converted weights


@pytest.mark.parametrize("case", ["qwen2", "qwen3"])
def test_saved_weights_are_restored_bit_for_bit(case, tmp_path):
    params = checkpoint.load(GOLDEN / case).params
    params = params.replace(embedding=params.embedding.astype(jnp.bfloat16))
    saved_weights.save(params, tmp_path / "saved")
    assert_equal(saved_weights.restore(tmp_path / "saved"), params)


SHARDED = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jkv
from jkv.model.weight_shapes import leaf_name

golden, folder = sys.argv[1:]
devices = np.array(jax.devices())
assert len(devices) == 8
wide, square = jax.sharding.Mesh(devices, ("x",)), jax.sharding.Mesh(devices.reshape(2, 4), ("x", "y"))
params = jkv.load(golden).params
by_columns = jax.tree.map(lambda leaf: NamedSharding(wide, P(*[None] * (leaf.ndim - 1), "x")), params)

def by_name(name, shape):
    return NamedSharding(square, P("y", "x") if name.endswith(("query", "down")) else P())

everywhere = NamedSharding(wide, P())
named = [by_name(leaf_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
jkv.save(jax.device_put(params, by_columns), folder)
for sharding, expected in [
    (None, [jax.sharding.SingleDeviceSharding(devices[0])] * len(named)),
    (everywhere, [everywhere] * len(named)),
    (by_columns, jax.tree.leaves(by_columns)),
    (by_name, named),
]:
    restored = jkv.restore(folder, sharding)
    assert [leaf.sharding for leaf in jax.tree.leaves(restored)] == expected
    jax.tree.map(np.testing.assert_array_equal, restored, params)
assert restored.layers[1].query.addressable_shards[0].data.shape == (8, 16)
"""


def test_sharded_weights_are_saved_and_restored_onto_any_sharding(tmp_path):
    root = str(Path(checkpoint.__file__).parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, "-c", SHARDED, str(GOLDEN / "phi3"), str(tmp_path / "saved")]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_saved_weights_are_not_overwritten(tmp_path):
    saved_weights.save(random_params(SMALL), tmp_path)
    with pytest.raises(ValueError, match=r"must not contain weights yet.*another folder"):
        saved_weights.save(random_params(SMALL, seed=1), tmp_path)
    assert_equal(saved_weights.restore(tmp_path), random_params(SMALL))


@pytest.mark.parametrize("folder", ["missing", "golden/phi3"])
def test_only_a_saved_folder_is_restored(folder):
    with pytest.raises(ValueError, match=r"folder of jkv\.save.*no jkv\.json.*jkv\.load"):
        saved_weights.restore(GOLDEN.parent / folder)


def test_a_saved_folder_that_lost_a_file_is_named(tmp_path):
    saved_weights.save(random_params(SMALL), tmp_path)
    (tmp_path / "weights").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"weights must be complete.*again"):
        saved_weights.restore(tmp_path)
    (tmp_path / "jkv.json").write_text('{"config": {"family": "llama", "colour": 1}}')
    with pytest.raises(ValueError, match=r"jkv\.json must be written by this version"):
        saved_weights.restore(tmp_path)
