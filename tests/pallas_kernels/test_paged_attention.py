"""`paged_attention` against plain loops in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels as kernels
from pallas_kernels import dispatch, native_target
from pallas_kernels.paged_attention import IMPLEMENTATIONS, cpu, cut, gpu, native, reference, tpu
from tests.pallas_kernels import tpu_interpreter

RUNS = {
    "reference": reference.paged_attention,
    "cpu": cpu.paged_attention,
    "native": native.paged_attention,
    "tpu": functools.partial(tpu.paged_attention, interpret=True),
    "gpu": functools.partial(gpu.paged_attention, interpret=True),
}


@pytest.fixture(params=RUNS)
def paged_attention(request):
    run = jax.jit(RUNS[request.param], static_argnames="with_logits")

    def attend(*args, with_logits=False):
        if request.param == "native" and (reason := native.why_not(*args)):
            pytest.skip(reason)
        return run(*args[:4], args[4] if len(args) > 4 else None, with_logits=with_logits)

    return attend


TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16"])
#        rows' lengths      group, head size, page, pages of a row
CASES = {
    "ragged": ([7, 20, 13, 1, 0], 2, 8, 4, 5),
    "one_query_head_and_one_row": ([9], 1, 16, 4, 3),
    "odd_pages": ([1, 5, 12, 10], 3, 6, 3, 4),
    "nothing_filled": ([0, 0], 2, 4, 2, 2),
}
RAGGED = [0, 1, 33, 0, 16, 100, 7, 128, 64, 65, 31, 2, 99, 0, 5, 127, 90]
WIDE = {  # of the kernels alone: rows of several grid steps, and several blocks of the larger pages
    "head_64_page_16": (RAGGED, 7, 64, 16, 8),
    "head_128_page_64": ([300, 0, 64, 383, 1, 256, 257, 13, 320], 5, 128, 64, 6),
    "head_128_page_128": ([130, 256, 1, 385], 8, 128, 128, 4),
    "head_64_page_128": ([130, 0, 1, 385], 4, 64, 128, 4),
    "head_64_page_4": ([5, 0, 300, 12], 6, 64, 4, 75),
    "one_query_head": ([270, 1], 1, 128, 16, 17),
    "four_query_heads": ([17, 40, 0], 4, 64, 16, 3),
}


def slow_but_for(everyday, cases, dtypes=("float32", "bfloat16")):
    """Every case in every dtype; what takes the code path of another one is slow."""
    return [
        pytest.param(cases[name], getattr(jnp, dtype), id=f"{name}-{dtype}", marks=[pytest.mark.slow] * is_slow)
        for name in cases
        for dtype in dtypes
        for is_slow in [(name, dtype) not in everyday]
    ]


def random_case(lengths, group, head_size, page_size, max_pages, dtype, seed=0):
    """Pages in random order; NaN in every slot that no row fills, the null page and the rest of the last pages included."""
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


@pytest.mark.parametrize(
    ("case", "dtype"),
    slow_but_for({("ragged", "float32"), ("ragged", "bfloat16"), ("odd_pages", "float32")}, CASES),
)
def test_reads_the_filled_slots_of_permuted_pages_and_nothing_else(paged_attention, case, dtype):
    assert_agrees(paged_attention, random_case(*case, dtype), None, dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    slow_but_for(
        {
            ("head_64_page_16", "float32"),
            ("head_128_page_64", "bfloat16"),
            ("head_64_page_4", "bfloat16"),
            ("head_64_page_128", "bfloat16"),
        },
        WIDE,
    ),
)
@pytest.mark.parametrize("name", ["native", "tpu", "gpu"])
def test_kernels_read_rows_of_many_blocks_and_weights(monkeypatch, name, case, dtype):
    monkeypatch.setattr(tpu, "BLOCK", 128)
    args = random_case(*case, dtype)
    if name == "native" and (reason := native.why_not(*args)):
        pytest.skip(reason)
    weight = np.log(np.random.default_rng(2).integers(1, 5, size=(len(case[0]), case[3] * case[4])))
    weight[:, 3::7] = -np.inf
    run = jax.jit(RUNS[name], static_argnames="with_logits")
    out, log_total, logits = run(*args, jnp.asarray(weight, jnp.float32), with_logits=True)
    expected_out, expected_total, expected_logits = by_hand(*args, weight)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-5, rtol=0)
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 0.0  # of the outcome itself
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, atol=TOLERANCE[dtype], rtol=rounding)
    np.testing.assert_allclose(log_total, expected_total, atol=2e-5, rtol=0)


@DTYPES
def test_pages_may_appear_in_several_tables_and_twice_in_one(paged_attention, dtype):
    query, kv, page_table, length = random_case([12, 12, 10, 0, 3], 2, 8, 4, 5, dtype)
    page_table = page_table.at[1, 0].set(page_table[0, 2]).at[1, 2].set(page_table[0, 0]).at[2, 1].set(page_table[2, 0])
    assert_agrees(paged_attention, (query, kv, page_table, length), None, dtype)


@DTYPES
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_queries_of_several_places_read_what_is_filled_at_their_place(paged_attention, dtype, weighted):
    lengths, num_slots = np.asarray([[5, 6, 7], [18, 19, 20], [13, 13, 13], [1, 2, 2], [0, 0, 0]], np.int32), 20
    query, kv, page_table, _ = random_case(lengths[:, -1], 6, 8, 4, 5, dtype)
    weight = None
    if weighted:
        weight = np.log(np.random.default_rng(1).integers(1, 6, size=(5, num_slots)))
        weight[:, ::3] = -np.inf
        weight[np.arange(num_slots) >= lengths[:, -1:]] = np.nan
        weight = jnp.asarray(weight, jnp.float32)
    out, log_total, logits = paged_attention(query, kv, page_table, jnp.asarray(lengths), weight, with_logits=True)
    for place in range(3):
        own = slice(2 * place, 2 * place + 2)
        expected = by_hand(query[:, own], kv, page_table, lengths[:, place], weight)
        atol = 2e-5 if dtype == jnp.float32 else 4e-2
        for got, wanted in zip((out, log_total, logits), expected, strict=True):
            np.testing.assert_allclose(np.asarray(got[:, own], np.float64), wanted, atol=atol, rtol=0)
    fewer = jnp.asarray(np.minimum(lengths, lengths[:, :1]))  # only the first place's token is new
    first = paged_attention(query, kv, page_table, fewer, weight, with_logits=True)
    for x, y in zip(first, (out, log_total, logits), strict=True):
        np.testing.assert_array_equal(x[:, :2], y[:, :2])


@pytest.mark.parametrize("implementation", ["gpu", "reference", "cpu", "native"])
def test_queries_by_place_are_those_by_row(implementation):
    """Two rows of two KV heads, with three places of two query heads each."""
    lengths = jnp.asarray([[5, 6, 7], [17, 18, 19], [1, 2, 2], [3, 3, 3]], jnp.int32)
    query, kv, page_table, _ = random_case(lengths[:, -1].tolist(), 6, 16, 4, 5, jnp.float32)
    by_place = jnp.swapaxes(query.reshape(2, 2, 3, 2 * 16), 1, 2).reshape(2, 3, 4, 16)
    one = IMPLEMENTATIONS[implementation]
    if reason := one.why_not(query, kv, page_table, lengths, None):
        pytest.skip(reason)
    run = RUNS["gpu"] if implementation == "gpu" else one.run
    expected, got = (run(x, kv, page_table, lengths, None) for x in (query, by_place))
    moved = jnp.swapaxes(expected[0].reshape(2, 2, 3, 2 * 16), 1, 2).reshape(2, 3, 4, 16)
    np.testing.assert_array_equal(got[0], moved)
    np.testing.assert_array_equal(got[1], expected[1])


@DTYPES
def test_log_weights_are_added_to_the_logits_and_minus_infinity_is_a_vacant_slot(paged_attention, dtype):
    lengths = [7, 20, 13, 1, 0]
    args = random_case(lengths, 2, 8, 4, 5, dtype)
    log_weight = np.log(np.random.default_rng(1).integers(1, 6, size=(5, 20)))
    log_weight[:, ::3] = -np.inf
    log_weight[2, :12] = -np.inf  # all but the last slot
    log_weight[np.arange(20) >= np.asarray(lengths)[:, None]] = np.nan
    assert_agrees(paged_attention, args, jnp.asarray(log_weight, jnp.float32), dtype)


@pytest.mark.parametrize("implementation", ["gpu", "reference", "cpu", "native", "tpu"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_the_tables_of_all_layers_are_read_at_the_layer(implementation, weighted):
    query, kv, page_table, length = random_case([130, 7, 300, 0], 4, 128, 64, 6, jnp.float32)
    weight = jnp.zeros((4, 384)).at[:, ::3].set(math.log(2)) if weighted else None
    args = page_table, length, weight
    others = jax.tree.map(lambda x: jnp.stack([jnp.full_like(x, 2), x, jnp.zeros_like(x)]), args)
    run = IMPLEMENTATIONS[implementation]
    if reason := run.why_not(query, kv, *others, jnp.int32(1)):
        pytest.skip(reason)
    expected = RUNS[implementation](query, kv, *args, with_logits=False)
    if implementation == "gpu":
        got = RUNS["gpu"](query, kv, *others, jnp.int32(1))
    elif implementation == "tpu":  # which XLA gives one layer's tables
        got = RUNS["tpu"](query, kv, *cut(*others, jnp.int32(1)), with_logits=False)
    else:
        got = run.run(query, kv, *others, jnp.int32(1))
    for x, y in zip(got[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_slot_of_log_weight_ln_m_has_multiplicity_m(paged_attention):
    query, kv, page_table, length = random_case([8] * 5, 2, 8, 4, 5, jnp.float32)
    repeated = page_table.at[:, 2:4].set(page_table[:, :1])
    log_weight = jnp.broadcast_to(jnp.where(jnp.arange(20) < 4, math.log(3), 0.0), (5, 20))
    weighted = paged_attention(query, kv, page_table, length, log_weight)[:2]
    for x, y in zip(weighted, paged_attention(query, kv, repeated, length + 8)[:2], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6, rtol=0)


def test_a_row_of_vacant_slots_gives_zeros_and_minus_infinity(paged_attention):
    args = random_case([6, 6, 1, 20, 0], 2, 8, 4, 5, jnp.float32)
    log_weight = jnp.zeros((5, 20)).at[1].set(-jnp.inf)
    assert_agrees(paged_attention, args, log_weight, jnp.float32)
    out, log_total, _ = paged_attention(*args, log_weight)
    assert (out[1] == 0).all()
    assert (log_total[1] == -jnp.inf).all()


def test_large_logits_do_not_overflow(paged_attention):
    query, kv, page_table, length = random_case([7, 3, 20, 1, 12], 2, 8, 4, 5, jnp.float32)
    out, log_total, _ = paged_attention(query * 120, kv, page_table, length)
    expected_out, expected_total, _ = by_hand(query * 120, kv, page_table, length)
    assert expected_total.max() > 100  # beyond exp in float32
    np.testing.assert_allclose(out, expected_out, atol=1e-4, rtol=0)  # 120 times the rounding of the logits
    np.testing.assert_allclose(log_total, expected_total, rtol=1e-6)


@pytest.mark.parametrize("name", ["cpu", "native"])
def test_on_a_cpu_a_row_s_bits_depend_on_nothing_but_the_row(name):
    """Neither on longer neighbours nor on the width of the table, both of which add blocks to the loop."""
    query, kv, page_table, length = random_case([150, 700, 130], 2, 8, 16, 48, jnp.float32)
    if name == "native" and (reason := native.why_no_library()):
        pytest.skip(reason)
    run = jax.jit(functools.partial(kernels.paged_attention, implementation=name, with_logits=True))
    together = run(query, kv, page_table, length)
    shorter = run(query, kv, page_table, jnp.asarray([150, 3, 130], jnp.int32))
    narrow = run(query, kv, page_table[:, :11], jnp.asarray([150, 3, 130], jnp.int32))
    for x, y, z in zip(together, shorter, narrow, strict=True):
        np.testing.assert_array_equal(x[0::2], y[0::2])
        np.testing.assert_array_equal(x[0::2, ..., : z.shape[-1]], z[0::2])


@pytest.mark.parametrize(("head_size", "narrow_pages"), [(8, 20), (128, 64)])
def test_on_a_tpu_a_row_s_bits_depend_on_nothing_but_the_row(head_size, narrow_pages):
    """The wide table has two blocks, and the narrow one has one that is shorter."""
    query, kv, page_table, length = random_case([300, 70, 301, 1300], 2, head_size, 16, 84, jnp.float32)
    run = jax.jit(functools.partial(RUNS["tpu"], log_weight=None, with_logits=True))
    together = run(query, kv, page_table, length)
    shorter = length.at[1].set(0).at[3].set(1)
    narrow = run(query, kv, page_table[:, :narrow_pages], shorter)
    for x, y, z in zip(together, run(query, kv, page_table, shorter), narrow, strict=True):
        np.testing.assert_array_equal(x[0:3:2], y[0:3:2])
        np.testing.assert_array_equal(x[0:3:2, ..., : z.shape[-1]], z[0:3:2])


@pytest.mark.parametrize("head_size", [8, 128])
def test_on_a_tpu_no_value_of_a_longer_neighbour_stays_in_a_buffer(head_size):
    """Infinite values of one row are in the pages of a buffer that the next rows do not fill."""
    lengths = [60, 60, 60, 0, 7, 33]
    query, kv, page_table, length = random_case(lengths, 2, head_size, 16, 4, jnp.float32)
    kv = kv.at[page_table[:3].ravel(), 1].set(jnp.inf)
    out, log_total, _ = RUNS["tpu"](query, kv, page_table, length, None, with_logits=False)
    expected_out, expected_total, _ = by_hand(query[3:], kv, page_table[3:], length[3:])
    np.testing.assert_allclose(out[3:], expected_out, atol=2e-5, rtol=0)
    np.testing.assert_allclose(log_total[3:], expected_total, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_a_kernel_s_row_has_the_same_bits_whatever_its_neighbours_hold(name):
    query, kv, page_table, length = random_case([20, 24, 5, 17], 2, 8, 4, 6, jnp.float32)
    run = functools.partial(RUNS[name], query, kv, page_table, log_weight=None, with_logits=False)
    for x, y in zip(run(length)[:2], run(jnp.asarray([20, 0, 5, 1], jnp.int32))[:2], strict=True):
        np.testing.assert_array_equal(x[0::2], y[0::2])


@pytest.mark.parametrize("num_cores", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_page_is_read_before_it_came_on_a_tpu(num_cores):
    args = random_case([7, 0, 20, 13, 1, 0, 0, 9, 4, 17, 0, 2, 3, 0, 5, 11], 2, 8, 4, 5, jnp.float32)
    run = functools.partial(tpu.paged_attention, *args, None, with_logits=False)
    out, log_total, _ = got = run(interpret=tpu_interpreter.strict(num_cores=num_cores))
    assert not tpu_interpreter.has_race(lambda: got)
    expected_out, expected_total, _ = by_hand(*args)
    np.testing.assert_allclose(out, expected_out, atol=2e-5, rtol=0)
    np.testing.assert_allclose(log_total, expected_total, atol=2e-5, rtol=0)


def test_a_planted_race_is_found(monkeypatch):
    monkeypatch.setattr(pltpu, "make_async_copy", tpu_interpreter.NeverWaits)
    args = random_case([7, 20], 2, 8, 4, 5, jnp.float32, seed=3)
    run = functools.partial(tpu.paged_attention.__wrapped__, interpret=tpu_interpreter.strict("eager"))
    assert tpu_interpreter.has_race(lambda: run(*args, None, with_logits=False))


def test_what_a_kernel_cannot_take_is_named():
    args = random_case([7, 20], 2, 8, 4, 5, jnp.float32)
    assert "head size or the page size must be a multiple of 128; got 8 and 4" in tpu.why_not(*args, None)
    assert "multiple of 16 up to 256; got 8" in gpu.why_not(*args, None)
    query, kv, page_table, length = random_case([3], 33, 128, 16, 1, jnp.float32)
    assert "at most 32 query heads, times the places of a row; got 33" in gpu.why_not(query, kv, page_table, length, None)
    assert "heads and pages of bfloat16 must be multiples of 16; got 128 and 8" in tpu.why_not(
        query.astype(jnp.bfloat16), kv[:, :, :8].astype(jnp.bfloat16), page_table, length, None
    )
    assert "float16 and float32" in tpu.why_not(query.astype(jnp.float16), kv, page_table, length, None)
    wide = jnp.zeros((1, 8193), jnp.int32)
    assert "four times, must take at most 983040 bytes; got 1054752" in tpu.why_not(query, kv, wide, length, None)
    assert "logits must take at most" in tpu.why_not(query, kv, wide[:, :2048], length, None, with_logits=True)
    assert gpu.why_not(query[:, :8], kv, wide, length, None) is None


IDS = [-(2**31), -9, -8, -7, -1, 0, 7, 8, 9, 2**30, 2**31 - 1]  # for a pool of 8 pages
LENGTHS = [-(2**31), -1, 0, 1, 5, 11, 12, 13, 1000]


@pytest.mark.parametrize("name", ["cpu", "native"])
def test_on_a_cpu_ids_and_lengths_out_of_range_read_what_the_reference_reads(name):
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((4, 5, 8)), jnp.float32)
    kv = jnp.asarray(rng.standard_normal((8, 2, 4, 8)), jnp.float32)
    runs = [jax.jit(functools.partial(RUNS[x], log_weight=None, with_logits=True)) for x in ("reference", name)]
    if name == "native" and (reason := native.why_no_library()):
        pytest.skip(reason)
    for _ in range(50):
        page_table = jnp.asarray(rng.choice(IDS, (4, 3)), jnp.int32)
        lengths = [*rng.choice(LENGTHS, 3), *([2**31 - 1] if name == "native" else [12])]
        expected, got = (run(query, kv, page_table, jnp.asarray(lengths, jnp.int32)) for run in runs)
        for x, y in zip(expected, got, strict=True):
            np.testing.assert_allclose(y, x, atol=2e-5, rtol=0)


def changed(others):
    """The arguments and results of the compiled kernel's call, some of other shapes."""
    query, kv, page_table, length = random_case([7, 20], 2, 8, 4, 5, jnp.float32)
    shapes = {
        "query": query,
        "kv": kv,
        "kv_scale": jnp.zeros(0),
        "page_table": page_table,
        "length": length,
        "log_weight": jnp.zeros((2, 0)),
    }
    shapes |= {"out": query, "log_total": query[..., 0], "logits": jnp.zeros((2, 2, 20))}
    return {name: jnp.zeros(others.get(name, x.shape), x.dtype) for name, x in shapes.items()}


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"query": (2, 16)}, r"query, kv and page table must have 3, 4 and 2 axes; got \[2, 16\]"),
        ({"query": (2, 2, 12)}, "head size must be a multiple of 8; got 12"),
        ({"kv": (0, 2, 4, 8)}, r"kv must have a page; got \[0, 2, 4, 8\]"),
        ({"kv": (3, 1, 4, 8)}, r"kv must have the shape \[3, 2, 4, 8\]; got \[3, 1, 4, 8\]"),
        ({"kv": (3, 2, 4, 16)}, r"kv must have the shape \[3, 2, 4, 8\]"),
        ({"kv_scale": (3,)}, r"scales must have the shape \[0\]; got \[3\]"),
        ({"page_table": (1, 5)}, r"page table must have the shape \[2, 5\]; got \[1, 5\]"),
        ({"length": (1,)}, r"lengths must have the shape \[2\]; got \[1\]"),
        ({"log_weight": (2, 19)}, r"log-weights must have the shape \[2, 20\]; got \[2, 19\]"),
        ({"log_weight": (0, 20)}, r"log-weights must have the shape \[2, 0\]; got \[0, 20\]"),
        ({"out": (2, 1, 8)}, r"the output must have the shape \[2, 2, 8\]"),
        ({"log_total": (2, 3)}, r"the log-totals must have the shape \[2, 2\]"),
        ({"logits": (2, 2, 16)}, r"the logits must have the shape \[2, 2, 20\]; got \[2, 2, 16\]"),
    ],
)
def test_the_compiled_kernel_refuses_shapes_that_do_not_fit(others, words):
    if reason := native.why_no_library():
        pytest.skip(reason)
    arrays = changed(others)
    results = [jax.ShapeDtypeStruct(arrays.pop(name).shape, jnp.float32) for name in ("out", "log_total", "logits")]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: paged_attention: {words}"):
        jax.block_until_ready(jax.ffi.ffi_call(native.TARGET, results)(*arrays.values()))


def test_other_dtypes_are_no_arguments_of_the_compiled_kernel():
    query, kv, page_table, length = random_case([7, 20], 2, 8, 4, 5, jnp.float32)
    assert "must be int32; got uint32" in native.why_not(query, kv, page_table.astype(jnp.uint32), length)
    assert "must be int32; got int32 and int16" in native.why_not(query, kv, page_table, length.astype(jnp.int16))
    weight = jnp.zeros((2, 20), jnp.bfloat16)
    assert "log-weights must be float32; got bfloat16" in native.why_not(query, kv, page_table, length, weight)


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """As in a process in which nothing was compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("load_once", "warn_once"):
        monkeypatch.setattr(native_target, name, functools.cache(getattr(native_target, name).__wrapped__))
    return tmp_path


def test_without_a_compiler_plain_xla_computes_and_warns_once_of_the_reason(no_library, monkeypatch):
    monkeypatch.setenv("PATH", str(no_library))
    args = random_case([9, 3], 2, 8, 4, 3, jnp.float32)
    with pytest.warns(UserWarning, match=r"plain XLA is slower: it needs a C\+\+ compiler") as warned:
        jax.block_until_ready((kernels.paged_attention(*args), kernels.row_sum(args[0])))
    assert dispatch.best(IMPLEMENTATIONS, "cpu", *args) == "cpu"
    assert len(warned) == 1
    with pytest.raises(ValueError, match=r"native: it needs a C\+\+ compiler"):
        kernels.paged_attention(*args, implementation="native")


def test_a_compiler_that_fails_is_quoted_in_the_warning_and_plain_xla_computes(no_library, monkeypatch):
    compiler = no_library / "c++"
    compiler.write_text("#!/bin/sh\nprintf 'no such \\377 header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{no_library}:/bin")
    args = random_case([9, 3], 2, 8, 4, 3, jnp.float32)
    with pytest.warns(UserWarning, match="failed to build the library: no such . header"):
        out, _, _ = kernels.paged_attention(*args)
    np.testing.assert_allclose(out, by_hand(*args)[0], atol=2e-5, rtol=0)
    assert [path.name for path in (no_library / "cache" / "jkv").iterdir()] == ["compile.lock"]
