"""`sealed_attention`'s kernels for CPUs against plain XLA: their bits, and arguments that are out of range or do not fit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels import dispatch, sealed
from pallas_kernels.sealed import SEALED
from pallas_kernels.sealed_attention import IMPLEMENTATIONS, native, reference

NUM_PAGES = 12  # of a pool; the null page and the last one hold NaN


def records_of(rng, page, size, name, dtype):
    """Records of any codes, with scales as keys and values have them; to seal takes longer to compile."""
    format = dataclasses.replace(SEALED[name], page=page)
    arrays = {}
    for name, (shape, kind) in sealed.arrays_of(NUM_PAGES, size, format).items():
        numbers = rng.lognormal(-1, 0.5, shape) if kind == jnp.uint16 else rng.integers(0, 256, shape)
        if name == "scales":
            of = sealed.Scales(*np.split(numbers.reshape(NUM_PAGES, -1), sealed.places(page, size)[1:], axis=1))
            for zeros in (of.key_zero, of.value_zero):
                zeros *= rng.choice([-4, 1], zeros.shape)
        arrays[name] = jnp.asarray(
            numbers.astype(np.float16).view(np.uint16) if kind == jnp.uint16 else numbers.astype(np.uint8)
        )
    return sealed.Records(**arrays, format=format, dtype=np.dtype(dtype))


def case_of(counts, group, size, page, max_pages, name="kvarn", dtype=jnp.float32, seed=0):
    """A query, records, a table of any width and the pages of every row; entries that no row reads are of a page with NaN."""
    rng = np.random.default_rng(seed)
    table = rng.integers(1, NUM_PAGES - 1, (len(counts), max_pages)).astype(np.int32)
    table[np.arange(max_pages) >= np.asarray(counts)[:, None]] = NUM_PAGES - 1
    return (
        jnp.asarray(rng.standard_normal((len(counts), group, size)), dtype),
        sealed.poisoned(records_of(rng, page, size, name, dtype), jnp.asarray([0, NUM_PAGES - 1])),
        jnp.asarray(table),
        jnp.asarray(counts, jnp.int32),
    )


@pytest.fixture
def library():
    if reason := native.why_no_library():
        pytest.skip(reason)


@pytest.mark.parametrize("name", SEALED)
@pytest.mark.parametrize(
    ("group", "size", "page"), [(1, 32, 16), (2, 128, 128), (3, 64, 64), (4, 32, 128), (7, 128, 32), (8, 64, 16), (5, 256, 32)]
)
def test_the_compiled_kernel_computes_what_plain_xla_does(library, name, group, size, page):
    args = case_of([3, 0, 1, 9], group, size, page, 9, name)
    assert native.why_not(*args) is None
    for got, expected in zip(native.sealed_attention(*args), reference.sealed_attention(*args), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_row_s_bits_depend_on_nothing_but_the_row(library):
    query, records, table, count = case_of([3, 9, 5], 3, 64, 16, 9)
    run = functools.partial(native.sealed_attention, query, records)
    others = jnp.asarray([3, 2, 5], jnp.int32)
    for together, beside, narrow in zip(run(table, count), run(table, others), run(table[:, :5], others), strict=True):
        np.testing.assert_array_equal(together[::2], beside[::2])
        np.testing.assert_array_equal(together[::2], narrow[::2])


def test_ids_and_counts_out_of_range_read_what_the_reference_reads(library):
    rng, ids = np.random.default_rng(0), [-(2**31), -13, -12, -11, -2, 1, 10, 12, 13, 2**31 - 1]
    query, records, table, _ = case_of([8] * 4, 2, 64, 16, 8)
    records = jax.tree.map(lambda x: x[rng.integers(1, NUM_PAGES - 1, NUM_PAGES)], records)  # without NaN
    for counts in ([-(2**31), -1, 0, 1], [5, 8, 9, 2**31 - 1]):
        table, count = jnp.asarray(rng.choice(ids, table.shape), jnp.int32), jnp.asarray(counts, jnp.int32)
        expected = reference.sealed_attention(query, records, table, jnp.clip(count, 0, 8))
        for x, y in zip(native.sealed_attention(query, records, table, count), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_on_a_cpu_the_compiled_kernel_is_chosen(library):
    args = case_of([2, 4], 2, 64, 16, 4)
    assert dispatch.best(IMPLEMENTATIONS, "cpu", *args) == "native"
    for got, own in zip(kernels.sealed_attention(*args), kernels.sealed_attention(*args, implementation="native"), strict=True):
        np.testing.assert_array_equal(got, own)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query": (2, 64)}, "query, keys, values and page table must have 3, 3, 3 and 2 axes; got .2, 64., "),
        (
            {"key": (5, 16, 16)},
            r"codes of keys must have 4 bits, .* 2 or 4; got \[5, 16, 16\] and \[5, 16, 16\] for heads of 64",
        ),
        ({"key": (5, 16, 4), "value": (5, 16, 4), "query": (2, 2, 8)}, ".* must be multiples of 8; got 4 and 16"),
        ({"value": (4, 16, 16)}, r"values must have the shape \[5, 16, 16\]; got \[4, 16, 16\]"),
        ({"scales": (5, 240)}, r"scales must have the shape \[5, 2, 120\]; got \[5, 240\]"),
        ({"scales": (4, 2, 120)}, r"scales must have the shape \[5, 2, 120\]; got \[4, 2, 120\]"),
        ({"table": (3, 4)}, r"page table must have the shape \[2, 4\]"),
        ({"count": (1,)}, r"page counts must have the shape \[2\]"),
        ({"out": (2, 1, 64)}, r"the output must have the shape \[2, 2, 64\]"),
        ({"log_total": (2, 3)}, r"the log-totals must have the shape \[2, 2\]"),
    ],
)
def test_the_compiled_kernel_refuses_shapes_that_do_not_fit(library, changed, words):
    query, records, table, count = case_of([2, 4], 2, 64, 16, 4)
    arrays = {"query": query} | {x.name: getattr(records, x.name)[:5] for x in dataclasses.fields(records)[:3]}
    arrays |= {"table": table, "count": count, "out": query, "log_total": query[..., 0]}
    arrays |= {name: jnp.zeros(shape, arrays[name].dtype) for name, shape in changed.items()}
    results = [jax.ShapeDtypeStruct(arrays.pop(name).shape, jnp.float32) for name in ("out", "log_total")]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: sealed_attention: {words}"):
        jax.block_until_ready(jax.ffi.ffi_call(native.TARGET, results)(*arrays.values()))


def test_what_the_compiled_kernel_cannot_take_is_refused_by_name():
    assert "must be of float32; got bfloat16 and bfloat16" in native.why_not(*case_of([2], 2, 64, 16, 2, dtype=jnp.bfloat16))
    assert "head size must be a multiple of 32; got 16" in native.why_not(*case_of([2], 2, 16, 16, 2))
    query, records, table, count = case_of([2], 2, 64, 16, 2)
    assert "must be int32; got uint32 and int32" in native.why_not(query, records, table.astype(jnp.uint32), count)
    other = dataclasses.replace(records, format=dataclasses.replace(records.format, key_bits=8))
    assert "keys must have 4 bits, and those of values 2 or 4; got (8, 2)" in native.why_not(query, other, table, count)
