"""The inputs that both Pallas kernels share: masks, log-weights and averages in a few small arrays.

Each query has its own softmax: with "max" one per position of the window, with "mean" one per position and head. So "mean" is
"max" over one head with G times the queries.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Terms(NamedTuple):
    """The inputs for V queries, each with D heads of which the largest logit counts."""

    query_RDVH: Float[Array, "R D V H"]  # 0 where there is no query
    bias_RS: Float[Array, "R S"]  # added to logits; -inf where a slot is no candidate
    share_RV: Float[Array, "R V"]  # the weight of a query's softmax in the result
    after_V: Int[Array, " V"]  # tokens after the query
    sink_RV: Float[Array, "R V"] | None  # a logit that counts in the query's denominator alone


def terms(
    query: Float[Array, "R G W H"],
    is_candidate: Bool[Array, "R S"],
    is_query: Bool[Array, "R W"],
    log_weight: Float[Array, "R S"] | None,
    sink: Float[Array, "R G"] | None,
    over_group: str,
) -> Terms:
    """The arguments of `pallas_kernels.attention_mass` other than keys and ages."""
    rows, group, window, head_size = query.shape
    query = jnp.where(is_query[:, None, :, None], query, jnp.zeros_like(query))
    bias_RS = jnp.where(is_candidate, 0.0 if log_weight is None else log_weight.astype(jnp.float32), -jnp.inf)
    count_R1 = jnp.maximum(is_query.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)
    share_RV = is_query.astype(jnp.float32) / count_R1
    after_V = jnp.arange(window - 1, -1, -1, dtype=jnp.int32)
    sink_RV = None
    if sink is not None:
        of_heads = sink if over_group == "mean" else sink.max(axis=1, keepdims=True)
        sink_RV = jnp.repeat(of_heads.astype(jnp.float32), window, axis=1)
    if over_group == "mean":
        query = query.reshape(rows, 1, group * window, head_size)
        share_RV, after_V = jnp.tile(share_RV / group, (1, group)), jnp.tile(after_V, group)
    return Terms(query, bias_RS, share_RV, after_V, sink_RV)


def why_not(query: Any, key: Any) -> str | None:
    """Why neither kernel can take these arguments; None when both can."""
    if key.dtype not in (jnp.float32, jnp.bfloat16) or query.dtype != key.dtype:
        return f"queries and keys must both be float32 or bfloat16; got {query.dtype} and {key.dtype}"
    return None
