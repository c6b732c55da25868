"""Loads the tokenizer of a checkpoint folder, after its files are checked.

A folder's tokenizer is its tokenizer.json (`jkv.checkpoints.tokenizer`), whatever class its configuration names. transformers
chooses a class only for a folder without that file.

The libraries build lists as long as the largest id, open the paths in tokenizer_config.json, abort the process for a damaged
table, and multiply a text by every replacement of a normalizer. So ids, paths, tables and replacements are bounded before they
see the files. Code in a checkpoint is never run.
"""

import base64
import binascii
import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jkv.checkpoints.families import find_family
from jkv.checkpoints.family import MAX_POSITIONS, MAX_VOCAB, NAMES
from jkv.checkpoints.huggingface import transformers
from jkv.checkpoints.json_files import (
    CORRECT,
    MAX_BYTES,
    OBJECT,
    SWITCH,
    TEXT,
    Rule,
    at_least,
    check_fields,
    either,
    find_file,
    integer,
    list_of,
    nullable,
    printable,
    read_bytes,
    read_json,
    shown,
)
from jkv.checkpoints.tokenizer import content, listed, make_tokenizer, steps
from jkv.errors import refused
from jkv.model.params import ModelConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
READ = (".json", ".txt", ".jinja", ".model", ".spm", ".vocab", ".codes", ".tiktoken")  # suffixes of what tokenizers read
MAX_TOKEN = 2048  # characters
MAX_GROWTH = 1024  # characters that a normalizer or decoder makes of one
MAX_TEMPLATE = 1 << 20  # characters of a chat template
PIECES = 64  # of a post-processor's template
PROBE = "1 + 1 = 2\n\nÅé"  # a damaged tokenizer fails on a text, if not before

TOKEN = Rule("a string or an object", lambda value: isinstance(value, str | dict))
SIDE = Rule("'left' or 'right'", lambda value: value in ("left", "right"))
EMPTY = Rule("empty", lambda value: not value)
CONFIG = {  # of tokenizer_config.json
    "tokenizer_class": nullable(TEXT),
    "model_max_length": nullable(at_least(1, 10.0**40)),
    "padding_side": SIDE,
    "truncation_side": SIDE,
    "chat_template": nullable(either(TEXT, either(OBJECT, list_of(OBJECT, 64)))),
    "added_tokens_decoder": OBJECT,
    "additional_special_tokens": nullable(list_of(TOKEN, MAX_VOCAB)),
    "extra_special_tokens": nullable(either(OBJECT, list_of(TOKEN, MAX_VOCAB))),
    "model_specific_special_tokens": nullable(OBJECT),
    "clean_up_tokenization_spaces": nullable(SWITCH),
    "split_special_tokens": nullable(SWITCH),
    "add_bos_token": nullable(SWITCH),
    "add_eos_token": nullable(SWITCH),
    **dict.fromkeys(
        ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"), nullable(TOKEN)
    ),
    # Arguments of the libraries that would open a file, replace the vocabulary, or sample tokenizations.
    **dict.fromkeys(("init_inputs", "vocab", "merges", "tokenizer_object", "sp_model_kwargs", "fast_tokenizer_files"), EMPTY),
}
ADDED = {"content": TEXT, "lstrip": SWITCH, "rstrip": SWITCH, "single_word": SWITCH, "normalized": SWITCH, "special": SWITCH}
TOKENIZER = {  # of tokenizer.json
    "model": OBJECT,
    "added_tokens": nullable(list_of(OBJECT, MAX_VOCAB)),
    "normalizer": nullable(OBJECT),
    "pre_tokenizer": nullable(OBJECT),
    "post_processor": nullable(OBJECT),
    "decoder": nullable(OBJECT),
    "truncation": nullable(OBJECT),
    "padding": nullable(OBJECT),
}
MODEL = {
    "type": nullable(TEXT),
    "vocab": Rule("an object or a list", lambda value: isinstance(value, dict | list)),
    "merges": nullable(Rule("a list", lambda value: isinstance(value, list))),
    "dropout": nullable(
        Rule("0, because tokenizers must not sample", lambda value: type(value) in (int, float) and value == 0)
    ),
}
LENGTH = integer(0, MAX_POSITIONS)


def read_tokenizer(folder: Path, config: ModelConfig | None = None) -> Any:
    """The tokenizer of a folder, checked against the model's vocabulary if a config is given; None if there is none.

    Raises:
      ValueError: a file breaks a rule, or the libraries cannot load it.
    """
    if not [name for name in TOKENIZER_FILES if find_file(folder / name)]:  # each is checked
        return None
    fields, largest = check_tokenizer(folder, config)
    settings, definition = tokenizer_settings(folder, fields), fields.get("tokenizer.json")
    with loading(f"in {folder}", f"Correct it, or remove {', '.join(TOKENIZER_FILES)} and use token ids."):
        if definition is None:
            tokenizer = by_class(folder, settings)
        else:
            tokenizer = make_tokenizer(definition, settings, str(folder), added_tokens(fields))
        # Only the largest id of tokenizer.json is known before; the whole vocabulary takes long.
        size = measured(tokenizer, largest, is_known=definition is not None)
    is_beyond = config is not None and getattr(tokenizer, "pad_token_id", None) == config.vocab_size
    check_size(size, f"in {folder}", config, int(is_beyond))
    return tokenizer


def tokenizer_settings(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of tokenizer_config.json, with the special tokens and chat templates that files of their own have.

    Raises:
      ValueError: the tokenizer is a class that the checkpoint brings the code of.
    """
    settings = dict(fields.get("tokenizer_config.json", {}))
    refuse_code(settings, str(folder / "tokenizer_config.json"))
    names = fields.get("special_tokens_map.json", {})
    settings = names | settings if "added_tokens_decoder" in settings else settings | names  # in older folders, it decides
    templates = {"default": folder / "chat_template.jinja"}
    templates |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    texts = {name: read_bytes(file).decode("utf-8") for name, file in templates.items() if find_file(file, folder)}
    if texts:
        settings["chat_template"] = texts["default"] if set(texts) == {"default"} else texts
    return settings


def refuse_code(settings: Mapping[str, Any], where: str) -> None:
    """Refuses a tokenizer whose class is in a Python file of the checkpoint, which may do more than tokenizer.json says."""
    code = settings.get("auto_map") or {}
    paths = code.get("AutoTokenizer") if isinstance(code, dict) else code
    names = [str(path) for path in (paths if isinstance(paths, list) else [paths]) if path]
    own = settings.get("tokenizer_class")
    classes = {name.rpartition(".")[2].removesuffix("Fast") for name in names}
    if names and (own is None or own.removesuffix("Fast") in classes):
        raise refused(
            f"{where}: the tokenizer must load without custom code, got the class {shown(names[-1])} of the checkpoint. "
            "Code in a checkpoint is never run: remove its tokenizer files and use token ids, or set tokenizer_class to "
            '"PreTrainedTokenizerFast", where tokenizer.json is all of the tokenizer.',
            tokenizer_class="unsupported",
        )


def added_tokens(fields: Mapping[str, Any]) -> dict[int, Any]:
    """The tokens that the configuration files add to tokenizer.json, by id: added_tokens.json is an older form."""
    settings = fields.get("tokenizer_config.json", {})
    if "added_tokens_decoder" in settings:
        return {int(index): token for index, token in settings["added_tokens_decoder"].items()}
    return {index: {"content": text} for text, index in fields.get("added_tokens.json", {}).items()}


def by_class(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The tokenizer of a folder without tokenizer.json, whose vocabulary the class in its configuration interprets."""
    paths: dict[str, Any] = {name: None for name in settings if name.endswith("_file")}  # which would be opened
    return transformers().AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True, config=family_defaults(folder), **paths
    )


@contextlib.contextmanager
def loading(place: str, remedy: str) -> Iterator[None]:
    """Reports what the libraries raise for a bad tokenizer as a ValueError."""
    try:
        yield
    except BaseException as error:  # tokenizers raises bare Exceptions, and panics that are BaseExceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        rule = f"The tokenizer {place} must load without custom code: {printable(error)}. {remedy}"
        raise refused(rule, tokenizer="invalid") from error


def measured(tokenizer: Any, largest: int, is_known: bool) -> int:
    """One more than the largest id, after a trial. `is_known`: `largest` is that of the vocabulary without added tokens."""
    ids = tokenizer.encode(PROBE)
    tokenizer.decode(ids)
    ids += tokenizer.added_tokens_decoder if is_known else tokenizer.get_vocab().values()
    return max(len(tokenizer), *(index + 1 for index in [largest, *ids]))


def family_defaults(folder: Path) -> Any:
    """A transformers configuration with the names in config.json, by which AutoTokenizer chooses a class, and no other field.

    transformers would build lists and objects of other fields, of any size.
    """
    library = transformers()
    file = find_file(folder / "config.json")
    fields = {} if file is None else read_json(file)
    check_fields(fields, {name: NAMES[name] for name in ("model_type", "tokenizer_class")}, str(file))
    name = fields.get("model_type") or ""
    config = library.CONFIG_MAPPING[name]() if name in library.CONFIG_MAPPING else library.PreTrainedConfig()
    config.tokenizer_class = fields.get("tokenizer_class")
    return config


# Checks


def check_tokenizer(folder: Path, config: ModelConfig | None = None) -> tuple[dict[str, Any], int]:
    """Checks every file that a tokenizer library may read; the fields of those in JSON by name, and the largest id."""
    check_places(folder)
    names = (*TOKENIZER_FILES, "added_tokens.json", "special_tokens_map.json")
    found = {name: folder / name for name in names if name.endswith(".json") and find_file(folder / name)}
    fields = {name: read_json(file) for name, file in found.items()}
    limit = MAX_VOCAB if config is None else most_tokens(config)
    largest = -1
    for name, file in found.items():
        if name == "tokenizer.json":
            largest = max(largest, check_definition(fields[name], str(file), limit))
        elif name in ("vocab.json", "added_tokens.json"):
            largest = max(largest, check_ids(fields[name], str(file)))
        else:
            largest = max(largest, check_settings(fields[name], str(file)))
    check_size(largest + 1, f"in {folder}", config, int(config is not None and pads_beyond(fields, config.vocab_size)))
    return fields, largest


def pads_beyond(fields: Mapping[str, Any], vocab_size: int) -> bool:
    """Whether the padding token is an added one whose id follows the last token of the model, as trainers add it.

    No text has this token, and a prompt that has it is refused.
    """
    settings = fields.get("special_tokens_map.json", {}) | fields.get("tokenizer_config.json", {})
    own = {token.get("id"): token for token in fields.get("tokenizer.json", {}).get("added_tokens") or ()}
    found = content((own | added_tokens(fields)).get(vocab_size))
    return found is not None and found == content(settings.get("pad_token"))


def check_places(folder: Path) -> None:
    """Refuses large files, chat templates that are no text, and what `find_file` refuses, among those a library may read."""
    for file in [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]:
        if (file.suffix in READ or "token" in file.name) and not file.is_dir():
            find_file(file, folder)
            if (size := file.stat().st_size) > MAX_BYTES:
                rule = f"{file} must have at most {MAX_BYTES:,} bytes, got {size:,}. Copy the right file there."
                raise refused(rule, file="too_long")
            if file.suffix == ".jinja":
                check_template(file.read_bytes().decode("utf-8", "replace"), str(file))


def check_size(size: int, place: str, config: ModelConfig | None, more: int = 0) -> None:
    """Refuses a tokenizer whose largest id is `size - 1` for a model with fewer tokens than that, `more` aside."""
    if config is not None and size > most_tokens(config, more):
        foreign = find_family(config.family).num_foreign_tokens
        raise refused(
            f"The tokenizer {place} must have at most vocab_size={config.vocab_size} tokens"
            f"{f' and {foreign} more' if foreign else ''}, got {size}: it belongs to "
            "another model. Copy the right tokenizer files there.",
            tokenizer="does_not_fit",
        )


def most_tokens(config: ModelConfig, more: int = 0) -> int:
    """The tokens that a tokenizer of a model may have; the engine refuses prompts with those that the model does not know."""
    return config.vocab_size + max(find_family(config.family).num_foreign_tokens, more)


def check_ids(ids: Mapping[str, Any], where: str) -> int:
    """The largest id of a vocabulary, -1 if it is empty. Refuses ids out of range, and very long tokens."""
    for token, index in ids.items():
        if type(index) is not int or not 0 <= index < MAX_VOCAB:
            rule = f"{where}: {shown(token)} must have an id in [0, {MAX_VOCAB}), got {shown(index)}. {CORRECT}"
            raise refused(rule, file="out_of_range")
        if len(token) > MAX_TOKEN:
            rule = f"{where}: tokens must have at most {MAX_TOKEN} characters, got {shown(token)}. {CORRECT}"
            raise refused(rule, file="too_long")
    return max(ids.values(), default=-1)


def check_settings(fields: Mapping[str, Any], where: str) -> int:
    """Checks tokenizer_config.json or special_tokens_map.json; the largest id of an added token."""
    check_fields(fields, CONFIG, where)
    added = fields.get("added_tokens_decoder", {})
    for token in [*added.values(), *fields.values(), *(token for _, token in listed(fields))]:
        if isinstance(token, dict) and "content" in token:
            check_fields(token, ADDED, f"{where}: an added token")
    template = fields.get("chat_template")
    for entry in template if isinstance(template, list) else [template or ""]:
        for text in entry.values() if isinstance(entry, dict) else [entry]:
            check_template(text, f"{where}: chat_template")
    if odd := [index for index in added if not (index.isdecimal() and index.isascii() and len(index) < 10)]:
        rule = f"{where}: added_tokens_decoder must have ids in [0, {MAX_VOCAB}), got {shown(odd[0])}. {CORRECT}"
        raise refused(rule, added_tokens_decoder="out_of_range")
    for token in added.values():
        if not isinstance(token, dict) or "content" not in token:
            rule = f"{where}: added_tokens_decoder must have an object for each id, with content, got {shown(token)}. {CORRECT}"
            raise refused(rule, added_tokens_decoder="invalid")
    return check_ids({f"added_tokens_decoder[{index}]": int(index) for index in added}, where)


def check_template(text: Any, where: str) -> None:
    """Refuses a chat template that is no text, or a very long one."""
    if not isinstance(text, str) or len(text) > MAX_TEMPLATE:
        rule = f"{where} must be a string of at most {MAX_TEMPLATE:,} characters, got {shown(text)}. {CORRECT}"
        raise refused(rule, chat_template="too_long")


def check_definition(fields: Mapping[str, Any], where: str, limit: int) -> int:
    """Checks tokenizer.json; the largest id."""
    check_fields(fields, TOKENIZER, where, ("model",))
    model = fields["model"]
    check_fields(model, MODEL, f"{where}: model", ("vocab",))
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: pairs of a token and its score, in the order of the ids
        if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in vocab):
            rule = f"{where}: model.vocab must be an object, or a list of tokens with their scores. {CORRECT}"
            raise refused(rule, vocab="invalid")
        vocab = dict(zip((pair[0] for pair in vocab), range(len(vocab)), strict=True))
    largest = check_ids(vocab, f"{where}: model.vocab")
    for token in fields.get("added_tokens") or ():
        check_fields(token, ADDED, f"{where}: added_tokens", ("content",))
        largest = max(largest, check_ids({token["content"]: token.get("id")}, f"{where}: added_tokens"))
    for part in ("normalizer", "decoder"):
        check_growth(list(steps(fields.get(part))), f"{where}: {part}")
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        for step in steps(fields.get(part)):
            check_step(step, f"{where}: {part}", limit)
    padding, truncation = fields.get("padding") or {}, fields.get("truncation") or {}
    strategy = padding.get("strategy")
    fixed = strategy.get("Fixed", 0) if isinstance(strategy, dict) else 0
    for name, value in (
        ("padding.strategy.Fixed", fixed),
        ("padding.pad_to_multiple_of", padding.get("pad_to_multiple_of")),
        ("truncation.max_length", truncation.get("max_length")),
    ):
        check_fields({name: value}, {name: nullable(LENGTH)}, where)
    return largest


def check_growth(parts: list[Mapping[str, Any]], where: str) -> None:
    """Refuses replacements that together make a text very much longer."""
    texts = [str(part.get(name, "")) for part in parts for name in ("content", "prepend", "replacement")]
    growth = math.prod(max(len(text), 1) for text in texts)
    if growth > MAX_GROWTH:
        raise refused(
            f"{where} must make at most {MAX_GROWTH} characters of one, got replacements that make {shown(growth)}. {CORRECT}",
            file="too_long",
        )


def check_step(step: Mapping[str, Any], where: str, limit: int) -> None:
    """Refuses a step that would abort the process, never end, or return ids out of range."""
    kind = step.get("type")
    inside = f"{where}: {kind}" if isinstance(kind, str) and kind.isidentifier() else where
    if kind == "Precompiled":
        check_table(step.get("precompiled_charsmap"), f"{inside}.precompiled_charsmap")
    if kind == "FixedLength":
        check_fields(step, {"length": integer(1, MAX_POSITIONS)}, inside)
    if "pattern" in step and step["pattern"] in ("", {"String": ""}, {"Regex": ""}):
        raise refused(f"{inside}.pattern must not be empty, got {shown(step['pattern'])}. {CORRECT}", pattern="invalid")
    for name in ("single", "pair"):
        pieces = step.get(name)
        if isinstance(pieces, list):
            texts = [piece for piece in pieces if isinstance(piece, dict) and "Sequence" in piece]
            if len(pieces) > PIECES or len(texts) > 2:
                raise refused(
                    f"{inside}.{name} must have at most {PIECES} pieces and each text once, got {len(pieces)}, {len(texts)} of "
                    f"them texts. {CORRECT}",
                    **{name: "too_long"},
                )
    for name in ("sep", "cls"):
        if isinstance(pair := step.get(name), list):
            check_fields({name: pair[-1:]}, {name: list_of(integer(0, limit - 1), 1)}, inside)
    tokens = step.get("special_tokens")
    for token in tokens.values() if isinstance(tokens, dict) else ():
        rules = {"ids": list_of(integer(0, limit - 1), PIECES)}
        check_fields(token if isinstance(token, dict) else {}, rules, f"{inside}.special_tokens")


def check_table(text: Any, where: str) -> None:
    """Refuses a table of character sequences (of SentencePiece) that does not have the length which it states."""
    try:
        table = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        table = b""
    size = int.from_bytes(table[:4], "little")  # of the trie; the replacements follow
    if not (0 < size <= len(table) - 4 and size % 4 == 0):
        rule = f"{where} must be a table in base64 whose length is that in its first bytes, got {shown(text)}. {CORRECT}"
        raise refused(rule, file="invalid")
