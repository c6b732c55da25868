"""What each token adds to a text: its bytes, also where a character is cut in two, and the character at which it begins.

Log-probabilities of a text's tokens are shown with these (`jkv.serving.responses`), and pictures of tokens (`jkv.viz.pieces`).
"""

import codecs
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jkv.reasoning.token_text import UNFINISHED, Decoder, TextStream


class TokenPart(NamedTuple):
    r"""The part of a text that one token is.

    Attributes:
      name: the text of its bytes. Bytes that are no whole characters are written as OpenAI does, such as `bytes:\xf0\x9f`; a
        token that is left out of the text has its own name.
      value: the bytes that it adds to the text; none for a token that is left out, such as an end token.
      start: characters of the text before those that it completes.
    """

    name: str
    value: bytes
    start: int


class PartReader:
    """Reads a text token by token.

    Args:
      tokenizer: the model's.
      decode: the text of tokens (`decoder_of`, `completion_decoder`).
      start: characters before it.

    Attributes:
      start: characters before the next token.
    """

    def __init__(self, tokenizer: Any, decode: Decoder, start: int = 0) -> None:
        self.tokenizer, self.decode, self.start, self._is_first = tokenizer, decode, start, True
        self._stream = TextStream(decode) if decode.byte_values else None  # which knows how runs of single bytes end
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, tokens: Sequence[int]) -> list[TokenPart]:
        """The parts of the next tokens."""
        return [self._read(token) for token in tokens]

    def _read(self, token: int) -> TokenPart:
        start, value = self.start, bytes_of(self.tokenizer, self.decode, token, self._is_first)
        self._is_first &= self.decode.is_silent(token)
        if self._stream is None:
            self.start += len(self._utf8.decode(value))
        else:
            before = self._stream.num_characters
            self._stream.push([token])
            self.start += self._stream.num_characters - before
        return TokenPart(name_of(self.tokenizer, token, value), value, start)

    def other(self, token: int) -> tuple[str, bytes]:
        """The name and the bytes of a token that might have been the next one."""
        value = bytes_of(self.tokenizer, self.decode, token, self._is_first)
        return name_of(self.tokenizer, token, value), value


def name_of(tokenizer: Any, token: int, value: bytes) -> str:
    """The name of a token that adds these bytes."""
    try:
        return value.decode() or tokenizer.decode([token])
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)


def bytes_of(tokenizer: Any, decode: Decoder, token: int, is_first: bool = False) -> bytes:
    """The bytes that a token adds to a text; at its beginning, a tokenizer may drop the space before a word."""
    if decode.is_silent(token):
        return b""
    alone = decode([token])
    if token in decode.byte_values and not (is_first and not alone):
        return bytes([decode.byte_values[token]])
    if UNFINISHED in alone and (value := byte_level(tokenizer, token)) is not None:
        return value
    return (alone if is_first else decode([token, token])[len(alone) :]).encode(errors="surrogatepass")


def byte_level(tokenizer: Any, token: int) -> bytes | None:
    """The bytes of a token of byte-level BPE, whose vocabulary writes each byte as a character; None of another tokenizer."""
    read = getattr(tokenizer, "convert_ids_to_tokens", None)
    text = None if read is None else read(token)
    if not isinstance(text, str) or not all(character in byte_characters() for character in text):
        return None
    value = bytes(byte_characters()[character] for character in text)
    return value if value.decode(errors="replace") == tokenizer.decode([token]) else None


@functools.cache
def byte_characters() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary is, as in GPT-2: printable ones are themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
