"""Pallas for TPU: DMAs fetch the pages of the next block into one buffer while the kernel attends to the other, across rows.

After compaction a row is a few blocks long, so a pipeline that drains at the end of every row would mostly wait. A grid step
takes eight rows, and its last block starts the fetch for the first block of the next step, whose piece of the table is loaded
already. The table passes through scalar memory in such pieces, so scalar memory does not limit its size.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

BLOCK = 256  # slots per buffer, or a page if that is larger
ROWS = 8  # per grid step
SUBLANES = 8  # query heads are padded to a multiple
MOST_SMEM = 960 << 10  # bytes of scalar memory, which has 1 MiB
MOST_VMEM = 12 << 20  # bytes of vector memory, of the 16 MiB that a kernel has


def why_not(query: Any, kv: Any, page_table: Any, length: Any, log_weight: Any, with_logits: bool = False) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    page_size, max_pages, tile = kv.shape[2], page_table.shape[1], 32 // kv.dtype.itemsize
    if kv.dtype not in (jnp.float32, jnp.bfloat16) or query.dtype != kv.dtype:
        return f"queries and pool must both be float32 or bfloat16; got {query.dtype} and {kv.dtype}"
    if kv.shape[3] % 128:
        return f"the head size must be a multiple of 128; got {kv.shape[3]}"
    if page_size % tile:
        return f"a page of {kv.dtype} must be a multiple of {tile} slots; got {page_size}"
    smem, vmem = memory(query, kv, max_pages, log_weight is not None, with_logits)
    if smem > MOST_SMEM:
        return f"lengths, and the tables of {ROWS} rows four times, must take at most {MOST_SMEM} bytes; got {smem}"
    if vmem > MOST_VMEM:
        return f"{ROWS} rows' queries, outputs, log-weights and logits must take at most {MOST_VMEM} bytes; got {vmem}"
    return None


def memory(query: Any, kv: Any, max_pages: int, is_weighted: bool, with_logits: bool) -> tuple[int, int]:
    """Bytes of scalar and of vector memory; the inputs and outputs of a grid step are double-buffered."""
    (num_rows, group, head_size), page_size, itemsize = query.shape, kv.shape[2], kv.dtype.itemsize
    block_pages = max(1, min(BLOCK // page_size, max_pages))
    blocks = -(-max_pages // block_pages)
    group, slots = group + -group % SUBLANES, blocks * block_pages * page_size
    row = 2 * group * head_size * itemsize + 4 * group * 128  # query and output; a log-total takes 128 lanes
    row += 4 * (blocks + -blocks % SUBLANES) * block_pages * page_size * is_weighted + 4 * group * slots * with_logits
    buffers = 4 * block_pages * page_size * head_size * itemsize
    smem = 4 * (num_rows + -num_rows % ROWS) + 4 * ROWS * 4 * blocks * block_pages
    return smem, 2 * ROWS * row + buffers


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
    (num_rows, group, head_size), page_size, max_pages = query.shape, kv.shape[2], page_table.shape[1]
    block_pages = max(1, min(BLOCK // page_size, max_pages))
    padded_rows, padded_pages = num_rows + -num_rows % ROWS, max_pages + -max_pages % block_pages
    padded_group, num_slots = group + -group % SUBLANES, padded_pages * page_size

    def pad(x: Array, *sizes: int) -> Array:
        return jnp.pad(x, [(0, size - old) for size, old in zip(sizes, x.shape, strict=True)])

    steps = padded_rows // ROWS
    cores = 2 if steps % 2 == 0 else 1  # of a chip whose two cores share a memory; on other chips, one runs after the other
    steps //= cores

    def this(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return core * steps + step, 0, 0

    def following(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return core * steps + lax.min(step + 1, steps - 1), 0, 0

    table = pad(page_table, padded_rows, padded_pages).reshape(cores * steps, ROWS, padded_pages)
    table_block = (1, ROWS, padded_pages)
    in_specs = [
        pl.BlockSpec(table_block, this, memory_space=pltpu.SMEM),
        pl.BlockSpec(table_block, following, memory_space=pltpu.SMEM),
        pl.BlockSpec((ROWS, padded_group, head_size), this),
        pl.BlockSpec(memory_space=pl.ANY),
    ]
    inputs = [table, table, pad(query, padded_rows, padded_group, head_size), kv]
    if log_weight is not None:
        weight = pad(log_weight, padded_rows, num_slots).reshape(padded_rows, padded_pages // block_pages, -1)
        in_specs.append(pl.BlockSpec((ROWS, *weight.shape[1:]), this))
        inputs.append(weight)
    shapes = [((padded_group, head_size), query.dtype), ((padded_group, 1), jnp.float32)]
    if with_logits:
        shapes.append(((padded_group, num_slots), jnp.float32))
    outs = pl.pallas_call(
        functools.partial(attend_rows, block_pages, steps, log_weight is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cores, steps),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((ROWS, *shape), this) for shape, _ in shapes],
            scratch_shapes=[
                pltpu.VMEM((2, block_pages, 2, page_size, head_size), kv.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((padded_rows, *shape), dtype) for shape, dtype in shapes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(pad(length, padded_rows), *inputs)
    out, log_total = outs[0][:num_rows, :group], outs[1][:num_rows, :group, 0]
    return out, log_total, outs[2][:num_rows, :group, : max_pages * page_size] if with_logits else None


def attend_rows(
    block_pages: int,
    steps: int,
    is_weighted: bool,
    # inputs
    length_smem_ref: Any,
    table_smem_ref: Any,
    next_table_smem_ref: Any,
    query_vmem_ref: Any,
    kv_hbm_ref: Any,
    *refs: Any,
) -> None:
    """Attends for eight rows. The log-weights (an input) and the logits (an output) are optional."""
    weight_vmem_ref, *others = refs if is_weighted else (None, *refs)
    out_vmem_ref, log_total_vmem_ref, *logits_refs, buffer_vmem_ref, semaphores, which_smem_ref = others
    page_size, head_size = kv_hbm_ref.shape[2:]
    block = block_pages * page_size
    core, step = pl.program_id(0), pl.program_id(1)
    first_row = (core * steps + step) * ROWS
    precision = lax.Precision.HIGHEST if kv_hbm_ref.dtype == jnp.float32 else None

    def each_page(row: Any, index: Any, act: Any) -> None:
        """Calls `act` for each page of a row's block that holds a filled slot."""
        num_pages = lax.div(length_smem_ref[row] + page_size - 1, page_size) - index * block_pages
        lax.fori_loop(0, lax.min(num_pages, block_pages), lambda i, _: act(i), None)

    def start(table_ref: Any, local_row: Any, row: Any, index: Any, which: Any) -> None:
        def begin(i: Any) -> None:
            page = table_ref[0, local_row, index * block_pages + i]
            pltpu.make_async_copy(kv_hbm_ref.at[page], buffer_vmem_ref.at[which, i], semaphores.at[which]).start()

        each_page(row, index, begin)

    def wait(row: Any, index: Any, which: Any) -> None:
        def end(i: Any) -> None:
            pltpu.make_async_copy(kv_hbm_ref.at[0], buffer_vmem_ref.at[which, i], semaphores.at[which]).wait()

        each_page(row, index, end)

    @pl.when(step == 0)
    def _() -> None:
        which_smem_ref[0] = 0
        start(table_smem_ref, 0, first_row, 0, 0)

    def attend_row(local_row: Any, which: Any) -> Any:
        row = first_row + local_row
        length = length_smem_ref[row]
        num_blocks = lax.max(lax.div(length + block - 1, block), 1)
        query_GH = query_vmem_ref[local_row]
        for logits_ref in logits_refs:
            logits_ref[local_row] = jnp.full(logits_ref.shape[1:], -jnp.inf, jnp.float32)

        def attend(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            which, peak_G1, total_G1, out_GH = carry
            is_last, is_last_row = index + 1 == num_blocks, local_row + 1 == ROWS
            pl.when(~is_last)(lambda: start(table_smem_ref, local_row, row, index + 1, 1 - which))
            pl.when(is_last & ~is_last_row)(lambda: start(table_smem_ref, local_row + 1, row + 1, 0, 1 - which))
            pl.when(is_last & is_last_row & (step + 1 < steps))(lambda: start(next_table_smem_ref, 0, row + 1, 0, 1 - which))
            wait(row, index, which)
            key_SH = buffer_vmem_ref[which, :, 0].reshape(block, head_size)
            value_SH = buffer_vmem_ref[which, :, 1].reshape(block, head_size)
            slot_1S = index * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
            slot_S1 = index * block + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
            logits_GS = lax.dot_general(
                query_GH, key_SH, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            logits_GS = logits_GS * head_size**-0.5
            is_filled_1S, is_filled_S1 = slot_1S < length, slot_S1 < length
            if weight_vmem_ref is not None:
                weight_1S = weight_vmem_ref[local_row, pl.ds(index, 1), :]
                logits_GS = logits_GS + weight_1S
                is_filled_1S &= weight_1S > -jnp.inf
                is_filled_S1 &= weight_1S.reshape(block, 1) > -jnp.inf
            logits_GS = jnp.where(is_filled_1S, logits_GS, -jnp.inf)
            for logits_ref in logits_refs:
                logits_ref[local_row, :, pl.ds(index * block, block)] = logits_GS
            new_peak_G1 = jnp.maximum(peak_G1, jnp.max(logits_GS, axis=1, keepdims=True))
            base_G1 = jnp.where(new_peak_G1 == -jnp.inf, 0.0, new_peak_G1)  # the row reads nothing so far
            weight_GS, scale_G1 = jnp.exp(logits_GS - base_G1), jnp.exp(peak_G1 - base_G1)
            value_SH = jnp.where(is_filled_S1, value_SH, jnp.zeros_like(value_SH))  # 0 * NaN is NaN
            added_GH = lax.dot_general(
                weight_GS.astype(value_SH.dtype),
                value_SH,
                (((1,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            total_G1 = total_G1 * scale_G1 + weight_GS.sum(axis=1, keepdims=True)
            return 1 - which, new_peak_G1, total_G1, out_GH * scale_G1 + added_GH

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
