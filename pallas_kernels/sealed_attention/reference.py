"""Plain XLA: a block of pages of all rows at a time, with one softmax over all blocks.

Scales never multiply codes. Those of channels multiply queries before the product with the codes, and sums of values after it;
those of slots multiply logits and probabilities; zero points add one number for each page, or each sum. Codes count from the
middle of their range, and zero points with them: products in bfloat16 are then of numbers as small as they can be.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised import take
from pallas_kernels.sealed import Records, bits_of, scales_of, unpacked

BLOCK = 512  # slots

Sums = tuple[Float[Array, "R G 1"], Float[Array, "R G 1"], Float[Array, "R G H"]]  # peak, total, output


def sealed_attention(
    query_RGH: Float[Array, "R G H"], records: Records, page_table: Int[Array, "R MP"], num_pages: Int[Array, " R"]
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"]]:
    """See `pallas_kernels.sealed_attention`; the number of blocks is that of the table."""
    page_table, pages = in_blocks(page_table, records)
    num_blocks = page_table.shape[1] // pages
    return over_blocks(query_RGH, records, page_table, num_pages, pages, num_blocks)


def in_blocks(page_table: Int[Array, "R MP"], records: Records) -> tuple[Int[Array, "R padded"], int]:
    """The table, padded to whole blocks with the null page, and the pages of a block."""
    pages = max(1, BLOCK // records.shape[2])
    return jnp.pad(page_table, [(0, 0), (0, -page_table.shape[1] % pages)]), pages


def over_blocks(
    query_RGH: Float[Array, "R G H"],
    records: Records,
    page_table: Int[Array, "R MP"],
    num_pages: Int[Array, " R"],
    pages: int,
    num_blocks: int | Int[Array, ""],
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"]]:
    """Attention over the first `num_blocks` blocks of `pages` pages."""

    def attend(block: Int[Array, ""], sums: Sums) -> Sums:
        page_RI = jax.lax.dynamic_slice_in_dim(page_table, block * pages, pages, axis=1)
        is_read_RI = block * pages + jnp.arange(pages, dtype=jnp.int32) < num_pages[:, None]
        return with_block(sums, query_RGH, take(records, (page_RI,)), is_read_RI)

    heads = query_RGH.shape[:2]
    peak_RG1, total_RG1 = jnp.full((*heads, 1), -jnp.inf, jnp.float32), jnp.zeros((*heads, 1), jnp.float32)
    start = peak_RG1, total_RG1, jnp.zeros(query_RGH.shape, jnp.float32)
    peak_RG1, total_RG1, out_RGH = jax.lax.fori_loop(0, num_blocks, attend, start)
    out_RGH = out_RGH / jnp.where(total_RG1 == 0, 1.0, total_RG1)
    log_total_RG = (jnp.log(total_RG1) + jnp.where(peak_RG1 == -jnp.inf, 0.0, peak_RG1))[..., 0]
    return out_RGH.astype(query_RGH.dtype), log_total_RG


def with_block(sums: Sums, query_RGH: Float[Array, "R G H"], block: Records, is_read_RI: Array) -> Sums:
    """The sums of the softmax with one more block of pages; those that are not read may hold anything."""
    peak_RG1, total_RG1, out_RGH = sums
    dtype, (key_bits, value_bits) = query_RGH.dtype, bits_of(block)
    key_step_RIH, key_zero_RIH, of_slot_RIS, *of_value = scales_of(block)
    # Of what is not read, 0 * NaN would be NaN.
    value_step_RIS, value_zero_RIS, of_channel_RIH = (jnp.where(is_read_RI[..., None], x, 0) for x in of_value)
    key_middle, value_middle = ((2**bits - 1) / 2 for bits in (key_bits, value_bits))
    key_zero_RIH, value_zero_RIS = key_zero_RIH + key_middle * key_step_RIH, value_zero_RIS + value_middle * value_step_RIS
    key_RISH = unpacked(block.key, key_bits, dtype) - jnp.asarray(key_middle, dtype)
    value_RISH = unpacked(block.value, value_bits, dtype) - jnp.asarray(value_middle, dtype)

    query_RIGH = query_RGH.astype(jnp.float32)[:, None]
    scaled_RIGH = (query_RIGH * key_step_RIH[:, :, None]).astype(dtype)
    logits_RIGS = jnp.swapaxes(products("bsh,bgh->bsg", key_RISH, scaled_RIGH), 2, 3)  # keys left: faster on a CPU
    logits_RIGS = logits_RIGS + (query_RIGH * key_zero_RIH[:, :, None]).sum(axis=-1, keepdims=True)
    logits_RIGS = logits_RIGS * (of_slot_RIS[:, :, None] * query_RGH.shape[-1] ** -0.5)
    logits_RIGS = jnp.where(is_read_RI[..., None, None], logits_RIGS, -jnp.inf)

    new_peak_RG1 = jnp.maximum(peak_RG1, logits_RIGS.max(axis=(1, 3))[..., None])
    base_RG1 = jnp.where(new_peak_RG1 == -jnp.inf, 0.0, new_peak_RG1)  # the row reads nothing so far
    weight_RIGS, fade_RG1 = jnp.exp(logits_RIGS - base_RG1[:, None]), jnp.exp(peak_RG1 - base_RG1)
    added_RIGH = products("bgs,bsh->bgh", (weight_RIGS * value_step_RIS[:, :, None]).astype(dtype), value_RISH)
    added_RIGH = added_RIGH + (weight_RIGS * value_zero_RIS[:, :, None]).sum(axis=-1, keepdims=True)
    added_RGH = (added_RIGH * of_channel_RIH[:, :, None]).sum(axis=1)
    total_RG1 = total_RG1 * fade_RG1 + weight_RIGS.sum(axis=(1, 3))[..., None]
    return new_peak_RG1, total_RG1, out_RGH * fade_RG1 + added_RGH


def products(of: str, left: Float[Array, "R I A B"], right: Float[Array, "R I C D"]) -> Float[Array, "R I E F"]:
    """Products of each page, in float32. Pages of all rows are one axis: XLA for CPU refuses products in bfloat16 over two."""
    product = jnp.einsum(of, *(x.reshape(-1, *x.shape[2:]) for x in (left, right)), preferred_element_type=jnp.float32)
    return product.reshape(*left.shape[:2], *product.shape[1:])
