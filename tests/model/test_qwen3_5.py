"""Qwen3.5: its config.json, its tensors, and the text model inside of a multimodal checkpoint.

Parity with transformers is in `test_decoder.py` (the golden checkpoint `qwen3_5`), and the layers with a state are tested in
`test_delta_net.py` and `tests/engine/test_states.py`.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.checkpoint_tensors import tensor_parts
from jkv.checkpoints.model_shapes import find_shape
from jkv.engine.memory import state_bytes
from jkv.model import decoder
from tests.model.test_decoder import GOLDEN
from tests.support.recurrent import CONFIG, recurrent_model

CASE = GOLDEN / "qwen3_5"
TEXT = {  # text_config of Qwen/Qwen3.5-27B
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 248320,
}
PUBLISHED = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


def config_of(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return checkpoint.read_config(folder)


def test_the_published_configuration_is_the_shape_of_that_name(tmp_path):
    config = config_of(tmp_path, PUBLISHED)
    assert config == find_shape("qwen3.5-27b")[1]
    assert checkpoint.read_end_ids(tmp_path, None) == (248044,)
    by_interval = config_of(tmp_path, PUBLISHED | {"text_config": {k: v for k, v in TEXT.items() if k != "layer_types"}})
    assert by_interval == config


def test_the_tensors_are_as_many_as_in_the_published_checkpoint():
    assert len(tensor_parts(find_shape("qwen3.5-27b")[1])) == 851


def test_a_row_of_9b_has_a_state_of_50_megabytes():
    memory, inputs = 32 * 128 * 128 * 4, 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert state_bytes(find_shape("qwen3.5-9b")[1], 1, jnp.bfloat16) == 24 * (memory + inputs) == 51_511_296


def folder_of(folder, **fields):
    """A copy of the golden checkpoint, some fields of its config.json changed."""
    shutil.copytree(CASE, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def multimodal(folder, **fields):
    """The golden checkpoint as the text model of a multimodal one, some fields of its config.json changed."""
    folder_of(folder)
    text = json.loads((folder / "config.json").read_text())
    text.pop("architectures")
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text, "tie_word_embeddings": False} | fields))
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {"model.visual.blocks.0.norm1.weight": np.ones(3, np.float32), "mtp.norm.weight": np.ones(5, np.float32)}
    save_file(named | others, folder / "model.safetensors")
    return folder


def test_the_text_model_of_a_multimodal_checkpoint_is_read(tmp_path):
    (tmp_path / "text").mkdir()
    whole, text = jkv.load(str(multimodal(tmp_path / "whole"))), jkv.load(str(CASE))
    assert whole.config == text.config
    jax.tree.map(np.testing.assert_array_equal, whole.params, text.params)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"audio_config": {}}, r"every field must be known.*\['audio_config'\]"),
        ({"architectures": ["Qwen3_5ForCausalLM"]}, "architectures must be"),
        ({"quantization_config": {"quant_method": "hqq"}}, "weights must be unquantised.*hqq"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_understood_beside_the_text_model_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jkv.load(str(multimodal(tmp_path, **fields)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate must be True"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype must be 'float32'"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type must be 'swish'"),
        ({"hc_count": 4}, r"every field must be known.*\['hc_count'\]"),
        ({"attention_bias": True}, "attention_bias must be false"),
        ({"layer_types": ["linear_attention"] * 4}, "a layer must have full attention.*recurrent state in all"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must be linear_attention or full_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads must be a multiple of linear_num_key_heads, got 3 and 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer in"),
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
    for name, tensor in one.items():
        np.testing.assert_array_equal(other[name], tensor, err_msg=name)
    assert checkpoint.read_config(tmp_path) == checkpoint.read_config(CASE)


def test_a_saved_model_is_restored(tmp_path):
    model = recurrent_model()
    jkv.save(model.params, tmp_path / "saved")
    restored = jkv.restore(tmp_path / "saved")
    assert restored.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, restored, model.params)


def test_of_each_head_the_query_is_before_the_gate():
    weights, x = recurrent_model().params.layers[1], jax.random.normal(jax.random.key(0), (2, 3, CONFIG.width))
    query, _, _, gate = decoder.project(CONFIG, weights, x)
    flat = np.asarray(x, np.float64) @ np.asarray(weights.query, np.float64)
    by_head = flat.reshape(2, 3, CONFIG.num_query_heads, 2, CONFIG.head_size)
    unit = by_head[..., 0, :] / np.sqrt((by_head[..., 0, :] ** 2).mean(axis=-1, keepdims=True) + CONFIG.norm_epsilon)
    np.testing.assert_allclose(query, unit * (1 + np.asarray(weights.query_norm, np.float64)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gate, by_head[..., 1, :], rtol=1e-5, atol=1e-5)


def test_experts_are_read_from_one_tensor_of_a_layer_too(tmp_path):
    """As the makers store them, in a multimodal checkpoint; transformers writes a tensor of each expert."""
    case = GOLDEN / "qwen3_5_moe"
    text = json.loads((case / "config.json").read_text())
    text.pop("architectures")
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"text_config": text, "tie_word_embeddings": False}))
    tensors, stacked = load_file(case / "model.safetensors"), {}
    for layer in range(text["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts."

        def of_all(name, experts=experts):
            return np.stack([tensors.pop(f"{experts}{i}.{name}.weight") for i in range(text["num_experts"])])

        stacked[experts + "gate_up_proj"] = np.concatenate([of_all("gate_proj"), of_all("up_proj")], axis=1)
        stacked[experts + "down_proj"] = of_all("down_proj")
    save_file(
        {
            name.replace("model.", "model.language_model.", 1): np.ascontiguousarray(one)
            for name, one in (tensors | stacked).items()
        },
        tmp_path / "model.safetensors",
    )
    read, wanted = jkv.load(tmp_path).params, jkv.load(case).params
    for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_sigmoid_gates_the_block_beside_the_experts():
    """By hand, for one token; without the gate, the sum is another."""
    params = jkv.load(GOLDEN / "qwen3_5_moe").params
    weights, x = params.layers[0], jax.random.normal(jax.random.key(1), (1, 1, 32))
    got, _ = decoder.mlp(params, 0, weights, x, x, None, None)
    token = np.asarray(x, np.float64)[0, 0]

    def block(gate, up, down):
        inner = token @ np.asarray(gate, np.float64)
        return (inner / (1 + np.exp(-inner)) * (token @ np.asarray(up, np.float64))) @ np.asarray(down, np.float64)

    logits = token @ np.asarray(weights.experts.router, np.float64)
    share = np.exp(logits - logits.max())
    chosen = np.argsort(-share)[:3]
    share = share[chosen] / share[chosen].sum()
    of_experts = sum(
        one * block(weights.experts.gate[i].T, weights.experts.up[i].T, weights.experts.down[i])
        for one, i in zip(share, chosen, strict=True)
    )
    shared = block(weights.gate, weights.up, weights.down)
    gate = 1 / (1 + np.exp(-(token @ np.asarray(weights.shared_gate, np.float64))))
    np.testing.assert_allclose(got[0, 0], of_experts + gate * shared, rtol=1e-4, atol=1e-5)
    assert np.abs(got[0, 0] - (of_experts + shared)).max() > 1e-2
