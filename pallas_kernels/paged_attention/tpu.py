"""Pallas for TPU: DMAs fetch the pages of the next block into one buffer while the kernel attends to the other, across rows.

After compaction a row is one block, so a pipeline that drains at the end of every row would mostly wait
(`pallas_kernels.page_fetch`).

Heads that do not fill the lanes of a tile are read from transposed pages, whose slots do. XLA stores such a pool that way.

Codes of a quantised pool become numbers in vector memory alone. Their scales come beside them, a row of lanes for the keys of
a page and one for its values, and multiply logits and probabilities.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as pltpu
from pallas_kernels import nibbles, page_fetch
from pallas_kernels.page_fetch import ROWS, fetch_of
from pallas_kernels.quantised import Format, Numbers, Quantised, is_rotated, scales_of, stored

BLOCK = 1280  # slots per buffer, or a page if that is larger; a row with a budget of 1024 is one block until it is compacted
BLOCK_BYTES = 2 << 20  # of a buffer, at most, or a page if that is larger
CHUNK = 256  # slots that are summed at once; the sums are added in the order of the slots, however long a block is
LANES = 128
SUBLANES = 8  # query heads are padded to a multiple
MOST_SMEM = 960 << 10  # bytes of scalar memory, which has 1 MiB
MOST_VMEM = 12 << 20  # bytes of vector memory, of the 16 MiB that a kernel has


def why_not(query: Any, kv: Any, page_table: Any, length: Any, log_weight: Any, with_logits: bool = False) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    (page_size, head_size), max_pages, tile = kv.shape[2:], page_table.shape[1], 32 // stored(kv).dtype.itemsize
    if kv.dtype not in (jnp.float32, jnp.bfloat16) or query.dtype != kv.dtype:
        return f"queries and pool must both be float32 or bfloat16; got {query.dtype} and {kv.dtype}"
    if isinstance(kv, Quantised) and page_size % LANES:
        return f"a quantised page must be a multiple of {LANES} slots, for its scales; got {page_size}"
    if is_rotated(kv) and head_size not in (64, 128):
        return f"heads of {kv.format.name} must have 64 or 128 channels; got {head_size}"
    if head_size % LANES and page_size % LANES:
        return f"the head size or the page size must be a multiple of {LANES}; got {head_size} and {page_size}"
    if head_size % tile or page_size % tile:
        return f"heads and pages of {stored(kv).dtype} must be multiples of {tile}; got {head_size} and {page_size}"
    smem, vmem = memory(query, kv, max_pages, log_weight is not None, with_logits, length.size // len(length))
    if smem > MOST_SMEM:
        return f"lengths, and the tables of {ROWS} rows four times, must take at most {MOST_SMEM} bytes; got {smem}"
    if vmem > MOST_VMEM:
        return f"{ROWS} rows' queries, outputs, log-weights and logits must take at most {MOST_VMEM} bytes; got {vmem}"
    return None


def pages_of_block(kv: Any, max_pages: int) -> int:
    """How many pages a buffer holds."""
    page_size, page_bytes = kv.shape[2], math.prod(stored(kv).shape[1:]) * stored(kv).dtype.itemsize
    return max(1, min(BLOCK // page_size, BLOCK_BYTES // page_bytes, max_pages))


def memory(query: Any, kv: Any, max_pages: int, is_weighted: bool, with_logits: bool, places: int = 1) -> tuple[int, int]:
    """Bytes of scalar and of vector memory; the inputs and outputs of a grid step are double-buffered."""
    (num_rows, group, head_size), page_size, itemsize = query.shape, kv.shape[2], kv.dtype.itemsize
    block_pages = pages_of_block(kv, max_pages)
    blocks = -(-max_pages // block_pages)
    group, slots = group + -group % SUBLANES, blocks * block_pages * page_size
    lanes = head_size + -head_size % LANES
    row = 2 * group * lanes * itemsize + 4 * group * LANES  # query and output; a log-total takes all lanes
    row += 4 * (blocks + -blocks % SUBLANES) * block_pages * page_size * is_weighted + 4 * group * slots * with_logits
    scale_rows = 16 if is_rotated(kv) else len(scales_of(kv))  # those of groups fill a tile
    numbers = stored(kv).shape[3] * stored(kv).dtype.itemsize
    buffers = 4 * block_pages * page_size * (numbers + 4 * scale_rows)
    smem = 4 * (num_rows + -num_rows % ROWS) * places + 4 * ROWS * 4 * blocks * block_pages
    return smem, 2 * ROWS * row + buffers


@functools.partial(jax.jit, static_argnames=("with_logits", "interpret"))
def paged_attention(
    query: Float[Array, "R G H"],
    kv: Numbers,
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"] | Int[Array, "R T"],
    log_weight: Float[Array, "R S"] | None,
    with_logits: bool,
    interpret: Any = False,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"], Float[Array, "R G S"] | None]:
    """See `pallas_kernels.paged_attention`."""
    (num_rows, group, head_size), page_size, max_pages = query.shape, kv.shape[2], page_table.shape[1]
    block_pages, places = pages_of_block(kv, max_pages), length.size // num_rows
    padded_rows, padded_pages = num_rows + -num_rows % ROWS, max_pages + -max_pages % block_pages
    padded_group, num_slots = group + -group % SUBLANES, padded_pages * page_size
    pool, scales = stored(kv), scales_of(kv)
    format = kv.format if isinstance(kv, Quantised) else None
    is_transposed = pool.shape[3] % LANES != 0
    if is_transposed:
        pool = jnp.swapaxes(pool, 2, 3)  # as XLA stores it, so nothing moves
    if is_rotated(kv):
        scales = [jnp.swapaxes(x, 2, 3) for x in scales]  # XLA stores these so too
        query = nibbles.reordered(query)

    def pad(x: Array, *sizes: int) -> Array:
        return jnp.pad(x, [(0, size - old) for size, old in zip(sizes, x.shape, strict=True)])

    grid = page_fetch.grid_of(padded_rows)
    table = grid.lines(pad(page_table, padded_rows, padded_pages))
    in_specs = [
        *grid.table_specs(padded_pages),
        pl.BlockSpec((ROWS, padded_group, head_size), grid.this),
        *[pl.BlockSpec(memory_space=pl.ANY) for _ in (pool, *scales)],
    ]
    inputs = [table, table, pad(query, padded_rows, padded_group, head_size), pool, *scales]
    if log_weight is not None:
        weight = pad(log_weight, padded_rows, num_slots).reshape(padded_rows, padded_pages // block_pages, -1)
        in_specs.append(pl.BlockSpec((ROWS, *weight.shape[1:]), grid.this))
        inputs.append(weight)
    shapes = [((padded_group, head_size), query.dtype), ((padded_group, 1), jnp.float32)]
    if with_logits:
        shapes.append(((padded_group, num_slots), jnp.float32))
    outs = pl.pallas_call(
        functools.partial(attend_rows, grid.steps, is_transposed, format, log_weight is not None, (places, group // places)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tuple(grid),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((ROWS, *shape), grid.this) for shape, _ in shapes],
            scratch_shapes=page_fetch.scratch_of(block_pages, (pool, *scales)),
        ),
        out_shape=[jax.ShapeDtypeStruct((padded_rows, *shape), dtype) for shape, dtype in shapes],
        # Page ids are in bounds, as XLA's gather assumes too; checking one takes longer than to start its fetch.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention",
    )(pad(length.reshape(num_rows, places), padded_rows, places).reshape(-1), *inputs)
    out, log_total = outs[0][:num_rows, :group], outs[1][:num_rows, :group, 0]
    out = nibbles.restored(out) if is_rotated(kv) else out
    return out, log_total, outs[2][:num_rows, :group, : max_pages * page_size] if with_logits else None


def attend_rows(
    steps: int,
    is_transposed: bool,
    format: Format | None,
    is_weighted: bool,
    places_and_heads: tuple[int, int],
    # inputs
    length_smem_ref: Any,
    table_smem_ref: Any,
    next_table_smem_ref: Any,
    query_vmem_ref: Any,
    kv_hbm_ref: Any,
    *refs: Any,
) -> None:
    """Attends for eight rows, whose queries are of several places, with some heads each.

    Scales and log-weights (inputs), the logits (an output) and a buffer of scales are optional.
    """
    is_quantised, group_size = format is not None, None if format is None else format.group
    may_be_nan = format is not None and jnp.issubdtype(format.meant, jnp.floating)  # a code of a slot that is not read
    *others, semaphores, which_smem_ref = refs
    scale_hbm_ref, *others, scale_vmem_ref = others if is_quantised else (None, *others, None)
    weight_vmem_ref, *others = others if is_weighted else (None, *others)
    out_vmem_ref, log_total_vmem_ref, *logits_refs, buffer_vmem_ref = others
    fetched = [(kv_hbm_ref, buffer_vmem_ref)] + ([(scale_hbm_ref, scale_vmem_ref)] if is_quantised else [])
    block_pages = buffer_vmem_ref.shape[1]
    page_size = kv_hbm_ref.shape[3 if is_transposed else 2]
    block, head_size = block_pages * page_size, query_vmem_ref.shape[2]
    head_axis = 0 if is_transposed else 1  # of keys and values
    product = functools.partial(
        lax.dot_general,
        precision=lax.Precision.HIGHEST if query_vmem_ref.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )

    places, heads_of_place = places_and_heads

    def length_of(row: Any, place: int = places - 1) -> Any:
        """Slots that the queries of a place read; most those of the last one."""
        return length_smem_ref[row * places + place]

    def num_pages_of(row: Any, index: Any) -> Any:
        """Pages of a row's block that hold a filled slot."""
        num_pages = lax.div(length_of(row) + page_size - 1, page_size) - index * block_pages
        return lax.clamp(0, num_pages, block_pages)

    fetch = fetch_of(steps, (table_smem_ref, next_table_smem_ref), fetched, semaphores, num_pages_of)

    def clear(num_pages: Any, num_filled: Any, which: Any) -> None:
        """Writes zeros to the values of a block that no slot of the row fills: 0 * NaN is NaN."""
        last = lax.max(num_pages - 1, 0)
        value = buffer_vmem_ref[which, last, 1]
        slot = last * page_size + lax.broadcasted_iota(jnp.int32, value.shape, 1 - head_axis)
        buffer_vmem_ref[which, last, 1] = jnp.where(slot < num_filled, value, jnp.zeros_like(value))

        def empty(i: Any, _: None) -> None:
            buffer_vmem_ref[which, i, 1] = jnp.zeros_like(value)

        lax.fori_loop(num_pages, block_pages, empty, None)

    def slots_of(part: int, which: Any) -> Array:
        """The keys (part 0) or values (1) of a buffer, page after page."""
        if is_transposed:
            return jnp.concatenate([buffer_vmem_ref[which, i, part] for i in range(block_pages)], axis=1)
        return buffer_vmem_ref[which, :, part].reshape(block, head_size)

    def numbers(codes: Array, dtype: Any) -> Array:
        """Codes of 8 bits as numbers."""
        if format is not None and format.stored != format.meant:
            codes = pltpu.bitcast(codes, jnp.dtype(format.meant))
        return codes.astype(dtype)

    def words_of(part: int, which: Any) -> Array:
        """The words of the codes of 4 bits of keys (part 0) or values (1) of a buffer, channels by slots."""
        pages = [pltpu.bitcast(buffer_vmem_ref[which, i, part], jnp.int32) for i in range(block_pages)]
        return jnp.concatenate(pages, axis=1)

    def scales_of_block(part: int, which: Any) -> Array:
        """The scales of the keys (part 0) or values (1) of a buffer, in a row, or a row for each group."""
        if group_size is not None:
            pages = [scale_vmem_ref[which, i, part].astype(jnp.int32) for i in range(block_pages)]
            return nibbles.scales(jnp.concatenate(pages, axis=1))
        return jnp.concatenate([scale_vmem_ref[which, i, part : part + 1] for i in range(block_pages)], axis=1)

    fetch.start_first(which_smem_ref)

    def attend_row(local_row: Any, which: Any) -> Any:
        row = fetch.first_row + local_row
        length, own_G1 = length_of(row), None
        num_blocks = lax.max(lax.div(length + block - 1, block), 1)
        query_GH = query_vmem_ref[local_row]
        query_QH = query_GH if group_size is None else nibbles.spread(query_GH, group_size)
        if places > 1:
            place_G1 = lax.div(lax.broadcasted_iota(jnp.int32, (query_GH.shape[0], 1), 0), heads_of_place)
            own_G1 = jnp.zeros_like(place_G1)  # slots that each query reads
            for place in range(places):
                own_G1 = jnp.where(place_G1 == place, length_of(row, place), own_G1)
        for logits_ref in logits_refs:
            logits_ref[local_row] = jnp.full(logits_ref.shape[1:], -jnp.inf, jnp.float32)

        def attend(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            which, peak_G1, total_G1, out_GH = carry
            num_pages, num_filled = num_pages_of(row, index), length - index * block
            fetch.start_following(local_row, index, num_blocks, 1 - which)
            fetch.wait(num_pages, which)
            if not (is_weighted or is_quantised):
                clear(num_pages, num_filled, which)
            is_filled_1S = lax.broadcasted_iota(jnp.int32, (1, block), 1) < num_filled
            key, value = (slots_of(part, which) if group_size is None else words_of(part, which) for part in range(2))
            if group_size is None:
                key_factor = head_size**-0.5 * (scales_of_block(0, which) if is_quantised else 1)
                logits_GS = product(query_GH, numbers(key, query_GH.dtype), (((1,), (head_axis,)), ((), ()))) * key_factor
            else:
                assert query_QH is not None
                logits_GS = nibbles.logits(query_QH, key, scales_of_block(0, which), product) * head_size**-0.5
            if weight_vmem_ref is not None:
                weight_1S = weight_vmem_ref[local_row, pl.ds(index, 1), :]
                logits_GS = logits_GS + weight_1S
                weight_1S = jnp.where(is_filled_1S, weight_1S, -jnp.inf)
                is_filled_1S = weight_1S > -jnp.inf
                if not is_quantised:
                    is_read = (weight_1S if is_transposed else weight_1S.reshape(block, 1)) > -jnp.inf
                    value = jnp.where(is_read, value, jnp.zeros_like(value))
            logits_GS = jnp.where(is_filled_1S, logits_GS, -jnp.inf)
            if own_G1 is not None:
                slot_GS = index * block + lax.broadcasted_iota(jnp.int32, logits_GS.shape, 1)
                logits_GS = jnp.where(slot_GS < own_G1, logits_GS, -jnp.inf)
            for logits_ref in logits_refs:
                logits_ref[local_row, :, pl.ds(index * block, block)] = logits_GS
            new_peak_G1 = jnp.maximum(peak_G1, jnp.max(logits_GS, axis=1, keepdims=True))
            base_G1 = jnp.where(new_peak_G1 == -jnp.inf, 0.0, new_peak_G1)  # the row reads nothing so far
            weight_GS, scale_G1 = jnp.exp(logits_GS - base_G1), jnp.exp(peak_G1 - base_G1)
            total_G1, out_GH = total_G1 * scale_G1, out_GH * scale_G1
            value_scale = jnp.where(is_filled_1S, scales_of_block(1, which), 0.0) if is_quantised else None
            for first in range(0, block, CHUNK):
                last = min(first + CHUNK, block)
                chunk_GS, chunk = weight_GS[:, first:last], lax.slice_in_dim(value, first, last, axis=1 - head_axis)
                total_G1 = total_G1 + chunk_GS.sum(axis=1, keepdims=True)
                if value_scale is not None:
                    scale = value_scale[:, first:last]
                    if group_size is not None:
                        dtype = query_GH.dtype
                        out_GH = out_GH + nibbles.outputs(chunk_GS, chunk, scale, group_size, dtype, product)
                        continue
                    chunk_GS, chunk = chunk_GS * scale, numbers(chunk, query_GH.dtype)
                    if may_be_nan:
                        chunk = jnp.where(jnp.isnan(chunk), jnp.zeros_like(chunk), chunk)
                out_GH = out_GH + product(chunk_GS.astype(chunk.dtype), chunk, (((1,), (1 - head_axis,)), ((), ())))
            return 1 - which, new_peak_G1, total_G1, out_GH

        group = query_GH.shape[0]
        begin = (
            which,
            jnp.full((group, 1), -jnp.inf, jnp.float32),
            jnp.zeros((group, 1), jnp.float32),
            jnp.zeros((group, head_size), jnp.float32),
        )
        which, peak_G1, total_G1, out_GH = lax.fori_loop(0, num_blocks, attend, begin)
        out_vmem_ref[local_row] = (out_GH / jnp.where(total_G1 == 0, 1.0, total_G1)).astype(out_vmem_ref.dtype)
        log_total_vmem_ref[local_row] = jnp.log(total_G1) + jnp.where(peak_G1 == -jnp.inf, 0.0, peak_G1)
        return which

    which_smem_ref[0] = lax.fori_loop(0, ROWS, attend_row, which_smem_ref[0])
