"""Pallas for NVIDIA GPUs: as many programs as fit the device share the slots of all rows, or the rows where these are many.

A decode step streams the keys and values of each row (batch times KV heads). `pieces` says which program computes what. A row's
softmax is computed piece by piece, and `join` adds the pieces up in their order. Few or long rows are shared by pieces: each
leaves its output and the log of its softmax's denominator, and a second kernel joins them. Of many short rows, each program
takes whole ones and joins their pieces itself.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
COMBINED = 16  # pieces that are read at once to be combined
ROWS_OF_PROGRAM, MOST_PIECES = 2, 8  # whole rows: at least so many for each program, of at most so many pieces
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
    is_whole = takes_whole_rows(num_rows, pieces, programs)
    programs = num_rows if pieces == 1 else min(programs, num_rows * (1 if is_whole else pieces))
    parts = 1 if is_whole else pieces
    pool, format = ([kv.codes, kv.scale], kv.format) if isinstance(kv, Quantised) else ([kv], None)
    shapes = [
        jax.ShapeDtypeStruct((num_rows, parts, group, head_size), query.dtype if is_whole else jnp.float32),
        jax.ShapeDtypeStruct((num_rows, parts, group), jnp.float32),
    ]
    if with_logits:
        shapes.append(jax.ShapeDtypeStruct((num_rows, group, num_slots), jnp.float32))
    weights = [] if log_weight is None else [log_weight]
    part_RCGH, log_total_RCG, *logits = launch(
        functools.partial(attend_share, programs, is_whole, format, bool(weights)),
        *(query, page_table, length, layer, *pool, *weights),
        name="paged_attention",
        grid=(programs,),
        out_shape=shapes,
        num_warps=4,
        num_stages=STAGES,
        interpret=interpret,
    )
    if is_whole:
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


def takes_whole_rows(num_rows: int, pieces: int, programs: int) -> bool:
    """Whether a program takes whole rows, of up to so many pieces, and none is left to combine."""
    return pieces == 1 or (pieces <= MOST_PIECES and num_rows >= ROWS_OF_PROGRAM * programs)


def attend_share(
    programs: int,
    is_whole: bool,
    format: Format | None,
    is_weighted: bool,
    query_ref: Any,
    table_ref: Any,
    length_ref: Any,
    layer_ref: Any,
    kv_ref: Any,
    *refs: Any,
) -> None:
    """Attends to a program's pieces or rows, and clears its share of the logits beyond the rows' lengths."""
    scale_ref, *refs = refs if format is not None else (None, *refs)  # type: ignore[assignment]
    weight_ref, *outputs = refs if is_weighted else (None, *refs)
    program, layer = pl.program_id(0), layer_ref[0]
    refs = query_ref, kv_ref, scale_ref, table_ref, layer, weight_ref, *outputs
    num_rows, num_slots = outputs[0].shape[0], table_ref.shape[2] * kv_ref.shape[2]
    block, pieces = block_size(kv_ref.shape[3], kv_ref.dtype.itemsize), num_pieces(num_slots)
    length_of = functools.partial(length_in, length_ref, layer, num_slots)

    def blocks_of(row_R: Any) -> Any:
        blocks_R = lax.div(length_of(row_R) + block - 1, block)
        return jnp.where(row_R < num_rows, jnp.maximum(blocks_R, 1), 0) if is_whole else blocks_R  # an empty row has a result

    def visit(row: Any, piece: Any, _: None) -> None:
        if is_whole:
            attend_row(format, refs, row, length_of(row))
        else:
            leave_part(refs, row, piece, attend_piece(format, refs, row, piece, length_of(row)))

    if pieces == 1:
        visit(program, jnp.int32(0), None)
    else:
        walk(blocks_of, num_rows, PIECE // block * (pieces if is_whole else 1), program, programs, visit)
    for logits_ref in outputs[2:]:
        clear(logits_ref, length_of, program, programs)


def length_in(length_ref: Any, layer: Any, num_slots: int, row: Any) -> Any:
    """The filled slots of a row of a layer, or of an array of rows; 0 beyond the last row."""
    length = load(length_ref.at[layer, row], mask=row < length_ref.shape[1], other=0)
    return lax.clamp(jnp.zeros_like(length), length, jnp.full_like(length, num_slots))


def leave_part(refs: Any, row: Any, part: Any, result: tuple[Any, Any]) -> None:
    """Writes the log of the denominator and the output of a piece or a row."""
    part_ref, log_total_ref = refs[6:8]
    group, head_size = part_ref.shape[2:]
    head, channel = jnp.arange(LEAST_GROUP, dtype=jnp.int32), jnp.arange(whole_head(head_size), dtype=jnp.int32)
    log_total_G, out_GH = result
    is_part = (head < group)[:, None] & (channel < head_size)[None]
    store(part_ref.at[row, part, head[:, None], channel[None]], out_GH.astype(part_ref.dtype), mask=is_part)
    store(log_total_ref.at[row, part, head], log_total_G, mask=head < group)


def attend_row(format: Format | None, refs: Any, row: Any, length: Any) -> None:
    """Attends to one row, piece by piece."""

    def add(piece: Any, joined: Any) -> Any:
        return join(joined, *attend_piece(format, refs, row, piece, length))

    start = nothing(LEAST_GROUP, (LEAST_GROUP, whole_head(refs[0].shape[2])))
    joined = lax.fori_loop(0, lax.div(length + PIECE - 1, PIECE), add, start)
    leave_part(refs, row, jnp.int32(0), whole(joined))


def attend_piece(format: Format | None, refs: Any, row: Any, piece: Any, length: Any) -> tuple[Any, Any]:
    """The log of the softmax's denominator and the output of one piece of one row, for each query head."""
    query_ref, kv_ref, scale_ref, table_ref, layer, weight_ref, _, _, *logits_refs = refs
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
    out_GH = out_GH / jnp.where(total_G == 0, 1.0, total_G)[:, None]
    return jnp.log(total_G) + jnp.where(peak_G == -jnp.inf, 0.0, peak_G), out_GH


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

    def read(piece: Any) -> tuple[Any, Any]:
        log_total = load(log_total_ref.at[row, piece, head], mask=piece < own, other=-jnp.inf)
        is_read_H = (piece < own) & is_channel
        return log_total, load(part_ref.at[row, piece, head, channel], mask=is_read_H, other=0.0)

    def add(index: Any, joined: Any) -> Any:
        parts = [read(index * COMBINED + offset) for offset in range(min(COMBINED, pieces))]
        return functools.reduce(lambda joined, part: join(joined, *part), parts, joined)

    turns = lax.div(own + COMBINED - 1, COMBINED)
    log_total, out_H = whole(lax.fori_loop(0, turns, add, nothing((), (channel.size,))))
    store(out_ref.at[row, head, channel], out_H.astype(out_ref.dtype), mask=is_channel)
    store(total_ref.at[row, head], log_total)


class Joined(NamedTuple):
    """Pieces of a row that are added up: the largest log of a denominator, and denominator and output relative to it."""

    peak: Any
    total: Any
    out: Any


def nothing(heads: Any, out: tuple[int, ...]) -> Joined:
    """No pieces, for arrays of these shapes."""
    return Joined(jnp.full(heads, -jnp.inf, jnp.float32), jnp.zeros(heads, jnp.float32), jnp.zeros(out, jnp.float32))


def join(joined: Joined, log_total: Any, part: Any) -> Joined:
    """The pieces and the next one. Two kernels call it, and both must round alike.

    Of the two factors, that of the higher one is 1. Left out, one product and one sum remain, which every compiler joins in the
    same way; of two products, it may take either into the sum.
    """
    peak = jnp.maximum(joined.peak, log_total)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)  # nothing is read so far
    scale, weight = jnp.exp(joined.peak - base), jnp.exp(log_total - base)
    is_higher = log_total > joined.peak
    factor, is_higher_H = (
        jnp.expand_dims(x, tuple(range(x.ndim, part.ndim))) for x in (jnp.where(is_higher, scale, weight), is_higher)
    )
    lower, higher = jnp.where(is_higher_H, joined.out, part), jnp.where(is_higher_H, part, joined.out)
    return Joined(peak, joined.total * scale + weight, lower * factor + higher)


def whole(joined: Joined) -> tuple[Any, Any]:
    """The log of the denominator and the output of all pieces."""
    peak, total, out = joined
    divisor = jnp.where(total == 0, 1.0, total)
    return jnp.log(total) + jnp.where(peak == -jnp.inf, 0.0, peak), out / jnp.expand_dims(
        divisor, tuple(range(total.ndim, out.ndim))
    )
