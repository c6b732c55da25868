"""Reads a GGUF file, llama.cpp's format, as a checkpoint: its configuration, the names of its tensors, and their numbers.

The metadata become the fields of a config.json, so the rules of `jkv.checkpoints.family` and
`jkv.checkpoints.architectures` hold. Tensors are read and dequantised one by one, by the package gguf.
`jkv.checkpoints.gguf_header` parses the file, and `jkv.checkpoints.gguf_tokenizer` has its tokenizer.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jkv.checkpoints.architectures import advice, parse_config, required_fields, rules_of
from jkv.checkpoints.families import find_family
from jkv.checkpoints.family import FULL, MAX_LAYERS, MAX_POSITIONS, ROPE, RULES, WINDOWED, Family
from jkv.checkpoints.gguf_families import FORMS, LAYER, NAMES, NEUTRAL, REORDERED_INPUTS, GgufForm, form_of
from jkv.checkpoints.gguf_header import GgufHeader
from jkv.checkpoints.json_files import AGAIN, CORRECT, Rule, check_fields, either, integer, list_of, shown
from jkv.checks import install
from jkv.errors import refused
from jkv.model.params import ModelConfig
from pallas_kernels.blocks import BLOCKS

FREQUENCIES = "rope_freqs.weight"  # by which each rotary frequency is divided
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # the same of LongRoPE, for long texts and short ones
YARN = {  # of the metadata, after the name of the architecture -> of rope_scaling
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
LONGROPE = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all Llama 3 models; the file has only what follows from them
LLAMA3_POSITIONS = 8192
CHUNK = 1 << 22  # weights that are dequantised at once
WINDOW, PATTERN, WINDOW_BASE = "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"
GATING, PREDICTED = "expert_gating_func", "nextn_predict_layers"  # layers of multi-token prediction, which are the last ones
FLAG = Rule("true or false", lambda value: type(value) is bool or value in (0, 1))
FURTHER_RULES = {
    WINDOW: integer(0, MAX_POSITIONS),
    PATTERN: either(integer(1, MAX_LAYERS), list_of(FLAG, MAX_LAYERS)),
    WINDOW_BASE: RULES["rope_theta"],
    GATING: integer(0, 1 << 10),
    PREDICTED: integer(0, MAX_LAYERS),
}


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
    if not isinstance(name, str) or name not in FORMS:
        rule = f"{where}: general.architecture must be one of {', '.join(FORMS)}, got {shown(name)}. {advice()}"
        raise refused(rule, **{"general.architecture": "unsupported"})
    form, family = FORMS[name], find_family(FORMS[name].family)
    own = {field.removeprefix(f"{name}."): plain(value) for field, value in metadata.items() if field.startswith(f"{name}.")}
    known, needed = form.known_fields, form.needed_fields(required_fields(family))
    rules = {field: rules_of(family)[meaning] for field, meaning in known.items()}
    check_fields(own, rules | FURTHER_RULES, f"{where}: {name}", needed)
    embedding = tensors.get(NAMES["embedding"])
    if embedding is None or len(embedding.shape) != 2:
        raise refused(f"{where} must contain {NAMES['embedding']} with two axes, got {embedding}. {AGAIN}", file="invalid")
    check_features(own, form, f"{where}: {name}")
    fields: dict[str, Any] = {known[field]: own[field] for field in known.keys() & own.keys()}
    fields |= {
        "model_type": form.family,
        "vocab_size": embedding.shape[0],
        "num_hidden_layers": own["block_count"] - own.get(PREDICTED, 0),
        "num_key_value_heads": own.get("attention.head_count_kv", fields["num_attention_heads"]),
        "tie_word_embeddings": NAMES["unembedding"] not in tensors,
        **form.reads(own, header),
        **(windows(own, form) if form.interval else {}),
    }
    theta = fields.pop("rope_theta", 10_000.0)
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    rotated = own.get("rope.dimension_count", width)
    if family.has_partial_rotary and type(rotated) is int:
        fields["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        rule = f"{where}: {name}.rope.dimension_count must be the head size {width}, got {shown(rotated)}. {CORRECT}"
        raise refused(rule, **{"rope.dimension_count": "unsupported"})
    fields["rope_parameters"] = ropes(header, own, form, theta, width)
    return parse_config(fields, where)


def windows(own: Mapping[str, Any], form: GgufForm) -> dict[str, Any]:
    """The window of a model, and which layers have it: those that the file lists, or all but every n-th."""
    window, pattern = own.get(WINDOW) or None, own.get(PATTERN, form.interval)
    layers = own["block_count"] - own.get(PREDICTED, 0)
    listed = pattern if isinstance(pattern, list) else [bool((layer + 1) % pattern) for layer in range(layers)]
    return {"sliding_window": window, "layer_types": [WINDOWED if window and one else FULL for one in listed[:layers]]}


def ropes(header: GgufHeader, own: Mapping[str, Any], form: GgufForm, theta: float, width: int) -> dict[str, Any]:
    """The `rope_parameters` of a config.json, for heads of this width."""
    rope = {"rope_type": "default", "rope_theta": theta, **(rope_scaling(header, own, form, theta, width) or {})}
    local = own.get(WINDOW_BASE, form.window_theta or theta)
    if find_family(form.family).has_rope_by_kind:
        return {FULL: rope, WINDOWED: {"rope_type": "default", "rope_theta": local}}
    if local != theta:
        rule = f"{header.file}: {WINDOW_BASE} must be rope.freq_base={theta:g}, got {local:g}. {advice()}"
        raise refused(rule, **{WINDOW_BASE: "unsupported"})
    return rope


def plain(value: Any) -> Any:
    """A value of the metadata as JSON would have it."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def check_features(own: Mapping[str, Any], form: GgufForm, where: str) -> None:
    """Refuses by name what the decoder lacks; `own` are the metadata of the architecture."""
    window, limit = own.get(WINDOW) or 0, own["context_length"]
    usual = own["embedding_length"] // own["attention.head_count"]
    keys = own.get("attention.key_length", usual)
    unread = {field: NEUTRAL[field] for field in NEUTRAL.keys() - form.known_fields.keys() - form.yarn.keys()}
    rules = (
        (
            bool(form.interval) or window == 0 or window >= limit,
            f"{WINDOW} must be 0 or at least context_length={limit} (full attention)",
            WINDOW,
        ),
        (
            own.get("attention.value_length", usual) == keys,
            f"attention.value_length (or by default the width of a head, {usual}) must be attention.key_length={shown(keys)}",
            "attention.value_length",
        ),
        (
            own.get(GATING, 0) in (0, form.gating),
            f"{GATING} must be {form.gating}, that of {form.family}",
            GATING,
        ),
        (
            own.get(PREDICTED, 0) < own["block_count"],
            f"{PREDICTED} must be below block_count={own['block_count']}",
            PREDICTED,
        ),
        (
            not isinstance(own.get(PATTERN), list) or len(own[PATTERN]) == own["block_count"],
            f"{PATTERN} must have an entry for each of the {own['block_count']} layers",
            PATTERN,
        ),
        *(
            (own.get(field, values[0]) in values, f"{field} must be {' or '.join(map(shown, values))} in {form.family}", field)
            for field, values in unread.items()
        ),
    )
    for holds, rule, field in rules:
        if not holds:
            raise refused(f"{where}.{rule}, got {shown(own.get(field))}. {advice()}", **{field: "unsupported"})


def rope_scaling(header: GgufHeader, own: Mapping[str, Any], form: GgufForm, theta: float, width: int) -> dict[str, Any] | None:
    """The scaling in the `rope_parameters` of a config.json."""
    kind = own.get("rope.scaling.type", "none")
    if FREQUENCIES in header.tensors:
        if kind != "none":
            rule = f"{header.file}: {FREQUENCIES} must not be there with rope.scaling.type={shown(kind)}. {advice()}"
            raise refused(rule, file="unsupported")
        return llama3_scaling(header, own, theta, width)
    if LONG in header.tensors or SHORT in header.tensors:
        return longrope_scaling(header, own)
    if kind == "none":
        return None
    if kind == "yarn":
        return yarn_scaling(header, own, form)
    if kind != "linear":
        rule = f"{header.file}: rope.scaling.type must be none, linear or yarn, got {shown(kind)}. {advice()}"
        raise refused(rule, **{"rope.scaling.type": "unsupported"})
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    return {"rope_type": "linear"} | ({} if factor is None else {"factor": factor})


def longrope_scaling(header: GgufHeader, own: Mapping[str, Any]) -> dict[str, Any]:
    """The LongRoPE of a file, which has a tensor of divisors of the rotary frequencies for long texts, and one for short."""
    if missing := [name for name in (LONG, SHORT) if name not in header.tensors]:
        raise refused(f"{header.file} must contain {missing[0]} for LongRoPE; missing. {AGAIN}", file="missing")
    if (kind := own.get("rope.scaling.type", "none")) not in ("none", "longrope"):
        rule = f"{header.file}: rope.scaling.type must be longrope with {LONG}, got {shown(kind)}. {advice()}"
        raise refused(rule, **{"rope.scaling.type": "unsupported"})
    long, short = ([float(str(one)) for one in read_tensor(header, name).ravel()] for name in (LONG, SHORT))
    given = {known: own[name] for name, known in LONGROPE.items() if name in own}
    return {"rope_type": "longrope", "long_factor": long, "short_factor": short} | given


def yarn_scaling(header: GgufHeader, own: Mapping[str, Any], form: GgufForm) -> dict[str, Any]:
    """The YaRN of a file: llama.cpp has the ramp and the attention factor of the paper, where no field says otherwise.

    Converters also write the attention factor of config.json, which is then that of the paper.
    """
    factor = "rope.scaling.factor"
    check_fields(own, {factor: ROPE["factor"]}, str(header.file), [factor])
    given = {known: own[name] for name, known in {**YARN, **form.yarn}.items() if name in own}
    usual = 0, 1, 0.1 * math.log(own[factor]) + 1
    read = {*YARN, *form.yarn, "rope.scaling.type", "rope.scaling.finetuned"}
    unread = {name: value for name, value in own.items() if name.startswith("rope.scaling.") and name not in read}
    if odd := sorted(
        name for name, value in unread.items() if type(value) not in (int, float) or not np.isclose(value, usual).any()
    ):
        rule = f"{header.file}: YaRN must have no {', '.join(odd)}, got {shown(own[odd[0]])}. {advice()}"
        raise refused(rule, **{odd[0]: "unsupported"})
    return {"rope_type": "yarn"} | dict(form.rope) | given


def llama3_scaling(header: GgufHeader, own: Mapping[str, Any], theta: float, width: int) -> dict[str, Any] | None:
    """The Llama 3 scaling from which a table of divisors was made. Refuses a table of any other origin."""
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
    expected = llama3_divisors(theta, width, scaling["factor"], length)
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


def gguf_family(header: GgufHeader, config: ModelConfig) -> Family:
    """The family of a model, with the names that its tensors have in the file."""
    return form_of(config.family).named(find_family(config.family), header.tensors)


def check_gguf_tensors(header: GgufHeader, wanted: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Refuses missing, unexpected and misshapen tensors, unknown quantisation, and data outside of the file."""
    where, tensors = (
        str(header.file),
        {name: header.tensors[name] for name in header.tensors if not is_prediction(name, config)},
    )
    if missing := [name for name in wanted if name not in tensors]:
        raise refused(f"{where} must contain {some(missing)}; missing. {AGAIN}", file="missing")
    if surplus := sorted(tensors.keys() - wanted.keys() - {FREQUENCIES, LONG, SHORT}):
        rule = f"{where} must not contain {some(surplus)}, which its architecture does not use. {advice()}"
        raise refused(rule, file="unsupported")
    for name, shape in wanted.items():
        if without_ones(tensors[name].shape) != without_ones(shape):
            raise refused(f"{where}: {name} must have shape {shape}, got {tensors[name].shape}. {AGAIN}", file="does_not_fit")
    check_extents(header, tensors)


def is_prediction(tensor: str, config: ModelConfig) -> bool:
    """Whether a tensor is of a layer of multi-token prediction, which the metadata count among the layers."""
    layer = tensor.removeprefix(LAYER.split("{}")[0]).split(".")[0]
    return layer.isdecimal() and len(layer) < 5 and config.num_layers <= int(layer)


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of length 1, which llama.cpp drops from some tensors."""
    return tuple(size for size in shape if size != 1)


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


def type_of(header: GgufHeader, name: str) -> Any:
    """The type of a tensor, a `gguf.GGMLQuantizationType`, if it can be dequantised."""
    kind = header.tensors[name].kind
    block_of(kind, f"{header.file}: {name}")
    return find_gguf().GGMLQuantizationType(kind)


def stored_dtype(header: GgufHeader) -> str:
    """The dtype of the weights as safetensors names it; that of quantised weights is BF16."""
    kind = kind_of(header, NAMES["embedding"])
    return kind if kind in ("F32", "F16") else "BF16"


def read_tensor(header: GgufHeader, name: str) -> np.ndarray:
    """A tensor in float32, dequantised in chunks of rows."""
    gguf, tensor = find_gguf(), header.tensors[name]
    kind, width = type_of(header, name), tensor.shape[-1]
    values = np.empty((math.prod(tensor.shape) // width, width), np.float32)
    first = 0
    for rows in read_rows(header, name):
        with np.errstate(all="ignore"):  # numbers that are not finite are reported by whoever uses them
            values[first : first + len(rows)] = gguf.dequantize(rows, kind)
        first += len(rows)
    return values.reshape(tensor.shape)


def read_rows(header: GgufHeader, name: str) -> Iterator[np.ndarray]:
    """The bytes of a tensor as they lie, uint8 [rows, bytes of a row], in chunks of rows."""
    tensor = header.tensors[name]
    check_extents(header, [name])
    count, width = math.prod(tensor.shape) // tensor.shape[-1], tensor.shape[-1]
    row, most = num_bytes(header, name) // count, max(1, CHUNK // width)
    with open(header.file, "rb") as stream:
        stream.seek(tensor.begin)
        for first in range(0, count, most):
            rows = min(most, count - first)
            data = np.frombuffer(stream.read(row * rows), np.uint8)
            if data.size < row * rows:
                raise refused(f"{header.file} must not change while it is read; it became shorter. {AGAIN}", file="invalid")
            yield data.reshape(rows, row)


def read_gguf_weight(header: GgufHeader, name: str, shape: tuple[int, ...], config: ModelConfig) -> np.ndarray:
    """A tensor in float32 as a Hugging Face checkpoint has it, where it has this shape."""
    values = read_tensor(header, name)
    restore = restorer(name, config)
    return (restore(values, config) if restore else values).reshape(shape)


def restorer(name: str, config: ModelConfig) -> Any:
    """What undoes the converter's change of a tensor; None where it has changed nothing."""
    return form_of(config.family).restored.get(own_name(name))


def own_name(name: str) -> str:
    """The name of a tensor without its layer."""
    return name.split(".", 2)[-1] if name.startswith(LAYER.split("{}")[0]) else name


# Blocks as they lie


def why_not_blocks(header: GgufHeader, name: str) -> str | None:
    """Why a matrix cannot be kept in the blocks of its tensor; None if it can."""
    tensor = header.tensors[name]
    if kind_of(header, name) not in BLOCKS:
        return f"is in {kind_of(header, name)}"
    if len(tensor.shape) != 2:
        return "is of experts"
    return "has its inputs in another order" if own_name(name) in REORDERED_INPUTS else None


def kind_of(header: GgufHeader, name: str) -> str:
    """The type of a tensor, by its name in llama.cpp."""
    return str(type_of(header, name).name)


def read_blocks(header: GgufHeader, name: str, config: ModelConfig) -> np.ndarray:
    """The rows of a matrix in blocks, uint8 [F, bytes of a row], in the order of a Hugging Face checkpoint.

    Raises:
      ValueError: a scale that is not finite.
    """
    kind, rows = BLOCKS[kind_of(header, name)], np.concatenate(list(read_rows(header, name)))
    blocks = rows.reshape(-1, kind.bytes)
    for at in kind.scales:
        if not np.isfinite(np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)).all():
            rule = f"{header.file}: {name} must be finite, got a scale that is NaN or infinity. {AGAIN}"
            raise refused(rule, **{name: "out_of_range"})
    restore = restorer(name, config)
    return np.ascontiguousarray(restore(rows, config)) if restore else rows
