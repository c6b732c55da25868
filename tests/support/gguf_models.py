"""Writes small GGUF files from Hugging Face checkpoints, as llama.cpp's converter does: its names, orders and types."""

import json
import re
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jkv.model.weight_shapes import leaf_name
from pallas_kernels.blocks import Blocks

Kind = gguf.GGMLQuantizationType
KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
SCALES = {  # K-quants, which gguf cannot quantise: the bytes of a block at which its scales are, as float16
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}
ARCHITECTURES = {  # model_type -> general.architecture, where it is another
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
}
INTERLEAVED = ("llama", "mistral3", "smollm3")
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read_folder(folder):
    """The config.json and the tensors, in float32, of a Hugging Face folder."""
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= {name: np.asarray(tensor, np.float32) for name, tensor in load_file(file).items()}
    return json.loads((Path(folder) / "config.json").read_text()), tensors


def interleaved(rows, heads):
    """The rows of a query or key projection of Llama, reordered for llama.cpp's rotation of neighbouring channels."""
    half = rows.shape[0] // heads // 2
    return np.stack([rows.reshape(heads, 2, half, -1)[:, 0], rows.reshape(heads, 2, half, -1)[:, 1]], 2).reshape(rows.shape)


def quantised(values, kind, seed=0):
    """The bytes of a matrix of a type; those of a K-quant are random, with small scales."""
    if kind not in SCALES:
        return gguf.quantize(values, kind)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (values.size // weights, size)).astype(np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = np.float16([0.001]).view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


def in_blocks(params, kind=Kind.Q8_0):
    """The weights with the embedding, and the matrices whose inputs are whole blocks, as a file of that type has them."""

    def of_leaf(path, leaf):
        is_table = leaf_name(path) == "embedding"
        rows = np.asarray(leaf if is_table else leaf.T)
        if leaf.ndim != 2 or rows.shape[1] % gguf.GGML_QUANT_SIZES[kind][0]:
            return leaf
        return Blocks(jnp.asarray(gguf.quantize(rows, kind)), kind.name, is_transposed=not is_table)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def write_gguf(file, folder, kind=Kind.F32, tokenizer=None, change=None, **options):
    """Writes a Hugging Face folder as a GGUF file whose matrices are of a type; returns the dequantised tensors by their names.

    `tokenizer` are fields of the metadata, and `change` may change the fields and tensors before they are written.
    """
    config, tensors = read_folder(folder)
    name, heads = ARCHITECTURES.get(config["model_type"], config["model_type"]), config["num_attention_heads"]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    fields = metadata_of(config, name) | (tokenizer or {})
    stored, dequantised = {}, {}
    for seed, (long, values) in enumerate(converted(config, tensors).items()):
        own = kind if values.ndim == 2 else Kind.F32
        raw = quantised(values, own, seed)
        dequantised[long] = gguf.dequantize(raw, own)
        if name in INTERLEAVED and long.endswith(("q_proj.weight", "k_proj.weight")):
            raw = interleaved(raw, heads if "q_proj" in long else config["num_key_value_heads"])
        stored[names.get_name(long, try_suffixes=(".weight", ".bias"))] = (raw, own)
    rope = rope_of(config)
    if rope.get("rope_type") == "llama3":
        stored["rope_freqs.weight"] = (divisors(config, rope), Kind.F32)
        fields[f"{name}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope.get("rope_type") == "longrope":
        for part in ("long", "short"):
            stored[f"rope_factors_{part}.weight"] = (np.array(rope[f"{part}_factor"], np.float32), Kind.F32)
        original = rope["original_max_position_embeddings"]
        growth = np.log(config["max_position_embeddings"] / original)
        fields[f"{name}.rope.scaling.original_context_length"] = original
        fields[f"{name}.rope.scaling.attn_factor"] = float(np.sqrt(1 + growth / np.log(original)))
    if name == "glm4moe":  # of the layer of multi-token prediction, which counts as one
        layer = config["num_hidden_layers"]
        stored[f"blk.{layer}.nextn.enorm.weight"] = stored["output_norm.weight"]
        stored[f"blk.{layer}.attn_norm.weight"] = stored["output_norm.weight"]
    if change:
        change(fields, stored)
    write(file, name, fields, stored, **options)
    return dequantised


def converted(config, tensors):
    """The tensors as the converter names and changes them before it looks up llama.cpp's names."""
    family, found = config["model_type"], {}
    for name, values in tensors.items():
        if expert := re.fullmatch(r"(.*\.experts)\.0\.(.*)", name):
            count = sum(bool(re.fullmatch(rf"{re.escape(expert[1])}\.\d+\.{re.escape(expert[2])}", one)) for one in tensors)
            found[f"{expert[1]}.{expert[2]}"] = np.stack([tensors[f"{expert[1]}.{i}.{expert[2]}"] for i in range(count)])
        elif re.search(r"\.experts\.\d+\.", name):
            continue
        elif family == "gpt_oss":
            found |= of_gpt_oss(name, values)
        elif family.startswith("qwen3_5"):
            found |= of_qwen3_5(name, values, config)
        elif family == "gemma3_text" and name.endswith("norm.weight"):
            found[name] = values + 1
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return found


def of_gpt_oss(name, values):
    """Experts by gate and up, with the rows of a product's outputs; sinks with a suffix."""
    if name.endswith("gate_up_proj"):
        rows, stem = values.swapaxes(1, 2), name.removesuffix("gate_up_proj")
        return {f"{stem}gate_proj.weight": rows[:, ::2], f"{stem}up_proj.weight": rows[:, 1::2]}
    if name.endswith("gate_up_proj_bias"):
        stem = name.removesuffix("gate_up_proj_bias")
        return {f"{stem}gate_proj.bias": values[:, ::2], f"{stem}up_proj.bias": values[:, 1::2]}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": values.swapaxes(1, 2)}
    return {name.replace("down_proj_bias", "down_proj.bias").replace("sinks", "sinks.weight"): values}


def of_qwen3_5(name, values, config):
    """Value heads that take turns over the key heads; norms with their 1, and the decay itself."""
    keys, heads, size = (config[f"linear_{field}"] for field in ("num_key_heads", "num_value_heads", "value_head_dim"))
    before = 2 * keys * config["linear_key_head_dim"]
    order = [key * (heads // keys) + i for i in range(heads // keys) for key in range(keys)]

    def tiled(values, size, axis=0):
        pieces = np.split(values, heads, axis)
        assert pieces[0].shape[axis] == size
        return np.concatenate([pieces[head] for head in order], axis)

    if name.endswith("norm.weight"):
        return {name: values if "linear_attn" in name else values + 1}
    if "in_proj_qkv" in name or "conv1d" in name:
        values = values.squeeze()
        return {name: np.concatenate([values[:before], tiled(values[before:], size)])}
    if "in_proj_z" in name:
        return {name: tiled(values, size)}
    if "in_proj_a" in name or "in_proj_b" in name:
        return {name: tiled(values, 1)}
    if name.endswith("A_log"):
        return {name: -np.exp(tiled(values, 1))}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): tiled(values, 1)}
    return {name: tiled(values, size, 1) if "linear_attn.out_proj" in name else values}


def rope_of(config):
    """The RoPE parameters of layers with full attention."""
    rope = config.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def metadata_of(config, name):
    """The fields of the architecture."""
    rope = rope_of(config)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        "rope.dimension_count": int(size * (rope.get("partial_rotary_factor") or 1)),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        own |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        own["rope.scaling.yarn_beta_fast"] = rope["beta_fast"]
    if "llama_4_scaling_beta" in rope:
        own["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    own |= {"gemma3": of_windows, "olmo2": of_windows, "gpt-oss": of_experts, "qwen3moe": of_experts}.get(name, lambda *_: {})(
        config, name
    )
    own |= {"glm4moe": of_router, "qwen35": of_states, "qwen35moe": of_states}.get(name, lambda *_: {})(config, name)
    return {f"{name}.{key}": value for key, value in own.items()}


def of_windows(config, name):
    """The window and the layers that have it, and in Gemma 3 the base of their RoPE where it is not the usual one."""
    base = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    own = {} if base == (10_000 if name == "gemma3" else rope_of(config)["rope_theta"]) else {"rope.freq_base_swa": float(base)}
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    return own | {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": pattern}


def of_experts(config, name):
    """The number and width of experts; gpt-oss has a window too, in layers that the file does not list."""
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    count = config.get("num_experts", config.get("num_local_experts"))
    own = {"expert_count": count, "expert_used_count": config["num_experts_per_tok"], "expert_feed_forward_length": width}
    return own | ({"attention.sliding_window": config["sliding_window"]} if name == "gpt-oss" else {})


def of_router(config, name):
    """The router and experts of GLM-4.5, with the layers of multi-token prediction."""
    return {
        "block_count": config["num_hidden_layers"] + config["num_nextn_predict_layers"],
        "nextn_predict_layers": config["num_nextn_predict_layers"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def of_states(config, name):
    """The sizes of the recurrent states, and which layers have none."""
    own = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
        "rope.dimension_sections": [11, 11, 10, 0],
    }
    if name == "qwen35":
        return own
    experts = of_experts(config, name) | {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}
    return own | experts


def divisors(config, rope):
    """The table of llama.cpp's converter for the scaling of Llama 3, frequency by frequency."""
    found, size = [], config["head_dim"]
    for index in range(0, size, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (index / size)
        low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        smooth = (length / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        found.append(1 if wave < length / high else rope["factor"] if wave > length / low else between)
    return np.array(found, np.float32)


def write(file, name, fields, stored, **options):
    """Writes fields and tensors, which are pairs of raw data and a type."""
    writer = gguf.GGUFWriter(file, name, **options)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for key, (raw, kind) in stored.items():
        writer.add_tensor(key, np.ascontiguousarray(raw), raw_dtype=None if kind in (Kind.F32, Kind.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_twin(folder, source, tensors):
    """A Hugging Face folder with the configuration of `source` and these tensors."""
    folder.mkdir()
    fields = json.loads((source / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder
