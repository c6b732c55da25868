"""Long texts in the tokenizers library: `encode` and `decode` hold Python's lock until they are done, and batches do not.

A text of two million characters takes five seconds, in which no other thread of the process would do anything.
"""

from collections.abc import Sequence
from typing import Any

LONG = 1 << 14  # characters, or tokens: shorter ones take milliseconds


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
