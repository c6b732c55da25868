"""The messages and tools of a chat, as clients send them and as chat templates read them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from jkv.checks import check_length, shown
from jkv.errors import InputError

ROLES = ("developer", "system", "user", "assistant", "tool")
MOST_TOOLS = 1024  # of a request
REASONING = ("thinking", "reasoning_content", "reasoning")  # names of a message's reasoning
OWN = ("content", "tool_calls")  # fields of a message that need not be texts


def plain_messages(messages: Any, template: str = "") -> list[Any]:
    """At least one message, each as a template reads it (`plain`).

    Raises:
      InputError: none, or a message that cannot be read.
    """
    if not isinstance(messages, list) or not messages:
        rule = "{field} must be a list of at least one message; got {got}."
        raise InputError(rule, field="messages", code="missing", got=shown(messages))
    return [plain(message, template) for message in messages]


def plain(message: Any, template: str = "") -> Any:
    """A message whose content is a text, also where it came in parts, and whose tool calls have objects as arguments.

    The role "developer" becomes "system" where the template does not know it. Fields that are not texts are left out.

    Raises:
      InputError: a role that is neither OpenAI's nor the template's, a part that is no text, or a call that is none.

    >>> plain({"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    {'role': 'system', 'content': 'ab'}
    """
    if not isinstance(message, Mapping):
        return message
    found = {name: value for name, value in message.items() if name in OWN or isinstance(value, str | None)}
    role, calls = message.get("role"), message.get("tool_calls")
    if isinstance(role, str):
        found["role"] = known_role(role, template)
    if isinstance(message.get("content"), list):
        found["content"] = "".join(map(part_text, message["content"]))
    if ".thinking" in template and role == "assistant":  # gpt-oss's name for it; beside calls it takes no content as well
        reasoning = next((found[name] for name in REASONING if found.get(name)), "")
        found["thinking"] = "" if calls and found.get("content") else reasoning
    if not calls:
        found.pop("tool_calls", None)
        return found
    if role != "assistant":
        rule = "{field} are an assistant's; got them in a message of {got}. Leave them out."
        raise InputError(rule, field="tool_calls", code="conflict", got=shown(role))
    check_length("tool_calls", calls, MOST_TOOLS, "calls")
    return found | {"content": found.get("content") or "", "tool_calls": [plain_call(call) for call in calls]}


def known_role(role: str, template: str) -> str:
    """A role as the template has it."""
    is_own = f"'{role}'" in template or f'"{role}"' in template
    if role == "developer" and not is_own:
        return "system"
    if role not in ROLES and not is_own:
        rule = "The role of a message must be one of {known}; got {got}."
        raise InputError(rule, field="messages", code="unknown_name", known=", ".join(ROLES), got=shown(role))
    return role


def part_text(part: Any) -> str:
    """The text of a part of a message.

    Raises:
      InputError: an image, a sound or a file.
    """
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, Mapping) else part
    rule = (
        "The parts of a message must be texts, as this server reads text alone; got {got}. Leave out images, sounds and files."
    )
    raise InputError(rule, field="messages", code="unsupported", got=shown(kind))


def plain_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates read them.

    Arguments that are no JSON object, which models write too, are a text in an object.

    >>> plain_call({"function": {"name": "f", "arguments": "{1"}})
    {'type': 'function', 'function': {'name': 'f', 'arguments': {'invalid_json': '{1'}}}
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        rule = '{field} must be calls, {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}; got {got}.'
        raise InputError(rule, field="tool_calls", code="wrong_type", got=shown(call))
    given = function.get("arguments")
    if given is None or given == "":
        given = {}
    elif isinstance(given, str):
        try:
            parsed = json.loads(given)
        except (ValueError, RecursionError):
            parsed = None
        given = parsed if isinstance(parsed, dict) else {"invalid_json": given}
    elif not isinstance(given, dict):
        rule = "The arguments of a call must be an object as JSON; got {got}."
        raise InputError(rule, field="tool_calls", code="wrong_type", got=shown(given))
    own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**own, "type": "function", "function": {"name": name, "arguments": given}}


def unread_of(messages: Any) -> set[str]:
    """The names of messages' fields that are left out.

    >>> unread_of([{"role": "user", "content": "a", "annotations": [{}], "cache": []}])
    {'messages.annotations'}
    """
    found = messages if isinstance(messages, list) else []
    fields = [pair for message in found if isinstance(message, Mapping) for pair in message.items()]
    unread = [name for name, value in fields if name not in OWN and not isinstance(value, str | None) and value != []]
    return {f"messages.{shown(name)[1:-1]}" for name in unread}


def functions_of(tools: Iterable[Any]) -> dict[str, Any]:
    """The JSON schema of each function's arguments, by its name.

    Raises:
      InputError: a tool that is no function with a name.
    """
    found: dict[str, Any] = {}
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if kind != "function" or not isinstance(function, Mapping) or not isinstance(name, str) or not name.strip():
            rule = (
                '{field} must be functions, {{"type": "function", "function": {{"name": ...}}}}; got {got}. Leave out others.'
            )
            raise InputError(
                rule, field="tools", code="unsupported", got=shown(kind if kind not in (None, "function") else tool)
            )
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            rule = "The parameters of a tool must be a JSON schema, an object; got {got}."
            raise InputError(rule, field="tools", code="wrong_type", got=shown(parameters))
        found[name] = parameters or {}
    return found
