"""Reads a gate from a safetensors file, with the names of `Gate.save` or those that its authors publish.

A pickle may run code when it is read, so files that are or may be one are refused by name and never opened as such.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jkv.checkpoints.weight_files import read_header
from jkv.checks import shown
from jkv.eviction.gate_kinds import WINDOWS, DmsGate, FastKVzipGate, KVzapLinearGate, KVzapMlpGate
from jkv.text_files import check_file

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
LAYER = re.compile(r"(?:(?:model\.)?(?:layers|module_list)\.)?(\d{1,4})\.([\w.]+)")
FLOATS = ("F32", "F16", "BF16")

Layer = Mapping[str, np.ndarray]  # the tensors of one layer, by their names without the layer


def dms(layer: Layer) -> DmsGate:
    """One layer of DMS."""
    weight = layer["self_attn.dms_proj_alpha.weight"]
    bias = layer.get("self_attn.dms_proj_alpha.bias", np.zeros(len(weight), np.float32))
    return packed(DmsGate, layer["self_attn.dms_proj_alpha_norm.weight"], weight, bias)


def kvzap_linear(layer: Layer) -> KVzapLinearGate:
    """One layer of KVzap's linear map."""
    return packed(KVzapLinearGate, layer["weight"], layer["bias"])


def kvzap_mlp(layer: Layer) -> KVzapMlpGate:
    """One layer of KVzap's network."""
    return packed(KVzapMlpGate, layer["0.weight"], layer["0.bias"], layer["2.weight"], layer["2.bias"])


def fast_kvzip(layer: Layer) -> FastKVzipGate:
    """One layer of Fast KVzip, whose projections have the heads of all groups one after the other."""
    sinks, size = layer["k_base"], len(layer["q_norm.weight"])
    heads, width = len(sinks), layer["k_proj.weight"].shape[-1]
    return packed(
        FastKVzipGate,
        layer["q_proj.weight"].reshape(heads, -1, size, width),
        layer["q_proj.bias"].reshape(heads, -1, size),
        layer["q_norm.weight"],
        layer["k_proj.weight"].reshape(heads, size, width),
        layer["k_norm.weight"],
        sinks.reshape(heads, -1, size),
        layer["b"].reshape(heads, -1),
    )


def packed(kind: Callable[..., Any], *arrays: Any) -> Any:
    """Arrays of the host as a kind, whose annotations are those of device arrays."""
    return kind(*arrays)


# Names of a layer's tensors -> how they become a gate.
PUBLISHED: dict[frozenset[str], Callable[[Layer], Any]] = {
    frozenset({"self_attn.dms_proj_alpha.weight", "self_attn.dms_proj_alpha_norm.weight"}): dms,
    frozenset(
        {"self_attn.dms_proj_alpha.weight", "self_attn.dms_proj_alpha.bias", "self_attn.dms_proj_alpha_norm.weight"}
    ): dms,
    frozenset({"weight", "bias"}): kvzap_linear,
    frozenset({"0.weight", "0.bias", "2.weight", "2.bias"}): kvzap_mlp,
    frozenset({"q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight", "k_base", "b"}): fast_kvzip,
}


def read_gate(path: Path, what: str) -> tuple[Any, dict[str, str]]:
    """The arrays of a gate in float32, and what its file records of its model.

    Raises:
      ValueError: a pickle, or a file that holds no gate, or not all of one.
    """
    named, about = read_tensors(path, what)
    for kind in WINDOWS:
        fields: Any = kind._fields  # type: ignore[attr-defined]
        if named.keys() == set(fields):
            return kind(**named), about
    layers = by_layer(named, path, what)
    suffixes = frozenset().union(*layers.values())
    if suffixes not in PUBLISHED:
        raise ValueError(
            f"{what} must be those of DMS, KVzap or Fast KVzip, by the names in `jkv.Gate.load`; {shown(str(path))} has the "
            f"tensors {shown(sorted(named))}. Extract the gate's tensors alone, under these names."
        )
    for index, layer in layers.items():
        if missing := suffixes - layer.keys():
            raise ValueError(f"{what} must be of all layers; {shown(str(path))} lacks {min(missing)} of layer {index}.")
    try:
        each = [PUBLISHED[suffixes](layers[index]) for index in range(len(layers))]
        return type(each[0])(*(np.stack(parts) for parts in zip(*each, strict=True))), about
    except ValueError as error:
        raise ValueError(f"{what} must have the shapes in `jkv.Gate.load`; {shown(str(path))}: {error}.") from error


def by_layer(named: Mapping[str, np.ndarray], path: Path, what: str) -> dict[int, dict[str, np.ndarray]]:
    """Published tensors by layer and by their names in it."""
    layers: dict[int, dict[str, np.ndarray]] = {}
    for name, tensor in named.items():
        found = LAYER.fullmatch(name)
        if found is None:
            raise ValueError(
                f"{what} must be named as in `jkv.Gate.load`; {shown(str(path))} has the tensor {shown(name)}. Leave out what "
                "is not of the gate."
            )
        layers.setdefault(int(found[1]), {})[found[2]] = tensor
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise ValueError(f"{what} must be of all layers from 0 on; {shown(str(path))} has {shown(sorted(layers))}.")
    return layers


def read_tensors(path: Path, what: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All tensors of a safetensors file in float32, and its metadata."""
    from safetensors import SafetensorError, safe_open

    if path.suffix.lower() in PICKLES:
        raise ValueError(
            f"{what} must be a safetensors file; {shown(str(path))} may be a pickle, which can run any code when it is read, "
            "so it is not opened. Convert it with safetensors.torch.save_file where you trust it."
        )
    try:
        check_file(path)
        header = read_header(path)
        if odd := [name for name, stored in header.items() if stored.dtype not in FLOATS]:
            raise ValueError(f"{odd[0]} must be of {', '.join(FLOATS)}; got {header[odd[0]].dtype}")
        with safe_open(str(path), framework="numpy") as file:
            return {name: file.get_tensor(name).astype(np.float32) for name in header}, dict(file.metadata() or {})
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        plain = error.strerror if isinstance(error, OSError) else None  # without the number
        why = plain or str(error).replace(str(path), "it").rstrip(".")[:300]
        raise ValueError(
            f"{what} must be a safetensors file, as `jkv.Gate.load` describes; {shown(str(path))}: {why}."
        ) from error
