"""What each token of a vocabulary writes, in symbols: bytes, and one symbol for each mark, such as `</think>`.

Marks are the special tokens and the marks of thinking and tool calls. They are no part of an answer unless its form names them.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from jkv.forms.automaton import BYTES, DEAD, Automaton, only_first
from jkv.forms.expressions import Expression, Machine, One, Repeat, chain, either, text
from jkv.reasoning.marks import HARMONY, completion_decoder, marks_of
from jkv.reasoning.token_bytes import bytes_of
from jkv.reasoning.token_text import token_of
from jkv.reasoning.tool_calls import SPECIAL_MARKS

OTHER = BYTES  # the symbol of a token that has no text
NEWLINE = text("\n")


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The symbols of all tokens.

    Attributes:
      symbols: first the symbols of token 0, then of token 1, and so on.
      begins: where each token's begin, and at last where they end: `[V + 1]`.
      marks: the symbol of each mark.
      texts: marks that may also be written letter by letter.
      think: the mark that begins thinking, and those that end it.
      always_thinks: whether each completion has a mark that ends thinking, as in the harmony format.
      drops_space: whether the tokenizer drops the space at a text's beginning, as SentencePiece does.
    """

    symbols: np.ndarray
    begins: np.ndarray
    marks: dict[str, int]
    texts: frozenset[str]
    think: tuple[str, tuple[str, ...]]
    always_thinks: bool
    drops_space: bool = False

    @property
    def num_symbols(self) -> int:
        """Symbols in all."""
        return OTHER + 1 + len(self.marks)

    def spell(self, value: str) -> list[int]:
        """The symbols of a text with marks.

        The longest mark at a place counts.
        """
        found: list[int] = []
        while value:
            mark = max((mark for mark in self.marks if value.startswith(mark)), key=len, default="")
            found += [self.marks[mark]] if mark else value[0].encode()
            value = value[len(mark) or 1 :]
        return found

    def expression(self, value: str) -> Expression:
        """A text with marks."""
        return chain(*(One(1 << symbol) for symbol in self.spell(value)))

    def at_start(self, answer: Expression) -> Expression:
        """What the first tokens of a text write, so that it is of an expression: with the space that the text loses."""
        if not self.drops_space:
            return answer
        space, anything = text(" "), Repeat(One((1 << self.num_symbols) - 1))
        return either([chain(space, answer), only_first(answer, chain(space, anything), self.num_symbols)])

    def is_mark(self, value: str) -> bool:
        """Whether a text begins with a mark."""
        return self.spell(value)[0] > OTHER

    def up_to(self, *ends: str) -> Expression:
        """Any symbols up to the first time that one of some texts ends."""
        wanted = {tuple(self.spell(end)) for end in ends} | {tuple(end.encode()) for end in ends if end in self.texts}
        states = sorted({each[:count] for each in wanted for count in range(len(each))}, key=len)
        named = sorted({symbol for each in wanted for symbol in each})
        class_of = np.zeros(self.num_symbols, np.int32)
        class_of[named] = np.arange(1, len(named) + 1)
        rows = np.zeros((len(states) + 1, len(named) + 1), np.int32)
        rows[-1] = DEAD  # after the end, in which the last state is
        for index, state in enumerate(states):
            for place, symbol in enumerate(named, 1):
                seen: tuple[int, ...] = (*state, symbol)
                if any(seen[-len(each) :] == each for each in wanted):
                    rows[index, place] = len(states)
                else:
                    rows[index, place] = states.index(next(seen[i:] for i in range(len(seen) + 1) if seen[i:] in states))
        return Machine(Automaton(rows, class_of, np.arange(len(rows)) == len(states), (0,)))


@functools.lru_cache(maxsize=8)
def vocabulary_of(tokenizer: Any, vocab_size: int) -> Vocabulary:
    """The symbols of a tokenizer's tokens; tokens without text pad the vocabulary."""
    decode, think = completion_decoder(tokenizer), marks_of(tokenizer)
    added = {index: (str(token), token.special) for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    ordinary = {think.begin, *think.ends, *SPECIAL_MARKS}
    added = {token_of(tokenizer, mark): (mark, False) for mark in ordinary} | added
    names = {
        index: name for index, (name, special) in added.items() if 0 <= index < vocab_size and (special or name in ordinary)
    }
    marks = {name: OTHER + 1 + i for i, name in enumerate(dict.fromkeys(names.values()))}
    texts = ordinary - {name for name, special in added.values() if special}
    found = []
    for token in range(vocab_size):
        if token in names:
            found.append([marks[names[token]]])
        else:
            found.append(list(bytes_of(tokenizer, decode, token)) if token < len(tokenizer) else [])
    words = (token for token, symbols in enumerate(found) if len(symbols) > 1 and symbols[0] == ord(" "))
    word = next(words, None)
    drops_space = word is not None and not bytes_of(tokenizer, decode, word, is_first=True).startswith(b" ")
    found = [symbols or [OTHER] for symbols in found]
    begins = np.cumsum([0, *map(len, found)])
    symbols = np.fromiter((symbol for each in found for symbol in each), np.int32, int(begins[-1]))
    always = (think.begin, think.ends) == (HARMONY.begin, HARMONY.ends)
    return Vocabulary(symbols, begins, marks, frozenset(texts), (think.begin, think.ends), always, drops_space)
