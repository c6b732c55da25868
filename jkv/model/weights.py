"""New weights for compiled programs: the same as the old ones in all but their values, or refused."""

from typing import Any

import jax

from jkv.model.params import Params


def place_of(params: Params) -> jax.sharding.Sharding | None:
    """Where arrays beside the weights belong: on the one device of these; None where they are on several."""
    devices = list(params.embedding.devices())
    return jax.sharding.SingleDeviceSharding(devices[0]) if len(devices) == 1 else None


def committed(params: Params, place: Params | None = None) -> Params:
    """The same arrays, committed to the devices that they are on, by the names of `place`'s shardings if given.

    Programs compile again for arrays that are committed when the earlier ones were not, whose sharding has another name, or
    whose type is weak, and an optimiser or a checkpoint may return any of these. No weight is copied but for a weak type.
    """

    def bind(leaf: jax.Array, like: Any) -> jax.Array:
        return jax.device_put(leaf.astype(leaf.dtype) if leaf.weak_type else leaf, like.sharding)

    return jax.tree.map(bind, params, params if place is None else place)


def shapes_of(params: Params) -> Params:
    """What `check_same` needs to know of weights, without holding them."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)


def check_same(old: Params, new: Any) -> None:
    """Refuses weights that would compile something anew, naming the first that differs.

    Raises:
      ValueError: another structure, configuration, shape, type or sharding than the weights in use.
    """
    if not isinstance(new, Params):
        raise ValueError(f"New weights are jkv.Params, as the old ones are; got {type(new).__name__}. Convert them first.")
    if new.config != old.config:
        changed = [name for name, value in vars(old.config).items() if getattr(new.config, name) != value]
        raise ValueError(
            f"New weights must be of the same model; their configuration differs in {', '.join(changed)}: "
            f"{[getattr(new.config, name) for name in changed]}, not {[getattr(old.config, name) for name in changed]}. "
            "Build another engine for another model."
        )
    names = [[jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)] for tree in (old, new)]
    if names[0] != names[1]:
        missing, extra = sorted({*names[0]} - {*names[1]}), sorted({*names[1]} - {*names[0]})
        raise ValueError(
            f"New weights must have the structure of the old ones; missing: {missing or 'none'}, too many: {extra or 'none'}. "
            "Pass a whole `jkv.Params`."
        )
    structures: Any = [jax.tree.structure(tree) for tree in (old, new)]
    if structures[0] != structures[1]:
        raise ValueError(
            "New weights must have the static fields of the old ones: the scale of each adapter, and the axis of a mesh; they "
            "differ. Build another rollout for another scale."
        )
    for (path, was), leaf in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        name = f"params{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"New weights must be arrays on a device; {name} is {type(leaf).__name__}. Pass jax.device_put(...)."
            )
        if leaf.is_deleted():
            raise ValueError(f"New weights must be there; {name} was donated or deleted. Pass what the update returned.")
        if (leaf.shape, leaf.dtype) != (was.shape, was.dtype):
            raise ValueError(
                f"New weights must have the shapes and types of the old ones; {name} is {leaf.dtype}{list(leaf.shape)}, not "
                f"{was.dtype}{list(was.shape)}. Cast it, or build another engine."
            )
        if not leaf.sharding.is_equivalent_to(was.sharding, leaf.ndim):
            raise ValueError(
                f"New weights must lie where the old ones do; {name} is on {leaf.sharding}, not on {was.sharding}. Pass "
                "jax.device_put(params, jax.tree.map(lambda x: x.sharding, the_old_ones))."
            )
