"""What both Pallas kernels are given: masks, log-weights and averages folded into few small arrays.

A softmax of its own belongs to each query ("max": of a window's position, "mean": of a position and head), so "mean" is "max"
over one head with G times the queries.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Terms(NamedTuple):
    """Queries: V of them, each with the heads (D) of which the largest logit counts."""

    query_RDVH: Float[Array, "R D V H"]  # 0 where there is none
    bias_RS: Float[Array, "R S"]  # of logits; -inf where a slot is no candidate
    share_RV: Float[Array, "R V"]  # what a query's softmax adds to the result
    after_V: Int[Array, " V"]  # tokens that came after it


def terms(
    query: Float[Array, "R G W H"],
    is_candidate: Bool[Array, "R S"],
    is_query: Bool[Array, "R W"],
    log_weight: Float[Array, "R S"] | None,
    over_group: str,
) -> Terms:
    """The arguments of `pallas_kernels.attention_mass`, keys and ages apart."""
    rows, group, window, head_size = query.shape
    query = jnp.where(is_query[:, None, :, None], query, jnp.zeros_like(query))
    bias_RS = jnp.where(is_candidate, 0.0 if log_weight is None else log_weight.astype(jnp.float32), -jnp.inf)
    count_R1 = jnp.maximum(is_query.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)
    share_RV = is_query.astype(jnp.float32) / count_R1
    after_V = jnp.arange(window - 1, -1, -1, dtype=jnp.int32)
    if over_group == "mean":
        query = query.reshape(rows, 1, group * window, head_size)
        share_RV, after_V = jnp.tile(share_RV / group, (1, group)), jnp.tile(after_V, group)
    return Terms(query, bias_RS, share_RV, after_V)


def why_not(query: Any, key: Any) -> str | None:
    """Why neither kernel can take these; None when both can."""
    if key.dtype not in (jnp.float32, jnp.bfloat16) or query.dtype != key.dtype:
        return f"queries and keys must both be float32 or bfloat16; got {query.dtype} and {key.dtype}"
    return None
