"""Pallas for NVIDIA GPUs: as many programs as fit the device share the slots of all rows, or the rows where these are many.

A decode step streams the keys and values of each row (batch times KV heads). `pieces` says which program computes what. A row's
softmax is computed piece by piece, and `join` adds the pieces up in their order. Few or long rows are shared by pieces: each
leaves its output and the log of its softmax's denominator, and a second kernel joins them. Of many short rows, each program
takes whole ones and joins their pieces itself.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import num_resident
from pallas_kernels.launch import dot, launch, load, store
from pallas_kernels.nibbles import ADDED, bits_of_16
from pallas_kernels.paged_attention.pieces import PIECE, walk
from pallas_kernels.quantised import Format, Numbers, Quantised, is_rotated, numbers_of, why_no_codes

TILE_BYTES = 16_384  # the keys of a block, and as much for its values
MOST_BLOCK = 64  # slots of a block
STAGES = 3  # of the pipeline: a block is in use while two others are on their way, one of them into the tile just read
RESIDENT = 3  # programs per multiprocessor: with 168 registers per thread no more fit, and they keep 192 KiB on their way
RESIDENT_OF_GROUPS = 2  # the same for codes of 4 bits, whose unpacking takes up to 242 registers per thread
LEAST_GROUP, MOST_GROUP = 16, 32  # queries per product; fewer are padded
RESIDENT_OF_MOST = 2  # programs per multiprocessor with more than the least
COMBINED = 16  # pieces that are read at once to be combined
ROWS_OF_PROGRAM, MOST_PIECES = 2, 8  # whole rows: at least so many for each program, of at most so many pieces
CLEARED = 1024  # logits of a head that are cleared at once


def why_not(
    query: Any, kv: Any, page_table: Any, length: Any, log_weight: Any, layer: Any = None, with_logits: bool = False
) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if reason := why_no_codes(kv):
        return reason
    if kv.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or query.dtype != kv.dtype:
        return f"queries and pool must both be float32, bfloat16 or float16; got {query.dtype} and {kv.dtype}"
    if kv.shape[3] % 16 or not 16 <= kv.shape[3] <= 256:
        return f"the head size must be a multiple of 16 up to 256; got {kv.shape[3]}"
    if (group := group_of(query.shape, page_table.shape[-2])) > MOST_GROUP:
        return f"a KV head must have at most {MOST_GROUP} query heads, times the places of a row; got {group}"
    return None


def whole_head(head_size: int) -> int:
    """The channels of a program's arrays, a power of two; those beyond the head are not read.

    Products take at least 16: over 8 channels in bfloat16, they came out twice as large on an H200.

    >>> whole_head(8), whole_head(96), whole_head(128)
    (16, 128, 128)
    """
    return max(16, 1 << (head_size - 1).bit_length())


def group_of(shape: tuple[int, ...], num_rows: int) -> int:
    """Queries of a row, of all of its places."""
    return math.prod(shape[:-1]) // num_rows


def query_at(ref: Any, num_rows: int, row: Any, head: Any) -> tuple[Any, ...]:
    """Where some queries of a row are, in an array of queries by row [R, G, H] or by place [B, T, N, H]."""
    if len(ref.shape) == 3:
        return row, head
    num_kv_heads = num_rows // ref.shape[0]
    of_place = ref.shape[2] // num_kv_heads
    in_place = lax.rem(row, num_kv_heads) * of_place + lax.rem(head, of_place)
    return lax.div(row, num_kv_heads), lax.div(head, of_place), in_place


def padded_group(group: int) -> int:
    """The queries of a product, a power of two.

    >>> padded_group(1), padded_group(16), padded_group(28)
    (16, 16, 32)
    """
    return max(LEAST_GROUP, 1 << (group - 1).bit_length())


def block_size(head_size: int, itemsize: int, query_itemsize: int) -> int:
    """Slots per iteration of a program: as many as a tile holds; products take at least 16.

    Codes that become float32 count as such: as numbers they pass through shared memory, of which a program has 99 KiB on GPUs
    like L4 and RTX 3090.
    """
    return max(16, min(MOST_BLOCK, TILE_BYTES // (whole_head(head_size) * (4 if query_itemsize == 4 else itemsize))))


def shared_bytes(head_size: int, itemsize: int, query_itemsize: int | None = None, group: int = LEAST_GROUP) -> int:
    """Shared memory of a program, as compiled: two blocks of keys and values, the queries, and rows of the softmax.

    Codes of 1 byte have scales of 4 bytes beside them; queries have the itemsize of keys if None. An itemsize of 0 stands for
    codes of 4 bits with scales of groups.
    """
    query_itemsize, head = query_itemsize or itemsize, whole_head(head_size)
    block = block_size(head_size if itemsize else head_size // 2, itemsize or 1, query_itemsize)
    slot, moved = head * itemsize + 4 * (itemsize == 1), 0
    if itemsize == 1 and query_itemsize == 4:  # the numbers of codes are moved to the threads that multiply them
        moved = block * head * 15 // 2
    if not itemsize:  # the numbers of a block are moved to the threads that multiply them, a half or more at once
        slot, moved = head // 2 + head // 32 * 2, block * head * (1 if query_itemsize == 2 else 6)
    return (STAGES - 1) * 2 * block * slot + moved + padded_group(group) * head * query_itemsize + 2304


def num_pieces(num_slots: int) -> int:
    """Pieces of the longest row of a table."""
    return -(-num_slots // PIECE)


@functools.partial(jax.jit, static_argnames=("with_logits", "programs", "interpret"))
def paged_attention(
    query: Float[Array, "R G H"] | Float[Array, "B T N H"],
    kv: Numbers,
    page_table: Int[Array, "*L R MP"],
    length: Int[Array, "*L R"] | Int[Array, "*L R T"],
    log_weight: Float[Array, "*L R S"] | None,
    layer: Int[Array, ""] | int | None = None,
    with_logits: bool = False,
    programs: int | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "R G H"] | Float[Array, "B T N H"], Float[Array, "R _G"], Float[Array, "R _G S"] | None]:
    """See `pallas_kernels.paged_attention`. `programs` changes no result; None is as many as the GPU runs at once."""
    num_rows, head_size = page_table.shape[-2], query.shape[-1]
    group, num_slots = group_of(query.shape, num_rows), page_table.shape[-1] * kv.shape[2]
    if length.ndim < page_table.ndim:
        length = length[..., None]
    if layer is None:
        page_table, length, log_weight = jax.tree.map(lambda x: x[None], (page_table, length, log_weight))
    layer = jnp.reshape(jnp.int32(0 if layer is None else layer), (1,))
    pieces = num_pieces(num_slots)
    if programs is None:
        item = (0 if is_rotated(kv) else 1) if isinstance(kv, Quantised) else kv.dtype.itemsize
        resident = RESIDENT_OF_GROUPS if is_rotated(kv) else RESIDENT if group <= LEAST_GROUP else RESIDENT_OF_MOST
        programs = num_resident(shared_bytes(head_size, item, query.dtype.itemsize, group), resident)
    of_bytes = isinstance(kv, Quantised) and not is_rotated(kv)
    is_whole = pieces == 1 or (takes_whole_rows(num_rows, pieces, programs) and log_weight is None and not of_bytes)
    programs = num_rows if pieces == 1 else min(programs, num_rows * (1 if is_whole else pieces))
    pool, format = ([kv.codes, kv.scale], kv.format) if isinstance(kv, Quantised) else ([kv], None)
    shapes = [
        jax.ShapeDtypeStruct((num_rows, pieces, group, head_size), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, pieces, group), jnp.float32),
    ]
    results = [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((num_rows, group), jnp.float32)]
    shapes = results if is_whole else shapes
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
        return part_RCGH, log_total_RCG, logits[0] if logits else None
    out_RGH, log_total_RG = launch(
        combine_row,
        *(part_RCGH, log_total_RCG, length, layer),
        name="paged_attention_combine",
        grid=(num_rows, group),
        out_shape=results,
        num_warps=4,
        interpret=interpret,
    )
    return out_RGH, log_total_RG, logits[0] if logits else None


def takes_whole_rows(num_rows: int, pieces: int, programs: int) -> bool:
    """Whether a program takes whole rows, of up to so many pieces, and none is left to combine.

    On an H200, 128 rows of 8 heads with log-weights or codes of a byte took longer so than four times 32 rows in parts: codes
    take so many registers that a multiprocessor holds two programs in place of three.
    """
    return pieces <= MOST_PIECES and num_rows >= ROWS_OF_PROGRAM * programs


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
    refs = query_ref, kv_ref, scale_ref, table_ref, length_ref, layer, weight_ref, *outputs
    num_rows, num_slots = length_ref.shape[1], table_ref.shape[2] * kv_ref.shape[2]
    block, pieces = block_size(kv_ref.shape[3], kv_ref.dtype.itemsize, query_ref.dtype.itemsize), num_pieces(num_slots)
    length_of = functools.partial(length_in, length_ref, layer, num_slots)

    def blocks_of(row_R: Any) -> Any:
        blocks_R = lax.div(length_of(row_R) + block - 1, block)
        return jnp.where(row_R < num_rows, jnp.maximum(blocks_R, 1), 0) if is_whole else blocks_R  # an empty row has a result

    def visit(row: Any, piece: Any, _: None) -> None:
        if is_whole:
            attend_row(format, refs, row, length_of(row))
        else:
            leave_part(format, refs, row, piece, attend_piece(format, refs, row, piece, length_of(row)))

    if pieces == 1:
        visit(program, jnp.int32(0), None)
    else:
        walk(blocks_of, num_rows, PIECE // block * (pieces if is_whole else 1), program, programs, visit)
    for logits_ref in outputs[2:]:
        clear(logits_ref, length_of, program, programs)


def length_in(length_ref: Any, layer: Any, num_slots: int, row: Any) -> Any:
    """The slots that the last place of a row of a layer reads, or of each of an array of rows; 0 beyond the last row."""
    length = load(length_ref.at[layer, row, jnp.int32(length_ref.shape[2] - 1)], mask=row < length_ref.shape[1], other=0)
    return lax.clamp(jnp.zeros_like(length), length, jnp.full_like(length, num_slots))


def leave_part(format: Format | None, refs: Any, row: Any, part: Any, result: tuple[Any, Any]) -> None:
    """Writes the log of the denominator and the output of a piece or a row."""
    part_ref, log_total_ref = refs[7:9]
    group, head_size = log_total_ref.shape[-1], part_ref.shape[-1]
    head, (log_total_G, outs) = jnp.arange(padded_group(group), dtype=jnp.int32), result
    is_whole = len(log_total_ref.shape) == 2  # and there is one part
    for channel, out_GH in zip(channels_of(head_size, format), outs, strict=True):
        is_part = (head < group)[:, None] & (channel < head_size)[None]
        at = row, part, head[:, None]
        if is_whole:
            at = query_at(part_ref, log_total_ref.shape[0], row, head[:, None])
        store(part_ref.at[*at, channel[None]], out_GH.astype(part_ref.dtype), mask=is_part)
    store(log_total_ref.at[(row, head) if is_whole else (row, part, head)], log_total_G, mask=head < group)


def attend_row(format: Format | None, refs: Any, row: Any, length: Any) -> None:
    """Attends to one row, piece by piece."""

    def add(piece: Any, joined: Any) -> Any:
        return join(joined, *attend_piece(format, refs, row, piece, length))

    padded = padded_group(refs[8].shape[-1])
    start = nothing(padded, *((padded, x.size) for x in channels_of(refs[0].shape[-1], format)))
    joined = lax.fori_loop(0, lax.div(length + PIECE - 1, PIECE), add, start)
    leave_part(format, refs, row, jnp.int32(0), whole(joined))


def attend_piece(format: Format | None, refs: Any, row: Any, piece: Any, length: Any) -> tuple[Any, Any]:
    """For each query head and one piece of a row, the log of the softmax's denominator, and the output in parts of channels."""
    query_ref, kv_ref, scale_ref, table_ref, length_ref, layer, weight_ref, _, log_total_ref, *logits_refs = refs
    group, head_size, page_size = log_total_ref.shape[-1], query_ref.shape[-1], kv_ref.shape[2]
    num_rows, places = length_ref.shape[1:]
    padded = padded_group(group)
    block = block_size(kv_ref.shape[3], kv_ref.dtype.itemsize, query_ref.dtype.itemsize)
    head, channels = jnp.arange(padded, dtype=jnp.int32), channels_of(head_size, format)
    is_head, own_G = head < group, None
    if places > 1:  # slots that each query reads
        own_G = load(length_ref.at[layer, row, lax.div(head, group // places)], mask=is_head, other=0)
    precision = lax.Precision.HIGHEST if query_ref.dtype == jnp.float32 else None
    queries = []
    for channel in channels:
        is_query = is_head[:, None] & (channel < head_size)[None]
        at = query_at(query_ref, num_rows, row, head[:, None])
        queries.append(load(query_ref.at[*at, channel[None]], mask=is_query, other=0.0))
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
        (page_S, weight_S), peak_G, total_G, outs = carry
        slot_S = begin + index * block + jnp.arange(block, dtype=jnp.int32)
        ahead = look_up(slot_S + block)
        is_filled_S = slot_S < end
        if weight_S is not None:
            is_filled_S &= weight_S > -jnp.inf
        at = page_S, lax.rem(slot_S, page_size), is_filled_S
        read = read_vectors if format is None or format.group is None else read_groups
        keys, values = (read(kv_ref, scale_ref, half, at, format, query_ref.dtype) for half in (0, 1))
        products = []
        for query_GH, (key_SH, key_scale_S) in zip(queries, keys, strict=True):
            product_GS = dot(query_GH, key_SH, trans_b=True, precision=precision) * head_size**-0.5
            products.append(product_GS if key_scale_S is None else product_GS * key_scale_S[None])
        logits_GS = functools.reduce(operator.add, products)
        if weight_S is not None:
            logits_GS = logits_GS + weight_S[None]
        logits_GS = jnp.where(is_filled_S[None], logits_GS, -jnp.inf)
        if own_G is not None:
            logits_GS = jnp.where(slot_S[None] < own_G[:, None], logits_GS, -jnp.inf)
        for logits_ref in logits_refs:
            store(logits_ref.at[row, head[:, None], slot_S[None]], logits_GS, mask=is_head[:, None] & (slot_S < end)[None])
        new_peak_G = jnp.maximum(peak_G, jnp.max(logits_GS, axis=1))
        base_G = jnp.where(new_peak_G == -jnp.inf, 0.0, new_peak_G)  # the piece reads nothing so far
        weight_GS, scale_G = jnp.exp(logits_GS - base_G[:, None]), jnp.exp(peak_G - base_G)
        added = []
        for value_SH, value_scale_S in values:
            share_GS = weight_GS if value_scale_S is None else weight_GS * value_scale_S[None]
            added.append(dot(share_GS.astype(value_SH.dtype), value_SH, precision=precision))
        total_G = total_G * scale_G + weight_GS.sum(axis=1)
        outs = tuple(out_GH * scale_G[:, None] + added_GH for out_GH, added_GH in zip(outs, added, strict=True))
        return ahead, new_peak_G, total_G, outs

    start = (
        look_up(begin + jnp.arange(block, dtype=jnp.int32)),
        jnp.full((padded,), -jnp.inf, jnp.float32),
        jnp.zeros((padded,), jnp.float32),
        tuple(jnp.zeros((padded, channel.size), jnp.float32) for channel in channels),
    )
    _, peak_G, total_G, outs = lax.fori_loop(0, lax.div(end - begin + block - 1, block), attend, start)
    outs = tuple(out_GH / jnp.where(total_G == 0, 1.0, total_G)[:, None] for out_GH in outs)
    return jnp.log(total_G) + jnp.where(peak_G == -jnp.inf, 0.0, peak_G), outs


def channels_of(head_size: int, format: Format | None) -> list[Any]:
    """The channels of each part of a head, in order of `read_groups`; one part, filled up to a power of two, without groups."""
    if format is None or format.group is None:
        return [jnp.arange(whole_head(head_size), dtype=jnp.int32)]
    half = head_size // 2
    width = min(format.group, half)
    firsts = [first + of_half for first in range(0, half, width) for of_half in (0, half)]
    return [first + jnp.arange(width, dtype=jnp.int32) for first in firsts]


def read_vectors(kv_ref: Any, scale_ref: Any, half: int, at: Any, format: Format | None, dtype: Any) -> list[Any]:
    """Keys (half 0) or values (1) of slots, whole, and their scales, if there are any."""
    page_S, offset_S, is_read_S = at
    channel = jnp.arange(whole_head(kv_ref.shape[3]), dtype=jnp.int32)
    is_read_SH = is_read_S[:, None] & (channel < kv_ref.shape[3])[None]
    vector_SH = load(kv_ref.at[page_S[:, None], half, offset_S[:, None], channel[None]], mask=is_read_SH, other=0)
    if format is None:
        return [(vector_SH, None)]
    scale_S = load(scale_ref.at[page_S, half, offset_S], mask=is_read_S, other=0.0)
    return [(numbers_of(vector_SH, format, dtype), scale_S)]


def read_groups(kv_ref: Any, scale_ref: Any, half: int, at: Any, format: Any, dtype: Any) -> list[Any]:
    """Keys (half 0) or values (1) of slots, group by group, and the scales: of bytes, the low halves and then the high ones."""
    page_S, offset_S, is_read_S = at
    size, num_groups = kv_ref.shape[3], scale_ref.shape[3]
    group = jnp.arange(num_groups, dtype=jnp.int32)  # one load of all groups is long enough to be on its way meanwhile
    where = page_S[:, None], half, offset_S[:, None]
    scale_SN = half_precision(load(scale_ref.at[*where, group[None]], mask=is_read_S[:, None], other=0))
    width, parts = min(format.group, size), []
    for first in range(0, size, width):
        byte = first + jnp.arange(width, dtype=jnp.int32)
        codes_SW = load(kv_ref.at[*where, byte[None]], mask=is_read_S[:, None], other=0)
        for channel, number_SW in zip((first, first + size), numbers_of_halves(codes_SW, dtype), strict=True):
            is_own = (group == channel // format.group)[None]
            parts.append((number_SW, jnp.where(is_own, scale_SN, 0.0).sum(axis=1)))
    return parts


def numbers_of_halves(codes: Any, dtype: Any) -> tuple[Any, Any]:
    """The numbers of codes in the low and the high halves of bytes. In the bits of 16, a code is what is added to 16."""
    as_bits = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    wide, place = codes.astype(as_bits), jnp.finfo(dtype).nmant - 4

    def number(code: Any) -> Any:
        bits = (code << jnp.asarray(place, as_bits)) | jnp.asarray(bits_of_16(dtype), as_bits)
        return lax.bitcast_convert_type(bits, dtype) - jnp.asarray(ADDED, dtype)

    return number(wide & jnp.asarray(15, as_bits)), number(wide >> jnp.asarray(4, as_bits))


def half_precision(bits: Any) -> Any:
    """The numbers of the bits of float16s."""
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


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
    (_, pieces, _, head_size), length = (
        part_ref.shape,
        load(length_ref.at[layer_ref[0], row, jnp.int32(length_ref.shape[2] - 1)]),
    )
    own = lax.clamp(0, lax.div(length + PIECE - 1, PIECE), pieces)
    channel = jnp.arange(whole_head(head_size), dtype=jnp.int32)
    is_channel = channel < head_size

    def read(piece: Any) -> tuple[Any, Any]:
        log_total = load(log_total_ref.at[row, piece, head], mask=piece < own, other=-jnp.inf)
        is_read_H = (piece < own) & is_channel
        return log_total, (load(part_ref.at[row, piece, head, channel], mask=is_read_H, other=0.0),)

    def add(index: Any, joined: Any) -> Any:
        parts = [read(index * COMBINED + offset) for offset in range(min(COMBINED, pieces))]
        return functools.reduce(lambda joined, part: join(joined, *part), parts, joined)

    turns = lax.div(own + COMBINED - 1, COMBINED)
    log_total, (out_H,) = whole(lax.fori_loop(0, turns, add, nothing((), (channel.size,))))
    store(out_ref.at[*query_at(out_ref, part_ref.shape[0], row, head), channel], out_H.astype(out_ref.dtype), mask=is_channel)
    store(total_ref.at[row, head], log_total)


class Joined(NamedTuple):
    """Pieces of a row that are added up: the largest log of a denominator, and denominator and output relative to it.

    The output is in parts of channels.
    """

    peak: Any
    total: Any
    outs: tuple[Any, ...]


def nothing(heads: Any, *outs: tuple[int, ...]) -> Joined:
    """No pieces, for arrays of these shapes."""
    zeros = tuple(jnp.zeros(out, jnp.float32) for out in outs)
    return Joined(jnp.full(heads, -jnp.inf, jnp.float32), jnp.zeros(heads, jnp.float32), zeros)


def join(joined: Joined, log_total: Any, parts: tuple[Any, ...]) -> Joined:
    """The pieces and the next one. Two kernels call it, and both must round alike.

    Of the two factors, that of the higher one is 1. Left out, one product and one sum remain, which every compiler joins in the
    same way; of two products, it may take either into the sum.
    """
    peak = jnp.maximum(joined.peak, log_total)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)  # nothing is read so far
    scale, weight = jnp.exp(joined.peak - base), jnp.exp(log_total - base)
    is_higher = log_total > joined.peak
    factor = jnp.where(is_higher, scale, weight)
    outs = []
    for out, part in zip(joined.outs, parts, strict=True):
        is_higher_H = beside(is_higher, part)
        lower, higher = jnp.where(is_higher_H, out, part), jnp.where(is_higher_H, part, out)
        outs.append(lower * beside(factor, part) + higher)
    return Joined(peak, joined.total * scale + weight, tuple(outs))


def whole(joined: Joined) -> tuple[Any, tuple[Any, ...]]:
    """The log of the denominator and the output of all pieces."""
    peak, total, outs = joined
    divisor = jnp.where(total == 0, 1.0, total)
    return jnp.log(total) + jnp.where(peak == -jnp.inf, 0.0, peak), tuple(out / beside(divisor, out) for out in outs)


def beside(x: Any, out: Any) -> Any:
    """An array of heads with as many axes as one of their outputs."""
    return jnp.expand_dims(x, tuple(range(x.ndim, out.ndim)))
