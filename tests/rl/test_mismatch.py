"""Mismatch: every figure against a loop over tokens, buckets by position, alarms that fire and those that do not."""

import dataclasses
import math
import warnings

import numpy as np
import pytest

import jkv
from jkv.rl import mismatch


def random_pair(rng, shape=(6, 50), scale=0.4):
    """Dense and sampled log-probabilities, and a mask of rows of different length; padding is NaN."""
    sampled = np.log(rng.uniform(0.05, 1.0, shape)).astype(np.float32)
    dense = np.minimum(sampled + scale * rng.standard_normal(shape), 0).astype(np.float32)
    mask = np.arange(shape[1]) < rng.integers(1, shape[1] + 1, shape[0])[:, None]
    return np.where(mask, dense, np.nan), np.where(mask, sampled, np.nan), mask


def figures_by_loops(dense, sampled, mask, keep=lambda t: True):
    """The definitions, a token at a time."""
    pairs = [
        (float(dense[i, t]), float(sampled[i, t])) for i, t in np.argwhere(mask) if keep(int(t))
    ]  # fmt: skip
    rho = [math.exp(max(-20.0, min(20.0, d - s))) for d, s in pairs]
    n, agreement = len(rho), [min(1.0, r) for r in rho]
    return {
        "tokens": n,
        "k1": sum(s - d for d, s in pairs) / n,
        "k3": sum(r - 1 - math.log(r) for r in rho) / n,
        "chi2": sum(r * r for r in rho) / n - 1,
        "ess": sum(rho) ** 2 / (n * sum(r * r for r in rho)),
        "overlap": sum(agreement) / n,
        "p05": float(np.percentile(agreement, 5)),
        "p01": float(np.percentile(agreement, 1)),
        "max_difference": max(abs(d - s) for d, s in pairs),
        "veto_rate": sum(d - s < math.log(1e-4) for d, s in pairs) / n,
    }


def test_every_figure_is_what_a_loop_over_tokens_gives():
    dense, sampled, mask = random_pair(np.random.default_rng(0))
    dense[1, 0] = sampled[1, 0] - 30  # beyond the cut, and vetoed
    found = mismatch(dense, sampled, mask, buckets=(0, 8, 32), least_overlap=0.0, least_ess=0.0)
    for name, value in figures_by_loops(dense, sampled, mask).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9), name
    assert list(found.buckets) == ["0-7", "8-31", "32-"]
    for bucket, (begin, end) in {"0-7": (0, 8), "8-31": (8, 32), "32-": (32, 99)}.items():
        expected = figures_by_loops(dense, sampled, mask, lambda t, begin=begin, end=end: begin <= t < end)
        assert dataclasses.asdict(found.buckets[bucket]) == pytest.approx(expected)
    rows = [np.exp(np.mean((dense - sampled)[i][mask[i]].astype(np.float64))) for i in range(len(mask))]
    np.testing.assert_allclose(found.geometric, rows, rtol=1e-5)
    assert found.as_dict()["8-31/overlap"] == found.buckets["8-31"].overlap
    assert {np.ndim(value) for value in found.as_dict().values()} == {0}


def test_equal_log_probabilities_are_no_mismatch_at_all():
    _, sampled, mask = random_pair(np.random.default_rng(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mismatch(sampled, sampled, mask)
    assert (found.k1, found.k3, found.chi2, found.max_difference, found.veto_rate) == (0, 0, 0, 0, 0)
    assert (found.ess, found.overlap, found.p05, found.p01) == (1, 1, 1, 1)


def test_buckets_go_by_the_position_given_and_else_by_each_completions_own_count():
    dense, sampled, _ = random_pair(np.random.default_rng(2), (2, 6))
    dense, sampled = np.full((2, 6), -1.0), np.full((2, 6), -1.0)
    mask = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], bool)  # one row begins late
    assert {name: f.tokens for name, f in mismatch(dense, sampled, mask, buckets=(0, 3)).buckets.items()} == {"0-2": 6, "3-": 1}
    column = np.broadcast_to(np.arange(6), (2, 6))
    by_column = mismatch(dense, sampled, mask, position=column, buckets=(0, 3)).buckets
    assert {name: f.tokens for name, f in by_column.items()} == {"0-2": 4, "3-": 3}


@pytest.mark.parametrize(
    ("corrupt", "figure"),
    [
        (lambda d, rng: d - 3, "overlap"),
        (lambda d, rng: d + 3, "effective sample size"),
        (lambda d, rng: rng.permuted(d), "effective sample size"),
    ],
    ids=["too small", "too large", "of other tokens"],
)
def test_corrupting_a_fifth_of_the_tokens_warns(corrupt, figure):
    rng = np.random.default_rng(3)
    sampled = np.log(rng.beta(0.5, 0.5, (8, 200)).clip(1e-4, 1))
    dense = np.minimum(sampled + 0.02 * rng.standard_normal(sampled.shape), 0)
    mask, is_hit = np.ones(sampled.shape, bool), rng.random(sampled.shape) < 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mismatch(dense, sampled, mask)
    with pytest.warns(UserWarning, match=f"the {figure} of sampled and dense.*Raise the policy's budget, correct"):
        mismatch(np.where(is_hit, np.minimum(corrupt(dense, rng), 0), dense), sampled, mask)


def test_a_tiny_budget_warns_and_a_full_cache_does_not(model):
    knobs = {"max_new_tokens": 48, "page_size": 4, "stop_ids": (), "progress": False, "sampling": jkv.Sampling(seed=3), "n": 4}
    for policy, warns in ((jkv.streaming_llm(budget=5, sinks=1, interval=1), True), (jkv.full(), False)):
        out = jkv.generate(model, [[5, 1, 9]], policy=policy, **knobs)
        dense, mask = np.asarray(jkv.score(model, out).logprobs), np.arange(48) < out.lengths[:, None]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = mismatch(dense, out.logprobs, mask)
        assert any("overlap" in str(one.message) for one in caught) == warns
        assert (found.overlap < 0.9) == warns


ONES = np.ones((2, 3), bool)


@pytest.mark.parametrize(
    ("dense", "sampled", "mask", "more", "words"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), ONES, {}, r"one shape \[N, T\].*got \(2, 3\), \(2, 4\)"),
        (np.zeros(3), np.zeros(3), ONES[0], {}, "a row for each completion"),
        (np.zeros((2, 3)), np.zeros((2, 3)), ONES.astype(int), {}, "array of booleans.*got int64"),
        (np.full((2, 3), np.nan), np.zeros((2, 3)), ONES, {}, r"dense must hold log-prob.*got nan at \[0, 0\]"),
        (np.zeros((2, 3)), np.full((2, 3), -np.inf), ONES, {}, "sampled must hold log-prob"),
        (np.full((2, 3), 0.5), np.zeros((2, 3)), ONES, {}, r"at most 0.*got 0.5.*take logarithms"),
        (np.zeros((2, 3)), np.zeros((2, 3)), ~ONES, {}, "at least one token"),
        (np.zeros((2, 3)), np.zeros((2, 3)), ONES, {"buckets": (5, 2)}, r"ascending; got \(5, 2\)"),
        (np.zeros((2, 3)), np.zeros((2, 3)), ONES, {"position": np.zeros((3, 2))}, r"the mask's shape, \(2, 3\)"),
    ],
)
def test_what_is_no_pair_of_log_probabilities_is_refused(dense, sampled, mask, more, words):
    with pytest.raises(ValueError, match=words):
        mismatch(dense, sampled, mask, **more)


def test_a_token_that_the_dense_policy_cuts_has_no_overlap():
    found = mismatch(
        np.array([[-np.inf, -1.0]]), np.array([[-1.0, -1.0]]), np.ones((1, 2), bool), least_overlap=0.0, least_ess=0.0
    )
    assert found.k1 == math.inf
    assert found.overlap == pytest.approx(0.5)
