"""Text of tokens: facts about each token of a tokenizer, incremental decoding, and stop strings."""

import codecs
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

BREAK = "\n\n"
THINK, END_OF_THINKING = "<think>", "</think>"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete UTF-8 character
MOST_HELD = 16  # tokens whose text is not whole, before the window of decoded tokens moves on
LONGEST_CHARACTER = 4  # bytes in UTF-8


class Decoder:
    """The text of tokens, as their tokenizer makes it, and what an incremental reader needs to know of each token.

    Args:
      decode: the text of tokens.
      byte_values: the byte of each token that SentencePiece writes as `<0xE2>`. Their tokenizers decode a run of them as a
        whole: as characters if all of it is UTF-8, and else each byte as a replacement character.
    """

    def __init__(self, decode: Callable[[list[int]], str], byte_values: Mapping[int, int] | None = None) -> None:
        self.decode, self.byte_values = decode, byte_values or {}
        self._is_silent: dict[int, bool] = {}

    def __call__(self, tokens: Any) -> str:
        """The text of tokens."""
        return self.decode(tokens)

    def is_silent(self, token: int) -> bool:
        """Whether a token has no text, wherever it is: a special token that is left out, or padding of the vocabulary."""
        if token not in self._is_silent:
            self._is_silent[token] = not self.decode([token, token])  # a single one may lose the space at its beginning
        return self._is_silent[token]


class TextStream:
    """Decodes tokens incrementally: what is pushed and finished is the text of all tokens, whatever they are.

    Tokens that may be part of an incomplete character wait for those that complete it. The work per token does not grow with
    the text.

    Attributes:
      num_tokens: the number of tokens pushed so far.
      num_characters: characters of the text so far, including single bytes that wait for the rest of a character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode if isinstance(decode, Decoder) else Decoder(decode)
        self.num_tokens = self.num_characters = 0
        self._num_certain = 0  # characters of the text
        self._parts: list[str] = []
        self._tokens: list[int] = []  # the last tokens: the space before a token may depend on its predecessor
        self._num_context = 0  # how many of them are only read for the text of the others
        self._num_shown = 0  # characters of the others that are in the text
        self._run: list[int] = []  # single bytes after them, whose text depends on what follows

    @property
    def text(self) -> str:
        """The text of the tokens so far, without what later tokens may change."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    @property
    def run_text(self) -> str:
        """The whole characters of the single bytes that wait; empty if they are no UTF-8."""
        values = bytes(self.decode.byte_values[token] for token in self._run)
        try:
            return codecs.getincrementaldecoder("utf-8")().decode(values)
        except UnicodeDecodeError:
            return ""

    def push(self, tokens: Sequence[int]) -> str:
        """Adds the next tokens. Returns the text that they complete."""
        given = [token for token in tokens if not self.decode.is_silent(token)]
        count = next((i for i in range(len(given), 0, -1) if given[i - 1] not in self.decode.byte_values), 0)
        new = self._show(self._tokens + self._run + given[:count], is_last=False) if count else ""
        self._run = given[count:] if count else self._run + given
        self.num_tokens += len(tokens)
        # Single bytes that turn out to be no UTF-8 are more characters than they seemed to be, never fewer.
        self.num_characters = max(self.num_characters, self._num_certain + len(self.run_text))
        return new

    def finish(self) -> str:
        """Returns the text that waited for tokens that did not come: replacement characters for incomplete ones."""
        new, self._run = self._show(self._tokens + self._run, is_last=True), []
        return new

    def _show(self, tokens: list[int], is_last: bool) -> str:
        """Adds the text of the window, these tokens, that was not shown yet. Returns it."""
        now, start = self.decode(tokens), len(self.decode(tokens[: self._num_context])) + self._num_shown
        # Text that ends within a character, and may go on, ends in one replacement character; so does a text with a real one.
        is_whole = is_last or bool(self.decode.byte_values) or not now.endswith(UNFINISHED)
        shown = now if is_whole else now[:-1]
        new = shown[start:]
        self._parts.append(new)
        self._num_certain += len(new)
        self._tokens, self._num_shown = tokens, self._num_shown + len(new)
        if is_whole:
            self._tokens, self._num_context, self._num_shown = tokens[self._num_context :], len(tokens) - self._num_context, 0
        elif len(tokens) - self._num_context > MOST_HELD:
            # No token has ended where a character does. A window that begins within a character reads its rest as other
            # characters, in both of its parts alike: four tokens have four bytes or more, so the rest is in the context.
            self._tokens, self._num_context = tokens[-2 * LONGEST_CHARACTER :], LONGEST_CHARACTER
            self._num_shown = len(self.decode(self._tokens)) - 1 - len(self.decode(self._tokens[: self._num_context]))
        return new


class StopFinder:
    """Finds the token that completes a stop string.

    Args:
      decode: the text of tokens.
      stop_strings: the texts that end it.
      others: further texts of the same tokens in which to look, such as the one without special tokens.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop_strings: Sequence[str], *others: Callable[[list[int]], str]
    ) -> None:
        self.stop_strings = stop_strings
        self._streams = [TextStream(one) for one in (decode, *others)]
        self._longest = max(map(len, stop_strings))
        self._tails = [""] * len(self._streams)  # the last characters, in which a stop string may have begun

    def find(self, tokens: Sequence[int]) -> int | None:
        """The number of tokens up to and including the one that completes a stop string; None if none does."""
        for count, token in enumerate(tokens, 1):
            completes = [self._completes(i, token) for i in range(len(self._streams))]
            if any(completes):
                return count
        return None

    def _completes(self, i: int, token: int) -> bool:
        """Whether a token completes a stop string in one of the texts."""
        stream = self._streams[i]
        seen = self._tails[i] + stream.push([token])
        self._tails[i] = seen[max(0, len(seen) - self._longest + 1) :]
        seen += stream.run_text
        return any(stop in seen for stop in self.stop_strings)


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
    """The token that a text is; -1 if it is none, or several, or no Unicode."""
    is_unicode = len(text.encode(errors="ignore")) == len(text.encode(errors="surrogatepass"))
    ids = tokenizer.encode(text, add_special_tokens=False) if is_unicode else []
    return ids[0] if len(ids) == 1 else -1


@functools.lru_cache(maxsize=8)
def decoder_of(tokenizer: Any) -> Decoder:
    """The text of tokens, special ones too."""
    return Decoder(lambda tokens: tokenizer.decode(tokens), byte_values(tokenizer))


@functools.lru_cache(maxsize=8)
def byte_values(tokenizer: Any) -> Mapping[int, int]:
    """The byte of each token that is written `<0xE2>` and decoded as that byte, as in SentencePiece's byte fallback."""
    names = getattr(tokenizer, "convert_ids_to_tokens", None)
    if names is None:
        return {}
    named = {f"<0x{value:02X}>": value for value in range(256)}
    found = {tokenizer.convert_tokens_to_ids(name): name for name in named}
    return {
        token: named[name]
        for token, name in found.items()
        if token is not None and names(token) == name and tokenizer.decode([token]) != name
    }
