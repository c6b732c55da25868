"""pass@k and its intervals, against counting and against another way to draw."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from jkv import statistics
from jkv.statistics import bootstrap, check_ks, half_width, paired_change, pass_at, pass_figures, wilson


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_a_right_one(n):
    right = np.array([[i < c for i in range(n)] for c in range(n + 1)])
    for k in range(1, n + 1):
        counted = [np.mean([any(chosen) for chosen in itertools.combinations(row, k)]) for row in right]
        assert pass_at(right, k) == pytest.approx(counted)
        assert pass_at(right, k) == pytest.approx([1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])


def test_pass_at_1_is_the_mean_and_pass_at_n_whether_any_is_right():
    right = np.random.default_rng(0).random((50, 8)) < 0.3
    assert pass_at(right, 1) == pytest.approx(right.mean(axis=1))
    assert pass_at(right, 8) == pytest.approx(right.any(axis=1).astype(float))


def test_the_interval_is_that_of_problems_drawn_anew():
    rng = np.random.default_rng(1)
    values = rng.random(40)
    low, high = bootstrap(values)
    means = rng.choice(values, (20_000, 40)).mean(axis=1)
    assert (low, high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.01)  # little skew, little bias
    assert bootstrap(values) == (low, high)  # no fresh randomness


def test_the_interval_of_skewed_values_is_shifted_towards_their_tail():
    values = np.random.default_rng(4).exponential(size=40)
    low, high = bootstrap(values)
    plain = np.percentile(np.random.default_rng(0).choice(values, (20_000, 40)).mean(axis=1), [2.5, 97.5])
    assert low > plain[0] + 0.01
    assert high > plain[1] + 0.02


def test_the_difference_of_two_groups_resamples_each_by_itself():
    rng = np.random.default_rng(5)
    one, other = rng.normal(7, 2, 100), rng.normal(5, 1, 400)
    low, high = bootstrap(one, other)
    error = np.hypot(one.std() / 10, other.std() / 20)
    assert (low + high) / 2 == pytest.approx(one.mean() - other.mean(), abs=0.2 * error)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    low, high = bootstrap(np.arange(10.0), np.arange(10.0))
    assert low < -1 < 1 < high  # no pairs


def test_values_without_spread_have_an_interval_of_no_width():
    assert bootstrap(np.full(5, 0.25)) == (0.25, 0.25)
    assert bootstrap(np.full(5, 0.25), np.full(3, 1.0)) == (-0.75, -0.75)
    assert np.ptp(np.full(9, 0.3) - np.arange(9) / 1e17) > 0
    assert bootstrap(np.full(9, 0.3) - np.arange(9) / 1e17) == pytest.approx((0.3, 0.3))  # rounding is no spread


def test_many_values_are_resampled_in_pieces_to_the_same_interval(monkeypatch):
    values, sizes = np.random.default_rng(6).random(50), []
    whole = bootstrap(values)
    monkeypatch.setattr(statistics, "MOST_DRAWN", 70 * 50)
    real = statistics.mean_of
    monkeypatch.setattr(
        statistics, "mean_of", lambda *groups, axis=-1: sizes.append(groups[0].size) or real(*groups, axis=axis)
    )
    assert bootstrap(values) == pytest.approx(whole, abs=0.01)
    assert max(sizes) <= 70 * 50
    assert len(sizes) > 100


@pytest.mark.parametrize(("right", "total"), [(0, 7), (95, 100), (7, 7)])
def test_wilsons_interval_holds_the_shares_whose_score_test_does_not_refuse(right, total):
    low, high = wilson(right, total)
    for end in (low, high):
        if 0 < end < 1:
            assert abs(right / total - end) / (end * (1 - end) / total) ** 0.5 == pytest.approx(stats.norm.ppf(0.975))
    assert wilson(right, total, level=0.99)[1] - wilson(right, total, level=0.99)[0] > high - low


def test_a_paired_change_of_single_samples_has_the_interval_of_its_pairs():
    this, base = np.array([[1, 0, 1, 1, 0, 1]], bool).T, np.array([[1, 1, 0, 1, 0, 1]], bool).T
    change, low, high = paired_change(this, base)
    assert change == 0
    assert (low, high) == pytest.approx((-1.96 * np.sqrt((2 / 6) / 6), 1.96 * np.sqrt((2 / 6) / 6)))


def test_a_paired_change_of_several_samples_is_bootstrapped_over_problems():
    rng = np.random.default_rng(7)
    this, base = (rng.random((40, 4)) < share for share in (0.7, 0.4))
    difference = this.mean(axis=1) - base.mean(axis=1)
    assert paired_change(this, base) == (difference.mean(), *bootstrap(difference))


def test_the_interval_of_a_few_runs_is_students():
    assert half_width([0.50, 0.51, 0.52, 0.53, 0.54]) == pytest.approx(2.7764 * 0.0158114 / 5**0.5, rel=1e-4)
    assert math.isnan(half_width([0.5]))


def test_more_samples_of_a_problem_do_not_count_as_more_problems():
    one = np.random.default_rng(2).random((30, 1)) < 0.5
    again = np.repeat(one, 16, axis=1)  # what a model that does not vary answers
    assert pass_figures(again, [1])["1"] == pytest.approx(pass_figures(one, [1])["1"])


def test_two_policies_are_compared_on_the_same_draws():
    rng = np.random.default_rng(3)
    hard = rng.random(60)
    policy, base = hard - 0.05, hard  # worse by the same on each problem, however hard
    assert bootstrap(policy - base) == pytest.approx((-0.05, -0.05))
    assert bootstrap(base)[1] - bootstrap(base)[0] > 0.1


def test_k_lies_within_the_samples():
    assert check_ks(None, 1) == [1]
    assert check_ks(None, 8) == [1, 8]
    assert check_ks([4, 2], 8) == [1, 2, 4]
    for k in (0, 9):
        with pytest.raises(ValueError, match=r"pass_at must lie in \[1, samples\], which is 8"):
            check_ks([k], 8)
