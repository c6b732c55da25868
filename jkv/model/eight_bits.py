"""Weights in 8 bits: each matrix as codes of one byte, with a scale for each output channel, or each of an expert's F values.

For models that do not fit, and for decode steps that wait for their weights: both halve against bfloat16. Embeddings, norms and
biases stay as they are, and so do keys, values and all sums. A product multiplies by the codes and scales its result, so no
matrix is dequantised in memory where the platform's compiler converts operands on their way into a product (GPU, TPU).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.checks import shown
from jkv.errors import refused
from jkv.model.joined import GROUPS
from jkv.model.params import Codes, LowRank, Params
from jkv.model.weight_shapes import leaf_name
from pallas_kernels.blocks import Blocks


class CodeFormat(NamedTuple):
    """What codes are."""

    dtype: Any
    largest: float  # of a code


FORMATS = {"int8": CodeFormat(jnp.int8, 127.0), "fp8": CodeFormat(jnp.float8_e4m3fn, 448.0)}
AS_STORED = "blocks"  # in place of a format: matrices stay in the blocks of their GGUF file
MATRICES = ("query", "key", "value", "out", "gate", "up", "down", *GROUPS)


def code_axis(name: str) -> int | None:
    """The axis over which a scale is found, of a leaf of `Params` that may be kept in 8 bits; None for any other.

    >>> [code_axis(name) for name in ("layers.0.query", "layers.0.experts.down", "layers.0.query_bias", "embedding")]
    [0, -1, None, None]
    """
    *_, field = path = name.split(".")
    if field not in (*MATRICES, "unembedding"):
        return None
    return -1 if "experts" in path else 0


def check_format(name: Any) -> str | None:
    """The name of a format of `FORMATS`, or `AS_STORED`, checked; None keeps floats.

    Raises:
      ValueError: another name.
    """
    if name is not None and not (isinstance(name, str) and name in (*FORMATS, AS_STORED)):
        names = ", ".join((*FORMATS, AS_STORED))
        rule = f"weight_dtype must be one of {names}, or None for weights in `dtype`; got {shown(name)}."
        raise refused(rule, weight_dtype="unknown_name")
    return name


def format_of(params: Params) -> str | None:
    """The name of the format of a model's codes, or `AS_STORED`; None if it has floats alone."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Codes | Blocks))
    if any(isinstance(leaf, Blocks) for leaf in leaves):
        return AS_STORED
    found = {leaf.code.dtype for leaf in leaves if isinstance(leaf, Codes)}
    return next((name for name, one in FORMATS.items() if jnp.dtype(one.dtype) in found), None)


def quantise_weights(params: Params, weight_dtype: str) -> Params:
    """The same model with its matrices in 8 bits; matrices that are `Codes` already, or adapted, are refused.

    Args:
      params: of `jkv.load`, or of a trainer: `rollout.update(jkv.quantise_weights(params, "int8"))` gives new weights to a
        rollout that began with quantised ones.
      weight_dtype: "int8" or "fp8" (float8_e4m3fn), rounded to nearest with the largest magnitude of an output channel as the
        largest code.

    Raises:
      ValueError: another format, or weights that are no floats.
    """
    if (found := check_format(weight_dtype)) not in FORMATS:
        rule = f"weight_dtype must be one of {', '.join(FORMATS)}; got {shown(weight_dtype)}."
        if found is None:
            raise refused(f"{rule} Pass the weights as they are.", weight_dtype="missing")
        raise refused(f"{rule} Only a GGUF file has blocks: see jkv.load.", weight_dtype="unsupported")

    def of_leaf(path: Any, weight: Any) -> Any:
        axis = code_axis(leaf_name(path))
        return weight if axis is None else coded(weight, weight_dtype, axis)

    return jax.tree_util.tree_map_with_path(of_leaf, params, is_leaf=lambda x: isinstance(x, Codes | LowRank | Blocks))


def coded(weight: Any, weight_dtype: str, axis: int = 0) -> Codes:
    """A matrix in 8 bits, from floats, or from shapes alone (`jax.ShapeDtypeStruct`); `axis`: see `code_axis`.

    Raises:
      ValueError: no matrix of floats.
    """
    is_array = not isinstance(weight, Codes | LowRank | Blocks)
    is_matrix = is_array and jnp.issubdtype(weight.dtype, jnp.floating)
    if not is_matrix or (len(weight.shape) != 2 and axis == 0):
        got = f"{weight.dtype}{list(weight.shape)}" if is_array else type(weight).__name__
        rule = f"8-bit weights are made of matrices of floats, [in, out]; got {got}. Merge adapters first."
        raise refused(rule, params="wrong_type")
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.eval_shape(functools.partial(rounded, weight_dtype=weight_dtype, axis=axis), weight)
    return rounded(weight, weight_dtype=weight_dtype, axis=axis)


@functools.partial(jax.jit, static_argnames=("weight_dtype", "axis"))
def rounded(weight: Float[Array, "*X in out"], *, weight_dtype: str, axis: int) -> Codes:
    """The codes and scales of a matrix."""
    dtype, largest = FORMATS[weight_dtype]
    exact = weight.astype(jnp.float32)
    scale = jnp.abs(exact).max(axis=axis, keepdims=True) / largest
    scale = jnp.where(scale > 0, scale, 1.0)
    code = exact / scale
    code = (jnp.round(code) if jnp.issubdtype(dtype, jnp.integer) else code).astype(dtype)
    return Codes(code, jnp.squeeze(scale, axis))
