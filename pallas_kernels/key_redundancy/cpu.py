"""Plain XLA for a CPU: two rows at a time and half of the matrix, so that a block of it stays in the processor's cache.

The matrix is symmetric: a block on or above the diagonal tells its rows about its columns and its columns about its rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.key_redundancy import reference

BLOCK = 128  # slots
GROUP = 2  # rows: on two cores a fifth faster than one or four


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
    of_group = functools.partial(reference.key_redundancy, **settings, find=latest_alike, add=add_in_place)

    def split(x: Array) -> Array:  # rows that fill the last group are empty
        return jnp.pad(x, [(0, -x.shape[0] % GROUP)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, GROUP, *x.shape[1:])

    groups = tuple(map(split, (key_RSH, recency_RS, is_filled)))
    return jax.lax.map(lambda group: of_group(*group), groups).reshape(-1, key_RSH.shape[1])[: key_RSH.shape[0]]


def latest_alike(
    key_RSH: Float[Array, "R S H"], rank_RS: Int[Array, "R S"], below_RS: Int[Array, "R S"] | None, threshold: float
) -> Int[Array, "R S"]:
    """See `reference.latest_alike`."""
    num_slots = rank_RS.shape[1]
    padding = [(0, 0), (0, -num_slots % BLOCK)]
    key_RSH = jnp.pad(key_RSH, [*padding, (0, 0)])
    rank_RS = jnp.pad(rank_RS, padding, constant_values=-1).astype(jnp.float32)
    below_RS = None if below_RS is None else jnp.pad(below_RS, padding).astype(jnp.float32)
    offset = jnp.arange(BLOCK, dtype=jnp.int32)

    def look(best_RS: Float[Array, "R S"], starts: Int[Array, "2"]) -> tuple[Float[Array, "R S"], None]:
        def rows(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, starts[0], BLOCK, axis=1)

        def columns(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, starts[1], BLOCK, axis=1)

        is_alike_RIJ = jnp.einsum("rih,rjh->rij", rows(key_RSH), columns(key_RSH)) > threshold
        is_alike_RIJ &= (starts[0] + offset)[:, None] != starts[1] + offset
        for_columns_RIJ = for_rows_RIJ = is_alike_RIJ
        if below_RS is not None:
            for_columns_RIJ = is_alike_RIJ & (rows(rank_RS)[..., None] < columns(below_RS)[:, None])
            for_rows_RIJ = is_alike_RIJ & (columns(rank_RS)[:, None] < rows(below_RS)[..., None])
        of_columns_RJ = jnp.where(for_columns_RIJ, rows(rank_RS)[..., None], -1.0).max(axis=1)
        of_rows_RI = jnp.where(for_rows_RIJ, columns(rank_RS)[:, None], -1.0).max(axis=2)
        best_RS = jax.lax.dynamic_update_slice_in_dim(best_RS, jnp.maximum(columns(best_RS), of_columns_RJ), starts[1], axis=1)
        best_RS = jax.lax.dynamic_update_slice_in_dim(best_RS, jnp.maximum(rows(best_RS), of_rows_RI), starts[0], axis=1)
        return best_RS, None

    blocks = np.stack(np.triu_indices(rank_RS.shape[1] // BLOCK), axis=-1)
    starts = jnp.asarray(BLOCK * blocks, jnp.int32)
    best_RS, _ = jax.lax.scan(look, jnp.full(rank_RS.shape, -1.0), starts)
    return best_RS[:, :num_slots].astype(jnp.int32)


def add_in_place(
    total_RS: Float[Array, "R S"], slot_RS: Int[Array, "R S"], value_RS: Float[Array, "R S"]
) -> Float[Array, "R S"]:
    """See `reference.add_at`; a CPU adds one after the other."""
    row_R1 = jnp.arange(total_RS.shape[0], dtype=jnp.int32)[:, None]
    return total_RS.at[row_R1, slot_RS].add(value_RS)
