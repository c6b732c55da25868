"""Low-rank adapters of several requests in one batch: the stacks of an engine, and the weights that apply them by row.

A stack has a place for each adapter of an engine. Place 0 stays zeros, for rows without an adapter. So other adapters are other
numbers in arrays of the same shapes, and compile nothing.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jkv.errors import refused
from jkv.model.joined import GROUPS, separate_weights
from jkv.model.params import AdapterStack, ByRow, LowRank, ModelConfig, Params
from jkv.model.weight_shapes import leaf_name, weight_shapes
from jkv.model.weights import all_finite

ADAPTED = ("query", "key", "value", "out", "gate", "up", "down")  # fields of a layer that may have an adapter
UNEMBEDDING = "unembedding"


def is_adapted(leaf: str) -> bool:
    """Whether a leaf of `Params` is a matrix that may have an adapter."""
    return leaf == UNEMBEDDING or (leaf.startswith("layers.") and leaf.split(".", 2)[2] in ADAPTED)


def is_low_rank(x: Any) -> bool:
    """Whether a leaf of weights is a matrix with an adapter."""
    return isinstance(x, LowRank)


def is_stack(x: Any) -> bool:
    """Whether a leaf is an `AdapterStack`."""
    return isinstance(x, AdapterStack)


def has_adapter(params: Params) -> bool:
    """Whether any matrix has an adapter."""
    return any(map(is_low_rank, jax.tree.leaves(params, is_leaf=is_low_rank)))


def is_traced(adapter: LowRank) -> bool:
    """Whether its numbers are not there yet, as where a loss is differentiated."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in (adapter.down, adapter.up))


def empty_stacks(config: ModelConfig, num_places: int, rank: int, dtype: Any) -> Params:
    """A tree like a model's weights, with a stack for each matrix that may have an adapter, and None elsewhere.

    The stacks are zeros of NumPy.
    """

    def stack(path: Any, matrix: Any) -> AdapterStack | None:
        if not is_adapted(leaf_name(path)):
            return None
        num_in, num_out = matrix.shape
        down, up = (np.zeros((num_places, *shape), dtype) for shape in ((num_in, rank), (rank, num_out)))
        return AdapterStack(down, up, np.zeros(num_places, np.float32))

    return jax.tree_util.tree_map_with_path(stack, weight_shapes(config, dtype))


def by_row(params: Params, stacks: Params, place: Int[Array, " B"]) -> Params:
    """The weights with, for each row, the adapter in its place. Joined matrices stay joined."""

    def over(weights: Any, own: Any, names: tuple[str, ...]) -> Any:
        found = {name: (stack,) for name in names if (stack := getattr(own, name)) is not None}
        for field, parts in GROUPS.items():
            if getattr(weights, field, None) is not None:
                found[field] = tuple(stack for name in parts for stack in found.pop(name, ()))
        return weights.replace(**{name: ByRow(getattr(weights, name), stacks, place) for name, stacks in found.items()})

    layers = tuple(over(*pair, ADAPTED) for pair in zip(params.layers, stacks.layers, strict=True))
    return over(params.replace(layers=layers), stacks, (UNEMBEDDING,))


def adapters_of(params: Params) -> dict[str, LowRank]:
    """The adapter of each matrix that has one, without its base, by the leaf's name, such as `layers.0.query`."""
    found, _ = jax.tree_util.tree_flatten_with_path(separate_weights(params), is_leaf=is_low_rank)
    adapters = {leaf_name(path): one for path, one in found if is_low_rank(one)}
    ranks = {name: one.up.shape[0] for name, one in adapters.items()}
    folded = {name: (one.down.reshape(-1, ranks[name]), one.up.reshape(ranks[name], -1)) for name, one in adapters.items()}
    return {name: LowRank(None, *folded[name], one.scale) for name, one in adapters.items()}


def check_fits(stacks: Params, adapters: Mapping[str, LowRank], where: str) -> None:
    """Refuses adapters that a place of the stacks does not hold.

    Raises:
      ValueError: there are none, or one is of another matrix or shape, of a higher rank, or not finite.
    """
    if not adapters:
        raise refused(f"{where} must have a low-rank adapter; got none. Give what jkv.load_adapter reads.", adapter="missing")
    found, _ = jax.tree_util.tree_flatten_with_path(stacks, is_leaf=is_stack)
    known = {leaf_name(path): stack for path, stack in found}
    for name, one in adapters.items():
        if name not in known:
            rule = f"{where} must adapt matrices of attention, of feed-forward blocks or the unembedding; got {name}. "
            raise refused(f"{rule}Merge it into the base.", adapter="unsupported")
        (_, num_in, most), num_out, rank = known[name].down.shape, known[name].up.shape[-1], one.up.shape[0]
        if (one.down.shape, one.up.shape) != ((num_in, rank), (rank, num_out)):
            rule = (
                f"{where}: {name} must have shapes ({num_in}, r) and (r, {num_out}), got {one.down.shape} and {one.up.shape}. "
            )
            raise refused(f"{rule}Use an adapter of this model.", adapter="does_not_fit")
        if rank > most:
            rule = f"{where}: {name} must have at most rank {most}, the engine's adapter_rank; got {rank}. "
            raise refused(f"{rule}Build the engine with a higher adapter_rank.", adapter="does_not_fit")
        if not is_traced(one) and not all_finite([one.down, one.up]):
            rule = f"{where}: {name} must have finite numbers; got NaN or infinity. Save the adapter again."
            raise refused(rule, adapter="out_of_range")


def padded(stacks: Params, adapters: Mapping[str, LowRank]) -> Params:
    """What one place of the stacks holds for these adapters, arrays of NumPy; zeros for matrices without one."""

    def at_place(path: Any, stack: AdapterStack) -> AdapterStack:
        down, up = (np.zeros(x.shape[1:], x.dtype) for x in (stack.down, stack.up))
        one = adapters.get(leaf_name(path))
        if one is None:
            return AdapterStack(down, up, np.float32(0))
        rank = one.up.shape[0]
        down[:, :rank], up[:rank] = np.asarray(one.down), np.asarray(one.up)
        return AdapterStack(down, up, np.float32(one.scale))

    return jax.tree_util.tree_map_with_path(at_place, stacks, is_leaf=is_stack)


def with_place(stacks: Params, new: Params, place: Int[Array, ""]) -> Params:
    """The stacks with other adapters in one place."""
    return jax.tree.map(lambda of_places, one: of_places.at[place].set(jnp.asarray(one)), stacks, new)
