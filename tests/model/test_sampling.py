"""Sampling: the drawn token follows the stated distribution, and keys depend on the request alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.model.sampling import (
    DRAWS,
    Sampling,
    draw,
    is_kept,
    log_distribution,
    request_id,
    rows_of,
    sample_key,
    whole_masses,
)

DISTRIBUTION = jax.jit(log_distribution, static_argnums=2)  # as programs run them
DRAW = jax.jit(draw, static_argnums=4)
KEPT, MASSES = jax.jit(is_kept), jax.jit(whole_masses)
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


HARD = {  # rows of logits
    "normal": lambda rng, size: rng.standard_normal(size) * 4,
    "peaked": lambda rng, size: rng.standard_normal(size) * 30,
    "flat": lambda rng, size: rng.standard_normal(size) * 1e-4,
    "all equal": lambda rng, size: np.full(size, 7.0),
    "few values": lambda rng, size: np.round(rng.standard_normal(size)),
    "of bfloat16": lambda rng, size: np.asarray(jnp.asarray(rng.standard_normal(size) * 4, jnp.bfloat16), np.float32),
    "mostly out of reach": lambda rng, size: np.where((rng.random(size) < 0.95) & (np.arange(size) > 0), -np.inf, 1.0),
    "one within reach": lambda rng, size: np.where(np.arange(size) == size // 2, 0.0, -np.inf),
}
CUTS = [
    Sampling(top_k=1),
    Sampling(top_k=7),
    Sampling(top_k=10**6),
    Sampling(top_p=1e-45),
    Sampling(top_p=0.3),
    Sampling(top_p=0.95),
    Sampling(top_p=1 - 2**-24),
    Sampling(min_p=1.0),
    Sampling(min_p=0.02),
    Sampling(top_k=50, top_p=0.8),
    Sampling(top_k=300, top_p=0.999, min_p=0.01),
    Sampling(),
]


def kept_by_sorting(scaled, mass, sampling):
    """What stays of a row, given the masses of those that top-k leaves: with sorts and Python's whole numbers."""
    order = np.argsort(-scaled, kind="stable")
    ranked = scaled[order]
    floor = ranked[min(sampling.top_k or len(ranked), len(ranked)) - 1]
    if sampling.top_p < 1:
        total, so_far = sum(mass.tolist()), 0
        share = max(1, min(total, int(np.ceil(np.float32(sampling.top_p) * np.float32(total)))))
        for token in order:
            so_far += int(mass[token])
            if so_far >= share:
                floor = max(floor, scaled[token])
                break
    return (scaled >= floor) & (scaled >= np.log(np.float32(sampling.min_p)))


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("size", [1, 2, 3000])
def test_what_stays_is_exactly_what_sorting_and_adding_whole_numbers_keep(kind, size):
    rng = np.random.default_rng(size)
    logits = np.stack([HARD[kind](rng, size) for _ in CUTS]).astype(np.float32)
    scaled = logits - logits.max(axis=-1, keepdims=True)
    floors = [np.sort(row)[::-1][min(one.top_k or size, size) - 1] for row, one in zip(scaled, CUTS, strict=True)]
    mass = np.asarray(MASSES(jnp.where(scaled >= np.array(floors)[:, None], jnp.exp(scaled), 0)))
    got = np.asarray(KEPT(jnp.asarray(scaled), rows_of(CUTS)))
    for row, sampling in enumerate(CUTS):
        np.testing.assert_array_equal(got[row], kept_by_sorting(scaled[row], mass[row], sampling), str(sampling))
        assert got[row, scaled[row].argmax()]


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("size", [1, 2, 2**11, 128_256])
def test_whole_masses_are_the_probabilities_times_a_power_of_two(kind, size):
    logits = HARD[kind](np.random.default_rng(0), size).astype(np.float32)
    probability = np.asarray(jnp.exp(logits - logits.max()))
    mass = np.asarray(MASSES(jnp.asarray(probability)[None])[0]).astype(np.float64)
    scale = mass.max()  # of the most likely token, whose probability is 1
    assert np.log2(scale) == round(np.log2(scale))
    assert mass.sum() < 2**32
    np.testing.assert_allclose(mass / scale, probability, rtol=0, atol=0.5 / scale)
    exact = probability.astype(np.float64)
    np.testing.assert_allclose(mass.sum() / scale, exact.sum(), rtol=1e-4)


def test_what_stays_depends_neither_on_the_order_of_tokens_nor_on_the_batch():
    """The share of top-p is that of a token to a float32's rounding: a sum in another order would keep one more or less."""
    rng, size = np.random.default_rng(0), 5000
    logits = (rng.standard_normal((8, size)) * rng.uniform(0.1, 4, (8, 1))).astype(np.float32)
    ranked = -np.sort(-logits.astype(np.float64), axis=-1)
    shares = np.cumsum(np.exp(ranked), axis=-1) / np.exp(ranked).sum(axis=-1, keepdims=True)
    for rank in rng.integers(1, size - 1, 25):
        settings = [Sampling(top_p=float(np.float32(share))) for share in shares[:, rank]]
        scaled = jnp.asarray(logits - logits.max(axis=-1, keepdims=True))
        kept = np.asarray(KEPT(scaled, rows_of(settings)))
        order = rng.permutation(size)
        np.testing.assert_array_equal(KEPT(scaled[:, order], rows_of(settings)), kept[:, order])
        np.testing.assert_array_equal(KEPT(scaled[2:3], rows_of(settings[2:3])), kept[2:3])
        np.testing.assert_array_equal(KEPT(jnp.tile(scaled, (4, 1)), rows_of(settings * 4)), np.tile(kept, (4, 1)))


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
    keys = jnp.broadcast_to(sample_key(1, 2, 3), (count, 2))
    sampling = Sampling(0.8, 0.95)
    token, log_prob, _ = DRAW(logits, rows_of([sampling] * count), keys, jnp.arange(count, dtype=jnp.int32), "truncated")
    wanted = expected(LOGITS, sampling)
    frequency = np.bincount(np.asarray(token), minlength=6)
    assert frequency[wanted == 0].sum() == 0
    chi_square = ((frequency - count * wanted)[wanted > 0] ** 2 / (count * wanted[wanted > 0])).sum()
    assert chi_square < 20  # five cells: 99.9 % of draws lie below 18.5
    np.testing.assert_allclose(np.exp(log_prob), wanted[np.asarray(token)], rtol=1e-4)


def test_keys_of_the_host_are_those_of_jax():
    rng = np.random.default_rng(0)
    numbers = [*rng.integers(0, 2**32, (50, 3), np.uint32).tolist(), [0, 0, 0], [2**32 - 1] * 3]
    for seed, *folded in numbers:
        key = jax.random.key(np.uint32(seed), impl="threefry2x32")
        for number in folded:
            key = jax.random.fold_in(key, np.uint32(number))
        assert sample_key(seed, *folded).tolist() == jax.random.key_data(key).tolist()


def test_keys_differ_by_seed_request_sample_and_position_and_nothing_else():
    keys = {tuple(sample_key(*x).tolist()) for x in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
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
