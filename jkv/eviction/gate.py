"""Gates: small networks that judge each token when it is written, from the hidden state at the input of each layer.

The engine computes the gate in every step and stores one number beside each slot (`CacheView.gate`). The numbers of a file are
data; only its kind (`DmsGate` and the others) is compiled.
"""

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jkv.checkpoints.checkpoint_tensors import read_header
from jkv.checks import shown
from jkv.errors import refused
from jkv.eviction.calibration import Calibration
from jkv.model.params import Model, ModelConfig
from jkv.text_files import check_file
from pallas_kernels.add_norm.reference import rms_norm

DMS_SCALE, DMS_OFFSET = 100.0, 5.0
DMS_WINDOW, KVZAP_WINDOW, FAST_KVZIP_WINDOW = 512, 128, 8  # tokens that the authors keep whatever their gate says
FAST_KVZIP_EPSILON = 1e-6


@runtime_checkable
class GateArrays(Protocol):
    """The weights of a gate, with the layer as first axis, and its computation with the weights of one layer."""

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]: ...


class DmsGate(NamedTuple):
    """DMS (arXiv 2506.05345): a linear map of the residual stream after a norm of its own; tokens below 0 are evicted."""

    norm: Float[Array, "L D"]
    weight: Float[Array, "L K D"]
    bias: Float[Array, "L K"]

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]:
        x = rms_norm(hidden, self.norm[layer], epsilon)
        return DMS_OFFSET - DMS_SCALE * (multiply("btd,kd->btk", x, self.weight[layer]) + self.bias[layer])


class KVzapLinearGate(NamedTuple):
    """KVzap's linear map (arXiv 2601.07891): the logarithm of the importance, of the hidden state after the norm."""

    weight: Float[Array, "L K D"]
    bias: Float[Array, "L K"]

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]:
        return multiply("btd,kd->btk", normed, self.weight[layer]) + self.bias[layer]


class KVzapMlpGate(NamedTuple):
    """KVzap's network with one hidden layer, which all KV heads share (arXiv 2601.07891); what it reads is as in the linear."""

    into: Float[Array, "L I D"]
    into_bias: Float[Array, "L I"]
    out: Float[Array, "L K I"]
    out_bias: Float[Array, "L K"]

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]:
        x = jax.nn.gelu(multiply("btd,id->bti", normed, self.into[layer]) + self.into_bias[layer], approximate=False)
        return multiply("bti,ki->btk", x, self.out[layer]) + self.out_bias[layer]


class FastKVzipGate(NamedTuple):
    """Fast KVzip (arXiv 2601.17668): the attention of a small query to its token's small key, against I learned sinks.

    It reads the hidden state after the norm. E is the size of the small heads.
    """

    query: Float[Array, "L K G E D"]
    query_bias: Float[Array, "L K G E"]
    query_norm: Float[Array, "L E"]
    key: Float[Array, "L K E D"]
    key_norm: Float[Array, "L E"]
    sinks: Float[Array, "L K I E"]
    bias: Float[Array, "L K G"]

    def __call__(
        self, layer: int, hidden: Float[Array, "B T D"], normed: Float[Array, "B T D"], epsilon: float
    ) -> Float[Array, "B T K"]:
        size = self.key_norm.shape[-1] ** -0.5
        query = multiply("btd,kged->btkge", normed, self.query[layer]) + self.query_bias[layer]
        query = rms_norm(query, self.query_norm[layer], FAST_KVZIP_EPSILON)
        key = rms_norm(multiply("btd,ked->btke", normed, self.key[layer]), self.key_norm[layer], FAST_KVZIP_EPSILON)
        own = size * multiply("btkge,btke->btkg", query, key) + self.bias[layer]
        sinks = size * multiply("btkge,kie->btkgi", query, self.sinks[layer])
        return (1 / (1 + jnp.exp(sinks - own[..., None]).sum(axis=-1))).mean(axis=-1)


def multiply(equation: str, one: Float[Array, "..."], other: Float[Array, "..."]) -> Float[Array, "..."]:
    """A float32 `einsum` of two arrays."""
    return jnp.einsum(equation, one, other, precision="highest")


# Kind -> tokens that stay whatever their gate says.
WINDOWS: dict[type, int] = {
    DmsGate: DMS_WINDOW,
    KVzapLinearGate: KVZAP_WINDOW,
    KVzapMlpGate: KVZAP_WINDOW,
    FastKVzipGate: FAST_KVZIP_WINDOW,
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Gate(Calibration):
    """The weights of a gate, of one of the kinds of `jkv.eviction.gate`.

    A gate with a record of its model (`about`, which `save` keeps) is refused for other weights. A published file has no such
    record, so only its shapes are compared; it works with the weights that it was trained with.
    """

    kind = tuple(WINDOWS)
    what = "The weights of a gate"

    def __post_init__(self) -> None:
        if not isinstance(self.arrays, self.kind):
            names = ", ".join(kind.__name__ for kind in self.kind)
            raise refused(f"{self.what} must be one of {names}; got {shown(self.arrays)}.", gate="wrong_type")
        super().__post_init__()

    @property
    def remedy(self) -> str:
        return "Use the gate that was trained for this model."

    @property
    def window(self) -> int:
        """Tokens that the gate's authors keep whatever it says."""
        return WINDOWS[type(self.arrays)]

    def __repr__(self) -> str:
        return f"Gate({type(self.arrays).__name__}, {len(self.arrays[0])} layers, {self.digest})"

    def check_shapes(self) -> None:
        sizes: dict[str, int] = {}
        for name, letters in axes_of(self.arrays).items():
            shape = getattr(self.arrays, name).shape
            if len(shape) != len(letters) or any(sizes.setdefault(x, n) != n for x, n in zip(letters, shape, strict=True)):
                rule = f"{name} must be [{', '.join(letters)}], with {shown(sizes)} so far; got {shape}."
                raise refused(rule, gate="wrong_type")

    def shapes_for(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, int] = {}
        for name, letters in axes_of(self.arrays).items():
            sizes |= zip(letters, getattr(self.arrays, name).shape, strict=True)
        sizes |= {"L": config.num_layers, "K": config.num_kv_heads, "G": config.group_size, "D": config.width}
        return {name: tuple(sizes[x] for x in letters) for name, letters in axes_of(self.arrays).items()}

    def traits(self, model: Model, is_trained: bool) -> dict[str, Any]:
        wanted = super().traits(model, is_trained)
        del wanted["RoPE"]  # no gate reads positions
        if "weights" not in self.about:
            wanted.pop("weights with the digest", None)
        return wanted

    @classmethod
    def load(cls, path: Path | str) -> "Gate":
        """Reads a safetensors file: of `save`, or with the tensors that the gate's authors publish.

        Tensor names and shapes decide which kind it is: those that `save` writes (the fields of a kind), or, for layer i,

          DMS           model.layers.i.self_attn.dms_proj_alpha.weight [K, D], .bias [K] (may be absent),
                        model.layers.i.self_attn.dms_proj_alpha_norm.weight [D]
          KVzap linear  layers.i.weight [K, D], layers.i.bias [K]
          KVzap MLP     layers.i.0.weight [I, D], layers.i.0.bias [I], layers.i.2.weight [K, I], layers.i.2.bias [K]
          Fast KVzip    layers.i.q_proj.weight [K*G*E, D], .q_proj.bias [K*G*E], .k_proj.weight [K*E, D], .q_norm.weight [E],
                        .k_norm.weight [E], .k_base [K, 1, I, E], .b [K, 1, G]

        Raises:
          ValueError: there is no such file, or it holds something else. Pickles (`.pt`) are never opened.
        """
        arrays, about = read_gate(Path(path), cls.what)
        try:
            return cls(arrays, about)
        except ValueError as error:
            raise refused(f"{cls.what} must fit each other; {shown(str(path))}: {error}", path="invalid") from error


def axes_of(arrays: Any) -> dict[str, list[str]]:
    """The axes of each array of a kind, by name, from their annotations."""
    hints: dict[str, Any] = typing.get_type_hints(type(arrays), include_extras=True)
    return {name: hints[name].dim_str.split() for name in arrays._fields}


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
    """Arrays of the host as a kind, whose annotations are for device arrays."""
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
        raise refused(
            f"{what} must be a gate of DMS, KVzap or Fast KVzip, by the names in `jkv.Gate.load`; {shown(str(path))} has the "
            f"tensors {shown(sorted(named))}. Extract the gate's tensors alone, under these names.",
            path="invalid",
        )
    for index, layer in layers.items():
        if missing := suffixes - layer.keys():
            rule = f"{what} must be of all layers; {shown(str(path))} lacks {min(missing)} of layer {index}."
            raise refused(rule, path="missing")
    try:
        each = [PUBLISHED[suffixes](layers[index]) for index in range(len(layers))]
        return type(each[0])(*(np.stack(parts) for parts in zip(*each, strict=True))), about
    except ValueError as error:
        rule = f"{what} must have the shapes in `jkv.Gate.load`; {shown(str(path))}: {error}."
        raise refused(rule, path="invalid") from error


def by_layer(named: Mapping[str, np.ndarray], path: Path, what: str) -> dict[int, dict[str, np.ndarray]]:
    """Published tensors by layer and by their names in it."""
    layers: dict[int, dict[str, np.ndarray]] = {}
    for name, tensor in named.items():
        found = LAYER.fullmatch(name)
        if found is None:
            raise refused(
                f"{what} must be named as in `jkv.Gate.load`; {shown(str(path))} has the tensor {shown(name)}. Leave out what "
                "is not of the gate.",
                path="invalid",
            )
        layers.setdefault(int(found[1]), {})[found[2]] = tensor
    if sorted(layers) != list(range(len(layers))) or not layers:
        rule = f"{what} must be of all layers from 0 on; {shown(str(path))} has {shown(sorted(layers))}."
        raise refused(rule, path="missing")
    return layers


def read_tensors(path: Path, what: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All tensors of a safetensors file in float32, and its metadata."""
    from safetensors import SafetensorError, safe_open

    if path.suffix.lower() in PICKLES:
        raise refused(
            f"{what} must be a safetensors file; {shown(str(path))} may be a pickle, which can run any code when it is read, "
            "so it is not opened. Convert it with safetensors.torch.save_file where you trust it.",
            path="invalid",
        )
    try:
        check_file(path)
        header = read_header(path)
        if odd := [name for name, stored in header.items() if stored.dtype not in FLOATS]:
            raise refused(f"{odd[0]} must be of {', '.join(FLOATS)}; got {header[odd[0]].dtype}", path="wrong_type")
        with safe_open(str(path), framework="numpy") as file:
            return {name: file.get_tensor(name).astype(np.float32) for name in header}, dict(file.metadata() or {})
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        plain = error.strerror if isinstance(error, OSError) else None  # without the number
        why = plain or str(error).replace(str(path), "it").rstrip(".")[:300]
        rule = f"{what} must be a safetensors file, as `jkv.Gate.load` describes; {shown(str(path))}: {why}."
        raise refused(rule, path="invalid") from error
