"""OpenAI's Responses API: a body becomes that of a chat, and a chat's answer becomes a response, whole or as typed events.

A response is a list of output items: one of reasoning, messages, and calls of functions, in the order in which the model wrote
them. The chat does the rest: its fields (`jkv.serving.requests.ChatFields`), its encoding and its sampling.
"""

import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from jkv.checks import check_length, shown, typed
from jkv.engine.results import Result
from jkv.engine.service import Ticket
from jkv.errors import InputError
from jkv.model.params import Model
from jkv.reasoning.marks import completion_decoder
from jkv.reasoning.token_bytes import PartReader
from jkv.serving.answer_parts import AnswerParts, Change, Part, changes_of
from jkv.serving.errors import without_folders
from jkv.serving.jobs import Job
from jkv.serving.messages import part_text
from jkv.serving.requests import ChatFields, check_neutral
from jkv.serving.response_tools import HOSTED, Named, call_events, call_in_chat, call_item, choice_in_chat, read_tools
from jkv.serving.responses import Head, Likely, chat_log_probs, drawn_of, num_thought, usage_of
from jkv.serving.streaming import likely_in, typed_sse

NAMES = {  # of a chat's fields, for clients of this API
    "continue_final_message": "input",
    "include_reasoning": "reasoning",
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_new_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text.format",
    "tokens": "input",
    "tool_calls": "input",
}
REFUSED: dict[str, tuple[Any, str]] = {  # the value that changes nothing, and why others are refused
    "background": (False, "a response is written while its client waits"),
    "conversation": (None, "conversations go on by previous_response_id"),
    "logprobs": (None, "include asks for message.output_text.logprobs"),
    "max_completion_tokens": (None, "the limit is max_output_tokens"),
    "max_tokens": (None, "the limit is max_output_tokens"),
    "max_tool_calls": (None, HOSTED),
    "messages": (None, "this endpoint reads input"),
    "n": (1, "a response is one sample"),
    "prompt": (None, "prompts are not stored here. Send instructions and input"),
    "response_format": (None, "the format is text.format"),
    "truncation": ("disabled", "no item of a conversation is dropped"),
}
OWN = ("include", "input", "instructions", "max_output_tokens", "metadata", "prompt_cache_key", "store", "text", "tools")
LOG_PROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
MOST_ITEMS = 100_000  # of an input
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512  # as OpenAI has it
CALLS, OUTPUTS = ("function_call", "custom_tool_call"), ("function_call_output", "custom_tool_call_output")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body of this API.

    Attributes:
      chat: the body of the chat that it means.
      body: as it came; the response repeats parts of it.
      stores: whether the response is to be stored: None is as OpenAI has it, if the server can.
      named: the tools whose name or kind differs in the chat, by their name there.
      unread: what of the body is left out.
    """

    chat: dict[str, Any]
    body: Mapping[str, Any]
    stores: bool | None
    named: Mapping[str, Named]
    unread: Sequence[str]

    @property
    def instructions(self) -> str | None:
        """What stands before the conversation."""
        return self.body.get("instructions")


def read(body: Mapping[str, Any]) -> Asked:
    """A body as one of a chat. With `previous_response_id`, whose conversation has them, the instructions are left out.

    Raises:
      InputError: a field that is misread, or would change the response in a way that this server cannot.

    >>> read({"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 9}).chat["messages"]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    for name, (neutral, why) in REFUSED.items():
        check_neutral(name, body.get(name), neutral, why)
    given = {name: value for name, value in body.items() if name not in (*OWN, *REFUSED)}
    instructions = typed("instructions", body.get("instructions"), str | None)
    messages = messages_of(body.get("input"))
    if instructions and body.get("previous_response_id") is None:
        messages.insert(0, {"role": "system", "content": instructions})
    check_metadata(body.get("metadata"))
    reasoning = typed("reasoning", body.get("reasoning"), dict | None) or {}
    typed("reasoning.effort", reasoning.get("effort"), str | None)
    stores = typed("store", body.get("store"), bool | None)
    tools = None if body.get("tools") is None else read_tools(body["tools"])
    named = {} if tools is None else tools.named
    chat = {
        **given,
        "messages": messages,
        "max_completion_tokens": body.get("max_output_tokens"),
        "tools": None if tools is None else tools.functions,
        "tool_choice": choice_in_chat(body.get("tool_choice")),
        "response_format": response_format_of(body.get("text")),
        "logprobs": has_log_probs(body.get("include")),
        "store": stores,
    }
    chat = {name: value for name, value in chat.items() if value is not None}
    return Asked(chat, body, stores, named, [] if tools is None else tools.ignored)


def has_log_probs(include: Any) -> bool:
    """Whether log-probabilities are asked for, among what a response is to include.

    Raises:
      InputError: something that no response here has.
    """
    for name in typed("include", include, list | None) or []:
        if name not in (LOG_PROBS, ENCRYPTED):  # reasoning is returned as it is, so nobody needs it encrypted
            rule = "{field} has {known} here; got {got}. Leave it out."
            about = {"known": f"{LOG_PROBS} and {ENCRYPTED}", "got": shown(name)}
            raise InputError(rule, field="include", code="unsupported", **about)
    return LOG_PROBS in (include or [])


def response_format_of(text: Any) -> dict[str, Any] | None:
    """The format of a text as a chat's `response_format`; None for plain text.

    >>> response_format_of({"format": {"type": "json_schema", "name": "a", "schema": {}}, "verbosity": "low"})
    {'type': 'json_schema', 'json_schema': {'name': 'a', 'schema': {}}}
    """
    given = typed("text", text, dict | None)
    form = typed("text.format", (given or {}).get("format"), dict | None)
    if form is None or form.get("type") == "text":
        return None
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def check_metadata(metadata: Any) -> None:
    """Refuses what OpenAI does: other than up to 16 pairs of texts."""
    pairs = typed("metadata", metadata, dict | None) or {}
    is_fine = len(pairs) <= MOST_METADATA and all(
        isinstance(value, str) and len(name) <= LONGEST_KEY and len(value) <= LONGEST_VALUE for name, value in pairs.items()
    )
    if not is_fine:
        rule = "{field} must be up to {most} pairs of texts, of up to {key} and {value} characters; got {got}. Shorten it."
        about = {"most": MOST_METADATA, "key": LONGEST_KEY, "value": LONGEST_VALUE, "got": shown(metadata)}
        raise InputError(rule, field="metadata", code="out_of_range", **about)


def messages_of(given: Any) -> list[dict[str, Any]]:
    """The messages of an input: reasoning, text and calls of one reply are one message.

    Raises:
      InputError: no text and no list of items, or an item that this server does not read.

    >>> call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    >>> messages_of([call, {"type": "function_call_output", "call_id": "c", "output": "7"}])[1]
    {'role': 'tool', 'tool_call_id': 'c', 'content': '7'}
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if given is None:
        raise InputError("{field} is needed; got none. Add it to the body.", field="input", code="missing")
    check_length("input", given, MOST_ITEMS, "items")
    messages: list[dict[str, Any]] = []
    reply: dict[str, Any] | None = None  # the last message, as long as it may go on
    for item in given:
        kind = item.get("type", "message") if isinstance(item, Mapping) else item
        part = reply_part(item, kind) if kind in ("reasoning", *CALLS) or is_reply(item, kind) else None
        if part is not None:
            if reply is None or not can_join(reply, part):
                reply = {"role": "assistant", "content": ""}
                messages.append(reply)
            join(reply, part)
            continue
        reply = None
        if kind in OUTPUTS:
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text_of(item.get("output"), "output")}
            messages.append({name: value for name, value in output.items() if value is not None})
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": text_of(item.get("content"), "content")})
        else:
            rule = (
                "{field} must be a text, or items that are messages, reasoning, calls ({calls}) and their outputs ({outputs}); "
                "got {got}. Leave out others."
            )
            about = {"calls": ", ".join(CALLS), "outputs": ", ".join(OUTPUTS), "got": shown(kind)}
            raise InputError(rule, field="input", code="unsupported", **about)
    return messages


def is_reply(item: Any, kind: Any) -> bool:
    """Whether an item is a message of the model."""
    return kind == "message" and item.get("role") == "assistant"


def reply_part(item: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """What an item adds to a message of the model."""
    if kind == "reasoning":
        texts = [text_of(item.get(name), name) for name in ("content", "summary") if item.get(name)]
        return {"reasoning_content": texts[0] if texts else ""}
    if kind in CALLS:
        return {"tool_calls": [call_in_chat(item)]}
    return {"content": text_of(item.get("content"), "content")}


def can_join(reply: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a reply goes on with a part: reasoning begins one, and calls end it."""
    return "tool_calls" in part or ("content" in part and not (reply["content"] or "tool_calls" in reply))


def join(reply: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Adds a part to a reply."""
    for name, value in part.items():
        reply[name] = reply[name] + value if name in reply else value


def text_of(content: Any, where: str) -> Any:
    """A content as one text: of a text, or of parts of texts.

    Raises:
      InputError: an image, a sound or a file.
    """
    if content is None or isinstance(content, str):
        return content
    check_length(f"input.{where}", content, MOST_ITEMS, "parts")
    refusals = [
        part.get("refusal") if isinstance(part, Mapping) and part.get("type") == "refusal" else None for part in content
    ]
    parts = zip(content, refusals, strict=True)
    return "".join(refusal if isinstance(refusal, str) else part_text(part) for part, refusal in parts)


def check_instructions(asked: Asked, messages: Sequence[Any]) -> None:
    """Refuses instructions that differ from the continued conversation's, whose `messages` begin with them."""
    if asked.instructions and {"role": "system", "content": asked.instructions} not in messages[:1]:
        rule = (
            "{field} are the conversation's own with previous_response_id, whose tokens stay; got others. Leave them out, or "
            "send the whole conversation."
        )
        raise InputError(rule, field="instructions", code="conflict")


class ResponseWriter:
    """Writes a response, whole or as events.

    Args:
      model: whose answer it is.
      head: of the response.
      asked: what the client sent.
      keep: receives the response once it is finished.
    """

    def __init__(self, model: Model, head: Head, asked: Asked, keep: Callable[[dict[str, Any]], None]) -> None:
        self.model, self.head, self.asked, self.keep = model, head, asked, keep

    def whole(self, job: Job, results: Sequence[Result], scores: Sequence[list[Likely | None]] | None = None) -> dict[str, Any]:
        """The response of a job."""
        (result,) = results
        assert result.text is not None
        fields, parts = chat_of(job), AnswerParts(self.model, job)
        log_probs = LogProbs(self.model, job)
        if fields.logprobs:
            log_probs.add(*drawn_of(result, 0, fields))
        parts.push(result.text[0], is_last=True)
        texts = {part.index: log_probs.take() for part in parts.parts if part.kind == "text"}
        return self.finished(job, result, parts, texts, parts.reason(self.head.reason(result.finish_reason[0])))

    async def stream(self, job: Job, tickets: Sequence[Ticket]) -> AsyncIterator[str]:
        """The events of a job: the first two at once, the others as its tokens come."""
        number = itertools.count()

        def event(kind: str, **fields: Any) -> str:
            return typed_sse({"type": f"response.{kind}", "sequence_number": next(number), **fields})

        yield event("created", response=self.body(job, "in_progress"))
        yield event("in_progress", response=self.body(job, "in_progress"))
        fields, parts, texts = chat_of(job), AnswerParts(self.model, job), dict[int, list[Any]]()
        log_probs, reason = LogProbs(self.model, job), None
        try:
            async for one, changes in changes_of(parts, tickets):
                if fields.logprobs:
                    log_probs.add(one.tokens, likely_in(one, fields))
                reason = parts.reason(self.head.reason(one.finish_reason))
                for change in changes:
                    new = log_probs.take() if change.part.kind == "text" and change.what != "begin" else []
                    texts.setdefault(change.part.index, []).extend(new)
                    status = status_of(reason) if change.part is parts.parts[-1] else "completed"
                    for kind, more in changed(change, new, texts[change.part.index], status, self.asked.named):
                        yield event(kind, output_index=change.part.index, **more)
            result = await tickets[0]
            response = self.finished(job, result, parts, texts, reason)
            yield event(response["status"], response=response)
        except Exception as error:
            failure = {"code": "server_error", "message": without_folders(str(error))}
            yield event("failed", response=self.body(job, "failed", error=failure))

    def finished(
        self, job: Job, result: Result, parts: AnswerParts, log_probs: Mapping[int, list[Any]], reason: str | None
    ) -> dict[str, Any]:
        """A finished response."""
        status, last = status_of(reason), parts.parts[-1]
        states = {last.index: status}  # all others are completed
        output = [
            item(part, states.get(part.index, "completed"), self.asked.named, log_probs.get(part.index, []))
            for part in parts.parts
        ]
        details = {"reason": "max_output_tokens" if reason == "length" else reason} if status == "incomplete" else None
        response = self.body(
            job,
            status,
            output=output,
            usage=usage(self.model, job, result),
            incomplete_details=details,
            completed_at=int(time.time()),
        )
        self.keep(response)
        return response

    def body(self, job: Job, status: str, **more: Any) -> dict[str, Any]:
        """A response; what the client sent, and what it did not send has the value that is in effect."""
        fields, given = chat_of(job), self.asked.body
        sampling = job.groups[0][0].sampling
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": self.asked.instructions,
            "max_output_tokens": fields.limit,
            "metadata": given.get("metadata") or {},
            "model": self.head.model,
            "output": [],
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {"effort": fields.reasoning_effort, "summary": (given.get("reasoning") or {}).get("summary")},
            "store": fields.store,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | (given.get("text") or {}),
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": given.get("tools") or [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": given.get("user"),
            **more,
        }


class LogProbs:
    """How likely the tokens after the thinking are, as they come.

    Args:
      model: whose tokens they are.
      job: the chat.
    """

    def __init__(self, model: Model, job: Job) -> None:
        self._model, self._thinks = model, job.thinks
        self._reader = PartReader(model.tokenizer, completion_decoder(model.tokenizer))
        self._tokens: list[int] = []
        self._shown: list[Any] = []
        self._start: int | None = None  # of the answer
        self._taken = 0

    def add(self, tokens: Sequence[int], likely: Sequence[Likely | None]) -> None:
        """Adds the next tokens."""
        self._tokens += tokens
        self._shown += chat_log_probs(self._reader, tokens, likely)["content"]

    def take(self) -> list[Any]:
        """The answer's log-probabilities that were not taken yet, for a text that has begun: the thinking is over."""
        if not self._shown:
            return []
        if self._start is None:
            self._start = self._taken = num_thought(self._model, self._tokens, self._thinks)
        new, self._taken = self._shown[self._taken :], len(self._shown)
        return new


def chat_of(job: Job) -> ChatFields:
    """The fields of a job, which is a chat."""
    assert isinstance(job.fields, ChatFields)
    return job.fields


def status_of(reason: str | None) -> str:
    """The status of a response that ended for a reason.

    >>> status_of("tool_calls"), status_of("length")
    ('completed', 'incomplete')
    """
    return "completed" if reason in ("stop", "tool_calls") else "incomplete"


def usage(model: Model, job: Job, result: Result) -> dict[str, Any]:
    """The tokens of a response under this API's names, and what the cache holds."""
    found = usage_of(model, job.prompts, [result], job.thinks, is_chat=True)
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": found["prompt_tokens_details"],
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": found["completion_tokens_details"],
        "total_tokens": found["total_tokens"],
        "kv": found["kv"],
    }


def item(part: Part, status: str, named: Mapping[str, Named], log_probs: Sequence[Any] = ()) -> dict[str, Any]:
    """An output item; `named` are the tools whose name or kind differs in the chat."""
    if part.kind == "reasoning":
        return {
            "id": f"rs_{part.id}",
            "type": "reasoning",
            "summary": [],
            "content": [content(part)] if part.text else [],
            "status": status,
        }
    if part.kind == "call":
        return call_item(part.id, part.name, part.text, status, named)
    has_begun = part.text or status != "in_progress"
    return {
        "id": f"msg_{part.id}",
        "type": "message",
        "role": "assistant",
        "content": [content(part, log_probs)] if has_begun else [],
        "status": status,
    }


def content(part: Part, log_probs: Sequence[Any] = ()) -> dict[str, Any]:
    """The only content part of an item that is a text or reasoning."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": list(log_probs)}


NAMES_OF_TEXTS = {"reasoning": "reasoning_text", "text": "output_text"}  # in events


def changed(
    change: Change, new: Sequence[Any], all_of: Sequence[Any], status: str, named: Mapping[str, Named]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a change: their types, and their fields.

    Args:
      change: of a part.
      new, all_of: log-probabilities of the change's tokens, and of the part's, if it is a text.
      status: of the item, if it ends.
      named: the tools whose name or kind differs in the chat, by their name there.
    """
    what, part, text = change
    if what == "more" and part.name in named and named[part.name].is_custom:
        return  # its text comes whole, at its end
    own = item(part, status, named, all_of)
    place = {"item_id": own["id"], "content_index": 0}
    likely = {"logprobs": list(new if what == "more" else all_of)} if part.kind == "text" else {}
    if what == "begin":
        begun = dataclasses.replace(part, text="")
        yield "output_item.added", {"item": item(begun, "in_progress", named)}
        if part.kind != "call":
            yield "content_part.added", {**place, "part": content(begun)}
    elif part.kind == "call":
        yield from call_events(what, text, own)
    elif what == "more":
        yield f"{NAMES_OF_TEXTS[part.kind]}.delta", {**place, "delta": text, **likely}
    else:
        yield f"{NAMES_OF_TEXTS[part.kind]}.done", {**place, "text": part.text, **likely}
        yield "content_part.done", {**place, "part": content(part, all_of)}
    if what == "end":
        yield "output_item.done", {"item": own}
