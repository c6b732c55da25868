"""pass@k and its intervals, against counting and against another way to draw."""

import itertools
import math

import numpy as np
import pytest

from jkv.statistics import bootstrap, check_ks, draws, figures, pass_at


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
    means = [rng.choice(values, 40).mean() for _ in range(20_000)]
    assert (low, high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.005)
    draws.cache_clear()
    assert bootstrap(values) == (low, high)  # no fresh randomness


def test_more_samples_of_a_problem_do_not_count_as_more_problems():
    one = np.random.default_rng(2).random((30, 1)) < 0.5
    again = np.repeat(one, 16, axis=1)  # what a model that does not vary answers
    assert figures(again, [1])["1"] == pytest.approx(figures(one, [1])["1"])


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
