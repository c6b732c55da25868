"""A tokenizer that splits text into words, for texts without a known tokenizer (`jkv.analyze`)."""

import re
from collections.abc import Iterable, Sequence

from jkv.reasoning.token_text import BREAK, END_OF_THINKING, THINK

PIECE = re.compile(rf"{THINK}|{END_OF_THINKING}|{BREAK}|\n|[^\S\n]+|\w+|[^\w\s]")


class Words:
    r"""A tokenizer whose vocabulary is the words, signs and white space of the given texts.

    >>> words = Words(["so x = 3.\n\nWait"])
    >>> [words.decode([token]) for token in words.encode("x = 3.\n\n")]
    ['x', ' ', '=', ' ', '3', '.', '\n\n']
    """

    def __init__(self, texts: Iterable[str]) -> None:
        known = dict.fromkeys((THINK, END_OF_THINKING, BREAK, "\n"))
        for text in texts:
            known.update(dict.fromkeys(PIECE.findall(text)))
        self.pieces = tuple(known)
        self._ids = {piece: token for token, piece in enumerate(self.pieces)}

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a text. Pieces outside the vocabulary are left out."""
        return [self._ids[piece] for piece in PIECE.findall(text) if piece in self._ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The pieces, joined."""
        return "".join(self.pieces[token] for token in tokens)
