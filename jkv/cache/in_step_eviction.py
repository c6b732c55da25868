"""Eviction inside a decode step: one slot out for one token in, by the attention that the step computes anyway (H2O, TOVA).

The slot that is given up becomes a vacant slot (`jkv.cache.pool`), which the row's next token fills: no key ever moves.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.pool import EMPTY

UNLIMITED = np.iinfo(np.int32).max  # the budget of a row that evicts nothing in its steps


class StepRules(NamedTuple):
    """What each batch row does in its steps."""

    budget: Int[Array, "L B"]  # slots that a step leaves
    sinks: Int[Array, " B"]  # first positions, never dropped
    recent: Int[Array, " B"]  # last positions, never dropped
    forgets: Bool[Array, " B"]  # whether the mass is the last query's (TOVA) or the sum of all (H2O)
    is_per_layer: Bool[Array, " B"]  # whether all KV heads of a layer drop the same


def add_mass(
    mass: Float[Array, "B K S"], logits: Float[Array, "B K G S"], log_total: Float[Array, "B K G"], forgets: Bool[Array, " B"]
) -> Float[Array, "B K S"]:
    """The mass of each slot after one more query: what its group's softmaxes gave the slot, on top of what it had."""
    probability = jnp.where(logits > -jnp.inf, jnp.exp(logits - log_total[..., None]), 0.0)
    return jnp.where(forgets[:, None, None], 0.0, mass) + probability.sum(axis=2)


def choose_victim(
    rules: StepRules,
    layer: int,
    mass: Float[Array, "B K S"],
    position: Int[Array, "B K S"],
    newest: Int[Array, " B"],
    goes_on: Bool[Array, " B"],
) -> Int[Array, "B K"]:
    """The slot of the least mass that is not protected, in rows that go on with more slots than their budget; EMPTY elsewhere.

    `position` is EMPTY in empty slots; `newest` is the position of the step's own token.
    """
    worth = jnp.where(rules.is_per_layer[:, None, None], mass.mean(axis=1, keepdims=True), mass)
    is_recent = newest[:, None, None] - position < rules.recent[:, None, None]
    is_protected = is_recent | (position < rules.sinks[:, None, None]) | (position == EMPTY)
    victim = jnp.argmin(jnp.where(is_protected, jnp.inf, worth), axis=-1).astype(jnp.int32)
    filled = (position != EMPTY).sum(axis=-1, dtype=jnp.int32)
    return jnp.where((filled > rules.budget[layer][:, None]) & goes_on[:, None], victim, EMPTY)
