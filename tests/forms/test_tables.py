"""Tables over tokens: against the automaton of bytes, token by token, and how completions begin that think first."""

import random

import numpy as np
import pytest

from jkv import forms
from jkv.errors import InputError
from jkv.forms import tables
from jkv.forms.automaton import DEAD
from jkv.forms.form import automaton_alone
from jkv.forms.tables import ANSWERS, END, MAY_THINK, THINKS, table_of
from jkv.forms.vocabulary import vocabulary_of
from jkv.testing import TinyTokenizer
from tests.support.form_texts import END_ID, END_OF_THINKING_ID, PIECES, SCHEMAS, SIZE, THINK_ID, TOKENIZER, written
from tests.support.small_tokenizers import sentence_piece

FORMS = [forms.json(SCHEMAS["members"]), forms.regex("(a|é|😀)*[b€]"), forms.choice(["yes", "no", "yesterday"]), forms.json()]


def live_ends(form):
    """What a table must do, by the automaton of bytes alone: the state after each token of each state."""
    machine = automaton_alone(form)
    vocabulary = vocabulary_of(TOKENIZER, SIZE)
    values = [vocabulary.symbols[a:b].tolist() for a, b in zip(vocabulary.begins, vocabulary.begins[1:], strict=False)]

    def after(state, value):
        for symbol in value:
            state = DEAD if state == DEAD or symbol >= 256 else int(machine.next[state, machine.class_of[symbol]])
        return state

    return machine, values, after


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_a_table_moves_as_the_bytes_of_its_tokens_do(form):
    machine, values, after = live_ends(form)
    table = table_of(form, TOKENIZER, SIZE)
    same = {(machine.starts[0], table.starts[ANSWERS])}  # pairs of states that mean the same
    open_ones = list(same)
    while open_ones:
        state, ours = open_ones.pop()
        assert (table.next[ours, END] != DEAD) == machine.is_accepting[state]
        for token, value in enumerate(values):
            wanted, got = after(state, value), int(table.next[ours, table.class_of[token]])
            assert (wanted == DEAD) == (got == DEAD), (TOKENIZER.decode([token]), state)
            if wanted != DEAD and (wanted, got) not in same:
                same.add((wanted, got))
                open_ones.append((wanted, got))
    assert len({state for state, _ in same}) == len(same)


def test_classes_are_as_few_as_can_be():
    table = table_of(FORMS[0], TOKENIZER, SIZE)
    columns = table.next[:, 1:]
    assert len(np.unique(columns, axis=1).T) == columns.shape[1]
    assert set(table.class_of.tolist()) == set(range(1, columns.shape[1] + 1))


def test_states_without_a_way_to_the_end_are_left_out():
    """Without a token for `c`, nothing can follow `b`."""
    tokenizer = TinyTokenizer()  # of capital letters
    table = table_of(forms.regex("A(BcD|E)"), tokenizer, len(tokenizer))
    state = table.walk(table.starts[ANSWERS], tokenizer.encode("A"))
    can_come = [tokenizer.pieces[token] for token in range(len(tokenizer)) if table.next[state, table.class_of[token]] != DEAD]
    assert can_come == ["E"]
    for form in (forms.regex("ABc"), forms.json(), forms.choice(["a"])):
        with pytest.raises(InputError, match="the model's tokens can write"):
            table_of(form, tokenizer, len(tokenizer))


def test_thinking_is_free_up_to_its_end():
    table, encode = table_of(FORMS[2], TOKENIZER, SIZE), lambda text: [*text.encode()]
    begin, end = THINK_ID, END_OF_THINKING_ID

    def ends(start, tokens):
        state = table.starts[start]
        for token in tokens:
            state = DEAD if state == DEAD else int(table.next[state, table.class_of[token]])
        return state != DEAD and table.next[state, END] != DEAD

    thought = [*encode("no, wait \xff"), 255, begin, END_ID, *encode("</thin</")]
    for answer in ("yes", "\n\nno", "\nyesterday"):
        assert ends(THINKS, [*thought, end, *encode(answer)])
        assert ends(MAY_THINK, [begin, *thought, end, *encode(answer)])
        assert ends(THINKS, [*encode("so</think>"), *encode(answer)])  # the mark, letter by letter
    assert ends(ANSWERS, encode("yes"))
    assert ends(MAY_THINK, encode("yes"))
    assert not ends(THINKS, encode("yes"))
    assert not ends(THINKS, [*thought, end, *encode("yes"), end, *encode("yes")])
    assert not ends(THINKS, [*thought, end, *encode("maybe")])
    assert not ends(ANSWERS, [begin, *thought, end, *encode("yes")])
    assert not ends(ANSWERS, encode("\nyes"))


def test_control_tokens_are_no_part_of_an_answer():
    table = table_of(forms.regex("(?s).*"), TOKENIZER, SIZE)
    can_come = table.next[table.starts[ANSWERS], table.class_of] != DEAD
    assert not can_come[[END_ID, THINK_ID, END_OF_THINKING_ID]].any()
    assert can_come[:128].all()
    assert can_come[256:END_ID].sum() == len(PIECES) - 1  # one begins within a character


def test_single_bytes_of_sentence_piece_are_bytes():
    tokenizer = sentence_piece("\u2581yes", "yes", "\u00e9")
    table = table_of(forms.regex("(é|€| yes)*"), tokenizer, len(tokenizer))
    for seed in range(20):
        text = tokenizer.decode(written(table, seed, 8), skip_special_tokens=True)
        assert set(text) <= set("é€ yes"), text
    tokens = [*"€".encode(), tokenizer.convert_tokens_to_ids("\u2581yes"), tokenizer.convert_tokens_to_ids("\u00e9")]
    assert table.next[table.walk(table.starts[ANSWERS], tokens), END] != DEAD
    assert table.walk(table.starts[ANSWERS], tokens[:2]) != table.starts[ANSWERS]


def test_the_space_that_a_text_loses_at_its_beginning_is_no_part_of_it():
    """SentencePiece writes the first word with a space, which the text has not."""
    tokenizer = sentence_piece("\u2581yes", "yes", "\u2581", "\u2581no")
    word, bare, space = (tokenizer.convert_tokens_to_ids(one) for one in ("\u2581yes", "yes", "\u2581"))
    for pattern, tokens, ends in (
        ("yes|no", [word], True),
        ("yes|no", [bare], True),
        ("( yes| no)*", [space, word], True),
        ("( yes| no)+", [word], False),
        (" yes", [space, word], True),
    ):
        form = forms.regex(pattern)
        table = table_of(form, tokenizer, len(tokenizer))
        for start in (ANSWERS, MAY_THINK):
            state = table.walk(table.starts[start], tokens)
            assert (table.next[state, END] != DEAD) == ends == form.matches(tokenizer.decode(tokens)), (pattern, tokens)
        for seed in range(10):
            assert form.matches(tokenizer.decode(written(table, seed, 8))), pattern


def test_a_walk_reads_each_token_once():
    table, rng = table_of(FORMS[0], TOKENIZER, SIZE), random.Random(0)
    for seed in range(10):
        tokens = written(table, seed)
        walk = tables.Walk(table, ANSWERS)
        for count in sorted(rng.choices(range(len(tokens) + 1), k=4)):
            assert walk.after(tokens[:count]) == table.walk(table.starts[ANSWERS], tokens[:count])


def test_a_table_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(tables, "MOST_ENTRIES", 1000)
    with pytest.raises(InputError, match="entries in its table"):
        table_of(forms.json({"type": "string", "maxLength": 77}), TOKENIZER, SIZE)
