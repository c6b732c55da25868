"""Quantised pages: codes against NumPy, and every kernel against itself on the numbers that the codes stand for."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels import dispatch
from pallas_kernels.models import ModelShape, Workload
from pallas_kernels.paged_attention import tpu as paged_attention_tpu
from pallas_kernels.quantised import FORMATS, NAN_BITS, Quantised, dequantise, put, quantise, straight_through, vector_bytes
from pallas_kernels.sealed import SEALED, seal
from tests.pallas_kernels import tpu_interpreter

MODEL = ModelShape(num_layers=2, num_query_heads=6, num_kv_heads=2, head_size=64)
SMALL = Workload(batch=3, slots=80, page_size=16, dtype=jnp.float32)
WIDE, LARGE = MODEL._replace(head_size=128), SMALL._replace(slots=300, page_size=128)  # what a TPU's tiles take
EACH_FORMAT = pytest.mark.parametrize("name", FORMATS)
OF_A_BYTE = [name for name, format in FORMATS.items() if format.group is None]
QUANTISED = ["paged_attention", "rotate_append", "take_slots", "block_distance"]


def each_implementation(*names, on_tpu=("int8",), of_groups=("reference", "cpu")):
    """A format and an implementation that takes it."""
    pairs = [(name, one) for one in names for name in (on_tpu if one == "tpu" else OF_A_BYTE)]
    pairs += [("int4", one) for one in names if one in of_groups]
    return pytest.mark.parametrize(("name", "implementation"), pairs)


def sizes(implementation):
    """A model and a workload that an implementation takes."""
    return (WIDE, LARGE) if implementation == "tpu" else (MODEL, SMALL)


def arguments(kernel, name, implementation, **options):
    """Real arguments of a kernel with a quantised pool, whose first page's scales are NaN: nobody may read it."""
    model, workload = sizes(implementation)
    args = kernels.KERNELS[kernel].shapes.values(model, workload._replace(kv_format=name), **options)
    pool, *rest = put_first(kernel, args)
    return Quantised(pool.codes, pool.scale.at[0].set(nan_of(pool)), pool.format, pool.dtype), rest


def nan_of(pool):
    """A scale that is NaN."""
    return NAN_BITS if pool.scale.dtype == jnp.uint16 else jnp.nan


def put_first(kernel, args):
    """The pool, then the other arguments."""
    return (args[1], args[0], *args[2:]) if kernel == "paged_attention" else args


def run(kernel, implementation, pool, rest):
    """A kernel's result, by an implementation that may have to be interpreted."""
    args = (rest[0], pool, *rest[1:]) if kernel == "paged_attention" else (pool, *rest)
    if implementation == "gpu":
        gpu = importlib.import_module(f"pallas_kernels.{kernel}.gpu")
        return gpu.__dict__[kernel](*args, interpret=True)
    if implementation == "tpu":
        tpu = importlib.import_module(f"pallas_kernels.{kernel}.tpu")
        settings = {"with_logits": False} if kernel == "paged_attention" else {}
        assert tpu.why_not(*args, **settings) is None
        with tpu_interpreter.watched() as interpreter:
            return jax.block_until_ready(tpu.__dict__[kernel](*args, **settings, interpret=interpreter))
    return jax.jit(functools.partial(getattr(kernels, kernel), implementation=implementation))(*args)


@pytest.mark.parametrize("name", OF_A_BYTE)
def test_codes_are_those_of_numpy(name):
    x = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    x[0], x[1] = 0, 1e-30
    x[2, :5] = [-127, 0.5, 1.5, 2.5, -0.5]
    x[2, 5:] = 0
    got = jax.jit(lambda x: quantise(x, FORMATS[name]))(x)
    scale = np.maximum(np.abs(x).max(axis=1), 2.0**-60).astype(np.float32) * np.float32(1 / FORMATS[name].most)
    np.testing.assert_array_equal(got.scale, scale)
    if name == "int8":
        np.testing.assert_array_equal(got.codes, np.rint(x / scale[:, None]).astype(np.int8))
        assert got.codes[2, :5].tolist() == [-127, 0, 2, 2, 0]  # ties to even
    else:
        codes = np.asarray(got.codes).view(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(codes, (x / scale[:, None]).astype(ml_dtypes.float8_e4m3fn))
    assert (dequantise(got)[0] == 0).all()
    assert np.abs(dequantise(got) - x).max() <= np.abs(x).max() * (0.5 / 127 if name == "int8" else 2.0**-4)


def test_a_key_moves_a_logit_by_no_more_than_half_a_code_for_each_channel():
    rng = np.random.default_rng(1)
    key, query = rng.standard_normal((50, 64)).astype(np.float32), rng.standard_normal((8, 64)).astype(np.float32)
    codes = quantise(jnp.asarray(key), FORMATS["int8"])
    moved = np.abs(query @ (np.asarray(dequantise(codes)) - key).T)
    assert (moved <= np.abs(query).sum(axis=1)[:, None] * np.asarray(codes.scale) / 2 + 1e-5).all()


@EACH_FORMAT
def test_a_vector_with_nan_has_the_scale_nan_and_no_other_has(name):
    codes = quantise(jnp.ones((2, 32)).at[0, 1].set(jnp.nan), FORMATS[name])
    assert np.isnan(dequantise(codes)[0]).all()
    assert np.isfinite(dequantise(codes)[1]).all()


def test_gradients_pass_straight_through():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32)), jnp.float32)
    for format in FORMATS.values():
        np.testing.assert_allclose(straight_through(x, format), dequantise(quantise(x, format)), rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(
            jax.grad(lambda x, f=format: (3 * straight_through(x, f)).sum())(x), jnp.full(x.shape, 3.0)
        )


@each_implementation("reference", "cpu", "native", "gpu", "tpu", on_tpu=OF_A_BYTE, of_groups=("reference", "cpu", "native"))
@pytest.mark.parametrize("weighted", [False, True])
def test_attention_to_codes_is_attention_to_their_numbers(name, implementation, weighted):
    pool, (query, table, length, weight) = arguments("paged_attention", name, implementation, weighted=weighted)
    length = length.at[:4].set(jnp.asarray([0, 1, 17, 79]))
    scale = pool.scale.at[table[1, 0], :, 1:].set(nan_of(pool))  # of stale slots
    if weighted:
        weight = weight.at[:, 3].set(-jnp.inf)
        scale = scale.at[table[:, 0], :, 3].set(nan_of(pool))  # of vacant ones
    pool = Quantised(pool.codes, scale, pool.format, pool.dtype)
    rest = query, table, length, weight
    native = kernels.KERNELS["paged_attention"].implementations["native"]
    if implementation == "native" and (reason := dispatch.reason_against(native, query, pool, *rest[1:])):
        pytest.skip(reason)
    if name == "fp8":  # codes of slots that nobody reads are NaN too
        pool = dataclasses.replace(pool, codes=jnp.where(jnp.isnan(pool.scale)[..., None], jnp.uint8(0x7F), pool.codes))
    got, want = run("paged_attention", implementation, pool, rest), run("paged_attention", "reference", dequantise(pool), rest)
    for x, y in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(x, y, rtol=5e-6, atol=5e-6)


def test_the_compiled_kernel_reads_every_float_of_8_bits():
    """Bit for bit: a row with one slot reads its value. Among the 254 codes without the two of NaN are those below 2**-6."""
    code = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)
    codes = jnp.asarray(np.pad(code, (0, 2)).reshape(1, 1, 1, 256)) * jnp.ones((1, 2, 1, 1), jnp.uint8)
    pool = Quantised(codes, jnp.full((1, 2, 1), 0.5), FORMATS["fp8"], np.dtype(np.float32))
    args = jnp.zeros((1, 1, 256)), pool, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    if reason := dispatch.reason_against(kernels.KERNELS["paged_attention"].implementations["native"], *args):
        pytest.skip(reason)
    out, *_ = kernels.paged_attention(*args, implementation="native")
    np.testing.assert_array_equal(out[0, 0, :254], 0.5 * code.view(jnp.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("name", OF_A_BYTE)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_tpu_reads_codes_of_narrow_heads(weighted, name):
    """From transposed pages; with logits."""
    workload = LARGE._replace(kv_format=name)
    query, pool, *rest = kernels.KERNELS["paged_attention"].shapes.values(MODEL, workload, weighted=weighted)
    rest[1] = rest[1].at[:4].set(jnp.asarray([0, 1, 17, 129]))
    rest = rest if weighted else [*rest[:2], None]
    assert paged_attention_tpu.why_not(query, pool, *rest) is None
    with tpu_interpreter.watched() as interpreter:
        got = paged_attention_tpu.paged_attention(query, pool, *rest, with_logits=True, interpret=interpreter)
    want = kernels.paged_attention(query, dequantise(pool), *rest, with_logits=True, implementation="reference")
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("kernel", QUANTISED)
def test_what_a_tpu_cannot_take_of_codes_is_named(kernel):
    def reason(model, workload, name="int8"):
        implementation = kernels.KERNELS[kernel].implementations["tpu"]
        args = kernels.KERNELS[kernel].shapes.arguments(model, workload._replace(kv_format=name))
        return dispatch.reason_against(implementation, *args)

    assert reason(WIDE, LARGE) is None
    assert reason(WIDE, LARGE, "fp8") == (
        "quantised pages must be int8 or int4; got fp8" if kernel == "rotate_append" else None
    )
    assert "a quantised page must be a multiple of 128 slots, for its scales; got 16" in reason(WIDE, SMALL)
    assert "multiple" in reason(MODEL._replace(head_size=48), LARGE)
    if kernel != "paged_attention":
        assert "int4 must have" in reason(WIDE._replace(head_size=256), LARGE, "int4")


@each_implementation("reference", "gpu", "tpu", of_groups=("reference", "gpu", "tpu"))
def test_a_new_token_is_quantised_once_it_is_rotated(name, implementation):
    pool, rest = arguments("rotate_append", name, implementation)
    got, query, ring = run("rotate_append", implementation, pool, rest)
    want, other_query, other_ring = run("rotate_append", "reference", dequantise(pool), rest)
    page, offset = np.divmod(np.asarray(rest[3]), pool.shape[2])
    own = quantise(want[page, :, offset], FORMATS[name])
    # A number at the border of two codes may get either: rotations round differently.
    is_equal = np.asarray(got.codes[page, :, offset]) == np.asarray(own.codes)
    assert is_equal.mean() > 0.999
    np.testing.assert_allclose(got.scale[page, :, offset], own.scale, rtol=1e-6)
    np.testing.assert_allclose(query, other_query, atol=1e-6)
    np.testing.assert_allclose(ring, other_ring, atol=1e-6)
    untouched = np.setdiff1d(np.arange(1, len(pool.codes)), page)
    np.testing.assert_array_equal(got.codes[untouched], pool.codes[untouched])


@pytest.mark.everyday(where=lambda name, implementation: implementation != "tpu" or name in ("int8", "int4"))
@each_implementation("reference", "gpu", "tpu", on_tpu=OF_A_BYTE, of_groups=("reference", "gpu", "tpu"))
def test_slots_move_with_their_scales(name, implementation):
    pool, rest = arguments("take_slots", name, implementation)
    if name == "int4":  # some slots are NaN, each in a group of its own
        pool = dataclasses.replace(pool, scale=pool.scale.at[3::5, 1, 7, 2 % pool.scale.shape[3]].set(NAN_BITS))
    got, want = run("take_slots", implementation, pool, rest), run("take_slots", "reference", dequantise(pool), rest)
    np.testing.assert_array_equal(dequantise(got)[1:], want[1:])
    assert (np.asarray(got.codes)[1:] != np.asarray(pool.codes)[1:]).any()


@each_implementation("reference", "gpu", "tpu", on_tpu=OF_A_BYTE, of_groups=("reference", "gpu", "tpu"))
@pytest.mark.parametrize("turned", [False, True], ids=["as_cached", "turned"])
def test_distances_are_those_of_the_numbers(name, implementation, turned):
    """Half of the channels turn. Slots beyond a pair's tokens are NaN. The first pair is a page twice.

    Code times scale, less the same, is not always zero: a fused multiply-add rounds one of both products alone.
    """
    pool, (first, *_, angle) = arguments("block_distance", name, implementation, pairs=4, turned=turned)
    pages = jnp.asarray(1 + np.random.default_rng(0).permutation(len(pool.codes) - 1)[: 2 * first.size], jnp.int32)
    first, second = pages.reshape(2, *first.shape)
    second, angle = second.at[0].set(first[0]), angle if angle is None else angle[:, : angle.shape[1] // 2].at[0].set(0)
    num_tokens = jnp.asarray([pool.shape[2], 1, 0, 11], jnp.int32)
    scale = pool.scale
    for pair, filled in enumerate(num_tokens):
        scale = scale.at[jnp.stack([first[pair], second[pair]]).ravel(), :, int(filled) :].set(nan_of(pool))
    pool, rest = dataclasses.replace(pool, scale=scale), (first, second, num_tokens, angle)
    got, want = run("block_distance", implementation, pool, rest), run("block_distance", "reference", dequantise(pool), rest)
    np.testing.assert_allclose(got[1:], want[1:], rtol=2e-5)
    np.testing.assert_allclose(got[0, ..., :2], want[0, ..., :2], rtol=2e-5)
    assert (got[0, ..., 2] <= 1e-10 * got[0, ..., 0]).all()


@pytest.mark.parametrize("kernel", QUANTISED)
def test_an_implementation_without_codes_is_refused_and_not_chosen(kernel):
    table = kernels.KERNELS[kernel].implementations
    args = kernels.KERNELS[kernel].shapes.arguments(WIDE, LARGE._replace(kv_format="int8"))
    for name, implementation in table.items():
        reason = dispatch.reason_against(implementation, *args)
        assert (reason == "it does not take quantised pages") == (not implementation.reads_codes and name != "reference")
    assert dispatch.best(table, "tpu", *args) == "tpu"
    assert dispatch.best(table, "cuda", *args) == "gpu"


@pytest.mark.parametrize(("name", "of_vector"), [("int8", 68), ("fp8", 68), ("int4", 36)])
def test_a_vector_of_codes_has_a_byte_or_half_of_one_a_channel_and_its_scales(name, of_vector):
    pool = SMALL._replace(kv_format=name).pool(MODEL)
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
    vectors = pool.shape[0] * 2 * pool.shape[2]
    assert num_bytes == vectors * vector_bytes(64, jnp.float32, FORMATS[name]) == vectors * of_vector


@pytest.mark.parametrize("format", [None, *FORMATS.values(), *SEALED.values()], ids=lambda x: getattr(x, "name", "floats"))
def test_other_places_are_written_and_page_0_is_not_however_often_it_comes(format):
    rng, shape = np.random.default_rng(0), (5, 2, 16, 64)
    whole = quantise if format in FORMATS.values() else seal
    old, new = (jnp.asarray(rng.normal(size=(n, *shape[1:])), jnp.float32) for n in (5, 4))
    if format is not None:
        old, new = whole(old, format), whole(new, format)
    written, nothing = put((old, None), (jnp.asarray([0, 3, 0, 1]),), (new, None))
    assert nothing is None
    for before, after, part in zip(*map(jax.tree.leaves, (old, written, new)), strict=True):
        np.testing.assert_array_equal(after[jnp.asarray([0, 2, 4])], before[jnp.asarray([0, 2, 4])])
        np.testing.assert_array_equal(after[jnp.asarray([3, 1])], part[jnp.asarray([1, 3])])


def test_slots_of_a_page_are_written_one_by_one():
    old = jnp.zeros((3, 2, 4, 8))
    page, slot = jnp.asarray([[2, 0], [2, 1]]), jnp.asarray([[3, 1], [0, 2]])
    new = jnp.arange(1.0, 5).reshape(2, 2, 1, 1) + jnp.zeros((2, 2, 2, 8))
    expected = np.zeros((3, 2, 4, 8))
    expected[2, :, 3], expected[2, :, 0], expected[1, :, 2] = 1, 3, 4
    np.testing.assert_array_equal(put(old, (page[..., None], jnp.arange(2), slot[..., None]), new), expected)
