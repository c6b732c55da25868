"""TwinKV against plain NumPy loops: twins, orphans, donors, and what is swapped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.policies import make
from jkv.policies.twin_kv import nearest
from jkv.testing import random_view, tiny_model

BUDGET, SINKS, RECENT = 30, 3, 8


def kept(slots):
    """The slots that stay, without padding."""
    return np.asarray(slots)[np.asarray(slots) >= 0]


def repaired(key, position, before, similarity, apart):
    """The slots after the repair of `before`, and how many swaps it took."""
    unit = key / np.linalg.norm(key, axis=1, keepdims=True)

    def likeness(s):
        far = [j for j in before if abs(position[j] - position[s]) > apart]
        return max((unit[s] @ unit[j] for j in far), default=-1.0)

    like = {s: likeness(s) for s in range(len(key))}
    free = [s for s in before if position[s] >= SINKS and position[s] <= position[-1] - RECENT]
    donors = sorted((s for s in free if like[s] >= similarity), key=lambda s: (-like[s], s))
    orphans = sorted((s for s in like if s not in before and like[s] < similarity), key=lambda s: (like[s], s))
    swaps = list(zip(donors, orphans, strict=False))
    after = set(before) - {donor for donor, _ in swaps} | {orphan for _, orphan in swaps}
    return sorted(after), len(swaps)


@pytest.mark.parametrize("around", ["snap_kv", "cur", "g_kv"])
@pytest.mark.parametrize(
    ("similarity", "apart"), [(0.5, 0), (0.8, 9), (0.7, 32), (-1.0, 0), (0.8, 1000)], ids=lambda value: str(value)
)
def test_orphans_take_the_places_of_donors_one_for_one(similarity, apart, around):
    protected = {"sinks": SINKS, "recent": RECENT}
    other = make(around, {"budget": BUDGET} | protected | ({"window": 8} if around == "g_kv" else {}))
    policy = jkv.twin_kv(BUDGET, around=other, similarity=similarity, apart=apart, **protected)
    view = random_view(np.random.default_rng(int(apart)), slots=150, carried_names=policy.needs.carried)
    slots, before = (np.asarray(jax.jit(one.select)(view)) for one in (policy, other))
    key, position = np.asarray(view.key, np.float64), np.asarray(view.position)
    swaps = 0
    for b, k in np.ndindex(position.shape[:2]):
        size = int((position[b, k] >= 0).sum())
        expected, count = repaired(key[b, k, :size], position[b, k, :size], kept(before[b, k]).tolist(), similarity, apart)
        assert kept(slots[b, k]).tolist() == expected
        swaps += count
    assert (swaps > 0) == (similarity > 0 and apart < 1000)


def test_numbers_that_the_other_score_carries_are_carried_on():
    policy = jkv.twin_kv(BUDGET, around="g_kv", similarity=0.5, apart=0)
    view = random_view(np.random.default_rng(0), slots=100, carried_names=policy.needs.carried, budget=BUDGET)
    assert policy.needs.carried == ("importance",)
    one, two = (np.asarray(x.evict.rate_and_carry(view)[1]["importance"]) for x in (policy, jkv.g_kv(BUDGET)))
    np.testing.assert_array_equal(one, two)


def test_the_nearest_key_is_found_in_every_tile():
    """300 slots are three tiles, of which the last overlaps; each slot's only twin is 150 slots on."""
    rng = np.random.default_rng(0)
    half = np.linalg.qr(rng.standard_normal((150, 150)))[0].astype(np.float32)
    key = jnp.asarray(np.concatenate([half, 3 * half]))[None, None]
    position = jnp.arange(300, dtype=jnp.int32)[None, None]
    view = jkv.CacheView(key, key, position)
    is_kept = jnp.asarray(rng.random(300) < 0.5)[None, None]
    got = np.asarray(jax.jit(nearest, static_argnums=2)(view, is_kept, 100))[0, 0]
    twin = (np.arange(300) + 150) % 300
    np.testing.assert_allclose(got > 0.9, np.asarray(is_kept)[0, 0, twin])
    got = np.asarray(jax.jit(nearest, static_argnums=2)(view, is_kept, 150))[0, 0]
    assert got.max() < 0.9


def test_keys_that_are_equal_up_to_rounding_are_twins_of_any_similarity():
    """Of 12 multiples of one key and 4 others, the first 8 are kept; the newest is protected."""
    key = np.random.default_rng(1).standard_normal(8)
    keys = np.concatenate([np.linspace(0.1, 3, 12)[:, None] * key, np.eye(8)[:4]]).astype(np.float32)
    position = jnp.arange(16, dtype=jnp.int32)[None, None]
    view = jkv.CacheView(jnp.asarray(keys)[None, None], jnp.asarray(keys)[None, None], position)
    oldest = jkv.evict_by(lambda view: -view.position.astype(jnp.float32), budget=8)
    policy = jkv.twin_kv(8, around=oldest, similarity=1.0, apart=0, sinks=0, recent=1)
    assert len({float(x @ y / np.sqrt((x @ x) * (y @ y))) for x in keys[:12] for y in keys[:12]}) > 1
    assert kept(policy.select(view)[0, 0]).tolist() == [3, 4, 5, 6, 12, 13, 14, 15]


@pytest.mark.parametrize("around", ["snap_kv", "r_kv"])
def test_a_run_is_replayed(around):
    model = tiny_model()
    policy = jkv.twin_kv(24, interval=8, around=around, similarity=0.4, apart=4, sinks=2)
    plain = make(around, {"budget": 24, "interval": 8, "sinks": 2})
    settings = {"max_new_tokens": 60, "stop_ids": (), "return_trace": True, "progress": False}
    out, other = (jkv.generate(model, [[5, 9, 2, 7] * 6, [3, 8] * 9], policy=one, **settings) for one in (policy, plain))
    assert (out.trace.end != other.trace.end).any()
    replayed = jkv.score(model, out, trace=out.trace)
    assert np.abs(np.asarray(replayed.logprobs) - out.logprobs).max() <= 1e-4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"around": jkv.full()}, "twin_kv needs a policy with a score .*full has none"),
        ({"around": "nothing"}, "around must be one of"),
        ({"around": jkv.ada_kv(64)}, "ada_kv has scope 'compete'. Use 'head'"),
        ({"similarity": 1.5}, "similarity must lie in"),
        ({"apart": -1}, "apart must be at least 0 tokens"),
        ({"recent": 3}, "recent must be at least the window, 8 tokens"),
        ({"budget": 8, "recent": 8}, "must hold its sinks and recent"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        jkv.twin_kv(**{"budget": 128} | settings)
