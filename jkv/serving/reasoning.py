"""Splits a growing text at `</think>` into reasoning and content."""

from collections.abc import Sequence
from typing import NamedTuple

from jkv.reasoning.token_text import END_OF_THINKING, THINK


class Parts(NamedTuple):
    """New text of each part."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Receives a completion's text piece by piece, and returns what is certain of its reasoning and its content.

    What comes before `</think>` is reasoning where the prompt or the text itself begins to think, and content otherwise. The
    marks, and white space at the ends of each part, belong to neither; where nothing thinks, the text is content as it is.

    Args:
      thinks: whether the prompt ends in thinking.

    >>> splitter = ReasoningSplitter(thinks=False)
    >>> splitter.push("<think>3*7=1</th"), splitter.push("ink> d=1"), splitter.finish()
    (Parts(reasoning='3*7=1', content=''), Parts(reasoning='', content='d=1'), Parts(reasoning='', content=''))
    """

    def __init__(self, thinks: bool) -> None:
        self._place = "start"  # then reasoning and answer; or content, where nothing thinks
        self._otherwise = "reasoning" if thinks else "content"  # than `<think>` at the start
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
        return Parts(text.strip() if place == "reasoning" else "", "")

    def _start(self) -> None:
        """Decides whether the text thinks, once it is long enough."""
        bare = self._text.lstrip()
        if bare.startswith(THINK):
            self._place, self._text = "reasoning", bare.removeprefix(THINK)
        elif not THINK.startswith(bare):
            self._place = self._otherwise

    def _take_reasoning(self) -> str:
        """The reasoning that is certain; goes on to the answer at the mark."""
        head, mark, tail = self._text.partition(END_OF_THINKING)
        if mark:
            reasoning = self._take(head).rstrip()
            self._place, self._text, self._has_begun = "answer", tail, False
            return reasoning
        held = max(n for n in range(len(END_OF_THINKING)) if head.endswith(END_OF_THINKING[:n]))
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


def num_reasoning_tokens(tokens: Sequence[int], thinks: bool, begin: int, end: int) -> int:
    """The number of a completion's tokens up to `</think>`; all if it thinks to its end, 0 if it does not think.

    `begin` and `end` are the tokens of the marks, -1 where a mark is not a single token.

    >>> num_reasoning_tokens([2, 9, 9, 3, 7], False, begin=2, end=3)
    4
    """
    if not thinks and (not tokens or tokens[0] != begin):
        return 0
    return list(tokens).index(end) + 1 if end in tokens else len(tokens)
