"""The ring of each row's last queries, which scores read: the query of position p is at p % W.

A decode step writes a query for every row of the batch, also for one that does not run: over its oldest. A step of T places
writes T. So an engine with such steps has a ring of W + T queries, and what it writes is older than the last W.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def last_queries(
    ring: Float[Array, "L B ring N H"],
    layer: Int[Array, " R"],
    row: Int[Array, " R"],
    num_seen: Int[Array, " R"],
    window: int,
) -> Float[Array, "R N W H"]:
    """The last `window` queries of rows, each in its layer, oldest first."""
    when = num_seen[:, None] - window + jnp.arange(window, dtype=jnp.int32)
    query_RWNH = ring[layer[:, None], row[:, None], when % ring.shape[2]]
    return jnp.moveaxis(query_RWNH, 1, 2)


def oldest_queries(ring: Float[Array, "L B W N H"], num_seen: Int[Array, " B"]) -> Float[Array, "L B N H"]:
    """The query of each row that its next one overwrites."""
    return ring[:, jnp.arange(ring.shape[1], dtype=jnp.int32), num_seen % ring.shape[2]]


def put_back(
    ring: Float[Array, "L B W N H"], oldest: Float[Array, "L B N H"], num_seen: Int[Array, " B"], where: Bool[Array, " B"]
) -> Float[Array, "L B W N H"]:
    """The ring with the oldest queries of some rows again."""
    row = jnp.where(where, jnp.arange(ring.shape[1], dtype=jnp.int32), ring.shape[1])
    return ring.at[:, row, num_seen % ring.shape[2]].set(oldest, mode="drop", unique_indices=True)
