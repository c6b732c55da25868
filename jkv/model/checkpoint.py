"""Reads Hugging Face checkpoint folders into a `Model`, writes them back, and keeps converted weights with orbax.

One table of tensor names serves both directions. What the decoder cannot do is refused by name from `config.json` alone,
before any weight is read (or fetched); a bad file is an error that names the file and the tensor. `load` is `jkv.load`.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jkv.model.architectures import config_fields, parse_config
from jkv.model.params import LowRank, Model, ModelConfig, Params, RopeScaling, fold, weight_shapes

TENSORS = {  # field of Params or LayerParams -> tensor of the checkpoint, where a matrix lies transposed
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}
FUSED = {r"[qkv]_proj": "qkv_proj", r"(gate|up)_proj": "gate_up_proj"}  # phi3: stacked by rows, in the order of LayerParams
DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}  # of a safetensors header
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # everything they do is in tokenizer.json
SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
AGAIN = "The file is damaged or incomplete (or a git-lfs pointer): download or copy it again."

Folder: TypeAlias = str | os.PathLike[str]
Placement: TypeAlias = Sharding | Params | Callable[[str, Any], Sharding] | None


class Part(NamedTuple):
    """A leaf of `Params` inside a tensor of the checkpoint."""

    leaf: int  # its index among the leaves
    shape: tuple[int, ...]  # as it lies in the file, rows first
    is_transposed: bool


class Stored(NamedTuple):
    """Where a tensor lies, and what it is."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load(name_or_folder: Folder, dtype: Any = None) -> Model:
    """Weights, configuration and tokenizer of a shipped model, a local Hugging Face folder, or a hub name `org/name`.

    Weights come as float32 on CPU and in the checkpoint's own dtype elsewhere, unless `dtype` says otherwise; tensors are
    read one by one, so host memory holds the model once. No code from a checkpoint is ever run.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the decoder cannot run it, or one of its files is bad; the message says which and how to mend it.
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
        f"'org/name'; got {str(name_or_folder)!r}, which is none of these. Mend the name or the path."
    )


def fetch(name: str, patterns: list[str]) -> Path:
    """The local snapshot of a hub repository, with the files of these patterns at its top level."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:  # offline, no such repository, gated, a bad name
        raise FileNotFoundError(
            f"{name!r} is no local folder, and could not be fetched from the Hugging Face hub: {' '.join(str(error).split())} "
            "Mend the name or path, log in with `hf auth login` if it is gated, or download it first and give its folder."
        ) from error


# Configuration and tokenizer


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{file.parent} must hold {file.name}; it has none. Give a Hugging Face folder (restore reads others)."
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
            f"The tokenizer in {folder} must be readable without code of its own: {error}. Mend it, or remove "
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
    for index, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(weight_shapes(config))[0]):
        *layer, field = leaf_name(path).split(".")
        name = ".".join(["model", *layer, TENSORS[field]]) if layer else TENSORS[field]
        for pattern, fused in FUSED.items() if config.family == "phi3" else ():
            name = re.sub(pattern, fused, name)
        is_transposed = len(leaf.shape) == 2 and field != "embedding"
        part = Part(index, leaf.shape[::-1] if is_transposed else leaf.shape, is_transposed)
        parts.setdefault(name, []).append(part)
    return parts


def leaf_name(path: Any) -> str:
    """The name of a leaf of `Params`, as in `layers.0.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


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


def check_tensors(wanted: Mapping[str, list[Part]], stored: Mapping[str, Stored], is_tied: bool) -> None:
    """Refuses missing, unexpected and misshapen tensors."""
    files = ", ".join(sorted({str(tensor.file) for tensor in stored.values()}))
    missing = [name for name in wanted if name not in stored]
    if missing:
        hint = " (or set tie_word_embeddings to true, if they are tied)" if TENSORS["unembedding"] in missing else ""
        raise ValueError(f"{files}: {list_some(missing)} must be there, and is missing. Download the checkpoint again{hint}.")
    for name, parts in wanted.items():
        file, shape, dtype = stored[name]
        if shape != stacked_shape(parts):
            raise ValueError(f"{file}: {name} must have shape {stacked_shape(parts)}, got {shape}. Use its own config.json.")
        if dtype not in DTYPES:
            raise ValueError(f"{file}: {name} must be one of {', '.join(DTYPES)}, got {dtype}. Convert the weights first.")
    redundant = {TENSORS["unembedding"]} if is_tied else set()
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

    files = list_files(folder)
    wanted, stored = tensor_parts(config), list_tensors(files)
    check_tensors(wanted, stored, config.tie_embeddings)
    default = jnp.float32 if jax.default_backend() == "cpu" else DTYPES[stored[TENSORS["embedding"]].dtype]
    dtype = weight_dtype(default if dtype is None else dtype)
    leaves: dict[int, jax.Array] = {}
    for file in files:
        with safe_open(file, "numpy") as tensors:
            for name in [name for name in wanted if stored[name].file == file]:
                leaves |= read_parts(tensors.get_tensor(name), wanted[name], dtype, f"{file}: {name}")
    if config.tie_embeddings and TENSORS["unembedding"] in stored:
        check_tied(stored)
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


def check_tied(stored: Mapping[str, Stored]) -> None:
    """Refuses an unembedding that lies beside the embedding it is said to be tied to, and differs."""
    from safetensors import safe_open

    pair = []
    for name in (TENSORS["embedding"], TENSORS["unembedding"]):
        with safe_open(stored[name].file, "numpy") as tensors:
            pair.append(tensors.get_tensor(name))
    if not np.array_equal(*pair):
        raise ValueError(
            f"{stored[name].file}: {name} must equal {TENSORS['embedding']}, as config.json says tie_word_embeddings; it "
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
        raise ValueError(f"A {config.family} checkpoint must say all of {config=}; it would be read as {readable}. Mend it.")
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


def named_leaves(params: Params) -> dict[str, Any]:
    """The weights by name, in the order of the tree, folded; refuses those that are not what their configuration says."""
    wanted = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(weight_shapes(params.config))[0]}
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, LowRank))
    named = {leaf_name(path): leaf for path, leaf in leaves}
    named = {name: fold(leaf, wanted[name].shape) if name in wanted else leaf for name, leaf in named.items()}
    for name in wanted | named:
        got, rule = (getattr(leaves.get(name), "shape", None) for leaves in (named, wanted))
        if got != rule:
            raise ValueError(f"{name} must have shape {rule}, as the configuration of params says; got {got}. Mend either.")
    return named


def write_json(file: Path, fields: Mapping[str, Any]) -> None:
    """Writes a JSON file for people to read."""
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


# Converted weights


def save(params: Params, folder: Folder) -> None:
    """Writes weights, sharded or not, with orbax, and their configuration beside them; the tokenizer is not kept."""
    import orbax.checkpoint as ocp

    folder, named = Path(folder).absolute(), named_leaves(params)
    if (folder / "weights").exists():
        raise ValueError(f"{folder} must not hold weights yet; it does. Give another folder, or remove this one first.")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "weights", named)
        checkpointer.wait_until_finished()
    if jax.process_index() == 0:  # written last: a folder with it is complete
        dtypes = {name: leaf.dtype.name for name, leaf in named.items()}
        write_json(folder / "jkv.json", {"config": dataclasses.asdict(params.config), "dtypes": dtypes})


def restore(folder: Folder, sharding: Placement = None) -> Params:
    """The weights that `save` wrote, each placed as it is read.

    `sharding` is one `jax.sharding.Sharding` for all weights, a function of a weight's name (`layers.0.query`) and
    `jax.ShapeDtypeStruct`, or a `Params` of shardings; None puts everything on the default device.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    config, dtypes = read_saved(folder / "jkv.json")
    paths, structure = jax.tree_util.tree_flatten_with_path(weight_shapes(config))
    shapes = {leaf_name(path): leaf.update(dtype=dtypes[leaf_name(path)]) for path, leaf in paths}
    placed = {
        name: shapes[name].update(sharding=place) for name, place in zip(shapes, placements(sharding, shapes), strict=True)
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            named = checkpointer.restore(folder / "weights", placed)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / 'weights'} must be whole and fit the sharding: {error}. Save it again.") from error
    return jax.tree.unflatten(structure, [named[name] for name in placed])


def read_saved(file: Path) -> tuple[ModelConfig, dict[str, str]]:
    """The configuration that `save` kept, and the dtype of each weight."""
    if not file.is_file():
        raise ValueError(f"{file.parent} must be what jkv.save wrote; it has no {file.name}. Use load for others.")
    try:
        fields = read_json(file)
        config = fields["config"]
        parts = {"rope_scaling": RopeScaling(**config["rope_scaling"]), "end_ids": tuple(config["end_ids"])}
        return ModelConfig(**{**config, **parts}), fields["dtypes"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} must hold what this version of jkv saves, got {error!r}. Save it again.") from error


def placements(sharding: Placement, shapes: Mapping[str, Any]) -> list[Sharding]:
    """The sharding of each weight."""
    if sharding is None:
        sharding = SingleDeviceSharding(jax.devices()[0])
    if isinstance(sharding, Sharding):
        return [sharding] * len(shapes)
    if isinstance(sharding, Params):
        return jax.tree.leaves(sharding)
    return [sharding(name, shape) for name, shape in shapes.items()]
