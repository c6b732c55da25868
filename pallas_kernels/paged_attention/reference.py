"""Plain XLA: gathers the keys and values of each row, then computes two products.

On a CPU, two gathers are 3-8x faster than one gather and slices of it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised import Numbers, factors, take


def paged_attention(
    query_RGH: Float[Array, "R G H"],
    kv: Numbers,
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"] | Int[Array, "R T"],
    log_weight: Float[Array, "R S"] | None,
    with_logits: bool,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"], Float[Array, "R G S"] | None]:
    """See `pallas_kernels.paged_attention`."""
    max_pages = page_table.shape[1]
    num_slots, head_size = max_pages * kv.shape[2], kv.shape[3]
    (key_RSH, key_scale_RS), (value_RSH, value_scale_RS) = (slots_of(kv, page_table, half) for half in (0, 1))
    slot_S = jnp.arange(num_slots, dtype=length.dtype)
    is_filled_RS = slot_S < longest(length)[:, None]
    if log_weight is not None:
        is_filled_RS &= log_weight > -jnp.inf

    logits_RGS = jnp.einsum("rgh,rsh->rgs", query_RGH, key_RSH, preferred_element_type=jnp.float32) * head_size**-0.5
    if key_scale_RS is not None:
        logits_RGS = logits_RGS * key_scale_RS[:, None]
    if log_weight is not None:
        logits_RGS = logits_RGS + log_weight[:, None]
    logits_RGS = jnp.where(is_filled_RS[:, None], logits_RGS, -jnp.inf)
    logits_RGS = only_own(logits_RGS, slot_S, length)
    peak_RG1 = jnp.max(logits_RGS, axis=-1, keepdims=True)
    peak_RG1 = jnp.where(peak_RG1 == -jnp.inf, 0.0, peak_RG1)  # the row reads nothing
    weight_RGS = jnp.exp(logits_RGS - peak_RG1)
    total_RG = weight_RGS.sum(axis=-1)

    value_RSH = jnp.where(is_filled_RS[..., None], value_RSH, 0)  # 0 * NaN is NaN: stale slots must not be multiplied
    if value_scale_RS is not None:
        weight_RGS = weight_RGS * jnp.where(is_filled_RS, value_scale_RS, 0)[:, None]
    out_RGH = jnp.einsum("rgs,rsh->rgh", weight_RGS.astype(value_RSH.dtype), value_RSH, preferred_element_type=jnp.float32)
    out_RGH = out_RGH / jnp.where(total_RG == 0, 1.0, total_RG)[..., None]
    log_total_RG = jnp.log(total_RG) + peak_RG1[..., 0]
    return out_RGH.astype(query_RGH.dtype), log_total_RG, logits_RGS if with_logits else None


def longest(length: Int[Array, " R"] | Int[Array, "R T"]) -> Int[Array, " R"]:
    """The slots that a row's last place reads."""
    return length if length.ndim == 1 else length[:, -1]


def only_own(
    logits: Float[Array, "R G S"], slot: Int[Array, " S"], length: Int[Array, " R"] | Int[Array, "R T"]
) -> Float[Array, "R G S"]:
    """Logits of slots, with `-inf` where a query is of an earlier place, which does not read the slot."""
    if length.ndim == 1:
        return logits
    length_RG = jnp.repeat(length, logits.shape[1] // length.shape[1], axis=1)
    return jnp.where(slot < length_RG[..., None], logits, -jnp.inf)


def slots_of(
    kv: Numbers, page_table: Int[Array, "R MP"], half: int
) -> tuple[Float[Array, "R S H"], Float[Array, "R S"] | None]:
    """Keys (0) or values (1) of rows, slot by slot, as products take them; and the scales of the products."""
    vectors, scale = factors(take(kv, (page_table, half)))
    rows = len(page_table)
    return vectors.reshape(rows, -1, vectors.shape[-1]), None if scale is None else scale.reshape(rows, -1)
