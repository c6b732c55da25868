"""Checkpoints for tests: configurations of every family, random weights, folders to damage, and dense logits."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jkv.checkpoints.families import FAMILIES
from jkv.model.decoder import forward, unembed
from jkv.model.params import ModelConfig, RopeScaling
from jkv.model.weight_shapes import weight_shapes
from jkv.replay.columns import dense_columns
from jkv.replay.score import hidden_states
from tests.support import gemma, glm, learned_sinks, olmo3, recurrent

GOLDEN = Path(__file__).parent / "golden"
CASES = ("llama_scaled", "llama_tied", "qwen2", "qwen3", "phi3")
OF_FAMILIES = (  # a golden checkpoint of each family
    *("llama_tied", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "gemma3", "gemma4", "glm4_moe", "gpt_oss"),
    *("mistral", "ministral3", "olmo3", "phi3", "smollm3"),
)
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
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
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


def golden_tensors(case):
    """The tensors of a golden checkpoint, of all its files."""
    return {name: tensor for file in sorted((GOLDEN / case).glob("*.safetensors")) for name, tensor in load_file(file).items()}


def with_tensors(folder, case, tensors, **fields):
    """A golden checkpoint with other tensors, in one file, and some fields of its config.json changed."""
    golden_copy(folder, case, **fields)
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
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
