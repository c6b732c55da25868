"""`rotate_append` against NumPy, one head at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels.rotate_append import gpu, reference

RUNS = {"reference": reference.rotate_append, "gpu": functools.partial(gpu.rotate_append, interpret=True)}
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
#        rows, query heads, KV heads, head size, rotated channels, page
SIZES = {
    "llama": (3, 8, 2, 128, 128, 16),
    "six_query_heads": (2, 12, 2, 64, 64, 8),
    "phi": (2, 6, 6, 96, 72, 4),
    "odd_group_and_page": (5, 5, 1, 16, 16, 3),
}
ENTRIES = 7  # of the ring, per row


@pytest.fixture(params=RUNS)
def rotate_append(request):
    return jax.jit(RUNS[request.param])


def random_case(batch, num_heads, num_kv_heads, head_size, turned, page_size, dtype, seed=0):
    """Every token has a page of its own; the last row of several is not stored."""
    rng = np.random.default_rng(seed)
    num_pages = 2 * batch * num_kv_heads + 1
    kv = rng.standard_normal((num_pages, 2, page_size, head_size))
    projected = rng.standard_normal((batch, num_heads + 2 * num_kv_heads, head_size))
    angle = rng.uniform(-9, 9, (batch, turned // 2))
    page = 1 + rng.permutation(num_pages - 1)[: batch * num_kv_heads].reshape(batch, num_kv_heads)
    address = page * page_size + rng.integers(0, page_size, page.shape)
    if batch > 1:
        address[-1] = 0
    ring = rng.standard_normal((batch * ENTRIES, num_heads, head_size))
    ring_at = np.arange(batch) * ENTRIES + rng.integers(0, ENTRIES, batch)
    floats = [jnp.asarray(x, dtype) for x in (kv, projected, ring)]
    turn = [jnp.asarray(x, jnp.float32) for x in (np.cos(angle), np.sin(angle))]
    ints = [jnp.asarray(x, jnp.int32) for x in (address, ring_at)]
    return floats[0], floats[1], *turn, ints[0], floats[2], ints[1]


def by_hand(kv, projected, cos, sin, address, ring, ring_at):
    """Queries as complex numbers, then plain loops; the null page is NaN, because anything may be there."""
    kv, projected, cos, sin, ring = (np.array(x, np.float64) for x in (kv, projected, cos, sin, ring))
    address, ring_at = np.asarray(address), np.asarray(ring_at)
    (batch, num_kv_heads), half, page_size = address.shape, cos.shape[1], kv.shape[2]
    num_heads = projected.shape[1] - 2 * num_kv_heads
    turned = projected.copy()
    pairs = (projected[..., :half] + 1j * projected[..., half : 2 * half]) * (cos + 1j * sin)[:, None]
    turned[..., :half], turned[..., half : 2 * half] = pairs.real, pairs.imag
    for b, k in np.ndindex(batch, num_kv_heads):
        page, offset = divmod(int(address[b, k]), page_size)
        kv[page, 0, offset] = turned[b, num_heads + k]
        kv[page, 1, offset] = projected[b, num_heads + num_kv_heads + k]
    kv[0] = np.nan
    for b in range(batch):
        ring[ring_at[b]] = turned[b, :num_heads]
    return kv, turned[:, :num_heads], ring


def assert_agrees(got, expected, dtype):
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == dtype
        x = np.where(np.isnan(y), np.nan, np.asarray(x, np.float64))
        np.testing.assert_allclose(x, y, **{"atol": 2e-6} if dtype == jnp.float32 else {"rtol": 2.0**-7, "atol": 2e-3})


@DTYPES
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_rotates_appends_and_remembers(rotate_append, size, dtype):
    case = random_case(*size, dtype)
    assert_agrees(rotate_append(*case), by_hand(*case), dtype)


def test_what_no_token_goes_to_keeps_its_bits_even_if_it_is_nan(rotate_append):
    kv, *rest = random_case(*SIZES["llama"], jnp.bfloat16)
    kv = jnp.full_like(kv, jnp.nan)
    got, _, ring = rotate_append(kv, *rest)
    is_written = np.zeros(kv.shape[:1] + kv.shape[2:3], bool)
    is_written[np.asarray(rest[3]) // 16, np.asarray(rest[3]) % 16] = True
    is_written[0] = True
    is_nan = np.isnan(np.asarray(got, np.float32))
    assert is_nan[~np.broadcast_to(is_written[:, None], is_nan.shape[:3])].all()
    assert not is_nan[1:][np.broadcast_to(is_written[1:, None], is_nan[1:].shape[:3])].any()
    is_left = np.setdiff1d(np.arange(len(ring)), rest[5])
    np.testing.assert_array_equal(np.asarray(ring)[is_left], np.asarray(rest[4])[is_left])


def test_without_a_ring(rotate_append):
    case = random_case(*SIZES["llama"], jnp.float32)
    kv, query, ring = rotate_append(*case[:5], None, None)
    assert ring is None
    assert_agrees((kv, query), by_hand(*case)[:2], jnp.float32)


def test_addresses_of_all_layers_are_read_at_the_layer(rotate_append):
    case = list(random_case(*SIZES["llama"], jnp.float32))
    expected = by_hand(*case)
    case[4] = jnp.stack([jnp.zeros_like(case[4]), case[4], jnp.full_like(case[4], 16)])
    assert_agrees(rotate_append(*case, jnp.int32(1)), expected, jnp.float32)


def test_arguments_that_the_gpu_kernel_cannot_take_are_refused_with_the_reason():
    kv, projected, *rest = random_case(*SIZES["llama"], jnp.float32)
    assert gpu.why_not(kv, projected, *rest) is None
    assert "float32, bfloat16 or float16; got float32 and int8" in gpu.why_not(kv.astype(jnp.int8), projected, *rest)
    rest[0] = rest[0].astype(jnp.bfloat16)
    assert "must be float32; got bfloat16 and float32" in gpu.why_not(kv, projected, *rest)
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="it is for cuda, and this process computes on cpu"):
            kernels.rotate_append(*random_case(*SIZES["llama"], jnp.float32), implementation="gpu")
