"""The text of each token of a sequence, in visible characters."""

import itertools
from collections.abc import Sequence
from typing import Any

from jkv.reasoning.token_text import TextStream, decoder_of
from jkv.reports import visible

PART = "\N{DOTTED CIRCLE}"  # a token whose bytes are part of a character that a later one completes


def pieces(tokens: Sequence[int], tokenizer: Any = None) -> list[str]:
    """The text that each token adds to the sequence; special tokens by name, without a tokenizer all as their ids.

    Bytes of one character may be spread over tokens: the one that completes it has it, those before it are dotted circles.
    """
    if tokenizer is None:
        return [str(token) for token in tokens]
    stream, ends = TextStream(decoder_of(tokenizer)), [0]
    for token in tokens:
        stream.push([int(token)])
        ends.append(stream.num_characters)
    text = stream.text + stream.run_text
    return [visible(text[start:end]) or PART for start, end in itertools.pairwise(ends)]
