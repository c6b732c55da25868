"""`key_redundancy` against plain loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels

KNOBS = ("threshold", "exempt", "exempt_first")


@pytest.fixture(params=["reference", "cpu"])
def key_redundancy(request):
    return jax.jit(functools.partial(kernels.key_redundancy, implementation=request.param), static_argnames=KNOBS)


DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
LENGTHS = {"ragged": [37, 20, 9], "empty_and_single_slot": [0, 1, 2], "longer_than_a_block": [131, 128, 1400]}


def random_case(lengths, dtype, num_slots=None, head_size=8, seed=0):
    """Keys with groups of look-alikes, NaN where a slot is empty, which some in between are."""
    rng = np.random.default_rng(seed)
    num_slots = num_slots or max(lengths) + 2
    key = rng.standard_normal((len(lengths), num_slots, head_size))
    key[:, 3::4] = key[:, :1] + 0.3 * key[:, 3::4]
    is_filled = np.arange(num_slots) < np.asarray(lengths)[:, None]
    for row in range(len(lengths)):  # empty slots in between as well
        is_filled[row] = rng.permutation(is_filled[row])
    return jnp.asarray(np.where(is_filled[..., None], key, np.nan), dtype), jnp.asarray(is_filled)


def by_hand(key, is_filled, threshold, exempt, exempt_first):
    """One row of the similarity matrix at a time, over the filled slots."""
    key = np.asarray(key, np.float64)
    mean = np.zeros(key.shape[:2])
    for row in range(key.shape[0]):
        filled = [int(s) for s in np.flatnonzero(is_filled[row])]
        unit = {s: key[row, s] / (np.linalg.norm(key[row, s]) + 1e-8) for s in filled}
        for i in filled:
            similarity = {j: 0.0 if i == j else float(unit[i] @ unit[j]) for j in filled}
            alike = sorted((j for j in filled if similarity[j] > threshold), reverse=True)
            for j in alike[:exempt] or ([0] if exempt_first else []):
                similarity[j] = 0.0
            for j in filled:
                mean[row, j] += similarity[j] / len(filled)
    return mean


@DTYPES
@pytest.mark.parametrize("exempt", [0, 1, 2], ids=["exempt0", "exempt1", "exempt2"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_is_the_mean_similarity_without_each_rows_most_recent_look_alikes(key_redundancy, lengths, exempt, dtype):
    args = random_case(lengths, dtype)
    result = key_redundancy(*args, exempt=exempt)
    assert result.dtype == jnp.float32
    # Whatever the keys' type, cosines are float32: the oracle on the rounded keys is met as closely.
    np.testing.assert_allclose(result, by_hand(*args, 0.5, exempt, False), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.95], ids=["threshold0", "threshold0.3", "threshold0.95"])
def test_only_entries_above_the_threshold_are_exempt(key_redundancy, threshold):
    args = random_case([30, 17], jnp.float32)
    np.testing.assert_allclose(
        key_redundancy(*args, threshold=threshold), by_hand(*args, threshold, 1, False), atol=2e-6, rtol=2e-5
    )


@pytest.mark.parametrize("exempt", [1, 2], ids=["exempt1", "exempt2"])
def test_exempt_first_spares_slot_0_in_rows_without_a_look_alike(key_redundancy, exempt):
    key, is_filled = random_case([30, 17, 12], jnp.float32)
    args = (jnp.nan_to_num(key, nan=1.0), is_filled.at[:, 0].set(True))
    knobs = (0.9, exempt, True)
    result = key_redundancy(*args, threshold=0.9, exempt=exempt, exempt_first=True)
    np.testing.assert_allclose(result, by_hand(*args, *knobs), atol=2e-6, rtol=2e-5)
    assert abs(result - key_redundancy(*args, threshold=0.9, exempt=exempt))[:, 0].min() > 1e-3


def test_the_newest_of_three_look_alikes_is_not_penalised_and_the_oldest_twice(key_redundancy):
    # Slots a, b, c of one group, and one slot of another kind. Of the two others that each sees, the newer is exempt: a
    # penalises b, b penalises a, c penalises a. Divided by the 4 filled slots; slot 4 is empty.
    key = jnp.asarray([[[2.0, 0.0], [1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [jnp.nan, jnp.nan]]])
    result = key_redundancy(key, jnp.asarray([[True] * 4 + [False]]))
    np.testing.assert_allclose(result, [[2 / 4, 1 / 4, 0, 0, 0]], atol=1e-6)


def test_keys_of_length_zero_are_similar_to_nothing(key_redundancy):
    key, is_filled = random_case([9, 9], jnp.float32)
    np.testing.assert_array_equal(key_redundancy(key.at[0].set(0.0), is_filled)[0], 0.0)


def test_memory_is_linear_in_slots(key_redundancy):
    """What the compiled program holds beside its arguments at most doubles with the slots."""

    def temporary_bytes(num_slots):
        traced = key_redundancy.trace(*random_case([1000] * 3, jnp.float32, num_slots=num_slots), exempt=2, exempt_first=True)
        return traced.lower().compile().memory_analysis().temp_size_in_bytes

    sizes = [temporary_bytes(num_slots) for num_slots in (2560, 5120, 10240)]
    assert 2560 * 4 < sizes[0] < sizes[1] <= 2 * sizes[0]
    assert sizes[2] <= 2 * sizes[1]
