"""Reads a GGUF file, llama.cpp's format, as a checkpoint: its configuration, the names of its tensors, and their numbers.

The metadata become the fields of a config.json, so the rules of `jkv.checkpoints.family` and
`jkv.checkpoints.architectures` hold. Tensors are read and dequantised one by one, by the package gguf.
`jkv.checkpoints.gguf_header` parses the file, and `jkv.checkpoints.gguf_tokenizer` has its tokenizer.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jkv.checkpoints.architectures import advice, parse_config
from jkv.checkpoints.families import FAMILIES, find_family
from jkv.checkpoints.family import REQUIRED, RULES, Family
from jkv.checkpoints.gguf_header import GgufHeader
from jkv.checkpoints.json_files import AGAIN, CORRECT, check_fields, shown
from jkv.checks import install
from jkv.errors import refused
from jkv.model.params import ModelConfig

ARCHITECTURES = [name for name, family in FAMILIES.items() if family.is_read_from_gguf]  # llama.cpp has the same names
FIELDS = {  # of the metadata, after the name of the architecture -> of config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
NEEDED = {"attention.layer_norm_rms_epsilon", *(field for field, name in FIELDS.items() if name in REQUIRED)}
TENSORS = {  # field of Params or LayerParams -> tensor
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "unembedding": "output.weight",
    "attention_norm": "attn_norm.weight",  # this and the following have the prefix of the layer
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "out": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "query_bias": "attn_q.bias",
    "key_bias": "attn_k.bias",
    "value_bias": "attn_v.bias",
    "query_norm": "attn_q_norm.weight",
    "key_norm": "attn_k_norm.weight",
}
STACKED = {  # where a checkpoint of the family has one tensor for several fields
    ("query", "key", "value"): "attn_qkv.weight",
    ("gate", "up"): "ffn_up.weight",
}
FREQUENCIES = "rope_freqs.weight"  # by which each rotary frequency is divided
YARN = {  # of the metadata, after the name of the architecture -> of rope_scaling
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all Llama 3 models; the file has only what follows from them
LLAMA3_POSITIONS = 8192
CHUNK = 1 << 22  # weights that are dequantised at once


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a file, so that it must be a GGUF file. Folders and names of models do not."""
    is_path = bool(str(path)) and os.path.lexists(path) and not Path(path).is_dir()
    return is_path or (str(path).lower().endswith(".gguf") and not Path(path).is_dir())


def find_gguf() -> Any:
    """The package gguf, with the functions that dequantise.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        rule = f"GGUF files are read with gguf, which is not installed. Run: {install('gguf')}."
        raise refused(rule, file="unsupported") from error
    return gguf


# Configuration


def read_gguf_config(header: GgufHeader) -> ModelConfig:
    """The `ModelConfig` in the metadata of a file, without end tokens. Refuses unsupported features."""
    metadata, tensors, where = header.metadata, header.tensors, str(header.file)
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        rule = f"{where}: general.architecture must be one of {', '.join(ARCHITECTURES)}, got {shown(name)}. {advice()}"
        raise refused(rule, **{"general.architecture": "unsupported"})
    own = {field.removeprefix(f"{name}."): plain(value) for field, value in metadata.items() if field.startswith(f"{name}.")}
    check_fields(own, {field: RULES[known] for field, known in FIELDS.items()}, f"{where}: {name}", sorted(NEEDED))
    embedding = tensors.get(TENSORS["embedding"])
    if embedding is None or len(embedding.shape) != 2:
        raise refused(f"{where} must contain {TENSORS['embedding']} with two axes, got {embedding}. {AGAIN}", file="invalid")
    check_features(own, f"{where}: {name}")
    fields: dict[str, Any] = {"rope_theta": 10_000.0} | {known: own[field] for field, known in FIELDS.items() if field in own}
    fields |= {
        "model_type": name,
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": own.get("attention.head_count_kv", fields["num_attention_heads"]),
        "tie_word_embeddings": TENSORS["unembedding"] not in tensors,
        "rope_scaling": rope_scaling(header, own, fields),
    }
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    rotated = own.get("rope.dimension_count", width)
    if find_family(name).has_partial_rotary and rotated != width and type(rotated) is int:
        fields["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        rule = f"{where}: {name}.rope.dimension_count must be the head size {width}, got {shown(rotated)}. {CORRECT}"
        raise refused(rule, **{"rope.dimension_count": "unsupported"})
    return parse_config(fields, where)


def plain(value: Any) -> Any:
    """A value of the metadata as JSON would have it."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def check_features(own: Mapping[str, Any], where: str) -> None:
    """Refuses by name what the decoder lacks; `own` are the metadata of the architecture."""
    window, limit = own.get("attention.sliding_window") or 0, own["context_length"]
    usual = own["embedding_length"] // own["attention.head_count"]
    keys = own.get("attention.key_length", usual)
    rules = (
        (own.get("expert_count", 0) == 0, "expert_count must be 0 (no mixture of experts)", "expert_count"),
        (
            type(window) is int and (window == 0 or window >= limit),
            f"attention.sliding_window must be 0 or at least context_length={limit} (full attention)",
            "attention.sliding_window",
        ),
        (
            own.get("attention.value_length", usual) == keys,
            f"attention.value_length (or by default the width of a head, {usual}) must be attention.key_length={shown(keys)}",
            "attention.value_length",
        ),
        (own.get("attention.causal", True) is True, "attention.causal must be true", "attention.causal"),
    )
    for holds, rule, field in rules:
        if not holds:
            raise refused(f"{where}.{rule}, got {shown(own.get(field))}. {advice()}", file="unsupported")


def rope_scaling(header: GgufHeader, own: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` of a config.json."""
    kind = own.get("rope.scaling.type", "none")
    if FREQUENCIES in header.tensors:
        if kind != "none":
            rule = f"{header.file}: {FREQUENCIES} must not be there with rope.scaling.type={shown(kind)}. {advice()}"
            raise refused(rule, file="unsupported")
        return llama3_scaling(header, own, fields)
    if kind == "none":
        return None
    if kind == "yarn":
        return yarn_scaling(header, own)
    if kind != "linear":
        rule = f"{header.file}: rope.scaling.type must be none, linear or yarn, got {shown(kind)}. {advice()}"
        raise refused(rule, **{"rope.scaling.type": "unsupported"})
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    return {"rope_type": "linear"} | ({} if factor is None else {"factor": factor})


def yarn_scaling(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """The YaRN of a file: llama.cpp has the ramp and the attention factor of the paper, where no field says otherwise."""
    unread = {name for name in own if name.startswith("rope.scaling.")} - {*YARN, "rope.scaling.type", "rope.scaling.finetuned"}
    if odd := sorted(name for name in unread if own[name] not in (0, 1)):
        rule = f"{header.file}: YaRN must have no {', '.join(odd)}, got {shown(own[odd[0]])}. {advice()}"
        raise refused(rule, **{odd[0]: "unsupported"})
    given = {known: own[name] for name, known in YARN.items() if name in own}
    return {"rope_type": "yarn"} | given


def llama3_scaling(header: GgufHeader, own: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The Llama 3 scaling from which a table of divisors was made. Refuses a table of any other origin."""
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    tensor = header.tensors[FREQUENCIES]
    if tensor.shape != (width // 2,):
        rule = f"{header.file}: {FREQUENCIES} must have shape {(width // 2,)}, got {tensor.shape}. {AGAIN}"
        raise refused(rule, file="invalid")
    found = read_tensor(header, FREQUENCIES)
    if (found == 1).all():
        return None
    length = own.get("rope.scaling.original_context_length", LLAMA3_POSITIONS)
    positions = RULES["max_position_embeddings"]
    check_fields(
        {"rope.scaling.original_context_length": length}, {"rope.scaling.original_context_length": positions}, str(header.file)
    )
    scaling = {"rope_type": "llama3", "factor": float(str(found.max())), **LLAMA3, "original_max_position_embeddings": length}
    expected = llama3_divisors(fields["rope_theta"], width, scaling["factor"], length)
    if not np.allclose(found, expected, rtol=1e-4, atol=0):
        raise refused(
            f"{header.file}: {FREQUENCIES} must be the Llama 3 scaling of {length} positions with factors {LLAMA3}, got other "
            f"divisors: {shown(found.tolist())}. {advice()}",
            file="unsupported",
        )
    return scaling


def llama3_divisors(theta: float, width: int, factor: float, length: int) -> np.ndarray:
    """The divisors of the rotary frequencies (as transformers computes them): 1 for short waves, `factor` for long ones."""
    turns = length / (2 * math.pi) * theta ** -(np.arange(0, width, 2) / width)  # of a wave within `length` positions
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / factor + share)


# Tensors


def gguf_family(config: ModelConfig) -> Family:
    """The family of a model, with the names of tensors that llama.cpp gives them."""
    family = find_family(config.family)
    names = dict(TENSORS)
    for fields, name in STACKED.items():
        if len({family.tensors[field] for field in fields}) == 1:
            names |= dict.fromkeys(fields, name)
    return dataclasses.replace(family, tensors=names, layer_prefix="blk.{}.")


def check_gguf_tensors(header: GgufHeader, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses missing, unexpected and misshapen tensors, unknown quantisation, and data outside of the file."""
    where, tensors = str(header.file), header.tensors
    if missing := [name for name in wanted if name not in tensors]:
        raise refused(f"{where} must contain {some(missing)}; missing. {AGAIN}", file="missing")
    if surplus := sorted(tensors.keys() - wanted.keys() - {FREQUENCIES}):
        rule = f"{where} must not contain {some(surplus)}, which its architecture does not use. {advice()}"
        raise refused(rule, file="unsupported")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise refused(f"{where}: {name} must have shape {shape}, got {tensors[name].shape}. {AGAIN}", file="does_not_fit")
    check_extents(header, tensors)


def some(names: list[str]) -> str:
    """The first three names of a list, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_extents(header: GgufHeader, names: Iterable[str]) -> None:
    """Refuses tensors of unknown quantisation, that reach beyond the file, or that overlap."""
    ends = [(header.tensors[name].begin, header.tensors[name].begin + num_bytes(header, name), name) for name in names]
    last, before = 0, ""
    for begin, end, name in sorted(ends):
        if end > header.size:
            rule = f"{header.file}: {name} must end within the {header.size:,} bytes, got {end:,}: truncated. {AGAIN}"
            raise refused(rule, file="invalid")
        if begin < last:
            rule = f"{header.file}: {name} must begin after {before}, at byte {last:,}; got {begin:,}. {AGAIN}"
            raise refused(rule, file="invalid")
        last, before = end, name


def num_bytes(header: GgufHeader, name: str) -> int:
    """The size of a tensor in the file."""
    tensor = header.tensors[name]
    weights, size = block_of(tensor.kind, f"{header.file}: {name}")
    if tensor.shape[-1] % weights:
        raise refused(
            f"{header.file}: {name} must have rows of a multiple of {weights} weights, the block of its type; got "
            f"{tensor.shape[-1]}. {AGAIN}",
            file="invalid",
        )
    return math.prod(tensor.shape) // weights * size


def block_of(kind: int, where: str) -> tuple[int, int]:
    """The weights and bytes of a block of a type of quantisation that can be dequantised."""
    gguf = find_gguf()
    try:
        known = gguf.GGMLQuantizationType(kind)
        weights, size = gguf.GGML_QUANT_SIZES[known]
        gguf.dequantize(np.zeros((1, size), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError) as error:
        name = getattr(gguf.GGMLQuantizationType._value2member_map_.get(kind), "name", "an unknown type")
        raise refused(
            f"{where} must be of a type that the package gguf dequantises, such as F16, BF16, Q8_0, Q4_0, Q4_K or Q6_K; got "
            f"{name} ({kind}). Quantise the model again with llama-quantize, or upgrade gguf.",
            file="unsupported",
        ) from error
    return weights, size


def stored_dtype(header: GgufHeader) -> str:
    """The dtype of the weights as safetensors names it; that of quantised weights is BF16."""
    kind = find_gguf().GGMLQuantizationType(header.tensors[TENSORS["embedding"]].kind).name
    return kind if kind in ("F32", "F16") else "BF16"


def read_tensor(header: GgufHeader, name: str) -> np.ndarray:
    """A tensor in float32, dequantised in chunks of rows."""
    gguf, tensor = find_gguf(), header.tensors[name]
    check_extents(header, [name])
    kind = gguf.GGMLQuantizationType(tensor.kind)
    size, width = num_bytes(header, name), tensor.shape[-1]
    values = np.empty((math.prod(tensor.shape) // width, width), np.float32)
    row, rows = size // len(values), max(1, CHUNK // width)
    with open(header.file, "rb") as stream:
        stream.seek(tensor.begin)
        for first in range(0, len(values), rows):
            target = values[first : first + rows]
            data = np.frombuffer(stream.read(row * len(target)), np.uint8)
            if data.size < row * len(target):
                raise refused(f"{header.file} must not change while it is read; it became shorter. {AGAIN}", file="invalid")
            with np.errstate(all="ignore"):  # numbers that are not finite are reported by whoever uses them
                target[:] = gguf.dequantize(data.reshape(len(target), row), kind)
    return values.reshape(tensor.shape)


def read_gguf_weight(header: GgufHeader, name: str, config: ModelConfig) -> np.ndarray:
    """A tensor in float32 as a Hugging Face checkpoint has it."""
    values = read_tensor(header, name)
    heads = {"attn_q.weight": config.num_query_heads, "attn_k.weight": config.num_kv_heads}.get(name.split(".", 2)[-1])
    if heads is None or not find_family(config.family).is_interleaved_in_gguf:
        return values
    # llama.cpp rotates neighbouring channels of Llama, so its converter interleaved the halves of each head.
    # In: rows 0 4 1 5 2 6 3 7 of a head of 8. Out: 0 1 2 3 4 5 6 7.
    return values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
