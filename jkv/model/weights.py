"""Checks weights: they are finite, and new ones for compiled programs differ from the old ones only in their values."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.errors import refused
from jkv.model.eight_bits import AS_STORED, format_of
from jkv.model.joined import is_joined, join_weights, separate_weights
from jkv.model.params import ModelConfig, Params


def place_of(params: Params) -> jax.sharding.Sharding | None:
    """The sharding of other arrays: the device of the weights; None if the weights are on several devices."""
    devices = list(params.embedding.devices())
    return jax.sharding.SingleDeviceSharding(devices[0]) if len(devices) == 1 else None


def committed(params: Params, place: Params | None = None) -> Params:
    """The same arrays, committed to their devices, with the shardings of `place` if given.

    Programs compile again if arrays are committed and the earlier ones were not, if an equivalent sharding is written
    differently, or if a type is weak. An optimiser or a checkpoint may return any of these. Only weak types cause a copy.
    """

    def bind(leaf: jax.Array | np.ndarray, like: Any) -> jax.Array:
        if isinstance(leaf, np.ndarray):
            return jax.device_put(leaf.copy(), like.sharding)  # a CPU keeps the array itself, into which its owner may write
        return jax.device_put(leaf.astype(leaf.dtype) if leaf.weak_type else leaf, like.sharding)

    return jax.tree.map(bind, params, params if place is None else place)


def all_finite(weights: Any) -> bool:
    """Whether no number in a tree of weights is NaN or infinite; on a CPU, without a program."""
    leaves = jax.tree.leaves(weights)
    if all(is_in_memory(leaf) for leaf in leaves):
        return all(np.isfinite(part).all() for leaf in leaves for part in parts_of(leaf))
    return bool(are_finite(leaves))


def parts_of(leaf: Any) -> Iterator[np.ndarray]:
    """A weight in memory, part by part: as a single NumPy array, JAX would copy one on several devices, and keep the copy."""
    if isinstance(leaf, np.ndarray):
        yield leaf
    else:
        yield from (np.asarray(shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0)


def is_in_memory(leaf: Any) -> bool:
    """Whether NumPy can read a weight where it is."""
    return isinstance(leaf, np.ndarray) or (
        leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.devices())
    )


@jax.jit
def are_finite(leaves: list[jax.Array]) -> jax.Array:
    """Whether all of these are finite, on their devices."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def shapes_of(params: Params) -> Params:
    """The shapes, dtypes and shardings of weights, for `check_same`; holds no weights."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)


def check_config(old: ModelConfig, new: ModelConfig) -> None:
    """Refuses another model's configuration; the error names the fields that differ.

    Raises:
      ValueError: it differs.
    """
    changed = [name for name, value in vars(old).items() if getattr(new, name) != value]
    if changed:
        raise refused(
            f"New weights must be of the same model; their configuration differs in {', '.join(changed)}: "
            f"{[getattr(new, name) for name in changed]}, not {[getattr(old, name) for name in changed]}. "
            "Build another engine for another model.",
            params="conflict",
        )


def joined_as(old: Params, new: Any) -> Any:
    """New weights joined as the old ones are, which copies what is joined or separated; anything but `Params` as it is.

    Raises:
      ValueError: weights in the other form that differ from the old ones in more than that (`check_same`).
    """
    if not isinstance(new, Params) or is_joined(new) == is_joined(old):
        return new
    change, back = (join_weights, separate_weights) if is_joined(old) else (separate_weights, join_weights)
    check_same(back(shapes_of(old)), new)
    return change(new)


def check_same(old: Params, new: Any) -> None:
    """Refuses weights for which programs would compile again; the error names the first difference.

    Raises:
      ValueError: the structure, configuration, shape, dtype or sharding differs from the weights in use.
    """
    if not isinstance(new, Params):
        rule = f"New weights must be jkv.Params, like the old ones; got {type(new).__name__}. Convert them first."
        raise refused(rule, params="wrong_type")
    check_config(old.config, new.config)
    if format_of(old) == AS_STORED != format_of(new):
        raise refused(
            "New weights must be in the blocks of a GGUF file, as the old ones are; got others. Load the model without "
            'weight_dtype="blocks" to give it new weights.',
            params="does_not_fit",
        )
    names = [[jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)] for tree in (old, new)]
    if names[0] != names[1]:
        missing, extra = sorted({*names[0]} - {*names[1]}), sorted({*names[1]} - {*names[0]})
        raise refused(
            f"New weights must have the structure of the old ones; missing: {missing or 'none'}, surplus: {extra or 'none'}. "
            "Pass complete jkv.Params.",
            params="does_not_fit",
        )
    structures: Any = [jax.tree.structure(tree) for tree in (old, new)]
    if structures[0] != structures[1]:
        raise refused(
            "New weights must have the same adapter scales and mesh axis as the old ones; they differ. Build another rollout "
            "for another scale.",
            params="does_not_fit",
        )
    for (path, was), leaf in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        name = f"params{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, jax.Array | np.ndarray):
            rule = f"New weights must be arrays of JAX or NumPy; {name} is {type(leaf).__name__}. Pass jax.device_put(...)."
            raise refused(rule, params="wrong_type")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            rule = f"New weights must be alive; {name} was donated or deleted. Pass the result of the update."
            raise refused(rule, params="invalid")
        if (leaf.shape, leaf.dtype) != (was.shape, was.dtype):
            raise refused(
                f"New weights must have the shapes and dtypes of the old ones; {name} is {leaf.dtype}{list(leaf.shape)}, not "
                f"{was.dtype}{list(was.shape)}. Cast it, or build another engine.",
                params="does_not_fit",
            )
        if isinstance(leaf, jax.Array) and not leaf.sharding.is_equivalent_to(was.sharding, leaf.ndim):
            raise refused(
                f"New weights must have the shardings of the old ones; {name} has {leaf.sharding}, not {was.sharding}. Pass "
                "jax.device_put(params, jax.tree.map(lambda x: x.sharding, old_params)).",
                params="does_not_fit",
            )
