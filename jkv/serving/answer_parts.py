"""The parts of an answer in their order: its reasoning, its texts and its tool calls.

OpenAI's Responses API and Anthropic's Messages API return answers as lists of such parts, and stream them one after another.
"""

import dataclasses
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple

from jkv.engine.outputs import Event
from jkv.engine.service import Ticket
from jkv.model.params import Model
from jkv.reasoning.marks import marks_of
from jkv.reasoning.tool_calls import CallPiece, Segment, Thought
from jkv.serving.jobs import Job
from jkv.serving.requests import ChatFields
from jkv.serving.responses import FAILURES, AnswerReader, describe_failure

Kind = Literal["reasoning", "text", "call"]


@dataclasses.dataclass(eq=False)
class Part:
    """A part of an answer.

    Attributes:
      index: among the parts of its answer.
      kind: what it is.
      id: of the part, as clients see it; that of a call has the form that the chat template asks for.
      name: of the function that a call calls.
      text: what it has so far; of a call, its arguments.
    """

    index: int
    kind: Kind
    id: str
    name: str = ""
    text: str = ""


class Change(NamedTuple):
    """A part begins, goes on with a text, or ends."""

    what: Literal["begin", "more", "end"]
    part: Part
    text: str = ""


class AnswerParts:
    """Receives the text of a chat's only sample piece by piece, and returns how its parts change.

    At most one part is open at a time. However the text is cut into pieces, the parts are the same. An answer without any text
    has one empty text.

    Args:
      model: whose answer it is.
      job: the chat.

    Attributes:
      parts: all that have begun.
    """

    def __init__(self, model: Model, job: Job) -> None:
        assert isinstance(job.fields, ChatFields)
        self._answer = AnswerReader(marks_of(model.tokenizer), job.thinks, job.calls)
        self._calls, self._has_reasoning = job.calls, job.fields.include_reasoning
        self._open: Part | None = None
        self._call = -1  # the index of the call that is open, or was last
        self.parts: list[Part] = []

    def push(self, text: str, is_last: bool) -> list[Change]:
        """Adds the next piece of text, or the last one."""
        changes = list[Change]()
        for segment in self._answer.push(text, is_last):
            if self._has_reasoning or not isinstance(segment, Thought):
                changes += self._add_segment(segment)
        if is_last:
            if not self.parts:
                changes += self._begin(Part(0, "text", new_id()))
            changes += self._end()
        return changes

    def reason(self, reason: str | None) -> str | None:
        """The finish reason of the answer: "tool_calls" where it waits for results."""
        return self._answer.reason(reason)

    def _add_segment(self, segment: Segment) -> list[Change]:
        if isinstance(segment, str):
            return self._add("text", segment)
        if isinstance(segment, Thought):
            return self._add("reasoning", segment.text)
        changes = []
        if segment.index != self._call:
            changes = self._begin(self._called(segment))
            self._call = segment.index
        return changes + (self._more(segment.arguments) if segment.arguments else [])

    def _called(self, piece: CallPiece) -> Part:
        assert self._calls is not None
        assert piece.name is not None
        return Part(len(self.parts), "call", self._calls.form.new_id(), piece.name)

    def _add(self, kind: Kind, text: str) -> list[Change]:
        if self._open is not None and self._open.kind == kind:
            return self._more(text)
        changes = self._begin(Part(len(self.parts), kind, new_id()))
        return changes + self._more(text.removeprefix("\n") if len(self.parts) > 1 else text)  # a break between messages

    def _begin(self, part: Part) -> list[Change]:
        changes = self._end()
        self._open = part
        self.parts.append(part)
        return [*changes, Change("begin", part)]

    def _more(self, text: str) -> list[Change]:
        assert self._open is not None
        self._open.text += text
        return [Change("more", self._open, text)]

    def _end(self) -> list[Change]:
        part, self._open = self._open, None
        return [] if part is None else [Change("end", part)]


def new_id() -> str:
    """A random id."""
    return secrets.token_hex(12)


async def changes_of(parts: AnswerParts, tickets: Sequence[Ticket]) -> AsyncIterator[tuple[Event, list[Change]]]:
    """The events of a chat's only sample as they come, each with the changes of its parts.

    Raises:
      RuntimeError: the sample failed.
    """
    (ticket,) = tickets
    async for event in ticket:
        if event.finish_reason in FAILURES:
            result = await ticket
            raise RuntimeError(describe_failure(event.finish_reason, result.samples[event.sample]))
        yield event, parts.push(event.text or "", is_last=bool(event.finish_reason))
