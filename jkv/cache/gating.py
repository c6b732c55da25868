"""Stores a number beside each new slot while a layer runs: what the engine's gate computes of the token's hidden state."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.cache.pool import EMPTY, Pool

GATE = "gate"  # slot data


def store_gate(pool: Pool, layer: int, row: Int[Array, " R"], num_new: Int[Array, " R"], number: Float[Array, "R T K"]) -> Pool:
    """The pool with the numbers of each row's next `num_new` (at most T) tokens, which `advance` counts later."""
    offset = jnp.arange(number.shape[1], dtype=jnp.int32)
    slot = pool.length[layer, row][..., None] + offset
    if pool.vacant_slot is not None:
        vacant_slot = pool.vacant_slot[layer, row][..., None]
        slot = jnp.where(vacant_slot == EMPTY, slot, vacant_slot)
    slot = jnp.where(offset < num_new[:, None, None], slot, pool.max_slots)
    head = jnp.arange(number.shape[2], dtype=jnp.int32)[:, None]
    slots = pool.slot_data[GATE].at[layer, row[:, None, None], head, slot]
    return pool.replace(slot_data=pool.slot_data | {GATE: slots.set(jnp.moveaxis(number, 1, 2), mode="drop")})
