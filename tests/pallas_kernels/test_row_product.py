"""Products of a few rows: the C++ kernel against NumPy in float64, row by row and bit by bit, and its derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.row_product import native, reference

DTYPES = "float32", "bfloat16", "int8", "float8_e4m3fn"
SIZES = (48, 17), (33, 5), (96, 640)  # [D, F]: with and without a rest, and large enough for several threads


@pytest.fixture(autouse=True)
def has_library() -> None:
    if reason := native.why_no_library():
        pytest.skip(reason)


def matrix_of(inputs: int, outputs: int, dtype: str) -> jax.Array:
    numbers = 30 * np.random.default_rng(outputs).normal(size=(inputs, outputs))
    return jnp.asarray(np.clip(numbers, -127, 127), dtype)


def rows_of(count: int, inputs: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(inputs).normal(size=(32, inputs))[:count], jnp.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_numbers_and_a_row_has_the_same_bits_among_any_others(dtype: str) -> None:
    orders = (False, True) if dtype in ("float32", "bfloat16") else (False,)
    for by_output, (inputs, outputs) in [(by, size) for by in orders for size in SIZES]:
        matrix = matrix_of(inputs, outputs, dtype)
        exact = np.asarray(matrix.astype(jnp.float32), np.float64)
        stored = matrix.T if by_output else matrix
        run = functools.partial(native.row_product, by_output=by_output, dtype=jnp.float32)
        alone = [run(row[None], stored)[0][0] for row in rows_of(13, inputs)]
        for count in (1, 2, 3, 7, 8, 13):
            x = rows_of(count, inputs)
            (found,) = run(x, stored)
            wide = np.asarray(x, np.float64)
            np.testing.assert_array_less(np.abs(found - wide @ exact), 1e-6 * (np.abs(wide) @ np.abs(exact)))
            np.testing.assert_array_equal(found, np.stack(alone[:count]))


def test_matrices_of_one_input_are_one_call_and_equal_calls_of_their_own() -> None:
    x, matrices = rows_of(4, 48), [matrix_of(48, outputs, "float32") for outputs in (17, 640, 1)]
    together = native.row_product(x, *matrices)
    for found, matrix in zip(together, matrices, strict=True):
        np.testing.assert_array_equal(found, native.row_product(x, matrix)[0])
    run = functools.partial(pallas_kernels.row_product, implementation="native")
    assert jax.jit(run).lower(x, *matrices).as_text().count("custom_call @jkv_row_product") == 1


def test_every_code_of_eight_bits_counts_as_the_float_that_it_is() -> None:
    codes = jnp.asarray(np.arange(256), jnp.uint8).view(jnp.float8_e4m3fn)
    one = jnp.ones((1, 1), jnp.float32)
    (of_floats,) = native.row_product(one, codes[None])
    np.testing.assert_array_equal(of_floats[0], codes.astype(jnp.float32))
    whole = jnp.asarray(np.arange(-128, 128), jnp.int8)
    np.testing.assert_array_equal(native.row_product(one, whole[None])[0][0], whole.astype(jnp.float32))


def test_numbers_that_are_not_finite_stay_in_their_own_outputs_and_rows() -> None:
    matrix = matrix_of(32, 24, "float32").at[3, 5].set(jnp.nan).at[4, 6].set(jnp.inf)
    x = rows_of(3, 32).at[1, 0].set(jnp.nan)
    found = np.asarray(native.row_product(x, matrix)[0])
    wanted = np.zeros((3, 24), bool)
    wanted[1], wanted[:, [5, 6]] = True, True
    np.testing.assert_array_equal(~np.isfinite(found), wanted)


def test_results_have_the_asked_dtype_and_the_leading_axes_of_x() -> None:
    x, matrix = rows_of(6, 48).reshape(2, 3, 48).astype(jnp.bfloat16), matrix_of(48, 17, "bfloat16")
    (found,), (wide,) = native.row_product(x, matrix), native.row_product(x, matrix, dtype=jnp.float32)
    assert (found.shape, found.dtype, wide.dtype) == ((2, 3, 17), jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(wide, reference.row_product(x, matrix, dtype=jnp.float32)[0], rtol=1e-5, atol=1e-3)


def test_derivatives_are_those_of_plain_products() -> None:
    x, matrix, codes = rows_of(3, 48), matrix_of(48, 17, "float32"), matrix_of(48, 17, "int8")

    def loss(run, x, matrix):
        (found,), (of_codes,) = run(x, matrix), run(x, codes)
        return jnp.sum(jnp.sin(found)) + jnp.sum(jnp.cos(of_codes))

    own, plain = (jax.grad(functools.partial(loss, run), argnums=(0, 1)) for run in (native.row_product, reference.row_product))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-2), own(x, matrix), plain(x, matrix))
    mapped = jax.vmap(lambda row: native.row_product(row[None], matrix)[0][0])(x)
    np.testing.assert_array_equal(mapped, native.row_product(x, matrix)[0])


@pytest.mark.parametrize(
    ("x", "matrices", "reason"),
    [
        (jnp.zeros((33, 8)), [jnp.zeros((8, 8))], "at most 32 rows of such matrices; got 33"),
        (jnp.zeros((2, 8), jnp.float16), [jnp.zeros((8, 8), jnp.float16)], "x must be float32 or bfloat16; got float16"),
        (jnp.zeros((2, 8)), [jnp.zeros((8, 8)), jnp.zeros((8, 8), jnp.int8)], "one dtype of .*; got float32, int8"),
    ],
)
def test_what_it_cannot_take_is_said_and_left_to_xla(x: jax.Array, matrices: list[jax.Array], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pallas_kernels.row_product(x, *matrices, implementation="native")
    assert len(pallas_kernels.row_product(x, *matrices)) == len(matrices)
