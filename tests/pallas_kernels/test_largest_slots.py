"""`largest_slots` against NumPy's stable sort, with ties, zeros of both signs, infinities and NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import largest_slots as dispatched
from pallas_kernels.largest_slots import ROUNDING, gpu, reference

RUNS = {"reference": reference.largest_slots, "gpu": functools.partial(gpu.largest_slots, interpret=True), "call": dispatched}
SPECIAL = np.float32([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, -np.nan, 1e-37, -1e-37, 3e38, -3e38])
SORTS = {
    "all different": lambda rng, size: rng.standard_normal(size),
    "few values": lambda rng, size: rng.integers(-2, 3, size),
    "special values": lambda rng, size: rng.choice(SPECIAL, size),
    "all equal": lambda rng, size: np.full(size, -0.5),
}


@pytest.fixture(params=RUNS)
def largest_slots(request):
    return jax.jit(RUNS[request.param])


def by_sorting(score, count):
    """The slots that a row keeps."""
    candidates = np.flatnonzero(score > -np.inf)
    order = candidates[np.argsort(-score[candidates], kind="stable")]
    return np.sort(order[: max(0, count)])


@pytest.mark.parametrize("num_slots", [1, 7, 64, 1000])
@pytest.mark.parametrize("sort", SORTS)
def test_the_best_slots_in_ascending_order(largest_slots, num_slots, sort):
    rng = np.random.default_rng(num_slots)
    count = np.unique([-1, 0, 1, 2, num_slots // 3, num_slots // 2, num_slots - 1, num_slots, num_slots + 1]).astype(np.int32)
    score = SORTS[sort](rng, (len(count), num_slots)).astype(np.float32)
    is_largest, slots = largest_slots(jnp.asarray(score), jnp.asarray(count))
    assert (is_largest.dtype, slots.dtype) == (jnp.bool_, jnp.int32)
    for row, number in enumerate(count):
        kept = by_sorting(score[row], number)
        np.testing.assert_array_equal(np.flatnonzero(is_largest[row]), kept)
        np.testing.assert_array_equal(slots[row], np.pad(kept, (0, num_slots - len(kept)), constant_values=-1))


def test_scores_within_the_tolerance_of_the_lowest_kept_tie_with_it():
    """Errors of a tenth of the tolerance decide nothing; a slot that is above by more than the tolerance stays."""
    errors = 1 + ROUNDING * np.random.default_rng(0).uniform(-0.1, 0.1, (8, 6))
    score = jnp.asarray(np.float32([-3.0, -3.0, 5.0, -3.0, -2.999, -4.0]) * errors, jnp.float32)
    for count, kept in ((1, [2]), (2, [2, 4]), (3, [0, 2, 4]), (4, [0, 1, 2, 4]), (6, [0, 1, 2, 3, 4, 5])):
        is_largest, _ = dispatched(score, jnp.full(8, count, jnp.int32), tolerance=ROUNDING)
        np.testing.assert_array_equal(is_largest, np.isin(np.broadcast_to(np.arange(6), (8, 6)), kept))


def test_a_tolerance_leaves_infinite_scores_apart_from_finite_ones():
    score = jnp.asarray([[-np.inf, 1.0, np.inf, np.nan, np.inf, 2.0]], jnp.float32)
    for count, kept in ((0, []), (1, [2]), (3, [2, 4, 5]), (9, [1, 2, 4, 5])):
        is_largest, _ = dispatched(score, jnp.asarray([count], jnp.int32), tolerance=ROUNDING)
        assert np.flatnonzero(is_largest[0]).tolist() == kept


@pytest.mark.parametrize("width", [1, 2, reference.BITS_A_PASS])
def test_several_bits_a_pass_find_the_same_number(width):
    bits = np.random.default_rng(0).integers(0, [[20], [2**20], [2**32]], (3, 200), dtype=np.int64).astype(np.uint32)
    for count in (1, 7, 200):
        found = reference.lowest_kept(jnp.asarray(bits), jnp.full(3, count, jnp.int32), width)
        np.testing.assert_array_equal(found, np.sort(bits, axis=1)[:, -count])


def test_arguments_that_the_gpu_kernel_cannot_take_are_refused_with_the_reason():
    count = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert gpu.why_not(jax.ShapeDtypeStruct((2, 16_384), jnp.float32), count) is None
    assert "float32; got bfloat16" in gpu.why_not(jax.ShapeDtypeStruct((2, 8), jnp.bfloat16), count)
    assert "at most 16384 slots; got 16385" in gpu.why_not(jax.ShapeDtypeStruct((2, 16_385), jnp.float32), count)
