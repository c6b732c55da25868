"""pass@k and its intervals, against counting and against another way to draw."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from jkv import statistics
from jkv.statistics import (
    accuracy_figures,
    bootstrap,
    check_ks,
    half_width,
    holm,
    paired_change,
    paired_p,
    pass_at,
    pass_figures,
    tango,
    wilson,
)


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


@pytest.mark.parametrize("right", [0, 1])
def test_an_accuracy_without_spread_has_wilsons_interval(right):
    several, one = np.full((12, 3), bool(right)), np.full((12, 1), bool(right))
    assert (
        accuracy_figures(several)
        == accuracy_figures(one)
        == pass_figures(several, [1, 3])["3"]
        == [right, *wilson(12 * right, 12)]
    )


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


def likeliest_spread(better, worse, total, difference):
    """The variance of a paired difference, by searching the likeliest shares of pairs that differ: q worse, q + d better."""
    q = np.linspace(max(0.0, -difference), (1 - difference) / 2, 20_001)
    likelihood = np.zeros(len(q))
    for count, share in ((better, q + difference), (worse, q), (total - better - worse, 1 - 2 * q - difference)):
        if count:
            likelihood += np.where(share > 1e-15, count * np.log(np.maximum(share, 1e-15)), -np.inf)
    best = np.flatnonzero(likelihood == likelihood.max())[-1]
    return (2 * q[best] + difference - difference**2) / total


@pytest.mark.parametrize(("better", "worse", "total"), [(0, 0, 20), (3, 1, 12), (1, 9, 40), (12, 0, 12), (0, 5, 30)])
def test_tangos_interval_holds_the_differences_that_the_score_test_does_not_refuse(better, worse, total):
    low, high = tango(better, worse, total)
    observed = (better - worse) / total
    assert low < high
    for i in range(-99, 100):
        difference = i / 100
        if min(abs(difference - low), abs(difference - high)) > 2e-3:  # the reference is as fine as its search
            variance = likeliest_spread(better, worse, total, difference)
            assert (low < difference < high) == ((observed - difference) ** 2 <= 1.96**2 * variance), difference


def test_tangos_interval_mirrors_and_ends_at_one():
    assert tango(3, 8, 50) == pytest.approx([-end for end in tango(8, 3, 50)][::-1])
    assert tango(12, 0, 12)[1] == 1
    assert tango(0, 0, 5)[1] == pytest.approx(1.96**2 / (5 + 1.96**2))  # Wilson's of none of five


def test_a_paired_change_of_single_samples_has_the_score_interval_of_its_pairs():
    this, base = np.array([[1, 0, 1, 1, 0, 1]], bool).T, np.array([[1, 1, 0, 1, 0, 1]], bool).T
    assert paired_change(this, base) == (0, *tango(1, 1, 6))
    assert paired_change(this, this) == (0, *tango(0, 0, 6))


def test_no_paired_change_has_an_interval_of_zero_width():
    this = np.array([[1, 1], [1, 0], [0, 0]], bool)
    assert paired_change(this, this) == (0, *tango(0, 0, 3))
    assert paired_change(np.ones((3, 2), bool), np.tile([[True, False]], (3, 1))) == (0.5, *tango(1.5, 0, 3))


def by_all_signs(differences):
    """The share of all signs with which the sum is as large."""
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=len(differences))]
    return sum(one >= abs(sum(differences)) for one in sums) / len(sums)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 2), (5, 1), (3, 2)])
def test_the_p_of_a_paired_difference_counts_all_signs(n, m):
    rng = np.random.default_rng(n)
    for share in (0.2, 0.5, 0.9):
        this, base = rng.random((9, n)) < share, rng.random((9, m)) < 0.4
        whole = [m * int(a.sum()) - n * int(b.sum()) for a, b in zip(this, base, strict=True)]
        assert paired_p(this, base) == pytest.approx(by_all_signs(whole))


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (7, 2), (3, 3), (60, 31), (0, 40)])
def test_with_one_sample_a_problem_p_is_mcnemars(better, worse):
    this = np.array([[1]] * better + [[0]] * worse + [[1]] * 20, bool)
    base = np.array([[0]] * better + [[1]] * worse + [[1]] * 20, bool)
    expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1
    assert paired_p(this, base) == paired_p(base, this) == pytest.approx(expected)


def test_holms_correction_is_that_of_every_set_of_hypotheses():
    """A hypothesis falls when Bonferroni's test refuses every set of hypotheses that it belongs to."""
    rng = np.random.default_rng(8)
    for _ in range(20):
        ps = (rng.random(6) ** 3).round(2).tolist()
        sets = [chosen for size in range(1, 7) for chosen in itertools.combinations(range(6), size)]
        expected = [max(min(1, len(one) * min(ps[j] for j in one)) for one in sets if i in one) for i in range(6)]
        assert holm(ps) == pytest.approx(expected)
    assert holm([]) == []


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
