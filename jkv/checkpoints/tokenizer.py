"""The tokenizer of a model: what the `tokenizers` library makes of a definition, with the interface of transformers.

Model-specific classes of transformers, such as LlamaTokenizer, build the pipeline of their family and ignore the pipeline of
tokenizer.json, each version in another way. So none of them is used. Token ids and texts come from `tokenizers.Tokenizer` with
the definition. Special tokens, the chat template and the tokens at both ends of a text come from the settings.

What callers get is a `CheckpointTokenizer`, which has what decoding needs. transformers takes a second to import, so it is left
to the first caller who asks for more, such as a trainer or an evaluation harness.
"""

import json
import numbers
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jkv.checkpoints.huggingface import transformers
from jkv.checkpoints.json_files import shown
from jkv.checkpoints.long_texts import encoding_of, text_of
from jkv.errors import refused

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED = ("extra_special_tokens", "model_specific_special_tokens", "additional_special_tokens")  # the last is the oldest name
FLAGS = ("model_max_length", "padding_side", "truncation_side", "split_special_tokens", "model_input_names", "chat_template")
BEGINNING = 256  # characters of a text, which hold its first token
MATCHING = ("single_word", "lstrip", "rstrip", "normalized")  # how an added token is found in a text

Fields = Mapping[str, Any]
CHANGING = threading.Lock()  # held while a tokenizer changes its class


def make_tokenizer(definition: Fields, settings: Fields, where: str, added: Mapping[int, Fields] | None = None) -> Any:
    """The tokenizer that a checked tokenizer.json defines, with the special tokens and flags of tokenizer_config.json.

    Neither truncates nor pads, whatever the definition says: a prompt is encoded whole. Texts are never "cleaned up"
    (`clean_up_tokenization_spaces`), which would remove spaces that the model wrote.

    Args:
      definition: the fields of tokenizer.json.
      settings: the fields of tokenizer_config.json; those that would choose another pipeline are not read.
      where: the folder or file, for errors and as the tokenizer's `name_or_path`.
      added: tokens that other files add, by id.

    Raises:
      ValueError: an added token has another id than the library gives it.
      Exception: whatever the `tokenizers` library raises for a definition that it cannot read.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(json.dumps({**definition, "truncation": None, "padding": None}))
    for token in definition.get("added_tokens") or ():
        check_id(backend, token["content"], token.get("id"), where)
    add_tokens(backend, sorted((added or {}).items()), where)
    pad = content(settings.get("pad_token"))
    is_word = pad is not None and is_ordinary(backend, pad)  # it stays one: a special token is left out of texts
    special = {name: value for name, value in settings.items() if not (is_word and name == "pad_token")}
    add_tokens(backend, ((None, token) for token in special_tokens(special)), where)
    backend.post_processor = framed(definition.get("post_processor"), settings, backend)
    options: dict[str, Any] = {name: settings[name] for name in FLAGS if settings.get(name) is not None}
    options |= {name: content(value) for name, value in settings.items() if is_named(name, value)}
    options["extra_special_tokens"] = list(dict.fromkeys(content(token) for name, token in listed(settings) if name is None))
    options["model_specific_special_tokens"] = {name: content(token) for name, token in listed(settings) if name is not None}
    return CheckpointTokenizer(backend, options, where)


class CheckpointTokenizer:
    """A `tokenizers.Tokenizer` with a checkpoint's special tokens and chat template.

    It answers as `PreTrainedTokenizerFast` of transformers does. A method, an argument or a change that is not defined here
    turns it into one (`as_transformers`). To `isinstance` it is one already.

    Args:
      backend: the pipeline, with all special tokens.
      options: arguments of `PreTrainedTokenizerFast`.
      name_or_path: where the tokenizer is from.
    """

    backend_tokenizer: Any
    special_tokens_map: dict[str, str]
    chat_template: str | dict[str, str] | None
    name_or_path: str

    def __init__(self, backend: Any, options: Mapping[str, Any], name_or_path: str) -> None:
        template, named = options.get("chat_template"), options["model_specific_special_tokens"]
        backend.encode_special_tokens = options.get("split_special_tokens", False)
        vars(self).update(
            backend_tokenizer=backend,
            options=options,
            name_or_path=name_or_path,
            chat_template={each["name"]: each["template"] for each in template} if isinstance(template, list) else template,
            special_tokens_map={name: options[name] for name in NAMED if name in options}
            | {name: token for name, token in options.items() if name.endswith("_token")}
            | named,
        )

    # Methods use what a PreTrainedTokenizerFast has too, because one that a caller holds may outlive the change of class.

    def encode(self, text: Any, *pair: Any, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """The token ids of a text."""
        if pair or options or not isinstance(text, str):
            return list(as_transformers(self).encode(text, *pair, add_special_tokens=add_special_tokens, **options))
        return list(encoding_of(self.backend_tokenizer, text, add_special_tokens).ids)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The text of token ids, or of one."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, numbers.Integral) else list(ids)
        if options or not (ids == [] or isinstance(ids[0], numbers.Integral)):
            return as_transformers(self).decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return text_of(self.backend_tokenizer, ids, skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Any, **options: Any) -> Any:
        """The vocabulary's entry of a token id, or the entries of several."""
        if options or not isinstance(ids, numbers.Integral):
            return as_transformers(self).convert_ids_to_tokens(ids, **options)
        return self.backend_tokenizer.id_to_token(int(ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of an entry of the vocabulary, or the ids of several; that of the unknown token for another text."""
        if isinstance(tokens, str):
            index = self.backend_tokenizer.token_to_id(tokens)
            unknown = self.special_tokens_map.get("unk_token")
            return self.backend_tokenizer.token_to_id(unknown) if index is None and unknown is not None else index
        return None if tokens is None else [self.convert_tokens_to_ids(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens, added ones too."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def get_chat_template(self, *names: Any, **options: Any) -> str:
        """The chat template that is used where none is named."""
        if isinstance(self.chat_template, str) and not (names or options):
            return self.chat_template
        return str(as_transformers(self).get_chat_template(*names, **options))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The added tokens by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens that the settings name."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.options["extra_special_tokens"]]))

    @property
    def all_special_ids(self) -> list[int]:
        """Their ids."""
        return list(self.convert_tokens_to_ids(self.all_special_tokens))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return as_transformers(self)(*texts, **options)

    def __getattr__(self, name: str) -> Any:
        if name.removesuffix("_id") in NAMED:
            token = self.special_tokens_map.get(name.removesuffix("_id"))
            return self.convert_tokens_to_ids(token) if name.endswith("_id") else token
        if name.startswith("__"):  # Python asks whether there is such a method
            raise AttributeError(name)
        return getattr(as_transformers(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "chat_template":
            vars(self)[name] = value
        else:
            setattr(as_transformers(self), name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {**self.options, "chat_template": self.chat_template}
        return CheckpointTokenizer, (self.backend_tokenizer, options, self.name_or_path)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For `isinstance`: only who has imported transformers can ask for its class."""
        return transformers().PreTrainedTokenizerFast if "transformers" in sys.modules else CheckpointTokenizer


def as_transformers(tokenizer: CheckpointTokenizer) -> Any:
    """The same object, once it has become a `PreTrainedTokenizerFast`."""
    with CHANGING:
        if type(tokenizer) is CheckpointTokenizer:
            options = {**tokenizer.options, "chat_template": tokenizer.chat_template}
            pad = options.get("pad_token")
            is_word = pad is not None and is_ordinary(tokenizer.backend_tokenizer, pad)
            if is_word:
                del options["pad_token"]  # the constructor would make it special
            kind = transformers().PreTrainedTokenizerFast
            whole = kind(tokenizer_object=tokenizer.backend_tokenizer, clean_up_tokenization_spaces=False, **options)
            whole.name_or_path = tokenizer.name_or_path  # the constructor would ask the hub about this name
            if is_word:
                whole.pad_token = pad
            vars(tokenizer).update(vars(whole))  # before the class, for methods that run in other threads
            vars(object)["__class__"].__set__(tokenizer, kind)
    return tokenizer


def encode_whole(tokenizer: Any, text: str) -> Any:
    """The token ids of a whole text: with the tokens that the tokenizer adds at its ends, unless it begins with them already.

    `tokenizer` may be any that has `encode`.
    """
    return tokenizer.encode(text, **({"add_special_tokens": False} if is_framed(tokenizer, text) else {}))


def is_framed(tokenizer: Any, text: str) -> bool:
    """Whether a text begins with the token that the tokenizer puts before texts: BOS, or another such as `[gMASK]`.

    A chat template writes it into the text that it renders; a second one would change every completion.
    """
    begin, first = getattr(tokenizer, "bos_token", None), list(tokenizer.encode(""))[:1]
    if isinstance(begin, str) and begin and text.startswith(begin):
        return True
    return bool(first) and list(tokenizer.encode(text[:BEGINNING], add_special_tokens=False))[:1] == first


# Special tokens


def is_named(name: str, value: Any) -> bool:
    """Whether a setting names a special token, such as `eos_token` or, of some models, `image_token`."""
    return name.endswith("_token") and content(value) is not None


def is_ordinary(backend: Any, text: str) -> bool:
    """Whether a token is a piece of text like any other: one of the vocabulary, and not an added one."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    return backend.token_to_id(text) is not None and text not in added


def content(token: Any) -> str | None:
    """The text of a token in a configuration file, where it is a string or an object; None for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def listed(settings: Fields) -> Iterator[tuple[str | None, Any]]:
    """The tokens in the lists of special tokens, and their names where it is an object with a name for each."""
    for tokens in filter(None, map(settings.get, LISTED)):
        yield from tokens.items() if isinstance(tokens, dict) else ((None, token) for token in tokens)


def special_tokens(settings: Fields) -> Iterator[dict[str, Any]]:
    """The special tokens that the settings name, with what the settings say of each."""
    named = [value for name, value in settings.items() if is_named(name, value)]
    for token in [*named, *(token for _, token in listed(settings))]:
        if (text := content(token)) is not None:
            yield {**(token if isinstance(token, dict) else {}), "content": text, "special": True}


def add_tokens(backend: Any, tokens: Iterable[tuple[int | None, Fields]], where: str) -> None:
    """Adds tokens that the definition lacks; one that it has keeps its id and how it is found, and may become special.

    Args:
      tokens: with the id of each, None if the file names none.

    Raises:
      ValueError: a token cannot have its id.
    """
    from tokenizers import AddedToken

    known = {own.content: own for own in backend.get_added_tokens_decoder().values()}
    for index, token in tokens:
        text = token["content"]
        if text in known:
            fields = {name: getattr(known[text], name) for name in MATCHING}
            is_same = known[text].special or not token.get("special")
        else:
            fields, is_same = (
                {name: token[name] for name in MATCHING if name in token},
                not text,
            )  # libraries skip the empty one
        if not is_same:
            known[text] = AddedToken(text, **fields, special=bool(token.get("special")))
            backend.add_tokens([known[text]])
        check_id(backend, text, index, where)


def check_id(backend: Any, text: str, index: int | None, where: str) -> None:
    """Refuses an added token that a file gives another id than the library, which numbers them without gaps."""
    if text and index not in (None, backend.token_to_id(text)):
        raise refused(
            f"{where}: the added token {shown(text)} must have the id that follows from tokenizer.json, "
            f"{backend.token_to_id(text)}, got {index}: the files belong to two models. Copy the right ones there.",
            added_tokens="conflict",
        )


# The tokens at both ends of a text


def framed(post_processor: Fields | None, settings: Fields, backend: Any) -> Any:
    """The post-processor of a definition, changed where `add_bos_token` or `add_eos_token` ask for something else.

    A setting that is absent or null leaves what the definition does.
    """
    from tokenizers import Tokenizer

    wanted = {}
    for end in ("bos", "eos"):
        text, asked = content(settings.get(f"{end}_token")), settings.get(f"add_{end}_token")
        if text and asked is not None:
            wanted[end] = (text, asked)
    if not wanted:
        return backend.post_processor
    parts = [dict(step) for step in steps(post_processor) if step.get("type") != "Sequence"]
    frame = next((part for part in parts if part.get("type") == "TemplateProcessing"), None)
    if frame is None:
        frame = {"type": "TemplateProcessing", "single": [sequence("A", 0)], "special_tokens": {}}
        frame["pair"] = [sequence("A", 0), sequence("B", 1)]
        parts.append(frame)
    for name in ("single", "pair"):
        for end, (text, asked) in wanted.items():
            frame[name] = with_end(frame[name], end, text, asked)
    tokens = {text: {"id": text, "ids": [backend.token_to_id(text)], "tokens": [text]} for text, _ in wanted.values()}
    frame["special_tokens"] = {**tokens, **frame["special_tokens"]}
    fields = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}}
    fields["post_processor"] = {"type": "Sequence", "processors": parts}
    return Tokenizer.from_str(json.dumps(fields)).post_processor


def steps(part: Any) -> Iterator[Fields]:
    """The steps of a normalizer, pre-tokenizer, post-processor or decoder, those inside of a sequence too."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            for inner in part.get(name) or () if isinstance(part.get(name), list) else ():
                yield from steps(inner)


def sequence(letter: str, kind: int) -> dict[str, Any]:
    """The place of a text in a template."""
    return {"Sequence": {"id": letter, "type_id": kind}}


def with_end(pieces: list[Fields], end: str, text: str, asked: bool) -> list[Fields]:
    """A template with the token before ("bos") or after ("eos") the texts, or without it.

    >>> with_end([sequence("A", 0)], "eos", "</s>", True)[-1]
    {'SpecialToken': {'id': '</s>', 'type_id': 0}}
    """
    places = [index for index, piece in enumerate(pieces) if "Sequence" in piece]
    first, last = (places[0], places[-1] + 1) if places else (0, 0)
    head, body, tail = pieces[:first], pieces[first:last], pieces[last:]
    outer = head if end == "bos" else tail
    has = [piece.get("SpecialToken", {}).get("id") == text for piece in outer]
    if asked and not any(has):
        token = {"SpecialToken": {"id": text, "type_id": 0}}
        outer = [token, *outer] if end == "bos" else [*outer, token]
    if not asked:
        outer = [piece for piece, is_token in zip(outer, has, strict=True) if not is_token]
    return [*outer, *body, *tail] if end == "bos" else [*head, *body, *outer]
