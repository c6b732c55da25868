"""The table by which a form's state moves from token to token: an automaton over classes of tokens that behave alike.

A vocabulary of 128,000 tokens falls into some hundred classes for a form, so that the table has a megabyte or less, where a
mask of all tokens for each state would have a hundred.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.checks import shown
from jkv.errors import InputError
from jkv.forms.automaton import DEAD, Automaton, alive, automaton_of, reached, too_large
from jkv.forms.calls import messages_before
from jkv.forms.expressions import Chain, Either, Expression, Repeat
from jkv.forms.form import Form
from jkv.forms.vocabulary import NEWLINE, Vocabulary, vocabulary_of

MOST_ENTRIES = 1 << 23  # of a table
END = 0  # the class of a token that ends the completion
ANSWERS, MAY_THINK, THINKS = range(3)  # how a completion begins: the index of its start


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """How a form's state moves.

    Attributes:
      next: the state after a token of each class, DEAD where none may come: `[states, classes]` int16. In the class END it is
        the state itself where the completion may end.
      class_of: the class of each token, `[V]` int16.
      starts: the state in which a completion begins that answers, that may think first, and that thinks.
    """

    next: np.ndarray
    class_of: np.ndarray
    starts: tuple[int, int, int]

    @functools.cached_property
    def block(self) -> np.ndarray:
        """All of it, int16: the class of each token, then the states after each class, state by state."""
        return np.concatenate([self.class_of, self.next.reshape(-1)])

    def walk(self, state: int, tokens: Sequence[int]) -> int:
        """The state after some tokens; a token that ends the completion leaves it as it is."""
        for token in tokens:
            following = int(self.next[state, self.class_of[token]])
            state = state if following == DEAD else following
        return state


@functools.lru_cache(maxsize=128)
def table_of(form: Form, tokenizer: Any, vocab_size: int) -> Table:
    """The table of a form for a tokenizer's tokens.

    Raises:
      ValueError: the tokens cannot write the form, or the table is too large.
    """
    vocabulary = vocabulary_of(tokenizer, vocab_size)
    answer = form.expression_in(vocabulary)
    if form.has_channels:
        expressions = answer, *messages_before(answer, vocabulary.expression, vocabulary.up_to)
    else:
        expressions = with_thinking(answer, vocabulary)
    table = over_tokens(automaton_of(*expressions, num_symbols=vocabulary.num_symbols), vocabulary)
    if DEAD in table.starts:
        rule = "{field} must be one that the model's tokens can write; got {got}, for which some are missing."
        raise InputError(rule, field="form", code="unsupported", got=shown(form.value or form.kind))
    return table


def with_thinking(answer: Expression, vocabulary: Vocabulary) -> tuple[Expression, Expression, Expression]:
    """The texts of completions whose answer is of an expression: that answer, that may think first, and that think."""
    begin, ends = vocabulary.think
    thinks = Chain((vocabulary.up_to(*ends), Repeat(NEWLINE, 0, 2), answer))
    first = vocabulary.at_start(answer)
    may_think = Either((first, Chain((vocabulary.expression(begin), thinks)))) if vocabulary.is_mark(begin) else first
    return first, thinks if vocabulary.always_thinks else may_think, thinks


def over_tokens(automaton: Automaton, vocabulary: Vocabulary) -> Table:
    """An automaton over the symbols of tokens, as one over tokens."""
    effects, effect_of = effects_of(automaton, vocabulary)
    following = effects.T[:-1]  # [states, effects]
    following = np.where(following == len(following), DEAD, following)
    is_alive = alive(following, automaton.is_accepting)
    starts = [start if start != DEAD and is_alive[start] else DEAD for start in automaton.starts]
    state, effect = np.nonzero(following != DEAD)
    is_used = is_alive & reached(
        len(following), (state, following[state, effect]), np.array([x for x in starts if x != DEAD], int)
    )
    new = np.append(np.where(is_used, np.cumsum(is_used) - 1, DEAD), DEAD)
    columns, class_of = np.unique(new[following[is_used]], axis=1, return_inverse=True)
    if columns.size > MOST_ENTRIES:
        raise too_large("entries in its table, states times classes of tokens", columns.size, MOST_ENTRIES)
    ends = np.where(automaton.is_accepting[is_used], np.arange(is_used.sum()), DEAD)
    table = np.concatenate([ends[:, None], columns], axis=1).astype(np.int16)
    first, may, think = (int(new[start]) for start in starts)
    return Table(table, (1 + class_of.reshape(-1)[effect_of]).astype(np.int16), (first, may, think))


def effects_of(automaton: Automaton, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """What tokens do: the state after each state, `[effects, states + 1]`, whose last state is dead; and which each token does.

    Symbol after symbol, over all tokens at once: what two tokens have done alike so far is computed once.
    """
    dead = len(automaton.next)
    moves = np.full((dead + 1, automaton.next.shape[1]), dead, np.int32)
    moves[:-1] = np.where(automaton.next == DEAD, dead, automaton.next)
    lengths = np.diff(vocabulary.begins)
    effects: list[np.ndarray] = [np.arange(dead + 1)]
    numbers = {effects[0].tobytes(): 0}
    effect_of = np.zeros(len(lengths), np.int64)
    for place in range(int(lengths.max())):
        token = np.flatnonzero(lengths > place)
        kind = automaton.class_of[vocabulary.symbols[vocabulary.begins[token] + place]]
        pairs, inverse = np.unique(effect_of[token] * moves.shape[1] + kind, return_inverse=True)
        found = []
        for effect, symbol in zip((pairs // moves.shape[1]).tolist(), (pairs % moves.shape[1]).tolist(), strict=True):
            after = moves[effects[effect], symbol].astype(np.int64)
            found.append(numbers.setdefault(after.tobytes(), len(numbers)))
            if found[-1] == len(effects):
                effects.append(after)
        if len(effects) * dead > 8 * MOST_ENTRIES:
            raise too_large("entries in its table, states times classes of tokens", len(effects) * dead, 8 * MOST_ENTRIES)
        effect_of[token] = np.array(found)[inverse]
    used, effect_of = np.unique(effect_of, return_inverse=True)
    return np.stack([effects[i] for i in used]), effect_of


class Walk:
    """The state of a completion that grows.

    Args:
      table: of its form.
      start: how it begins.
    """

    def __init__(self, table: Table, start: int) -> None:
        self.table, self.state, self.num_tokens = table, table.starts[start], 0

    def after(self, tokens: Sequence[int]) -> int:
        """The state after all tokens so far, of which earlier calls have had the first."""
        self.state = self.table.walk(self.state, tokens[self.num_tokens :])
        self.num_tokens = len(tokens)
        return self.state
