"""Answers with a form, from models of random weights: those that end have it, and nothing else of the engine's work changes."""

import dataclasses
import json

import jax
import jsonschema
import numpy as np
import pytest

import jkv
from jkv import forms
from jkv.engine import form_store
from jkv.engine.clocks import COMPILING
from jkv.engine.form_store import FormStore
from jkv.errors import InputError
from jkv.forms.host_walks import HostWalk, walker_of
from jkv.forms.tables import ANSWERS, DEAD, END, table_of
from jkv.testing import TINY, tiny_model
from tests.model.test_numbers import reference_logits
from tests.support.form_texts import END_ID, END_OF_THINKING_ID, SCHEMAS, SIZE, THINK_ID, TOKENIZER

PROMPT, OTHER = [*b"Answer: ", THINK_ID, END_OF_THINKING_ID, 10], [*b"Other", END_OF_THINKING_ID]
OPEN = [*b"Answer: "]  # whose completion may think first
DRAWN = jkv.Sampling(temperature=1.0, seed=5)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"maxLength": 4}}, "required": ["a", "b"]}
FORM = forms.json(SCHEMA)
OTHERS = [forms.choice(["yes", "no", "yesterday"]), forms.regex(r"[a-f]{3}-\d{2,4}"), forms.json(SCHEMAS["counts"])]
LENGTH = 96


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(TINY, vocab_size=SIZE, end_ids=(END_ID,))
    return tiny_model(config=config, tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def engine(model):
    return jkv.Engine(model, max_running=4, max_slots=160, page_size=4, max_stop_ids=8)


def run(engine, *requests):
    """The results of requests that run together."""
    given = {"prompt": PROMPT, "max_new_tokens": LENGTH, "sampling": DRAWN}
    tickets = [engine.submit(**given | request) for request in requests]
    engine.run()
    return [engine.result(ticket) for ticket in tickets]


def check(out, form):
    """All completions that ended have the form, and the others can still get it. Returns how many ended."""
    table = table_of(form, TOKENIZER, SIZE)
    for text, tokens, length, reason in zip(out.text, out.tokens, out.lengths, out.finish_reason, strict=True):
        state = table.starts[ANSWERS]
        for token in tokens[: length - (reason == "stop")].tolist():
            state = int(table.next[state, table.class_of[token]])
            assert state != DEAD
        assert reason in ("stop", "length")
        assert reason == "length" or (tokens[length - 1] == END_ID and form.matches(text)), text
    return out.finish_reason.count("stop")


def test_every_answer_that_ends_has_its_form_and_others_keep_their_tokens(engine):
    (plain,) = run(engine, {"n": 1})
    asked = [
        {"form": form, "n": 3, "sampling": jkv.Sampling(temperature=t, seed=1)}
        for t in (0.0, 1.0, 4.0)
        for form in (FORM, *OTHERS)
    ]
    *found, beside = run(engine, *asked, {})
    np.testing.assert_array_equal(beside.tokens, plain.tokens)
    np.testing.assert_array_equal(beside.logprobs, plain.logprobs)
    ended = [check(out, request["form"]) for out, request in zip(found, asked, strict=True)]
    assert sum(ended) >= 20
    for out in found[4::4]:  # of the schema
        for text, reason in zip(out.text, out.finish_reason, strict=True):
            assert reason == "length" or jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))


def test_tokens_are_drawn_from_what_the_form_allows(engine):
    (out,) = run(
        engine, {"form": FORM, "sampling": jkv.Sampling(temperature=0.0), "model_logprobs": True, "logit_bias": {34: 1.0}}
    )
    table, state = table_of(FORM, TOKENIZER, SIZE), table_of(FORM, TOKENIZER, SIZE).starts[ANSWERS]
    tokens = out.tokens[0, : out.lengths[0]].tolist()
    logits = reference_logits(engine.model.params, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    own = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for step, token in enumerate(tokens):
        allowed = table.next[state, table.class_of] != DEAD
        allowed[END_ID] = table.next[state, END] != DEAD
        wanted = own[step] + np.where(allowed, 0.0, -np.inf)
        wanted[34] += 1.0
        wanted -= np.log(np.exp(wanted).sum())
        assert token == wanted.argmax()
        np.testing.assert_allclose(out.logprobs[0, step], wanted[token], atol=1e-4)
        np.testing.assert_allclose(out.model_logprobs[0, step], own[step, token], atol=1e-4)
        state = table.next[state, table.class_of[token]] if token != END_ID else state


def test_thinking_is_free_and_the_answer_after_it_has_the_form(engine):
    form, bias = OTHERS[0], {END_OF_THINKING_ID: 6.0}
    thinks, may, answers = run(
        engine,
        {"form": form, "prompt": [*OPEN, THINK_ID], "logit_bias": bias, "n": 4},
        {"form": form, "prompt": OPEN, "logit_bias": bias | {THINK_ID: 4.0}, "n": 8},
        {"form": form, "logit_bias": {THINK_ID: 50.0}, "n": 4},
    )
    assert check(answers, form) == 4
    for out in (thinks, may):
        assert out.finish_reason.count("stop") >= 2
        for tokens, reason, answer in zip(out.tokens.tolist(), out.finish_reason, out.answer, strict=True):
            assert reason == "length" or form.matches(answer)
            assert END_OF_THINKING_ID in tokens or tokens[0] != THINK_ID or reason == "length"
    assert max(tokens.index(END_OF_THINKING_ID) for tokens in thinks.tokens.tolist() if END_OF_THINKING_ID in tokens) > 0
    assert any(tokens[0] == THINK_ID for tokens in may.tokens.tolist())


def test_a_new_form_compiles_nothing(engine):
    run(engine, {"form": FORM}, {})
    before = COMPILING.count
    others = [forms.json({"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}) for name in "abc"]
    run(engine, *({"form": form} for form in (*others, *OTHERS)), {"n": 2})
    assert COMPILING.count == before


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_rows_and_rows_of_later_chunks_go_on_in_their_state(engine, model, ahead):
    asked = [{"form": FORM, "n": 3}, {"form": OTHERS[1], "n": 2}, {"prompt": OTHER, "form": forms.json(), "n": 2}]
    expected = run(engine, *asked)
    small = jkv.Engine(model, max_running=3, max_slots=160, page_size=4, max_stop_ids=8, num_pages=120, chunk=8, ahead=ahead)
    found = run(small, *asked)
    assert sum(sample.preemptions for out in found for sample in out.samples)
    for out, other, request in zip(found, expected, asked, strict=True):
        np.testing.assert_array_equal(out.tokens, other.tokens)
        np.testing.assert_allclose(out.logprobs, other.logprobs, atol=1e-5)
        check(out, request["form"])


def test_a_later_turn_has_a_form_of_its_own(engine):
    first = engine.submit(PROMPT, form=OTHERS[0], sampling=DRAWN, max_new_tokens=20, keep=True)
    engine.run()
    second = engine.extend(first, OTHER, form=OTHERS[1], max_new_tokens=20)
    engine.run()
    for ticket, form in ((first, OTHERS[0]), (second, OTHERS[1])):
        assert check(engine.result(ticket), form) == 1


def test_guesses_change_no_token_and_rows_with_a_form_get_none(engine, model):
    asked = [{"form": FORM, "n": 2}, {"form": OTHERS[2]}, {}]
    guessing = jkv.Engine(model, max_running=4, max_slots=160, page_size=4, max_stop_ids=8, speculate=jkv.ngram())
    expected, found = run(engine, *asked), run(guessing, *asked)
    for out, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(out.tokens, other.tokens)
    assert any("form" in reason for reason in guessing.stats.not_drafted)


def test_penalties_and_cuts_go_together_with_a_form(engine):
    sampling = jkv.Sampling(
        temperature=1.5, top_p=0.4, top_k=3, min_p=0.2, repetition_penalty=2.0, presence_penalty=2.0, seed=0
    )
    (out,) = run(engine, {"form": FORM, "sampling": sampling, "n": 6})
    check(out, FORM)
    assert np.isfinite(out.logprobs).all()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"form": "json"}, "form"),
        ({"form": SCHEMA}, "form"),
        ({"form": forms.grammar('start: "a"'), "min_tokens": 2}, "min_tokens"),
        ({"form": forms.regex("\u4e00"), "stop_ids": ()}, "stop_ids"),
        ({"form": FORM, "stop_strings": ["a"]}, "stop_strings"),
        ({"form": FORM, "min_tokens": 2}, "min_tokens"),
        ({"form": FORM, "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"form": FORM, "bad_words": [[1]]}, "bad_words"),
        ({"form": FORM, "forced_tokens": [1]}, "forced_tokens"),
    ],
    ids=str,
)
def test_what_could_break_a_form_is_refused(engine, settings, field):
    with pytest.raises(InputError) as caught:
        run(engine, settings)
    assert caught.value.field == field


def test_a_model_without_a_tokenizer_has_no_forms(model):
    with pytest.raises(InputError, match="needs a model with a tokenizer"):
        jkv.generate(dataclasses.replace(model, tokenizer=None), PROMPT, form=FORM)


def test_a_plan_has_the_bytes_of_the_tables(model):
    store = FormStore(jax.device_put)
    assert store.num_bytes == 0
    array, _ = store.place([table_of(FORM, TOKENIZER, SIZE)])
    assert store.num_bytes == array.nbytes == jkv.plan(model, "cpu", length=60, prompt=20).form_bytes


def test_the_store_holds_the_tables_in_use(monkeypatch):
    monkeypatch.setattr(form_store, "LEAST_ENTRIES", 1 << 14)
    monkeypatch.setattr(form_store, "TABLES", 1)
    store, tables = FormStore(jax.device_put), [table_of(forms.json({"maxLength": n}), TOKENIZER, SIZE) for n in range(1, 9)]
    sizes = set()
    for count in (1, 2, 8, 1, 3, 8):
        for first in range(8 - count + 1):
            array, begins = store.place(tables[first : first + count] * 2)
            assert begins.keys() == set(tables[first : first + count])
            for table, begin in begins.items():
                np.testing.assert_array_equal(array[begin : begin + len(table.block)], table.block)
            sizes.add(len(array))
            assert store.num_bytes == array.nbytes
    assert len(sizes) == 2  # it grew once, for eight tables


GRAMMAR = forms.grammar('start: "(" start ")" | "yes" | "no"')
TREE = forms.json(
    {"properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["v", "next"]}
)
SOFT = {END_ID: 3.0, 41: 1.0}


def test_grammars_are_followed_beside_plain_rows_and_other_forms(engine):
    """Log-probabilities are of the tokens that the grammar allows; nothing else changes, and nothing compiles again."""
    penalties = dataclasses.replace(DRAWN, repetition_penalty=2.0)
    expected = run(engine, {}, {"form": FORM, "n": 2}, {"n": 2, "sampling": penalties})
    asked = [{"form": form, "n": 3, "logit_bias": SOFT, "model_logprobs": True} for form in (GRAMMAR, TREE)]
    first, *found = run(engine, asked[0], {}, {"form": FORM, "n": 2})
    for out, other in zip(found, expected, strict=False):
        np.testing.assert_array_equal(out.tokens, other.tokens)
        np.testing.assert_array_equal(out.logprobs, other.logprobs)
    run(engine, asked[0], {})  # programs of one step with all parts
    before = COMPILING.count
    again, tree, penalised, chosen = run(
        engine, *asked, {"form": TREE, "sampling": penalties, "n": 2}, {"form": forms.grammar('start: "no"')}
    )
    assert COMPILING.count == before
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert chosen.text == ["no"]
    assert penalised.finish_reason.count("stop") + tree.finish_reason.count("stop") >= 2
    for out, form in ((first, GRAMMAR), (tree, TREE), (penalised, TREE)):
        assert all(form.matches(text) or reason == "length" for text, reason in zip(out.text, out.finish_reason, strict=True))
    tokens = tree.tokens[0, : tree.lengths[0]].tolist()
    logits = reference_logits(engine.model.params, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    own = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    walk = HostWalk(walker_of(TREE, TOKENIZER, SIZE), ANSWERS)
    for step, token in enumerate(tokens):
        wanted = np.where(walk.after(tokens[:step]).allowed([END_ID]), own[step], -np.inf)
        for one, bias in SOFT.items():
            wanted[one] += bias
        wanted -= np.log(np.exp(wanted).sum())
        np.testing.assert_allclose(tree.logprobs[0, step], wanted[token], atol=1e-4)
        np.testing.assert_allclose(tree.model_logprobs[0, step], own[step, token], atol=1e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_rows_of_grammars_go_on_where_they_were(engine, model, ahead):
    long = forms.grammar('start: "(" start ")" | "[" start "]" | "x"')  # what opens closes after the swap
    asked = [{"prompt": OTHER, "n": 2}, {"form": long, "n": 2, "logit_bias": {120: -2.0}}, {"form": FORM}]
    expected = run(engine, *asked)
    small = jkv.Engine(model, max_running=3, max_slots=160, page_size=4, max_stop_ids=8, num_pages=120, chunk=8, ahead=ahead)
    found = run(small, *asked)
    assert sum(sample.preemptions for sample in found[1].samples)
    for out, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(out.tokens, other.tokens)


def test_a_sample_that_starts_again_or_moves_draws_the_same_answer(engine, model):
    (expected,) = run(engine, {"form": TREE})
    ticket = engine.submit(PROMPT, form=TREE, sampling=DRAWN, max_new_tokens=LENGTH)
    for _ in range(4):
        engine.step()
    (content,) = engine.copy_rows().values()
    engine.reset()
    engine.run()
    np.testing.assert_array_equal(engine.result(ticket).tokens, expected.tokens)
    moved = engine.resume_row(content, jkv.full())
    engine.run()
    np.testing.assert_array_equal(engine.result(moved).tokens, expected.tokens)


def test_a_grammar_that_cannot_go_on_ends_its_own_request_alone(engine, monkeypatch):
    (expected,) = run(engine, {})
    plain = HostWalk.allowed

    def stuck(walk, ends):
        if walk.num_tokens == 2:
            raise RuntimeError("a limit of the parser")
        return plain(walk, ends)

    monkeypatch.setattr(HostWalk, "allowed", stuck)
    failed, beside = run(engine, {"form": TREE}, {})
    assert failed.finish_reason == ["error"]
    assert "a limit of the parser" in str(failed.samples[0].error)
    np.testing.assert_array_equal(beside.tokens, expected.tokens)


def test_a_plain_engine_has_no_part_of_grammars_and_whole_chunks(engine):
    engine.runner.lower()
    steps = engine.stats.steps
    run(engine, {"form": FORM}, {})
    assert "host_form" not in engine.runner.parts_on
    assert engine.stats.steps > steps
    assert engine.scheduler._num_steps() == 0
