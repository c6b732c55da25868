"""Log-probabilities: the C++ kernel against NumPy in float64, its bits in any batch and program, and its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.log_softmax import native, reference


@pytest.fixture(autouse=True)
def has_library() -> None:
    if reason := native.why_no_library():
        pytest.skip(reason)


def below_of(count: int, size: int) -> jax.Array:
    logits = 5 * np.random.default_rng(size).normal(size=(count, size))
    return jnp.asarray(logits - logits.max(-1, keepdims=True), jnp.float32)


@pytest.mark.parametrize("size", [1, 7, 96, 4097])
def test_a_row_is_the_log_softmax_and_has_the_same_bits_in_any_batch(size: int) -> None:
    below = below_of(24, size)  # the largest takes several threads
    found, wide = native.log_softmax(below), np.asarray(below, np.float64)
    np.testing.assert_allclose(found, wide - np.log(np.exp(wide).sum(-1, keepdims=True)), rtol=3e-6, atol=3e-6)
    np.testing.assert_array_equal(found, jnp.concatenate([native.log_softmax(row[None]) for row in below]))
    np.testing.assert_array_equal(found.reshape(4, 6, size), native.log_softmax(below.reshape(4, 6, size)))
    np.testing.assert_array_equal(found, jax.vmap(native.log_softmax)(below))


def test_a_temperature_is_divided_by_alike_in_programs_of_every_size() -> None:
    """XLA fuses what it has itself: with its own logarithm, one row and seven differ here."""
    below = below_of(7, 512)
    draw = jax.jit(lambda below, temperature: pallas_kernels.log_softmax(below / temperature[:, None]))
    temperature = jnp.asarray([0.6, 0.7, 1.3, 0.9, 1.1, 0.3, 1.0], jnp.float32)
    alone = [draw(below[i : i + 1], temperature[i : i + 1]) for i in range(7)]
    np.testing.assert_array_equal(draw(below, temperature), jnp.concatenate(alone))


def test_cut_and_damaged_logits_are_those_of_the_reference() -> None:
    below = below_of(4, 40).at[0, 7].set(-jnp.inf).at[1].set(-jnp.inf).at[1, 3].set(0.0).at[2, 5].set(jnp.nan)
    found, expected = np.asarray(native.log_softmax(below)), np.asarray(reference.log_softmax(below))
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert found[1, 3] == 0


def test_derivatives_are_those_of_the_reference() -> None:
    below = below_of(3, 37)
    runs = native.log_softmax, reference.log_softmax
    own, plain = (jax.grad(lambda x, run=run: jnp.sum(jnp.sin(run(x))))(below) for run in runs)
    np.testing.assert_allclose(own, plain, rtol=1e-4, atol=1e-5)


def test_what_it_cannot_take_is_said_and_left_to_xla() -> None:
    for below, reason in (
        (jnp.zeros((2, 8), jnp.bfloat16), "float32; got bfloat16"),
        (jnp.zeros((33, 2)), "at most 32 rows"),
    ):
        with pytest.raises(ValueError, match=reason):
            pallas_kernels.log_softmax(below, implementation="native")
        assert jax.eval_shape(pallas_kernels.log_softmax, below).shape == below.shape
