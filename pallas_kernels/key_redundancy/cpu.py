"""Plain XLA for a CPU: two rows at a time, in few large products.

On two cores, a product of 1,152 by 64 by 1,152 runs at twice the rate of one with 128 rows, so it would not help to compute
half of the symmetric matrix in small blocks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.key_redundancy import reference

BLOCK = 1280  # slots
GROUP = 2  # rows


def key_redundancy(
    key_RSH: Float[Array, "R S H"], is_filled: Bool[Array, "R S"], threshold: float, exempt: int, exempt_first: bool
) -> Float[Array, "R S"]:
    """See `pallas_kernels.key_redundancy`."""

    def split(x: Array) -> Array:  # the last group is padded with empty rows
        return jnp.pad(x, [(0, -x.shape[0] % GROUP)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, GROUP, *x.shape[1:])

    def of_group(group: tuple[Array, Array]) -> Array:
        return reference.key_redundancy(*group, threshold, exempt, exempt_first, BLOCK, add_in_place)

    redundancy = jax.lax.map(of_group, (split(key_RSH), split(is_filled)))
    return redundancy.reshape(-1, key_RSH.shape[1])[: key_RSH.shape[0]]


def add_in_place(
    total_RS: Float[Array, "R S"], slot_RS: Int[Array, "R S"], value_RS: Float[Array, "R S"]
) -> Float[Array, "R S"]:
    """See `reference.add_at`; the scatter of a CPU adds in order."""
    row_R1 = jnp.arange(total_RS.shape[0], dtype=jnp.int32)[:, None]
    return total_RS.at[row_R1, slot_RS].add(value_RS)
