"""Plain XLA for a CPU: two rows at a time and half of the matrix, so that a block of it stays in the processor's cache.

The matrix is symmetric: a block on or above the diagonal tells its rows about its columns and its columns about its rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.key_redundancy import reference

BLOCK = 288  # slots
GROUP = 2  # rows, one for each core of a small machine


def key_redundancy(
    key_RSH: Float[Array, "R S H"],
    recency_RS: Int[Array, "R S"],
    is_filled: Bool[Array, "R S"],
    threshold: float,
    exempt: int,
    exempt_first: bool,
) -> Float[Array, "R S"]:
    """See `pallas_kernels.key_redundancy`."""
    settings: dict[str, Any] = {"threshold": threshold, "exempt": exempt, "exempt_first": exempt_first}
    of_group = functools.partial(reference.key_redundancy, **settings, find=latest_alike)

    def split(x: Array) -> Array:  # rows that fill the last group are empty
        return jnp.pad(x, [(0, -x.shape[0] % GROUP)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, GROUP, *x.shape[1:])

    groups = tuple(map(split, (key_RSH, recency_RS, is_filled)))
    return jax.lax.map(lambda group: of_group(*group), groups).reshape(-1, key_RSH.shape[1])[: key_RSH.shape[0]]


def latest_alike(
    key_RSH: Float[Array, "R S H"], rank_RS: Int[Array, "R S"], below_RS: Int[Array, "R S"] | None, threshold: float
) -> Int[Array, "R S"]:
    """See `reference.latest_alike`."""
    num_slots = key_RSH.shape[1]
    rank_RS = rank_RS.astype(jnp.float32)
    best_RS = jnp.full(rank_RS.shape, -1.0)
    for start in range(0, num_slots, BLOCK):
        end = min(start + BLOCK, num_slots)
        slot = jnp.arange(start, num_slots, dtype=jnp.int32)
        rows, columns = slice(start, end), slice(start, None)
        similarity_RIJ = jnp.einsum("rih,rjh->rij", key_RSH[:, rows], key_RSH[:, columns])
        is_alike_RIJ = (similarity_RIJ > threshold) & (slot[: end - start, None] != slot)
        from_rows_RIJ, from_columns_RIJ = rank_RS[:, rows, None], rank_RS[:, None, columns]
        for_columns_RIJ = for_rows_RIJ = is_alike_RIJ
        if below_RS is not None:
            for_columns_RIJ = is_alike_RIJ & (from_rows_RIJ < below_RS[:, None, columns].astype(jnp.float32))
            for_rows_RIJ = is_alike_RIJ & (from_columns_RIJ < below_RS[:, rows, None].astype(jnp.float32))
        best_RS = best_RS.at[:, columns].max(jnp.where(for_columns_RIJ, from_rows_RIJ, -1.0).max(axis=1))
        best_RS = best_RS.at[:, rows].max(jnp.where(for_rows_RIJ, from_columns_RIJ, -1.0).max(axis=2))
    return best_RS.astype(jnp.int32)
