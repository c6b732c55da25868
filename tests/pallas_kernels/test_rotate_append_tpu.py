"""`rotate_append` for TPU against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rotate_append import tpu
from tests.pallas_kernels import tpu_interpreter

#        rows, query heads, KV heads, head size, channels of a pair's half, page size
CASES = {
    "one_row": (1, 8, 1, 128, 64, 16),
    "a_fifth_is_rotated": (3, 4, 2, 128, 16, 32),
    "many_heads": (5, 16, 4, 128, 64, 128),
    "heads_of_256": (2, 6, 2, 256, 128, 16),
}
TOLERANCE = {"float32": 1e-6, "bfloat16": 2.0**-7}


def random_case(num_rows, num_queries, num_kv_heads, head_size, half, page_size, dtype, seed=0):
    """Every slot of the pool is filled. The last row's first head is not stored."""
    rng = np.random.default_rng(seed)
    projected = rng.standard_normal((num_rows, num_queries + 2 * num_kv_heads, head_size))
    angle = rng.uniform(0, 100, (num_rows, half))
    tokens = num_rows * num_kv_heads
    kv = rng.standard_normal((tokens + 3, 2, page_size, head_size))
    address = rng.permutation(np.arange(1, tokens + 3))[:tokens] * page_size + rng.integers(0, page_size, tokens)
    address[-num_kv_heads] = rng.integers(0, page_size)
    ring = rng.standard_normal((num_rows + 2, num_queries, head_size))
    ring_at = rng.permutation(num_rows + 2)[:num_rows]
    floats = [jnp.asarray(x, dtype) for x in (projected, kv, ring)]
    places = [jnp.asarray(x, jnp.int32) for x in (address.reshape(num_rows, num_kv_heads), ring_at)]
    cos, sin = (jnp.asarray(x, jnp.float32) for x in (np.cos(angle), np.sin(angle)))
    return floats[1], floats[0], cos, sin, places[0], floats[2], places[1]


def by_hand(kv, projected, cos, sin, address, ring, ring_at):
    """One token at a time; the null page keeps what it holds."""
    x, kv, ring = (np.asarray(x, np.float32).copy() for x in (projected, kv, ring))
    num_kv_heads, half = address.shape[1], cos.shape[1]
    num_rotated = x.shape[1] - num_kv_heads
    cos, sin = np.asarray(cos)[:, None], np.asarray(sin)[:, None]
    first, second = x[:, :num_rotated, :half].copy(), x[:, :num_rotated, half : 2 * half].copy()
    x[:, :num_rotated, :half] = first * cos - second * sin
    x[:, :num_rotated, half : 2 * half] = second * cos + first * sin
    query, key, value = np.split(x, [num_rotated - num_kv_heads, num_rotated], axis=1)
    for (row, head), slot in np.ndenumerate(np.asarray(address)):
        page, offset = divmod(slot, kv.shape[2])
        if page:
            kv[page, :, offset] = key[row, head], value[row, head]
    ring[np.asarray(ring_at)] = query
    return kv, query, ring


def assert_agrees(got, expected, dtype):
    """The null page may hold anything."""
    tolerance = TOLERANCE[dtype]
    got, expected = list(got), list(expected)
    got[0], expected[0] = got[0][1:], expected[0][1:]
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(np.asarray(x, np.float32), y, rtol=tolerance, atol=3 * tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_rotates_and_stores_each_token_in_its_slot(case, dtype):
    args = random_case(*CASES[case], dtype)
    assert_agrees(tpu.rotate_append(*args, interpret=True), by_hand(*args), dtype)


def test_every_other_slot_keeps_its_bits():
    """Those of the null page too."""
    args = random_case(3, 8, 2, 128, 64, 32, "bfloat16")
    kv, address = args[0], np.asarray(args[4]).ravel()
    got, _, got_ring = tpu.rotate_append(*args, interpret=True)
    others = np.setdiff1d(np.arange(kv.shape[0] * 32), address[address >= 32])
    for part in range(2):
        x, y = (np.asarray(pool).view(np.uint16)[:, part].reshape(-1, 128)[others] for pool in (got, kv))
        np.testing.assert_array_equal(x, y)
    rest = np.setdiff1d(np.arange(len(got_ring)), args[6])
    np.testing.assert_array_equal(got_ring[rest], args[5][rest])


def test_values_and_channels_beyond_the_pairs_keep_their_bits():
    args = random_case(2, 8, 2, 128, 32, 16, "bfloat16")
    projected, address = args[1], np.asarray(args[4])
    projected = projected.at[0, 0, 70].set(jnp.inf)
    kv, query, _ = tpu.rotate_append(args[0], projected, *args[2:], interpret=True)
    np.testing.assert_array_equal(query[..., 64:], projected[:, :8, 64:])
    for head, slot in enumerate(address[0]):
        np.testing.assert_array_equal(kv[slot // 16, 1, slot % 16], projected[0, 10 + head])
        np.testing.assert_array_equal(kv[slot // 16, 0, slot % 16, 64:], projected[0, 8 + head, 64:])


@pytest.mark.parametrize("dma", ["on_wait", "eager"])
def test_no_copy_races_with_another(monkeypatch, dma):
    """Three grid steps, the last one of which is not full; many tokens of the null page."""
    args = list(random_case(5, 8, 2, 128, 64, 16, "bfloat16"))
    args[4] = args[4].at[1:3].set(jnp.asarray([[3, 3], [3, 2]], jnp.int32))
    monkeypatch.setattr(tpu, "STEP_BYTES", 80_000)
    run = functools.partial(tpu.rotate_append.__wrapped__, *args, interpret=tpu_interpreter.strict(dma))
    got = jax.block_until_ready(run())
    assert not tpu_interpreter.has_race(lambda: got)
    assert_agrees(got, by_hand(*args), "bfloat16")


def test_a_planted_race_is_found(monkeypatch):
    monkeypatch.setattr(pltpu, "make_async_copy", tpu_interpreter.NeverWaits)
    args = random_case(2, 8, 2, 128, 64, 16, "bfloat16")
    run = functools.partial(tpu.rotate_append.__wrapped__, *args, interpret=tpu_interpreter.strict("eager"))
    assert tpu_interpreter.has_race(run)


def test_without_a_ring_there_is_none():
    args = random_case(2, 8, 2, 128, 64, 16, "float32")
    kv, query, ring = tpu.rotate_append(*args[:5], None, None, interpret=True)
    assert ring is None
    assert_agrees((kv, query), by_hand(*args)[:2], "float32")


def test_what_the_kernel_cannot_take_is_named():
    def reason(*sizes, dtype="bfloat16", **others):
        args = dict(
            zip(("kv", "projected", "cos", "sin", "address", "ring", "ring_at"), random_case(*sizes, dtype), strict=True)
        )
        return tpu.why_not(**(args | others))

    assert reason(2, 8, 2, 128, 64, 16) is None
    assert "multiple of 128; got 64" in reason(2, 8, 2, 64, 32, 16)
    assert "multiple of 16 slots; got 8" in reason(2, 8, 2, 128, 64, 8)
    assert "float32 or bfloat16; got float16 and float16" in reason(2, 8, 2, 128, 64, 16, dtype="float16")
    assert "same dtype; got float32" in reason(2, 8, 2, 128, 64, 16, ring=jnp.zeros((3, 8, 128), jnp.float32))
    assert "at most 1048576 bytes; got 1458176" in reason(1, 8, 128, 128, 64, 16)
    assert "at most 524288 bytes; got 65" in reason(2, 8, 2, 128, 64, 16, projected=jnp.zeros((54613, 12, 128), jnp.bfloat16))
