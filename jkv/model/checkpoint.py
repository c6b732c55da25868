"""Reads Hugging Face checkpoint folders into a `Model`, and writes them back.

The names of the tensors are the family's (`jkv.model.families`), in both directions. What the decoder cannot do is refused by
name from `config.json` alone, before any weight is read (or fetched); a bad file is an error that names the file and the
tensor. `load` is `jkv.load`; `jkv.model.saved_weights` keeps weights in a format of our own.
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

from jkv.model.architectures import config_fields, parse_config
from jkv.model.families import find_family
from jkv.model.params import Model, ModelConfig, Params, leaf_name, named_leaves, weight_shapes

DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}  # of a safetensors header
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # everything they do is in tokenizer.json
SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
AGAIN = "The file is damaged or incomplete (or a git-lfs pointer): download or copy it again."

Folder: TypeAlias = str | os.PathLike[str]


class Part(NamedTuple):
    """A leaf of `Params` inside a tensor of the checkpoint."""

    leaf: int  # its index among the leaves
    shape: tuple[int, ...]  # in the file, rows first
    is_transposed: bool


class Stored(NamedTuple):
    """A tensor of a file, from its header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load(name_or_folder: Folder, dtype: Any = None) -> Model:
    """Weights, configuration and tokenizer of a shipped model, a local Hugging Face folder, or a hub name `org/name`.

    Weights come as float32 on CPU and in the checkpoint's own dtype elsewhere, unless `dtype` says otherwise; tensors are
    read one by one, so host memory holds the model once. No code from a checkpoint is ever run.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the decoder cannot run it, or one of its files is bad; the message says which, and what to do.
    """
    folder = find_folder(name_or_folder)
    is_hub = folder is None
    folder = folder or fetch(str(name_or_folder), SMALL_FILES)
    config = read_config(folder)
    tokenizer = read_tokenizer(folder, config)
    config = dataclasses.replace(config, end_ids=read_end_ids(folder, tokenizer))
    if is_hub:
        folder = fetch(str(name_or_folder), ["*.safetensors"])
    return Model(read_weights(folder, config, dtype), tokenizer, str(name_or_folder))


def load_tokenizer(name_or_folder: Folder) -> Any:
    """The tokenizer alone of what `load` takes, whatever its architecture; None where there is none.

    Raises:
        FileNotFoundError, ValueError: as `load` does.
    """
    return read_tokenizer(find_folder(name_or_folder) or fetch(str(name_or_folder), SMALL_FILES))


# Finding the folder


def find_folder(name_or_folder: Folder) -> Path | None:
    """The folder of a shipped or local model; None for what can only be a hub name."""
    assets = Path(str(resources.files("jkv"))) / "assets"
    shipped = sorted(file.parent.name for file in assets.glob("*/config.json"))
    if name_or_folder in shipped:
        return assets / str(name_or_folder)
    if str(name_or_folder) and Path(name_or_folder).is_dir():
        return Path(name_or_folder)
    if isinstance(name_or_folder, str) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", name_or_folder):
        return None
    raise FileNotFoundError(
        f"A model is a shipped name ({', '.join(shipped) or 'none in this build'}), a folder with config.json, or a hub name "
        f"'org/name'; got {str(name_or_folder)!r}, which is none of these. Check the name or the path."
    )


def fetch(name: str, patterns: list[str]) -> Path:
    """The local snapshot of a hub repository, with the files of these patterns at its top level."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:  # offline, no such repository, gated, a bad name
        raise FileNotFoundError(
            f"{name!r} is no local folder, and could not be fetched from the Hugging Face hub: {' '.join(str(error).split())} "
            "Check the name or path, log in with `hf auth login` if it is gated, or download it first and give its folder."
        ) from error


# Configuration and tokenizer


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{file.parent} must hold {file.name}; it has none. Give a Hugging Face folder (jkv.restore reads what jkv.save "
            "wrote)."
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} must be JSON: {error}. {AGAIN}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object, got a {type(fields).__name__}. {AGAIN}")
    return fields


def read_config(folder: Path) -> ModelConfig:
    """The `ModelConfig` of a folder's config.json, without end tokens; refuses what the decoder cannot do."""
    file = folder / "config.json"
    return parse_config(read_json(file), str(file))


def read_tokenizer(folder: Path, config: ModelConfig | None = None) -> Any:
    """The folder's tokenizer, checked against the vocabulary of the model, if given; None where there is none."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = folder / "tokenizer_config.json"
    named = read_json(settings).get("tokenizer_class") if settings.is_file() else None
    # AutoTokenizer would put the model family's own splitting in place of what a generic tokenizer.json says.
    loader = PreTrainedTokenizerFast if named in GENERIC_TOKENIZERS else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(
            f"The tokenizer in {folder} must be readable without code of its own: {error}. Correct it, or remove "
            f"{', '.join(TOKENIZER_FILES)} and use token ids."
        ) from error
    size = max([len(tokenizer), *(index + 1 for index in tokenizer.get_vocab().values())])
    if config is not None and size > config.vocab_size:
        raise ValueError(
            f"The tokenizer in {folder} must have at most vocab_size={config.vocab_size} tokens, got {size}: it is "
            "another model's. Copy the right tokenizer files there."
        )
    return tokenizer


def read_end_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a text: of generation_config.json, else of config.json, else the tokenizer's."""
    # From the files themselves: AutoConfig fills in a family's default, which may be another tokenizer's.
    files = [folder / "generation_config.json", folder / "config.json"]
    found = [read_json(file).get("eos_token_id") for file in files if file.is_file()]
    found.append(getattr(tokenizer, "eos_token_id", None))
    ids = next((ids for ids in found if ids is not None), ())
    return (ids,) if isinstance(ids, int) else tuple(ids)


# Tensors of a checkpoint


def tensor_parts(config: ModelConfig) -> dict[str, list[Part]]:
    """For each tensor of the checkpoint, the leaves of `Params` that it holds, stacked by rows."""
    parts: dict[str, list[Part]] = {}
    family = find_family(config.family)
    for index, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(weight_shapes(config))[0]):
        name = leaf_name(path)
        is_transposed = len(leaf.shape) == 2 and name != "embedding"
        part = Part(index, leaf.shape[::-1] if is_transposed else leaf.shape, is_transposed)
        parts.setdefault(family.tensor_of(name), []).append(part)
    return parts


def stacked_shape(parts: list[Part]) -> tuple[int, ...]:
    """The shape of a tensor of the checkpoint."""
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def list_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or the shards of its index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(
            f"{folder} must hold model.safetensors or model.safetensors.index.json; it has neither. Download the weights, or "
            "convert older ones with transformers' save_pretrained."
        )
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index} must name the shard of each tensor in 'weight_map', got {shards!r}. {AGAIN}")
    files = [folder / name for name in sorted(set(shards.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{folder} must hold every shard of {index.name}; missing: {', '.join(missing)}. Download them.")
    return files


def list_tensors(files: list[Path]) -> dict[str, Stored]:
    """Every tensor in these files, from their headers alone."""
    from safetensors import SafetensorError, safe_open

    stored = {}
    for file in files:
        try:
            with safe_open(file, "numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 -- no mapping
                    header = tensors.get_slice(name)
                    stored[name] = Stored(file, tuple(header.get_shape()), header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} must be a safetensors file: {error}. {AGAIN}") from error
    return stored


def check_tensors(wanted: Mapping[str, list[Part]], stored: Mapping[str, Stored], config: ModelConfig) -> None:
    """Refuses missing, unexpected and misshapen tensors."""
    unembedding = find_family(config.family).tensors["unembedding"]
    files = ", ".join(sorted({str(tensor.file) for tensor in stored.values()}))
    missing = [name for name in wanted if name not in stored]
    if missing:
        hint = " (or set tie_word_embeddings to true, if they are tied)" if unembedding in missing else ""
        raise ValueError(f"{files}: {list_some(missing)} must be there, and is missing. Download the checkpoint again{hint}.")
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
            f"{files}: {list_some(sorted(surplus))} must not be there: config.json knows no such weights. Use their own."
        )


def list_some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Reading and writing


def read_weights(folder: Path, config: ModelConfig, dtype: Any = None) -> Params:
    """The weights of a checkpoint folder, in our layout, on the default device."""
    from safetensors import safe_open

    files, names = list_files(folder), find_family(config.family).tensors
    wanted, stored = tensor_parts(config), list_tensors(files)
    check_tensors(wanted, stored, config)
    default = jnp.float32 if jax.default_backend() == "cpu" else DTYPES[stored[names["embedding"]].dtype]
    dtype = weight_dtype(default if dtype is None else dtype)
    leaves: dict[int, jax.Array] = {}
    for file in files:
        with safe_open(file, "numpy") as tensors:
            for name in [name for name in wanted if stored[name].file == file]:
                leaves |= read_parts(tensors.get_tensor(name), wanted[name], dtype, f"{file}: {name}")
    if config.tie_embeddings and names["unembedding"] in stored:
        check_tied(stored, names["embedding"], names["unembedding"])
    return jax.tree.unflatten(jax.tree.structure(weight_shapes(config)), [leaves[index] for index in sorted(leaves)])


def weight_dtype(dtype: Any) -> np.dtype:
    """A dtype that weights may have."""
    if jnp.dtype(dtype) not in DTYPES.values():
        raise ValueError(f"dtype must be one of float32, float16, bfloat16; got {jnp.dtype(dtype)}.")
    return jnp.dtype(dtype)


def read_parts(tensor: np.ndarray, parts: list[Part], dtype: Any, where: str) -> dict[int, jax.Array]:
    """The leaves in a tensor of the checkpoint, by index."""
    leaves = {}
    ends = np.cumsum([part.shape[0] for part in parts])
    for part, rows in zip(parts, np.split(tensor, ends[:-1]), strict=True):
        with np.errstate(over="ignore"):  # found below
            leaf = jnp.array(rows.T if part.is_transposed else rows, dtype)
        if not jnp.isfinite(leaf).all():
            raise ValueError(f"{where} must be finite, got NaN or infinity as {dtype}. {AGAIN} Or load with a wider dtype.")
        leaves[part.leaf] = leaf
    return leaves


def check_tied(stored: Mapping[str, Stored], embedding: str, unembedding: str) -> None:
    """Refuses a tied unembedding that is in the file too, and differs from the embedding."""
    from safetensors import safe_open

    pair = []
    for name in (embedding, unembedding):
        with safe_open(stored[name].file, "numpy") as tensors:
            pair.append(tensors.get_tensor(name))
    if not np.array_equal(*pair):
        raise ValueError(
            f"{stored[unembedding].file}: {unembedding} must equal {embedding}, as config.json says tie_word_embeddings; it "
            "differs. Set that to false, or remove the tensor."
        )


def export(params: Params, tokenizer: Any, folder: Folder, dtype: Any = jnp.bfloat16) -> None:
    """Writes a Hugging Face checkpoint folder that `load`, transformers and serving engines read.

    `tokenizer` may be None. Files of the same names in the folder are overwritten. Host memory holds one copy of the model.
    """
    from safetensors.numpy import save_file

    folder, config, dtype = Path(folder), params.config, weight_dtype(dtype)
    leaves, fields = list(named_leaves(params).values()), config_fields(config, dtype.name)
    readable = parse_config(fields, "export")
    if dataclasses.replace(readable, end_ids=config.end_ids) != config:
        raise ValueError(
            f"A {config.family} checkpoint must express all of {config=}; it would be read as {readable}. Correct it."
        )
    tensors = {}
    for name, parts in tensor_parts(config).items():
        rows = [np.asarray(leaves[part.leaf]).astype(dtype) for part in parts]
        rows = [leaf.T if part.is_transposed else leaf for leaf, part in zip(rows, parts, strict=True)]
        tensors[name] = np.ascontiguousarray(np.concatenate(rows))  # save_file writes raw memory, whatever its order
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # which safetensors leaves to its owner alone
    write_json(folder / "config.json", fields)
    write_json(folder / "generation_config.json", {"eos_token_id": fields["eos_token_id"]})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_json(file: Path, fields: Mapping[str, Any]) -> None:
    """Writes a JSON file for people to read."""
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
