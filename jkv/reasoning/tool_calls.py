"""Finds the tool calls in what a model writes, each model family in its own form.

A form is known by what the chat template writes for the calls of earlier messages. The marks of some are special tokens, which
the texts of completions keep (`jkv.reasoning.marks`). To add a form, add an entry to `FORMS`, and a golden text to its tests.
"""

import dataclasses
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jkv.reasoning.json_calls import JsonCallReader
from jkv.reasoning.tagged_calls import GLM_TAGS, QWEN_TAGS, TaggedCallReader, Tags
from jkv.reasoning.token_text import num_certain

BETWEEN = re.compile(r"\s*[,;]?\s*")  # the calls of one list
LETTERS = string.ascii_letters + string.digits


@dataclasses.dataclass(frozen=True)
class CallForm:
    """How a family of models writes calls.

    Attributes:
      name: of the form.
      signs: texts of a chat template, any of which shows that its model writes this form.
      begin: the mark before calls; empty where an answer is nothing but calls.
      end: the mark after a call; may be empty.
      tags: the tags of its arguments; None for JSON.
      has_names: whether a function's name may stand before its arguments.
      id_length: characters of a call's id, where the template asks for a certain number.
      has_channels: whether answers are messages in channels, which `jkv.reasoning.channels` reads.
    """

    name: str
    signs: tuple[str, ...]
    begin: str = ""
    end: str = ""
    tags: Tags | None = None
    has_names: bool = False
    id_length: int = 0
    has_channels: bool = False

    def reader(self, functions: Mapping[str, Any]) -> JsonCallReader | TaggedCallReader:
        """A reader of one call; without a mark, only calls of known functions are calls."""
        if self.tags is not None:
            return TaggedCallReader(self.tags, functions)
        return JsonCallReader(self.end, self.has_names, None if self.begin else functions.keys())

    def new_id(self) -> str:
        """The id of a call."""
        if self.id_length:
            return "".join(secrets.choice(LETTERS) for _ in range(self.id_length))
        return f"call_{secrets.token_hex(12)}"


FORMS = {
    form.name: form
    for form in (  # the first one whose sign is in a template is the template's
        CallForm("harmony", ("<|channel|>commentary",), has_channels=True),
        CallForm("qwen3_coder", ("<function=",), "<tool_call>", "</tool_call>", QWEN_TAGS),
        CallForm("glm", ("<arg_key>",), "<tool_call>", "</tool_call>", GLM_TAGS),
        CallForm("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", has_names=True, id_length=9),
        CallForm("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>"),
        CallForm("llama3", ("<|python_tag|>", '"parameters": dictionary of argument name'), ""),
    )
}
SPECIAL = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
SPECIAL_MARKS = frozenset((*SPECIAL, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))  # which texts keep where they are special tokens


def form_of(template: str) -> CallForm | None:
    """The form that a chat template writes; None if it is none of the table.

    >>> form_of("{{ '<tool_call>' }}").name, form_of("{{ messages }}")
    ('hermes', None)
    """
    return next((form for form in FORMS.values() if any(sign in template for sign in form.signs)), None)


@dataclasses.dataclass(frozen=True)
class CallPiece:
    """New text of a call.

    Attributes:
      index: of the call.
      name: of the function, in the first piece of a call.
      arguments: what its arguments go on with, JSON.
    """

    index: int
    name: str | None
    arguments: str


class Thought(NamedTuple):
    """New text of the thinking."""

    text: str


Step = tuple[str, CallPiece | None]  # new text, and a piece of a call
Segment = str | CallPiece | Thought  # of an answer, in its order


class CallSplitter:
    """Receives an answer's text piece by piece, and returns what is certain of its text and its calls.

    A call that is not certain (see the readers) stays text. White space around calls belongs to neither. However a text is cut
    into pieces, the pieces of the answer add up to the same.

    Args:
      form: of the calls.
      functions: the JSON schema of each function's arguments, by its name.
      has_many: whether there may be more calls than one; others are left out.

    >>> splitter = CallSplitter(FORMS["hermes"], {})
    >>> splitter.push('So: <tool_call>{"name": "add", "arguments": {"x": 1'), splitter.push("}}</tool_call>")
    (('So:', [CallPiece(index=0, name='add', arguments='{"x": 1')]), ('', [CallPiece(index=0, name=None, arguments='}')]))
    """

    def __init__(self, form: CallForm, functions: Mapping[str, Any], has_many: bool = True) -> None:
        self.form, self.functions, self.has_many = form, functions, has_many
        self.num_calls = 0
        self._place = "text" if form.begin else "start"  # or "call", "between" calls, or "rest", which is only text
        self._text = ""  # that is not certain yet
        self._is_after = False  # whether a call has ended, and no text has come since
        self._is_list = False  # whether a list of calls is open
        self._reader = form.reader(functions)
        self._before, self._raw = "", ""  # white space and mark before a call, and what it has so far, while it is not certain

    def push(self, text: str) -> tuple[str, list[CallPiece]]:
        """Adds the next piece of text."""
        return apart(self.read(text, is_last=False))

    def finish(self) -> tuple[str, list[CallPiece]]:
        """What is left when the text has ended."""
        return apart(self.read("", is_last=True))

    def read(self, text: str, is_last: bool) -> list[Segment]:
        """Adds the next piece of text, or the last one; what is certain, in its order."""
        self._text += text
        steps = {"start": self._start, "text": self._find, "call": self._call, "between": self._go_on, "rest": self._pass_on}
        found, before = list[Segment](), ("", 0)
        while before != (before := (self._place, len(self._text))):
            more, piece = steps[self._place](is_last)
            if more:
                found.append(more)
            if piece is not None and (self.has_many or not piece.index):
                found.append(piece)
        return found

    def _start(self, is_last: bool) -> Step:
        """Where an answer is nothing but calls, or has none."""
        bare = self._text.lstrip()
        if bare.startswith("{"):
            self._begin(self._text[: len(self._text) - len(bare)], bare)
        elif bare or is_last:
            self._place = "rest"
        return "", None

    def _find(self, is_last: bool) -> Step:
        """Text up to the mark that begins a call."""
        text = self._text.lstrip() if self._is_after else self._text
        before, mark, after = text.partition(self.form.begin)
        certain = before if is_last or mark else before[: num_certain(before, [self.form.begin])]
        certain = certain if is_last and not mark else certain.rstrip()
        self._is_after &= not certain
        if mark:
            self._begin(before[len(certain) :] + mark, after)
        else:
            self._text = text[len(certain) :]
        return certain, None

    def _begin(self, before: str, text: str) -> None:
        self._place, self._text, self._before, self._raw = "call", text, before, ""
        self._reader = self.form.reader(self.functions)

    def _call(self, is_last: bool) -> Step:
        """Reads a call, which is text after all if it fails."""
        reader, text, self._text = self._reader, self._text, ""
        was_certain = bool(reader.name)
        self._raw += "" if was_certain else text
        arguments = reader.push(text) + (reader.finish() if is_last else "")
        if reader.state == "failed":
            self._place, self._text, self._is_after = "text" if self.form.begin else "rest", self._raw, False
            return self._before, None
        index = self.num_calls
        if reader.state == "done":
            self._place, self._text, self._is_after = "between", reader.rest, True
            self._is_list |= reader.is_list
            self.num_calls += 1
        if not reader.name or (was_certain and not arguments):
            return "", None
        return "", CallPiece(index, None if was_certain else reader.name, arguments)

    def _go_on(self, is_last: bool) -> Step:
        """After a call: its end mark, or another call of the same list."""
        end, bare = self.form.end, self._text.lstrip()
        if end and bare.startswith(end):
            self._place, self._text, self._is_list = "text", bare.removeprefix(end), False
        elif is_last and bare and end.startswith(bare):  # a mark that the limit has cut
            self._place, self._text = "rest", ""
        elif is_last or not (end.startswith(bare) or (self.form.tags is None and BETWEEN.fullmatch(bare))):
            match = BETWEEN.match(bare)
            if self.form.tags is None and match and bare[match.end() :].startswith("{"):
                self._begin(bare[: match.end()], bare[match.end() :])
            elif bare.startswith("]") and self._is_list:
                self._text, self._is_list = bare[1:], False
            else:
                self._place, self._text, self._is_list = "text" if self.form.begin else "rest", bare, False
        return "", None

    def _pass_on(self, is_last: bool) -> Step:
        """Text in which no call is looked for."""
        text, self._text = self._text, ""
        return text, None


def apart(segments: Iterable[Segment]) -> tuple[str, list[CallPiece]]:
    """The text of an answer, and its calls.

    >>> apart(["So", CallPiece(0, "add", "{}"), "."])
    ('So.', [CallPiece(index=0, name='add', arguments='{}')])
    """
    segments = list(segments)
    text = "".join(one for one in segments if isinstance(one, str))
    return text, [one for one in segments if isinstance(one, CallPiece)]


def thinking_in(segments: Iterable[Segment]) -> str:
    """The thinking of an answer.

    >>> thinking_in([Thought("3*7"), "So", Thought("=21")])
    '3*7=21'
    """
    return "".join(one.text for one in segments if isinstance(one, Thought))
