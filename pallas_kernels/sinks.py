"""Learned sinks: a logit of each query head that adds `exp(sink)` to its softmax's denominator (gpt-oss, arXiv 2508.10925)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def softmax_beside(sink: Float[Array, "*#B 1"], logits: Float[Array, "*B C"], where: Array) -> Float[Array, "*B C"]:
    """The softmax of logits and of one more, the sink's, without the sink's own share."""
    peak = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True, where=where, initial=-jnp.inf), sink)
    peak = jax.lax.stop_gradient(peak)
    weight = jnp.exp(jnp.where(where, logits, -jnp.inf) - peak)
    return weight / (weight.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak))
