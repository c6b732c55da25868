"""Writes small GGUF files from Hugging Face checkpoints, as llama.cpp's converter does: its names, orders and types."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

Kind = gguf.GGMLQuantizationType
KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
SCALES = {  # K-quants, which gguf cannot quantise: the bytes of a block at which its scales are, as float16
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}
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


def write_gguf(file, folder, kind=Kind.F32, tokenizer=None, change=None, **options):
    """Writes a Hugging Face folder as a GGUF file whose matrices are of a type; returns the dequantised tensors by their names.

    `tokenizer` are fields of the metadata, and `change` may change the fields and tensors before they are written.
    """
    config, tensors = read_folder(folder)
    name, heads = config["model_type"], config["num_attention_heads"]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    fields = metadata_of(config, name) | (tokenizer or {})
    stored, dequantised = {}, {}
    for seed, (long, values) in enumerate(tensors.items()):
        stem, suffix = long.rsplit(".", 1)
        own = kind if values.ndim == 2 else Kind.F32
        raw = quantised(values, own, seed)
        dequantised[long] = gguf.dequantize(raw, own)
        if name == "llama" and stem.endswith(("q_proj", "k_proj")):
            raw = interleaved(raw, heads if stem.endswith("q_proj") else config["num_key_value_heads"])
        stored[f"{names.get_name(stem)}.{suffix}"] = (raw, own)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        stored["rope_freqs.weight"] = (divisors(config, rope), Kind.F32)
        fields[f"{name}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if change:
        change(fields, stored)
    write(file, name, fields, stored, **options)
    return dequantised


def metadata_of(config, name):
    """The fields of the architecture."""
    rope = config.get("rope_parameters") or {}
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
    return {f"{name}.{key}": value for key, value in own.items()}


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
