"""Encodes and decodes long texts without blocking other threads.

`encode` and `decode` of the tokenizers library hold Python's lock until they end: five seconds for a text of two million
characters. `encode_batch` and `decode_batch` release it.
"""

from collections.abc import Sequence
from typing import Any

LONG = 1 << 14  # characters, or tokens: shorter texts take milliseconds


def encoding_of(backend: Any, text: str, add_special_tokens: bool) -> Any:
    """The `tokenizers.Encoding` of a text."""
    if len(text) < LONG:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def text_of(backend: Any, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of token ids."""
    if len(ids) < LONG:
        return str(backend.decode(ids, skip_special_tokens=skip_special_tokens))
    return str(backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
