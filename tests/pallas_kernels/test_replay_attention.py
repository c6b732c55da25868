"""`replay_attention` against plain loops in float64, and its gradients against those of a naive form."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels

replay_attention = jax.jit(functools.partial(kernels.replay_attention, implementation="reference"))
TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16"])
NEVER = 2**31 - 1  # the end of a column that is never dropped


def random_inputs(batch, num_tokens, num_keys, heads, group, head_size, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, num_tokens, heads * group, head_size))
    key, value = rng.standard_normal((2, batch, num_keys, heads, head_size))
    return [jnp.asarray(x, dtype) for x in (query, key, value)]


def causal_columns(batch, num_tokens, heads):
    """Positions, begins and ends under which column t is token t, seen from t on."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    begin = jnp.broadcast_to(token, (batch, heads, num_tokens))
    return jnp.broadcast_to(token, (batch, num_tokens)), begin, jnp.full(begin.shape, NEVER, jnp.int32)


def random_columns(batch, num_tokens, heads, num_columns, seed=1):
    """Columns in no order, each seen for a while; a fifth is never seen."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, num_tokens, (batch, heads, num_columns))
    begin = rng.integers(0, num_tokens, source.shape)
    end = begin + rng.integers(1, num_tokens // 2 + 2, source.shape)
    end[rng.random(source.shape) < 0.3] = NEVER
    is_unseen = rng.random(source.shape) < 0.2
    begin[is_unseen], end[is_unseen] = -1, -1
    position = np.stack([rng.permutation(num_tokens) for _ in range(batch)])
    return [jnp.asarray(x, jnp.int32) for x in (position, begin, end, source)]


def by_hand(query, key, value, position, begin, end, source=None):
    """One query and head at a time, over the columns that it may read."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    position, begin, end = (np.asarray(x) for x in (position, begin, end))
    source = np.broadcast_to(np.arange(begin.shape[2]), begin.shape) if source is None else np.asarray(source)
    group, out = query.shape[2] // key.shape[2], np.zeros(query.shape)
    for b, t, n in np.ndindex(query.shape[:3]):
        k = n // group
        is_visible = (begin[b, k] <= position[b, t]) & (position[b, t] < end[b, k])
        index = source[b, k, is_visible]
        if len(index):
            weight = np.exp(key[b, index, k] @ query[b, t, n] / math.sqrt(query.shape[-1]))
            out[b, t, n] = weight @ value[b, index, k] / weight.sum()
    return out


def naive(query, key, value, position, begin, end, source=None):
    """All at once, with a T x C mask; the keys that no query reads must be finite."""
    key, value = (jnp.moveaxis(x, 1, 2) for x in (key, value))
    if source is not None:
        key, value = (jnp.stack([x[b, k, source[b, k]] for b, k in np.ndindex(source.shape[:2])]) for x in (key, value))
        key, value = (x.reshape(*source.shape, -1) for x in (key, value))
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[1], axis=1) for x in (key, value))
    begin, end = (jnp.repeat(x, query.shape[2] // x.shape[1], axis=1) for x in (begin, end))
    when = position[:, None, :, None]
    is_visible = (begin[:, :, None] <= when) & (when < end[:, :, None])
    logits = jnp.einsum("btnh,bnch->bntc", query, key) / math.sqrt(query.shape[-1])
    weight = jnp.where(is_visible, jnp.exp(logits), 0.0)
    weight = weight / jnp.maximum(weight.sum(axis=-1, keepdims=True), 1e-30)
    return jnp.einsum("bntc,bnch->btnh", weight, value)


def assert_agrees(out, expected, dtype=jnp.float32):
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=TOLERANCE[dtype], rtol=0)


@DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "heads", "group"),
    [(1, 2, 2), (2, 1, 1), (7, 2, 3), (128, 1, 2), (129, 1, 1), (200, 2, 2)],
    ids=["T1", "T2_K1_G1", "T7_G3", "T128", "T129_G1", "T200"],
)
def test_causal_columns_give_causal_attention(num_tokens, heads, group, dtype):
    query, key, value = random_inputs(2, num_tokens, num_tokens, heads, group, 8, dtype)
    columns = causal_columns(2, num_tokens, heads)
    out = replay_attention(query, key, value, *columns)
    assert_agrees(out, by_hand(query, key, value, *columns), dtype)


@DTYPES
@pytest.mark.parametrize(("num_tokens", "num_columns"), [(9, 14), (200, 150)], ids=["T9_C14", "T200_C150"])
def test_a_query_reads_the_columns_whose_span_holds_its_position(num_tokens, num_columns, dtype):
    query, key, value = random_inputs(2, num_tokens, num_tokens, 2, 2, 8, dtype)
    position, begin, end, source = random_columns(2, num_tokens, 2, num_columns)
    out = replay_attention(query, key, value, position, begin, end, source)
    assert_agrees(out, by_hand(query, key, value, position, begin, end, source), dtype)


def test_a_column_is_read_from_begin_on_and_no_longer_at_end():
    query, key, value = random_inputs(1, 5, 1, 1, 1, 4)
    columns = jnp.arange(5, dtype=jnp.int32)[None], jnp.full((1, 1, 1), 1, jnp.int32), jnp.full((1, 1, 1), 3, jnp.int32)
    out = replay_attention(query, key, value, *columns)[0, :, 0]
    np.testing.assert_array_equal(out, jnp.where(jnp.asarray([0, 1, 1, 0, 0])[:, None] == 1, value[0, 0, 0], 0.0))


@pytest.mark.parametrize("num_tokens", [9, 200], ids=["T9", "T200"])
def test_keys_that_only_empty_spans_name_may_be_nan(num_tokens):
    query, key, value = random_inputs(2, num_tokens, num_tokens, 2, 2, 8)
    position, begin, end, source = random_columns(2, num_tokens, 2, num_tokens)
    for columns in [(position, begin, end), (position, begin, end, source)]:
        unread = np.ones(key.shape[:3], bool)
        for b, k, c in np.ndindex(begin.shape):
            if begin[b, k, c] < end[b, k, c]:
                unread[b, source[b, k, c] if len(columns) == 4 else c, k] = False
        assert unread.any()
        poisoned = [jnp.where(unread[..., None], jnp.nan, x) for x in (key, value)]
        assert_agrees(replay_attention(query, *poisoned, *columns), by_hand(query, key, value, *columns))
        weigh = jax.jit(jax.grad(lambda *x, columns=columns: jnp.sum(replay_attention(*x, *columns) ** 2), argnums=(0, 1, 2)))
        for x, y in zip(weigh(query, *poisoned), weigh(query, key, value), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("num_tokens", "num_columns"), [(9, 14), (200, 150)], ids=["T9_C14", "T200_C150"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "spans"])
def test_gradients_are_those_of_the_naive_form(num_tokens, num_columns, is_causal):
    inputs = random_inputs(2, num_tokens, num_tokens, 2, 2, 8)
    columns = causal_columns(2, num_tokens, 2) if is_causal else random_columns(2, num_tokens, 2, num_columns)
    if not is_causal:
        columns[1] = jnp.maximum(columns[1], jnp.where(columns[1] < 0, columns[1], 3))  # positions 0 to 2 read nothing
    weight = jnp.asarray(np.random.default_rng(2).standard_normal(inputs[0].shape), jnp.float32)
    grads = [
        jax.jit(jax.grad(lambda *x, attend=attend: jnp.sum(weight * attend(*x, *columns)), argnums=(0, 1, 2)))(*inputs)
        for attend in (replay_attention, naive)
    ]
    for x, y in zip(*grads, strict=True):
        assert np.abs(y).max() > 0.1
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


def test_a_query_that_reads_nothing_gives_zeros_and_finite_gradients():
    query, key, value = random_inputs(1, 4, 3, 1, 2, 8)
    position = jnp.asarray([[0, 1, 5, 9]], jnp.int32)
    begin, end = jnp.asarray([[[1, 1, -1]]], jnp.int32), jnp.asarray([[[6, 3, -1]]], jnp.int32)
    out, gradient = jax.value_and_grad(lambda x: jnp.sum(replay_attention(x, key, value, position, begin, end)))(query)
    assert np.isfinite(out)
    assert (replay_attention(query, key, value, position, begin, end)[0, jnp.asarray([0, 3])] == 0).all()
    assert np.isfinite(gradient).all()
    assert (gradient[0, jnp.asarray([0, 3])] == 0).all()


def test_a_chunk_of_a_prompt_reads_what_came_before_and_itself():
    query, key, value = random_inputs(2, 12, 12, 2, 2, 8)
    position, begin, end = causal_columns(2, 12, 2)
    whole = replay_attention(query, key, value, position, begin, end)
    chunk = replay_attention(query[:, 7:], key, value, position[:, 7:], begin, end)
    np.testing.assert_allclose(chunk, whole[:, 7:], atol=1e-6)


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_no_array_is_as_large_as_queries_times_columns(is_backward):
    size = 1024
    inputs, columns = random_inputs(1, size, size, 1, 1, 8), causal_columns(1, size, 1)
    source = columns[1]

    def total(*x):
        return jnp.sum(replay_attention(*x, *columns, source) ** 2)

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2)) if is_backward else total).trace(*inputs)
    for text in (str(traced.jaxpr), traced.lower().compile().as_text()):
        largest = max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b[fbsipu]\w+\[([\d,]+)\]", text))
        assert size * 8 <= largest <= size * size // 4
