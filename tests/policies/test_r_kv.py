"""R-KV against an independent NumPy implementation, written from the rule with plain loops, one head at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.testing import random_view


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def reference(
    key,
    position,
    query,
    budget,
    *,
    window=4,
    importance=0.1,
    similarity=0.5,
    exempt=1,
    pool=7,
    over_group="max",
    released=False,
    pool_first=False,
):
    """Kept slots of one KV head in stored order; key [S, H], position [S] ascending, query [G, W, H] oldest first."""
    size, width = key.shape
    past = size - window
    logits = np.einsum("gwh,sh->gws", query[:, -window:], key[:past]) / np.sqrt(width)
    if over_group == "max":
        rows = np.stack([softmax(row) for row in logits.max(axis=0)])
    else:
        share = np.stack([[softmax(row) for row in of_head] for of_head in logits])
        rows = share.max(axis=0) if over_group == "max-probability" else share.mean(axis=0)
        rows = rows / rows.sum(axis=-1, keepdims=True)

    def pool_slots(mass):
        return np.array([mass[max(0, s - pool // 2) : s + pool // 2 + 1].max() for s in range(past)])

    pooled = np.mean([pool_slots(row) for row in rows], axis=0) if pool_first else pool_slots(rows.mean(axis=0))
    unit = key / (np.linalg.norm(key, axis=-1, keepdims=True) + 1e-8)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0.0)
    recency = np.arange(size) if released else position
    for i in range(size):
        alike = sorted(np.flatnonzero(cosine[i] > similarity), key=lambda j: recency[j])
        for j in alike[len(alike) - exempt :] if exempt else []:
            cosine[i, j] = 0.0
        if released and not alike:
            cosine[i, 0] = 0.0
    redundancy = softmax(cosine.mean(axis=0))[:past]
    score = importance * pooled - (1 - importance) * redundancy
    best = np.argsort(-score, kind="stable")[: budget - window]
    if not released:
        best = np.sort(best)
    return np.concatenate([best, np.arange(past, size)]), score


SETTINGS = [
    {},
    {"importance": 0.5},
    {"similarity": 0.2},
    {"exempt": 0},
    {"exempt": 2},
    {"pool": 1},
    {"window": 8},
    {"over_group": "mean", "importance": 0.9},
    {"over_group": "max-probability", "importance": 0.9},
    {"pool_first": True, "importance": 0.9},
    {"over_group": "mean", "pool_first": True, "importance": 0.9},
    {"over_group": "max-probability", "pool_first": True, "importance": 0.9},
    {"over_group": "max-probability", "pool_first": True},
]
KEPT = [
    pytest.param(settings, released, id="-".join([*(f"{name}={value}" for name, value in settings.items()), code]))
    for settings in SETTINGS
    for released, code in ((False, "mended"), (True, "released"))
    if not released or settings.get("exempt", 1) == 1  # the released code exempts exactly one
]


@pytest.mark.parametrize(("settings", "released"), KEPT)
def test_kept_slots_are_those_of_an_independent_implementation(settings, released):
    view = random_view(np.random.default_rng(5), slots=60)
    settings = {"window": 4} | settings
    slots = np.asarray(jax.jit(jkv.r_kv(budget=20, released=released, **settings).select)(view))
    key, query, position = (np.asarray(x, np.float64) for x in (view.key, view.query, view.position))
    for b, k in np.ndindex(slots.shape[:2]):
        size = int((position[b, k] >= 0).sum())
        expected, _ = reference(
            key[b, k, :size], position[b, k, :size], query[b, 2 * k : 2 * k + 2], 20, released=released, **settings
        )
        np.testing.assert_array_equal(slots[b, k][slots[b, k] >= 0], expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("over_group", ["max", "mean"])
@pytest.mark.parametrize("group", [1, 2, 4, 6, 7])
def test_kept_sets_are_those_of_the_rule_for_every_group_and_type(group, over_group, dtype):
    """Outside a band around the cut: max-pooling makes ties common, and bf16 rounds what decides them."""
    view = random_view(np.random.default_rng(group), slots=60, group=group, dtype=dtype)
    slots = np.asarray(jax.jit(jkv.r_kv(budget=20, window=4, importance=0.5, over_group=over_group).select)(view))
    key, query, position = (np.asarray(x, np.float64) for x in (view.key, view.query, view.position))
    sure = 0
    for b, k in np.ndindex(slots.shape[:2]):
        size = int((position[b, k] >= 0).sum())
        args = key[b, k, :size], position[b, k, :size], query[b, group * k : group * (k + 1)], 20
        _, score = reference(*args, importance=0.5, over_group=over_group)
        kept, recent = set(slots[b, k][slots[b, k] >= 0].tolist()), set(range(size - 4, size))
        cut, band = np.sort(score)[::-1][min(15, size - 5)], 1e-5 if dtype == jnp.float32 else 2e-3
        surely = set(np.flatnonzero(score > cut + band).tolist())
        assert surely | recent <= kept
        assert kept - recent <= set(np.flatnonzero(score >= cut - band).tolist())
        sure += len(surely)
    assert sure > 20


def test_released_stores_in_score_order_and_the_default_by_position():
    view = random_view(np.random.default_rng(6), slots=60)
    by_score = np.asarray(jax.jit(jkv.r_kv(budget=20, window=4, released=True).select)(view))[0, 0, :20]
    assert (np.diff(by_score[:16]) < 0).any()
    assert (np.diff(by_score[16:]) > 0).all()  # the window comes last, in order
    by_position = np.asarray(jax.jit(jkv.r_kv(budget=20, window=4).select)(view))[0, 0, :20]
    assert (np.diff(by_position) > 0).all()


def test_the_newest_of_identical_tokens_outlives_the_others():
    rng = np.random.default_rng(7)
    key = np.eye(40, 64, dtype=np.float32)[None, None]  # no two alike, but for
    key[0, 0, [9, 17]] = key[0, 0, 2]
    view = jkv.CacheView(
        key=jnp.asarray(key),
        value=jnp.asarray(key),
        position=jnp.arange(40, dtype=jnp.int32)[None, None],
        query=jnp.asarray(rng.standard_normal((1, 2, 8, 64)), jnp.float32),
    )
    kept = [np.asarray(jax.jit(jkv.r_kv(budget=budget, importance=0.0).select)(view))[0, 0].tolist() for budget in (39, 38, 37)]
    assert [sorted(set(range(40)) - set(slots)) for slots in kept[:2]] == [[2], [2, 9]]
    assert 17 in kept[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": 4}, "budget must hold"),
        ({"budget": 0}, "number of slots, at least 1"),
        ({"budget": 64, "interval": 0}, "interval must be at least 1"),
        ({"budget": 64, "window": 0}, "window must be at least 1"),
        ({"budget": 64, "importance": 1.5}, "importance must lie in"),
        ({"budget": 64, "similarity": 2.0}, "similarity must lie in"),
        ({"budget": 64, "exempt": -1}, "exempt must be"),
        ({"budget": 64, "pool": 4}, "odd"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_out_of_range_are_refused_when_the_policy_is_built(settings, words):
    with pytest.raises(ValueError, match=words):
        jkv.r_kv(**settings)


def test_a_view_without_queries_is_refused():
    view = random_view(np.random.default_rng(8))
    with pytest.raises(ValueError, match="last 8 queries; the view has none"):
        jkv.r_kv(budget=20).select(view._replace(query=None))
