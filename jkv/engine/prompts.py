"""Prompts: texts, conversations or token ids become checked token ids."""

import functools
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jkv.checkpoints.chat_template import ChatText, has_chat_template, render_chats
from jkv.checkpoints.chat_tokens import encode_chat
from jkv.checkpoints.tokenizer import encode_whole
from jkv.checks import check_length, shown
from jkv.errors import Code, InputError
from jkv.limits import MOST_SAMPLES
from jkv.model.padding import check_not_padded, parts_of, without_padding
from jkv.model.params import Model

MOST_MESSAGES = 10_000  # of a conversation
LONGEST_TOKEN = 256  # characters: a text of more for each position of the model cannot fit, and is not encoded
RULE = "A prompt must be a string, a list of chat messages, or a flat sequence of token ids"


def encode_prompts(
    model: Model, prompt_or_prompts: Any, parse_special: bool = False, mask: Any = None, pad_id: int | None = None
) -> list[np.ndarray]:
    """Token ids of every prompt, checked. Sizes are checked before anything is copied or encoded.

    A prompt is a text, a list of token ids, or a conversation: a list of messages like `{"role": "user", "content": "..."}`,
    which the chat template of the tokenizer turns into a text that ends where the model's answer begins. Only the template's
    own text becomes control tokens, unless `parse_special` lets messages make them too (`jkv.checkpoints.chat_tokens`).

    Rows of ids that are padded have a mask (`jkv.model.padding`), their own or in what a tokenizer returned. `pad_id` is their
    padding token, if the caller knows it.
    """
    prompt_or_prompts, mask = parts_of(prompt_or_prompts, mask)
    if mask is not None:
        if isinstance(prompt_or_prompts, str) or is_endless(prompt_or_prompts):
            rule = "A prompt mask is of token ids; got {got}. Leave the mask out."
            raise InputError(rule, field="mask", code="conflict", got=shown(prompt_or_prompts))
        check_length("prompts", prompt_or_prompts, max(MOST_SAMPLES, model.config.max_positions), "lists of token ids")
        prompts = without_padding(prompt_or_prompts, mask)
        return [encode_prompt(model, i, prompt) for i, prompt in enumerate(prompts)]
    if isinstance(prompt_or_prompts, str):
        return [encode_prompt(model, 0, prompt_or_prompts)]
    if is_endless(prompt_or_prompts):
        raise InputError(RULE + "; got {got}.", field="prompt", code="wrong_type", got=shown(prompt_or_prompts))
    if num_elements(prompt_or_prompts) == 0:
        rule = "There must be at least one prompt, and a prompt at least one token; got none."
        raise InputError(rule, field="prompt", code="missing")
    first = next(iter(prompt_or_prompts))
    if not isinstance(first, str) and (np.isscalar(first) or getattr(first, "shape", None) == ()):
        return [encode_prompt(model, 0, prompt_or_prompts)]  # a flat sequence of token ids
    check_length("prompts", prompt_or_prompts, MOST_SAMPLES, "texts, conversations or lists of token ids")
    prompts = [prompt_or_prompts] if isinstance(first, Mapping) else list(prompt_or_prompts)
    check_not_padded(model, prompts, pad_id)
    chats = {i: prompt for i, prompt in enumerate(prompts) if is_conversation(prompt)}
    texts = dict(zip(chats, render(model, chats, parse_special), strict=True))
    return [encode_prompt(model, i, texts.get(i, prompt), is_chat=i in texts) for i, prompt in enumerate(prompts)]


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and any(isinstance(message, Mapping) for message in prompt[:1])


def render(model: Model, chats: Mapping[int, Any], parse_special: bool = False) -> list[str]:
    """The texts of conversations, by the model's chat template; with `parse_special` they do not know what users wrote.

    Raises:
      ValueError: no template, a message without role or content, or a template that refuses a conversation.
    """
    if not chats:
        return []
    if not has_chat_template(model.tokenizer):
        rule = "Chat messages need a tokenizer with a chat template; this model has none. Pass a text."
        raise InputError(rule, field="prompt", code="unsupported")
    for index, messages in chats.items():
        check_messages(model, index, messages)
    rendered = render_chats(model.tokenizer, list(chats.values()), add_generation_prompt=True)
    return list(map(str, rendered)) if parse_special else list(rendered)


def check_messages(model: Model, index: int, messages: Sequence[Any]) -> None:
    """Refuses what is no conversation, or is too long for the model whatever its tokens are."""
    rule, length = 'A message must be a dictionary with the texts "role" and "content"', 0
    check_length(f"prompt {index}", messages, MOST_MESSAGES, "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise bad_message(rule, i, index, f"is {shown(message)}")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                got = f"the {name} {shown(message[name])}" if name in message else f"no {name}"
                raise bad_message(rule, i, index, f"has {got}")
        for name, value in message.items():
            if name == "tool_calls" and isinstance(value, list):
                length += len(json.dumps(value, default=str))
                continue
            if not isinstance(name, str) or not isinstance(value, str | None):
                raise bad_message("The fields of a message must be texts", i, index, f"has {shown(value)}")
            length += len(value or "")
    if length > LONGEST_TOKEN * model.config.max_positions:
        raise too_many_characters("conversation", model, index, length)


@functools.cache
def warn_of_bare_text(name: str) -> None:
    """Warns, once for each model, that a chat model gets a bare text."""
    warnings.warn(
        f"{name or 'The model'} is a chat model, and a prompt is a bare text: it is completed as it is, without the model's "
        'chat template. To ask a question, pass messages: [{"role": "user", "content": "..."}] (at the terminal: --chat).',
        stacklevel=2,
    )


def is_endless(values: Any) -> bool:
    """Whether it has no length or no order: a number, an iterator, bytes, a set, a table."""
    return (
        not hasattr(values, "__iter__") or not hasattr(values, "__getitem__") or isinstance(values, bytes | bytearray | Mapping)
    )


def num_elements(values: Any, rule: str = RULE, field: str = "prompt") -> int:
    """The length of a sequence; a very large number for one whose length Python cannot return.

    Raises:
      ValueError: an array without a dimension, which breaks `rule`.
    """
    try:
        return len(values)
    except OverflowError:  # such as that of range(2**64)
        return sys.maxsize
    except TypeError:  # an array without a dimension
        raise InputError(rule + "; got {got}.", field=field, code="wrong_type", got=shown(values)) from None


def bad_message(rule: str, i: int, index: int, got: str) -> InputError:
    """The error about message i of a prompt."""
    return InputError(
        rule + "; message {i} of prompt {index} {got}.", field="prompt", code="wrong_type", i=i, index=index, got=got
    )


def too_many_characters(what: str, model: Model, index: int, length: int) -> InputError:
    """The error about a text that is too long for the model whatever its tokens are."""
    rule = "A {what} must fit the model's {most} positions; prompt {index} has {length:,} characters. Shorten it."
    most = model.config.max_positions
    return InputError(rule, field="prompt", code="does_not_fit", what=what, most=most, index=index, length=length)


def encode_prompt(model: Model, index: int, prompt: Any, is_chat: bool = False) -> np.ndarray:
    """One prompt's token ids; a chat's text holds its special tokens already."""
    if isinstance(prompt, str):
        prompt = encode_text(model, index, prompt, is_chat)
    config = model.config
    if not is_endless(prompt) and num_elements(prompt) > config.max_positions:
        raise too_long(index, f"{num_elements(prompt):,}", None, config.max_positions)
    return check_ids(prompt, RULE, f"prompt {index}", config.vocab_size)


def check_ids(values: Any, rule: str, name: str, vocab_size: int, field: str = "prompt") -> np.ndarray:
    """Token ids of a model, `[T]` int32, T > 0. The errors about the `field` begin with `rule`, and call the ids `name`.

    Raises:
      ValueError: none, something else than whole numbers, more than one dimension, or ids out of range.

    >>> check_ids([5, 1], "A prompt is a list of ids", "prompt 0", vocab_size=10)
    array([5, 1], dtype=int32)
    """

    def error(code: Code, rest: str, got: str = "") -> InputError:
        return InputError(rest, field=field, code=code, name=name, got=got, size=vocab_size)

    out_of_vocabulary = "Token ids must lie in [0, {size}); {name} holds {got}. Correct it."
    if isinstance(values, str) or is_endless(values):
        raise error("wrong_type", rule + "; {name} is {got}.", shown(values))
    try:
        ids = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise error("wrong_type", rule + "; {name} is ragged. Flatten it.") from None
    if ids.size == 0:
        raise error("missing", rule + ", at least one token; {name} is empty.")
    if ids.dtype == object and ids.ndim == 1 and all(isinstance(token, int) for token in ids):
        raise error("out_of_range", out_of_vocabulary, shown(max(ids, key=abs)))
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise error("wrong_type", rule + "; {name} is {got}. Flatten it, or convert it.", f"{ids.dtype}{list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise error("out_of_range", out_of_vocabulary, str(ids[(ids < 0) | (ids >= vocab_size)][0]))
    return ids.astype(np.int32)


def encode_text(model: Model, index: int, prompt: str, is_chat: bool) -> Any:
    """A text's token ids. Refuses one that is too long for the model whatever its tokens are, and one that is no Unicode."""
    if model.tokenizer is None:
        rule = "A text prompt needs a model with a tokenizer; this one has none. Pass token ids."
        raise InputError(rule, field="prompt", code="unsupported")
    if len(prompt) > LONGEST_TOKEN * model.config.max_positions:
        raise too_many_characters("prompt", model, index, len(prompt))
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        rule = "A prompt must be Unicode text; prompt {index} has the lone surrogate {got} at {place}. Remove it."
        got = repr(prompt[error.start])
        raise InputError(rule, field="prompt", code="wrong_type", index=index, got=got, place=error.start) from None
    if not is_chat and has_chat_template(model.tokenizer):
        marks = getattr(model.tokenizer, "all_special_tokens", ())
        if not any(mark in prompt for mark in marks):  # with its marks, it is a text that a template made
            warn_of_bare_text(model.name)
    try:
        if isinstance(prompt, ChatText):
            ids = encode_chat(model.tokenizer, prompt, add_special_tokens=not is_chat)
        elif is_chat:
            ids = model.tokenizer.encode(prompt, add_special_tokens=False)
        else:
            ids = encode_whole(model.tokenizer, prompt)
    except BaseException as error:  # a panic of the tokenizers library, such as of a pattern that backtracks, is no Exception
        if type(error).__name__ != "PanicException":
            raise
        rule = "The tokenizer must encode every prompt; it failed at prompt {index}. Pass token ids."
        raise InputError(rule, field="prompt", code="unsupported", index=index) from error
    warn_of_unknown(model, index, prompt, ids)
    return ids


def warn_of_unknown(model: Model, index: int, prompt: str, ids: Sequence[int]) -> None:
    """Warns of characters that the tokenizer has no token for: the model cannot read them."""
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    others = [getattr(model.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]  # which some use for it
    if unknown is None or unknown in others or unknown not in ids:
        return
    encode = functools.partial(model.tokenizer.encode, add_special_tokens=False)
    unread = [character for character in dict.fromkeys(prompt) if unknown in encode(character)]
    warnings.warn(
        f"{model.name or 'The model'} has no tokens for {shown(''.join(unread))} of prompt {index}, and reads "
        f"{model.tokenizer.unk_token} for each. Write the prompt without, or take another model (`jkv models`).",
        stacklevel=2,
    )


def too_long(index: int, prompt_length: str, asked: int | None, max_positions: int) -> InputError:
    """The error about a request that the model has no positions for."""
    is_short = prompt_length.isdigit() and int(prompt_length) < max_positions
    rule = (
        "Prompt and completion must fit the model's {most} positions; prompt {index} has {length} tokens and {max_new_tokens} "
        "is {asked}. Shorten the prompt" + (" or lower {max_new_tokens}." if is_short else ".")
    )
    about = {"most": max_positions, "index": index, "length": prompt_length}
    return InputError(rule, field="prompt", code="does_not_fit", asked=shown(asked) if asked else "not given", **about)
