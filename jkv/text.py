"""Text of a completion that still grows: decoded piece by piece, and cut where a stop string appears."""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for a character whose bytes are not all there


class TextStream:
    """Decodes tokens as they come; the work for each does not grow with those before it.

    Attributes:
      text: what the tokens so far say, but for characters whose bytes are not all there.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.text = ""
        self._tokens: list[int] = []  # those still looked at: a tokenizer may space a token by the ones before it
        self._num_told = 0  # how many of them the text has already

    def push(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens."""
        self._tokens += tokens
        before, now = self.decode(self._tokens[: self._num_told]), self.decode(self._tokens)
        if now.endswith(UNFINISHED) or len(now) <= len(before):
            return
        self.text += now[len(before) :]
        self._tokens = self._tokens[self._num_told :]
        self._num_told = len(self._tokens)


class StopFinder:
    """Finds the token with which a stop string is complete."""

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str]) -> None:
        self.stream = TextStream(decode)
        self.stop_strings = stop_strings
        self._longest = max(map(len, stop_strings))

    def find(self, tokens: Sequence[int]) -> int | None:
        """How many of the next tokens to keep, the one that completes a stop string included; None when all go on."""
        for count, token in enumerate(tokens, 1):
            start = max(0, len(self.stream.text) - self._longest + 1)
            self.stream.push([token])
            if any(stop in self.stream.text[start:] for stop in self.stop_strings):
                return count
        return None


def cut(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string.

    >>> cut("so x=3; done", [";", "done"])
    'so x=3'
    """
    return text[: min((text.find(stop) for stop in stop_strings if stop in text), default=len(text))]


def num_certain(text: str, stop_strings: Sequence[str]) -> int:
    """How many characters of a growing text can no longer become part of a stop string.

    >>> num_certain("x = 3<", ["</think>"])
    5
    """
    starts = (
        len(text) - size
        for stop in stop_strings
        for size in range(1, min(len(stop), len(text) + 1))
        if text.endswith(stop[:size])
    )
    return min(starts, default=len(text))
