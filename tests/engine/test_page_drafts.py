"""A model that decodes ahead over some pages of its own cache draws the tokens of plain decoding, and leaves no mark there."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache import pool as pages
from jkv.cache.pool import LOG_WEIGHT
from jkv.engine.drafters import drafter_named
from jkv.engine.page_drafts import view_of
from jkv.testing import TINY, TinyTokenizer, adapted, tiny_model
from tests.engine.test_speculation import (
    MODELS,
    POLICIES,
    PROMPTS,
    SIZES,
    TOKENS,
    Guess,
    assert_equal_bits,
    assert_equal_tokens,
    run,
)

WHOLE = SIZES["max_slots"] // SIZES["page_size"]  # pages of the longest row


@pytest.mark.parametrize("drafts", [1, 5])
def test_a_view_has_the_first_page_the_newest_ones_and_those_of_the_guesses(drafts):
    num_slots, page_size, kept = np.array([0, 1, 4, 7, 8, 9, 23, 24]), 4, 3
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_size": 2, "page_size": page_size, "slot_data": (LOG_WEIGHT,)}
    pool = pages.create(num_rows=len(num_slots), num_pages=1, max_pages=8, **sizes)
    table = 100 + np.arange(pool.page_table.size, dtype=np.int32).reshape(pool.page_table.shape)
    weight = np.arange(table.size * page_size, dtype=np.float32).reshape(1, len(num_slots), 1, -1)
    length = jnp.asarray(num_slots[None, :, None], jnp.int32)
    pool = pool.replace(page_table=jnp.asarray(table), length=length, slot_data={LOG_WEIGHT: jnp.asarray(weight)})
    view = view_of(pool, jkv.draft_pages(drafts, pages=kept))
    for row, slots in enumerate(num_slots):
        filled = list(range(-(-slots // page_size)))
        left_out = filled[1 : max(1, len(filled) - (kept - 1))]
        read = [page for page in range(-(-(slots + drafts) // page_size)) if page not in left_out]
        assert view.page_table[0, row, 0, : len(read)].tolist() == table[0, row, 0, read].tolist()
        assert int(view.length[0, row, 0]) == slots - page_size * len(left_out)
        expected = weight[0, row, 0].reshape(-1, page_size)[read].reshape(-1)
        np.testing.assert_array_equal(view.slot_data[LOG_WEIGHT][0, row, 0, : len(expected)], expected)
    assert view.page_table.shape[-1] == kept + -(-drafts // page_size)


def test_over_the_whole_row_every_guess_is_right():
    """Drawn at random, with forced tokens too; in a model whose bits no number of tokens changes, so that guesses are exact."""
    texts = []
    for drafter in (None, jkv.draft_pages(pages=WHOLE)):
        engine = jkv.Engine(tiny_model(config=dataclasses.replace(TINY, head_size=32)), speculate=drafter, **SIZES)
        tickets = [
            engine.submit(prompt, None, jkv.Sampling(seed=1), TOKENS, stop_ids=(), forced_tokens=forced)
            for prompt, forced in zip(PROMPTS, (None, (7, 3, 9, 9, 2, 8), None), strict=True)
        ]
        engine.run()
        texts.append([engine.result(ticket).tokens[0].tolist() for ticket in tickets])
    assert texts[0] == texts[1]
    assert engine.stats.drafted == engine.stats.accepted == 3 * TOKENS * 3 // 4
    assert engine.stats.tokens_per_step == 4


def test_guesses_are_of_the_rows_own_adapter():
    model = tiny_model()
    sizes = SIZES | {"max_adapters": 1, "adapter_rank": 4}
    engine = jkv.Engine(model, speculate=jkv.draft_pages(pages=WHOLE), **sizes)
    engine.add_adapter("a", adapted(model.params, 4))
    drawn = {"sampling": jkv.Sampling(seed=1), "max_new_tokens": TOKENS, "stop_ids": ()}
    tickets = [engine.submit(PROMPTS[0], adapter=name, **drawn) for name in ("a", None)]
    engine.run()
    texts = [engine.result(ticket).tokens[0].tolist() for ticket in tickets]
    assert texts[0] != texts[1]
    assert engine.stats.accepted == engine.stats.drafted


@pytest.mark.everyday(where=lambda name, kv_dtype: (name, kv_dtype) == ("r_kv", "int8"))
@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["full", "r_kv"])
def test_what_is_drafted_changes_neither_tokens_nor_bits(name, kv_dtype):
    model = tiny_model() if kv_dtype is None else tiny_model(config=dataclasses.replace(TINY, head_size=32))
    expected, _ = run(model, None, POLICIES[name], kv_dtype=kv_dtype)
    none, _ = run(model, Guess((), 0), POLICIES[name], kv_dtype=kv_dtype)
    out, engine = run(model, jkv.draft_pages(pages=2), POLICIES[name], kv_dtype=kv_dtype)
    assert_equal_tokens(none, expected)
    assert_equal_bits(out, none)
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert all((one.stats.evicted > 0) == (name == "r_kv") for one in out)


@pytest.mark.everyday(where=lambda name: name in ("windows", "states"))
@pytest.mark.parametrize("name", MODELS)
def test_layers_outside_of_the_pool_are_as_they_were(name):
    none, _ = run(MODELS[name], Guess((), 0), POLICIES["r_kv"])
    out, engine = run(MODELS[name], jkv.draft_pages(pages=4), POLICIES["r_kv"])
    assert_equal_bits(out, none)
    assert 0 < engine.stats.accepted < engine.stats.drafted


def test_rows_that_decide_in_each_step_are_as_they_were_beside_rows_that_draft():
    """Slots are then reserved step by step: `run` asserts that no page is lost."""
    policies = [jkv.full(), jkv.h2o(budget=16), jkv.quest(budget=12, dense_layers=0)]
    model = tiny_model(tokenizer=TinyTokenizer())
    none, _ = run(model, Guess((), 0), policies, return_trace=True)
    out, engine = run(model, jkv.draft_pages(pages=3, drafts=3), policies, return_trace=True)
    assert_equal_bits(out, none)
    assert engine.stats.accepted > 0
    assert set(engine.stats.not_drafted) == {"h2o evicts by the attention of each step", "quest chooses pages in each step"}
    for one in out:
        replayed = jkv.score(model, one, trace=one.trace).logprobs
        assert np.quantile(np.abs(replayed - one.logprobs), 0.99) <= 1e-5


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"drafts": 0}, "drafts"), ({"drafts": 8}, "drafts"), ({"pages": 1}, "pages"), ({"pages": 2.5}, "pages")],
)
def test_numbers_out_of_range_are_refused(settings, field):
    with pytest.raises(jkv.InputError) as error:
        jkv.draft_pages(**settings)
    assert error.value.field == field


WINDOWS = dataclasses.replace(TINY, window=6, window_layers=(0, 1))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (TINY, {"max_slots": 28}, r"reads 8 pages, and a row has at most 7 here.*pages=7"),
        (TINY, {"max_slots": 4}, "at most 1 here, so it would save nothing. Use jkv.ngram"),
        (dataclasses.replace(TINY, head_size=32), {"page_size": 16, "kv_dtype": "kvarn"}, 'kv_dtype="kvarn" seals them'),
        (WINDOWS, {}, "this model has none"),
    ],
    ids=["more than a row has", "one page", "sealed", "windows alone"],
)
def test_an_engine_refuses_it_where_there_is_no_choice_of_pages(config, settings, message):
    with pytest.raises(jkv.InputError, match=message) as error:
        jkv.Engine(tiny_model(config=config), speculate="draft_pages", **{"max_slots": 96, "page_size": 4} | settings)
    assert (error.value.field, error.value.code) == ("speculate", "unsupported")


def test_a_plan_counts_it_and_refuses_what_an_engine_would():
    plan = jkv.plan("smollm2-135m", "h200", speculate=jkv.draft_pages())
    assert plan.own.row_bytes < jkv.plan("smollm2-135m", "h200", speculate="ngram").own.row_bytes
    assert plan.own.scratch.decode > jkv.plan("smollm2-135m", "h200").own.scratch.decode
    with pytest.raises(jkv.InputError, match="a row has at most 9 here"):
        jkv.plan("smollm2-135m", "h200", policy=jkv.r_kv(128, 16), prompt=16, speculate=jkv.draft_pages(pages=10))
    with pytest.raises(jkv.InputError, match="seals them"):
        jkv.plan("smollm2-135m", "h200", kv_dtype="kvarn", speculate="draft_pages")


def test_a_command_line_names_it():
    assert drafter_named("draft_pages", 2) == jkv.draft_pages(2)
