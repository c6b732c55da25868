"""Saves and restores weights with orbax. Each weight is transferred directly from or to its devices.

`jkv.model.checkpoint` reads and writes Hugging Face folders.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from jkv.model.checkpoint import Folder, read_json, write_json
from jkv.model.params import ModelConfig, Params, RopeScaling, leaf_name, named_leaves, weight_shapes

Placement: TypeAlias = Sharding | Params | Callable[[str, Any], Sharding] | None


def save(params: Params, folder: Folder) -> None:
    """Writes weights, sharded or not, and their configuration to a folder; `jkv.restore` reads it.

    The tokenizer is not saved.

    Raises:
      ValueError: the folder already has weights, or the weights do not fit their configuration.
    """
    import orbax.checkpoint as ocp

    folder, named = Path(folder).absolute(), named_leaves(params)
    if (folder / "weights").exists():
        raise ValueError(f"{folder} must not contain weights yet; it does. Pass another folder, or remove this one first.")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "weights", named)
        checkpointer.wait_until_finished()
    if jax.process_index() == 0:  # written last, so that a folder with jkv.json is complete
        dtypes = {name: leaf.dtype.name for name, leaf in named.items()}
        write_json(folder / "jkv.json", {"config": dataclasses.asdict(params.config), "dtypes": dtypes})


def restore(folder: Folder, shardings: Placement = None) -> Params:
    """Reads the weights of a folder that `jkv.save` wrote, each directly to its devices.

    `shardings` is a `Params` of shardings (`jkv.shardings`), one `jax.sharding.Sharding` for all weights, or a function of a
    weight's name (such as `layers.0.query`) and its `jax.ShapeDtypeStruct`. None means the default device.

    Raises:
      ValueError: `jkv.save` did not write the folder, or its files are damaged.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    config, dtypes = read_saved(folder / "jkv.json")
    paths, structure = jax.tree_util.tree_flatten_with_path(weight_shapes(config))
    shapes = {leaf_name(path): leaf.update(dtype=dtypes[leaf_name(path)]) for path, leaf in paths}
    placed = {
        name: shapes[name].update(sharding=place) for name, place in zip(shapes, placements(shardings, shapes), strict=True)
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            named = checkpointer.restore(folder / "weights", placed)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / 'weights'} must be complete and fit the shardings: {error}. Save it again.") from error
    return jax.tree.unflatten(structure, [named[name] for name in placed])


def read_saved(file: Path) -> tuple[ModelConfig, dict[str, str]]:
    """The saved configuration, and the dtype of each weight."""
    if not file.is_file():
        raise ValueError(f"{file.parent} must be a folder of jkv.save; it has no {file.name}. For others use jkv.load.")
    try:
        fields = read_json(file)
        config = fields["config"]
        parts = {"rope_scaling": RopeScaling(**config["rope_scaling"]), "end_ids": tuple(config["end_ids"])}
        return ModelConfig(**{**config, **parts}), fields["dtypes"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} must be written by this version of jkv; got {error!r}. Save it again.") from error


def placements(shardings: Placement, shapes: Mapping[str, Any]) -> list[Sharding]:
    """The sharding of each weight."""
    if shardings is None:
        shardings = SingleDeviceSharding(jax.devices()[0])
    if isinstance(shardings, Sharding):
        return [shardings] * len(shapes)
    if isinstance(shardings, Params):
        return jax.tree.leaves(shardings)
    return [shardings(name, shape) for name, shape in shapes.items()]
