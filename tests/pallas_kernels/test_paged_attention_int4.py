"""`paged_attention` over pages of 4-bit codes, in every form that reads them, against loops over the numbers of the codes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels as kernels
from pallas_kernels import hadamard, nibbles
from pallas_kernels.paged_attention import gpu, native, reference, tpu
from pallas_kernels.quantised import FORMATS, dequantise, numbers_of_groups, quantise
from tests.pallas_kernels import tpu_interpreter
from tests.pallas_kernels.test_paged_attention import DTYPES, RUNS, TOLERANCE, by_hand, random_case

INT4 = FORMATS["int4"]
#            rows' lengths               group, head size, page, pages of a row
CASES = {
    "head_32_page_16": ([0, 1, 15, 16, 17, 33], 2, 32, 16, 3),
    "head_64_page_4": ([5, 0, 40, 12, 4], 7, 64, 4, 10),
    "head_128_page_16": ([130, 16, 1, 0], 1, 128, 16, 9),
    "head_128_page_64": ([64, 65, 63, 0, 128, 1], 5, 128, 64, 2),
    "head_256_page_16": ([33, 16, 0], 4, 256, 16, 3),
}


def coded_case(*case, dtype=jnp.float32):
    """As `random_case`, in codes: the scales of slots that no row fills are NaN."""
    query, kv, page_table, length = random_case(*case, jnp.float32)
    return query.astype(dtype), quantise(kv, INT4, dtype), page_table, length


def weights_of(lengths, num_slots):
    """Multiplicities 1 to 4 and vacant slots; NaN beyond the lengths."""
    weight = np.log(np.random.default_rng(1).integers(1, 5, size=(len(lengths), num_slots)))
    weight[:, 3::7] = -np.inf
    weight[np.arange(num_slots) >= np.asarray(lengths)[:, None]] = np.nan
    return jnp.asarray(weight, jnp.float32)


@functools.partial(jax.jit, static_argnames=("name", "with_logits"))
def attend(name, query, kv, page_table, length, weight=None, with_logits=False):
    """One form's result, by itself or interpreted, with the rotations that `kernels.paged_attention` adds."""
    out, *rest = RUNS[name](hadamard.rotate(query), kv, page_table, length, weight, with_logits=with_logits)
    return hadamard.rotate(out), *rest


def skip_without_library(name):
    if name == "native" and (reason := native.why_no_library()):
        pytest.skip(reason)


@pytest.mark.parametrize("name", ["native", "cpu"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_a_cpu_every_head_and_page_size_agrees_with_loops(name, case):
    skip_without_library(name)
    args = coded_case(*case)
    numbers = dequantise(args[1])
    for weight in (None, weights_of(case[0], case[3] * case[4])):
        got = attend(name, *args, weight, with_logits=True)
        for x, y in zip(got, by_hand(args[0], numbers, *args[2:], weight), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5, rtol=0)


@pytest.mark.parametrize("head_size", [32, 64, 128, 256])
def test_the_compiled_kernel_has_the_bits_of_a_pool_of_these_numbers(head_size):
    """Infinite and NaN scales included, which only a slot that is read may show."""
    skip_without_library("native")
    query, pool, page_table, length = coded_case([40, 7, 20], 3, head_size, 8, 5)
    scale = pool.scale.at[page_table[1, 0], 1, 2, 0].set(0x7C00).at[page_table[2, 0], 0, 1, 0].set(0x7E00)
    coded = pool.__class__(pool.codes, scale, pool.format, pool.dtype)
    numbers = numbers_of_groups(coded, jnp.float32)
    got, want = (RUNS["native"](query, kv, page_table, length, with_logits=True) for kv in (coded, numbers))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    assert [bool(np.isfinite(x).all()) for x in got[0]] == [True, False, False]


@pytest.mark.parametrize("name", ["native", "cpu"])
def test_on_a_cpu_a_row_s_bits_depend_on_nothing_but_the_row(name):
    skip_without_library(name)
    query, kv, page_table, length = coded_case([150, 700, 130], 2, 64, 16, 48)
    shorter = jnp.asarray([150, 3, 130], jnp.int32)
    together = attend(name, query, kv, page_table, length, with_logits=True)
    narrow = attend(name, query, kv, page_table[:, :11], shorter, with_logits=True)
    for x, y in zip(together, narrow, strict=True):
        np.testing.assert_array_equal(x[0::2, ..., : y.shape[-1]], y[0::2])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query": (2, 2, 48)}, "the head size of codes of 4 bits must be a multiple of 32; got 48"),
        ({"kv": (3, 2, 4, 64)}, r"kv must have the shape \[3, 2, 4, 32\]; got \[3, 2, 4, 64\]"),
        ({"kv_scale": (3, 2, 4)}, r"scales must have the shape \[3, 2, 4, 2\]; got \[3, 2, 4\]"),
        ({"kv_scale": (3, 2, 4, 1)}, r"scales must have the shape \[3, 2, 4, 2\]; got \[3, 2, 4, 1\]"),
        ({"kv_scale": jnp.int32}, "scales must be float32, or uint16 of codes of 4 bits"),
        (
            {"kv_scale": jnp.float32},
            r"kv must have the shape \[3, 2, 4, 64\]; got \[3, 2, 4, 32\]",
        ),  # then codes are floats of 8 bits
    ],
)
def test_the_compiled_kernel_refuses_codes_that_do_not_fit(changed, words):
    skip_without_library("native")
    arrays = {
        "query": jnp.zeros((2, 2, 64)),
        "kv": jnp.zeros((3, 2, 4, 32), jnp.uint8),
        "kv_scale": jnp.zeros((3, 2, 4, 2), jnp.uint16),
        "page_table": jnp.zeros((2, 5), jnp.int32),
        "length": jnp.zeros(2, jnp.int32),
        "log_weight": jnp.zeros((2, 0)),
    }
    for name, change in changed.items():
        x = arrays[name]
        arrays[name] = jnp.zeros(change, x.dtype) if isinstance(change, tuple) else x.astype(change)
    sizes = arrays["query"].shape, arrays["query"].shape[:-1], (2, 2, 0)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: paged_attention: {words}"):
        jax.block_until_ready(jax.ffi.ffi_call(native.TARGET, results)(*arrays.values()))


def test_on_a_cpu_the_compiled_kernel_is_chosen():
    skip_without_library("native")
    query, kv, page_table, length = coded_case([40, 7], 2, 64, 8, 5)
    got, want = (kernels.paged_attention(query, kv, page_table, length, implementation=name) for name in (None, "native"))
    for x, y in zip(got[:2], want[:2], strict=True):
        np.testing.assert_array_equal(x, y)


ON_TPU = {  # rows of several grid steps and blocks, and pages that begin and end
    "one_head_of_128": ([130, 0, 1, 128, 127, 129, 256, 3, 300], 1, 128, 128, 3),
    "five_heads_of_128": ([383, 1, 0, 257], 5, 128, 128, 3),
    "nine_heads_of_64": ([130, 0, 1, 256], 9, 64, 128, 2),
    "pages_of_256": ([255, 300], 4, 64, 256, 2),
}


def assert_like_the_reference(attend, case, dtype):
    """A form's attention to rotated vectors, logits and vacant slots included; `args` ends with the log-weights."""
    query, *args = coded_case(*case, dtype=dtype)
    for weight in (None, weights_of(case[0], case[3] * case[4])):
        exact = dataclasses.replace(args[0], dtype=np.dtype(np.float32))
        want = reference.paged_attention(query.astype(jnp.float32), exact, *args[1:], weight, with_logits=True)
        got = attend(query, *args, weight, with_logits=True)
        assert got[0].dtype == dtype
        for x, y, tolerance in zip(got, want, (TOLERANCE[dtype], 2e-5, 2e-5), strict=True):
            np.testing.assert_allclose(x.astype(jnp.float32), y, atol=tolerance, rtol=2.0**-8 if x.dtype == dtype else 0)


@pytest.mark.parametrize("case", ON_TPU.values(), ids=ON_TPU)
@DTYPES
def test_on_a_tpu_every_head_and_group_agrees_with_plain_xla(monkeypatch, case, dtype):
    monkeypatch.setattr(tpu, "BLOCK", 256)
    with tpu_interpreter.watched() as interpreter:
        assert_like_the_reference(functools.partial(tpu.paged_attention.__wrapped__, interpret=interpreter), case, dtype)


ON_GPU = {  # rows of none to three pieces of 256 slots
    "one_head_of_32": ([17, 0, 1, 16], 1, 32, 16, 2),
    "seven_heads_of_64": ([0, 257, 1, 256], 7, 64, 16, 17),
    "four_heads_of_128": ([700, 0, 13, 255], 4, 128, 16, 44),
    "pages_of_128": ([128, 300, 127], 16, 128, 128, 3),
    "two_heads_of_256": ([40, 0, 7], 2, 256, 8, 5),
}


@pytest.mark.parametrize("case", ON_GPU.values(), ids=ON_GPU)
@DTYPES
@pytest.mark.parametrize("programs", [1, 5])  # whole rows, and parts
def test_on_a_gpu_every_head_and_group_agrees_with_plain_xla(case, dtype, programs):
    run = functools.partial(gpu.paged_attention, programs=programs, interpret=True)
    assert_like_the_reference(jax.jit(run, static_argnames="with_logits"), case, dtype)


def test_on_a_gpu_a_row_s_bits_depend_on_nothing_but_the_row():
    """Neither on its neighbours, nor on the width of the table, nor on who computes what."""
    query, kv, page_table, length = coded_case([300, 700, 301], 3, 128, 16, 44)
    run = functools.partial(gpu.paged_attention, log_weight=None, with_logits=True, interpret=True)
    together = run(query, kv, page_table, length, programs=1)
    narrow = run(query, kv, page_table[:, :19], length.at[1].set(0), programs=5)
    for x, y in zip(together, narrow, strict=True):
        np.testing.assert_array_equal(x[0::2, ..., : y.shape[-1]], y[0::2])


@pytest.mark.parametrize(("head_size", "block", "narrow_pages"), [(128, 256, 1), (64, 512, 2)])
def test_on_a_tpu_a_row_s_bits_depend_on_nothing_but_the_row(monkeypatch, head_size, block, narrow_pages):
    """The wide table has several blocks of a row, and the narrow one has one that is shorter."""
    monkeypatch.setattr(tpu, "BLOCK", block)
    query, kv, page_table, length = coded_case([100, 70, 128, 640], 2, head_size, 128, 5)
    run = jax.jit(functools.partial(tpu.paged_attention.__wrapped__, log_weight=None, with_logits=True, interpret=True))
    together = run(query, kv, page_table, length)
    narrow = run(query, kv, page_table[:, :narrow_pages], length.at[1].set(0).at[3].set(1))
    for x, y in zip(together, narrow, strict=True):
        np.testing.assert_array_equal(x[0:3:2, ..., : y.shape[-1]], y[0:3:2])


@DTYPES
@pytest.mark.parametrize("head_size", [64, 128])
def test_words_of_a_tpu_hold_the_codes_in_the_order_of_the_queries(head_size, dtype):
    """And the order of queries is undone for outputs."""
    codes = np.random.default_rng(0).integers(0, 256, (head_size // 2, 128), np.uint8)
    numbers = np.concatenate([codes & 15, codes >> 4]).T - 8.0

    def kernel(codes_ref, out_ref):
        out_ref[...] = nibbles.unpacked(pltpu.bitcast(codes_ref[...], jnp.int32), dtype)

    shape = jax.ShapeDtypeStruct((head_size, 128), dtype)
    got = pl.pallas_call(kernel, out_shape=shape, interpret=True)(jnp.asarray(codes)).T.astype(jnp.float32) - nibbles.ADDED
    np.testing.assert_array_equal(got, nibbles.reordered(jnp.asarray(numbers, dtype)).astype(jnp.float32))
    np.testing.assert_array_equal(nibbles.restored(got.astype(dtype)).astype(jnp.float32), numbers)
    group = nibbles.reordered(jnp.arange(head_size).astype(dtype) // 32)
    np.testing.assert_array_equal(nibbles.group_of_channel(head_size, 32, dtype)[0], group)


def test_scales_are_float16s_and_nan_stays():
    bits = jnp.asarray([[0, 0x0400, 0x3C00, 0x7BFF, 0x3555, 0x7E00]], jnp.int32)
    np.testing.assert_array_equal(nibbles.scales(bits)[0], np.asarray(bits[0], np.uint16).view(np.float16))


def test_what_a_tpu_cannot_take_of_int4_is_named():
    for head_size, words in ((32, "64 or 128 channels; got 32"), (256, "64 or 128 channels; got 256"), (64, None)):
        args = coded_case([3], 2, head_size, 128, 1)
        reason = tpu.why_not(*args, None)
        assert reason is None if words is None else words in reason
    assert "must be a multiple of 128 slots, for its scales; got 64" in tpu.why_not(*coded_case([3], 2, 64, 64, 1), None)
