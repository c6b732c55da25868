"""Plain XLA for a CPU: a few rows and a block of their pages at a time, up to the end of the longest of these rows.

The work depends on the lengths of rows, not on the width of their tables, and the keys and values of a block stay in the
processor's cache between gather and product. A block beyond a row's length multiplies its sums by exactly 1 and adds exactly 0,
so the bits of a row depend neither on its neighbours' lengths nor on the width of the table. The trip count is dynamic, for
which a GPU would wait on the host: there the reference runs. Keys are the left operand of their product: on a CPU, XLA's
matrix-vector products run twice as fast over contiguous rows of the left operand.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.reference import longest, only_own, slots_of
from pallas_kernels.quantised import Numbers

BLOCK = 128  # slots
GROUP = 8  # rows


def paged_attention(
    query_RGH: Float[Array, "R G H"],
    kv: Numbers,
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"] | Int[Array, "R T"],
    log_weight: Float[Array, "R S"] | None,
    with_logits: bool,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"], Float[Array, "R G S"] | None]:
    """See `pallas_kernels.paged_attention`."""
    (rows, max_pages), page_size = page_table.shape, kv.shape[2]
    length = jnp.clip(length, 0, max_pages * page_size)  # it bounds the loop
    block_pages = -(-BLOCK // page_size)
    padding = -max_pages % block_pages
    page_table = jnp.pad(page_table, [(0, 0), (0, padding)])
    if log_weight is not None:
        log_weight = jnp.pad(log_weight, [(0, 0), (0, padding * page_size)])
    run = functools.partial(attend_group, kv, block_pages, with_logits)
    args = query_RGH, page_table, length, log_weight
    if rows > GROUP:

        def split(x: Array) -> Array:  # the last group is padded with empty rows
            return jnp.pad(x, [(0, -rows % GROUP)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, GROUP, *x.shape[1:])

        out, log_total, logits = jax.lax.map(run, jax.tree.map(split, args))
        out, log_total, logits = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], (out, log_total, logits))
    else:
        out, log_total, logits = run(args)
    return out, log_total, logits[..., : max_pages * page_size] if with_logits else None


def attend_group(
    kv: Numbers,
    block_pages: int,
    with_logits: bool,
    group: tuple[Float[Array, "R G H"], Int[Array, "R MP"], Int[Array, " R"] | Int[Array, "R T"], Float[Array, "R S"] | None],
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"], Float[Array, "R G S"] | None]:
    """Attends for a group of rows, whose tables are whole blocks."""
    query_RGH, page_table, length, log_weight = group
    rows, heads, head_size = query_RGH.shape
    num_slots = block_pages * kv.shape[2]
    offset = jnp.arange(num_slots, dtype=length.dtype)

    def attend(block: Int[Array, ""], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        peak_RG1, total_RG1, out_RGH, *seen = carry
        page = jax.lax.dynamic_slice_in_dim(page_table, block * block_pages, block_pages, axis=1)
        (key_RSH, key_scale_RS), (value_RSH, value_scale_RS) = (slots_of(kv, page, half) for half in (0, 1))
        slot_S = block * num_slots + offset
        is_filled_RS = slot_S < longest(length)[:, None]
        logits_RSG = jnp.einsum("rsh,rgh->rsg", key_RSH, query_RGH, preferred_element_type=jnp.float32)
        logits_RGS = jnp.swapaxes(logits_RSG, 1, 2) * head_size**-0.5
        if key_scale_RS is not None:
            logits_RGS = logits_RGS * key_scale_RS[:, None]
        if log_weight is not None:
            weight_RS = jax.lax.dynamic_slice_in_dim(log_weight, block * num_slots, num_slots, axis=1)
            logits_RGS = logits_RGS + weight_RS[:, None]
            is_filled_RS &= weight_RS > -jnp.inf
        logits_RGS = only_own(jnp.where(is_filled_RS[:, None], logits_RGS, -jnp.inf), slot_S, length)
        seen = [jax.lax.dynamic_update_slice_in_dim(all_RGS, logits_RGS, block * num_slots, axis=2) for all_RGS in seen]
        new_peak_RG1 = jnp.maximum(peak_RG1, jnp.max(logits_RGS, axis=-1, keepdims=True))
        base_RG1 = jnp.where(new_peak_RG1 == -jnp.inf, 0.0, new_peak_RG1)  # the row reads nothing so far
        weight_RGS, scale_RG1 = jnp.exp(logits_RGS - base_RG1), jnp.exp(peak_RG1 - base_RG1)
        value_RSH = jnp.where(is_filled_RS[..., None], value_RSH, 0)  # 0 * NaN is NaN: stale slots must not be multiplied
        share_RGS = weight_RGS
        if value_scale_RS is not None:
            share_RGS = weight_RGS * jnp.where(is_filled_RS, value_scale_RS, 0)[:, None]
        added_RGH = jnp.einsum("rgs,rsh->rgh", share_RGS.astype(value_RSH.dtype), value_RSH, preferred_element_type=jnp.float32)
        total_RG1 = total_RG1 * scale_RG1 + weight_RGS.sum(axis=-1, keepdims=True)
        return new_peak_RG1, total_RG1, out_RGH * scale_RG1 + added_RGH, *seen

    num_blocks = (jnp.max(length) + num_slots - 1) // num_slots
    start: tuple[Array, ...] = (
        jnp.full((rows, heads, 1), -jnp.inf, jnp.float32),
        jnp.zeros((rows, heads, 1), jnp.float32),
        jnp.zeros((rows, heads, head_size), jnp.float32),
    )
    if with_logits:
        start += (jnp.full((rows, heads, page_table.shape[1] * kv.shape[2]), -jnp.inf, jnp.float32),)
    peak_RG1, total_RG1, out_RGH, *seen = jax.lax.fori_loop(0, num_blocks, attend, start)
    out_RGH = out_RGH / jnp.where(total_RG1 == 0, 1.0, total_RG1)
    log_total_RG = (jnp.log(total_RG1) + jnp.where(peak_RG1 == -jnp.inf, 0.0, peak_RG1))[..., 0]
    return out_RGH.astype(query_RGH.dtype), log_total_RG, seen[0] if seen else None
