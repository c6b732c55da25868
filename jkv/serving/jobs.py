"""Jobs: a client's fields become checked requests of the engine."""

import dataclasses
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jkv.cache.slot_size import slot_size_of
from jkv.checkpoints.chat_template import ChatRenderer, ChatText, has_chat_template
from jkv.checks import shown
from jkv.engine import turns
from jkv.engine.kept_rows import KeptRow
from jkv.engine.prompts import check_messages, encode_prompt, encode_prompts, encode_text
from jkv.engine.requests import Request, RequestOptions, make_requests
from jkv.errors import InputError
from jkv.eviction.byte_budget import in_slots
from jkv.model.params import Model
from jkv.reasoning.marks import marks_of
from jkv.serving.options import ServerOptions
from jkv.serving.requests import ChatFields, CompletionFields, TokenizeFields, policy_of
from pallas_kernels.quantised import Format

MOST_MARK = 16  # last tokens of a prompt, where it may begin the thinking


@dataclasses.dataclass(frozen=True)
class Job:
    """A call of an endpoint, ready to be submitted.

    Attributes:
      fields: what the client sent.
      prompts: token ids.
      groups: the requests of each prompt; none where only the prompt is asked for.
      thinks: whether the first prompt ends in thinking.
      row: of the response that it continues, if it continues one.
    """

    fields: ChatFields | CompletionFields
    prompts: list[np.ndarray]
    groups: list[list[Request]]
    thinks: bool
    row: KeptRow | None = None

    @property
    def num_samples(self) -> int:
        """Completions of all prompts."""
        return sum(map(len, self.groups))

    @property
    def is_scored(self) -> bool:
        """Whether its prompts are echoed with their log-probabilities."""
        fields = self.fields
        return isinstance(fields, CompletionFields) and fields.echo and fields.logprobs is not None

    @property
    def num_open(self) -> int:
        """What it counts for among the calls that a server has open: completions of all prompts, or prompts that are scored."""
        return max(self.num_samples, self.is_scored * len(self.prompts))


class Encoder:
    """Encodes texts and conversations for many threads; it keeps the process that renders chat templates.

    Args:
      model: gives tokenizer and template.
      parse_special: whether messages may make control tokens.
    """

    def __init__(self, model: Model, parse_special: bool = False) -> None:
        self.model, self.parse_special, self._lock = model, parse_special, threading.Lock()
        self._renderer = ChatRenderer(model.tokenizer) if has_chat_template(model.tokenizer) else None

    def close(self) -> None:
        """Ends the process."""
        if self._renderer is not None:
            self._renderer.close()

    @property
    def renderer(self) -> ChatRenderer:
        """What renders chat templates.

        Raises:
          InputError: the model has none.
        """
        if self._renderer is None:
            rule = "Chat messages need a model with a chat template; this one has none. Use /v1/completions."
            raise InputError(rule, field="messages", code="unsupported")
        return self._renderer

    def encode(self, prompt: Any) -> list[np.ndarray]:
        """Token ids of a text or a list of token ids, or of each of a list of these."""
        if isinstance(prompt, list) and any(isinstance(one, Mapping) for one in prompt):
            rule = "{field} must be a text or token ids; got chat messages. Send them to /v1/chat/completions."
            raise InputError(rule, field="prompt", code="wrong_type")
        with self._lock:
            return encode_prompts(self.model, prompt)

    def tokenize(self, fields: TokenizeFields) -> list[int]:
        """Token ids of a text or a conversation of any length, none of an empty text."""
        is_chat = fields.messages is not None
        text = fields.prompt or ""
        adds = not is_chat if fields.add_special_tokens is None else fields.add_special_tokens
        with self._lock:
            if is_chat:
                text = self._readable(self._render(fields.messages, fields.template))
            return list(encode_text(unbounded(self.model), 0, text, is_chat=not adds)) if text else []

    def encode_chat(self, messages: Any, **options: Any) -> np.ndarray:
        """Token ids of a conversation; `options` are those of the chat template."""
        with self._lock:
            return encode_prompt(self.model, 0, self._readable(self._render(messages, options)), is_chat=True)

    def _readable(self, text: ChatText) -> str:
        """A rendered text as it is to be encoded: with `parse_special`, it does not know what users wrote."""
        return str(text) if self.parse_special else text

    def _render(self, messages: Any, options: Mapping[str, Any]) -> ChatText:
        messages = flat_messages(messages)
        check_messages(self.model, 0, messages)
        return self.renderer.render(messages, **options)

    def encode_after(self, history: list[Any], messages: Any, last_token: int, **options: Any) -> np.ndarray:
        """Token ids of new messages after a reply, in the template's own form: from the end of the reply on.

        `history` are the messages before the reply, whose last token is `last_token`; if that is the mark that ends a reply, it
        is not repeated.

        Raises:
          ValueError: as `encode_chat`; or the template does not write a reply as it is, so that nothing comes after it.
        """
        mark = f"reply-{secrets.token_hex(8)}"
        whole = [*history, {"role": "assistant", "content": mark}, *flat_messages(messages)]
        check_messages(self.model, 0, whole)
        with self._lock:
            text = self.renderer.render(whole, **options)
            if text.count(mark) != 1:
                rule = (
                    "{field} needs a chat template that writes each reply once, as it is; this model's wrote it {count} times. "
                    "Send the whole conversation without {field}."
                )
                raise InputError(rule, field="previous_response_id", code="unsupported", count=text.count(mark))
            after = text.after(mark)
            ids = encode_prompt(self.model, 0, self._readable(after), is_chat=True) if after else np.zeros(0, np.int32)
        return ids[1:] if len(ids) and ids[0] == last_token and last_token in self.model.config.end_ids else ids


def unbounded(model: Model) -> Model:
    """The model as one of endless positions, for texts that are counted and not completed."""
    config = dataclasses.replace(model.config, max_positions=sys.maxsize)
    return dataclasses.replace(model, params=dataclasses.replace(model.params, config=config))


def flat_messages(messages: Any) -> list[Any]:
    """At least one message, each with a text."""
    if not isinstance(messages, list) or not messages:
        rule = "{field} must be a list of at least one message; got {got}."
        raise InputError(rule, field="messages", code="missing", got=shown(messages))
    return [flat(message) for message in messages]


def flat(message: Any) -> Any:
    """A message whose content is a text, also where it came in parts.

    >>> flat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    {'role': 'user', 'content': 'ab'}
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = message["content"]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        rule = "The parts of a message must be texts; got {got}. Leave out images and sounds."
        raise InputError(rule, field="messages", code="wrong_type", got=shown(parts))
    return {**message, "content": "".join(part["text"] for part in parts)}


def make_turn(
    encoder: Encoder,
    fields: ChatFields,
    options: ServerOptions,
    row: KeptRow,
    history: list[Any],
    kv_format: Format | None = None,
) -> Job:
    """Encodes and checks a call that continues a response, which left a row; `history` are the messages before that.

    A policy may be given again: budgets in bytes are compared as slots of the pool, whose format is `kv_format`.

    Raises:
      ValueError: a request that the model cannot serve, or another policy than the conversation's.
    """
    model, policy = encoder.model, row.request.policy
    slot = slot_size_of(model.params, kv_format)
    if (fields.policy is not None or fields.settings) and in_slots(policy_of(fields, options), slot) != policy:
        rule = "A conversation keeps its {field}, {own}; got another with previous_response_id. Leave it out."
        raise InputError(rule, field="policy", code="conflict", own=str(policy))
    salt = row.request.cache_salt
    if fields.cache_salt not in (None, salt):
        rule = "{field} is the conversation's own with previous_response_id; got another one, {got}. Leave it out."
        raise InputError(rule, field="cache_salt", code="conflict", got=shown(fields.cache_salt))
    new = encoder.encode_after(history, fields.messages, int(row.transcript.tokens[-1]), **fields.template)
    request_options = RequestOptions(
        sampling=fields.sampling(model),
        max_new_tokens=fields.limit,
        stop_ids=fields.stop_ids(model),
        stop_strings=fields.stop_strings,
        prompt_piece=fields.prompt_piece,
        model_logprobs=fields.model_logprobs,
    )
    request = turns.next_request(model, row, new, request_options, fields.store)
    return Job(fields, [request.prompt], [[request]], ends_in_thinking(model, request.prompt), row)


def make_job(
    encoder: Encoder, fields: ChatFields | CompletionFields, options: ServerOptions, kv_format: Format | None = None
) -> Job:
    """Encodes and checks a call; `kv_format` is that of the engine's pool.

    Raises:
      ValueError: a request that the model cannot serve.
    """
    model = encoder.model
    if isinstance(fields, ChatFields):
        prompts = [encoder.encode_chat(fields.messages, **fields.template)]
    else:
        prompts = encoder.encode(fields.prompt)
    groups: list[list[Request]] = []
    if fields.limit != 0:
        request_options = RequestOptions(
            policy=policy_of(fields, options),
            sampling=fields.sampling(model),
            max_new_tokens=fields.limit,
            n=fields.n,
            stop_ids=fields.stop_ids(model),
            stop_strings=fields.stop_strings,
            cache_salt=fields.cache_salt or "",
            prompt_piece=fields.prompt_piece,
            model_logprobs=fields.model_logprobs,
        )
        made = make_requests(model, prompts, request_options, kv_format=kv_format)
        keep = isinstance(fields, ChatFields) and fields.store
        groups = [turns.with_keep(group, keep) for group in made]
    return Job(fields, prompts, groups, isinstance(fields, ChatFields) and ends_in_thinking(model, prompts[0]))


def ends_in_thinking(model: Model, prompt: Sequence[int] | np.ndarray) -> bool:
    """Whether a prompt has begun to think, so that a completion begins with reasoning."""
    tail = model.tokenizer.decode(prompt[-MOST_MARK:])
    return marks_of(model.tokenizer).is_open(tail)
