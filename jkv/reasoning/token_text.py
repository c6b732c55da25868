"""Text of tokens: what each says, and that of a completion that still grows, cut where a stop string appears."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

BREAK = "\n\n"
THINK, END_OF_THINKING = "<think>", "</think>"
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


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFacts:
    """What each token of a tokenizer says."""

    is_break: np.ndarray  # [V] whether its text holds a blank line
    is_blank: np.ndarray  # [V] whether it is nothing but white space
    num_bytes: np.ndarray  # [V] of its text, three for each part of a character
    think: np.ndarray  # [2] the tokens that begin and end thinking, -1 for none or for several

    @functools.cached_property
    def ends_step(self) -> np.ndarray:
        """[V] whether a reasoning step ends with it: at a blank line, or where thinking begins or ends."""
        return self.is_break | np.isin(np.arange(len(self.is_break)), self.think)

    @functools.cached_property
    def says_something(self) -> np.ndarray:
        """[V] whether it is neither white space nor a mark of thinking."""
        return ~self.is_blank & ~np.isin(np.arange(len(self.is_blank)), self.think)


@functools.lru_cache(maxsize=8)
def facts_of(tokenizer: Any, vocab_size: int) -> TokenFacts:
    """The texts of all tokens, looked at once."""
    texts = [tokenizer.decode([i]) for i in range(min(vocab_size, len(tokenizer)))]
    texts += [""] * (vocab_size - len(texts))
    marks = [tokenizer.encode(mark, add_special_tokens=False) for mark in (THINK, END_OF_THINKING)]
    return TokenFacts(
        is_break=np.array([BREAK in text for text in texts]),
        is_blank=np.array([not text.strip() for text in texts]),
        num_bytes=np.array([len(text.encode()) for text in texts]),
        think=np.array([ids[0] if len(ids) == 1 else -1 for ids in marks], np.int32),
    )
