"""`paged_attention` against plain loops in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels


@pytest.fixture(params=["reference", "cpu"])
def paged_attention(request):
    run = functools.partial(kernels.paged_attention, implementation=request.param)
    return jax.jit(run, static_argnames="with_logits")


TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16"])
#        rows' lengths      group, head size, page, pages of a row
CASES = {
    "ragged": ([7, 20, 13, 1, 0], 2, 8, 4, 5),
    "one_query_head_and_one_row": ([9], 1, 16, 4, 3),
    "odd_pages": ([1, 5, 12, 10], 3, 6, 3, 4),
    "nothing_filled": ([0, 0], 2, 4, 2, 2),
}


def random_case(lengths, group, head_size, page_size, max_pages, dtype, seed=0):
    """Pages in random order; NaN in every slot that no row fills, the trash page and the rest of the last pages included."""
    rng = np.random.default_rng(seed)
    rows, num_pages = len(lengths), len(lengths) * max_pages + 3
    kv = np.full((num_pages, 2, page_size, head_size), np.nan)
    free = list(rng.permutation(np.arange(1, num_pages)))
    page_table = np.zeros((rows, max_pages), np.int32)
    for row, length in enumerate(lengths):
        for slot in range(length):
            if slot % page_size == 0:
                page_table[row, slot // page_size] = free.pop()
            kv[page_table[row, slot // page_size], :, slot % page_size] = rng.standard_normal((2, head_size))
    query = rng.standard_normal((rows, group, head_size))
    return jnp.asarray(query, dtype), jnp.asarray(kv, dtype), jnp.asarray(page_table), jnp.asarray(lengths, jnp.int32)


def by_hand(query, kv, page_table, length, log_weight=None):
    """One row, query head and slot at a time."""
    query, kv = np.asarray(query, np.float64), np.asarray(kv, np.float64)
    rows, group, head_size = query.shape
    out, log_total = np.zeros(query.shape), np.full((rows, group), -np.inf)
    logits = np.full((rows, group, page_table.shape[1] * kv.shape[2]), -np.inf)
    for row, head in np.ndindex(rows, group):
        weight, total = np.zeros(head_size), 0.0
        for slot in range(length[row]):
            key, value = kv[page_table[row, slot // kv.shape[2]], :, slot % kv.shape[2]]
            logit = query[row, head] @ key / math.sqrt(head_size)
            logit += 0.0 if log_weight is None else float(log_weight[row, slot])
            logits[row, head, slot] = logit
            weight, total = weight + math.exp(logit) * value, total + math.exp(logit)
        if total > 0:
            out[row, head], log_total[row, head] = weight / total, math.log(total)
    return out, log_total, logits


def assert_agrees(paged_attention, args, log_weight, dtype):
    out, log_total, logits = paged_attention(*args, log_weight, with_logits=True)
    expected_out, expected_total, expected_logits = by_hand(*args, log_weight)
    for x, y in zip((out, log_total, None), paged_attention(*args, log_weight), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-5, rtol=0)
    assert (out.dtype, log_total.dtype) == (dtype, jnp.float32)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=TOLERANCE[dtype], rtol=0)
    np.testing.assert_allclose(log_total, expected_total, atol=2e-5, rtol=0)


@DTYPES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reads_the_filled_slots_of_permuted_pages_and_nothing_else(paged_attention, case, dtype):
    assert_agrees(paged_attention, random_case(*case, dtype), None, dtype)


@DTYPES
def test_pages_may_appear_in_several_tables_and_twice_in_one(paged_attention, dtype):
    query, kv, page_table, length = random_case([12, 12, 10], 2, 8, 4, 3, dtype)
    page_table = page_table.at[1, 0].set(page_table[0, 2]).at[1, 2].set(page_table[0, 0]).at[2, 1].set(page_table[2, 0])
    assert_agrees(paged_attention, (query, kv, page_table, length), None, dtype)


@DTYPES
def test_log_weights_are_added_to_the_logits_and_minus_infinity_is_a_hole(paged_attention, dtype):
    lengths = [7, 20, 13, 1, 0]
    args = random_case(lengths, 2, 8, 4, 5, dtype)
    log_weight = np.log(np.random.default_rng(1).integers(1, 6, size=(5, 20)))
    log_weight[:, ::3] = -np.inf
    log_weight[2, :12] = -np.inf  # all but the last slot
    log_weight[np.arange(20) >= np.asarray(lengths)[:, None]] = np.nan
    assert_agrees(paged_attention, args, jnp.asarray(log_weight, jnp.float32), dtype)


def test_a_slot_of_log_weight_ln_m_stands_for_m_equal_slots(paged_attention):
    query, kv, page_table, length = random_case([8], 2, 8, 4, 4, jnp.float32)
    repeated = jnp.concatenate([page_table[:, :2], page_table[:, :1], page_table[:, :1]], axis=1)
    log_weight = jnp.where(jnp.arange(16)[None] < 4, math.log(3), 0.0)
    weighted = paged_attention(query, kv, page_table, length, log_weight)[:2]
    for x, y in zip(weighted, paged_attention(query, kv, repeated, jnp.asarray([16], jnp.int32))[:2], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6, rtol=0)


def test_a_row_of_holes_gives_zeros_and_minus_infinity(paged_attention):
    args = random_case([6, 6], 2, 8, 4, 2, jnp.float32)
    log_weight = jnp.zeros((2, 8)).at[1].set(-jnp.inf)
    assert_agrees(paged_attention, args, log_weight, jnp.float32)
    out, log_total, _ = paged_attention(*args, log_weight)
    assert (out[1] == 0).all()
    assert (log_total[1] == -jnp.inf).all()


def test_large_logits_do_not_overflow(paged_attention):
    query, kv, page_table, length = random_case([7, 3], 2, 8, 4, 2, jnp.float32)
    out, log_total, _ = paged_attention(query * 120, kv, page_table, length)
    expected_out, expected_total, _ = by_hand(query * 120, kv, page_table, length)
    assert expected_total.max() > 100  # beyond exp in float32
    np.testing.assert_allclose(out, expected_out, atol=1e-4, rtol=0)  # 120 times the rounding of the logits
    np.testing.assert_allclose(log_total, expected_total, rtol=1e-6)


def test_on_a_cpu_a_row_s_bits_depend_on_nothing_but_the_row():
    """Neither on longer neighbours nor on the width of the table, both of which add blocks to the loop."""
    query, kv, page_table, length = random_case([150, 700, 130], 2, 8, 16, 48, jnp.float32)
    run = jax.jit(functools.partial(kernels.paged_attention, implementation="cpu", with_logits=True))
    together = run(query, kv, page_table, length)
    shorter = run(query, kv, page_table, jnp.asarray([150, 3, 130], jnp.int32))
    narrow = run(query, kv, page_table[:, :11], jnp.asarray([150, 3, 130], jnp.int32))
    for x, y, z in zip(together, shorter, narrow, strict=True):
        np.testing.assert_array_equal(x[0::2], y[0::2])
        np.testing.assert_array_equal(x[0::2, ..., : z.shape[-1]], z[0::2])
