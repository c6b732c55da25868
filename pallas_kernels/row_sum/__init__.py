"""Sums over the last axis, such as those of squares in norms."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.row_sum import native, reference

IMPLEMENTATIONS = {
    "native": Implementation(native.row_sum, "cpu", native.why_not),
    "reference": Implementation(reference.row_sum),
}


def row_sum(x: Float[Array, "*B D"], *, of_squares: bool = False, implementation: str | None = None) -> Float[Array, "*B 1"]:
    """The sum of each row, or of its squares, in float32. Differentiable.

    On a CPU, a row is added up in one order, so its bits do not depend on how many rows there are: XLA adds up 16 rows or more
    in another order than fewer. A TPU and a GPU leave sums to XLA, which fuses them, and so does a process that has one.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call("row_sum", IMPLEMENTATIONS, implementation, x, of_squares=of_squares)
