"""Policies that predict future queries, against their formulas in plain NumPy: TriAttention and Expected Attention."""

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.model.rotary import Rope
from jkv.testing import random_statistics, random_view, tiny_model

BUDGET = 24
STATISTICS = random_statistics(tiny_model())
FREQUENCIES = [0.7, 0.21, 0.04, 0.003]


def view_with(half, factor, seed=0, **settings):
    """A random view whose RoPE rotates `2 * half` of the 8 channels and multiplies them by a factor, as YaRN does."""
    view = random_view(np.random.default_rng(seed), **settings)
    batch = len(view.key)
    rope = Rope(jnp.tile(jnp.asarray(FREQUENCIES[:half]), (batch, 1)), jnp.full(batch, factor))
    moments = view.calibration._replace(modulus=view.calibration.modulus[..., :half] + 1.5)
    return view._replace(rope=rope, calibration=moments)


def pairs_of(x, half):
    """The rotated pairs of channels as complex numbers, and the channels that are left alone."""
    return [complex(x[f], x[f + half]) for f in range(half)], [float(number) for number in x[2 * half :]]


def before_rope(x, position, rope):
    """Pairs and other channels of a cached key or query, with rotation and factor undone."""
    pairs, others = pairs_of(np.asarray(x, np.float64), rope.frequency.shape[-1])
    frequency, factor = np.asarray(rope.frequency[0], np.float64), float(rope.factor[0])
    return [pair * cmath.exp(-1j * w * position) / factor for pair, w in zip(pairs, frequency, strict=True)], others


def heads_of(view):
    """Batch row, KV head, its query heads, its positions, and the length of the sequence."""
    group = view.query.shape[1] // view.key.shape[1]
    for b, k in np.ndindex(view.position.shape[:2]):
        positions = [int(p) for p in view.position[b, k] if p >= 0]
        yield b, k, range(k * group, (k + 1) * group), positions, int(view.num_seen[b])


def trigonometric_series(view, b, k, head, positions, total):
    """The series of one query head, slot after slot, from keys before RoPE."""
    half, factor = view.rope.frequency.shape[-1], float(view.rope.factor[b])
    frequency = np.asarray(view.rope.frequency[b], np.float64)
    query, rest = pairs_of(np.asarray(view.calibration.mean[b, head], np.float64), half)
    modulus = np.asarray(view.calibration.modulus[b, head], np.float64)
    series = []
    for s, position in enumerate(positions):
        key, others = before_rope(view.key[b, k, s], position, view.rope)
        value = sum(x * y for x, y in zip(rest, others, strict=True))
        for f in range(half):
            size, angle = factor**2 * abs(key[f]), cmath.phase(query[f] * key[f].conjugate())
            distances = [2**i for i in range(17)]
            cosines = [math.cos(frequency[f] * (total - position + d) + angle) for d in distances]
            value += size * abs(query[f]) * sum(cosines) / len(cosines) + size * (modulus[f] - abs(query[f]))
        series.append(value)
    return np.array(series)


@pytest.mark.parametrize(("half", "factor"), [(4, 1.0), (4, 1.3), (2, 1.0), (3, 0.8)])
@pytest.mark.parametrize("protects", [True, False])
def test_tri_attention_scores_by_the_series_of_the_paper(half, factor, protects):
    view = view_with(half, factor, seed=half, batch=2)._replace(prompt_length=jnp.asarray([9, 20]))
    policy = jkv.tri_attention(BUDGET, STATISTICS, protect_prompt=protects)
    got = np.asarray(jax.jit(policy.evict.score)(view))
    for b, k, heads, positions, total in heads_of(view):
        competes = np.array([position >= int(view.prompt_length[b]) or not protects for position in positions])
        best = np.full(len(positions), -np.inf)
        for head in heads:
            series = trigonometric_series(view, b, k, head, positions, total)
            scale = np.std(series[competes], ddof=1)
            best = np.maximum(best, (series - series[competes].mean()) / scale)
        np.testing.assert_allclose(got[b, k, : len(positions)][competes], best[competes], atol=5e-3)


def test_tri_attention_pins_the_prompt_and_keeps_the_best_of_the_others():
    view = view_with(4, 1.0, batch=1, heads=1)._replace(prompt_length=jnp.asarray([30]))
    policy = jkv.tri_attention(BUDGET, STATISTICS)
    kept = np.asarray(jax.jit(policy.select)(view))[0, 0]
    position, score = np.asarray(view.position)[0, 0], np.asarray(jax.jit(policy.evict.score)(view))[0, 0]
    prompt, others = (np.flatnonzero(is_one) for is_one in ((position >= 0) & (position < 30), position >= 30))
    best = others[np.argsort(-score[others])][: BUDGET - len(prompt)]
    assert 0 < len(prompt) < BUDGET
    assert {*kept[kept >= 0]} == {*prompt, *best}


def test_tri_attention_reads_the_statistics_of_the_views_layer():
    """A view of the engine's own brings them; `select` takes them from the policy."""
    view = random_view(np.random.default_rng(0), batch=2)._replace(calibration=None, layer=1)
    moments = type(STATISTICS.arrays)(*(jnp.stack([jnp.asarray(x[1])] * 2) for x in STATISTICS.arrays))
    policy = jkv.tri_attention(BUDGET, STATISTICS)
    np.testing.assert_array_equal(jax.jit(policy.select)(view), jax.jit(policy.select)(view._replace(calibration=moments)))
    assert (jax.jit(policy.select)(view) != jax.jit(policy.select)(view._replace(layer=0))).any()


def expected_scores(view, b, k, heads, positions, total, num_queries, future, sinks):
    """One KV head's scores, from the mean and the covariance matrix of un-rotated queries."""
    half, factor = view.rope.frequency.shape[-1], float(view.rope.factor[b])
    frequency = np.asarray(view.rope.frequency[b], np.float64)
    size = view.key.shape[-1]
    average = np.eye(size)  # the rotation to all future positions, on average
    for f in range(half):
        angles = [frequency[f] * (total + j) for j in range(future)]
        cos, sin = (factor * np.mean(part) for part in (np.cos(angles), np.sin(angles)))
        average[f, f], average[f, f + half], average[f + half, f], average[f + half, f + half] = cos, -sin, sin, cos
    shares = np.zeros(len(positions))
    for head in heads:
        queries = []
        for w in range(num_queries):
            position = total - num_queries + w
            if position >= sinks:
                column = view.query.shape[2] - num_queries + w
                pairs, others = before_rope(view.query[b, head, column], position, view.rope)
                queries.append([*(x.real for x in pairs), *(x.imag for x in pairs), *others])
        queries = np.array(queries)
        mean, centred = queries.mean(axis=0), queries - queries.mean(axis=0)
        covariance = sum(np.outer(row, row) for row in centred) / len(centred)
        mean, covariance = average @ mean, average @ covariance @ average.T
        logits = np.full(len(positions), -np.inf)
        for s, position in enumerate(positions):
            key = np.asarray(view.key[b, k, s], np.float64)
            if position >= sinks:
                logits[s] = mean @ key / math.sqrt(size) + key @ covariance @ key / (2 * size)
        weights = np.exp(logits - logits.max())
        shares += weights / weights.sum() / len(heads)
    return shares * np.linalg.norm(np.asarray(view.value[b, k, : len(positions)], np.float64), axis=-1)


@pytest.mark.parametrize(("half", "factor"), [(4, 1.0), (4, 1.3), (2, 1.0)])
def test_expected_attention_scores_by_the_mean_and_covariance_of_queries_before_rope(half, factor):
    view = view_with(half, factor, seed=half, window=12)
    score = jkv.expected_attention(BUDGET, num_queries=9, future=31, sinks=3).evict.score
    got = np.asarray(jax.jit(score)(view))
    for b, k, heads, positions, total in heads_of(view):
        wanted = expected_scores(view, b, k, heads, positions, total, 9, 31, 3)
        np.testing.assert_allclose(got[b, k, : len(positions)], wanted, rtol=2e-3, atol=1e-7)


def test_expected_attention_leaves_out_queries_that_do_not_exist():
    """Of a sequence of 7 tokens, 4 queries follow the three sinks."""
    view = view_with(4, 1.0, batch=1, window=12)
    position = jnp.where(jnp.arange(view.key.shape[2]) < 7, jnp.arange(view.key.shape[2]), -1)
    view = view._replace(position=jnp.broadcast_to(position, view.position.shape).astype(jnp.int32))
    view = view._replace(query=view.query.at[:, :, :5].set(jnp.nan))  # the ring of a new sequence
    view = view._replace(query=jnp.nan_to_num(view.query, nan=1e3), key=jnp.nan_to_num(view.key))
    got = np.asarray(jax.jit(jkv.expected_attention(BUDGET, num_queries=12, future=8, sinks=3).evict.score)(view))
    for b, k, heads, positions, total in heads_of(view):
        wanted = expected_scores(view, b, k, heads, positions, total, 12, 8, 3)
        np.testing.assert_allclose(got[b, k, :7], wanted, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.expected_attention(64, num_queries=0), "num_queries must be at least 1; got 0"),
        (lambda: jkv.expected_attention(64, future=0), "future must be at least 1; got 0"),
        (lambda: jkv.expected_attention(3), "must hold its sinks and recent slots"),
        (lambda: jkv.expected_attention(64).select(random_view(np.random.default_rng(0))), "reads the last 64 queries"),
        (
            lambda: jkv.critical_kv(64).select(random_view(np.random.default_rng(0))._replace(projected_norm=None)),
            r"norms of projected values; the view has none. Pass CacheView\(projected_norm=\)",
        ),
        (
            lambda: jkv.tri_attention(64, STATISTICS).select(random_view(np.random.default_rng(0))._replace(rope=None)),
            r"the rotary embedding; the view has none. Pass CacheView\(rope=\)",
        ),
        (
            lambda: jkv.Policy("mine", jkv.tri_attention(64, STATISTICS).evict, jkv.Every(64)),
            "needs both a calibration",
        ),
        (lambda: jkv.Policy("mine", calibration=STATISTICS), "needs both a calibration"),
    ],
)
def test_what_cannot_be_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
