"""Weights that another library holds in memory, as `jkv.Params`: Hugging Face state dicts and MaxText's trees.

`params_from` is the one converter; `update` of rollouts, engines, services and replicas calls it. The names of Hugging Face are
mapped as in files (`jkv.checkpoints.checkpoint_tensors`), and MaxText's are one more set of names (`maxtext_family`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.checkpoints.architectures import text_tensors
from jkv.checkpoints.checkpoint_tensors import DTYPES, Part, list_some, stacked_shape, surplus_tensors, tensor_parts
from jkv.checkpoints.families import find_family
from jkv.checkpoints.family import Family, field_of
from jkv.checkpoints.weight_reading import Kept, kept_as, one_at_a_time, read_leaves
from jkv.checks import shown, typed
from jkv.errors import refused
from jkv.model.eight_bits import AS_STORED, format_of
from jkv.model.joined import separate_weights
from jkv.model.params import Codes, Model, ModelConfig, Params
from jkv.model.weight_shapes import leaf_name, weight_shapes
from jkv.model.weights import check_config, is_in_memory, shapes_of

MAXTEXT = {  # field of Params or LayerParams -> path in MaxText's tree, under `decoder.layers_0` and so on for a layer's fields
    "embedding": "token_embedder.embedding",
    "final_norm": "decoder.decoder_norm.scale",
    "unembedding": "decoder.logits_dense.kernel",
    "attention_norm": "pre_self_attention_layer_norm.scale",
    "query": "self_attention.query.kernel",
    "key": "self_attention.key.kernel",
    "value": "self_attention.value.kernel",
    "out": "self_attention.out.kernel",
    "mlp_norm": "post_self_attention_layer_norm.scale",
    "gate": "mlp.wi_0.kernel",
    "up": "mlp.wi_1.kernel",
    "down": "mlp.wo.kernel",
    "query_bias": "self_attention.query.bias",
    "key_bias": "self_attention.key.bias",
    "value_bias": "self_attention.value.bias",
    "query_norm": "self_attention.query_norm.scale",
    "key_norm": "self_attention.key_norm.scale",
}
FIELDS = {path: field for field, path in MAXTEXT.items()}
INTERLEAVES = {"llama": True, "qwen2": False, "qwen3": False}  # families read from MaxText; whether it interleaves heads
SCANNED, WRAPPERS = "decoder.layers.", ("params", "base")
ADVICE = "Check the trainer's last step."
FLOATS = {np.dtype(dtype).name: dtype for dtype in DTYPES.values()}


class Held(NamedTuple):
    """A tensor of another library, or a layer of it where it holds all layers."""

    tensor: Any
    layer: int | None = None
    axis: int = 0  # of the layers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, without the axis of layers."""
        shape = tuple(map(int, self.tensor.shape))
        return shape if self.layer is None else (*shape[: self.axis], *shape[self.axis + 1 :])

    @property
    def dtype(self) -> str:
        """The name of the dtype: "bfloat16" and so on, whatever the library."""
        return str(self.tensor.dtype).removeprefix("torch.")

    def on_host(self) -> np.ndarray:
        """The numbers, without a copy where NumPy can read them; bfloat16 of torch, which NumPy cannot, as float32."""
        tensor = self.tensor
        if isinstance(tensor, jax.Array) and self.layer is not None and not is_in_memory(tensor):
            return np.asarray(jax.lax.dynamic_index_in_dim(tensor, self.layer, self.axis, keepdims=False))
        if hasattr(tensor, "detach"):  # torch, which need not be installed
            tensor = tensor.detach().cpu()
            tensor = (tensor.float() if self.dtype == "bfloat16" else tensor).numpy()
        whole = np.asarray(tensor)
        return whole if self.layer is None else np.moveaxis(whole, self.axis, 0)[self.layer]


def params_from(weights: Any, like: Model | Params | ModelConfig, *, scan_axis: int = 1) -> Params:
    """The weights of a trainer as `jkv.Params`, in one of these forms:

    - `Params` or a `Model`, returned as they are. Leaves may be NumPy arrays, which `update` puts on the devices.
    - A Hugging Face state dict: a flat mapping from the names of a checkpoint's tensors (`model.norm.weight` and so on) to
      tensors of torch, on any device, or arrays of NumPy or JAX. All families that `jkv.load` reads.
    - MaxText's parameters, a nested mapping as in its checkpoints, linen or NNX, with or without the outer `params` or `base`:
      `token_embedder.embedding` and `decoder`, with layers that are scanned (`decoder.layers`, stacked along `scan_axis`) or
      not (`decoder.layers_0` and so on). Llama, Qwen2 and Qwen3 without experts, as MaxText's `checkpoint_conversion` of 2026
      writes them: query kernels are `[D, N, H]`; Llama's query kernels are divided by the root of H, and the two halves
      of each of its query and key heads are interleaved.

    Tensors may be float32, bfloat16 or float16, and are converted one by one through the host's memory. A transposed square
    matrix has the right shape, so nothing can refuse it.

    Args:
      weights: what the trainer holds.
      like: weights in use, whose configuration, dtype, 8-bit format and sharding the new ones take; or a configuration alone,
        for the defaults of `jkv.load`.
      scan_axis: of scanned layers, MaxText's `param_scan_axis`.

    Raises:
      ValueError: a tensor is missing, unknown, of another shape or dtype, or not finite; the message and `field` name it.
    """
    weights, like = (x.params if isinstance(x, Model) else x for x in (weights, like))
    config: ModelConfig = like.config if isinstance(like, Params) else typed("like", like, ModelConfig)
    if isinstance(weights, Params):
        check_config(config, weights.config)
        return weights
    if not isinstance(weights, Mapping):
        raise refused(
            "New weights must be jkv.Params, or a mapping from names to tensors: a Hugging Face state dict or MaxText's "
            f"parameters; got {type(weights).__name__}. Pass model.state_dict(), or a pure dict of the weights.",
            weights="wrong_type",
        )
    kept, places = kept_as(plain(like)) if isinstance(like, Params) else (Kept(None, None), None)
    tree = unwrapped(weights)
    is_maxtext = isinstance(tree.get("decoder"), Mapping)
    source = maxtext_source(tree, config, typed("scan_axis", scan_axis, int)) if is_maxtext else flat_source(tree, config)
    check_source(source, config)
    kept = kept.chosen(FLOATS[source.held[source.family.tensors["embedding"]].dtype])
    return read_leaves(config, source.wanted, one_at_a_time(source.read), kept, str, places, ADVICE)


def plain(params: Params) -> Params:
    """These weights, which a state dict can replace.

    Raises:
      ValueError: they have adapters, or the layout of another library, or are in the blocks of a GGUF file.
    """
    if format_of(params) == AS_STORED:
        raise refused(
            "A state dict replaces weights in floats or in 8 bits; the weights in use are in the blocks of their GGUF file. "
            'Load the model without weight_dtype="blocks".',
            weights="conflict",
        )
    leaves = jax.tree.leaves(separate_weights(shapes_of(params)), is_leaf=lambda x: isinstance(x, Codes))
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in jax.tree.leaves(weight_shapes(params.config))]:
        raise refused(
            "A state dict replaces plain weights; the weights in use have adapters, or the layout of another library. Pass "
            "jkv.Params of their form.",
            weights="conflict",
        )
    return params


def unwrapped(weights: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """MaxText's tree without the mappings around it."""
    name = next((name for name in WRAPPERS if isinstance(weights.get(name), Mapping)), None)
    return weights if name is None else unwrapped(weights[name])


class Source(NamedTuple):
    """What a state dict holds, by the names of `family`."""

    held: dict[str, Held]
    family: Family
    wanted: dict[str, list[Part]]  # what the configuration needs
    shapes: dict[str, tuple[int, ...]]  # of each of these in the state dict
    read: Callable[[str], np.ndarray]


def flat_source(state: Mapping[Any, Any], config: ModelConfig) -> Source:
    """The tensors of a Hugging Face state dict."""
    nested = [name for name, value in state.items() if isinstance(value, Mapping)]
    if nested or not all(isinstance(name, str) for name in state):
        got = f"{shown(nested[0])} with others inside" if nested else "names that are no strings"
        raise refused(
            "A mapping of weights must be flat, as a Hugging Face state dict, or MaxText's, with token_embedder and decoder; "
            f"got {got}. Pass one of these.",
            weights="unknown_name",
        )
    for name, tensor in state.items():
        check_tensor(name, tensor)
    family = find_family(config.family)
    held = {own: Held(state[name]) for own, name in text_tensors(state, family, "The state dict").items()}
    family = family.as_stored(held)
    wanted = tensor_parts(config, family)
    shapes = {name: stacked_shape(parts) for name, parts in wanted.items()}
    return Source(held, family, wanted, shapes, lambda name: held[name].on_host())


def maxtext_family(config: ModelConfig) -> Family:
    """The family of a model, with the names of tensors that MaxText gives them.

    Raises:
      ValueError: its weights have no place in MaxText, or are not read from there.
    """
    family = find_family(config.family)
    paths = jax.tree_util.tree_leaves_with_path(weight_shapes(config))
    others = sorted({field_of(leaf_name(path)) for path, _ in paths} - MAXTEXT.keys())
    interleaves_bias = config.qkv_bias and INTERLEAVES.get(family.name, False)
    if family.name not in INTERLEAVES or others or interleaves_bias:
        found = list_some(others) or ("biases" if interleaves_bias else "another layout")
        raise refused(
            f"MaxText's weights are read of {', '.join(INTERLEAVES)} without experts; got {family.name} with {found}. Pass a "
            "Hugging Face state dict, which MaxText's to_huggingface makes.",
            weights="unsupported",
        )
    return dataclasses.replace(
        family, tensors=MAXTEXT, other_tensors={}, layer_prefix="decoder.layers_{}.", untransposed=frozenset(MAXTEXT)
    )


def maxtext_source(tree: Mapping[Any, Any], config: ModelConfig, axis: int) -> Source:
    """The weights of MaxText's tree, layer by layer."""
    family, held = maxtext_family(config), dict[str, Held]()
    for path, tensor in leaves_of(tree):
        check_tensor(path, tensor)
        if not path.startswith(SCANNED):
            held[path] = Held(tensor)
            continue
        shape, count = tuple(tensor.shape), config.num_layers
        if not -len(shape) <= axis < len(shape) or shape[axis] != count:
            raise refused(
                f"{path} must have the model's {count} layers along axis {axis}; got shape {shape}. Pass scan_axis=, MaxText's "
                "param_scan_axis.",
                **{path: "does_not_fit"},
            )
        for layer in range(count):
            held[path.replace(SCANNED, f"decoder.layers_{layer}.", 1)] = Held(tensor, layer, axis % len(shape))
    wanted = tensor_parts(config, family)
    shapes = {name: unfolded(parts[0].shape, field_in(name), config) for name, parts in wanted.items()}

    def read(name: str) -> np.ndarray:
        values, field = held[name].on_host(), field_in(name)
        if INTERLEAVES[family.name] and field in ("query", "key"):
            values = np.concatenate([values[..., 0::2], values[..., 1::2]], axis=-1)
            if field == "query":  # the root of 128 has no exact inverse, so bfloat16 would round twice
                values = values.astype(np.float32) * np.float32(config.head_size**0.5)
        return values.reshape(wanted[name][0].shape)

    return Source(held, family, wanted, shapes, read)


def leaves_of(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested mapping, with their paths."""
    for name, value in tree.items():
        yield from leaves_of(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]


def field_in(path: str) -> str:
    """The field of `Params` or `LayerParams` of a path in MaxText's tree.

    >>> field_in("decoder.layers_0.self_attention.query.kernel"), field_in("token_embedder.embedding")
    ('query', 'embedding')
    """
    return FIELDS[path] if path in FIELDS else FIELDS[path.split(".", 2)[2]]


def unfolded(shape: tuple[int, ...], field: str, config: ModelConfig) -> tuple[int, ...]:
    """The shape of a leaf in MaxText, which keeps heads apart."""
    heads = config.num_query_heads if field in ("query", "out", "query_bias") else config.num_kv_heads
    if field == "out":
        return (heads, config.head_size, *shape[1:])
    is_by_head = field in ("query", "key", "value", "query_bias", "key_bias", "value_bias")
    return (*shape[:-1], heads, config.head_size) if is_by_head else shape


def check_tensor(name: str, tensor: Any) -> None:
    """Refuses what is no array, and arrays whose numbers are gone or elsewhere."""
    if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
        rule = f"{name} must be a tensor of torch or an array; got {type(tensor).__name__}. Pass the weights alone, unboxed."
        raise refused(rule, **{name: "wrong_type"})
    if getattr(tensor, "is_meta", False):
        raise refused(f"{name} must hold numbers; it is on torch's device meta. Load the weights first.", **{name: "invalid"})
    if isinstance(tensor, jax.Array) and (tensor.is_deleted() or not tensor.is_fully_addressable):
        state = "deleted, or donated" if tensor.is_deleted() else "on devices of other processes"
        raise refused(f"{name} must be in this process; it is {state}. Gather the weights first.", **{name: "invalid"})


def check_source(source: Source, config: ModelConfig) -> None:
    """Refuses missing, unknown and misshapen tensors, and dtypes that are none of weights."""
    held, family = source.held, source.family
    if missing := [name for name in source.wanted if name not in held]:
        got = f"the {len(held)} that are there begin with {list_some(sorted(held))}" if held else "it is empty"
        rule = f"The new weights must have {list_some(missing)}; missing, and {got}."
        rule += " Pass all weights of the model, by the names of its checkpoint."
        raise refused(rule, **{missing[0]: "missing"})
    for name, shape in source.shapes.items():
        if held[name].shape != shape:
            rule = f"{name} must have shape {shape}, as the configuration defines it; got {held[name].shape}."
            is_turned = held[name].shape == shape[::-1]
            rule += " It is transposed." if is_turned else " Pass weights of the same model."
            raise refused(rule, **{name: "does_not_fit"})
        if held[name].dtype not in FLOATS:
            rule = f"{name} must be one of {', '.join(FLOATS)}; got {held[name].dtype}. Cast it."
            raise refused(rule, **{name: "wrong_type"})
    if surplus := surplus_tensors(source.wanted, held, family, config):
        raise refused(
            f"The new weights must not have {list_some(surplus)}, which the configuration does not define. Pass the weights of "
            "this model alone, with adapters merged.",
            **{surplus[0]: "unknown_name"},
        )
    embedding, unembedding = (family.tensors[field] for field in ("embedding", "unembedding"))
    if config.tie_embeddings and unembedding in held:
        whole, other = held[embedding].on_host(), held[unembedding].on_host()
        if not np.array_equal(whole, other.T if "unembedding" in family.untransposed else other):
            raise refused(
                f"{unembedding} must equal {embedding}, because the configuration ties them; it differs. Leave it out if the "
                "trainer ties them too.",
                **{unembedding: "conflict"},
            )
