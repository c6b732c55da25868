"""Eviction inside a decode step: each new token evicts one slot, chosen by the attention of the step (H2O, TOVA).

The evicted slot becomes the vacant slot (`jkv.cache.pool`), which the row's next token fills. No key is ever moved.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.pool import EMPTY
from jkv.model.sharding import sum_over_copies
from pallas_kernels.largest_slots import ROUNDING

UNLIMITED = np.iinfo(np.int32).max  # the budget of a row that evicts nothing inside steps


class StepRules(NamedTuple):
    """The eviction settings of each batch row."""

    budget: Int[Array, "L B"]  # slots after a step
    sinks: Int[Array, " B"]  # first positions, never evicted
    recent: Int[Array, " B"]  # last positions, never evicted
    last_only: Bool[Array, " B"]  # whether the mass is of the last query (TOVA) or the sum over all (H2O)
    is_per_layer: Bool[Array, " B"]  # whether all KV heads of a layer evict the same slot


def add_mass(
    mass: Float[Array, "B K S"],
    is_new: Bool[Array, "B K"],
    logits: Float[Array, "B K G S"],
    log_total: Float[Array, "B K G"],
    last_only: Bool[Array, " B"],
) -> Float[Array, "B K S"]:
    """The mass of each slot after one more query of its row, if there is one: what it had, and the group's probabilities."""
    probability = jnp.where(logits > -jnp.inf, jnp.exp(logits - log_total[..., None]), 0.0)
    added = jnp.where(last_only[:, None, None], 0.0, mass) + sum_over_copies(probability.sum(axis=2))
    return jnp.where(is_new[..., None], added, mass)


def choose_victim(
    rules: StepRules,
    layer: int,
    mass: Float[Array, "B K S"],
    position: Int[Array, "B K S"],
    newest: Int[Array, " B"],
    goes_on: Bool[Array, " B"],
    axis: str | None = None,
) -> Int[Array, "B K"]:
    """The unprotected slot with the least mass, in rows that have a next step and more slots than their budget; else EMPTY.

    Slots whose mass is the least up to `ROUNDING` are ties, and the lowest of them goes.

    `position` is EMPTY in empty slots. `newest` is the position of the step's token. `axis` is that of the mesh that splits the
    KV heads, which are gathered in the order of one device if any row evicts by all heads of a layer.
    """
    of_layer = mean_over_heads(mass) if axis is None else gathered_mean(rules.is_per_layer.any(), mass, axis)
    worth = jnp.where(rules.is_per_layer[:, None, None], of_layer, mass)
    is_recent = newest[:, None, None] - position < rules.recent[:, None, None]
    is_protected = is_recent | (position < rules.sinks[:, None, None]) | (position == EMPTY)
    worth = jnp.where(is_protected, jnp.inf, worth)
    least = worth.min(axis=-1, keepdims=True)
    victim = jnp.argmax(worth <= (1 + ROUNDING) * least, axis=-1).astype(jnp.int32)
    filled = (position != EMPTY).sum(axis=-1, dtype=jnp.int32)
    return jnp.where((filled > rules.budget[layer][:, None]) & goes_on[:, None], victim, EMPTY)


def mean_over_heads(mass: Float[Array, "B K S"]) -> Float[Array, "B 1 S"]:
    """The mean of the KV heads' mass."""
    return mass.mean(axis=1, keepdims=True)


def gathered_mean(is_needed: Bool[Array, ""], mass: Float[Array, "B K S"], axis: str) -> Float[Array, "B 1 S"]:
    """`mean_over_heads` of all shards of a mesh, where it `is_needed`; all shards agree on that."""
    return jax.lax.cond(
        is_needed,
        lambda x: mean_over_heads(jax.lax.all_gather(x, axis, axis=1, tiled=True)),
        lambda x: jnp.zeros_like(x[:, :1]),
        mass,
    )
