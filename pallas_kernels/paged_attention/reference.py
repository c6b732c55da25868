"""Plain XLA: gathers the keys and values of each row, then computes two products.

On a CPU, two gathers are 3-8x faster than one gather and slices of it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def paged_attention(
    query_RGH: Float[Array, "R G H"],
    kv: Float[Array, "P 2 page H"],
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"],
    log_weight: Float[Array, "R S"] | None,
    with_logits: bool,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"], Float[Array, "R G S"] | None]:
    """See `pallas_kernels.paged_attention`."""
    rows, max_pages = page_table.shape
    num_slots, head_size = max_pages * kv.shape[2], kv.shape[3]
    key_RSH = kv.at[page_table, 0].get(mode="promise_in_bounds").reshape(rows, num_slots, head_size)
    value_RSH = kv.at[page_table, 1].get(mode="promise_in_bounds").reshape(rows, num_slots, head_size)
    is_filled_RS = jnp.arange(num_slots, dtype=length.dtype) < length[:, None]
    if log_weight is not None:
        is_filled_RS &= log_weight > -jnp.inf

    logits_RGS = jnp.einsum("rgh,rsh->rgs", query_RGH, key_RSH, preferred_element_type=jnp.float32) * head_size**-0.5
    if log_weight is not None:
        logits_RGS = logits_RGS + log_weight[:, None]
    logits_RGS = jnp.where(is_filled_RS[:, None], logits_RGS, -jnp.inf)
    peak_RG1 = jnp.max(logits_RGS, axis=-1, keepdims=True)
    peak_RG1 = jnp.where(peak_RG1 == -jnp.inf, 0.0, peak_RG1)  # the row reads nothing
    weight_RGS = jnp.exp(logits_RGS - peak_RG1)
    total_RG = weight_RGS.sum(axis=-1)

    value_RSH = jnp.where(is_filled_RS[..., None], value_RSH, 0)  # 0 * NaN is NaN: stale slots must not be multiplied
    out_RGH = jnp.einsum("rgs,rsh->rgh", weight_RGS.astype(value_RSH.dtype), value_RSH, preferred_element_type=jnp.float32)
    out_RGH = out_RGH / jnp.where(total_RG == 0, 1.0, total_RG)[..., None]
    log_total_RG = jnp.log(total_RG) + peak_RG1[..., 0]
    return out_RGH.astype(query_RGH.dtype), log_total_RG, logits_RGS if with_logits else None
