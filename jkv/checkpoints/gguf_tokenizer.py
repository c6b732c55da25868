"""Builds the tokenizer that a GGUF file describes: the same pieces of text as in the model's own tokenizer.json.

The metadata are written as a tokenizer.json, which is checked as one of a folder is (`jkv.checkpoints.tokenizer_files`). The
file names its pre-tokenizer and leaves the rules to the reader, so they are written down here; unknown names are refused. The
conversion of transformers is not used: it knows no rules for some of them (such as digits in SmolLM), and skips them silently.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.checkpoints.family import MAX_VOCAB
from jkv.checkpoints.gguf_families import FORMS
from jkv.checkpoints.gguf_header import GgufHeader
from jkv.checkpoints.json_files import CORRECT, SWITCH, TEXT, Rule, check_fields, integer, shown
from jkv.checkpoints.tokenizer import make_tokenizer
from jkv.checkpoints.tokenizer_files import check_definition, check_settings, check_size, loading, measured
from jkv.errors import refused
from jkv.model.params import ModelConfig

PREFIX = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are matched whole
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")
END_TEXTS = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"}  # control tokens that end a turn
MAX_PIECE = 128  # characters of a token whose merges are derived

TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}"
LLAMA3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"
QWEN35 = QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TAIL_WITH_SLASH = TAIL.replace(r"[\r\n]*", r"[\r\n/]*")
WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{0}}"
TEKKEN = WORD.replace("{0}", "") + rf"|\p{{N}}|{TAIL_WITH_SLASH}"
GPT4O = WORD.replace("{0}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + rf"|\p{{N}}{{1,3}}|{TAIL_WITH_SLASH}"

DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(pattern: str) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer that splits by a regular expression."""
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [rule, BYTES | {"use_regex": False}]


PRE_TOKENIZERS = {  # by tokenizer.ggml.pre
    "gpt-2": [BYTES],
    **{name: [DIGITS, BYTES] for name in ("smollm", "starcoder", "refact")},
    **{name: split(QWEN2) for name in ("qwen2", "deepseek-r1-qwen")},
    **{name: split(LLAMA3) for name in ("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "glm4")},
    "qwen35": split(QWEN35),
    "tekken": split(TEKKEN),
    "gpt-4o": split(GPT4O),
}
WHOLE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")  # known words are not merged, and a text begins with BOS
COMPOSED = ("qwen2", "qwen35")  # in Unicode's form NFC

STRINGS = Rule("a list of strings", lambda value: isinstance(value, list))


def numbers(kinds: str) -> Rule:
    """An array of numbers of these kinds, as numpy names them."""
    return Rule("an array of numbers", lambda value: getattr(getattr(value, "dtype", None), "kind", "") in tuple(kinds))


RULES = {
    "model": TEXT,
    "pre": TEXT,
    "tokens": STRINGS,
    "merges": STRINGS,
    "scores": numbers("f"),
    "token_type": numbers("iu"),
    "add_bos_token": SWITCH,
    "add_eos_token": SWITCH,
    "add_space_prefix": SWITCH,
}


def read_gguf_tokenizer(header: GgufHeader, config: ModelConfig | None = None) -> Any:
    """The tokenizer in a file, checked against the model's vocabulary if a config is given; None if there is none.

    Raises:
      ValueError: a field breaks a rule, the tokenizer is of an unknown kind, or the libraries cannot load it.
    """
    own = tokenizer_fields(header)
    if own is None:
        return None
    where, tokens = str(header.file), own["tokens"]
    check_size(len(tokens), f"in {where}", config)
    if len(set(tokens)) < len(tokens):
        rule = f"{where}: {PREFIX}tokens must be distinct, got {len(tokens) - len(set(tokens))} twice. {CORRECT}"
        raise refused(rule, tokens="invalid")
    kinds = {"gpt2": byte_definition, "llama": sentencepiece_definition}
    if own["model"] not in kinds:
        raise refused(
            f"{where}: {PREFIX}model must be one of {', '.join(kinds)}, got {shown(own['model'])}. Use the model's Hugging "
            "Face folder.",
            model="unsupported",
        )
    definition = kinds[own["model"]](own, where)
    definition |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(own, header)}
    definition["post_processor"] = frame(own)
    ids = {name: own.get(f"{field}_token_id") for name, field in SPECIAL.items()}
    special = {name: None if index is None else tokens[index] for name, index in ids.items()}
    settings = special | {"chat_template": header.metadata.get("tokenizer.chat_template")}
    check_definition(definition, where, MAX_VOCAB if config is None else config.vocab_size)
    check_settings(settings, f"{where}: tokenizer")
    with loading(f"in {where}", "Use the model's Hugging Face folder."):
        tokenizer = make_tokenizer(definition, settings, where)
        size = measured(tokenizer, len(tokens) - 1, is_known=True)
    check_size(size, f"in {where}", config)
    return tokenizer


def tokenizer_fields(header: GgufHeader) -> dict[str, Any] | None:
    """The checked fields of the tokenizer, without their prefix; None if there are none."""
    fields = {name.removeprefix(PREFIX): value for name, value in header.metadata.items() if name.startswith(PREFIX)}
    if fields.get("model", "none") in ("none", "no_vocab"):
        return None
    where = f"{header.file}: {PREFIX.removesuffix('.')}"
    check_fields(fields, RULES, where, ("model", "tokens"))
    count = len(fields["tokens"])
    ids = {f"{name}_token_id": integer(0, count - 1) for name in (*SPECIAL.values(), *ENDS)}
    check_fields(fields, ids, where)
    for name in ("scores", "token_type"):
        if name in fields and len(fields[name]) != count:
            rule = f"{where}: {name} must have {count} values, as tokens has; got {len(fields[name])}. {CORRECT}"
            raise refused(rule, **{name: "does_not_fit"})
    return fields | ({"token_type": fields["token_type"].tolist()} if "token_type" in fields else {})


def read_gguf_end_ids(header: GgufHeader) -> tuple[int, ...]:
    """The end tokens: of the text, of a turn and of a message, and control tokens that are known to end a turn."""
    fields = tokenizer_fields(header) or {}
    found = [fields[f"{name}_token_id"] for name in ENDS if f"{name}_token_id" in fields]
    kinds = fields.get("token_type", [])
    texts = zip(fields.get("tokens", []), kinds, strict=False)
    control = [index for index, (text, kind) in enumerate(texts) if kind == CONTROL and text in END_TEXTS]
    return tuple(dict.fromkeys([*found, *control]))


# The parts of a tokenizer.json


def byte_definition(own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The vocabulary, merges and pre-tokenizer of a byte-level BPE."""
    name = own.get("pre", "none")
    if name not in PRE_TOKENIZERS:
        raise refused(
            f"{where}: {PREFIX}pre must be one of {', '.join(PRE_TOKENIZERS)}, got {shown(name)}. Use the model's Hugging Face "
            "folder.",
            pre="unsupported",
        )
    model = {
        "type": "BPE",
        "vocab": vocabulary(own),
        "merges": written_merges(own, where),
        "ignore_merges": name in WHOLE,
        "byte_fallback": False,
    }
    return {
        "model": model,
        "normalizer": {"type": "NFC"} if name in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]},
        "decoder": BYTES,
    }


def sentencepiece_definition(own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The vocabulary and merges of a BPE of SentencePiece, in which a space is U+2581 and unknown characters are bytes."""
    has_prefix = own.get("add_space_prefix", True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    steps = [*([{"type": "Prepend", "prepend": "\u2581"}] if has_prefix else []), space]
    decoders = [space | {"pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = own.get("unknown_token_id")
    model = {
        "type": "BPE",
        "vocab": vocabulary(own),
        "merges": written_merges(own, where) if "merges" in own else derived_merges(own, where),
        "unk_token": None if unknown is None else own["tokens"][unknown],
        "fuse_unk": True,
        "byte_fallback": True,
    }
    return {
        "model": model,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def vocabulary(own: Mapping[str, Any]) -> dict[str, int]:
    """The id of each token."""
    return {token: index for index, token in enumerate(own["tokens"])}


def written_merges(own: Mapping[str, Any], where: str) -> list[list[str]]:
    """The merges in the file: two tokens with a space between them, the first of which may begin with a space."""
    check_fields(own, {"merges": RULES["merges"]}, f"{where}: {PREFIX.removesuffix('.')}", ("merges",))
    pairs = []
    for merge in own["merges"]:
        at = merge.find(" ", 1)
        if at < 1:
            raise refused(f"{where}: {PREFIX}merges must be pairs of tokens, got {shown(merge)}. {CORRECT}", merges="invalid")
        pairs.append([merge[:at], merge[at + 1 :]])
    return pairs


def derived_merges(own: Mapping[str, Any], where: str) -> list[list[str]]:
    """The merges that the scores of SentencePiece stand for: a token of a higher score is merged first."""
    inside = f"{where}: {PREFIX.removesuffix('.')}"
    check_fields(own, {"scores": RULES["scores"]}, inside, ("scores",))
    scores, tokens, vocab = own["scores"], own["tokens"], vocabulary(own)
    if not (finite := np.isfinite(scores)).all():
        worst = int(finite.argmin())
        rule = f"{inside}: scores must be finite, got {scores[worst]} of {shown(tokens[worst])}. {CORRECT}"
        raise refused(rule, scores="out_of_range")
    if len(longest := max(tokens, key=len)) > MAX_PIECE:
        rule = f"{inside}: tokens must have at most {MAX_PIECE} characters, got {shown(longest)}. {CORRECT}"
        raise refused(rule, tokens="too_long")
    find, found = vocab.get, []
    for token, score in zip(tokens, scores.tolist(), strict=True):
        for at in range(1, len(token)):
            left, right = find(token[:at]), find(token[at:])
            if left is not None and right is not None:
                found.append((-score, -at, at - len(token), left, right))
    return [[tokens[left], tokens[right]] for *_, left, right in sorted(found)]


def added_tokens(own: Mapping[str, Any], header: GgufHeader) -> list[dict[str, Any]]:
    """The tokens that are matched whole, before any rule splits the text."""
    form = FORMS.get(str(header.metadata.get("general.architecture")))
    strips = own["model"] == "llama" and form is not None and form.strips
    kept = ("<unk>", "<s>", "<|endoftext|>")
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and token not in kept,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for index, (token, kind) in enumerate(zip(own["tokens"], own.get("token_type", []), strict=False))
        if kind in (CONTROL, USER_DEFINED) and token
    ]


def frame(own: Mapping[str, Any]) -> dict[str, Any] | None:
    """The post-processor, which adds the tokens that begin and end a text."""
    defaults = {"bos": own["model"] == "llama" or own.get("pre") in WHOLE, "eos": False}
    ids = {name: own.get(f"{name}_token_id") for name in defaults if own.get(f"add_{name}_token", defaults[name])}
    ends = {name: own["tokens"][index] for name, index in ids.items() if index is not None}
    if not ends:
        return None

    def pieces(letter: str, kind: int) -> list[dict[str, Any]]:
        around = {name: [{"SpecialToken": {"id": token, "type_id": kind}}] for name, token in ends.items()}
        return [*around.get("bos", []), {"Sequence": {"id": letter, "type_id": kind}}, *around.get("eos", [])]

    table = {token: {"id": token, "ids": [ids[name]], "tokens": [token]} for name, token in ends.items()}
    return {
        "type": "TemplateProcessing",
        "single": pieces("A", 0),
        "pair": [*pieces("A", 0), *pieces("B", 1)],
        "special_tokens": table,
    }
