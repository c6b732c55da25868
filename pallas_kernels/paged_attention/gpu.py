"""Pallas for NVIDIA GPUs: as many programs as fit the device share the slots of all rows; a second kernel combines the parts.

A decode step has few rows (batch times KV heads), each of which streams its own keys and values. `pieces` says which program
computes what. Every piece leaves its output and the log of its softmax's denominator, which `combine_row` adds up in the order
of the pieces. Rows of tables that hold one piece have neither list nor second kernel.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import num_resident
from pallas_kernels.launch import dot, launch, load, store
from pallas_kernels.paged_attention.pieces import PIECE, walk
from pallas_kernels.quantised import Format, Numbers, Quantised, numbers_of

TILE_BYTES = 16_384  # the keys of a block, and as much for its values
MOST_BLOCK = 64  # slots of a block
STAGES = 3  # of the pipeline: a block is in use while two others are on their way, one of them into the tile just read
RESIDENT = 3  # programs per multiprocessor: with 168 registers per thread no more fit, and they keep 192 KiB on their way
LEAST_GROUP = 16  # query heads per product; fewer are padded
COMBINED = 16  # pieces that are combined at once
CLEARED = 1024  # logits of a head that are cleared at once


def why_not(
    query: Any, kv: Any, page_table: Any, length: Any, log_weight: Any, layer: Any = None, with_logits: bool = False
) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if kv.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or query.dtype != kv.dtype:
        return f"queries and pool must both be float32, bfloat16 or float16; got {query.dtype} and {kv.dtype}"
    if kv.shape[3] % 16 or not 16 <= kv.shape[3] <= 256:
        return f"the head size must be a multiple of 16 up to 256; got {kv.shape[3]}"
    if query.shape[1] > LEAST_GROUP:
        return f"a KV head must have at most {LEAST_GROUP} query heads; got {query.shape[1]}"
    return None


def whole_head(head_size: int) -> int:
    """The channels of a program's arrays, whose sizes must be powers of two; those beyond the head are not read.

    >>> whole_head(96), whole_head(128)
    (128, 128)
    """
    return 1 << (head_size - 1).bit_length()


def block_size(head_size: int, itemsize: int) -> int:
    """Slots per iteration of a program: as many as a tile holds; products take at least 16."""
    return max(16, min(MOST_BLOCK, TILE_BYTES // (whole_head(head_size) * itemsize)))


def shared_bytes(head_size: int, itemsize: int, query_itemsize: int | None = None) -> int:
    """Shared memory of a program, as compiled: two blocks of keys and values, the queries, and rows of the softmax.

    Codes of 1 byte have scales of 4 bytes beside them; queries have the itemsize of keys if None.
    """
    block, head = block_size(head_size, itemsize), whole_head(head_size)
    slot = head * itemsize + 4 * (itemsize == 1)
    return (STAGES - 1) * 2 * block * slot + LEAST_GROUP * head * (query_itemsize or itemsize) + 2304


def num_pieces(num_slots: int) -> int:
    """Pieces of the longest row of a table."""
    return -(-num_slots // PIECE)


@functools.partial(jax.jit, static_argnames=("with_logits", "programs", "interpret"))
def paged_attention(
    query: Float[Array, "R G H"],
    kv: Numbers,
    page_table: Int[Array, "*L R MP"],
    length: Int[Array, "*L R"],
    log_weight: Float[Array, "*L R S"] | None,
    layer: Int[Array, ""] | int | None = None,
    with_logits: bool = False,
    programs: int | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"], Float[Array, "R G S"] | None]:
    """See `pallas_kernels.paged_attention`. `programs` changes no result; None is as many as the GPU runs at once."""
    num_rows, group, head_size = query.shape
    num_slots = page_table.shape[-1] * kv.shape[2]
    if layer is None:
        page_table, length, log_weight = jax.tree.map(lambda x: x[None], (page_table, length, log_weight))
    layer = jnp.reshape(jnp.int32(0 if layer is None else layer), (1,))
    pieces = num_pieces(num_slots)
    if programs is None:
        item = 1 if isinstance(kv, Quantised) else kv.dtype.itemsize
        programs = num_resident(shared_bytes(head_size, item, query.dtype.itemsize), RESIDENT)
    programs = num_rows if pieces == 1 else min(programs, num_rows * pieces)
    pool, format = ([kv.codes, kv.scale], kv.format) if isinstance(kv, Quantised) else ([kv], None)
    shapes = [
        jax.ShapeDtypeStruct((num_rows, pieces, group, head_size), query.dtype if pieces == 1 else jnp.float32),
        jax.ShapeDtypeStruct((num_rows, pieces, group), jnp.float32),
    ]
    if with_logits:
        shapes.append(jax.ShapeDtypeStruct((num_rows, group, num_slots), jnp.float32))
    weights = [] if log_weight is None else [log_weight]
    part_RCGH, log_total_RCG, *logits = launch(
        functools.partial(attend_share, programs, format, bool(weights)),
        *(query, page_table, length, layer, *pool, *weights),
        name="paged_attention",
        grid=(programs,),
        out_shape=shapes,
        num_warps=4,
        num_stages=STAGES,
        interpret=interpret,
    )
    if pieces == 1:
        return part_RCGH[:, 0], log_total_RCG[:, 0], logits[0] if logits else None
    out_RGH, log_total_RG = launch(
        combine_row,
        *(part_RCGH, log_total_RCG, length, layer),
        name="paged_attention_combine",
        grid=(num_rows, group),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(query.shape[:2], jnp.float32),
        ],
        num_warps=4,
        interpret=interpret,
    )
    return out_RGH, log_total_RG, logits[0] if logits else None


def attend_share(
    programs: int,
    format: Format | None,
    is_weighted: bool,
    query_ref: Any,
    table_ref: Any,
    length_ref: Any,
    layer_ref: Any,
    kv_ref: Any,
    *refs: Any,
) -> None:
    """Attends to a program's pieces, and clears its share of the logits beyond the rows' lengths."""
    scale_ref, *refs = refs if format is not None else (None, *refs)  # type: ignore[assignment]
    weight_ref, *outputs = refs if is_weighted else (None, *refs)
    program, layer = pl.program_id(0), layer_ref[0]
    attend = functools.partial(attend_piece, format, (query_ref, kv_ref, scale_ref, table_ref, layer, weight_ref, *outputs))
    (num_rows, pieces), num_slots = outputs[0].shape[:2], table_ref.shape[2] * kv_ref.shape[2]
    length_of = functools.partial(length_in, length_ref, layer, num_slots)
    if pieces == 1:
        attend(program, jnp.int32(0), length_of(program))
    else:
        block = block_size(kv_ref.shape[3], kv_ref.dtype.itemsize)

        def blocks_of(row_R: Any) -> Any:
            return lax.div(length_of(row_R) + block - 1, block)

        def visit(row: Any, piece: Any, _: None) -> None:
            attend(row, piece, length_of(row))

        walk(blocks_of, num_rows, PIECE // block, program, programs, visit)
    for logits_ref in outputs[2:]:
        clear(logits_ref, length_of, program, programs)


def length_in(length_ref: Any, layer: Any, num_slots: int, row: Any) -> Any:
    """The filled slots of a row of a layer, or of an array of rows; 0 beyond the last row."""
    length = load(length_ref.at[layer, row], mask=row < length_ref.shape[1], other=0)
    return lax.clamp(jnp.zeros_like(length), length, jnp.full_like(length, num_slots))


def attend_piece(format: Format | None, refs: tuple[Any, ...], row: Any, piece: Any, length: Any) -> None:
    """Attends to one piece of one row."""
    query_ref, kv_ref, scale_ref, table_ref, layer, weight_ref, part_ref, log_total_ref, *logits_refs = refs
    (group, head_size), page_size = query_ref.shape[1:], kv_ref.shape[2]
    block = block_size(head_size, kv_ref.dtype.itemsize)
    head, channel = jnp.arange(LEAST_GROUP, dtype=jnp.int32), jnp.arange(whole_head(head_size), dtype=jnp.int32)
    is_head, is_channel = head < group, channel < head_size
    precision = lax.Precision.HIGHEST if query_ref.dtype == jnp.float32 else None
    is_query = is_head[:, None] & is_channel[None]
    query_GH = load(query_ref.at[row, head[:, None], channel[None]], mask=is_query, other=0.0)
    begin = piece * PIECE
    end = lax.min(begin + PIECE, length)

    def look_up(slot_S: Any) -> tuple[Any, Any]:
        """The page and, if there are any, the log-weight of slots."""
        is_filled_S, weight_S = slot_S < end, None
        page_S = load(table_ref.at[layer, row, lax.div(slot_S, page_size)], mask=is_filled_S, other=0)
        if weight_ref is not None:
            weight_S = load(weight_ref.at[layer, row, slot_S], mask=is_filled_S, other=-jnp.inf)
        return page_S, weight_S

    # Which slots to read is looked up one iteration ahead. In the same iteration, the look-up would take the place in the
    # compiler's pipeline that the keys and values need, and none of them would be in flight while a block is computed.
    def attend(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        (page_S, weight_S), peak_G, total_G, out_GH = carry
        slot_S = begin + index * block + jnp.arange(block, dtype=jnp.int32)
        ahead = look_up(slot_S + block)
        is_filled_S = slot_S < end
        if weight_S is not None:
            is_filled_S &= weight_S > -jnp.inf
        at = page_S[:, None], lax.rem(slot_S, page_size)[:, None], channel[None]
        is_read_SH = is_filled_S[:, None] & is_channel[None]
        key_SH, value_SH = (load(kv_ref.at[at[0], half, at[1], at[2]], mask=is_read_SH, other=0) for half in (0, 1))
        key_scale_S = value_scale_S = None
        if format is not None:
            key_SH, value_SH = (numbers_of(codes, format, query_ref.dtype) for codes in (key_SH, value_SH))
            at_S = page_S, lax.rem(slot_S, page_size)
            key_scale_S, value_scale_S = (
                load(scale_ref.at[at_S[0], half, at_S[1]], mask=is_filled_S, other=0.0) for half in (0, 1)
            )
        logits_GS = dot(query_GH, key_SH, trans_b=True, precision=precision) * head_size**-0.5
        if key_scale_S is not None:
            logits_GS = logits_GS * key_scale_S[None]
        if weight_S is not None:
            logits_GS = logits_GS + weight_S[None]
        logits_GS = jnp.where(is_filled_S[None], logits_GS, -jnp.inf)
        for logits_ref in logits_refs:
            store(logits_ref.at[row, head[:, None], slot_S[None]], logits_GS, mask=is_head[:, None] & (slot_S < end)[None])
        new_peak_G = jnp.maximum(peak_G, jnp.max(logits_GS, axis=1))
        base_G = jnp.where(new_peak_G == -jnp.inf, 0.0, new_peak_G)  # the piece reads nothing so far
        weight_GS, scale_G = jnp.exp(logits_GS - base_G[:, None]), jnp.exp(peak_G - base_G)
        share_GS = weight_GS if value_scale_S is None else weight_GS * value_scale_S[None]
        added_GH = dot(share_GS.astype(value_SH.dtype), value_SH, precision=precision)
        return ahead, new_peak_G, total_G * scale_G + weight_GS.sum(axis=1), out_GH * scale_G[:, None] + added_GH

    start = (
        look_up(begin + jnp.arange(block, dtype=jnp.int32)),
        jnp.full((LEAST_GROUP,), -jnp.inf, jnp.float32),
        jnp.zeros((LEAST_GROUP,), jnp.float32),
        jnp.zeros((LEAST_GROUP, channel.size), jnp.float32),
    )
    _, peak_G, total_G, out_GH = lax.fori_loop(0, lax.div(end - begin + block - 1, block), attend, start)
    out_GH = (out_GH / jnp.where(total_G == 0, 1.0, total_G)[:, None]).astype(part_ref.dtype)
    log_total_G = jnp.log(total_G) + jnp.where(peak_G == -jnp.inf, 0.0, peak_G)
    store(part_ref.at[row, piece, head[:, None], channel[None]], out_GH, mask=is_query)
    store(log_total_ref.at[row, piece, head], log_total_G, mask=is_head)


def clear(logits_ref: Any, length_of: Callable[[Any], Any], program: Any, programs: int) -> None:
    """Writes `-inf` beyond the lengths of rows. Programs take chunks of slots in turn: these depend on no length."""
    num_rows, group, num_slots = logits_ref.shape
    offset_S, nothing_S = jnp.arange(CLEARED, dtype=jnp.int32), jnp.full((CLEARED,), -jnp.inf, jnp.float32)
    chunks = -(-num_slots // CLEARED)

    def clear_chunk(turn: Any, _: None) -> None:
        index = turn * programs + program
        row, slot_S = lax.div(index, chunks), lax.rem(index, chunks) * CLEARED + offset_S
        is_beyond_S = (slot_S >= length_of(row)) & (slot_S < num_slots) & (row < num_rows)
        for head in range(group):
            store(logits_ref.at[row, head, slot_S], nothing_S, mask=is_beyond_S)

    lax.fori_loop(0, -(-num_rows * chunks // programs), clear_chunk, None)


def combine_row(part_ref: Any, log_total_ref: Any, length_ref: Any, layer_ref: Any, out_ref: Any, total_ref: Any) -> None:
    """Combines the parts of one row and query head in the order of its pieces; a piece without a slot to read has weight 0."""
    row, head = pl.program_id(0), pl.program_id(1)
    (_, pieces, _, head_size), length = part_ref.shape, load(length_ref.at[layer_ref[0], row])
    own = lax.clamp(0, lax.div(length + PIECE - 1, PIECE), pieces)
    channel = jnp.arange(whole_head(head_size), dtype=jnp.int32)
    is_channel = channel < head_size

    def add(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        peak, total, out_H = carry
        piece_C = index * COMBINED + jnp.arange(COMBINED, dtype=jnp.int32)
        is_own_C = piece_C < own
        log_total_C = load(log_total_ref.at[row, piece_C, head], mask=is_own_C, other=-jnp.inf)
        is_read_CH = is_own_C[:, None] & is_channel[None]
        part_CH = load(part_ref.at[row, piece_C[:, None], head, channel[None]], mask=is_read_CH, other=0.0)
        new_peak = jnp.maximum(peak, jnp.max(log_total_C))
        base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # the row reads nothing so far
        weight_C, scale = jnp.exp(log_total_C - base), jnp.exp(peak - base)
        return new_peak, total * scale + jnp.sum(weight_C), out_H * scale + jnp.sum(weight_C[:, None] * part_CH, axis=0)

    start = jnp.float32(-jnp.inf), jnp.float32(0.0), jnp.zeros((channel.size,), jnp.float32)
    peak, total, out_H = lax.fori_loop(0, lax.div(own + COMBINED - 1, COMBINED), add, start)
    out_H = (out_H / jnp.where(total == 0, 1.0, total)).astype(out_ref.dtype)
    store(out_ref.at[row, head, channel], out_H, mask=is_channel)
    store(total_ref.at[row, head], jnp.log(total) + jnp.where(peak == -jnp.inf, 0.0, peak))
