"""Products of rows with matrices in the blocks of a GGUF file: the projections of a model whose weights stay so."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.block_product import native, reference
from pallas_kernels.blocks import Blocks
from pallas_kernels.dispatch import Implementation, call

IMPLEMENTATIONS = {
    "native": Implementation(native.block_product, "cpu", native.why_not),
    "reference": Implementation(reference.block_product),
}


def block_product(
    x: Float[Array, "*B D"], *matrices: Blocks, dtype: Any = None, implementation: str | None = None
) -> tuple[Float[Array, "*B _F"], ...]:
    """The product of x with each matrix, whose rows of blocks have the D weights of an output. Differentiable by x.

    Sums are in float32. `dtype` is that of the results; None means that of x.

    On a CPU, C++ reads the blocks once for all rows, whatever their number, and adds up in one order: a row's bits do not
    depend on how many rows there are. Elsewhere the matrix becomes floats in each call.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call("block_product", IMPLEMENTATIONS, implementation, x, *matrices, dtype=dtype)
