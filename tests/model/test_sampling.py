"""Sampling: the drawn token follows the stated distribution, and keys depend on the request alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.model.sampling import DRAWS, SamplingRows, draw, log_distribution, request_id, sample_key

DISTRIBUTION = jax.jit(log_distribution, static_argnums=4)  # as programs run them
DRAW = jax.jit(draw, static_argnums=3)
LOGITS = np.array([2.0, 1.0, 0.5, 0.5, -1.0, -3.0], np.float32)


def expected(temperature, top_p, top_k):
    """The distribution by plain sorting."""
    if temperature == 0:
        temperature, top_p, top_k = 1.0, 1.0, 0
    scaled = LOGITS.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    kept = [i for i in order if not 0 < top_k < 6 or scaled[i] >= np.sort(scaled)[::-1][top_k - 1]]
    probability = np.exp(scaled[kept] - scaled.max())
    probability /= probability.sum()
    count = int(np.searchsorted(np.cumsum(probability), top_p - 1e-7) + 1) if top_p < 1 else len(kept)
    kept = [i for i in kept if scaled[i] >= scaled[kept[:count]].min()]
    out = np.zeros(6)
    out[kept] = np.exp(scaled[kept])
    return out / out.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.5, 1.0, 0), (1.0, 0.7, 0), (1.0, 0.05, 0), (1.0, 1.0, 2), (0.7, 0.8, 3), (1.0, 1.0, 99), (0.0, 0.5, 1)],
)
def test_the_distribution_is_that_of_plain_sorting(temperature, top_p, top_k):
    rows = [jnp.full(2, x, dtype) for x, dtype in ((temperature, jnp.float32), (top_p, jnp.float32), (top_k, jnp.int32))]
    got = np.exp(DISTRIBUTION(jnp.stack([LOGITS, LOGITS]), *rows, True))
    np.testing.assert_allclose(got[0], expected(temperature, top_p, top_k), atol=1e-6)
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_allclose(got.sum(axis=-1), 1, atol=1e-6)


def test_a_row_that_cuts_nothing_is_the_same_beside_one_that_does():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5000)) * 8, jnp.float32)
    settings = jnp.ones(2), jnp.asarray([1.0, 0.5]), jnp.zeros(2, jnp.int32)
    np.testing.assert_array_equal(DISTRIBUTION(logits, *settings, True)[0], DISTRIBUTION(logits, *settings, False)[0])


def test_drawn_tokens_follow_the_distribution():
    count = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (count, 6))
    keys = jnp.broadcast_to(sample_key(np.uint32(1), np.uint32(2), np.uint32(3)), (count, 2))
    ones = jnp.ones(count)
    rows = SamplingRows(0.8 * ones, 0.95 * ones, jnp.zeros(count, jnp.int32), keys)
    token, log_prob, _ = DRAW(logits, rows, jnp.arange(count, dtype=jnp.int32), "truncated")
    wanted = expected(0.8, 0.95, 0)
    frequency = np.bincount(np.asarray(token), minlength=6)
    assert frequency[wanted == 0].sum() == 0
    chi_square = ((frequency - count * wanted)[wanted > 0] ** 2 / (count * wanted[wanted > 0])).sum()
    assert chi_square < 20  # five cells: 99.9 % of draws lie below 18.5
    np.testing.assert_allclose(np.exp(log_prob), wanted[np.asarray(token)], rtol=1e-4)


def test_keys_differ_by_seed_request_sample_and_position_and_nothing_else():
    keys = {tuple(np.asarray(sample_key(*map(np.uint32, x))).tolist()) for x in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
    assert len(keys) == 4
    key = jnp.asarray([next(iter(keys))] * 2, jnp.uint32)
    flat = jnp.zeros((2, 1000))
    rows = SamplingRows(jnp.ones(2), jnp.ones(2), jnp.zeros(2, jnp.int32), key)
    same, _, _ = DRAW(flat, rows, jnp.asarray([7, 7], jnp.int32), "sampled")
    other, _, _ = DRAW(flat, rows, jnp.asarray([7, 8], jnp.int32), "sampled")
    assert same[0] == same[1] == other[0]
    assert other[0] != other[1]


def test_a_request_is_known_by_its_token_ids():
    assert request_id(np.array([1, 2, 3])) == request_id(np.array([1, 2, 3], np.int64))
    assert request_id(np.array([1, 2, 3])) != request_id(np.array([1, 2, 4]))


def test_what_every_row_needs_may_be_said_to_be_less_without_changing_a_token():
    """Greedy rows draw alike in all three programs, sampled ones in both that have noise."""
    logits = jax.random.normal(jax.random.key(0), (4, 50))
    rows = SamplingRows(
        jnp.asarray([0.0, 0.0, 1.0, 0.7]), jnp.ones(4), jnp.zeros(4, jnp.int32), jnp.arange(8, dtype=jnp.uint32).reshape(4, 2)
    )
    greedy, sampled, truncated = (DRAW(logits, rows, jnp.arange(4, dtype=jnp.int32), draws)[0] for draws in DRAWS)
    np.testing.assert_array_equal(sampled, truncated)
    np.testing.assert_array_equal(greedy[:2], sampled[:2])
    assert (greedy[2:] != sampled[2:]).any()
