"""Losses of heads against the engine with budgets by head, a head that alone matters, and budgets against their rule."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv.analysis.recall import decode, loss_of
from jkv.replay.score import token_scores
from jkv.testing import tiny_model

WHOLE = 4096  # slots of a head that drops nothing
TEXTS = [([1, 2, 3, 4, 5, 6], [*range(4, 30)] * 2), ([3] * 20, [5, 6, 7, 8] * 8)]


def with_only(model, layer, head):
    """The model with a KV head that alone writes to the hidden states, and loudly."""
    config, layers = model.config, list(model.params.layers)
    group = config.num_query_heads // config.num_kv_heads
    rows = np.arange(config.num_query_heads * config.head_size) // (group * config.head_size)
    for i, one in enumerate(layers):
        own = (rows == head) & (i == layer)
        layers[i] = one.replace(out=one.out * np.where(own, 4.0, 0.0).astype(np.float32)[:, None])
    return dataclasses.replace(model, params=model.params.replace(layers=tuple(layers)))


def test_a_heads_loss_is_that_of_the_engine_with_a_budget_for_it_alone():
    """Random slots depend on positions alone, so a head drops the same ones whatever the others do."""
    model, policy = tiny_model(), jkv.random(budget=12, interval=4, recent=2)
    compiled = token_scores._cache_size()
    losses = jkv.head_losses(model, TEXTS, policy)
    assert token_scores._cache_size() <= compiled + 1  # one program for all heads
    assert losses.shape == (2, 2, 2)
    full = decode(model, TEXTS, jkv.full(), {})
    for layer, head in np.ndindex(2, 2):
        slots = np.full((2, 2), WHOLE)
        slots[layer, head] = 12
        alone = decode(model, TEXTS, policy.with_budgets(slots), {})
        np.testing.assert_allclose(losses[:, layer, head], loss_of(full, alone), atol=1e-5)
    assert np.abs(losses).min() > 1e-3


@pytest.mark.parametrize("planted", [(0, 1), (1, 0)])
def test_a_head_that_alone_matters_gets_the_slots(planted):
    model = with_only(tiny_model(), *planted)
    prompts = np.random.default_rng(0).integers(4, 32, (4, 24)).tolist()
    out = jkv.generate(model, prompts, max_new_tokens=40, stop_ids=(), progress=False)
    texts = [(prompt, rest.tolist()) for prompt, rest in zip(prompts, out.tokens, strict=True)]
    policy = jkv.snap_kv(budget=12, interval=4, window=4)
    losses = jkv.head_losses(model, texts, policy)
    others = np.ones((2, 2), bool)
    others[planted] = False
    np.testing.assert_allclose(losses[:, others], 0, atol=1e-6)
    assert losses.mean(axis=0)[planted] > 0.01
    slots = jkv.head_budgets(losses, 24, floor=0.25)
    assert slots[planted] == 24 * 4 - 3 * 6
    assert (slots[others] == 6).all()
    full, own, even = (
        decode(model, texts, one, {})
        for one in (jkv.full(), policy.with_budgets(slots), policy.with_budgets(np.full((2, 2), 24)))
    )
    assert loss_of(full, own).mean() < loss_of(full, even).mean() / 2


@pytest.mark.parametrize("most", [None, 400, 101, 100])
@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_budgets_add_up_and_follow_the_losses(floor, most):
    rng = np.random.default_rng(0)
    losses = np.maximum(rng.standard_normal((3, 7, 5)) ** 3, -1)
    slots, mean = jkv.head_budgets(losses, 100, floor=floor, most=most), losses.mean(axis=0)
    limit = most or 100 * 35
    assert slots.shape == (7, 5)
    assert slots.sum() == 100 * 35
    assert slots.min() >= floor * 100
    assert slots.max() <= limit
    order = np.argsort(mean, axis=None)
    assert (np.diff(slots.ravel()[order]) >= -1).all()  # to within the rounding
    worth = np.maximum(mean, 0)
    is_open = slots < limit - 1
    if floor < 1 and (is_open & (worth > 0)).any():
        beyond = slots - floor * 100
        share = beyond[is_open & (worth > 0)].sum() / worth[is_open].sum()
        np.testing.assert_allclose(beyond[is_open & (worth > 0)], (share * worth)[is_open & (worth > 0)], atol=1.5)
    if floor == 1:
        assert (slots == 100).all()


def test_budgets_of_known_losses():
    losses = [[3.0, 1.0], [0.0, -2.0]]
    assert jkv.head_budgets(losses, 50, floor=0.2).tolist() == [[130, 50], [10, 10]]
    assert jkv.head_budgets(losses, 50, floor=0.2, most=100).tolist() == [[100, 80], [10, 10]]
    assert jkv.head_budgets(losses, 50, floor=0.2, most=60).tolist() == [[60, 60], [40, 40]]
    assert jkv.head_budgets(np.zeros((1, 3)), 7).tolist() == [[7, 7, 7]]
    assert jkv.head_budgets([[1.0, 1.0, 1.0]], 5, floor=0.5).tolist() == [[5, 5, 5]]
    assert jkv.head_budgets([[2.0, 1.0, 0.0]], 10, floor=0.25).tolist() == [[18, 10, 2]]  # of 17.5, 10 and 2.5
    policy = jkv.snap_kv(50).with_budgets(jkv.head_budgets(losses, 50))
    assert policy.slots == ((130, 50), (10, 10))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jkv.head_losses(tiny_model(), [], jkv.snap_kv(16)), "needs texts"),
        (lambda: jkv.head_losses(tiny_model(), [([1], [])], jkv.snap_kv(16)), "needs texts"),
        (lambda: jkv.head_losses(tiny_model(), TEXTS, "r_kv"), "policy"),
        (lambda: jkv.head_losses(tiny_model(), TEXTS, jkv.full()), "full evicts none"),
        (lambda: jkv.head_losses(tiny_model(), TEXTS, jkv.quest(16)), "quest evicts none, or also selects"),
        (lambda: jkv.head_losses(tiny_model(), TEXTS, jkv.reason_cache()), "reason_cache evicts none"),
        (
            lambda: jkv.head_losses(tiny_model(), TEXTS, jkv.snap_kv(500)),
            "snap_kv evicted nothing from texts, which have at most 58 tokens",
        ),
        (lambda: jkv.head_budgets([1.0, 2.0], 50), r"losses must be finite numbers, \[L, K\]"),
        (lambda: jkv.head_budgets([[1.0, np.nan]], 50), "losses must be finite"),
        (lambda: jkv.head_budgets([[1.0, 2.0], [3.0]], 50), "losses must be finite"),
        (lambda: jkv.head_budgets("high", 50), "losses must be finite"),
        (lambda: jkv.head_budgets([[1.0]], 2.5), "budget must be a whole number"),
        (lambda: jkv.head_budgets([[1.0]], 50, most="all"), "most must be"),
        (lambda: jkv.head_budgets([[1.0]], 0), "budget must be a number of slots"),
        (lambda: jkv.head_budgets([[1.0]], 50, floor=1.5), "floor must lie in"),
        (lambda: jkv.head_budgets([[1.0]], 50, most=49), "most must be at least the mean budget, 50 slots; got 49"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()
