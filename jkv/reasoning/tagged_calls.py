"""Reads tool calls that a model writes with a tag around each argument, and makes JSON of them."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jkv.reasoning.token_text import num_certain

PYTHON = {"True": "true", "False": "false", "None": "null"}
LONGEST_TAG = 200  # characters, more than any pattern matches


class Tag(NamedTuple):
    """A part of a call.

    Attributes:
      begin: its first characters; empty if it is a bare name.
      pattern: all of it, at most LONGEST_TAG characters.
    """

    begin: str
    pattern: re.Pattern[str]

    def may_come(self, text: str) -> bool:
        """Whether a text may become one that begins with this part.

        >>> [QWEN_TAGS.name.may_come(text) for text in ("<func", "<function=f", "{")], GLM_TAGS.name.may_come("get_wea")
        ([True, True, False], True)
        """
        if len(text) > LONGEST_TAG:
            return False
        if not self.begin:
            return re.fullmatch(r"[\w.-]*\s*", text) is not None
        return text.startswith(self.begin) or self.begin.startswith(text)


class Tags(NamedTuple):
    """How a call is written; white space between its parts is skipped.

    Attributes:
      name: with the function's name as its group.
      key: with an argument's name as its group.
      value_end: the text after a value.
      call_end: what is after the last argument.
      is_padded: whether a value stands on lines of its own.
    """

    name: Tag
    key: Tag
    value_end: str
    call_end: Tag
    is_padded: bool = False


QWEN_TAGS = Tags(
    Tag("<function=", re.compile(r"<function=([^<>\s]{1,100})>")),
    Tag("<parameter=", re.compile(r"<parameter=([^<>\n]{1,100})>")),
    "</parameter>",
    Tag("</", re.compile(r"</function>|(?=</tool_call>)")),
    is_padded=True,
)
GLM_TAGS = Tags(
    Tag("", re.compile(r"([\w.-]{1,100})\s{0,9}(?=<)")),
    Tag("<arg_key>", re.compile(r"<arg_key>([^<>]{1,100})</arg_key>\s{0,9}<arg_value>")),
    "</arg_value>",
    Tag("</", re.compile(r"(?=</tool_call>)")),
)


class TaggedCallReader:
    """Reads one call from the text after the mark that begins calls. Its attributes change as text is pushed.

    A call is certain with its first argument, or with its end. Texts are passed on as they come, other values once they are
    whole: as JSON where they are JSON and the function's schema does not ask for a text, and else as texts.

    Args:
      tags: how calls are written.
      functions: the JSON schema of each function's arguments, by its name.

    Attributes:
      name, state, rest: as in `jkv.reasoning.json_calls.JsonCallReader`.
    """

    is_list = False

    def __init__(self, tags: Tags, functions: Mapping[str, Any]) -> None:
        self.tags, self.functions = tags, functions
        self.name, self.state, self.rest = "", "open", ""
        self._place = "name"  # then "members"; "padding" before a value, and "value"
        self._text = ""  # that is not read yet
        self._found = ""  # the name of a call that is not certain yet
        self._types: set[str] = set()  # of the value in progress
        self._num_members = 0

    @property
    def _is_text(self) -> bool:
        """Whether the value in progress is a text for sure, of which a part may be passed on."""
        return self._types == {"string"}

    def push(self, text: str) -> str:
        """Adds text. Returns what is certain of the arguments."""
        self._text += text
        found = ""
        steps = {
            "name": self._read_name,
            "members": self._read_members,
            "padding": self._read_padding,
            "value": self._read_value,
        }
        before = ("", 0)
        while self.state == "open" and before != (before := (self._place, len(self._text))):
            found += steps[self._place]()
        return found

    def finish(self) -> str:
        """The end of the text: what is left of a value that has not ended."""
        if self.state != "open":
            return ""
        self.state = "done" if self.name else "failed"
        if self._place not in ("padding", "value"):
            self.rest = self._text if self.name else ""
            return ""
        return escaped(self._text) if self._is_text else self._text

    def _read_name(self) -> str:
        bare = self._text.lstrip()
        if match := self.tags.name.pattern.match(bare):
            self._place, self._found, self._text = "members", match[1], bare[match.end() :]
        elif not self.tags.name.may_come(bare):
            self.state = "failed"
        return ""

    def _read_members(self) -> str:
        bare = self._text.lstrip()
        if match := self.tags.key.pattern.match(bare):
            place = "padding" if self.tags.is_padded else "value"
            self._place, self._text, self.name = place, bare[match.end() :], self._found
            self._num_members += 1
            self._types = types_of(self.functions.get(self.name), match[1])
            begin = "{" if self._num_members == 1 else ", "
            return f"{begin}{json.dumps(match[1], ensure_ascii=False)}: " + '"' * self._is_text
        if match := self.tags.call_end.pattern.match(bare):
            self.name = self._found
            return self._end(bare[match.end() :])
        if self.tags.key.may_come(bare) or self.tags.call_end.may_come(bare):
            return ""
        if self.name:  # what is neither an argument nor the end is no part of the call
            return self._end(self._text)
        self.state = "failed"
        return ""

    def _end(self, rest: str) -> str:
        self.state, self.rest, self._text = "done", rest, ""
        return "}" if self._num_members else "{}"

    def _read_padding(self) -> str:
        if self._text:
            self._place, self._text = "value", self._text.removeprefix("\n")
        return ""

    def _read_value(self) -> str:
        value, mark, after = self._text.partition(self.tags.value_end)
        if mark:
            self._place, self._text = "members", after
            value = value.removesuffix("\n") if self.tags.is_padded else value
            return escaped(value) + '"' if self._is_text else as_json(value, self._types)
        if not self._is_text:
            return ""
        held = len(self._text) - num_certain(self._text, [self.tags.value_end])
        if self.tags.is_padded and self._text[: len(self._text) - held].endswith("\n"):
            held += 1
        certain = self._text[: len(self._text) - held]
        self._text = self._text[len(self._text) - held :]
        return escaped(certain)


def types_of(schema: Any, key: str) -> set[str]:
    """The types that a function's schema allows as an argument; empty where it does not say.

    >>> sorted(types_of({"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, "x"))
    ['null', 'string']
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    field = properties.get(key) if isinstance(properties, Mapping) else None
    found: set[str] = set()
    for one in (field, *(part for name in ("anyOf", "oneOf") for part in listed(field, name))):
        kind = one.get("type") if isinstance(one, Mapping) else None
        found.update([kind] if isinstance(kind, str) else filter(lambda kind: isinstance(kind, str), listed(one, "type")))
        choices = listed(one, "enum")
        if kind is None and choices and all(isinstance(choice, str) for choice in choices):
            found.add("string")
    return found


def listed(field: Any, name: str) -> list[Any]:
    """The list of a schema's field; empty if it has none."""
    found = field.get(name) if isinstance(field, Mapping) else None
    return found if isinstance(found, list) else []


def as_json(value: str, types: Collection[str] = ()) -> str:
    """A value as JSON, of one of the types if there are any: itself where it is JSON and need not be a text, else a text.

    Python's names for true, false and null, which templates write, become JSON's.

    >>> as_json("3"), as_json("True"), as_json("Paris"), as_json("NaN"), as_json("3", ["string", "null"])
    ('3', 'true', '"Paris"', '"NaN"', '"3"')
    """

    def refuse(name: str) -> Any:  # a number that JSON has not
        raise ValueError(name)

    text = PYTHON.get(value.strip(), value.strip())
    try:
        if "string" in types and not (text == "null" and "null" in types):
            raise ValueError(text)
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return text


def escaped(text: str) -> str:
    """A part of a text, as it stands in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
