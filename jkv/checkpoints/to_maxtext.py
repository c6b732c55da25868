"""Converts weights to MaxText's tree, the inverse of `jkv.params_from`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.checkpoints.family import field_of
from jkv.checkpoints.state_dicts import INTERLEAVES, MAXTEXT, SCANNED, maxtext_family, unfolded
from jkv.checks import shown, typed
from jkv.errors import refused
from jkv.model.joined import separate_weights
from jkv.model.params import Model, ModelConfig, Params
from jkv.model.weight_shapes import named_leaves

SCAN_AXES = (None, 0, 1)


def to_maxtext(weights: Model | Params, *, scan_axis: int | None = 1) -> dict[str, Any]:
    """Weights as the nested mapping of arrays in MaxText's checkpoints, for a trainer to start from.

    The layout and the families are the same as in `jkv.params_from`, which converts the tree back to the same weights. Llama's
    query kernels are divided by the root of the head size in float32, and rounded to the dtype of the weights. They come back
    bit for bit if the root is a power of two (head sizes of 16, 64, 256), and within a unit in the last place if not. The
    vocabulary is not padded. maxtext 0.2.5's own conversion to Hugging Face's names gives the original checkpoint's tensors.

    Args:
      weights: in any form: joined matrices are separated, adapters are merged, and what is in 8 bits or blocks becomes float32.
      scan_axis: the axis along which layers are stacked, MaxText's `param_scan_axis`; None for `decoder.layers_0` and so on.

    Returns:
      `{"token_embedder": {"embedding": ...}, "decoder": {...}}`. Where MaxText expects a collection, pass `{"params": tree}`.

    Raises:
      ValueError: the model has experts, or a family whose MaxText trees `jkv.params_from` does not read.
    """
    params = weights.params if isinstance(weights, Model) else typed("weights", weights, Params)
    if scan_axis not in SCAN_AXES:
        raise refused(f"scan_axis must be 0, 1 or None; got {shown(scan_axis)}.", scan_axis="unknown_name")
    config = params.config
    maxtext_family(config)
    tree: dict[str, Any] = {}
    layers: dict[str, list[Any]] = {}
    for name, leaf in named_leaves(separate_weights(params)).items():
        field = field_of(name)
        values = as_maxtext(leaf, field, config)
        if not name.startswith("layers."):
            put(tree, MAXTEXT[field], values)
        elif scan_axis is None:
            put(tree, f"decoder.layers_{name.split('.')[1]}.{MAXTEXT[field]}", values)
        else:
            layers.setdefault(field, []).append(values)
    for field, stack in layers.items():
        put(tree, SCANNED + MAXTEXT[field], jnp.stack(stack, scan_axis or 0))
    return tree


def as_maxtext(leaf: Any, field: str, config: ModelConfig) -> jax.Array:
    """A leaf with an axis for its heads; for Llama, the halves of queries and keys are interleaved, and queries are divided."""
    values = jnp.asarray(leaf)
    values = values.reshape(unfolded(values.shape, field, config))
    if INTERLEAVES[config.family] and field in ("query", "key"):
        values = jnp.stack(jnp.split(values, 2, axis=-1), axis=-1).reshape(values.shape)
        if field == "query":
            values = (values.astype(jnp.float32) / np.float32(config.head_size**0.5)).astype(values.dtype)
    return values


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Adds a leaf at a path with dots."""
    *folders, name = path.split(".")
    for folder in folders:
        tree = tree.setdefault(folder, {})
    tree[name] = value
