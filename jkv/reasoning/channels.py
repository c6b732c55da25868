"""Reads answers in the harmony format of gpt-oss (github.com/openai/harmony): messages with a channel each.

    <|channel|>analysis<|message|>They want the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The channel "analysis" is thinking, a message to a function is a call, and others are text: "final", and "commentary", which is
what the model says before it calls. The recipient may also stand before the channel, as the chat template writes it. Texts of
completions have these marks but for `<|constrain|>` and the one that ends the completion.
"""

import re
from collections.abc import Container

from jkv.reasoning.token_text import num_certain
from jkv.reasoning.tool_calls import CallPiece, Segment, Thought

CHANNEL = "<|channel|>"  # before the name of one
HEADS = ("<|start|>", CHANNEL, "to=")  # how the head of a message begins
MESSAGE = "<|message|>"  # between its head and its body
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)  # of a body
LONGEST_HEAD = 500  # characters; a longer one is text
ROLE, NAME, RECIPIENT = (
    re.compile(r"<\|start\|>\s*([\w.]+)"),
    re.compile(r"<\|channel\|>\s*(\w+)"),
    re.compile(r"\bto=([^\s<]+)"),
)
FUNCTIONS = "functions."  # before the names of functions


class ChannelReader:
    """Receives an answer's text piece by piece, and returns what is certain of its thinking, its text and its calls.

    White space at the ends of a body is left out; texts of two messages have a line break between them. However a text is cut
    into pieces, the segments add up to the same.

    Args:
      functions: names of functions; a recipient that is one of them is called without `functions.` before it, too.
      has_many: whether there may be more calls than one; others are left out.
      thinks: whether the prompt ends in a body of the analysis.

    >>> reader = ChannelReader({"add"})
    >>> reader.read('<|channel|>commentary to=functions.add json<|message|>{"x"', is_last=False)
    [CallPiece(index=0, name='add', arguments=''), CallPiece(index=0, name=None, arguments='{"x"')]
    """

    def __init__(self, functions: Container[str], has_many: bool = True, thinks: bool = False) -> None:
        self.functions, self.has_many = functions, has_many
        self.num_calls = 0
        self._place = "body" if thinks else "between"  # messages; or "head"
        self._kind = "analysis" if thinks else ""  # of the body: this, "text" or "call"
        self._text = ""  # that is not certain yet
        self._has_begun = False  # whether the body has any text
        self._seen = set[str]()  # kinds of bodies that have

    def read(self, text: str, is_last: bool) -> list[Segment]:
        """Adds the next piece of text, or the last one; what is certain, in its order."""
        self._text += text
        steps = {"between": self._begin, "head": self._head, "body": self._body}
        found, before = list[Segment](), ("", 0)
        while before != (before := (self._place, len(self._text))):
            found += steps[self._place](is_last)
        return [one for one in found if self.has_many or not isinstance(one, CallPiece) or not one.index]

    def _begin(self, is_last: bool) -> list[Segment]:
        """Between messages, of which each has a head; a text without one is an answer."""
        bare = self._text.lstrip()
        if bare.startswith(HEADS):
            self._place, self._text = "head", bare
        elif bare and (is_last or not any(head.startswith(bare) for head in HEADS)):
            self._open("text")
        return []

    def _head(self, is_last: bool) -> list[Segment]:
        """The head of a message, which says what its body is."""
        head, mark, after = self._text.partition(MESSAGE)
        length = len(head) if mark else num_certain(head, [MESSAGE])
        if mark and length <= LONGEST_HEAD:
            self._text = after
            return self._opened(head)
        if length > LONGEST_HEAD:
            self._text = self._text.removeprefix(next(mark for mark in HEADS if head.startswith(mark)))
            self._open("text")
        elif is_last:
            self._text = ""
        return []

    def _opened(self, head: str) -> list[Segment]:
        role, channel, recipient = (found and found[1] for found in (one.search(head) for one in (ROLE, NAME, RECIPIENT)))
        name = (recipient or "").removeprefix(FUNCTIONS)
        if name and (name != recipient or name in self.functions):
            self._open("call")
            self.num_calls += 1
            return [CallPiece(self.num_calls - 1, name, "")]
        is_text = role in (None, "assistant") and channel in (None, "final", "commentary") and recipient is None
        self._open("text" if is_text else "analysis")
        return []

    def _open(self, kind: str) -> None:
        self._place, self._kind, self._has_begun = "body", kind, False

    def _body(self, is_last: bool) -> list[Segment]:
        """The body of a message, up to a mark that ends it."""
        places = [place for place in map(self._text.find, ENDS) if place >= 0]
        end = min(places, default=len(self._text) if is_last else num_certain(self._text, ENDS))
        body, rest = self._text[:end], self._text[end:]
        body = body if self._has_begun else body.lstrip()
        certain = body.rstrip()
        self._text = body[len(certain) :] + rest
        is_over = bool(places) or is_last
        if is_over:
            self._place, self._text = "between", rest
            for mark in ENDS[:3]:
                self._text = self._text.removeprefix(mark)
        return self._pieces(certain, is_over)

    def _pieces(self, text: str, is_over: bool) -> list[Segment]:
        """What a body goes on with."""
        if self._kind == "call" and is_over and not (text or self._has_begun):
            text = "{}"  # a call without arguments
        if not text:
            return []
        is_later = not self._has_begun and self._kind in self._seen
        self._has_begun = True
        self._seen.add(self._kind)
        if self._kind == "call":
            return [CallPiece(self.num_calls - 1, None, text)]
        text = "\n" * is_later + text
        return [text if self._kind == "text" else Thought(text)]
