"""Pallas for NVIDIA GPUs: each program reads a few pages of a row, and plain XLA adds up what they leave.

Codes become numbers in registers, by a shift, a mask and four bits of an exponent; scales multiply queries, logits,
probabilities and sums, as in the reference. The page of the next turn is looked up while this one's codes are on their way.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.launch import dot, launch, load, store
from pallas_kernels.sealed import Records, places

PIECE = 512  # slots of a program
MOST_BLOCK = 64  # slots that are read at once
STAGES = 3  # of the pipeline
LEAST = 16  # rows, columns and depth of a product
ADDED = 16.0  # to a code, by the exponent


def why_not(query: Any, records: Any, page_table: Any, num_pages: Any) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if records.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or query.dtype != records.dtype:
        return f"queries and records must both be of float32, bfloat16 or float16; got {query.dtype} and {records.dtype}"
    least = LEAST * 8 // min(records.format.key_bits, records.format.value_bits)
    if not least <= query.shape[2] <= 256:
        return f"heads whose channels share a byte by codes must have {least} to 256 channels; got {query.shape[2]}"
    if max(records.format.key_bits, records.format.value_bits) > 4:
        return f"codes must have at most 4 bits; got {records.format.name}"
    if query.shape[1] > LEAST:
        return f"a KV head must have at most {LEAST} query heads; got {query.shape[1]}"
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def sealed_attention(
    query_RGH: Float[Array, "R G H"],
    records: Records,
    page_table: Int[Array, "R MP"],
    num_pages: Int[Array, " R"],
    interpret: Any = False,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"]]:
    """See `pallas_kernels.sealed_attention`."""
    (rows, group, head_size), max_pages = query_RGH.shape, page_table.shape[1]
    of_piece = max(1, PIECE // records.shape[2])
    pieces = -(-max_pages // of_piece)
    scales = records.scales.reshape(len(records.scales), -1)
    part_RCGH, log_total_RCG = launch(
        functools.partial(attend, records.format.key_bits, records.format.value_bits, of_piece),
        *(query_RGH, page_table, num_pages, records.key, records.value, scales),
        name="sealed_attention",
        grid=(rows, pieces),
        out_shape=[
            jax.ShapeDtypeStruct((rows, pieces, group, head_size), jnp.float32),
            jax.ShapeDtypeStruct((rows, pieces, group), jnp.float32),
        ],
        num_warps=4,
        num_stages=STAGES,
        interpret=interpret,
    )
    log_total_RG = jax.nn.logsumexp(log_total_RCG, axis=1)
    base_RCG = jnp.where(log_total_RG == -jnp.inf, 0.0, log_total_RG)[:, None]
    share_RCG1 = jnp.exp(log_total_RCG - base_RCG)[..., None]
    out_RGH = jnp.where(share_RCG1 > 0, part_RCGH * share_RCG1, 0.0).sum(axis=1)  # what is not read is not written
    return out_RGH.astype(query_RGH.dtype), log_total_RG


def attend(
    key_bits: int,
    value_bits: int,
    of_piece: int,
    query_ref: Any,
    table_ref: Any,
    count_ref: Any,
    key_ref: Any,
    value_ref: Any,
    scale_ref: Any,
    part_ref: Any,
    log_total_ref: Any,
) -> None:
    """Attends to the pages of one piece of a row; keys, values and the output are in parts of channels, one for each shift."""
    row, piece = pl.program_id(0), pl.program_id(1)
    (_, group, head_size), (_, page_size, _) = query_ref.shape, key_ref.shape
    dtype, block = query_ref.dtype, min(MOST_BLOCK, page_size)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    begin = piece * of_piece
    end = lax.min(begin + of_piece, lax.min(load(count_ref.at[row]), table_ref.shape[1]))
    head = jnp.arange(LEAST, dtype=jnp.int32)
    key_channels, value_channels = parts(head_size, key_bits), parts(head_size, value_bits)
    key_step, key_zero, of_key_slot, value_step, value_zero, of_value_channel = places(page_size, head_size)
    is_head_G1 = (head < group)[:, None]
    queries = [
        load(query_ref.at[row, head[:, None], channel[None]], mask=is_head_G1, other=0.0).astype(jnp.float32)
        for channel in key_channels
    ]
    blocks, key_middle, value_middle = page_size // block, (2**key_bits - 1) / 2, (2**value_bits - 1) / 2

    def look_up(index: Any) -> Any:
        at = begin + lax.div(index, blocks)
        return load(table_ref.at[row, at], mask=at < end, other=0)

    def turn(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        page, peak_G, total_G, outs = carry
        ahead = look_up(index + 1)
        slot_S = lax.rem(index, blocks) * block + jnp.arange(block, dtype=jnp.int32)
        keys = numbers(key_ref, page, slot_S, key_bits, dtype)
        values = numbers(value_ref, page, slot_S, value_bits, dtype)
        key_scale_S = half_precision(load(scale_ref.at[page, of_key_slot + slot_S])) * head_size**-0.5
        step_S, zero_S = (half_precision(load(scale_ref.at[page, at + slot_S])) for at in (value_step, value_zero))
        logits_GS: Any = 0.0
        for query_GH, channel, key_SH in zip(queries, key_channels, keys, strict=True):
            step_H, zero_H = (half_precision(load(scale_ref.at[page, at + channel])) for at in (key_step, key_zero))
            added_G = (query_GH * (zero_H + key_middle * step_H)[None]).sum(axis=1)
            scaled_GH = (query_GH * step_H[None]).astype(dtype)
            logits_GS = logits_GS + dot(scaled_GH, key_SH, trans_b=True, precision=precision) + added_G[:, None]
        logits_GS = logits_GS * key_scale_S[None]
        new_peak_G = jnp.maximum(peak_G, jnp.max(logits_GS, axis=1))
        weight_GS, fade_G = jnp.exp(logits_GS - new_peak_G[:, None]), jnp.exp(peak_G - new_peak_G)
        share_GS = (weight_GS * step_S[None]).astype(dtype)
        added_G = (weight_GS * (zero_S + value_middle * step_S)[None]).sum(axis=1)
        new = []
        for out_GH, channel, value_SH in zip(outs, value_channels, values, strict=True):
            of_channel_H = half_precision(load(scale_ref.at[page, of_value_channel + channel]))
            own_GH = dot(share_GS, value_SH, precision=precision) + added_G[:, None]
            new.append(out_GH * fade_G[:, None] + own_GH * of_channel_H[None])
        return ahead, new_peak_G, total_G * fade_G + weight_GS.sum(axis=1), tuple(new)

    start = (
        look_up(jnp.int32(0)),
        jnp.full((LEAST,), -jnp.inf, jnp.float32),
        jnp.zeros((LEAST,), jnp.float32),
        tuple(jnp.zeros((LEAST, channel.size), jnp.float32) for channel in value_channels),
    )
    turns = jnp.maximum(end - begin, 0) * blocks
    _, peak_G, total_G, outs = lax.fori_loop(0, turns, turn, start)
    log_total_G = jnp.where(total_G > 0, jnp.log(jnp.where(total_G > 0, total_G, 1.0)) + peak_G, -jnp.inf)
    store(log_total_ref.at[row, piece, head], log_total_G, mask=head < group)
    for channel, out_GH in zip(value_channels, outs, strict=True):
        out_GH = out_GH / jnp.where(total_G > 0, total_G, 1.0)[:, None]
        store(part_ref.at[row, piece, head[:, None], channel[None]], out_GH, mask=is_head_G1 & (turns > 0))


def parts(head_size: int, bits: int) -> list[Any]:
    """The channels of each part of a head: those whose codes are at the same place in their bytes."""
    width = head_size * bits // 8
    return [first + jnp.arange(width, dtype=jnp.int32) for first in range(0, head_size, width)]


def numbers(ref: Any, page: Any, slot_S: Any, bits: int, dtype: Any) -> list[Any]:
    """The codes of some slots of a page, counted from the middle of their range, in parts of channels."""
    byte = jnp.arange(ref.shape[2], dtype=jnp.int32)
    as_bits = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    wide, place = load(ref.at[page, slot_S[:, None], byte[None]]).astype(as_bits), jnp.finfo(dtype).nmant - 4
    exponent = (jnp.finfo(dtype).maxexp + 3) << jnp.finfo(dtype).nmant  # the bits of 16
    found = []
    for shift in range(0, 8, bits):
        code = (wide >> jnp.asarray(shift, as_bits)) & jnp.asarray(2**bits - 1, as_bits)
        with_16 = (code << jnp.asarray(place, as_bits)) | jnp.asarray(exponent, as_bits)
        found.append(lax.bitcast_convert_type(with_16, dtype) - jnp.asarray(ADDED + (2**bits - 1) / 2, dtype))
    return found


def half_precision(bits: Any) -> Any:
    """The numbers of the bits of float16s."""
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
