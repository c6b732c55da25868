"""gpt-oss: its config.json, its tensors, and weights in MXFP4.

Parity with transformers is in `test_decoder.py` (the golden checkpoint `gpt_oss`).
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jkv
from jkv.checkpoints import checkpoint_tensors
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.model_shapes import find_shape
from tests.model.test_decoder import GOLDEN

CASE = GOLDEN / "gpt_oss"
PUBLISHED = {  # config.json of openai/gpt-oss-20b
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def folder_of(folder, **fields):
    """A copy of the golden checkpoint, some fields of its config.json changed, or removed by `...`."""
    shutil.copytree(CASE, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


# The configuration.


def test_the_published_configuration_is_the_shape_of_that_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert checkpoint.read_config(tmp_path) == find_shape("gpt-oss-20b")[1]
    (tmp_path / "config.json").write_text(
        json.dumps(
            PUBLISHED
            | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18}
        )
    )
    assert checkpoint.read_config(tmp_path) == find_shape("gpt-oss-120b")[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_chunk_size": 64, "num_nextn": 1}, r"every field must be known.*\['attention_chunk_size'\]"),
        ({"partial_rotary_factor": 0.5}, "every field must be known.*partial_rotary_factor"),
        ({"attention_bias": False}, "attention_bias must be true in GptOss"),
        ({"swiglu_limit": 0}, "swiglu_limit must be"),
        ({"num_local_experts": ...}, "num_experts must be an integer .*got none"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts=8, got 9"),
        ({"layer_types": ["chunked_attention", "full_attention", "full_attention"]}, "chunked_attention"),
        ({"intermediate_size": 8}, r"gate_up_proj must have shape \(8, 32, 16\), got \(8, 32, 32\)"),
        ({"quantization_config": {"quant_method": "hqq"}}, "unquantised.*hqq"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jkv.load(str(folder_of(tmp_path, **fields)))


def test_other_families_do_not_read_mxfp4(tmp_path):
    shutil.copytree(GOLDEN / "llama_tied", tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"quantised.*mxfp4"):
        jkv.load(str(tmp_path))


# Its tensors.


def test_gates_and_ups_take_turns_and_each_expert_has_its_own_biases():
    tensors, experts = load_file(CASE / "model.safetensors"), jkv.load(str(CASE)).params.layers[1].experts
    both, biases = (tensors[f"model.layers.1.mlp.experts.gate_up_proj{end}"] for end in ("", "_bias"))
    for expert in range(8):
        for channel in range(16):
            np.testing.assert_array_equal(experts.gate[expert, channel], both[expert, :, 2 * channel])
            np.testing.assert_array_equal(experts.up[expert, channel], both[expert, :, 2 * channel + 1])
        np.testing.assert_array_equal(experts.gate_bias[expert], biases[expert, 0::2])
        np.testing.assert_array_equal(experts.up_bias[expert], biases[expert, 1::2])
        np.testing.assert_array_equal(experts.down[expert], tensors["model.layers.1.mlp.experts.down_proj"][expert])


def test_a_checkpoint_is_written_as_it_was_read(tmp_path):
    model = jkv.load(str(CASE))
    checkpoint.export(model.params, None, tmp_path, dtype=jnp.float32)
    one, other = (load_file(folder / "model.safetensors") for folder in (CASE, tmp_path))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    assert jkv.load(str(tmp_path)).config == model.config
    jkv.save(model.params, tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, jkv.restore(tmp_path / "saved"), model.params)


# MXFP4.


VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # of E2M1, in the order of its codes (OCP MX specification, table 5)


def decoded(blocks, scales):
    """One byte at a time, in float64."""
    out = np.zeros((*blocks.shape[:-2], blocks.shape[-2] * 32))
    for index in np.ndindex(blocks.shape):
        *row, block, byte = index
        for half in range(2):
            code = (int(blocks[index]) >> (4 * half)) & 15
            number = VALUES[code & 7] * (-1 if code & 8 else 1)
            out[(*row, block * 32 + 2 * byte + half)] = number * 2.0 ** (int(scales[(*row, block)]) - 127)
    return out


def drawn(shape, seed=0):
    """Blocks with every code, and scales from tiny to large."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape, 16), np.uint8), rng.integers(90, 160, shape, np.uint8)


def test_numbers_are_those_of_the_specification_exactly():
    blocks, scales = drawn((3, 5, 2))
    np.testing.assert_array_equal(checkpoint_tensors.dequantised(blocks, scales).astype(np.float64), decoded(blocks, scales))
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    ends = np.array([1, 252] * 8, np.uint8)
    np.testing.assert_array_equal(checkpoint_tensors.dequantised(every, ends).astype(np.float64), decoded(every, ends))


def test_numbers_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = drawn((4, 6, 3))
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    ours = checkpoint_tensors.read_mxfp4({"w_blocks": blocks, "w_scales": scales}.__getitem__, "w")
    np.testing.assert_array_equal(ours.astype(np.float32), theirs)


def in_mxfp4(folder, change=lambda tensors: None):
    """The golden checkpoint with random experts in MXFP4, in two files; and the numbers that they stand for."""
    folder_of(folder, quantization_config={"quant_method": "mxfp4"}, hidden_size=32, intermediate_size=32)
    tensors, plain = load_file(CASE / "model.safetensors"), {}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        for i, (name, rows) in enumerate((("gate_up_proj", 64), ("down_proj", 32))):
            blocks, scales = drawn((8, rows, 1), seed=2 * layer + i)
            scales = scales // 8 + 110
            plain[prefix + name] = np.ascontiguousarray(np.swapaxes(decoded(blocks, scales), 1, 2), np.float32)
            del tensors[prefix + name]
            tensors |= {f"{prefix}{name}_blocks": blocks, f"{prefix}{name}_scales": scales}
        tensors[prefix + "gate_up_proj_bias"] = np.ones((8, 64), np.float32)
    change(tensors)
    (folder / "model.safetensors").unlink()
    files = {name: f"{'b' if name.endswith('_scales') else 'a'}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: x for name, x in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tensors, plain


def test_experts_in_mxfp4_are_dequantised_as_they_are_read(tmp_path):
    tensors, plain = in_mxfp4(tmp_path / "mxfp4")
    folder_of(tmp_path / "plain", intermediate_size=32)
    kept = {name: x for name, x in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    save_file(kept | plain, tmp_path / "plain" / "model.safetensors")
    one, other = (jkv.load(str(tmp_path / name)) for name in ("mxfp4", "plain"))
    assert one.config == other.config
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALES), "down_proj_blocks must have its scales; missing"),
        (lambda t: t.update({SCALES: t[SCALES][:, :31]}), "must have a scale for each block"),
        (lambda t: t.update({BLOCKS: t[BLOCKS].astype(np.float32)}), "must be bytes, in blocks of 16, got F32"),
        (lambda t: t.update({BLOCKS: t[BLOCKS][..., :8]}), "must be bytes, in blocks of 16"),
        (lambda t: t.update({SCALES: np.full_like(t[SCALES], 255)}), "down_proj must be finite, got NaN"),
        (lambda t: t.pop(BLOCKS), r"must contain model.layers.1.mlp.experts.down_proj; missing"),
    ],
    ids=["no-scales", "few-scales", "floats", "short-blocks", "no-numbers", "no-blocks"],
)
def test_damaged_mxfp4_is_refused(tmp_path, change, message):
    in_mxfp4(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        jkv.load(str(tmp_path))
