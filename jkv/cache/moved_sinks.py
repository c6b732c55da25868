"""Sinks read at their place in the cache (StreamingLLM's own positions) while every key keeps its true rotation.

The authors rotate each key anew by its place in the cache. A window without gaps keeps its distances either way; only the
first tokens, the sinks, come closer. Attention is a function of distances, so it is enough to turn the query, for the sinks
alone, back by as many positions as were dropped between them and the window: two groups of slots, merged exactly.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MOST_SINKS = 64  # that a policy may move: how far the second look at a row's pages goes


class SinkRules(NamedTuple):
    """Sinks of each row that are read from another position, and how far the step's queries turn for them."""

    num_sinks: Int[Array, " B"]
    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]


def merge(
    out: tuple[Float[Array, "R G H"], Float[Array, "R G H"]], log_total: tuple[Float[Array, "R G"], Float[Array, "R G"]]
) -> Float[Array, "R G H"]:
    """Attention over two groups of slots together, from each group's own output and the log of its softmax's denominator."""
    peak = jnp.maximum(*log_total)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    first, second = (jnp.exp(total - peak) for total in log_total)
    total = first + second
    share = jnp.where(total == 0, 0.0, first / jnp.where(total == 0, 1.0, total))[..., None]
    return (out[0].astype(jnp.float32) * share + out[1].astype(jnp.float32) * (1 - share)).astype(out[0].dtype)
