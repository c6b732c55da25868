"""Plain XLA for a CPU: one row at a time, so that a block of its similarities stays in the processor's cache."""

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.key_redundancy import reference


def key_redundancy(
    key_RSH: Float[Array, "R S H"],
    recency_RS: Int[Array, "R S"],
    is_filled: Bool[Array, "R S"],
    threshold: float,
    exempt: int,
    exempt_first: bool,
) -> Float[Array, "R S"]:
    """See `pallas_kernels.key_redundancy`."""

    def of_row(row: tuple[Array, Array, Array]) -> Float[Array, " S"]:
        key, recency, filled = (x[None] for x in row)
        return reference.key_redundancy(key, recency, filled, threshold, exempt, exempt_first)[0]

    return jax.lax.map(of_row, (key_RSH, recency_RS, is_filled))
