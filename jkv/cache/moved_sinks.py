"""Sinks at their index in the cache (the positions of StreamingLLM's code), while cached keys keep their true rotation.

StreamingLLM's code rotates each key by its index in the cache. In a window without gaps the distances are the same either way;
only the sinks come closer. RoPE depends only on distances, so it is enough to rotate the query back for the sinks, by the
number of evicted positions between sinks and window. The two groups of slots are attended separately and merged exactly.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MOST_SINKS = 64  # the most sinks that a policy may move: the second attention call reads no more slots


class SinkRules(NamedTuple):
    """The number of moved sinks of each row, and the rotation of the step's queries for them."""

    num_sinks: Int[Array, " B"]
    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]


def merge(
    out: tuple[Float[Array, "*R H"], Float[Array, "*R H"]], log_total: tuple[Float[Array, "*R"], Float[Array, "*R"]]
) -> Float[Array, "*R H"]:
    """Attention over two groups of slots, from the output of each and the log of its softmax denominator."""
    peak = jnp.maximum(*log_total)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    first, second = (jnp.exp(total - peak) for total in log_total)
    total = first + second
    share = jnp.where(total == 0, 0.0, first / jnp.where(total == 0, 1.0, total))[..., None]
    return (out[0].astype(jnp.float32) * share + out[1].astype(jnp.float32) * (1 - share)).astype(out[0].dtype)
