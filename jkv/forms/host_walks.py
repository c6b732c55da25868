"""How a completion walks through a form on the host, token by token, where no automaton on the device can follow the form.

`walker_of` chooses between the two. The masks go to the device as inputs of a step (`jkv.engine.parts.host_forms`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.errors import InputError
from jkv.forms.automaton import BYTES, DEAD, automaton_of
from jkv.forms.expressions import EMPTY
from jkv.forms.form import Form, acceptor_of, by_automaton_or_grammar
from jkv.forms.grammars import Grammar, grammar_of, tokens_for_parsers
from jkv.forms.tables import END, Table, Walk, over_tokens, table_of, with_thinking
from jkv.forms.vocabulary import Vocabulary, vocabulary_of


@dataclasses.dataclass(frozen=True, eq=False)
class HostRules:
    """How a form is followed on the host.

    Attributes:
      before: the table of what comes before an answer, such as thinking; where it may end, an answer may begin.
      grammar: of the answer, over tokens.
      is_text: which tokens may be part of an answer: control tokens may not, `[V]` bool.
      is_first: which of them may begin a text: not those whose space it would lose.
    """

    before: Table
    grammar: Grammar
    is_text: np.ndarray
    is_first: np.ndarray


class HostWalk:
    """The state of a completion that grows.

    More than one parser may be alive where it is open whether a new line belongs to the answer or comes before it.

    Args:
      rules: of its form.
      start: how it begins.
    """

    def __init__(self, rules: HostRules, start: int) -> None:
        self.rules, self.state, self.num_tokens = rules, rules.before.starts[start], 0
        self.parsers: list[Any] = []
        self._begin_answer()

    def after(self, tokens: Sequence[int]) -> "HostWalk":
        """Moves on to the end of these tokens, which begin with the tokens of the last call. Returns itself."""
        before = self.rules.before
        for token in tokens[self.num_tokens :]:
            is_text = self.rules.is_text[token]
            self.parsers = [parser for parser in self.parsers if is_text and parser.try_consume_tokens([token])]
            if self.state != DEAD:
                self.state = int(before.next[self.state, before.class_of[token]])
                self._begin_answer()
        self.num_tokens = len(tokens)
        return self

    def _begin_answer(self) -> None:
        if self.state != DEAD and self.rules.before.next[self.state, END] != DEAD:
            self.parsers.append(self.rules.grammar.parser())

    def allowed(self, ends: Sequence[int]) -> np.ndarray:
        """Which tokens may come next, `[V]` bool; those that end the completion where the answer has the form.

        Raises:
          RuntimeError: llguidance has reached one of its limits, or the grammar cannot go on.
        """
        before, found = self.rules.before, np.zeros(len(self.rules.is_text), bool)
        if self.state != DEAD:
            found |= before.next[self.state][before.class_of] != DEAD
        is_text = self.rules.is_text if self.num_tokens else self.rules.is_first
        for parser in self.parsers:
            found |= self.rules.grammar.following(parser) & is_text
        found[list(ends)] = any(parser.is_accepting() for parser in self.parsers)
        if not found.any():
            messages = [parser.get_error() for parser in self.parsers if parser.is_error()]
            raise RuntimeError(f"No token can follow in the grammar. {' '.join(messages)}".strip())
        return found


@functools.lru_cache(maxsize=128)
def walker_of(form: Form, tokenizer: Any, vocab_size: int) -> Table | HostRules:
    """What follows a form over a tokenizer's tokens: a table on the device where it can have one, else rules on the host.

    Raises:
      ValueError: the tokens cannot write the form; or it needs llguidance, which is missing.
    """

    def by_grammar() -> HostRules:
        return host_rules(form, vocabulary_of(tokenizer, vocab_size))

    if isinstance(acceptor_of(form), Grammar):  # what has no automaton over bytes has no table, which takes seconds to see
        return by_grammar()
    return by_automaton_or_grammar(form, lambda: table_of(form, tokenizer, vocab_size), by_grammar)


def host_rules(form: Form, vocabulary: Vocabulary) -> HostRules:
    """The rules of a grammar, or of a schema as one.

    Raises:
      ValueError: the tokens cannot write the form.
    """
    before = over_tokens(automaton_of(*with_thinking(EMPTY, vocabulary), num_symbols=vocabulary.num_symbols), vocabulary)
    is_text, tokens = text_tokens(vocabulary)
    grammar = grammar_of(form.kind, form.value, tokens)
    if DEAD in before.starts:
        rule = "{field} must be one that the model's tokens can write; some of the mark that ends thinking are missing."
        raise InputError(rule, field="form", code="unsupported")
    begins = vocabulary.symbols[vocabulary.begins[:-1]]
    return HostRules(before, grammar, is_text, is_text & ~((begins == ord(" ")) & vocabulary.drops_space))


@functools.lru_cache(maxsize=8)
def text_tokens(vocabulary: Vocabulary) -> tuple[np.ndarray, Any]:
    """Which tokens of a vocabulary write text alone, `[V]` bool; and all tokens as parsers take them."""
    is_text = np.maximum.reduceat(vocabulary.symbols, vocabulary.begins[:-1]) < BYTES  # each token has a symbol
    symbols = np.split(vocabulary.symbols, vocabulary.begins[1:-1])
    return is_text, tokens_for_parsers(
        [bytes(each.tolist()) if flag else b"" for each, flag in zip(symbols, is_text, strict=True)]
    )


def walk_of(form: Form, tokenizer: Any, vocab_size: int, start: int) -> Walk | HostWalk:
    """A completion's walk from its beginning."""
    found = walker_of(form, tokenizer, vocab_size)
    return Walk(found, start) if isinstance(found, Table) else HostWalk(found, start)
