"""Reads tool calls that a model writes as JSON: `{"name": "f", "arguments": {...}}`, or a name before its arguments."""

import json
import re
from collections.abc import Collection
from typing import Any

from jkv.reasoning.json_scanner import SPACE, JsonScanner
from jkv.reasoning.token_text import num_certain

TEXT = r'"(?:[^"\\]|\\.)*"'
MEMBERS = rf'(?:\s*"(?:type|id)"\s*:\s*{TEXT}\s*,)*'  # that say nothing about the call
HEAD = re.compile(rf'\{{{MEMBERS}\s*"name"\s*:\s*({TEXT})\s*,{MEMBERS}\s*"(?:arguments|parameters)"\s*:\s*\{{')
NAMED = re.compile(r"([\w.-]+)(?:\s*\[CALL_ID\]\w*)?(?:\s*\[ARGS\])?")  # Mistral's newer form: NAME[ARGS]{...}
BEFORE = re.compile(r"[\s\w.\-\[\]]*")  # what may be before the first brace
LONGEST_NAME = 200  # characters before the first brace


class JsonCallReader:
    """Reads one call from the text after the mark that begins calls. Its attributes change as text is pushed.

    A call is certain once its arguments are a JSON object up to the first value's first character. From there on they are
    passed on as they come. Where they turn out to be no JSON, what the model wrote is passed on up to the end mark.

    Args:
      end: the mark that ends a call; may be empty.
      has_names: whether a name may stand before the arguments.
      known: names of functions, others are no calls; None takes any.

    Attributes:
      name: of the function; empty as long as it is not certain that this is a call.
      state: "open", "done", or "failed" if it is no call.
      rest: once it is not open, the text that does not belong to it.
    """

    def __init__(self, end: str, has_names: bool = False, known: Collection[str] | None = None) -> None:
        self.end, self.has_names, self.known = end, has_names, known
        self.name, self.state, self.rest = "", "open", ""
        self._place = "before"  # the object; then "object", "arguments" and "after" them, or "broken"
        self._head = ""  # before the object
        self._object = ""  # of the object, until the arguments begin
        self._arguments = ""  # which are not passed on yet
        self._found = ""  # the name of a call that is not certain yet
        self._base = 0  # objects that are open around the arguments
        self._scanner = JsonScanner()

    @property
    def is_list(self) -> bool:
        """Whether the call is in a list."""
        return "[" in self._head

    def push(self, text: str) -> str:
        """Adds text. Returns what is certain of the arguments."""
        found = ""
        for i, char in enumerate(text):
            if self._place == "broken":
                return found + self._break_off(text[i:])
            found += self._take(char)
            if self.state != "open":
                self.rest += text[i + 1 :]
                break
        return found

    def finish(self) -> str:
        """The end of the text: what is left of the arguments."""
        if self.state != "open":
            return ""
        self.state = "done" if self.name else "failed"
        return self._commit() if self.name else ""

    def _take(self, char: str) -> str:
        """Adds a character. Returns what it makes certain of the arguments."""
        if self._place == "before":
            return self._before(char)
        scanner = self._scanner
        if not scanner.take(char):
            return self._invalid(char)
        if self._place == "object":
            self._in_object(char)
        elif self._place == "arguments":
            self._arguments += char
            if scanner.depth == self._base:
                self._place = "after"
            if scanner.depth != self._base + 1 or scanner.in_value:
                self.name = self._found
        if scanner.is_done and self.state == "open":
            self.state = "done"
        return self._commit() if self.name else ""

    def _commit(self) -> str:
        found, self._arguments = self._arguments, ""
        return found

    def _invalid(self, char: str) -> str:
        """At a character that cannot follow."""
        if not self.name:
            self.state = "failed"
        elif self._place == "after":
            self.state, self.rest = "done", char
        else:
            self._place = "broken"
            return self._commit() + self._break_off(char)
        return ""

    def _break_off(self, text: str) -> str:
        """Passes on the text up to the mark that ends a call."""
        text = self._commit() + text
        before, mark, after = text.partition(self.end) if self.end else (text, "", "")
        if mark:
            self.state, self.rest = "done", mark + after
            return before
        held = len(text) - num_certain(text, [self.end] if self.end else [])
        self._arguments = text[len(text) - held :]
        return text[: len(text) - held]

    def _before(self, char: str) -> str:
        """Adds a character before the first brace, or that brace."""
        if char != "{":
            self._head += char
            is_fine = BEFORE.fullmatch(char) if self.has_names else char in SPACE + "["
            if not is_fine or len(self._head) > LONGEST_NAME:
                self.state = "failed"
            return ""
        self._scanner.take(char)
        if self._head.strip(SPACE + "[") == "":
            self._place, self._object = "object", char
        elif (match := NAMED.fullmatch(self._head.strip())) and self._is_known(match[1]):
            self._place, self._found, self._arguments = "arguments", match[1], char
        else:
            self.state = "failed"
        return ""

    def _in_object(self, char: str) -> None:
        """After a character of an object that holds name and arguments."""
        scanner = self._scanner
        self._object += char
        if scanner.depth == 2 and char == "{" and (match := HEAD.fullmatch(self._object)):
            name = json.loads(match[1])
            if not self._is_known(name):
                self.state = "failed"
            self._place, self._found, self._base, self._arguments = "arguments", name, 1, char
        elif scanner.is_done:
            self._whole(json.loads(self._object))

    def _whole(self, call: dict[str, Any]) -> None:
        """At the end of an object whose members are in another order, or whose arguments are missing or a text."""
        name, given = call.get("name"), call.get("arguments", call.get("parameters"))
        text = given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)
        if isinstance(name, str) and self._is_known(name) and is_object(text):
            self.name, self._arguments, self.state = name, text, "done"
        else:
            self.state = "failed"

    def _is_known(self, name: str) -> bool:
        return bool(name) and (self.known is None or name in self.known)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):  # nested too deep to be read
        return False
