"""The learned sink of a query head: a logit beside the logits of cached keys, with the value 0 (gpt-oss, arXiv 2508.10925).

It is a weight of the layer, so it is nowhere in the cache. Attention over the pages gives the log of its softmax's denominator,
from which the output and the probabilities with the sink follow exactly. It is unrelated to the sinks of policies, which are
the first tokens of a text.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def sink_of_rows(sink: Float[Array, " N"], num_rows: int, num_kv_heads: int) -> Float[Array, "R G"]:
    """The sink of each query head of each row and KV head, in the order of the kernels' rows."""
    return jnp.tile(sink.astype(jnp.float32).reshape(num_kv_heads, -1), (num_rows, 1))


def add_sink(
    out: Float[Array, "*R H"], log_total: Float[Array, "*R"], sink: Float[Array, "*R"]
) -> tuple[Float[Array, "*R H"], Float[Array, "*R"]]:
    """An attention's output and the log of its denominator, with the sink's term in it.

    In: an output of 6, whose denominator has the log 1, and a sink of 1 -> Out: 3, and the log 1 + log(2).
    """
    share = jax.nn.sigmoid(log_total - sink)
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype), jnp.logaddexp(log_total, sink)
