"""Reads low-rank adapters (LoRA, arXiv 2106.09685) from folders of peft, and puts them beside the matrices of a model.

The tensors of the folder decide which matrices have an adapter. adapter_config.json gives the scale of each, and what would
change numbers in another way is refused by its name. A base in 8 bits or in blocks stays as it is, because nothing is merged.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.checkpoints.architectures import text_tensors
from jkv.checkpoints.checkpoint_tensors import DTYPES, Origin, Stored, read_header, stacked_shape, tensor_parts
from jkv.checkpoints.families import find_family
from jkv.checkpoints.json_files import (
    AGAIN,
    OBJECT,
    SWITCH,
    TEXT,
    Folder,
    at_least,
    check_fields,
    either,
    integer,
    list_of,
    nullable,
    printable,
    read_json,
    shown,
)
from jkv.errors import refused
from jkv.model.adapter_stacks import adapters_of, check_fits, empty_stacks, has_adapter, is_adapted, is_low_rank
from jkv.model.joined import is_joined, separate_weights
from jkv.model.params import LowRank, Model, ModelConfig, Params
from jkv.model.weight_shapes import leaf_name, weight_shapes
from jkv.model.weights import all_finite

Adapter: TypeAlias = Folder | Params | Mapping[str, LowRank]  # a folder of peft, weights with adapters, or what was read
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # of the names of tensors
MAX_RANK = 1 << 12
NAMES = list_of(TEXT, 4096)
LAYERS = integer(0, 1 << 10)
RULES = {
    "r": integer(1, MAX_RANK),
    "lora_alpha": at_least(-1e6, 1e6),
    "use_rslora": nullable(SWITCH),
    "rank_pattern": nullable(OBJECT),
    "alpha_pattern": nullable(OBJECT),
    "target_modules": nullable(either(TEXT, NAMES)),
    "layers_to_transform": nullable(either(LAYERS, list_of(LAYERS, 1 << 10))),
}
UNREAD = frozenset(  # fields of adapter_config.json that change no number, or nothing but training
    {
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules"),
        *("inference_mode", "layers_pattern", "loftq_config", "lora_dropout", "megatron_config", "megatron_core"),
        *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
    }
)
PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}


def load_adapter(model: Model, adapter: Adapter) -> Model:
    """The model with a low-rank adapter, such as peft has saved: each product is `x @ base + x @ down @ up * scale`.

    The base is never changed, so it may be in floats, in 8 bits or in the blocks of a GGUF file. Joined matrices are separated,
    which takes the memory of both while the argument lives. `generate`, engines, rollouts and `score` run the result, and an
    update of the weights to another adapter of the same ranks and scales compiles nothing.

    Args:
      model: of `jkv.load`, without an adapter, and before `jkv.shard`.
      adapter: a folder with adapter_config.json and adapter_model.safetensors; or weights that have an adapter, whose base is
        not read.

    Raises:
      ValueError: a file is bad, the adapter is of another model or not finite, or it needs what the decoder lacks: DoRA,
        biases, `modules_to_save`, adapters of experts and embeddings, and initial values that change the base.
    """
    params = model.params
    if params.axis is not None:
        raise refused(
            "load_adapter takes a model on one device; got a mesh. Load the adapter, then call jkv.shard.", model="conflict"
        )
    if has_adapter(params):
        raise refused("load_adapter takes a model without an adapter; got one with it. Load the base again.", model="conflict")
    found, where = read_adapter(adapter, params)
    most = max((one.up.shape[0] for one in found.values()), default=1)
    check_fits(jax.eval_shape(lambda: empty_stacks(params.config, 1, most, params.final_norm.dtype)), found, where)
    return dataclasses.replace(model, params=with_adapters(params, found))


def read_adapter(given: Any, params: Params) -> tuple[dict[str, LowRank], str]:
    """The adapter of each matrix, of a folder of peft or of weights that have adapters, and where it was found, for errors.

    An adapter that was read before (`read_folder`, `adapters_of`) is returned unchanged.

    Raises:
      ValueError: something else, or a bad file.
    """
    if isinstance(given, str | os.PathLike):
        return read_folder(Path(given), params), str(given)
    if isinstance(given, Params):
        return adapters_of(given), "The weights"
    if isinstance(given, Mapping) and all(map(is_low_rank, given.values())):
        return dict(given), "The adapter"
    rule = f"An adapter must be a folder of peft, or jkv.Params with adapters; got {shown(given)}. Load it first."
    raise refused(rule, adapter="wrong_type")


def read_folder(folder: Path, params: Params) -> dict[str, LowRank]:
    """The adapter of each matrix in a folder of peft, by its leaf's name, such as `layers.0.query`, with no base yet.

    Raises:
      ValueError: see `load_adapter`.
    """
    fields = read_json(folder / CONFIG)
    check_config(fields, str(folder / CONFIG))
    return read_tensors(folder, fields, params)


def highest_rank(folder: Path, params: Params) -> int:
    """The highest rank of an adapter's matrices, which an engine's places must hold.

    Raises:
      ValueError: see `load_adapter`.
    """
    return max(one.up.shape[0] for one in read_folder(folder, params).values())


def check_config(fields: Mapping[str, Any], where: str) -> None:
    """Refuses what changes numbers and is not applied."""
    check_fields(fields, RULES, where, ("r", "lora_alpha"))
    for name, value in fields.items():
        is_neutral = value in PLAIN[name] if name in PLAIN else not value
        if name not in RULES and name not in UNREAD and not is_neutral:
            wanted = " or ".join(map(repr, PLAIN.get(name, (None,))))
            rule = f"{where}: {name} must be {wanted}, got {shown(value)}. Merge the adapter into its base model with peft."
            raise refused(rule, **{name: "unsupported"})
    for name, each in {"rank_pattern": RULES["r"], "alpha_pattern": RULES["lora_alpha"]}.items():
        pattern = fields.get(name) or {}
        check_fields(pattern, dict.fromkeys(pattern, each), f"{where}: {name}")
        if odd := [key for key in pattern if not re.fullmatch(r"[\w.]+", key)]:
            rule = f"{where}: {name} must have names of modules as keys, got {shown(odd[0])}. Write the names out."
            raise refused(rule, **{name: "unsupported"})


def read_tensors(folder: Path, fields: Mapping[str, Any], params: Params) -> dict[str, LowRank]:
    """What `read_folder` returns, where adapter_config.json has these fields."""
    from safetensors import SafetensorError, safe_open

    file, config, found = folder / TENSORS, params.config, {}
    stored = read_header(file)
    matrices = modules_of(stored, config, file)
    with safe_open(file, "numpy") as opened:
        for module, (prefix, origins) in matrices.items():
            try:
                down, up = (opened.get_tensor(prefix + end).astype(np.float32) for end in (DOWN, UP))
            except (SafetensorError, OSError) as error:
                raise refused(f"{file} must be a safetensors file: {printable(error)}. {AGAIN}", file="invalid") from error
            if not all_finite([down, up]):
                raise refused(f"{file}: {module} must have finite numbers, got NaN or infinity. {AGAIN}", **{module: "invalid"})
            check_target(module, down.shape[0], fields, file)
            scale = scale_of(module, down.shape[0], fields)
            for name, rows in origins:
                dtype = params.final_norm.dtype
                found[name] = LowRank(None, jnp.asarray(down.T, dtype), jnp.asarray(up[rows].T, dtype), scale)
    return found


def modules_of(stored: Mapping[str, Stored], config: ModelConfig, file: Path) -> dict[str, tuple[str, list[tuple[str, slice]]]]:
    """For each module with an adapter the start of its tensors' names, and the leaves made of it with their rows."""
    ends = {name: next((end for end in (DOWN, UP) if name.endswith(end)), None) for name in stored}
    if odd := [name for name, end in ends.items() if end is None or not name.startswith(PREFIX)]:
        rule = f"{file} must have {DOWN[1:]} and {UP[1:]} of matrices alone, got {shown(odd[0])}. Merge it with peft."
        raise refused(rule, **{odd[0]: "unsupported"})
    if not stored:
        raise refused(f"{file} must have the matrices of an adapter, got no tensors. {AGAIN}", file="missing")
    starts = {name.removesuffix(end) for name, end in ends.items() if end}
    family = find_family(config.family)
    weights = {f"{start.removeprefix(PREFIX)}.weight": start for start in sorted(starts)}
    own, wanted, found = text_tensors(weights, family, str(file)), tensor_parts(config, family), {}
    if others := weights.keys() - own.values():
        raise refused(f"{file} must adapt text alone, got {min(others)}. Merge it with peft.", **{min(others): "unsupported"})
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(weight_shapes(config))]
    for tensor, full in own.items():
        start, parts = weights[full], wanted.get(tensor, [])
        leaves = [names[part.leaf] for part in parts]
        if not leaves or not all(is_adapted(name) for name in leaves):
            rule = f"{file}: {start} must be a matrix of attention, of a feed-forward block or the unembedding of this model, "
            raise refused(f"{rule}but not of experts. Use the adapter of this model, or merge it.", **{start: "unsupported"})
        check_shapes(stored, start, stacked_shape(parts), file)
        rows = [Origin(tensor, parts, place).slices([(0, n) for n in part.shape[::-1]])[0] for place, part in enumerate(parts)]
        found[tensor.removesuffix(".weight")] = start, list(zip(leaves, rows, strict=True))
    return found


def check_shapes(stored: Mapping[str, Stored], start: str, shape: tuple[int, ...], file: Path) -> None:
    """Refuses an adapter that does not fit its matrix, whose shape has rows first."""
    down, up = (stored.get(start + end) for end in (DOWN, UP))
    if down is None or up is None:
        raise refused(f"{file} must have {DOWN[1:]} and {UP[1:]} of {start}; one is missing. {AGAIN}", **{start: "missing"})
    rank = down.shape[0] if down.shape else 0
    if (down.shape, up.shape) != ((rank, shape[1]), (shape[0], rank)) or not 0 < rank <= MAX_RANK:
        rule = f"{file}: {start} must have shapes (r, {shape[1]}) and ({shape[0]}, r), got {down.shape} and {up.shape}. "
        raise refused(f"{rule}Use the adapter of this model.", **{start: "does_not_fit"})
    if odd := {down.dtype, up.dtype} - DTYPES.keys():
        rule = f"{file}: {start} must be one of {', '.join(DTYPES)}, got {min(odd)}. Convert the adapter."
        raise refused(rule, **{start: "unsupported"})


def check_target(module: str, rank: int, fields: Mapping[str, Any], file: Path) -> None:
    """Refuses a matrix that adapter_config.json does not adapt, or adapts with another rank."""
    targets, layers = fields.get("target_modules"), fields.get("layers_to_transform")
    layer = re.search(r"\.layers\.(\d+)\.", module)
    is_target = not isinstance(targets, list) or any(f".{module}".endswith(f".{target}") for target in targets)
    if layers is not None and layer:
        is_target &= int(layer[1]) in (layers if isinstance(layers, list) else [layers])
    wanted = value_of(module, fields.get("rank_pattern"), fields["r"])
    if not is_target or rank != wanted:
        got = f"rank {rank}, not {wanted}" if is_target else "a matrix that is no target"
        raise refused(
            f"{file}: {module} must be as in {CONFIG}, got {got}. Use the files of one adapter.", **{module: "conflict"}
        )


def scale_of(module: str, rank: int, fields: Mapping[str, Any]) -> float:
    """The number that multiplies a module's adapter: alpha / rank, or alpha / sqrt(rank) of rsLoRA (arXiv 2312.03732)."""
    alpha = value_of(module, fields.get("alpha_pattern"), fields["lora_alpha"])
    return float(alpha / (rank**0.5 if fields.get("use_rslora") else rank))


def value_of(module: str, pattern: Mapping[str, Any] | None, default: Any) -> Any:
    """The value of the first key that is the module's name or its end.

    >>> value_of("model.layers.1.mlp.up_proj", {"q_proj": 2, "mlp.up_proj": 4}, 8)
    4
    """
    keys: Iterator[str] = (key for key in pattern or {} if f".{module}".endswith(f".{key}"))
    return (pattern or {}).get(next(keys, ""), default)


def with_adapters(params: Params, adapters: Mapping[str, LowRank]) -> Params:
    """The weights with these adapters beside their matrices."""
    params = separate_weights(params) if is_joined(params) else params

    def over(weights: Any, prefix: str) -> dict[str, LowRank]:
        fields = {name.removeprefix(prefix): one for name, one in adapters.items() if name.startswith(prefix)}
        return {field: one.replace(base=getattr(weights, field)) for field, one in fields.items() if "." not in field}

    layers = tuple(one.replace(**over(one, f"layers.{i}.")) for i, one in enumerate(params.layers))
    return params.replace(layers=layers, **over(params, ""))
