"""The rotation of heads by Hadamard's matrix, which spreads a large channel evenly over all channels of a head.

The matrix `R` of H channels is Sylvester's, with entries 1 / sqrt(H) and -1 / sqrt(H); H is a power of two. It is orthonormal
and symmetric: norms and products of two rotated vectors are those of the vectors, and a second rotation undoes the first.
Formats of few bits quantise rotated vectors (`pallas_kernels.quantised`), as QuaRot does (arXiv 2404.00456).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(x: Float[Array, "*A H"]) -> Float[Array, "*A H"]:
    """Vectors times the matrix, in their dtype. Sums are exact products added in float32, scaled at the end.

    Raises:
      ValueError: H is not a power of two.

    >>> rotate(jnp.asarray([2.0, 0.0, 0.0, 0.0]))
    Array([1., 1., 1., 1.], dtype=float32)
    """
    if not is_power_of_two(size := x.shape[-1]):
        raise ValueError(f"Hadamard's matrix here has a power of two of channels; got {size}. Pad the heads, or do not rotate.")
    turned = jnp.einsum(
        "...h,hd->...d", x, signs(size, x.dtype), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return (turned * size**-0.5).astype(x.dtype)


def signs(size: int, dtype: jnp.dtype) -> Float[Array, "H H"]:
    """Sylvester's matrix of 1 and -1: an entry is -1 where the numbers of row and column have an odd count of common bits.

    It is computed in the program: a constant for every call would make the text of a program long.
    """
    number = jnp.arange(size, dtype=jnp.int32)
    is_odd = jax.lax.population_count(number[:, None] & number) % 2 == 1
    return jnp.where(is_odd, -1, 1).astype(dtype)


def is_power_of_two(number: int) -> bool:
    """Whether a whole number is 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0
