"""Pallas for NVIDIA GPUs: several programs share the slots of a row, and their partial softmaxes are then combined.

A decode step has few rows (batch times KV heads), each of which streams its own keys and values, so a row is split into as many
pieces as fill the device. Their number depends on the number of rows and the width of the table alone, and the place of the
splits on the row's length: a row's result does not depend on its neighbours.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.launch import dot, launch, load, store

BLOCK = 64  # slots per iteration of a program
PROGRAMS = 528  # four per multiprocessor of an H200, which has 132
MOST_SPLITS = 64  # per row
LEAST_GROUP = 16  # query heads per product; fewer are padded


def why_not(query: Any, kv: Any, page_table: Any, length: Any, log_weight: Any, with_logits: bool = False) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if kv.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or query.dtype != kv.dtype:
        return f"queries and pool must both be float32, bfloat16 or float16; got {query.dtype} and {kv.dtype}"
    if kv.shape[3] not in (16, 32, 64, 128, 256):
        return f"the head size must be a power of two from 16 to 256; got {kv.shape[3]}"
    if query.shape[1] > LEAST_GROUP:
        return f"a KV head must have at most {LEAST_GROUP} query heads; got {query.shape[1]}"
    return None


def num_splits(num_rows: int, num_slots: int) -> int:
    """Programs per row: as many as fill the device, and at most one per block."""
    return min(MOST_SPLITS, -(-num_slots // BLOCK), -(-PROGRAMS // num_rows))


@functools.partial(jax.jit, static_argnames=("with_logits", "interpret"))
def paged_attention(
    query: Float[Array, "R G H"],
    kv: Float[Array, "P 2 page H"],
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"],
    log_weight: Float[Array, "R S"] | None,
    with_logits: bool,
    interpret: Any = False,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"], Float[Array, "R G S"] | None]:
    """See `pallas_kernels.paged_attention`."""
    num_rows, group, head_size = query.shape
    num_slots = page_table.shape[1] * kv.shape[2]
    splits = num_splits(num_rows, num_slots)
    shapes = [
        jax.ShapeDtypeStruct((num_rows, splits, group, head_size), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, splits, group), jnp.float32),
    ]
    if with_logits:
        shapes.append(jax.ShapeDtypeStruct((num_rows, group, num_slots), jnp.float32))
    weights = [] if log_weight is None else [log_weight]
    part_RCGH, log_total_RCG, *logits = launch(
        functools.partial(attend_part, bool(weights)),
        *(query, kv, page_table, length, *weights),
        name="paged_attention",
        grid=(num_rows, splits),
        out_shape=shapes,
        num_warps=4,
        num_stages=3,
        interpret=interpret,
    )
    out_RGH, log_total_RG = combine(part_RCGH, log_total_RCG)
    return out_RGH.astype(query.dtype), log_total_RG, logits[0] if logits else None


def combine(
    part_RCGH: Float[Array, "R C G H"], log_total_RCG: Float[Array, "R C G"]
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"]]:
    """Combines the softmax of all parts of each row; a part without a slot has weight 0."""
    log_total_RG = jax.nn.logsumexp(log_total_RCG, axis=1)
    base_RG = jnp.where(log_total_RG == -jnp.inf, 0.0, log_total_RG)
    return (part_RCGH * jnp.exp(log_total_RCG - base_RG[:, None])[..., None]).sum(axis=1), log_total_RG


def attend_part(is_weighted: bool, query_ref: Any, kv_ref: Any, table_ref: Any, length_ref: Any, *refs: Any) -> None:
    """Attends to one part of one row."""
    weight_ref, *outputs = refs if is_weighted else (None, *refs)
    part_ref, log_total_ref, *logits_refs = outputs
    row, split, splits = pl.program_id(0), pl.program_id(1), part_ref.shape[1]
    (group, head_size), page_size = query_ref.shape[1:], kv_ref.shape[2]
    num_slots = table_ref.shape[1] * page_size
    head, channel = jnp.arange(LEAST_GROUP, dtype=jnp.int32), jnp.arange(head_size, dtype=jnp.int32)
    is_head = head < group
    precision = lax.Precision.HIGHEST if kv_ref.dtype == jnp.float32 else None
    query_GH = load(query_ref.at[row, head[:, None], channel[None]], mask=is_head[:, None], other=0.0)
    length = load(length_ref.at[row])
    blocks_of_part = lax.div(lax.div(length + BLOCK - 1, BLOCK) + splits - 1, splits)
    begin = lax.min(split * blocks_of_part * BLOCK, length)
    end = lax.min(begin + blocks_of_part * BLOCK, length)

    def attend(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        peak_G, total_G, out_GH = carry
        slot_S = begin + index * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        is_filled_S = slot_S < end
        page_S = load(table_ref.at[row, lax.div(slot_S, page_size)], mask=is_filled_S, other=0)
        if weight_ref is not None:
            weight_S = load(weight_ref.at[row, slot_S], mask=is_filled_S, other=-jnp.inf)
            is_filled_S &= weight_S > -jnp.inf
        at = page_S[:, None], lax.rem(slot_S, page_size)[:, None], channel[None]
        key_SH = load(kv_ref.at[at[0], 0, at[1], at[2]], mask=is_filled_S[:, None], other=0.0)
        value_SH = load(kv_ref.at[at[0], 1, at[1], at[2]], mask=is_filled_S[:, None], other=0.0)
        logits_GS = dot(query_GH, key_SH, trans_b=True, precision=precision) * head_size**-0.5
        if weight_ref is not None:
            logits_GS = logits_GS + weight_S[None]
        logits_GS = jnp.where(is_filled_S[None], logits_GS, -jnp.inf)
        for logits_ref in logits_refs:
            store(logits_ref.at[row, head[:, None], slot_S[None]], logits_GS, mask=is_head[:, None] & (slot_S < end)[None])
        new_peak_G = jnp.maximum(peak_G, jnp.max(logits_GS, axis=1))
        base_G = jnp.where(new_peak_G == -jnp.inf, 0.0, new_peak_G)  # the part reads nothing so far
        weight_GS, scale_G = jnp.exp(logits_GS - base_G[:, None]), jnp.exp(peak_G - base_G)
        added_GH = dot(weight_GS.astype(value_SH.dtype), value_SH, precision=precision)
        return new_peak_G, total_G * scale_G + weight_GS.sum(axis=1), out_GH * scale_G[:, None] + added_GH

    start = (
        jnp.full((LEAST_GROUP,), -jnp.inf, jnp.float32),
        jnp.zeros((LEAST_GROUP,), jnp.float32),
        jnp.zeros((LEAST_GROUP, head_size), jnp.float32),
    )
    peak_G, total_G, out_GH = lax.fori_loop(0, lax.div(end - begin + BLOCK - 1, BLOCK), attend, start)
    out_GH = out_GH / jnp.where(total_G == 0, 1.0, total_G)[:, None]
    log_total_G = jnp.log(total_G) + jnp.where(peak_G == -jnp.inf, 0.0, peak_G)
    store(part_ref.at[row, split, head[:, None], channel[None]], out_GH, mask=is_head[:, None])
    store(log_total_ref.at[row, split, head], log_total_G, mask=is_head)

    # Slots beyond the row's length belong to no part: the parts share the work of clearing their logits.
    def blank(index: Any, _: None) -> None:
        slot_S = length + (index * splits + split) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        for logits_ref in logits_refs:
            nothing = jnp.full((LEAST_GROUP, BLOCK), -jnp.inf, jnp.float32)
            mask = is_head[:, None] & (slot_S < num_slots)[None]
            store(logits_ref.at[row, head[:, None], slot_S[None]], nothing, mask=mask)

    if logits_refs:
        lax.fori_loop(0, lax.div(num_slots - length + splits * BLOCK - 1, splits * BLOCK), blank, None)
