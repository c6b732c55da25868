"""Matrices that multiply the same input, kept as one array: a layer's query, key and value, and gate and up.

On a GPU they are one product then, for which any library will do. XLA can join the products of separate arrays itself. But
libraries read one array: where XLA has kernels of its own that read several (Triton, on GPUs of compute capability 8.0 and
higher), these are its only choice, and elsewhere it copies the matrices in every step, unless `jkv.engine.device_program` keeps
it from joining.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from jkv.errors import refused
from jkv.model.weight_records import Codes, LowRank
from pallas_kernels.blocks import Blocks

GROUPS = {"query_key_value": ("query", "key", "value"), "gate_up": ("gate", "up")}  # field of one array -> of separate ones
Weights = TypeVar("Weights", bound=Any)  # `jkv.Params`, whose module imports this one


def join_weights(params: Weights) -> Weights:
    """The same weights with query, key and value of a layer as one array, and gate and up as another.

    `jkv.load` keeps weights so on a GPU, which computes each group in one product. Both forms run everywhere, but a mesh splits
    separate arrays alone (`jkv.shard` separates them). As long as the argument lives, these matrices are in memory twice. A
    matrix with an adapter stays as it is, with the others of its group; so do experts.

    Args:
      params: `jkv.Params`: weights in floats or in 8 bits, or their shapes (`jax.ShapeDtypeStruct`).

    Raises:
      ValueError: a layer that has a joined matrix and one of its parts besides.
    """
    return with_groups(params, one_array)


def separate_weights(params: Weights) -> Weights:
    """The same weights with an array for each matrix: the inverse of `join_weights`.

    For what works on single matrices: adapters, a mesh, or an optimiser that orthogonalises each. As long as the argument
    lives, matrices that were joined are in memory twice.

    Raises:
      ValueError: a layer that has a joined matrix and one of its parts besides.
    """

    def apart(weights: Any, widths: Sequence[int]) -> Any:
        for field, names in GROUPS.items():
            whole = joined_of(weights, field)
            if whole is not None:
                of_field = widths if field == "query_key_value" else (num_columns(whole) // 2,) * 2
                own = dict(zip(names, columns(whole, of_field), strict=False))  # a layer may have no value
                weights = weights.replace(**{field: None} | own)
        return weights

    layers = []
    for i, weights in enumerate(params.layers):
        config = params.config.of_layer(i)
        delta = weights.delta and apart(weights.delta, config.delta_net.widths)
        layers.append(apart(weights, config.head_widths).replace(delta=delta))
    return params.replace(layers=tuple(layers))


def joined_of(weights: Any, field: str) -> Any:
    """A layer's joined matrix; None if its parts are arrays of their own.

    Raises:
      ValueError: it has both, of which one would be ignored.
    """
    whole = getattr(weights, field, None)
    both = [] if whole is None else [name for name in GROUPS[field] if getattr(weights, name, None) is not None]
    if both:
        raise refused(
            f"A layer must have either {field} or its parts as arrays of their own; got {field} and {', '.join(both)}. Change "
            "single matrices of jkv.separate_weights(params), or load with joined=False.",
            params="conflict",
        )
    return whole


def joins_by_default() -> bool:
    """Whether weights on the default device are joined: on a GPU."""
    return jax.default_backend() == "gpu"


def is_joined(params: Any) -> bool:
    """Whether weights have several matrices as one array."""
    records = [record for weights in params.layers for record in (weights, weights.delta) if record is not None]
    return any(getattr(record, field, None) is not None for record in records for field in GROUPS)


def with_groups(params: Weights, combine: Callable[[list[Any]], Any]) -> Weights:
    """The tree with one leaf in place of each group, which `combine` makes of its leaves."""

    def of_record(weights: Any) -> Any:
        for field, names in GROUPS.items():
            found = [one for name in names if (one := getattr(weights, name, None)) is not None]
            if joined_of(weights, field) is None and len(found) > 1 and are_alike(found):
                weights = weights.replace(**dict.fromkeys(names) | {field: combine(found)})
        return weights

    layers = [of_record(weights).replace(delta=weights.delta and of_record(weights.delta)) for weights in params.layers]
    return params.replace(layers=tuple(layers))


def are_alike(matrices: Sequence[Any]) -> bool:
    """Whether matrices can be one array: floats of one dtype, codes of one format, or blocks of one type, without adapters."""

    def kind(one: Any) -> Any:
        of_codes = (type(one), one.code.dtype) if isinstance(one, Codes) else getattr(one, "dtype", None)
        return (one.kind, one.dtype) if isinstance(one, Blocks) else of_codes

    kinds = {kind(one) for one in matrices}
    return len(kinds) == 1 and not isinstance(matrices[0], LowRank)


def filled(structure: Any, make: Callable[[int], Any], joins: bool) -> Any:
    """Weights of what `make` gives for the index of each; with `joins`, a group is joined as soon as it is made."""
    indices = jax.tree.unflatten(structure, [[i] for i in range(structure.num_leaves)])
    if joins:
        indices = with_groups(indices, lambda found: [index for group in found for index in group])

    def fill(group: list[int]) -> Any:
        return make(group[0]) if len(group) == 1 else one_array([make(index) for index in group])

    return jax.tree.map(fill, indices, is_leaf=lambda x: isinstance(x, list))


def on_host(params: Weights) -> Weights:
    """The weights with joined matrices in the host's memory, where separating them copies nothing."""

    def moved(weights: Any) -> Any:
        found = {field: getattr(weights, field, None) for field in GROUPS}
        return weights.replace(**{field: jax.tree.map(np.asarray, one) for field, one in found.items() if one is not None})

    layers = [moved(weights).replace(delta=weights.delta and moved(weights.delta)) for weights in params.layers]
    return params.replace(layers=tuple(layers))


def one_array(matrices: Sequence[Any]) -> Any:
    """The columns of all matrices, which may be unfolded, shapes alone, `Codes` or `Blocks`."""
    if isinstance(matrices[0], Blocks):  # whose rows are these columns
        return matrices[0].replace(data=jnp.concatenate([one.data for one in matrices]))
    if isinstance(matrices[0], Codes):
        return Codes(one_array([one.code for one in matrices]), one_array([one.scale for one in matrices]))
    if isinstance(matrices[0], jax.ShapeDtypeStruct):
        made = jax.eval_shape(lambda *arrays: one_array(arrays), *matrices)
        return made.update(sharding=matrices[0].sharding)
    return jnp.concatenate([x if x.ndim < 3 else x.reshape(x.shape[0], -1) for x in matrices], axis=-1)


def num_columns(whole: Any) -> int:
    """The columns of a joined matrix."""
    return int((whole.base if isinstance(whole, LowRank) else whole).shape[-1])


def columns(whole: Any, widths: Sequence[int]) -> list[Any]:
    """The matrices that an array was made of, by their numbers of columns; an adapter of all becomes one of each."""
    if isinstance(whole, LowRank):
        adapters = zip(columns(whole.base, widths), columns(whole.up, widths), strict=True)
        return [whole.replace(base=base, up=up) for base, up in adapters]
    if isinstance(whole, Codes):
        parts = zip(columns(whole.code, widths), columns(whole.scale, widths), strict=True)
        return [Codes(code, scale) for code, scale in parts]
    if isinstance(whole, Blocks) and isinstance(whole.data, jax.ShapeDtypeStruct):
        return [whole.replace(data=whole.data.update(shape=(width, whole.data.shape[1]))) for width in widths]
    if isinstance(whole, Blocks):
        ends = list(itertools.accumulate(widths))
        return [whole.replace(data=whole.data[end - width : end]) for end, width in zip(ends, widths, strict=True)]
    if isinstance(whole, jax.ShapeDtypeStruct):
        return [whole.update(shape=(*whole.shape[:-1], width)) for width in widths]
    return split(whole, widths)


def split(flat: Shaped[Array, "*B all"] | Shaped[np.ndarray, "*B all"], widths: Sequence[int]) -> list[Any]:
    """The columns of a joined matrix, or of a product with one, by their numbers.

    They are cut from an array of two axes: XLA then sees that what `rotate_append` puts beside each other again is the product
    itself. Cut from three axes, it was a kernel more in each layer.
    """
    rows, ends = flat.reshape(-1, flat.shape[-1]), list(itertools.accumulate(widths))
    assert ends[-1] == flat.shape[-1], f"{list(widths)} columns of {flat.shape}"
    parts = [rows[:, end - width : end] for end, width in zip(ends, widths, strict=True)]
    return [part.reshape(*flat.shape[:-1], -1) for part in parts]
