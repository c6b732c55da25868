"""Plain XLA."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def row_product(
    x: Float[Array, "*B D"], *matrices: Any, by_output: bool = False, dtype: Any = None
) -> tuple[Float[Array, "*B _F"], ...]:
    """See `pallas_kernels.row_product`."""

    def of(matrix: Any) -> Any:
        matrix = matrix.astype(x.dtype) if is_code(matrix) else matrix
        if by_output:
            return jnp.einsum("...d,fd->...f", x, matrix, preferred_element_type=dtype)
        return jnp.matmul(x, matrix, preferred_element_type=dtype)

    return tuple(map(of, matrices))


def is_code(matrix: Any) -> bool:
    """Whether a matrix holds numbers of 8 bits, which every dtype of floats holds exactly."""
    return jnp.dtype(matrix.dtype).itemsize == 1
