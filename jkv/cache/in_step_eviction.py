"""Eviction inside a decode step: each new token evicts one slot, chosen by the attention of the step (H2O, TOVA).

The evicted slot becomes the vacant slot (`jkv.cache.pool`), which the row's next token fills. No key is ever moved.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.pool import EMPTY

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
    added = jnp.where(last_only[:, None, None], 0.0, mass) + probability.sum(axis=2)
    return jnp.where(is_new[..., None], added, mass)


def choose_victim(
    rules: StepRules,
    layer: int,
    mass: Float[Array, "B K S"],
    position: Int[Array, "B K S"],
    newest: Int[Array, " B"],
    goes_on: Bool[Array, " B"],
) -> Int[Array, "B K"]:
    """The unprotected slot with the least mass, in rows that have a next step and more slots than their budget; else EMPTY.

    `position` is EMPTY in empty slots. `newest` is the position of the step's token.
    """
    worth = jnp.where(rules.is_per_layer[:, None, None], mass.mean(axis=1, keepdims=True), mass)
    is_recent = newest[:, None, None] - position < rules.recent[:, None, None]
    is_protected = is_recent | (position < rules.sinks[:, None, None]) | (position == EMPTY)
    victim = jnp.argmin(jnp.where(is_protected, jnp.inf, worth), axis=-1).astype(jnp.int32)
    filled = (position != EMPTY).sum(axis=-1, dtype=jnp.int32)
    return jnp.where((filled > rules.budget[layer][:, None]) & goes_on[:, None], victim, EMPTY)
