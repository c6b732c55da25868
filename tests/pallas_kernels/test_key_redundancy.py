"""`key_redundancy` against plain loops in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels.dispatch import best
from pallas_kernels.key_redundancy import IMPLEMENTATIONS, gpu, native, tpu
from tests.pallas_kernels import tpu_interpreter

KNOBS = ("threshold", "exempt", "exempt_first")
PLAIN = {
    name: jax.jit(functools.partial(kernels.key_redundancy, implementation=name), static_argnames=KNOBS)
    for name in ("reference", "cpu", "native")
}
PALLAS = {
    "tpu": functools.partial(tpu.key_redundancy, interpret=True),
    "gpu": functools.partial(gpu.key_redundancy, interpret=True),
}


needs_library = pytest.mark.skipif(native.why_no_library() is not None, reason="the library of C++ cannot be built")


def named(names):
    return [pytest.param(name, marks=[needs_library] * (name == "native")) for name in names]


@pytest.fixture(params=named(PLAIN))
def plain_redundancy(request):
    return PLAIN[request.param]


@pytest.fixture(params=named(PLAIN | PALLAS))
def key_redundancy(request):
    if request.param in PLAIN:
        return PLAIN[request.param]
    return lambda *args, threshold=0.5, exempt=1, exempt_first=False: PALLAS[request.param](
        *args, threshold=threshold, exempt=exempt, exempt_first=exempt_first
    )


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


def assert_no_cosine_is_near(threshold, key, is_filled):
    """The sums of different programs differ in the last bits: a cosine there may be above the threshold in one alone."""
    key = np.where(np.asarray(is_filled)[..., None], np.asarray(key, np.float64), 0.0)
    unit = key / np.maximum(np.linalg.norm(key, axis=-1, keepdims=True), 1e-30)
    assert abs(unit @ np.swapaxes(unit, 1, 2) - threshold).min() > 1e-6


def by_hand(key, is_filled, threshold, exempt, exempt_first):
    """One row of the similarity matrix at a time, over the filled slots."""
    key = np.asarray(key, np.float64)
    mean = np.zeros(key.shape[:2])
    for row in range(key.shape[0]):
        filled = np.flatnonzero(is_filled[row])
        unit = np.stack([key[row, s] / (np.linalg.norm(key[row, s]) + 1e-8) for s in filled] or [np.zeros(key.shape[2])])
        for i in range(len(filled)):
            similarity = unit @ unit[i]
            similarity[i] = 0.0
            alike = np.flatnonzero(similarity > threshold)[::-1]
            for j in alike[:exempt] if len(alike[:exempt]) else (np.flatnonzero(filled == 0) if exempt_first else []):
                similarity[j] = 0.0
            mean[row, filled] += similarity / len(filled)
    return mean


@pytest.mark.everyday(where=lambda exempt, dtype: (exempt == 1) == (dtype == jnp.bfloat16))
@pytest.mark.parametrize("exempt", [0, 1, 2], ids=["exempt0", "exempt1", "exempt2"])
@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [
        pytest.param(lengths, dtype, id=f"{name}-{dtype.__name__}", marks=[pytest.mark.slow] * is_slow)
        for name, lengths in LENGTHS.items()
        for dtype in (jnp.float32, jnp.bfloat16)
        for is_slow in [name == "longer_than_a_block" and dtype == jnp.bfloat16]  # keys become float32 before the blocks
    ],
)
def test_is_the_mean_similarity_without_each_rows_most_recent_look_alikes(plain_redundancy, lengths, exempt, dtype):
    args = random_case(lengths, dtype)
    result = plain_redundancy(*args, exempt=exempt)
    assert result.dtype == jnp.float32
    # Whatever the keys' type, cosines are float32: the oracle on the rounded keys is met as closely.
    np.testing.assert_allclose(result, by_hand(*args, 0.5, exempt, False), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(
    ("lengths", "exempt", "head_size", "dtype"),
    [
        pytest.param([37, 20, 9], 1, 64, jnp.float32, id="ragged"),
        pytest.param([37, 20, 9], 1, 128, jnp.bfloat16, id="ragged-bfloat16", marks=pytest.mark.slow),
        pytest.param([37, 20, 9], 2, 128, jnp.float32, id="exempt2"),
        pytest.param([0, 1, 2], 1, 64, jnp.bfloat16, id="empty_and_single_slot-bfloat16"),
        pytest.param([131, 20], 1, 256, jnp.bfloat16, id="heads_of_256-bfloat16"),
    ],
)
@pytest.mark.parametrize("name", PALLAS)
def test_kernels_meet_the_oracle_as_closely(name, lengths, exempt, head_size, dtype):
    args = random_case(lengths, dtype, head_size=head_size)
    assert_no_cosine_is_near(0.5, *args)
    result = PALLAS[name](*args, threshold=0.5, exempt=exempt, exempt_first=False)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, by_hand(*args, 0.5, exempt, False), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("exempt", "exempt_first"), [(1, False), (2, True)], ids=["one", "two_and_first"])
@pytest.mark.parametrize("name", PALLAS)
def test_kernels_walk_over_several_blocks(monkeypatch, name, exempt, exempt_first):
    """The last row ends in the first block, so that whole blocks are skipped."""
    module = {"tpu": tpu, "gpu": gpu}[name]
    if module is tpu:
        monkeypatch.setattr(tpu, "MOST_BLOCK", 256)
        monkeypatch.setattr(tpu, "MOST_CHUNK", 128)
    lengths = [500, 310, 40]
    key, _ = random_case([500] * 3, jnp.bfloat16, num_slots=502, head_size=64)
    is_filled = (jnp.arange(502) < jnp.asarray(lengths)[:, None]) & (jnp.arange(502) % 7 != 2)
    args = jnp.where(is_filled[..., None], jnp.nan_to_num(key, nan=1.0), jnp.nan).astype(key.dtype), is_filled
    assert_no_cosine_is_near(0.5, *args)
    run = jax.jit(functools.partial(module.key_redundancy.__wrapped__, interpret=True), static_argnames=KNOBS)
    result = run(*args, threshold=0.5, exempt=exempt, exempt_first=exempt_first)
    np.testing.assert_allclose(result, by_hand(*args, 0.5, exempt, exempt_first), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("name", named(PALLAS | PLAIN))
def test_the_first_slot_may_be_empty_when_it_would_be_exempt(name):
    """It holds NaN: a value that is taken from it, even times 0, would be in every total."""
    key, is_filled = random_case([30, 30], jnp.float32, head_size=64)
    is_filled = is_filled.at[0, 0].set(False).at[1, 0].set(True)
    key = jnp.where(is_filled[..., None], jnp.nan_to_num(key, nan=1.0), jnp.nan)
    result = (PALLAS | PLAIN)[name](key, is_filled, threshold=0.95, exempt=1, exempt_first=True)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result[1], by_hand(key[1:], is_filled[1:], 0.95, 1, True)[0], atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("threshold", [0.0, pytest.param(0.3, marks=pytest.mark.slow), 0.95])
def test_only_entries_above_the_threshold_are_exempt(key_redundancy, threshold):
    args = random_case([30, 17], jnp.float32)
    np.testing.assert_allclose(
        key_redundancy(*args, threshold=threshold), by_hand(*args, threshold, 1, False), atol=2e-6, rtol=2e-5
    )


@pytest.mark.parametrize("exempt", [pytest.param(1, marks=pytest.mark.slow), 2])
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


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_memory_is_linear_in_slots(name):
    """What the compiled program holds beside its arguments at most doubles with the slots."""

    def temporary_bytes(num_slots):
        traced = PLAIN[name].trace(*random_case([1000] * 3, jnp.float32, num_slots=num_slots), exempt=2, exempt_first=True)
        return traced.lower().compile().memory_analysis().temp_size_in_bytes

    sizes = [temporary_bytes(num_slots) for num_slots in (2560, 5120, 10240)]
    assert 2560 * 4 < sizes[0] < sizes[1] <= 2 * sizes[0]
    assert sizes[2] <= 2 * sizes[1]


@pytest.mark.parametrize("name", PALLAS)
def test_a_row_s_bits_depend_on_nothing_but_the_row(name):
    run = functools.partial(PALLAS[name], threshold=0.5, exempt=1, exempt_first=False)
    key, is_filled = random_case([37, 20, 9], jnp.bfloat16, head_size=64)
    together = run(key, is_filled)
    np.testing.assert_array_equal(together[0], run(key.at[1:].mul(-2), is_filled.at[1:, 9:].set(False))[0])


@needs_library
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_s_bits_of_c_plus_plus_are_those_of_its_filled_keys(dtype):
    """Alone, in a batch, under `vmap` and with more empty slots, which hold NaN or anything else."""
    run = functools.partial(native.key_redundancy, threshold=0.5, exempt=2, exempt_first=False)
    key, is_filled = random_case([37, 200, 9, 0], dtype, head_size=20)
    together = np.asarray(run(key, is_filled))
    np.testing.assert_array_equal(together, jnp.concatenate([run(key[i, None], is_filled[i, None]) for i in range(4)]))
    np.testing.assert_array_equal(together[:, None], jax.vmap(run)(key[:, None], is_filled[:, None]))
    np.testing.assert_array_equal(together, run(jnp.nan_to_num(key, nan=-7.0), is_filled))
    wider = jnp.pad(key, [(0, 0), (5, 40), (0, 0)], constant_values=jnp.inf), jnp.pad(is_filled, [(0, 0), (5, 40)])
    np.testing.assert_array_equal(together, run(*wider)[:, 5:-40])


@needs_library
def test_a_cpu_takes_c_plus_plus():
    key, is_filled = random_case([9], jnp.float32)
    assert best(IMPLEMENTATIONS, "cpu", key, is_filled, threshold=0.5, exempt=1, exempt_first=False) == "native"


def test_for_tpu_nothing_races_or_is_read_before_it_is_written(monkeypatch):
    monkeypatch.setattr(tpu, "MOST_BLOCK", 128)
    key, is_filled = random_case([200, 90], jnp.float32, num_slots=256, head_size=64)
    assert_no_cosine_is_near(0.5, key, is_filled)
    with tpu_interpreter.watched() as interpret:
        run = jax.jit(functools.partial(tpu.key_redundancy.__wrapped__, interpret=interpret), static_argnames=KNOBS)
        result = run(key, is_filled, threshold=0.5, exempt=2, exempt_first=True)
    np.testing.assert_allclose(result, by_hand(key, is_filled, 0.5, 2, True), atol=2e-6, rtol=2e-5)


def why_not(module, head_size=64, slots=32, dtype=jnp.float32, rows=2, **settings):
    key, is_filled = jax.ShapeDtypeStruct((rows, slots, head_size), dtype), jax.ShapeDtypeStruct((rows, slots), jnp.bool_)
    return module.why_not(key, is_filled, **settings)


@pytest.mark.parametrize(
    ("module", "changed", "reason"),
    [
        (tpu, {"dtype": jnp.float16}, "float32 or bfloat16; got float16"),
        (gpu, {"dtype": jnp.float16}, "float32 or bfloat16; got float16"),
        (tpu, {"exempt": 0}, "at least 1; got 0"),
        (gpu, {"exempt": 0}, "at least 1; got 0"),
        (tpu, {"threshold": -0.1}, "at least 0, .*got -0.1"),
        (tpu, {"head_size": 96}, "64, 128, 192 or 256; got 96"),
        (tpu, {"slots": 1 << 16}, "slots; got 65536"),
        (tpu, {"rows": 1 << 17}, "rows; got 131072"),
        (gpu, {"head_size": 96}, "a power of two from 16 to 256; got 96"),
        (gpu, {"head_size": 256}, "at most 128 in float32; got 256"),
        (gpu, {"slots": 1 << 24}, r"fewer than 2\*\*31 numbers; got 2147483648"),
    ],
)
def test_what_a_kernel_cannot_take_it_says(module, changed, reason):
    assert why_not(module) is None
    assert re.search(reason, why_not(module, **changed))
