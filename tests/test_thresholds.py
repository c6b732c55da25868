"""Thresholds found bit by bit, against a sort: with one bit a pass as on a CPU, and with several as on accelerators."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.model.sampling import BITS_A_PASS, _find, last_below

MOST = 2**32 - 1


def by_sorting(bits, weight, limit):
    """The first value, in ascending order, with which the sum of weights reaches the limit."""
    order = np.argsort(bits, kind="stable")
    sums = np.cumsum(weight[order])
    reached = np.flatnonzero(sums >= limit)
    if limit <= 0:
        return 0
    return int(bits[order[reached[0]]]) if len(reached) else MOST


@pytest.mark.parametrize("width", [1, 2, BITS_A_PASS])
@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_it_is_the_value_that_reaches_the_limit(width, kind):
    rng = np.random.default_rng(width)
    bits = rng.integers(0, [[20], [2**20], [2**32]], (3, 200), dtype=np.int64).astype(np.uint32)
    weight = rng.integers(1, 5, bits.shape).astype(kind)  # whole numbers, so that float32 sums them exactly
    for limit in (-1, 0, 1, 7, 250, weight[0].sum(), 10_000):
        limits = np.full(3, limit, kind)
        found = _find(jnp.asarray(bits), jnp.asarray(weight), jnp.asarray(limits), width)
        assert found.tolist() == [by_sorting(*row, limit) for row in zip(bits, weight, strict=True)]


def test_a_platform_takes_its_own_number_of_bits():
    bits, weight = jnp.arange(10, dtype=jnp.uint32)[None], jnp.ones((1, 10), jnp.int32)
    assert last_below(bits, weight, jnp.full(1, 4, jnp.int32)).tolist() == [3]
