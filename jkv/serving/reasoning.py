"""Splits a growing text into reasoning and content, at `</think>` or the mark of another format."""

from collections.abc import Sequence
from typing import NamedTuple

from jkv.reasoning.marks import TAGS, Marks


class Parts(NamedTuple):
    """New text of each part."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Receives a completion's text piece by piece, and returns what is certain of its reasoning and its content.

    What comes before the mark that ends the thinking is reasoning where the prompt or the text itself begins to think, and
    content otherwise. The marks, and white space at the ends of each part, belong to neither; where nothing thinks, the text is
    content as it is.

    Args:
      thinks: whether the prompt ends in thinking.
      marks: of the model (`jkv.reasoning.marks`).

    >>> splitter = ReasoningSplitter(thinks=False)
    >>> splitter.push("<think>3*7=1</th"), splitter.push("ink> d=1"), splitter.finish()
    (Parts(reasoning='3*7=1', content=''), Parts(reasoning='', content='d=1'), Parts(reasoning='', content=''))
    """

    def __init__(self, thinks: bool, marks: Marks = TAGS) -> None:
        self._marks = marks
        self._place = "start"  # then reasoning and answer; or content, where nothing thinks
        self._otherwise = "reasoning" if thinks else "content"  # than a mark at the start
        self._text = ""  # that is not certain yet
        self._has_begun = False  # whether the part in progress has any text

    def push(self, text: str) -> Parts:
        """Adds the next piece of text."""
        self._text += text
        if self._place == "start":
            self._start()
        reasoning = self._take_reasoning() if self._place == "reasoning" else ""
        content = self._take(self._text) if self._place in ("answer", "content") else ""
        return Parts(reasoning, content)

    def finish(self) -> Parts:
        """What is left when the text has ended."""
        place, text = self._otherwise if self._place == "start" else self._place, self._text
        self._text = ""
        if place == "content":
            return Parts("", text)
        rest = text.rstrip() if self._has_begun else text.strip()
        return Parts(rest if place == "reasoning" else "", "")

    def _start(self) -> None:
        """Decides whether the text thinks, once it is long enough."""
        bare, begin = self._text.lstrip(), self._marks.begin
        before, end, tail = self._marks.cut(bare)
        if bare.startswith(begin):
            self._place, self._text = "reasoning", bare.removeprefix(begin)
        elif end and not before and self._otherwise == "content":  # it answers at once
            self._place, self._text = "answer", tail
        elif not any(mark.startswith(bare) and mark != bare for mark in (begin, *self._marks.ends)):
            self._place = self._otherwise

    def _take_reasoning(self) -> str:
        """The reasoning that is certain; goes on to the answer at the mark."""
        head, mark, tail = self._marks.cut(self._text)
        if mark:
            reasoning = self._take(head).rstrip()
            self._place, self._text, self._has_begun = "answer", tail, False
            return reasoning
        held = self._marks.num_held(head)
        return self._take(head[: len(head) - held], head[len(head) - held :])

    def _take(self, text: str, held: str = "") -> str:
        """Of a text, what may be passed on; white space waits for what follows it. `held` is kept for later."""
        if self._place == "content":
            self._text = ""
            return text
        if not self._has_begun:
            text = text.lstrip()
        certain = text.rstrip()
        self._has_begun |= bool(certain)
        self._text = text[len(certain) :] + held
        return certain


def num_reasoning_tokens(tokens: Sequence[int], thinks: bool, begin: Sequence[int], ends: Sequence[Sequence[int]]) -> int:
    """The number of a completion's tokens up to the end of its thinking; all if it thinks to its end, 0 if it does not think.

    `begin` and `ends` are the tokens of the marks.

    >>> num_reasoning_tokens([2, 9, 9, 3, 7], False, begin=[2], ends=[[3]])
    4
    """
    tokens = list(tokens)
    if not thinks and tokens[: len(begin)] != list(begin):
        return 0
    for count in range(len(tokens) + 1):
        if any(tokens[max(0, count - len(end)) : count] == list(end) for end in ends if end):
            return count
    return len(tokens)
