"""Matrices in the blocks of GGUF files: their numbers against the package gguf, and C++ products against NumPy in float64."""

import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.block_product import native, reference
from pallas_kernels.block_product.shapes import random_rows
from pallas_kernels.blocks import BLOCKS, Blocks, decoded
from pallas_kernels.row_product import native as row_product

INPUTS, OUTPUTS = 512, 37  # with a rest of outputs, of tiles and of vectors of rows


@pytest.fixture(autouse=True)
def has_library() -> None:
    if reason := native.why_no_library() or row_product.why_no_library():
        pytest.skip(reason)


def matrix_of(kind: str, outputs: int = OUTPUTS) -> Blocks:
    num_bytes = INPUTS // BLOCKS[kind].weights * BLOCKS[kind].bytes
    return Blocks(jnp.asarray(random_rows(np.random.default_rng(outputs), (outputs, num_bytes), kind)), kind)


def numbers_of(matrix: Blocks) -> np.ndarray:
    """[F, D], by the package gguf."""
    return gguf.dequantize(np.asarray(matrix.data), gguf.GGMLQuantizationType(BLOCKS[matrix.kind].kind))


def rows_of(count: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(70, INPUTS))[:count], jnp.float32)


@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers_are_bit_by_bit_what_gguf_decodes(kind: str) -> None:
    matrix = matrix_of(kind)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(BLOCKS[kind].kind)]
    assert (BLOCKS[kind].weights, BLOCKS[kind].bytes, matrix.shape) == (*size, (INPUTS, OUTPUTS))
    for data in (matrix.data, jnp.zeros_like(matrix.data)):
        found = jax.jit(functools.partial(decoded, kind=kind))(data)
        expected = numbers_of(matrix.replace(data=data))
        np.testing.assert_array_equal(np.asarray(found).view(np.int32), expected.view(np.int32))
    np.testing.assert_array_equal(matrix.dequantised, numbers_of(matrix).T)
    np.testing.assert_array_equal(matrix.first_rows(16)[0], numbers_of(matrix)[:16, 0])
    as_table = matrix.replace(is_transposed=False)
    np.testing.assert_array_equal(as_table.first_rows(16)[0], numbers_of(matrix)[0])
    assert as_table.shape == (OUTPUTS, INPUTS)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_row_of_a_product_has_the_bits_of_a_product_with_floats_among_any_others(kind: str) -> None:
    matrix = matrix_of(kind)
    floats, x = numbers_of(matrix), rows_of(70)
    exact, bound = (np.asarray(turn(x), np.float64) @ turn(floats).T.astype(np.float64) for turn in (np.asarray, np.abs))
    (alone,) = jax.vmap(lambda row: native.block_product(row[None], matrix))(x)
    assert (np.abs(alone[:, 0] - exact) <= 1e-6 * bound).all()
    (as_floats,) = row_product.row_product(x[:32], jnp.asarray(floats), by_output=True)
    np.testing.assert_array_equal(alone[:32, 0], as_floats)
    for count in (1, 2, 3, 4, 5, 7, 16, 17, 70):
        np.testing.assert_array_equal(native.block_product(x[:count], matrix)[0], alone[:count, 0])


def test_matrices_of_several_types_are_one_call_and_equal_calls_of_their_own() -> None:
    x, matrices = rows_of(3), [matrix_of("Q5_0"), matrix_of("Q8_0", 640), matrix_of("Q6_K", 1)]
    for found, matrix in zip(native.block_product(x, *matrices), matrices, strict=True):
        np.testing.assert_array_equal(found, native.block_product(x, matrix)[0])
    run = functools.partial(pallas_kernels.block_product, implementation="native")
    assert jax.jit(run).lower(x, *matrices).as_text().count("custom_call @jkv_block_product") == 1


def test_the_derivative_is_that_of_a_plain_product() -> None:
    x, matrix = rows_of(6).reshape(2, 3, INPUTS), matrix_of("Q4_K")

    def loss(run, x):
        return jnp.sum(jnp.sin(run(x, matrix)[0]))

    own, plain = (jax.grad(functools.partial(loss, run))(x) for run in (native.block_product, reference.block_product))
    np.testing.assert_allclose(own, plain, rtol=1e-3, atol=1e-2)
    (half,) = native.block_product(x.astype(jnp.bfloat16), matrix)
    assert (half.shape, half.dtype) == ((2, 3, OUTPUTS), jnp.bfloat16)


def test_what_it_cannot_take_is_said() -> None:
    matrix = matrix_of("Q4_0")
    with pytest.raises(ValueError, match="x must be float32 or bfloat16; got float16"):
        pallas_kernels.block_product(rows_of(2).astype(jnp.float16), matrix, implementation="native")
    cut = matrix.replace(data=matrix.data[:, :-1])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"a matrix must have the shape \[37, 288\]; got \[37, 287\]"):
        native.block_product(rows_of(2), cut)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no type 12 of blocks for 500 inputs"):
        native.block_product(rows_of(2)[:, :500], matrix_of("Q4_K"))
