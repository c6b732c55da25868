"""`take_slots` against plain loops: it moves bits, so everything is equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels

take_slots = jax.jit(functools.partial(kernels.take_slots, implementation="reference"))
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def random_pool(num_pages, page_size, head_size, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((num_pages, 2, page_size, head_size)), dtype)


def by_hand(kv, source, target):
    """One slot at a time, from a copy of the pool as it was."""
    old, new = np.asarray(kv, np.float64), np.array(kv, np.float64)
    page_size = old.shape[2]
    for begin, end in zip(np.ravel(source), np.ravel(target), strict=True):
        new[end // page_size, :, end % page_size] = old[begin // page_size, :, begin % page_size]
    return new


def assert_agrees(kv, source, target):
    source, target = jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32)
    out = take_slots(kv, source, target)
    assert out.dtype == kv.dtype
    np.testing.assert_array_equal(np.asarray(out, np.float64)[1:], by_hand(kv, source, target)[1:])  # but for the trash page


@DTYPES
@pytest.mark.parametrize("page_size", [1, 3, 4], ids=["pages_of_1", "pages_of_3", "pages_of_4"])
def test_moves_keys_and_values_and_leaves_every_other_slot_alone(page_size, dtype):
    rng = np.random.default_rng(page_size)
    kv = random_pool(12, page_size, 6, dtype)
    slots = rng.permutation(np.arange(page_size, 12 * page_size))
    source, target = slots[:6].reshape(2, 3), rng.permutation(slots)[:6].reshape(2, 3)
    assert_agrees(kv, source, target)


@DTYPES
def test_all_reads_happen_before_any_write(dtype):
    kv = random_pool(4, 4, 2, dtype)
    assert_agrees(kv, [[4, 5, 6, 7], [8, 9, 10, 11]], [[8, 9, 10, 11], [4, 6, 5, 7]])  # two rows swap their pages


def test_a_slot_may_be_taken_more_than_once():
    assert_agrees(random_pool(4, 4, 2, jnp.float32), [[5, 5], [5, 9]], [[6, 12], [9, 15]])


def test_the_trash_page_stands_for_nowhere_even_when_it_is_nan():
    kv = random_pool(4, 3, 2, jnp.float32).at[0].set(jnp.nan)
    assert_agrees(kv, [[0, 0, 7], [5, 1, 2]], [[0, 1, 3], [0, 2, 0]])


def test_a_single_row_of_a_single_slot_moves():
    assert_agrees(random_pool(3, 2, 4, jnp.float32), [[2]], [[5]])


def test_freed_pages_that_nothing_names_stay_nan():
    kv = random_pool(5, 2, 4, jnp.float32).at[3].set(jnp.nan)
    assert_agrees(kv, [[2, 3, 9]], [[4, 8, 5]])
