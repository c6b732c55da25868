"""The text of each token of a sequence, in visible characters."""

from collections.abc import Sequence
from typing import Any

from jkv.reasoning.token_text import TextStream
from jkv.reports import visible

PART = "\N{DOTTED CIRCLE}"  # a token whose bytes are part of a character that a later one completes


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
