"""Reads answers in the harmony format of gpt-oss (github.com/openai/harmony): messages, each in a channel.

    <|channel|>analysis<|message|>They want the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

A message in the channel "analysis" is thinking, and a message to a function is a call. Messages in "final" and "commentary"
are text; "commentary" is text before a call. The recipient may also precede the channel, as the chat template writes it. The
text of a completion has these marks, except `<|constrain|>` and the mark that ends the completion.
"""

import re
from collections.abc import Container

from jkv.reasoning.token_text import num_certain
from jkv.reasoning.tool_calls import CallPiece, Segment, Thought

CHANNEL = "<|channel|>"  # before the name of a channel
HEADS = ("<|start|>", CHANNEL, "to=")  # one of these begins the head of a message
MESSAGE = "<|message|>"  # between the head and the body of a message
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)  # one of these ends a body
LONGEST_HEAD = 500  # characters; a longer head is read as text
ROLE, NAME, RECIPIENT = (
    re.compile(r"<\|start\|>\s*([\w.]+)"),
    re.compile(r"<\|channel\|>\s*(\w+)"),
    re.compile(r"\bto=([^\s<]+)"),
)
FUNCTIONS = "functions."  # before the names of functions


class ChannelReader:
    """Parses an answer piece by piece, and returns its thinking, text and calls as soon as they are certain.

    White space at the ends of a body is removed, and a line break separates the texts of two messages. The segments add up to
    the same texts and calls however the answer is cut into pieces.

    Args:
      functions: names of functions; a recipient with one of these names is a call even without `functions.` before it.
      has_many: whether several calls are allowed; if not, only the first one is returned.
      thinks: whether the prompt ends inside the body of an analysis message.

    >>> reader = ChannelReader({"add"})
    >>> reader.read('<|channel|>commentary to=functions.add json<|message|>{"x"', is_last=False)
    [CallPiece(index=0, name='add', arguments=''), CallPiece(index=0, name=None, arguments='{"x"')]
    """

    def __init__(self, functions: Container[str], has_many: bool = True, thinks: bool = False) -> None:
        self.functions, self.has_many = functions, has_many
        self.num_calls = 0
        self._place = "body" if thinks else "between"  # where the text is: in a "head", a "body", or "between" messages
        self._kind = "analysis" if thinks else ""  # of the body: "analysis", "text" or "call"
        self._text = ""  # text that is not certain yet
        self._has_begun = False  # whether the body has any text
        self._seen = set[str]()  # kinds of the bodies so far that have text

    def read(self, text: str, is_last: bool) -> list[Segment]:
        """Adds the next or last piece of text, and returns the segments that are certain by now, in order."""
        self._text += text
        steps = {"between": self._begin, "head": self._head, "body": self._body}
        found, before = list[Segment](), ("", 0)
        while before != (before := (self._place, len(self._text))):
            found += steps[self._place](is_last)
        return [one for one in found if self.has_many or not isinstance(one, CallPiece) or not one.index]

    def _begin(self, is_last: bool) -> list[Segment]:
        """Reads the text between messages: a head begins a message, and text without a head is a final answer."""
        bare = self._text.lstrip()
        if bare.startswith(HEADS):
            self._place, self._text = "head", bare
        elif bare and (is_last or not any(head.startswith(bare) for head in HEADS)):
            self._open("text")
        return []

    def _head(self, is_last: bool) -> list[Segment]:
        """Reads the head of a message, which gives the kind of its body."""
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
        """Reads the body of a message, up to the mark that ends it."""
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
        """The segments of the next text of a body."""
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
