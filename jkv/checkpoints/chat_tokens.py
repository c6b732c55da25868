"""Token ids of rendered chats, in which only the template's own text becomes control tokens.

A user who writes `<|im_end|>` gets the tokens of ten characters, not the end of a turn. The text around it is tokenized by the
same library and the same file: the control tokens of a second tokenizer, the twin, have secret names, which are written where
the template wrote the public ones. So nothing that a user sends, whatever a normalizer makes of it, can be one of them, and all
other text keeps its tokens, spaces included.
"""

import functools
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jkv.checkpoints.chat_template import OWN, USER, ChatText
from jkv.checkpoints.long_texts import encoding_of
from jkv.checks import shown
from jkv.errors import refused

SIGN = re.compile(r"[<>\[\]{}|\uff5c]")  # without which an added token is a word
HTML = re.compile(
    r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|sub|sup|code|p|br|li|ul|ol|pre)>"
)
OURS = frozenset(OWN)
LETTERS = str.maketrans("0123456789", "ghijklmnop")  # no normalizer changes them
REMEDY = "Pass parse_special=True to read such text as control tokens, wherever it comes from."


class Place(NamedTuple):
    """A control token in a text: from its first character to behind its last one."""

    token: int
    start: int
    end: int


class Twin(NamedTuple):
    """A tokenizer whose control tokens have other names.

    Attributes:
      tokenizer: a `tokenizers.Tokenizer`.
      names: the name of each control token.
    """

    tokenizer: Any
    names: Mapping[int, str]


def backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` behind a tokenizer of transformers; None behind one of another kind."""
    return getattr(tokenizer, "backend_tokenizer", None)


def encode_chat(tokenizer: Any, text: ChatText, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a rendered chat, which has its special tokens already unless more shall be added.

    Raises:
      ValueError: a control token comes from an operation of the template that hides whether the template or a user wrote it; or
        a user wrote one, and the tokenizer is none of the tokenizers library.
    """
    backend = backend_of(tokenizer)
    if backend is None:
        check_marks(text, getattr(tokenizer, "all_special_tokens", ()))
        return list(tokenizer.encode(str(text), add_special_tokens=add_special_tokens))
    if backend.truncation or backend.padding:
        backend.no_truncation()
        backend.no_padding()
    control = control_tokens(backend)
    encoding = encoding_of(backend, str(text), add_special_tokens=False)
    found = places(encoding, text, control)
    origins = {frozenset(text.marks[place.start : place.end]) for place in found}
    if not origins <= {OURS}:
        encoding = twin_encoding(backend, text, own_of(backend, text, found, origins, control), control)
    return list(backend.post_process(encoding, None, add_special_tokens).ids)


def own_of(
    backend: Any, text: ChatText, found: list[Place], origins: set[frozenset[str]], control: Mapping[int, str]
) -> list[Place]:
    """The control tokens that the template wrote, where a text has others too."""
    if any(USER not in origin for origin in origins - {OURS}):
        raise refused(
            "A chat template must make control tokens of its own text, or by +, ~, join and the like; this one makes one by an "
            f"operation that hides whether it is the template's or a user's. {REMEDY}",
            chat_template="unsupported",
        )
    if any(OWN in origin for origin in origins - {OURS}):  # one that begins in a user's text may hide one of the template
        found = places_of_own(backend, text, control)
    return [place for place in found if frozenset(text.marks[place.start : place.end]) == OURS]


def encode_reply(tokenizer: Any, reply: str, parse_special: bool = False) -> list[int]:
    """Token ids of a text that follows others, such as what a tool returned; no control tokens, unless `parse_special`."""
    if parse_special:
        return list(tokenizer.encode(reply, add_special_tokens=False))
    return encode_chat(tokenizer, ChatText(reply, USER * len(reply)))


def check_marks(text: ChatText, control: Iterable[str]) -> None:
    """Refuses a text in which a user wrote a control token."""
    for mark in filter(None, control):
        for found in re.finditer(re.escape(mark), text):
            if frozenset(text.marks[found.start() : found.end()]) != OURS:
                raise refused(
                    "Messages must not hold the text of control tokens where the tokenizer is none of the tokenizers library; "
                    f"got {shown(mark)}. Remove it. {REMEDY}",
                    messages="unsupported",
                )


def control_tokens(backend: Any) -> dict[int, str]:
    """The tokens that steer a model, and their texts: special ones, and added ones that look like control tokens.

    Added tokens that are white space, letters or HTML tags are ordinary text: many tokenizers have some, such as Gemma's.
    """
    found = {}
    for index, token in backend.get_added_tokens_decoder().items():
        is_ordinary = not SIGN.search(token.content) or HTML.fullmatch(token.content)
        if token.content.strip() and (token.special or not is_ordinary):
            found[index] = token.content
    return found


def places(encoding: Any, text: str, control: Mapping[int, str], shift: int = 0) -> list[Place]:
    """The control tokens of an encoded text, without the white space that they take with them."""
    found = []
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if token in control:
            part = text[start:end]
            start += len(part) - len(part.lstrip())
            found.append(Place(token, shift + start, shift + start + len(part.strip())))
    return found


def places_of_own(backend: Any, text: ChatText, control: Mapping[int, str]) -> list[Place]:
    """The control tokens in what the template wrote, as if there were nothing between."""
    found = []
    for run in re.finditer(re.escape(OWN) + "+", text.marks):
        part = text[run.start() : run.end()]
        found += places(encoding_of(backend, part, add_special_tokens=False), part, control, run.start())
    return found


def twin_encoding(backend: Any, text: ChatText, own: Sequence[Place], control: Mapping[int, str]) -> Any:
    """The encoding of a text in which only these places are control tokens."""
    twin, parts, last = twin_of(backend, tuple(control.items())), [], 0
    own = [place for place in own if is_same(backend, text[place.start : place.end], control[place.token])]
    for place in own:
        parts += [text[last : place.start], twin.names[place.token]]
        last = place.end
    encoding = encoding_of(twin.tokenizer, "".join([*parts, text[last:]]), add_special_tokens=False)
    if Counter(place.token for place in own) - Counter(encoding.ids):
        raise refused(
            "The tokenizer must find each control token wherever the template writes it; it finds one depending on the text "
            f"around it, and a message has the text of control tokens. Remove that. {REMEDY}",
            chat_template="unsupported",
        )
    return encoding


def is_same(backend: Any, text: str, control: str) -> bool:
    """Whether a text is that of a control token; not so where the token means an unknown character."""
    normalizer = backend.normalizer
    return text == control or (normalizer is not None and normalizer.normalize_str(text) == normalizer.normalize_str(control))


@functools.lru_cache(maxsize=4)
def twin_of(backend: Any, control: tuple[tuple[int, str], ...]) -> Twin:
    """The tokenizer with these control tokens under other names, in its vocabulary too: no text is one of them."""
    secret = secrets.token_hex(8)
    names = {text: f"{secret}{number:08x}".translate(LETTERS) for number, (_, text) in enumerate(control)}
    fields = json.loads(backend.to_str())
    model = fields["model"]
    for token in fields["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "single_word": False}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): index for text, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not names.keys() & pieces_of(merge, model)]
    tokenizer = type(backend).from_str(json.dumps(fields | {"truncation": None, "padding": None, "post_processor": None}))
    assert all(tokenizer.token_to_id(names[text]) == index for index, text in control)
    return Twin(tokenizer, {index: names[text] for index, text in control})


def pieces_of(merge: str | list[str], model: Mapping[str, Any]) -> set[str]:
    """The three pieces of a merge of BPE: its parts, and what they become."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right.removeprefix(model.get("continuing_subword_prefix") or "")}
