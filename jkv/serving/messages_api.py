"""Anthropic's Messages API: a body becomes that of a chat, and a chat's answer becomes a message, whole or as typed events.

A message is a list of content blocks: thinking, texts and uses of tools, in the order in which the model wrote them. The chat
does the rest: its fields (`jkv.serving.requests.ChatFields`), its encoding and its sampling.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from jkv.checks import check_length, shown, typed
from jkv.engine.results import Result
from jkv.engine.service import Ticket
from jkv.errors import InputError
from jkv.model.params import Model
from jkv.reasoning.marks import completion_decoder
from jkv.serving.answer_parts import AnswerParts, Change, Part, changes_of
from jkv.serving.errors import message_error
from jkv.serving.jobs import Job
from jkv.serving.messages import MOST_TOOLS
from jkv.serving.requests import check_neutral
from jkv.serving.responses import Head, Likely, usage_of
from jkv.serving.streaming import typed_sse

NAMES = {  # of a chat's fields, for clients of this API
    "chat_template_kwargs": "thinking",
    "max_new_tokens": "max_tokens",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "stop_strings": "stop_sequences",
    "tokens": "messages",
    "tool_calls": "messages",
}
REFUSED: dict[str, tuple[Any, str]] = {  # the value that changes nothing, and why others are refused
    "container": (None, "nothing is executed"),
    "logprobs": (None, "messages have none. Send /v1/chat/completions"),
    "mcp_servers": ([], "no server of tools is called"),
    "n": (1, "a message is one sample"),
    "previous_response_id": (None, "messages hold the whole conversation"),
    "stop": (None, "the field is stop_sequences"),
    "store": (False, "messages hold the whole conversation"),
}
OWN = (
    "max_tokens",
    "messages",
    "output_config",
    "output_format",
    "stop_sequences",
    "system",
    "thinking",
    "tool_choice",
    "tools",
)
MOST_ITEMS = 100_000  # messages, and blocks of one
CHOICES = {"auto": "auto", "none": "none", "any": "required"}  # of tools, and what a chat calls them
FUNCTION = {"name": "name", "description": "description", "input_schema": "parameters"}  # fields of a tool, and a chat's
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "max_tokens"}
PING = typed_sse({"type": "ping"})
WINDOW = "model_context_window_exceeded"  # the reason where the text ended with the model's context


def chat_body(body: Mapping[str, Any], counts: bool = False) -> dict[str, Any]:
    """A body as one of a chat; `counts` says that its tokens are counted alone, so that it needs no limit.

    Raises:
      InputError: a field that is misread, or would change the message in a way that this server cannot.

    >>> chat_body({"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief.", "max_tokens": 9})["messages"]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    for name, (neutral, why) in REFUSED.items():
        check_neutral(name, body.get(name), neutral, why)
    messages = messages_of(body.get("messages"))
    config = typed("output_config", body.get("output_config"), dict | None) or {}
    if not counts and body.get("max_tokens") is None:
        raise InputError("{field} is needed; got none. Add it to the body.", field="max_tokens", code="missing")
    begins = messages[-1]["role"] == "assistant"  # the model goes on with a reply that the client has begun
    if begins and "tool_calls" in messages[-1]:
        rule = "{field} must go on with a tool_result after a tool_use; got none. Add a message with it."
        raise InputError(rule, field="messages", code="missing")
    chat = {
        **{name: value for name, value in body.items() if name not in (*OWN, *REFUSED)},
        "messages": [*system_of(body.get("system")), *messages],
        "max_tokens": None if counts else typed("max_tokens", body["max_tokens"], int),
        "stop": typed("stop_sequences", body.get("stop_sequences"), list | None),
        "tools": tools_of(body.get("tools")),
        **tool_choice_of(body.get("tool_choice")),
        "thinking": thinking_of(body.get("thinking")),
        "reasoning_effort": config.get("effort", body.get("reasoning_effort")),
        "response_format": response_format_of(config.get("format", body.get("output_format"))),
        "continue_final_message": begins or None,
    }
    return {name: value for name, value in chat.items() if value is not None}


def unread(body: Mapping[str, Any]) -> list[str]:
    """The names of a body's fields inside of others that are ignored."""
    thinking = body.get("thinking")
    return ["thinking.budget_tokens"] if isinstance(thinking, Mapping) and "budget_tokens" in thinking else []


def thinking_of(given: Any) -> dict[str, Any] | None:
    """What switches the template's thinking; a budget, which nothing here counts, is left out.

    >>> thinking_of({"type": "enabled", "budget_tokens": 2048})
    {'type': 'enabled'}
    """
    found = typed("thinking", given, dict | None)
    if found is None:
        return None
    if found.get("type") not in ("enabled", "adaptive", "disabled"):
        rule = '{field} must have the type "enabled", "adaptive" or "disabled"; got {got}.'
        raise InputError(rule, field="thinking", code="unknown_name", got=shown(found.get("type")))
    budget = typed("thinking.budget_tokens", found.get("budget_tokens"), int | None)
    if budget is not None and budget < 1:
        raise InputError(
            "{field} must be at least 1; got {got}.", field="thinking.budget_tokens", code="out_of_range", got=budget
        )
    return {"type": found["type"]}


def response_format_of(form: Any) -> dict[str, Any] | None:
    """The format of a text as a chat's `response_format`; None for plain text.

    >>> response_format_of({"type": "json_schema", "schema": {}})
    {'type': 'json_schema', 'json_schema': {'name': 'output', 'schema': {}}}
    """
    given = typed("output_config.format", form, dict | None)
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema")}}


def tool_choice_of(choice: Any) -> dict[str, Any]:
    """The fields of a chat for a choice of tools.

    >>> tool_choice_of({"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    {'tool_choice': {'type': 'function', 'function': {'name': 'f'}}, 'parallel_tool_calls': False}
    """
    given = typed("tool_choice", choice, dict | None)
    if given is None:
        return {}
    kind, is_one = given.get("type"), given.get("disable_parallel_tool_use")
    parallel = (
        {} if is_one is None else {"parallel_tool_calls": not typed("tool_choice.disable_parallel_tool_use", is_one, bool)}
    )
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": given.get("name")}}, **parallel}
    if not isinstance(kind, str) or kind not in CHOICES:
        rule = "{field} must have the type {known} or tool; got {got}."
        raise InputError(rule, field="tool_choice", code="unknown_name", known=", ".join(CHOICES), got=shown(kind))
    return {"tool_choice": CHOICES[kind], **parallel}


def tools_of(tools: Any) -> list[Any] | None:
    """Functions as a chat has them.

    Raises:
      InputError: a tool that the client does not run itself, such as a search.
    """
    if tools is None:
        return None
    check_length("tools", tools, MOST_TOOLS, "tools")
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        if not isinstance(tool, Mapping) or kind not in (None, "custom") or not isinstance(tool.get("input_schema"), Mapping):
            rule = (
                '{field} must be {{"name": ..., "input_schema": {{...}}}}, as this server hosts no tools and knows none by '
                "type; got {got}. Leave out others."
            )
            raise InputError(rule, field="tools", code="unsupported", got=shown(kind or tool))
    functions = [{own: tool[name] for name, own in FUNCTION.items() if tool.get(name) is not None} for tool in tools]
    return [{"type": "function", "function": function} for function in functions]


def system_of(system: Any) -> list[dict[str, Any]]:
    """The message of a system prompt, which is a text or blocks of texts, if there is one."""
    text = text_of(system, "system")
    return [{"role": "system", "content": text}] if text else []


def messages_of(given: Any) -> list[dict[str, Any]]:
    """A chat's messages: each result of a tool is one of its own.

    Raises:
      InputError: none, a role that is none, or a block that this server does not read.

    >>> use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    >>> result = {"type": "tool_result", "tool_use_id": "a", "content": "7"}
    >>> messages_of([{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}])[1]
    {'role': 'tool', 'tool_call_id': 'a', 'content': '7'}
    """
    if given is None or not check_length("messages", given, MOST_ITEMS, "messages"):
        rule = "{field} must be a list of at least one message; got {got}."
        raise InputError(rule, field="messages", code="missing", got=shown(given))
    found: list[dict[str, Any]] = []
    for message in given:
        role = message.get("role") if isinstance(message, Mapping) else message
        if role not in ("user", "assistant", "system"):  # the last is what clients write in the middle of a conversation
            rule = "The role of a message must be user or assistant, and the first prompt is system; got {got}."
            raise InputError(rule, field="messages", code="unknown_name", got=shown(role))
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        check_length("messages.content", blocks, MOST_ITEMS, "blocks")
        found += replied(blocks) if role == "assistant" else said(role, blocks)
    return found


def replied(blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """A message of the model, of its blocks."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = kind_of(block, ("text", "thinking", "tool_use"))
        if kind == "text":
            message["content"] += text_of([block], "messages")
        elif kind == "thinking":
            thinking = typed("messages.content.thinking", block.get("thinking"), str)
            message["reasoning_content"] = message.get("reasoning_content", "") + thinking
        else:
            function = {"name": block.get("name"), "arguments": block.get("input")}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message["tool_calls"] = [*message.get("tool_calls", []), call]
    return [message]


def said(role: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a user: results of tools, and the texts between them."""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if kind_of(block, ("text", "tool_result")) == "tool_result":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            found.append({**result, "content": text_of(block.get("content"), "messages.content.content") or ""})
        elif found and found[-1]["role"] == role:
            found[-1]["content"] += text_of([block], "messages")
        else:
            found.append({"role": role, "content": text_of([block], "messages")})
    return found or [{"role": role, "content": ""}]


def kind_of(block: Any, known: Sequence[str]) -> Any:
    """The type of a block.

    Raises:
      InputError: an image, a document, or another block that this server does not read.
    """
    kind = block.get("type") if isinstance(block, Mapping) else block
    if kind not in known:
        rule = (
            "The blocks of a message must be {known}, as this server reads text alone and runs no tools; got {got}. Leave out "
            "others."
        )
        raise InputError(rule, field="messages", code="unsupported", known=", ".join(known), got=shown(kind))
    return kind


def text_of(content: Any, where: str) -> Any:
    """A text, also where it came in blocks; None stays."""
    if content is None or isinstance(content, str):
        return content
    check_length(where, content, MOST_ITEMS, "blocks")
    for block in content:
        kind_of(block, ("text",))
    return "".join(typed(f"{where}.text", block.get("text"), str) for block in content)


class MessageWriter:
    """Writes a message, whole or as events.

    Args:
      model: whose answer it is.
      head: of the message.
      stops: its stop sequences.
      reasons: the stop reason of each finish reason.
    """

    def __init__(self, model: Model, head: Head, stops: Sequence[str], reasons: Mapping[str, str]) -> None:
        self.model, self.head, self.stops, self.reasons = model, head, stops, reasons

    def whole(self, job: Job, results: Sequence[Result], scores: Sequence[list[Likely | None]] | None = None) -> dict[str, Any]:
        """The message of a job."""
        (result,) = results
        assert result.text is not None
        parts = AnswerParts(self.model, job)
        parts.push(result.text[0], is_last=True)
        end = self.end(parts, result)
        return self.body([block(part) for part in parts.parts], usage(self.model, job, result), **end)

    async def stream(self, job: Job, tickets: Sequence[Ticket]) -> AsyncIterator[str]:
        """The events of a job: the first two at once, the others as its tokens come."""
        num_prompt, parts = len(job.prompts[0]), AnswerParts(self.model, job)
        yield typed_sse({"type": "message_start", "message": self.body([], counted(num_prompt, 0, 0))})
        yield PING
        try:
            async for _, changes in changes_of(parts, tickets):
                for change in changes:
                    for event in changed(change):
                        yield typed_sse(event)
            result = await tickets[0]
            end = {"delta": self.end(parts, result), "usage": usage(self.model, job, result)}
            yield typed_sse({"type": "message_delta", **end})
            yield typed_sse({"type": "message_stop"})
        except Exception as error:
            yield typed_sse(message_error(500, str(error)))

    def body(self, content: list[dict[str, Any]], usage: dict[str, Any], **end: Any) -> dict[str, Any]:
        """A message."""
        head = {"id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, **end, "usage": usage}

    def end(self, parts: AnswerParts, result: Result) -> dict[str, Any]:
        """Why a message ended."""
        reason = parts.reason(self.head.reason(result.finish_reason[0])) or ""
        if reason == "stop" and (stop := self.stop_of(result)) is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": self.reasons.get(reason, reason), "stop_sequence": None}

    def stop_of(self, result: Result) -> str | None:
        """The stop sequence that ended a result; its tokens hold it, and its text does not."""
        assert result.text is not None
        tokens = result.tokens[0, : result.lengths[0]].tolist()
        rest = completion_decoder(self.model.tokenizer)(tokens)[len(result.text[0]) :] if self.stops else ""
        return next((stop for stop in self.stops if rest.startswith(stop)), None)


def counted(num_prompt: int, num_cached: int, num_new: int) -> dict[str, Any]:
    """The tokens of a message; prompt tokens that the cache held count separately."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": num_cached}
    return {"input_tokens": num_prompt - num_cached, **cached, "output_tokens": num_new}


def usage(model: Model, job: Job, result: Result) -> dict[str, Any]:
    """The tokens of a finished message, and what the cache holds."""
    found = usage_of(model, job.prompts, [result], job.thinks, is_chat=True)
    num_cached = found["prompt_tokens_details"]["cached_tokens"]
    thought = {"output_tokens_details": {"thinking_tokens": found["completion_tokens_details"]["reasoning_tokens"]}}
    return counted(found["prompt_tokens"], num_cached, found["completion_tokens"]) | thought | {"kv": found["kv"]}


def block(part: Part) -> dict[str, Any]:
    """A content block."""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": signature(part)}
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": input_of(part.text)}


def signature(part: Part) -> str:
    """A digest of a thinking block, which clients send back with it; nothing is checked by it."""
    return hashlib.blake2b(part.text.encode(), digest_size=24).hexdigest()


def input_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; what is none is a text in an object, as templates receive it.

    >>> input_of('{"x": 1}'), input_of(""), input_of("{1")
    ({'x': 1}, {}, {'invalid_json': '{1'})
    """
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"invalid_json": arguments}


def changed(change: Change) -> Iterator[dict[str, Any]]:
    """The events of a change of a part."""
    what, part, text = change
    index = {"index": part.index}
    if what == "begin":
        empty = Part(part.index, part.kind, part.id, part.name)
        unsigned = {"signature": ""} if part.kind == "reasoning" else {}
        yield {"type": "content_block_start", **index, "content_block": block(empty) | unsigned}
    elif what == "more":
        names = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
        kind, name = names.get(part.kind, ("input_json_delta", "partial_json"))
        yield {"type": "content_block_delta", **index, "delta": {"type": kind, name: text}}
    else:
        if part.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": signature(part)}
            yield {"type": "content_block_delta", **index, "delta": delta}
        yield {"type": "content_block_stop", **index}
