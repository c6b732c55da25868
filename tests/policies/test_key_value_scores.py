"""Scores of keys and values alone, or with attention, against plain NumPy loops: KeyDiff, CAOTE and LagKV."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.testing import random_view, tiny_model

BUDGET = 24


def heads_of(view):
    """Batch row, KV head, and the filled slots' keys, values and positions in float64."""
    key, value, position = (np.asarray(x, np.float64) for x in (view.key, view.value, view.position))
    for b, k in np.ndindex(position.shape[:2]):
        size = int((position[b, k] >= 0).sum())
        yield b, k, key[b, k, :size], value[b, k, :size], position[b, k, :size]


def best(score, position, budget, sinks, recent):
    """The slots that stay: those of the first and last positions, and the best of the others, the lower of equals."""
    protected = (position < sinks) | (position > position.max() - recent)
    return np.sort(np.argsort(-np.where(protected, np.inf, score), kind="stable")[:budget])


def kept(slots):
    """The slots that stay, without padding."""
    return np.asarray(slots)[np.asarray(slots) >= 0]


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (4, 6)])
@pytest.mark.parametrize("slots", [30, 80])
def test_key_diff_keeps_the_keys_least_like_the_mean(slots, sinks, recent):
    view = random_view(np.random.default_rng(slots), slots=slots)
    chosen = jax.jit(jkv.key_diff(BUDGET, sinks=sinks, recent=recent).select)(view)
    for b, k, key, _, position in heads_of(view):
        unit = [x / np.sqrt(x @ x) for x in key]
        mean = sum(unit) / len(unit)
        score = np.array([-(x @ mean) / np.sqrt(mean @ mean) for x in unit])
        np.testing.assert_array_equal(kept(chosen[b, k]), best(score, position, BUDGET, sinks, recent))


def mean_of_blocks(score, position, block):
    """For each slot the mean score of the slots of its block."""
    return np.array([score[position // block == own].mean() for own in position // block])


@pytest.mark.parametrize("block", [1, 2, 8, 1000])
@pytest.mark.parametrize("name", ["key_diff", "cur"])
def test_slots_of_a_block_share_its_mean_score(name, block):
    """Gaps of earlier compactions leave some blocks fewer slots; the block that is cut keeps its first ones."""
    view = random_view(np.random.default_rng(block), slots=80)
    settings = {"sinks": 2, "recent": 5} | ({"seed": 3} if name == "cur" else {})
    policy, alone = (jkv.policies.make(name, settings | {"budget": BUDGET, "block": one}) for one in (block, 1))
    chosen, scores = jax.jit(policy.select)(view), np.asarray(jax.jit(alone.evict.score)(view), np.float64)
    sizes = set()
    for b, k, _, _, position in heads_of(view):
        means = mean_of_blocks(scores[b, k, : len(position)], position, block)
        np.testing.assert_array_equal(kept(chosen[b, k]), best(means, position, BUDGET, 2, 5))
        sizes |= {*np.unique(position // block, return_counts=True)[1].tolist()}
    assert len(sizes) > 1 or block == 1


@pytest.mark.parametrize("name", ["key_diff", "cur"])
def test_a_run_by_blocks_drops_whole_blocks_where_nothing_cuts_one(name):
    """All numbers are multiples of 4: the prompt, the budget, the interval, and what is protected."""
    model, prompt = tiny_model(), [1, 2, 3, 4, 5, 6] * 4
    policy = jkv.policies.make(name, {"budget": 32, "interval": 16, "block": 4, "sinks": 4, "recent": 4})
    out = jkv.generate(model, prompt, policy=policy, max_new_tokens=80, stop_ids=(), return_trace=True, progress=False)
    assert out.stats.compactions == 4
    end = np.asarray(out.trace.end[0])[..., :100].reshape(2, 2, -1, 4)
    assert (end == end[..., :1]).all()
    assert ((end < 1000).sum(axis=(2, 3)) == 24 + 64 - 32).all()
    replayed = jkv.score(model, out, trace=out.trace)
    assert np.abs(np.asarray(replayed.logprobs) - out.logprobs).max() <= 1e-4


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [1, 5])
def test_caote_keeps_the_slots_without_which_the_output_moves_most(window, group):
    """The distance is computed anew: the output of attention to all other slots, less that to all slots."""
    view = random_view(np.random.default_rng(window), slots=60, group=group)
    chosen = jax.jit(jkv.caote(BUDGET, window=window, sinks=2).select)(view)
    query = np.asarray(view.query, np.float64)
    for b, k, key, value, position in heads_of(view):
        past = len(key) - window
        rows = [
            softmax(np.array([x @ query[b, n, w - window] / np.sqrt(key.shape[1]) for x in key[:past]]))
            for n in range(group * k, group * (k + 1))
            for w in range(window)
        ]
        share = np.mean(rows, axis=0)
        output = share @ value[:past]
        moved = []
        for s in range(past):
            others = np.delete(share, s) / np.delete(share, s).sum()
            moved.append(np.linalg.norm(others @ np.delete(value[:past], s, axis=0) - output))
        score = np.array(moved + [0.0] * window)
        np.testing.assert_array_equal(kept(chosen[b, k]), best(score, position, BUDGET, 2, window))


def test_caote_keeps_a_slot_that_has_all_of_the_attention():
    """Without it there would be no output; its score is bounded."""
    view = random_view(np.random.default_rng(0), slots=60)
    key = jnp.where(jnp.isnan(view.key), jnp.nan, view.key.at[:, :, 3].set(1000 * view.query[:, ::2, -1]))
    policy = jkv.caote(BUDGET, window=1)
    score = np.asarray(policy.evict.rate(view._replace(key=key)))
    assert np.isfinite(score[:, :, 3]).all()
    assert (score[:, :, 3] == score[:, :, :-1].max(axis=-1, where=np.isfinite(score[:, :, :-1]), initial=0)).all()


def spread(x, after):
    """How much each of a chunk's vectors varies over its channels, in units of the next chunk's range: a distribution."""
    low, high = np.min(after, axis=0), np.max(after, axis=0)
    scaled = [(row - low) / np.where(high > low, high - low, 1.0) for row in x]
    return softmax(np.array([np.sqrt(((row - row.mean()) ** 2).sum() / (len(row) - 1)) for row in scaled]))


def lag_score(key, value, lag, sinks):
    """The score of each slot by the rule; slots without a full next chunk are scored by age, above all others."""
    score = np.array([2.0 + s / len(key) for s in range(len(key))])
    first = sinks
    while first + 2 * lag <= len(key):
        own, after = slice(first, first + lag), slice(first + lag, first + 2 * lag)
        total = spread(key[own], key[after]) + spread(value[own], value[after])
        for rank, s in enumerate(np.argsort(total, kind="stable")):
            score[first + s] = rank / lag
        first += lag
    return score


@pytest.mark.parametrize(
    ("slots", "lag", "sinks", "is_constant"),
    [(90, 6, 4, False), (90, 9, 0, True), (200, 16, 3, False), (40, 12, 4, False)],
    ids=["short", "a-constant-channel", "long", "one-chunk"],
)
def test_lag_kv_keeps_the_best_of_each_chunk_by_the_range_of_the_next(slots, lag, sinks, is_constant):
    view = random_view(np.random.default_rng(slots + lag), slots=slots, batch=4)
    slot = jnp.arange(slots, dtype=jnp.int32)
    position = jnp.where(slot < sinks, slot, view.position + sinks)  # the sinks are there
    view = view._replace(position=jnp.where(view.is_filled, position, -1))
    if is_constant:
        view = view._replace(key=view.key.at[..., 0].set(2.0))
    budget = 2 * lag + 8
    policy = jkv.lag_kv(budget, lag=lag, sinks=sinks, recent=2)
    chosen, scores = jax.jit(policy.select)(view), np.asarray(jax.jit(policy.evict.score)(view))
    for b, k, key, value, position in heads_of(view):
        score = lag_score(key, value, lag, sinks)
        is_ranked = score < 1
        np.testing.assert_allclose(scores[b, k, : len(score)][is_ranked], score[is_ranked], rtol=1e-6)
        np.testing.assert_array_equal(kept(chosen[b, k]), best(score, position, budget, sinks, 2))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.key_diff(8, recent=7), "must hold its sinks and recent"),
        (lambda: jkv.key_diff(64, block=0), "block must be at least 1 position"),
        (lambda: jkv.cur(64, block=-4), "block must be at least 1 position"),
        (lambda: jkv.caote(64, recent=3), "recent must be at least the window, 16 tokens"),
        (lambda: jkv.caote(64, window=0), "window must be at least 1"),
        (lambda: jkv.lag_kv(64, lag=1), "lag must be at least 2"),
        (lambda: jkv.lag_kv(16, lag=16), "must hold its sinks and recent"),
    ],
)
def test_settings_out_of_range_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
