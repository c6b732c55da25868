"""Saves and restores weights with orbax. Each weight is transferred directly from or to its devices.

Every weight has files of its own, whose SHA-256 is written down in `jkv.json` and compared before they are read, so damaged
weights are an error with their name. `jkv.json` is written last: a folder that has it is complete.
`jkv.checkpoints.loading` loads these folders too, and reads and writes Hugging Face folders.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from jkv.checkpoints.checkpoint_tensors import EXACT
from jkv.checkpoints.family import field_of
from jkv.checkpoints.json_files import (
    OBJECT,
    Folder,
    Rule,
    check_fields,
    find_file,
    integer,
    list_of,
    parse_object,
    printable,
    read_bytes,
    read_json,
    shown,
)
from jkv.checkpoints.saved_config import read_fields
from jkv.checkpoints.weight_reading import Kept, finished
from jkv.checks import typed
from jkv.errors import refused
from jkv.model.eight_bits import code_axis
from jkv.model.joined import filled, on_host, separate_weights
from jkv.model.params import Codes, Model, ModelConfig, Params
from jkv.model.weight_shapes import leaf_name, named_leaves, weight_shapes
from jkv.reports import write_text

FILE, WEIGHTS, ARRAY = "jkv.json", "weights", ".zarray"
ZARR = {"float32": "<f4", "float16": "<f2", "bfloat16": "bfloat16"}  # the names of dtypes in the description of an array
DTYPE = Rule(f"one of {', '.join(ZARR)}", lambda value: isinstance(value, str) and value in ZARR)
DIGEST = Rule("a SHA-256 in hexadecimal", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)))
RULES = {"config": OBJECT, "dtypes": OBJECT, "sha256": OBJECT}
AGAIN = "Copy the folder again, or save the weights again."
Placement: TypeAlias = Sharding | Params | Callable[[str, Any], Sharding] | None


def save(params: Params | Model, folder: Folder) -> None:
    """Writes weights, sharded or not, and their configuration to a folder; `jkv.restore` reads it.

    Of a model, only the weights are saved. `dataclasses.replace(model, params=jkv.restore(folder))` puts them into a model that
    has a tokenizer.

    Raises:
      ValueError: the folder already has weights, or the weights do not fit their configuration.
    """
    import orbax.checkpoint as ocp

    if isinstance(params, Model):
        params = params.params
    if not isinstance(params, Params):
        rule = f"save takes the weights and then the folder, jkv.save(params, folder); got {shown(params)} as weights."
        raise refused(rule, params="wrong_type")
    typed("folder", folder, Folder)
    folder, named = Path(folder).absolute(), named_leaves(separate_weights(on_host(params)))
    config = dataclasses.asdict(params.config)
    read_fields(json.loads(json.dumps(config)), "params.config")  # as `restore` will
    check_fields({name: leaf.dtype.name for name, leaf in named.items()}, dict.fromkeys(named, DTYPE), "dtypes of params")
    if (folder / WEIGHTS).exists():
        is_whole = (folder / FILE).exists()
        found = "it does" if is_whole else "it does, of a save that did not finish"
        rule = f"{folder} must not contain weights yet; {found}. Pass another folder, or remove this one first."
        raise refused(rule, folder="conflict")
    with ocp.StandardCheckpointer(use_ocdbt=False) as checkpointer, quiet():  # OCDBT has one file for many arrays
        checkpointer.save(folder / WEIGHTS, named)
        checkpointer.wait_until_finished()
    if jax.process_index() == 0:
        fields = {
            "config": config,
            "dtypes": {name: leaf.dtype.name for name, leaf in named.items()},
            "sha256": digests(folder, sorted(path for path in (folder / WEIGHTS).rglob("*") if path.is_file())),
        }
        write_text(folder / FILE, sealed(fields))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops orbax's warning that there are no OCDBT files to merge."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


def restore(folder: Folder, shardings: Placement = None) -> Params:
    """Reads the weights of a folder that `jkv.save` wrote, each directly to its devices.

    `shardings` is a `Params` of shardings (`jkv.shardings`), one `jax.sharding.Sharding` for all weights, or a function of a
    weight's name (such as `layers.0.query`) and its `jax.ShapeDtypeStruct`. None means the default device. A host never holds
    more than the weights of its devices, one weight and a gigabyte.

    Raises:
      ValueError: `jkv.save` did not write the folder, or its files are damaged.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    config, dtypes, known = read_saved(folder)
    check_files(folder, known)
    paths, structure = jax.tree_util.tree_flatten_with_path(weight_shapes(config))
    shapes = {leaf_name(path): leaf.update(dtype=dtypes[leaf_name(path)]) for path, leaf in paths}
    for name, leaf in shapes.items():
        check_array(folder / WEIGHTS / name / ARRAY, leaf)
    placed = {
        name: shapes[name].update(sharding=place) for name, place in zip(shapes, placements(shardings, shapes), strict=True)
    }
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in shapes.values())
    try:
        with ocp.StandardCheckpointer(restore_concurrent_gb=1 + largest // 10**9) as checkpointer:
            named = checkpointer.restore(folder / WEIGHTS, placed)
    except Exception as error:  # of metadata that make no sense, for which orbax raises many kinds
        why = printable(error)
        rule = f"{folder / WEIGHTS} must be complete and fit the shardings: {why}. Save it again."
        raise refused(rule, folder="invalid") from error
    return jax.tree.unflatten(structure, [named[name] for name in placed])


def is_saved(folder: Path) -> bool:
    """Whether a folder has weights of `jkv.save`, and no checkpoint of Hugging Face."""
    return (folder / FILE).is_file() and not (folder / "config.json").exists()


def restore_as(folder: Path, config: ModelConfig, kept: Kept) -> Params:
    """The weights of a folder that `jkv.save` wrote, kept and placed as `kept` says; `config` may split experts in another way.

    Raises:
      ValueError: as `restore` does, or weights that are not finite, or a mesh that does not divide them.
    """
    places = kept.places(config)
    structure: Any = jax.tree.structure(weight_shapes(config))
    targets = [None] * structure.num_leaves if places is None else jax.tree.leaves(places, is_leaf=is_codes)
    if places is not None:
        places = jax.tree.map(lambda one: one.code if is_codes(one) else one, places, is_leaf=is_codes)
    named = named_leaves(restore(folder, places))
    kept, names = kept.chosen(named["embedding"].dtype), list(named)

    def leaf(index: int) -> Any:
        name = names[index]
        own = kept._replace(dtype=jnp.float32) if field_of(name) in EXACT else kept
        return finished(named.pop(name), own, code_axis(name), targets[index], [f"{folder}: {name}"])  # frees the floats

    return filled(structure, leaf, kept.joins)


def is_codes(x: Any) -> bool:
    """Whether a leaf of weights, shapes or shardings is a matrix in 8 bits."""
    return isinstance(x, Codes)


def read_saved(folder: Path) -> tuple[ModelConfig, dict[str, str], dict[str, str]]:
    """The saved configuration, the dtype of each weight, and the SHA-256 of each file."""
    file = folder / FILE
    if not file.is_file():
        unfinished = f" It has {WEIGHTS}, of a save that did not finish: save it again." if (folder / WEIGHTS).exists() else ""
        rule = f"{folder} must be a folder of jkv.save; it has no {FILE}. For others use jkv.load.{unfinished}"
        raise refused(rule, folder="not_found")
    data, where = read_bytes(file), str(file)
    fields = parse_object(data, where)
    if "sha256" not in fields or data != sealed(fields).encode():
        rule = f"{file} must be written by this version of jkv and unchanged since then; it is not. {AGAIN}"
        raise refused(rule, folder="invalid")
    check_fields(fields, RULES, where, RULES)
    config, dtypes, known = read_fields(fields["config"], f"{where}: config"), fields["dtypes"], fields["sha256"]
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(weight_shapes(config))[0]]
    if wrong := sorted(set(names) ^ set(dtypes)):
        raise refused(
            f"{where}: dtypes must name each weight of this configuration, got {shown(wrong[0])} in one of them alone. {AGAIN}",
            dtypes="invalid",
        )
    check_fields(dtypes, dict.fromkeys(names, DTYPE), f"{where}: dtypes")
    check_fields(known, dict.fromkeys(known, DIGEST), f"{where}: sha256")
    if outside := [name for name in known if not is_inside(name)]:
        raise refused(f"{where}: sha256 must name files of {WEIGHTS}, got {shown(outside[0])}. {AGAIN}", sha256="invalid")
    return config, dtypes, known


def is_inside(name: str) -> bool:
    """Whether this is a plain path of a file of the weights."""
    first, *rest = name.split("/")
    return first == WEIGHTS and bool(rest) and not {"", ".", ".."} & {*rest} and "\0" not in name


def sealed(fields: Mapping[str, Any]) -> str:
    """The text of `jkv.json`, which ends with the SHA-256 of all else in it."""
    content = {name: value for name, value in fields.items() if name != "seal"}
    return json.dumps(content | {"seal": hashlib.sha256(json.dumps(content).encode()).hexdigest()}, indent=2) + "\n"


def digests(folder: Path, paths: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of files, by their paths in the folder."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip((path.relative_to(folder).as_posix() for path in paths), pool.map(digest, paths), strict=True))


def check_files(folder: Path, known: Mapping[str, str]) -> None:
    """Refuses files that are not as they were saved."""
    paths = [folder / name for name in known]
    if missing := [path for path in paths if not path.is_file()]:
        rule = f"{folder / WEIGHTS} must be complete; {missing[0].relative_to(folder)} is missing. {AGAIN}"
        raise refused(rule, folder="not_found")
    for path in paths:
        find_file(path, folder)
    if others := {path for path in (folder / WEIGHTS).rglob("*") if not path.is_dir()} - set(paths):
        rule = f"{folder / WEIGHTS} must have the files that were saved alone; it has also {min(others)}. Remove it."
        raise refused(rule, folder="conflict")
    found = digests(folder, paths)
    if damaged := [name for name in known if found[name] != known[name]]:
        raise refused(
            f"Each file of {folder} must have the SHA-256 that it was saved with; {damaged[0]} differs, and "
            f"{len(damaged) - 1} others: they are damaged. {AGAIN}",
            folder="invalid",
        )


def check_array(file: Path, leaf: jax.ShapeDtypeStruct) -> None:
    """Refuses an array whose own description has another shape, dtype or order than was saved, or parts of no size."""
    fields, size = read_json(file), integer(1, 1 << 40)
    check_fields(fields, {"chunks": list_of(size, leaf.ndim, leaf.ndim)}, str(file), ("chunks",))
    for name, wanted in (("shape", list(leaf.shape)), ("dtype", ZARR[leaf.dtype.name]), ("order", "C")):
        if fields.get(name) != wanted:
            rule = f"{file}: {name} must be {wanted}, as jkv.save wrote it, got {shown(fields.get(name))}. {AGAIN}"
            raise refused(rule, **{name: "invalid"})
    if any(part > most for part, most in zip(fields["chunks"], leaf.shape, strict=True)):
        rule = f"{file}: chunks must lie in shape {list(leaf.shape)}, got {shown(fields['chunks'])}. {AGAIN}"
        raise refused(rule, chunks="invalid")


def placements(shardings: Placement, shapes: Mapping[str, Any]) -> list[Sharding]:
    """The sharding of each weight."""
    if shardings is None:
        shardings = SingleDeviceSharding(jax.local_devices()[0])
    if isinstance(shardings, Sharding):
        return [shardings] * len(shapes)
    if isinstance(shardings, Params):
        return jax.tree.leaves(shardings)
    return [shardings(name, shape) for name, shape in shapes.items()]
