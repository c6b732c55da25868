"""Sums of rows: the C++ kernel against NumPy in float64, its bits in any batch, and its derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.row_sum import native, reference


@pytest.fixture(autouse=True)
def has_library() -> None:
    if reason := native.why_no_library():
        pytest.skip(reason)


def rows_of(count: int, size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(size).normal(size=(count, size)), jnp.float32)


@pytest.mark.parametrize("of_squares", [False, True])
def test_a_sum_is_that_of_the_numbers_and_has_the_same_bits_in_any_batch(of_squares: bool) -> None:
    for size in (1, 7, 32, 45, 576, 9001):
        x = rows_of(40, size)  # the last size takes several threads
        found, wide = native.row_sum(x, of_squares), np.asarray(x, np.float64)
        wide = wide**2 if of_squares else wide
        np.testing.assert_array_less(
            np.abs(found - wide.sum(-1, keepdims=True)), 1e-6 * np.abs(wide).sum(-1, keepdims=True) + 1e-30
        )
        np.testing.assert_array_equal(found, jnp.concatenate([native.row_sum(row[None], of_squares) for row in x]))
        np.testing.assert_array_equal(found.reshape(4, 10, 1), native.row_sum(x.reshape(4, 10, size), of_squares))
        np.testing.assert_array_equal(found, jax.vmap(lambda row: native.row_sum(row, of_squares))(x))


@pytest.mark.parametrize("of_squares", [False, True])
def test_derivatives_are_those_of_plain_sums(of_squares: bool) -> None:
    x = rows_of(3, 37)
    own, plain = (
        jax.grad(lambda x, run=run: jnp.sum(jnp.sin(run(x, of_squares))))(x) for run in (native.row_sum, reference.row_sum)
    )
    np.testing.assert_allclose(own, plain, rtol=1e-4, atol=1e-5)


def test_numbers_that_are_not_finite_stay_in_their_own_row() -> None:
    x = rows_of(3, 40).at[1, 7].set(jnp.nan).at[2, 39].set(jnp.inf)
    assert np.isfinite(native.row_sum(x)[:, 0]).tolist() == [True, False, False]
    assert jnp.isposinf(native.row_sum(x)[2, 0])


def test_what_it_cannot_take_is_said_and_left_to_xla() -> None:
    for x, reason in ((jnp.zeros((2, 8), jnp.bfloat16), "float32; got bfloat16"), (jnp.zeros((2049, 2)), "at most 2048 rows")):
        with pytest.raises(ValueError, match=reason):
            pallas_kernels.row_sum(x, implementation="native")
        assert jax.eval_shape(functools.partial(pallas_kernels.row_sum), x).shape == (len(x), 1)
