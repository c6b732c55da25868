"""Products of the same rows with one matrix or several: the projections of a decode step, and of a few tokens of each row."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.row_product import native, reference

IMPLEMENTATIONS = {
    "native": Implementation(native.row_product, "cpu", native.why_not),
    "reference": Implementation(reference.row_product),
}


def row_product(
    x: Float[Array, "*B D"],
    *matrices: Any,
    by_output: bool = False,
    dtype: Any = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B _F"], ...]:
    """`x @ matrix` of each matrix [D, F]; with `by_output`, of matrices [F, D]. Sums are in float32. Differentiable.

    `dtype` is that of the results; None means that of the operands. A matrix holds floats, or codes of 8 bits (int8,
    float8_e4m3fn), which count as the floats that they are; a scale for each output is the caller's to multiply.

    On a CPU, a call of a few rows (at most 32, or 128 with bfloat16 and codes) reads each matrix once for all of them, at the
    speed of memory, and adds the inputs up in one order: a row's bits do not depend on how many rows there are. XLA packs the
    matrix first when there are two rows, and turns bfloat16 and codes into an array of floats. A TPU and a GPU leave products
    to XLA, and so does a process that has one.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call("row_product", IMPLEMENTATIONS, implementation, x, *matrices, by_output=by_output, dtype=dtype)
