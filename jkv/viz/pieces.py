"""The text of each token of a sequence, in visible characters."""

import unicodedata
from collections.abc import Sequence
from typing import Any

from jkv.reasoning.token_text import TextStream

PART = "\N{DOTTED CIRCLE}"  # a token whose bytes are part of a character that a later one completes
HIDDEN = frozenset("\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff")


def pieces(tokens: Sequence[int], tokenizer: Any = None) -> list[str]:
    """The text that each token adds to the sequence; special tokens by name, without a tokenizer all as their ids.

    Bytes of one character may be spread over tokens: the one that completes it has it, those before it are dotted circles.
    """
    if tokenizer is None:
        return [str(token) for token in tokens]
    stream = TextStream(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    texts = []
    for token in tokens:
        texts.append(visible(stream.push([int(token)])) or PART)
    return texts


def visible(text: str) -> str:
    r"""A text with a mark for each character that would show nothing, or turn the line around; newlines stay.

    >>> visible("a\tb\x00\u202e")
    'a⇥b␀<U+202E>'
    """
    return "".join(mark(character) for character in text)


def mark(character: str) -> str:
    """A character, or its visible replacement."""
    if character == "\n" or (character not in HIDDEN and unicodedata.category(character) not in ("Cc", "Cs", "Cn")):
        return character
    code = ord(character)
    if character == "\t":
        return "\N{RIGHTWARDS ARROW TO BAR}"
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"<U+{code:04X}>"
