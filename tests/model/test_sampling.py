"""Sampling: the drawn token follows the stated distribution, and keys depend on the request alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.model.sampling import DRAWS, Sampling, draw, log_distribution, request_id, rows_of, sample_key

DISTRIBUTION = jax.jit(log_distribution, static_argnums=2)  # as programs run them
DRAW = jax.jit(draw, static_argnums=4)
LOGITS = np.array([2.0, 1.0, 0.5, 0.5, -1.0, -3.0], np.float32)


def expected(logits, sampling):
    """The distribution by plain sorting, in float64 and in Hugging Face's order: temperature, top-k, top-p, min-p."""
    scaled = logits.astype(np.float64) / (sampling.temperature or 1.0)
    kept = np.argsort(-scaled, kind="stable")
    if sampling.temperature > 0:
        if 0 < sampling.top_k < len(kept):
            kept = kept[scaled[kept] >= scaled[kept[sampling.top_k - 1]]]
        probability = np.exp(scaled[kept] - scaled.max())
        before = np.cumsum(probability) / probability.sum() - probability / probability.sum()
        if sampling.top_p < 1:
            count = max(1, int((before < sampling.top_p - 1e-7).sum()))
            kept = kept[scaled[kept] >= scaled[kept[count - 1]]]
        kept = kept[np.exp(scaled[kept] - scaled.max()) >= sampling.min_p - 1e-7]
    out = np.zeros(len(logits))
    out[kept] = np.exp(scaled[kept] - scaled.max())
    return out / out.sum()


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(top_p=0.7),
    Sampling(top_p=0.05),
    Sampling(top_k=2),
    Sampling(top_k=3),
    Sampling(top_k=1, top_p=0.9),
    Sampling(temperature=0.7, top_p=0.8, top_k=3),
    Sampling(top_k=99),
    Sampling(min_p=0.3),
    Sampling(min_p=1.0),
    Sampling(temperature=0.6, top_p=0.95, top_k=4, min_p=0.1),
    Sampling(temperature=0.0, top_p=0.5, top_k=1, min_p=1.0),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_distribution_is_that_of_plain_sorting(sampling):
    got = np.exp(DISTRIBUTION(jnp.stack([LOGITS, LOGITS]), rows_of([sampling] * 2), True))
    np.testing.assert_allclose(got[0], expected(LOGITS, sampling), atol=1e-6)
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_allclose(got.sum(axis=-1), 1, atol=1e-6)


def test_many_rows_of_many_settings_keep_what_plain_sorting_keeps_ties_included():
    """Half of the rows have logits on a coarse grid, so that the last kept one has ties; some are -inf."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((64, 3000)) * rng.uniform(0.1, 6, (64, 1))).astype(np.float32)
    logits[::2] = np.round(logits[::2] * 4) / 4
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    settings = [
        Sampling(
            float(rng.choice([0.3, 1.0, 1.7])),
            float(rng.choice([1.0, 0.95, 0.5, 0.013])),
            int(rng.choice([0, 1, 20, 500, 2900, 3000])),
            float(rng.choice([0.0, 0.05])),
        )
        for _ in logits
    ]
    got = np.exp(DISTRIBUTION(jnp.asarray(logits), rows_of(settings), True))
    for row, sampling in enumerate(settings):
        wanted = expected(logits[row], sampling)
        np.testing.assert_array_equal(got[row] > 0, wanted > 1e-38, str(sampling))
        np.testing.assert_allclose(got[row], wanted, rtol=2e-5, atol=1e-30, err_msg=str(sampling))


def test_cuts_are_made_without_a_sort():
    rows, keys = rows_of([Sampling(0.6, 0.9, 20, 0.1)] * 2), np.zeros((2, 2), np.uint32)
    text = DRAW.lower(jnp.zeros((2, 100)), rows, keys, np.zeros(2, np.int32), "truncated").compile().as_text()
    assert " while(" in text  # the program that cuts
    assert " sort(" not in text


def test_a_row_that_cuts_nothing_is_the_same_beside_one_that_does():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5000)) * 8, jnp.float32)
    settings = rows_of([Sampling(), Sampling(top_p=0.5)])
    np.testing.assert_array_equal(DISTRIBUTION(logits, settings, True)[0], DISTRIBUTION(logits, settings, False)[0])


def test_drawn_tokens_follow_the_distribution():
    count = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (count, 6))
    keys = jnp.broadcast_to(sample_key(np.uint32(1), np.uint32(2), np.uint32(3)), (count, 2))
    sampling = Sampling(0.8, 0.95)
    token, log_prob, _ = DRAW(logits, rows_of([sampling] * count), keys, jnp.arange(count, dtype=jnp.int32), "truncated")
    wanted = expected(LOGITS, sampling)
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
    rows = rows_of([Sampling()] * 2)
    same, _, _ = DRAW(flat, rows, key, jnp.asarray([7, 7], jnp.int32), "sampled")
    other, _, _ = DRAW(flat, rows, key, jnp.asarray([7, 8], jnp.int32), "sampled")
    assert same[0] == same[1] == other[0]
    assert other[0] != other[1]


def test_a_request_is_known_by_its_token_ids():
    assert request_id(np.array([1, 2, 3])) == request_id(np.array([1, 2, 3], np.int64))
    assert request_id(np.array([1, 2, 3])) != request_id(np.array([1, 2, 4]))


def test_what_every_row_needs_may_be_said_to_be_less_without_changing_a_token():
    """Greedy rows draw alike in all three programs, sampled ones in both that have noise."""
    logits = jax.random.normal(jax.random.key(0), (4, 50))
    rows, key = rows_of([Sampling(t) for t in (0.0, 0.0, 1.0, 0.7)]), jnp.arange(8, dtype=jnp.uint32).reshape(4, 2)
    greedy, sampled, truncated = (DRAW(logits, rows, key, jnp.arange(4, dtype=jnp.int32), draws)[0] for draws in DRAWS)
    np.testing.assert_array_equal(sampled, truncated)
    np.testing.assert_array_equal(greedy[:2], sampled[:2])
    assert (greedy[2:] != sampled[2:]).any()
