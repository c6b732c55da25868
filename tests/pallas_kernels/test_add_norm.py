"""`add_norm` against NumPy in float64, and its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_norm import gpu, reference

RUNS = {
    "reference": functools.partial(reference.add_norm, epsilon=1e-5),
    "gpu": lambda *args: gpu.add_norm(*args, 1e-5, True),
}
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(params=RUNS)
def add_norm(request):
    return RUNS[request.param]


def random_case(shape, dtype):
    rng = np.random.default_rng(0)
    sizes = (shape, 3.0), (shape, 0.5), (shape[-1:], 1.0)
    return [jnp.asarray(scale * rng.standard_normal(size), dtype) for size, scale in sizes]


@DTYPES
@pytest.mark.parametrize("shape", [(3, 1, 128), (2, 5, 96), (1, 1536), (7, 5)], ids=str)
def test_the_sum_and_its_norm(add_norm, shape, dtype):
    case = random_case(shape, dtype)
    total, normed = add_norm(*case)
    assert total.dtype == normed.dtype == dtype
    np.testing.assert_array_equal(total, case[0] + case[1])
    wide, weight = (np.asarray(x, np.float64) for x in (total, case[2]))
    expected = weight * wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        np.asarray(normed, np.float64), expected, rtol=1e-6 if dtype == jnp.float32 else 2.0**-6, atol=1e-6
    )


def test_a_row_depends_on_no_other(add_norm):
    hidden, added, weight = random_case((4, 96), jnp.float32)
    expected = add_norm(hidden, added, weight)
    for x, y in zip(add_norm(hidden.at[::2].set(jnp.nan), added, weight), expected, strict=True):
        np.testing.assert_array_equal(x[1::2], y[1::2])


def test_the_gradient_of_the_gpu_kernel_is_that_of_plain_xla():
    """Of a loss of both results; the sum flows on beside the norm."""
    case = random_case((2, 3, 40), jnp.float32)
    of_total, of_normed = random_case((2, 3, 40), jnp.float32)[:2]

    def loss(run, *args):
        total, normed = run(*args)
        return jnp.sum(total * of_total + jnp.sin(normed) * of_normed)

    expected, got = (jax.grad(functools.partial(loss, run), argnums=(0, 1, 2))(*case) for run in RUNS.values())
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


def test_arguments_that_the_gpu_kernel_cannot_take_are_refused_with_the_reason():
    hidden, added, weight = random_case((2, 8), jnp.bfloat16)
    assert gpu.why_not(hidden, added, weight, epsilon=1e-5) is None
    assert "one dtype, float32, bfloat16 or float16; got bfloat16, float32 and bfloat16" in gpu.why_not(
        hidden, added.astype(jnp.float32), weight
    )
    wide = jax.ShapeDtypeStruct((2, 16_385), jnp.float32)
    assert "at most 16384 channels; got 16385" in gpu.why_not(wide, wide, jax.ShapeDtypeStruct((16_385,), jnp.float32))
