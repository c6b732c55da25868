"""Pallas for TPU: records come to vector memory by DMA (`pallas_kernels.page_fetch`), where their codes become numbers.

A page has as many slots as a head has channels, 128. XLA then stores codes transposed, slots in lanes, and pads neither them
nor the two rows of scales, those of keys and those of values. Scales multiply queries, logits, probabilities and sums, as in
the reference. Codes are taken as they are, and the middle of their range is taken off their products.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic as pltpu
from pallas_kernels import page_fetch
from pallas_kernels.page_fetch import ROWS, fetch_of
from pallas_kernels.sealed import Records, bits_of, places

LANES = 128  # slots of a page, and channels of a head
BLOCK = 10  # pages per buffer, 1280 slots
SUBLANES = 8  # query heads are padded to a multiple
MOST_SMEM = 960 << 10  # bytes of scalar memory, which has 1 MiB
MOST_GROUP = 64  # query heads of a KV head


def why_not(query: Any, records: Any, page_table: Any, num_pages: Any) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if records.dtype not in (jnp.float32, jnp.bfloat16) or query.dtype != records.dtype:
        return f"queries and records must both be of float32 or bfloat16; got {query.dtype} and {records.dtype}"
    if records.shape[-2:] != (LANES, LANES):
        return f"pages must have {LANES} slots and heads {LANES} channels; got {records.shape[-2]} and {records.shape[-1]}"
    if max(bits_of(records)) > 4:
        return f"codes must have at most 4 bits; got {records.format.name}"
    if query.shape[1] > MOST_GROUP:
        return f"a KV head must have at most {MOST_GROUP} query heads; got {query.shape[1]}"
    rows, entries = (size + -size % unit for size, unit in zip(page_table.shape, (ROWS, BLOCK), strict=True))
    smem = 4 * (rows + 4 * ROWS * entries)
    if smem > MOST_SMEM:
        return f"counts, and the tables of {ROWS} rows four times, must take at most {MOST_SMEM} bytes; got {smem}"
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def sealed_attention(
    query: Float[Array, "R G H"],
    records: Records,
    page_table: Int[Array, "R MP"],
    num_pages: Int[Array, " R"],
    interpret: Any = False,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"]]:
    """See `pallas_kernels.sealed_attention`."""
    num_rows, group, head_size = query.shape
    block_pages = min(BLOCK, page_table.shape[1])
    padded_rows, padded_group = num_rows + -num_rows % ROWS, group + -group % SUBLANES
    padded_pages = page_table.shape[1] + -page_table.shape[1] % block_pages

    def pad(x: Array, *sizes: int) -> Array:
        return jnp.pad(x, [(0, size - old) for size, old in zip(sizes, x.shape, strict=True)])

    codes = (jnp.swapaxes(x, 1, 2) for x in (records.key, records.value))  # as XLA stores them, so nothing moves
    arrays = [*codes, records.scales]
    grid = page_fetch.grid_of(padded_rows)
    table = grid.lines(pad(page_table, padded_rows, padded_pages))
    shapes = [((padded_group, head_size), query.dtype), ((padded_group, 1), jnp.float32)]
    out, log_total = pl.pallas_call(
        functools.partial(attend_rows, grid.steps, bits_of(records)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tuple(grid),
            in_specs=[
                *grid.table_specs(padded_pages),
                pl.BlockSpec((ROWS, padded_group, head_size), grid.this),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in arrays],
            ],
            out_specs=[pl.BlockSpec((ROWS, *shape), grid.this) for shape, _ in shapes],
            scratch_shapes=page_fetch.scratch_of(block_pages, arrays),
        ),
        out_shape=[jax.ShapeDtypeStruct((padded_rows, *shape), dtype) for shape, dtype in shapes],
        # Page ids are in bounds, as XLA's gather assumes too; checking one takes longer than to start its fetch.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        interpret=interpret,
        name="sealed_attention",
    )(
        pad(jnp.minimum(num_pages, page_table.shape[1]), padded_rows),
        table,
        table,
        pad(query, padded_rows, padded_group, head_size),
        *arrays,
    )
    return out[:num_rows, :group], log_total[:num_rows, :group, 0]


def attend_rows(
    steps: int,
    bits: tuple[int, int],
    # inputs
    count_smem_ref: Any,
    table_smem_ref: Any,
    next_table_smem_ref: Any,
    query_vmem_ref: Any,
    key_hbm_ref: Any,
    value_hbm_ref: Any,
    scale_hbm_ref: Any,
    # outputs
    out_vmem_ref: Any,
    log_total_vmem_ref: Any,
    # scratch
    key_vmem_ref: Any,
    value_vmem_ref: Any,
    scale_vmem_ref: Any,
    semaphores: Any,
    which_smem_ref: Any,
) -> None:
    """Attends for eight rows."""
    block_pages, page_size, head_size = key_vmem_ref.shape[1], key_vmem_ref.shape[3], query_vmem_ref.shape[2]
    dtype, (key_bits, value_bits) = query_vmem_ref.dtype, bits
    key_middle, value_middle = ((2**one - 1) / 2 for one in bits)
    product = functools.partial(
        lax.dot_general,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )

    def num_pages_of(row: Any, index: Any) -> Any:
        """Pages of a row's block that it reads."""
        return lax.clamp(0, count_smem_ref[row] - index * block_pages, block_pages)

    arrays = [(key_hbm_ref, key_vmem_ref), (value_hbm_ref, value_vmem_ref), (scale_hbm_ref, scale_vmem_ref)]
    fetch = fetch_of(steps, (table_smem_ref, next_table_smem_ref), arrays, semaphores, num_pages_of)

    fetch.start_first(which_smem_ref)

    def scales_of_page(i: int, which: Any, is_read: Any) -> list[Array]:
        """The parts of `pallas_kernels.sealed.Scales`, each a row of lanes; zeros for a page that is not read."""
        numbers = jnp.where(is_read, float_of(scale_vmem_ref[which, i].astype(jnp.int32)), 0.0)
        firsts = places(page_size, head_size)
        width = numbers.shape[1]
        return [numbers[at // width : at // width + 1, at % width : at % width + LANES] for at in firsts]

    def attend_row(local_row: Any, which: Any) -> Any:
        row = fetch.first_row + local_row
        count = count_smem_ref[row]
        num_blocks = lax.max(lax.div(count + block_pages - 1, block_pages), 1)
        query_GH = query_vmem_ref[local_row].astype(jnp.float32)

        def attend(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            which, peak_G1, total_G1, out_GH = carry
            num_pages = num_pages_of(row, index)
            fetch.start_following(local_row, index, num_blocks, 1 - which)
            fetch.wait(num_pages, which)
            scales = [scales_of_page(i, which, i < num_pages) for i in range(block_pages)]
            logits = []
            for i, (step_1H, zero_1H, of_slot_1S, *_) in enumerate(scales):
                key_HS = codes_of(key_vmem_ref[which, i], key_bits, dtype)
                scaled_GH = (query_GH * step_1H).astype(dtype)
                added_GH = query_GH * (zero_1H + key_middle * step_1H) - key_middle * scaled_GH.astype(jnp.float32)
                products_GS = product(scaled_GH, key_HS, (((1,), (0,)), ((), ())))
                logits.append((products_GS + added_GH.sum(axis=1, keepdims=True)) * (of_slot_1S * head_size**-0.5))
            logits_GS = jnp.concatenate(logits, axis=1)
            is_read_1S = lax.broadcasted_iota(jnp.int32, (1, logits_GS.shape[1]), 1) < num_pages * page_size
            logits_GS = jnp.where(is_read_1S, logits_GS, -jnp.inf)
            new_peak_G1 = jnp.maximum(peak_G1, jnp.max(logits_GS, axis=1, keepdims=True))
            base_G1 = jnp.where(new_peak_G1 == -jnp.inf, 0.0, new_peak_G1)  # the row reads nothing so far
            weight_GS, fade_G1 = jnp.exp(logits_GS - base_G1), jnp.exp(peak_G1 - base_G1)
            total_G1, out_GH = total_G1 * fade_G1, out_GH * fade_G1
            for i, (*_, step_1S, zero_1S, of_channel_1H) in enumerate(scales):
                value_HS = codes_of(value_vmem_ref[which, i], value_bits, dtype)
                own_GS = weight_GS[:, i * page_size : (i + 1) * page_size]
                share_GS = (own_GS * step_1S).astype(dtype)
                added_GS = own_GS * (zero_1S + value_middle * step_1S) - value_middle * share_GS.astype(jnp.float32)
                sums_GH = product(share_GS, value_HS, (((1,), (1,)), ((), ()))) + added_GS.sum(axis=1, keepdims=True)
                total_G1, out_GH = total_G1 + own_GS.sum(axis=1, keepdims=True), out_GH + sums_GH * of_channel_1H
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


def codes_of(bytes_BS: Any, bits: int, dtype: Any) -> Float[Array, "H S"]:
    """The codes of a page, channels by slots."""
    wide = bytes_BS.astype(jnp.int32)
    parts = [(wide >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return jnp.concatenate(parts, axis=0).astype(jnp.float32).astype(dtype)


def float_of(bits: Any) -> Float[Array, "..."]:
    """The numbers of the bits of float16s: an exponent and a fraction move to a float32's place.

    A TPU has no numbers below float32's least normal one, so the float16s that would become such ones are made of integers.
    """
    size = bits & 0x7FFF
    number = lax.bitcast_convert_type(size << 13, jnp.float32) * 2.0**112
    number = jnp.where(size < 0x400, size.astype(jnp.float32) * 2.0**-24, number)
    number = jnp.where(size >= 0x7C00, jnp.where(size > 0x7C00, jnp.nan, jnp.inf), number)
    return jnp.where(bits > 0x7FFF, -number, number)
