"""Sealed pages: the rule written again in NumPy, what records weigh, and attention over them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import pallas_kernels as kernels
from pallas_kernels import sealed
from pallas_kernels.sealed import SEALED
from pallas_kernels.sealed_attention import gpu, native, reference

EACH_FORMAT = pytest.mark.parametrize("name", SEALED)
SIZES = pytest.mark.parametrize(("page", "size"), [(16, 32), (64, 64), (128, 128), (64, 128)])


def format_of(name, page):
    return dataclasses.replace(SEALED[name], page=page)


def pages_of_keys_and_values(page, size, count=6, seed=0):
    """Normal numbers; channels of unlike sizes, a slot and a channel that are large, and a mean."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 2, page, size)) * rng.lognormal(size=(count, 2, 1, size))
    x[:, :, page // 3] *= 30
    x[:, 0, :, size // 2] += 40
    return x.astype(np.float32)


def numpy_codes(tile, bits):
    """The numbers that a tile's codes stand for, and the codes: row by row, in float64, by the rule of the paper's code."""
    rows, columns = np.zeros(len(tile)), np.zeros(tile.shape[1])
    target = np.clip(min(tile.std(axis=1).min(), tile.std(axis=0).min()), 1e-3, 1e3) + 1e-6
    least, best = np.inf, (rows, columns)
    for _ in range(16):
        even = tile / np.exp(rows)[:, None] / np.exp(columns)
        of_rows, of_columns = even.std(axis=1), even.std(axis=0)
        ratio = max(of_rows.max(), of_columns.max()) / min(of_rows.min(), of_columns.min())
        if ratio > least * 1.0001:
            break
        least, best = ratio, (rows, columns)
        rows = np.clip(rows + np.log(np.clip(of_rows / target, 0.7, 2.0)), -0.3, 10)
        columns = np.clip(columns + np.log(np.clip(of_columns / target, 0.7, 2.0)), -0.3, 10)
    rows, columns = (np.exp(x) for x in best)
    numbers, codes = np.zeros(tile.shape), np.zeros(tile.shape, int)
    for i, row in enumerate(tile / rows[:, None] / columns):
        step = max((row.max() - row.min()) / (2**bits - 1), 1e-10)
        codes[i] = np.clip(np.rint((row - row.min()) / step), 0, 2**bits - 1)
        scale, zero = np.float16(step * rows[i]), np.float16(row.min() * rows[i])
        numbers[i] = (codes[i] * float(scale) + float(zero)) * np.float16(columns).astype(float)
    return numbers, codes


def codes_in(stored, bits, size):
    """The codes in bytes, one by one."""
    count = 8 // bits
    return np.stack([(stored[..., c % (size // count)] >> (bits * (c // (size // count)))) % 2**bits for c in range(size)], -1)


@EACH_FORMAT
@SIZES
def test_records_are_those_of_numpy(name, page, size):
    format, x = format_of(name, page), pages_of_keys_and_values(page, size)
    got = jax.jit(lambda x: sealed.seal(x, format))(x)
    numbers = [np.asarray(one) for one in sealed.unsealed(got)]
    matrix = scipy.linalg.hadamard(size) / size**0.5
    for i, (keys, values) in enumerate(x.astype(np.float64) @ matrix):
        of_keys, key_codes = numpy_codes(keys.T, format.key_bits)
        of_values, value_codes = numpy_codes(values, format.value_bits)
        for own, codes, stored, bits, wanted in (
            (numbers[0][i], key_codes.T, got.key[i], format.key_bits, of_keys.T @ matrix),
            (numbers[1][i], value_codes, got.value[i], format.value_bits, of_values @ matrix),
        ):
            assert (codes_in(np.asarray(stored).astype(int), bits, size) != codes).mean() < 2e-3  # at the border of two codes
            assert np.abs(own - wanted).mean() < 2e-3 * np.abs(wanted).mean()


@EACH_FORMAT
def test_pages_come_back_as_the_bits_say(name):
    """The error of a normal page: with 4 bits a tenth of the numbers, with 2 bits half of them."""
    x = np.random.default_rng(0).standard_normal((8, 2, 128, 128)).astype(np.float32)
    key, value = sealed.unsealed(sealed.seal(jnp.asarray(x), format_of(name, 128)))
    errors = [float(np.sqrt(((np.asarray(own) - x[:, i]) ** 2).mean())) for i, own in enumerate((key, value))]
    assert 0.05 < errors[0] < 0.15
    assert (0.05 < errors[1] < 0.15) if SEALED[name].value_bits == 4 else (0.3 < errors[1] < 0.6)


def test_rounding_does_not_choose_other_scales():
    """Numbers that differ by rounding have the same records but for single codes: else a replay could not repeat a pool."""
    x = pages_of_keys_and_values(64, 64, count=100)
    near = (x * (1 + 3e-7 * np.random.default_rng(1).standard_normal(x.shape))).astype(np.float32)
    one, other = (sealed.seal(jnp.asarray(numbers), format_of("kvarn-k4v4", 64)) for numbers in (x, near))
    for field in ("key", "value", "scales"):
        assert (np.asarray(getattr(one, field)) != np.asarray(getattr(other, field))).mean() < 1e-3, field


EVEN = {"zeros": np.zeros((1, 2, 16, 16)), "threes": np.full((1, 2, 16, 16), 3.0), "unit": np.tile(np.eye(16), (1, 2, 1, 1))}


@pytest.mark.parametrize("page", EVEN.values(), ids=EVEN)
def test_pages_without_a_deviation_are_finite(page):
    back = sealed.unsealed(sealed.seal(jnp.asarray(page, jnp.float32), format_of("kvarn-k4v4", 16)))
    np.testing.assert_allclose(np.stack(back, 1), page, atol=0.15)


def test_gradients_pass_through():
    x = jnp.asarray(pages_of_keys_and_values(16, 16, count=1))
    weight = jnp.asarray(np.random.default_rng(3).standard_normal(x.shape), jnp.float32)
    gradient = jax.grad(lambda x: (sealed.straight_through(x, format_of("kvarn", 16)) * weight).sum())(x)
    np.testing.assert_allclose(gradient, weight)


@EACH_FORMAT
@SIZES
def test_a_page_takes_the_bytes_that_are_counted(name, page, size):
    format = format_of(name, page)
    pool = sealed.zeros((7, 2, page, size), jnp.bfloat16, format)
    assert pool.shape == (7, 2, page, size)
    assert sum(x.nbytes for x in jax.tree.leaves(pool)) == 7 * sealed.page_bytes(size, jnp.bfloat16, format, page)


def test_pages_of_128_slots_hold_more_than_three_times_as_much_as_float16():
    floats, records = (sealed.page_bytes(128, jnp.float16, one, 128) for one in (None, SEALED["kvarn"]))
    assert floats / records > 4.7
    assert floats / sealed.page_bytes(128, jnp.float16, SEALED["kvarn-k4v4"], 128) > 3.6


@pytest.mark.parametrize("implementation", [None, "native", "cpu", "reference"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("page", "rows"), [(16, 3), (128, 19)])
def test_attention_reads_what_records_stand_for(implementation, dtype, page, rows):
    rng, format = np.random.default_rng(0), format_of("kvarn", page)
    numbers = rng.standard_normal((30, 2, page, 64)) * rng.lognormal(sigma=0.5, size=(30, 2, 1, 64)) + 0.5
    records, query = (
        sealed.seal(jnp.asarray(numbers, jnp.float32), format, dtype),
        jnp.asarray(rng.standard_normal((rows, 3, 64)), dtype),
    )
    table, count = rng.integers(1, 20, (rows, 11)).astype(np.int32), rng.integers(0, 12, rows).astype(np.int32)
    count[:2] = 0, 11
    table[np.arange(11) >= count[:, None]] = rng.integers(20, 30)
    if implementation == "native" and (reason := native.why_not(query, records, table, count)):
        pytest.skip(reason)
    key, value = (np.asarray(x, np.float64) for x in sealed.unsealed(records, jnp.float32))
    records = sealed.poisoned(records, jnp.asarray([0, *range(20, 30)]))  # none of which a row reads
    out, log_total = kernels.sealed_attention(
        query, records, jnp.asarray(table), jnp.asarray(count), implementation=implementation
    )
    assert (np.asarray(out[0]) == 0).all()
    assert (np.asarray(log_total[0]) == -np.inf).all()
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == jnp.float32 else {"rtol": 0.02, "atol": 0.06}
    for row in range(1, rows):
        if count[row] == 0:
            continue
        keys, values = (x[table[row, : count[row]]].reshape(-1, 64) for x in (key, value))
        logits = np.asarray(query[row], np.float64) @ keys.T / 8
        weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
        np.testing.assert_allclose(out[row].astype(jnp.float32), weight @ values / weight.sum(-1, keepdims=True), **near)
        np.testing.assert_allclose(log_total[row], np.log(weight.sum(-1)) + logits.max(-1), **near)


@pytest.mark.parametrize("size", [8, 48, 96])
def test_heads_that_cannot_be_rotated_are_refused(size):
    with pytest.raises(
        ValueError, match=f'kv_dtype="kvarn" rotates heads of a power of two .*; got {size}. Use kv_dtype="int8"'
    ):
        sealed.zeros((2, 2, 128, size), jnp.float32, SEALED["kvarn"])


@pytest.mark.parametrize(
    ("name", "page", "size", "dtype"),
    [
        ("kvarn", 16, 64, jnp.float32),
        pytest.param("kvarn-k4v4", 128, 128, jnp.float32, marks=pytest.mark.slow),
        pytest.param("kvarn", 128, 128, jnp.float16, marks=pytest.mark.slow),
    ],
)
def test_a_gpu_s_kernel_adds_up_pieces_to_what_plain_xla_computes(name, page, size, dtype):
    """In Pallas's interpreter; rows of no page, of one piece, and of three, and pages with NaN that nobody reads."""
    rng, format = np.random.default_rng(0), format_of(name, page)
    pages = 2 * gpu.PIECE // page + 1
    records = sealed.seal(jnp.asarray(rng.standard_normal((20, 2, page, size)), jnp.float32), format, dtype)
    records = sealed.poisoned(records, jnp.asarray([0, 19]))
    table, count = rng.integers(1, 19, (4, pages)).astype(np.int32), np.asarray([0, 1, pages, gpu.PIECE // page], np.int32)
    table[np.arange(pages) >= count[:, None]] = 19
    args = jnp.asarray(rng.standard_normal((4, 3, size)), dtype), records, jnp.asarray(table), jnp.asarray(count)
    assert gpu.why_not(*args) is None
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for own, expected in zip(gpu.sealed_attention(*args, interpret=True), reference.sealed_attention(*args), strict=True):
        np.testing.assert_allclose(own.astype(jnp.float32), expected.astype(jnp.float32), **near)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"size": 32}, "must have 64 to 256 channels; got 32"),
        ({"group": 17}, "at most 16 query heads; got 17"),
        ({"bits": 8}, "at most 4 bits"),
        ({"dtype": jnp.bfloat16}, "queries and records must both be"),
    ],
)
def test_what_a_gpu_s_kernel_cannot_take_is_refused_by_name(change, why):
    size, group = change.get("size", 64), change.get("group", 2)
    format = dataclasses.replace(SEALED["kvarn"], page=16, key_bits=change.get("bits", 4))
    records = sealed.zeros((3, 2, 16, size), jnp.float32, format)
    query = jnp.zeros((1, group, size), change.get("dtype", jnp.float32))
    assert why in gpu.why_not(query, records, jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32))
