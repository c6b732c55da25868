"""Policies that draw at random, against plain NumPy: CUR, VaSE and Random Attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.eviction.scores import uniform
from jkv.policies.vase import drawn_score
from jkv.testing import random_view

BUDGET, WINDOW = 24, 4


def kept(slots):
    """The slots that stay, without padding."""
    return np.asarray(slots)[np.asarray(slots) >= 0]


def rows_of(view):
    """Batch row, KV head and number of filled slots."""
    for b, k in np.ndindex(view.position.shape[:2]):
        yield b, k, int((np.asarray(view.position)[b, k] >= 0).sum())


@pytest.mark.parametrize("rank", [0, 1, 20])
def test_cur_keeps_the_largest_products_of_projected_norms(rank):
    view = random_view(np.random.default_rng(rank), slots=60)._replace(layer=3)
    slots = jax.jit(jkv.cur(BUDGET, rank=rank, sinks=2, recent=5, seed=7).select)(view)
    key, value, position = (np.asarray(x, np.float64) for x in (view.key, view.value, view.position))
    for b, k, size in rows_of(view):
        score = np.full(size, np.inf)
        projection = np.eye(key.shape[-1])
        if rank:
            folded = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 3), int(view.num_seen[b]))
            projection = np.asarray(jax.random.normal(folded, (key.shape[-1], rank)), np.float64) / np.sqrt(rank)
        for s in range(size):
            if position[b, k, s] >= 2 and int(view.num_seen[b]) - position[b, k, s] > 5:
                one, two = key[b, k, s] @ projection, value[b, k, s] @ projection
                score[s] = (one @ one) * (two @ two)
        np.testing.assert_array_equal(kept(slots[b, k]), np.sort(np.argsort(-score, kind="stable")[:BUDGET]))


def test_cur_draws_another_projection_for_each_layer_and_length():
    view = random_view(np.random.default_rng(0), slots=200, batch=1)
    policy = jkv.cur(BUDGET)
    sets = [jax.jit(policy.select)(view._replace(layer=layer)).tolist() for layer in (0, 1, 0)]
    assert sets[0] == sets[2] != sets[1]


def test_vase_keeps_the_values_of_the_largest_range_and_its_sinks():
    view = random_view(np.random.default_rng(1), slots=80)
    slots = jax.jit(jkv.vase(40, window=WINDOW, share=0.25, sinks=3).select)(view)
    value, position = np.asarray(view.value), np.asarray(view.position)
    for b, k, size in rows_of(view):
        spread = value[b, k, :size].max(axis=-1) - value[b, k, :size].min(axis=-1)
        spread[position[b, k, :size] < 3] = np.inf
        old = np.flatnonzero(int(view.num_seen[b]) - 1 - position[b, k, :size] >= WINDOW)
        large = old[np.argsort(-spread[old], kind="stable")[:10]]
        got = kept(slots[b, k])
        assert len(got) == 40
        assert {*large} <= {*got}
        assert {*range(size)} - {*old} <= {*got}


def test_vase_draws_the_others_in_proportion_to_their_attention():
    """One slot of nineteen is drawn, from many seeds: the first one by Gumbel numbers has exactly these probabilities."""
    view = random_view(np.random.default_rng(2), slots=24, batch=1, heads=1)
    size = int((np.asarray(view.position)[0, 0] >= 0).sum())
    past, group = size - WINDOW, view.query.shape[1]
    logits = np.einsum("gwh,sh->gws", view.query[0, :, -WINDOW:], view.key[0, 0, :past]) / np.sqrt(view.key.shape[-1])
    share = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    wanted = share.mean(axis=(0, 1))
    view = view._replace(budget=jnp.full((1, 1), BUDGET, jnp.int32))
    mass = jkv.vase(BUDGET, window=WINDOW, pool=1).evict.score.mass(view)
    draw = jax.jit(lambda layer: drawn_score(mass, uniform(view._replace(layer=layer), 0)))
    counts = np.zeros(past)
    for layer in range(3000):  # each draws anew
        counts[int(draw(layer)[0, 0, :past].argmax())] += 1
    score = jkv.vase(BUDGET, window=WINDOW, share=0.0, sinks=0, pool=1, seed=0).evict.score(view._replace(layer=5))
    np.testing.assert_array_equal(score[..., :past], draw(5)[..., :past])
    chi_square = ((counts - 3000 * wanted) ** 2 / (3000 * wanted)).sum()
    assert group > 1
    assert chi_square < past + 5 * np.sqrt(2 * past)


@pytest.mark.parametrize("prompt", [6, 150])
def test_random_attention_keeps_the_prompt_the_recent_tokens_and_others_by_chance(prompt):
    """Of a prompt that does not fit, the first tokens, so that one slot is left to chance."""
    view = random_view(np.random.default_rng(3), slots=200)._replace(prompt_length=jnp.full(2, prompt, jnp.int32))
    policy = jkv.random_attention(BUDGET, recent=5, seed=1)
    slots, position = jax.jit(policy.select)(view), np.asarray(view.position)
    numbers = np.asarray(uniform(view, 1))
    for b, k, size in rows_of(view):
        score = numbers[b, k, :size].copy()
        score[(position[b, k, :size] < min(prompt, BUDGET - 6)) | (int(view.num_seen[b]) - 1 - position[b, k, :size] < 5)] = (
            np.inf
        )
        np.testing.assert_array_equal(kept(slots[b, k]), np.sort(np.argsort(-score, kind="stable")[:BUDGET]))


@pytest.mark.parametrize("name", ["random", "random_attention"])
def test_a_block_has_one_number_for_each_head_and_a_cut_block_keeps_its_first_slots(name):
    """Of positions 0 to 61 in blocks of 8, 24 stay: the last 3, and the best blocks of the others."""
    position = jnp.broadcast_to(jnp.arange(62, dtype=jnp.int32), (2, 2, 62))
    zeros = jnp.zeros((2, 2, 62, 8))
    view = jkv.CacheView(zeros, zeros, position, prompt_length=jnp.zeros(2, jnp.int32), layer=jnp.asarray([0, 1], jnp.int32))
    slots = jax.jit(jkv.policies.make(name, {"budget": BUDGET, "recent": 3, "block": 8, "seed": 1}).select)(view)
    sets = set()
    for b, k in np.ndindex(2, 2):
        key = jax.random.key(1)
        for number in (b, 62, k):  # layer, length, head
            key = jax.random.fold_in(key, number)
        number = [float(jax.random.uniform(jax.random.fold_in(key, block))) for block in range(8)]
        order = sorted(range(59), key=lambda s: (-number[s // 8], s))[: BUDGET - 3]
        expected = sorted([*order, 59, 60, 61])
        assert kept(slots[b, k]).tolist() == expected
        sets.add(tuple(expected))
    assert len(sets) > 1  # layers and heads draw their own


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.cur(64, rank=-1), "rank must be at least 0"),
        (lambda: jkv.cur(8, recent=7), "must hold its sinks and recent"),
        (lambda: jkv.vase(64, share=1.5), "share must lie in"),
        (lambda: jkv.random_attention(8, recent=9), "must hold its sinks and recent"),
        (lambda: jkv.random(8, block=0), "block must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
