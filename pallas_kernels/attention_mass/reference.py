"""Plain XLA: the logits of the whole window at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.sinks import softmax_beside


def attention_mass(
    query_RGWH: Float[Array, "R G W H"],
    key_RSH: Float[Array, "R S H"],
    is_candidate: Bool[Array, "R S"],
    is_query: Bool[Array, "R W"],
    age: Int[Array, "R S"] | None,
    log_weight: Float[Array, "R S"] | None,
    sink: Float[Array, "R G"] | None = None,
    *,
    over_group: str,
) -> Float[Array, "R S"]:
    """See `pallas_kernels.attention_mass`."""
    if log_weight is not None:
        is_candidate &= log_weight > -jnp.inf
    key_RSH = jnp.where(is_candidate[..., None], key_RSH, 0)
    logits_RGWS = jnp.einsum("rgwh,rsh->rgws", query_RGWH, key_RSH, preferred_element_type=jnp.float32)
    logits_RGWS = logits_RGWS * key_RSH.shape[-1] ** -0.5
    if log_weight is not None:
        logits_RGWS = logits_RGWS + jnp.where(is_candidate, log_weight, 0.0)[:, None, None]
    if over_group == "max":
        logits_RGWS = logits_RGWS.max(axis=1, keepdims=True)
    is_seen_RWS = jnp.broadcast_to(is_candidate[:, None], (*is_query.shape, key_RSH.shape[1]))
    if age is not None:
        after_W = jnp.arange(is_query.shape[1] - 1, -1, -1, dtype=age.dtype)
        is_seen_RWS &= age[:, None] >= after_W[:, None]
    is_seen_RGWS = is_seen_RWS[:, None]
    if sink is None:
        probability_RGWS = jax.nn.softmax(logits_RGWS, axis=-1, where=is_seen_RGWS)
    else:
        sink_RG = sink.max(axis=1, keepdims=True) if over_group == "max" else sink
        probability_RGWS = softmax_beside(sink_RG[..., None, None], logits_RGWS, is_seen_RGWS)
    mass_RWS = jnp.where(is_query[..., None], probability_RGWS.mean(axis=1), 0.0)
    mass_RS = mass_RWS.sum(axis=1) / jnp.maximum(is_query.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)
    return jnp.where(is_candidate, mass_RS, 0.0)
