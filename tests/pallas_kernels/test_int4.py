"""Pages of 4-bit codes: the format written again in NumPy, with SciPy's Hadamard matrix, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import pallas_kernels as kernels
from pallas_kernels import dispatch, hadamard
from pallas_kernels.models import ModelShape, Workload
from pallas_kernels.paged_attention import native
from pallas_kernels.quantised import FORMATS, Quantised, dequantise, poisoned, quantise, vector_bytes, zeros
from pallas_kernels.rotate_append import gpu as rotate_append_gpu
from pallas_kernels.rotate_append import tpu as rotate_append_tpu
from pallas_kernels.take_slots import tpu as take_slots_tpu
from tests.pallas_kernels import tpu_interpreter

INT4 = FORMATS["int4"]
HEADS = pytest.mark.parametrize("head_size", [32, 64, 128, 256])
MODEL = ModelShape(num_layers=2, num_query_heads=6, num_kv_heads=2, head_size=64)
SMALL = Workload(batch=3, slots=80, page_size=16, dtype=jnp.float32, kv_format="int4")


def matrix(head_size):
    """Orthonormal, in float64."""
    return scipy.linalg.hadamard(head_size) / head_size**0.5


def numpy_codes(turned):
    """Codes in [-7, 7] and float16 scales of rotated vectors, channel by channel."""
    codes, scales = np.zeros(turned.shape, int), np.zeros((*turned.shape[:-1], turned.shape[-1] // 32), np.float16)
    for index in np.ndindex(*scales.shape):
        begin = 32 * index[-1]
        group = turned[index[:-1]][begin : begin + 32]
        scale = np.float16(np.clip(np.abs(group).max() * np.float32(1 / 7), 2.0**-14, 65504))
        scales[index] = scale
        codes[index[:-1]][begin : begin + 32] = np.clip(np.rint(group / np.float32(scale)), -7, 7)
    return codes, scales


def codes_and_scales(x):
    """What the bytes of quantised vectors hold, read bit by bit."""
    packed = np.asarray(x.codes)
    return np.concatenate([packed % 16, packed // 16], axis=-1).astype(int) - 8, np.asarray(x.scale).view(np.float16)


def vectors(head_size, seed=0):
    """Normal vectors, one with a large channel, one of zeros, a tiny and a huge one."""
    x = np.random.default_rng(seed).standard_normal((200, head_size)).astype(np.float32)
    x[0, 3], x[1], x[2], x[3] = 300, 0, x[2] * 1e-7, x[3] * 1e6
    return x


@HEADS
def test_the_rotation_is_hadamard_s_matrix_and_undoes_itself(head_size):
    x = vectors(head_size)
    turned = jax.jit(hadamard.rotate)(x)
    size = np.abs(x).max(axis=-1, keepdims=True) + 1e-30
    np.testing.assert_allclose(turned / size, x.astype(np.float64) @ matrix(head_size) / size, atol=1e-5)
    np.testing.assert_allclose(hadamard.rotate(turned) / size, x / size, atol=1e-5)
    np.testing.assert_allclose(turned[4:50] @ turned[50:].T, x[4:50] @ x[50:].T, rtol=1e-4, atol=1e-4)  # products are kept


@HEADS
def test_codes_and_scales_are_those_of_numpy(head_size):
    x = vectors(head_size)
    got = jax.jit(lambda x: quantise(x, INT4))(x)
    turned = np.asarray(jax.jit(hadamard.rotate)(x))
    codes, scales = numpy_codes(turned)
    own_codes, own_scales = codes_and_scales(got)
    np.testing.assert_array_equal(own_scales, scales)
    np.testing.assert_array_equal(own_codes, codes)
    assert (own_codes[1] == 0).all()
    assert (own_codes[2] == 0).all()
    assert np.abs(own_codes[3]).max() == 7
    numbers = (codes.reshape(*scales.shape, 32) * scales.astype(np.float64)[..., None]).reshape(x.shape) @ matrix(head_size)
    size = np.abs(numbers).max(axis=-1, keepdims=True) + 1e-30
    np.testing.assert_allclose(dequantise(got) / size, numbers / size, atol=1e-5)


def test_ties_go_to_the_even_code():
    """Of 64 channels, whose matrix divides by 8: all sums are exact."""
    turned = np.zeros((1, 64), np.float32)
    turned[0, :6] = [7, 0.5, 1.5, 2.5, -0.5, -3.5]
    codes, _ = codes_and_scales(quantise(hadamard.rotate(jnp.asarray(turned)), INT4))
    assert codes[0, :6].tolist() == [7, 0, 2, 2, 0, -4]


@HEADS
def test_an_error_is_at_most_half_a_code_of_its_group(head_size):
    x = vectors(head_size)[4:]
    got = quantise(jnp.asarray(x), INT4)
    moved = np.abs((np.asarray(dequantise(got)) - x).astype(np.float64) @ matrix(head_size)).reshape(len(x), -1, 32)
    _, scales = codes_and_scales(got)
    assert (moved <= scales.astype(np.float64)[..., None] * 0.51).all()


def test_a_large_channel_costs_its_neighbours_less_than_without_the_rotation():
    """What the rotation is for: in the group of a channel of 300, codes of numbers near 1 would all be zero."""
    x = vectors(128)[:1]
    error = np.abs(np.asarray(dequantise(quantise(jnp.asarray(x), INT4))) - x)[0]
    scale = np.abs(x[0, :32]).max() / 7
    plain = np.abs(np.clip(np.rint(x[0, :32] / scale), -7, 7) * scale - x[0, :32])
    assert plain[np.arange(32) != 3].mean() > 0.5
    assert error.max() < 300 / 7 / 2


def test_nan_and_infinity_stay_visible():
    x = jnp.ones((3, 64)).at[0, 5].set(jnp.nan).at[1, 5].set(jnp.inf)
    numbers = np.asarray(dequantise(quantise(x, INT4)))
    assert np.isnan(numbers[:2]).all()
    assert np.isfinite(numbers[2]).all()


def test_a_poisoned_page_is_nan_and_no_other_is():
    pool = zeros((4, 2, 8, 32), jnp.float32, INT4)
    numbers = np.asarray(dequantise(poisoned(pool, jnp.asarray([1, 4]))))
    assert np.isnan(numbers[1]).all()
    assert (numbers[[0, 2, 3]] == 0).all()


@pytest.mark.parametrize(("head_size", "why"), [(8, "groups of 32"), (48, "groups of 32"), (96, "a power of two")])
def test_other_heads_are_refused_with_those_that_work(head_size, why):
    for call in (
        lambda: vector_bytes(head_size, jnp.bfloat16, INT4),
        lambda: zeros((2, 2, 4, head_size), jnp.float32, INT4),
        lambda: quantise(jnp.zeros((2, head_size)), INT4),
    ):
        with pytest.raises(ValueError, match=f'kv_dtype="int4" .*{why}.*32, 64, 128, 256.*got {head_size}.*"int8"'):
            call()
    with pytest.raises(ValueError, match="power of two of channels; got 48"):
        hadamard.rotate(jnp.zeros((2, 48)))


def test_a_slot_takes_less_than_a_third_of_bfloat16():
    """At head size 128: with positions, 148 bytes to 516; without, 4.5 bits a number."""
    plain, coded = (2 * vector_bytes(128, jnp.bfloat16, format) for format in (None, INT4))
    assert 8 * coded / 256 == 4.5
    assert (plain + 4) / (coded + 4) > 3.4


@pytest.mark.parametrize("kernel", ["paged_attention", "rotate_append", "take_slots", "block_distance"])
def test_every_kernel_of_an_accelerator_takes_int4(kernel):
    table = kernels.KERNELS[kernel].implementations
    model, workload = MODEL._replace(head_size=128), SMALL._replace(slots=300, page_size=128)
    args = kernels.KERNELS[kernel].shapes.arguments(model, workload)
    assert all(dispatch.reason_against(one, *args) is None for one in table.values())
    on_cpu = "cpu" if native.why_no_library() else "native"
    assert dispatch.best(table, "cpu", *args) == (on_cpu if kernel == "paged_attention" else "reference")
    assert [dispatch.best(table, platform, *args) for platform in ("cuda", "tpu")] == ["gpu", "tpu"]


def test_an_implementation_without_groups_is_refused_by_name():
    table = kernels.KERNELS["block_distance"].implementations
    args = kernels.KERNELS["block_distance"].shapes.values(MODEL, SMALL)
    older = {name: one._replace(reads_groups=False) for name, one in table.items()}
    assert dispatch.best(older, "cuda", *args) == "reference"
    assert "does not take quantised pages of int4" in dispatch.reason_against(older["gpu"], *args)
    with pytest.raises(ValueError, match=r"gpu: it .*Choose one of \['reference'"):
        dispatch.call("block_distance", older, "gpu", *args)


def appended(pool, rotary, num_heads, address, dtype):
    """The arguments of `rotate_append` for a pool of 4-bit codes of two KV heads; the second row's first key has NaN."""
    keys = jax.random.split(jax.random.key(0), 2)
    projected = jax.random.normal(keys[0], (len(address), num_heads + 4, pool.shape[3]), dtype)
    angle = jax.random.uniform(keys[1], (len(address), rotary // 2), maxval=6.0)
    address = jnp.asarray(address, jnp.int32)
    return pool, projected.at[1, num_heads, 5].set(jnp.nan), jnp.cos(angle), jnp.sin(angle), address


def assert_codes_of_token(got, want, dtype):
    """Against the reference's pool and queries: a number at the border of two codes may get either."""
    tolerance = 0.02 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(got[1].astype(jnp.float32), want[1].astype(jnp.float32), atol=tolerance)
    codes, scales = codes_and_scales(got[0])
    expected, other_scales = codes_and_scales(want[0])
    is_nan = np.isnan(other_scales)
    assert is_nan.sum() == codes.shape[-1] // 32  # one vector
    np.testing.assert_array_equal(np.isnan(scales), is_nan)
    np.testing.assert_allclose(scales[~is_nan].astype(float), other_scales[~is_nan].astype(float), rtol=2e-3, atol=1e-30)
    differs = (codes != expected) & ~np.repeat(is_nan, 32, axis=-1)
    is_written = np.repeat(other_scales > 0, 32, axis=-1)
    assert differs.sum() < 1e-3 * is_written.sum() + 2
    assert np.abs(codes - expected)[differs].max(initial=0) <= 1


@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (128, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gpu_writes_the_codes_of_a_token_and_nothing_else(head_size, rotary, dtype):
    args = appended(zeros((9, 2, 4, head_size), dtype, INT4), rotary, 6, [[5, 33], [7, 12], [34, 20]], dtype)
    got = rotate_append_gpu.rotate_append(*args, interpret=True)
    assert_codes_of_token(got, kernels.rotate_append(*args, implementation="reference"), dtype)


@pytest.mark.parametrize(("rotary", "dtype"), [(128, jnp.float32), (64, jnp.bfloat16)])
def test_a_tpu_writes_the_codes_of_a_token_and_nothing_else(rotary, dtype):
    """Two rows of lanes to a page, and a token of the null page."""
    pool = zeros((9, 2, 256, 128), dtype, INT4)
    args = appended(pool, rotary, 5, [[256 * 5 + 127, 256 * 3], [256 * 7 + 129, 256 * 2 + 255], [3, 256 * 8 + 128]], dtype)
    with tpu_interpreter.watched() as interpreter:
        got = rotate_append_tpu.rotate_append(*args, interpret=interpreter)
    want, *others = kernels.rotate_append(*args, implementation="reference")
    want = jax.tree.map(lambda x, y: x.at[0].set(y[0]), want, pool)  # the null page may hold anything, and is not written
    assert_codes_of_token(got, (want, *others), dtype)
    np.testing.assert_array_equal(np.asarray(got[0].scale == 0), np.asarray(want.scale == 0))


def test_a_gpu_writes_no_heads_of_one_group():
    args = kernels.KERNELS["rotate_append"].shapes.arguments(MODEL._replace(head_size=32), SMALL)
    assert "at least 64 channels; got 32" in rotate_append_gpu.why_not(*args)


def test_attention_to_bfloat16_queries_is_that_to_the_numbers():
    """In the dtype of an accelerator; the tolerance is bfloat16's."""
    workload = SMALL._replace(dtype=jnp.bfloat16)
    query, pool, *rest = kernels.KERNELS["paged_attention"].shapes.values(MODEL, workload)
    wide = Quantised(pool.codes, pool.scale, pool.format, np.dtype(np.float32))
    got = kernels.paged_attention(query, pool, *rest, implementation="reference")
    want = kernels.paged_attention(query.astype(jnp.float32), dequantise(wide), *rest, implementation="reference")
    assert got[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(got[0].astype(jnp.float32), want[0], atol=0.03)
    np.testing.assert_allclose(got[1], want[1], atol=0.05)


@pytest.mark.parametrize("head_size", [64, 128])
def test_a_tpu_moves_every_bit_of_slots_in_any_order(head_size):
    """Codes of all bytes and scales of all bits, those of NaN too; a row that writes where it reads, and a fresh page."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (9, 2, 256, head_size // 2)).astype(np.uint8)
    scale = rng.integers(0, 1 << 16, (9, 2, 256, head_size // 32)).astype(np.uint16)
    pool = Quantised(jnp.asarray(codes), jnp.asarray(scale), INT4, np.dtype(np.float32))
    slots = np.stack([rng.permutation(512), np.r_[rng.integers(0, 512, 300), np.full(212, -1)]]).astype(np.int32)
    source, target = np.array([[5, 2], [7, 3]], np.int32), np.array([[2, 5], [8, 0]], np.int32)
    with tpu_interpreter.watched() as interpreter:
        got = take_slots_tpu.take_slots(pool, *map(jnp.asarray, (slots, source, target)), interpret=interpreter)
    for old, new in ((codes, got.codes), (scale, got.scale)):
        wanted = old.copy()
        for row, at in np.ndindex(slots.shape):
            taken, page = slots[row, at], target[row, at // 256]
            if page and taken >= 0:
                wanted[page, :, at % 256] = old[source[row, taken // 256], :, taken % 256]
        np.testing.assert_array_equal(new, wanted)
