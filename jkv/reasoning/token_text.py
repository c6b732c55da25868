"""Text of tokens: facts about each token of a tokenizer, incremental decoding, and stop strings."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

BREAK = "\n\n"
THINK, END_OF_THINKING = "<think>", "</think>"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete UTF-8 character
MOST_HELD = 16  # tokens that wait for their text
LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens


class TextStream:
    """Decodes tokens incrementally: the work per token does not grow with the text, whatever the tokens are.

    Tokens that end in an incomplete character wait for those that complete it. Where more than `MOST_HELD` wait, none will: the
    first of them become replacement characters. Tokens that stay without text are forgotten.

    Attributes:
      num_tokens: the number of tokens pushed so far.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.num_tokens = 0
        self._parts: list[str] = []
        self._tokens: list[int] = []  # the last tokens: the space before a token may depend on its predecessor
        self._num_decoded = 0  # how many of them are in the text

    @property
    def text(self) -> str:
        """The text of the tokens so far, without an incomplete UTF-8 character at its end."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def push(self, tokens: Sequence[int]) -> str:
        """Adds the next tokens. Returns the text that they complete."""
        self.num_tokens += len(tokens)
        self._tokens += tokens
        before, now = self.decode(self._tokens[: self._num_decoded]), self.decode(self._tokens)
        count = len(self._tokens)
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            if count - self._num_decoded <= MOST_HELD:
                return ""
            if len(now) <= len(before):
                self._tokens = self._tokens[: self._num_decoded]
                return ""
            ends = range(count - LONGEST_CHARACTER, count - 2 * LONGEST_CHARACTER, -1)  # one of them is between characters
            wholes = ((end, self.decode(self._tokens[:end])) for end in ends)
            count, now = next(((end, text) for end, text in wholes if now.startswith(text)), (count, now))
        self._parts.append(now[len(before) :])
        self._tokens, self._num_decoded = self._tokens[self._num_decoded :], count - self._num_decoded
        return self._parts[-1]


class StopFinder:
    """Finds the token that completes a stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str]) -> None:
        self.stream = TextStream(decode)
        self.stop_strings = stop_strings
        self._longest = max(map(len, stop_strings))
        self._tail = ""  # the last characters, in which a stop string may have begun

    def find(self, tokens: Sequence[int]) -> int | None:
        """The number of tokens up to and including the one that completes a stop string; None if none does."""
        for count, token in enumerate(tokens, 1):
            seen = self._tail + self.stream.push([token])
            self._tail = seen[max(0, len(seen) - self._longest + 1) :]
            if any(stop in seen for stop in self.stop_strings):
                return count
        return None


def cut(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string.

    >>> cut("so x=3; done", [";", "done"])
    'so x=3'
    """
    return text[: min((text.find(stop) for stop in stop_strings if stop in text), default=len(text))]


def num_certain(text: str, stop_strings: Sequence[str]) -> int:
    """The number of leading characters of a growing text that cannot become part of a stop string.

    >>> num_certain("x = 3<", ["</think>"])
    5
    """
    certain = len(text)
    for stop in stop_strings:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while 0 <= start < certain:
            if stop.startswith(text[start:]):
                certain = start
            start = text.find(stop[0], start + 1)
    return certain


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFacts:
    """Facts about the text of each token of a tokenizer."""

    is_break: np.ndarray  # [V] whether its text contains a blank line
    is_blank: np.ndarray  # [V] whether its text is white space or empty
    num_bytes: np.ndarray  # [V] bytes of its text in UTF-8; 3 for each incomplete character
    think: np.ndarray  # [2] the tokens <think> and </think>; -1 for a mark that is not a single token
    starts_line: np.ndarray  # [V] whether its text begins with the end of a line
    ends_line: np.ndarray  # [V] whether its text ends with it

    @functools.cached_property
    def ends_thought(self) -> np.ndarray:
        """[V] whether a thought ends with it: at a blank line, or where thinking begins or ends."""
        return self.is_break | np.isin(np.arange(len(self.is_break)), self.think)

    @functools.cached_property
    def has_content(self) -> np.ndarray:
        """[V] whether it is neither white space nor <think> or </think>."""
        return ~self.is_blank & ~np.isin(np.arange(len(self.is_blank)), self.think)


@functools.lru_cache(maxsize=8)
def facts_of(tokenizer: Any, vocab_size: int) -> TokenFacts:
    """The facts about all tokens of a tokenizer; tokens without text pad the vocabulary."""
    texts = [tokenizer.decode([i]) for i in range(min(vocab_size, len(tokenizer)))]
    texts += [""] * (vocab_size - len(texts))
    return TokenFacts(
        is_break=np.array([BREAK in text for text in texts]),
        is_blank=np.array([not text.strip() for text in texts]),
        num_bytes=np.array([len(text.encode(errors="surrogatepass")) for text in texts]),
        think=np.array([token_of(tokenizer, mark) for mark in (THINK, END_OF_THINKING)], np.int32),
        starts_line=np.array([text.startswith("\n") for text in texts]),
        ends_line=np.array([text.endswith("\n") for text in texts]),
    )


def token_of(tokenizer: Any, text: str) -> int:
    """The token that a text is; -1 if it is none, or several."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else -1
