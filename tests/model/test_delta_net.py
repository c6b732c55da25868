"""Gated DeltaNet against the recurrence of its paper, one token at a time in NumPy and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.model import delta_net
from jkv.model.delta_net import DeltaInputs, DeltaState
from tests.support.recurrent import SIZES

ROWS = 2
chunks, step = (jax.jit(f, static_argnums=0) for f in (delta_net.chunks, delta_net.step))


def random_inputs(length, seed=0, keys="drawn"):
    """Inputs whose memories last from one token to hundreds; keys may all be the same."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((ROWS, length, SIZES.num_channels))
    num_keys = SIZES.num_key_heads * SIZES.key_size
    if keys == "same":
        mixed[:, :, num_keys : 2 * num_keys] = mixed[:, :1, num_keys : 2 * num_keys]
    rate = 1 / (1 + np.exp(-rng.standard_normal((ROWS, length, SIZES.num_value_heads)) - 2 * (keys == "same")))
    log_decay = -np.exp(rng.uniform(-7, 0.5, rate.shape))
    taps = rng.standard_normal((SIZES.num_channels, SIZES.taps)) / 2
    return DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in (mixed, rate, log_decay, taps)))


def random_state(seed=1):
    rng = np.random.default_rng(seed)
    return DeltaState(
        *(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in delta_net.zero_state(SIZES, ROWS, jnp.float32))
    )


def by_hand(inputs, state):
    """The rule of the paper (arXiv 2412.06464, equation 10), and the convolution before it, written out."""
    mixed, rate, log_decay, taps = (np.asarray(x, np.float64) for x in inputs)
    memory, recent = (np.array(x, np.float64) for x in state)
    out = np.zeros((*rate.shape, SIZES.value_size))
    num_keys, group = SIZES.num_key_heads * SIZES.key_size, SIZES.num_value_heads // SIZES.num_key_heads
    for row in range(ROWS):
        for t in range(rate.shape[1]):
            window = np.concatenate([recent[row], mixed[row, t : t + 1]])
            summed = (window * taps.T).sum(axis=0)
            flat, recent[row] = summed / (1 + np.exp(-summed)), window[1:]
            query, key = flat[: 2 * num_keys].reshape(2, SIZES.num_key_heads, SIZES.key_size)
            value = flat[2 * num_keys :].reshape(SIZES.num_value_heads, SIZES.value_size)
            for head in range(SIZES.num_value_heads):
                q, k = (x[head // group] / np.sqrt((x[head // group] ** 2).sum() + 1e-6) for x in (query, key))
                decayed = np.exp(log_decay[row, t, head]) * memory[row, head]
                memory[row, head] = decayed + np.outer(k, rate[row, t, head] * (value[head] - decayed.T @ k))
                out[row, t, head] = memory[row, head].T @ q / np.sqrt(SIZES.key_size)
    return out, DeltaState(memory, recent)


def assert_close(got, expected, atol=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol), got, expected)


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize("keys", ["drawn", "same"])
def test_many_tokens_at_once_are_the_recurrence_of_the_paper(length, keys):
    inputs, state = random_inputs(length, keys=keys), random_state()
    assert_close(chunks(SIZES, inputs, state, jnp.full(ROWS, length)), by_hand(inputs, state))


def test_steps_are_the_recurrence_of_the_paper_and_rows_that_rest_keep_their_state():
    inputs, start = random_inputs(20), random_state()
    out, state = [], start
    for t in range(20):
        one = inputs._replace(**{name: getattr(inputs, name)[:, t : t + 1] for name in ("mixed", "rate", "log_decay")})
        now, state = step(SIZES, one, state, jnp.asarray([True, False]))
        out.append(now)
    expected, end = by_hand(inputs, start)
    np.testing.assert_allclose(jnp.concatenate(out, axis=1)[0], expected[0], atol=1e-5)
    assert_close([x[0] for x in state], [x[0] for x in end])
    jax.tree.map(np.testing.assert_array_equal, [x[1] for x in state], [x[1] for x in start])


@pytest.mark.parametrize("num_new", [(1, 2), (3, 64), (65, 128), (130, 100)])
def test_padding_does_not_touch_the_state(num_new):
    inputs, start = random_inputs(130), random_state()
    out, state = chunks(SIZES, inputs, start, jnp.asarray(num_new))
    for row, count in enumerate(num_new):
        only = jax.tree.map(lambda x, count=count: x[:, :count] if x.ndim == 3 else x, inputs)
        expected, end = by_hand(only, start)
        np.testing.assert_allclose(out[row, :count], expected[row], atol=1e-5)
        assert_close([x[row] for x in state], [x[row] for x in end])


def test_pieces_continue_where_the_last_one_ended():
    inputs, start = random_inputs(140), random_state()
    whole, end = chunks(SIZES, inputs, start, jnp.full(ROWS, 140))
    state, parts = start, []
    for begin, stop in ((0, 2), (2, 80), (80, 140)):
        piece = inputs._replace(**{name: getattr(inputs, name)[:, begin:stop] for name in ("mixed", "rate", "log_decay")})
        out, state = chunks(SIZES, piece, state, jnp.full(ROWS, stop - begin))
        parts.append(out)
    assert_close((jnp.concatenate(parts, axis=1), state), (whole, end))


def test_gradients_are_those_of_the_recurrence():
    inputs, start = random_inputs(70), random_state()
    weight = jnp.asarray(
        np.random.default_rng(2).standard_normal((ROWS, 70, SIZES.num_value_heads, SIZES.value_size)), jnp.float32
    )

    def at_once(inputs, state):
        return (weight * delta_net.chunks(SIZES, inputs, state, jnp.full(ROWS, 70))[0]).sum()

    def one_by_one(inputs, state):
        def next_token(state, token):
            out, state = delta_net.step(SIZES, DeltaInputs(*token, inputs.taps), state, jnp.ones(ROWS, bool))
            return state, out

        tokens = [jnp.moveaxis(x, 1, 0)[:, :, None] for x in inputs[:3]]
        return (weight * jnp.moveaxis(jax.lax.scan(next_token, state, tokens)[1][:, :, 0], 0, 1)).sum()

    found, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(inputs, start) for f in (at_once, one_by_one))
    assert_close(found, expected, atol=2e-4)
    assert all(float(jnp.abs(x).max()) > 1e-3 for x in jax.tree.leaves(found))
