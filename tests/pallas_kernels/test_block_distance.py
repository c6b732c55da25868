"""`block_distance` against plain loops in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels as kernels
from pallas_kernels import hadamard
from pallas_kernels.block_distance import gpu, tpu
from pallas_kernels.block_distance.reference import turn, turn_of_rotated
from pallas_kernels.quantised import FORMATS, zeros
from tests.pallas_kernels import tpu_interpreter

RUNS = {
    "reference": jax.jit(functools.partial(kernels.block_distance, implementation="reference")),
    "tpu": functools.partial(tpu.block_distance, interpret=True),
    "gpu": functools.partial(gpu.block_distance, interpret=True),
}
#        pairs, layers, KV heads, page, head size
CASES = {
    "grouped": (5, 3, 2, 4, 8),
    "one_of_each": (1, 1, 1, 1, 4),
    "large_pages": (2, 2, 4, 16, 16),
    "odd_sizes": (3, 2, 3, 5, 6),
    "of_a_real_model": (17, 3, 2, 16, 128),
    "two_cores": (27, 1, 1, 16, 128),
    "pages_of_128": (2, 1, 5, 128, 128),
    "heads_of_64": (2, 1, 1, 64, 64),
    "heads_of_256": (1, 2, 1, 16, 256),
}
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(params=RUNS)
def block_distance(request):
    """The kernel as each implementation; a missing angle turns nothing."""
    return lambda kv, first, second, num_tokens, angle=None: RUNS[request.param](kv, first, second, num_tokens, angle)


def random_case(pairs, layers, heads, page, head_size, dtype, seed=0):
    """Pages in random order, some of them on both sides; NaN in the slots beyond each pair's tokens, and in the null page."""
    rng = np.random.default_rng(seed)
    total = 2 * pairs * layers * heads + 1
    kv = rng.standard_normal((total, 2, page, head_size))
    first, second = rng.permutation(np.arange(1, total)).reshape(2, pairs, layers, heads).astype(np.int32)
    second[0] = first[0]
    num_tokens = rng.integers(1, page + 1, pairs).astype(np.int32)
    kv[0] = np.nan
    for i in range(pairs):
        for where in (first[i].ravel(), second[i].ravel()):
            kv[where, :, num_tokens[i] :] = np.nan
    return jnp.asarray(kv, dtype), jnp.asarray(first), jnp.asarray(second), jnp.asarray(num_tokens)


def by_hand(kv, first, second, num_tokens, angle=None):
    """One page at a time, turned as complex numbers."""
    kv = np.asarray(kv, np.float64)
    out = np.zeros((*first.shape[:2], 2, 3))
    for i, layer, head in np.ndindex(first.shape):
        for part in range(2):
            a, b = (kv[pages[i, layer, head], part, : num_tokens[i]] for pages in (first, second))
            if angle is not None and part == 0:
                b, half = b.copy(), angle.shape[1]
                turned = (b[:, :half] + 1j * b[:, half : 2 * half]) * np.exp(1j * np.asarray(angle[i], np.float64))
                b[:, :half], b[:, half : 2 * half] = turned.real, turned.imag
            out[i, layer, part] += [(x**2).sum() for x in (a, b, a - b)]
    return out


@pytest.mark.parametrize("half", [16, 32, 64])
def test_turns_as_many_channels_as_there_are_angles(block_distance, half):
    args = random_case(2, 1, 2, 16, 128, jnp.float32)
    angle = np.random.default_rng(1).uniform(-9, 9, (2, half)).astype(np.float32)
    np.testing.assert_allclose(block_distance(*args, angle), by_hand(*args, angle), rtol=2e-5, atol=2e-5)


def test_pairs_of_no_tokens_are_not_read(block_distance):
    """Their pages may be anything, and so they fill up a fixed number of pairs."""
    kv, first, second, num_tokens = random_case(20, 2, 1, 16, 128, jnp.float32)
    none = np.arange(20) % 3 == 1
    num_tokens = jnp.where(none, 0, num_tokens)
    kv = kv.at[first[none]].set(jnp.nan)
    got = block_distance(kv, first, second, num_tokens)
    assert (got[none] == 0).all()
    np.testing.assert_allclose(got, by_hand(kv, first, second, num_tokens), rtol=2e-5, atol=2e-5)


def test_a_pair_s_bits_depend_on_nothing_but_the_pair(block_distance):
    kv, first, second, num_tokens = random_case(12, 2, 2, 16, 128, jnp.bfloat16)
    together = block_distance(kv, first, second, num_tokens)
    for i in (0, 7, 11):
        alone = block_distance(kv, first[i:][:1], second[i:][:1], num_tokens[i:][:1])
        np.testing.assert_array_equal(alone[0], together[i])


def is_taken(run, pairs, layers, heads, page, head_size, dtype):
    """Whether an implementation takes the arguments of a case; a TPU's kernel refuses some."""
    kv, pages = jax.ShapeDtypeStruct((2, 2, page, head_size), dtype), jax.ShapeDtypeStruct((pairs, layers, heads), jnp.int32)
    return run != "tpu" or tpu.why_not(kv, pages, pages, None, None) is None


LIKE_OTHERS = ("grouped", "large_pages", "heads_of_64")
# Every other case turned in bfloat16, and one in all ways; the rest takes the same code path and is slow.
SUMS = [
    pytest.param(run, case, turns, dtype, id=f"{run}-{name}-{'turned' if turns else 'as_cached'}-{dtype.__name__}", marks=marks)
    for run in RUNS
    for name, case in CASES.items()
    for turns in (False, True)
    for dtype in (jnp.float32, jnp.bfloat16)
    if is_taken(run, *case, dtype)
    for is_main in [name == "of_a_real_model" or (turns and dtype == jnp.bfloat16 and name not in LIKE_OTHERS)]
    for marks in [[] if is_main else [pytest.mark.slow]]
]


@pytest.mark.parametrize(("block_distance", "case", "turns", "dtype"), SUMS, indirect=["block_distance"])
def test_sums_squares_over_tokens_and_heads(block_distance, case, turns, dtype):
    args = random_case(*case, dtype)
    angle = np.random.default_rng(1).uniform(-9, 9, (case[0], case[4] // 4)).astype(np.float32) if turns else None
    got = block_distance(*args, angle)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, by_hand(*args, angle), rtol=2e-5, atol=2e-5)


def test_equal_pages_are_exactly_no_distance_apart_and_near_ones_keep_their_digits(block_distance):
    kv, first, second, num_tokens = random_case(2, 2, 2, 16, 128, jnp.float32)
    assert (block_distance(kv, first, second, num_tokens)[0, ..., 2] == 0).all()
    near = kv.at[second[1]].set(kv[first[1]] + 1e-4)
    expected = by_hand(near, first, second, num_tokens)[1, ..., 2]
    np.testing.assert_allclose(block_distance(near, first, second, num_tokens)[1, ..., 2], expected, rtol=1e-2)


def test_turning_undoes_the_rotation_of_a_key_elsewhere(block_distance):
    """A key at positions 3 and 40 is the same key, once one is turned by the difference."""
    from jkv.model.decoder import rotate
    from jkv.model.rotary import rotary_frequency
    from jkv.testing import TINY

    config = dataclasses.replace(TINY, head_size=128)
    raw = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 1, 128)), jnp.float32)
    frequency = rotary_frequency(config)
    keys = [rotate(raw, jnp.cos(p * frequency)[None, None], jnp.sin(p * frequency)[None, None])[0, 0, 0] for p in (3, 40)]
    kv = jnp.zeros((3, 2, 8, 128)).at[1, 0, 0].set(keys[0]).at[2, 0, 0].set(keys[1])
    one, other = jnp.full((1, 1, 1), 1, jnp.int32), jnp.full((1, 1, 1), 2, jnp.int32)
    args = kv, one, other, jnp.ones(1, jnp.int32)
    assert block_distance(*args)[0, 0, 0, 2] > 0.1
    assert block_distance(*args, (3 - 40) * frequency[None])[0, 0, 0, 2] < 1e-9


@pytest.mark.parametrize(
    "case",
    [
        pytest.param((12, 2, 1, 16, 128), id="two_cores_of_pairs"),
        pytest.param((3, 3, 2, 16, 128), id="one_core", marks=pytest.mark.slow),
    ],
)
def test_on_a_tpu_no_copy_races_with_another(case):
    args = random_case(*case, jnp.bfloat16)
    angle = jnp.ones((case[0], 64))
    got = tpu.block_distance(*args, angle, interpret=tpu_interpreter.strict())
    assert not tpu_interpreter.has_race(lambda: got)
    np.testing.assert_allclose(got, by_hand(*args, angle), rtol=2e-5, atol=2e-5)


def test_a_planted_race_is_found(monkeypatch):
    monkeypatch.setattr(pltpu, "make_async_copy", tpu_interpreter.NeverWaits)
    args = random_case(2, 2, 1, 16, 128, jnp.bfloat16)
    run = functools.partial(tpu.block_distance.__wrapped__, interpret=tpu_interpreter.strict("eager"))
    assert tpu_interpreter.has_race(lambda: run(*args, None))


@pytest.mark.parametrize(
    ("pool", "pages", "reason"),
    [
        ((9, 2, 16, 128, jnp.float16), (4, 2, 2), "must be float32 or bfloat16; got float16"),
        ((9, 2, 16, 64, jnp.bfloat16), (4, 2, 2), "multiple of 128; got 64"),
        ((9, 2, 8, 128, jnp.bfloat16), (4, 2, 2), "multiple of 16 slots; got 8"),
        ((9, 2, 4, 128, jnp.float32), (4, 2, 2), "multiple of 8 slots; got 4"),
        ((9, 2, 1024, 128, jnp.bfloat16), (4, 2, 8), "at most 12582912 bytes; got 16777216"),
        ((9, 2, 16, 128, jnp.bfloat16), (4, 256, 8), "at most 32768; got 35360"),
    ],
    ids=["dtype", "head_size", "page", "float32_page", "large_pages", "many_pages"],
)
def test_a_tpu_refuses_what_it_cannot_take_and_says_why(pool, pages, reason):
    pages = jax.ShapeDtypeStruct(pages, jnp.int32)
    assert reason in tpu.why_not(jax.ShapeDtypeStruct(pool[:4], pool[4]), pages, pages, None, None)


def test_a_gpu_refuses_other_dtypes_and_says_why():
    assert "float16" in gpu.why_not(jax.ShapeDtypeStruct((9, 2, 16, 64), jnp.float16), None, None, None, None)


def test_a_gpu_turns_no_wide_heads_of_int4_and_says_why():
    pages, angle = jax.ShapeDtypeStruct((4, 2, 2), jnp.int32), jax.ShapeDtypeStruct((4, 128), jnp.float32)
    pool = jax.eval_shape(lambda: zeros((9, 2, 16, 256), jnp.bfloat16, FORMATS["int4"]))
    assert gpu.why_not(pool, pages, pages, None, None) is None
    assert "int4 must have at most 128 channels for keys to turn; got 256" in gpu.why_not(pool, pages, pages, None, angle)


@pytest.mark.parametrize("half", [16, 32, 64])
def test_the_turn_of_rotated_vectors_is_that_of_the_vectors(half):
    x, angle = np.random.default_rng(0).standard_normal((3, 5, 128)), np.linspace(-9, 9, 3 * half).reshape(3, half)
    x, angle = jnp.asarray(x, jnp.float32), jnp.asarray(angle, jnp.float32)
    got = hadamard.rotate(x) @ turn_of_rotated(angle, 128)
    np.testing.assert_allclose(got, hadamard.rotate(turn(x, angle[:, None])), atol=1e-5)
