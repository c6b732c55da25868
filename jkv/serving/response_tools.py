"""The tools of the Responses API as a chat has them, and a chat's calls as this API has them.

A chat has functions alone. A group of functions (`namespace`) becomes its functions, each with the group's name before its own.
A `custom` tool, which takes a text, becomes a function of one text. Tools that a server runs itself, such as `web_search`, are
left out beside others, as this one runs none.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jkv.checks import check_length, shown, typed
from jkv.errors import InputError
from jkv.serving.messages import MOST_TOOLS

HOSTED = "this server hosts no tools"
FUNCTION = ("name", "description", "parameters", "strict")  # fields of a function
INPUT = "input"  # the only parameter of the function that stands for a custom tool
BETWEEN = "__"


class Named(NamedTuple):
    """A tool as the client knows it.

    Attributes:
      name: its own.
      namespace: its group's; None for none.
      is_custom: whether it takes a text in place of arguments.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


class Tools(NamedTuple):
    """The tools of a body.

    Attributes:
      functions: as a chat has them.
      named: the tools whose name or kind differs in the chat, by their name there.
      ignored: what is left out, by its place in the body.
    """

    functions: list[dict[str, Any]]
    named: dict[str, Named]
    ignored: list[str]


def read_tools(tools: Any) -> Tools:
    """The tools of a body.

    Raises:
      InputError: a tool that is none, a name that two tools have, or no tool but those that a server runs itself.

    >>> spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
    >>> read = read_tools([{"type": "namespace", "name": "agents", "tools": [spawn]}, {"type": "web_search"}])
    >>> [one["function"]["name"] for one in read.functions], read.named, read.ignored
    (['agents__spawn'], {'agents__spawn': Named(name='spawn', namespace='agents', is_custom=False)}, ['tools.web_search'])
    """
    check_length("tools", tools, MOST_TOOLS, "tools")
    found, hosted = Tools([], {}, []), []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        if kind == "namespace":
            group = typed("tools.name", tool.get("name"), str)
            check_length("tools.tools", tool.get("tools"), MOST_TOOLS, "tools")
            for one in tool["tools"]:
                add(found, one, one.get("type") if isinstance(one, Mapping) else one, group)
        elif kind in ("function", "custom") or not isinstance(kind, str):
            add(found, tool, kind, None)
        else:
            hosted.append(kind)
    if hosted and not found.functions:
        raise refused_tool(hosted[0])
    check_length("tools", found.functions, MOST_TOOLS, "tools")
    found.ignored.extend(f"tools.{kind}" for kind in hosted)
    return found


def refused_tool(kind: Any) -> InputError:
    """The error of a tool that is no function."""
    rule = '{field} must be functions, {{"type": "function", "name": ...}}, as {why}; got {got}. Leave out others.'
    return InputError(rule, field="tools", code="unsupported", why=HOSTED, got=shown(kind))


def add(found: Tools, tool: Any, kind: Any, group: str | None) -> None:
    """Adds a function or a custom tool, which may be of a group."""
    if kind not in ("function", "custom"):
        raise refused_tool(kind)
    function = custom(tool, found) if kind == "custom" else {name: tool[name] for name in FUNCTION if tool.get(name)}
    if group is not None or kind == "custom":
        named = Named(typed("tools.name", tool.get("name"), str), group, kind == "custom")
        function["name"] = name_in_chat(named.name, group)
        found.named[function["name"]] = named
    found.functions.append({"type": "function", "function": function})


def name_in_chat(name: str, group: str | None) -> str:
    """The name of a group's tool among functions.

    >>> name_in_chat("spawn", "agents"), name_in_chat("find", "mcp__files__"), name_in_chat("find", None)
    ('agents__spawn', 'mcp__files__find', 'find')
    """
    return name if group is None else group + ("" if group.endswith(BETWEEN) else BETWEEN) + name


def custom(tool: Mapping[str, Any], found: Tools) -> dict[str, Any]:
    """The function that stands for a custom tool. The model reads the grammar of its text, and nothing holds it to that."""
    form = typed("tools.format", tool.get("format"), dict | None) or {}
    about = "The whole input, as plain text."
    if form.get("type") == "grammar":
        about = f"The whole input, as plain text of this {form.get('syntax')} grammar:\n{form.get('definition')}"
        found.ignored.append("tools.format")
    described = {"description": tool["description"]} if tool.get("description") else {}
    text = {"type": "string", "description": about}
    return described | {"parameters": {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}}


def choice_in_chat(choice: Any) -> Any:
    """A choice of tools as a chat has it.

    >>> choice_in_chat({"type": "function", "name": "f"}), choice_in_chat("auto")
    ({'type': 'function', 'function': {'name': 'f'}}, 'auto')
    """
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": full_name(choice, "tool_choice")}}
    return choice


def call_in_chat(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call among the items of an input as a chat has it."""
    is_custom = item.get("type") == "custom_tool_call"
    arguments = json.dumps({INPUT: item.get("input")}) if is_custom else item.get("arguments")
    called = {"name": full_name(item, "input"), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": called}


def full_name(given: Mapping[str, Any], where: str) -> Any:
    """The name in a chat of what an object of the body names; a name that is none is refused there."""
    name, group = given.get("name"), typed(f"{where}.namespace", given.get("namespace"), str | None)
    return name_in_chat(name, group) if isinstance(name, str) else name


def call_item(number: str, name: str, arguments: str, status: str, named: Mapping[str, Named]) -> dict[str, Any]:
    """A chat's call as an output item.

    >>> call_item("7", "agents__spawn", "{}", "completed", {"agents__spawn": Named("spawn", "agents")})["namespace"]
    'agents'
    """
    tool = named.get(name, Named(name))
    group = {} if tool.namespace is None else {"namespace": tool.namespace}
    if tool.is_custom:
        own = {"id": f"ctc_{number}", "type": "custom_tool_call", "input": input_of(arguments)}
    else:
        own = {"id": f"fc_{number}", "type": "function_call", "arguments": arguments}
    return own | {"call_id": number, "name": tool.name, **group, "status": status}


def input_of(arguments: str) -> str:
    """The text for a custom tool; what the model wrote, where that is no JSON of one.

    >>> input_of('{"input": "*** Begin"}'), input_of('{"inp')
    ('*** Begin', '{"inp')
    """
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    text = found.get(INPUT) if isinstance(found, Mapping) else None
    return text if isinstance(text, str) else arguments


def call_events(what: str, text: str, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events between the beginning and the end of a call's item: its arguments, or a custom tool's text at its end.

    Args:
      what: whether the call goes on ("more") or ends ("end").
      text: by which its arguments grew.
      item: as it is by now.
    """
    place = {"item_id": item["id"]}
    if item["type"] == "function_call":
        if what == "more":
            yield "function_call_arguments.delta", {**place, "delta": text}
        else:
            yield "function_call_arguments.done", {**place, "arguments": item["arguments"], "name": item["name"]}
    elif what == "end":
        yield "custom_tool_call_input.delta", {**place, "delta": item["input"]}
        yield "custom_tool_call_input.done", {**place, "input": item["input"]}
