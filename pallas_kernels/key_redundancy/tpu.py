"""Pallas for TPU: each tile of the similarity matrix is computed once, for the sum, the latest similar key and its similarity.

The products take the keys themselves, not unit keys: in bfloat16 they are exact in one pass of the matrix unit, while unit keys
in float32 take six; the norms divide afterwards. The matrix is symmetric, so the maximum of a column equals that of a row and
needs no reduction across lanes. At the end, the exempt entries are subtracted from the totals by comparing all slots with all
others, without a product. Eight rows of a tile at a time are compared in registers: a later similar key replaces an earlier one
of its sublane. Blocks beyond a row's last filled slot are neither fetched nor computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels import mosaic as pltpu

LANES, SUBLANES = 128, 8
MOST_BLOCK = 1536  # slots per block
MOST_CHUNK = 384  # slots on one side of a tile; the other side is a block
MOST_SLOTS = 1 << 15  # the totals and latest similar keys of more slots do not fit beside the blocks
MOST_TABLE = 1 << 16  # rows; each one has a number in scalar memory


def why_not(key: Any, is_filled: Any, threshold: float = 0.5, exempt: int = 1, exempt_first: bool = False) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    rows, num_slots, head_size = key.shape
    if key.dtype not in (jnp.float32, jnp.bfloat16):
        return f"keys must be float32 or bfloat16; got {key.dtype}"
    if exempt < 1:
        return f"exempt must be at least 1; got {exempt}. Without an exempt entry, plain XLA is linear in slots"
    if threshold < 0:
        return f"the threshold must be at least 0, so that an empty slot's similarity is not above it; got {threshold}"
    if head_size % 64 or head_size > 256:
        return f"the head size must be 64, 128, 192 or 256; got {head_size}"
    if num_slots > MOST_SLOTS:
        return f"a row must have at most {MOST_SLOTS} slots; got {num_slots}"
    if rows > MOST_TABLE:
        return f"there must be at most {MOST_TABLE} rows; got {rows}"
    return None


@functools.partial(jax.jit, static_argnames=("threshold", "exempt", "exempt_first", "interpret"))
def key_redundancy(
    key_RSH: Float[Array, "R S H"],
    is_filled: Bool[Array, "R S"],
    threshold: float,
    exempt: int,
    exempt_first: bool,
    interpret: Any = False,
) -> Float[Array, "R S"]:
    """See `pallas_kernels.key_redundancy`."""
    num_rows, num_slots, head_size = key_RSH.shape
    blocks = -(-num_slots // MOST_BLOCK)
    block = -(-num_slots // (blocks * LANES)) * LANES
    chunk = max(size for size in range(LANES, MOST_CHUNK + 1, LANES) if block % size == 0)
    padding = [(0, 0), (0, blocks * block - num_slots)]
    filled_RSH = jnp.where(is_filled[..., None], key_RSH, jnp.zeros_like(key_RSH)).astype(jnp.float32)
    norm_RS = jnp.pad(jnp.linalg.norm(filled_RSH, axis=-1) + 1e-8, padding, constant_values=1.0)
    slot = jnp.arange(num_slots, dtype=jnp.float32)  # exact to 2 ** 24
    slot_RS = jnp.pad(jnp.where(is_filled, slot, -1.0), padding, constant_values=-1)
    extent = (slot_RS.max(axis=1) + 1).astype(jnp.int32)

    def last_block(row: Any, extent_ref: Any) -> Any:
        return lax.max(lax.div(extent_ref[row] + block - 1, block) - 1, 0)

    def this(row: Any, turn: Any, index: Any, other: Any, extent_ref: Any) -> tuple[Any, ...]:
        return row, 0 if blocks == 1 else lax.min(index, last_block(row, extent_ref)), 0

    def others(row: Any, turn: Any, index: Any, other: Any, extent_ref: Any) -> tuple[Any, ...]:
        return row, 0 if blocks == 1 else lax.min(other, last_block(row, extent_ref)), 0

    def whole(row: Any, *_: Any) -> tuple[Any, ...]:
        return row, 0, 0

    row_block = (1, 1, blocks * block)
    of_sublanes, of_row = (pltpu.VMEM((n, blocks * block), jnp.float32) for n in (SUBLANES, 1))
    total_R1S = pl.pallas_call(
        functools.partial(look, block, chunk, blocks, exempt, threshold, exempt_first),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_rows, exempt, blocks, blocks),
            in_specs=[
                pl.BlockSpec((1, block, head_size), this),
                pl.BlockSpec((1, block, head_size), others),
                pl.BlockSpec(row_block, whole),
                pl.BlockSpec(row_block, whole),
            ],
            out_specs=pl.BlockSpec(row_block, whole),
            scratch_shapes=[pltpu.VMEM((chunk, block), jnp.float32), of_sublanes, of_sublanes, of_sublanes, of_row, of_row],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, *row_block[1:]), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="key_redundancy",
    )(extent, key_RSH, key_RSH, slot_RS[:, None], norm_RS[:, None])
    count_R1 = jnp.maximum(is_filled.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)
    return jnp.where(is_filled, total_R1S[:, 0, :num_slots] / count_R1, 0.0)


def look(
    block: int,
    chunk: int,
    blocks: int,
    exempt: int,
    threshold: float,
    exempt_first: bool,
    extent_smem_ref: Any,
    key_ref: Any,
    other_key_ref: Any,
    slot_ref: Any,  # -1 where a slot is empty
    norm_ref: Any,
    total_ref: Any,
    tile_ref: Any,  # similarities of a chunk with a block, times the norms of the block
    latest_ref: Any,  # latest similar slot per sublane, as the index of its group of eight rows
    value_ref: Any,  # the similarity of that slot
    sum_ref: Any,  # sum of all similarities
    first_ref: Any,  # similarity to slot 0
    below_ref: Any,  # latest similar slot of the turn before
) -> None:
    """Compares a block of slots (S) with a block of others (I), older chunks first; the last block writes the totals."""
    row, turn, index, other_index = (pl.program_id(axis) for axis in range(4))
    extent = extent_smem_ref[row]
    precision = lax.Precision.HIGHEST if key_ref.dtype == jnp.float32 else None
    width = LANES * max(n for n in range(1, 5) if block // LANES % n == 0)  # lanes that are compared in registers at once

    @pl.when((index == 0) & (other_index == 0))
    def _() -> None:
        latest_ref[...] = jnp.full_like(latest_ref, -1.0)
        value_ref[...] = jnp.zeros_like(value_ref)

    @pl.when((turn == 0) & (index == 0) & (other_index == 0))
    def _() -> None:
        below_ref[...] = jnp.full_like(below_ref, float(MOST_SLOTS))
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def column(ref: Any, begin: Any) -> Any:
        """A chunk of the others as a column."""
        return ref[0, :, pl.ds(begin, chunk)].reshape(chunk, 1)

    def compare(part: Any, _: Any) -> None:
        here = pl.multiple_of(part * chunk, LANES)
        begin = pl.multiple_of(other_index * block + here, LANES)
        other_key_IH = other_key_ref[0, pl.ds(here, chunk)]
        # An empty slot's similarities are 0, which is above no threshold.
        other_key_IH = jnp.where(column(slot_ref, begin) >= 0, other_key_IH, jnp.zeros_like(other_key_IH))
        similarity_IS = lax.dot_general(
            other_key_IH, key_ref[0], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        tile_ref[...] = similarity_IS * (1.0 / column(norm_ref, begin))

        @pl.when(index == other_index)
        def clear_diagonal() -> None:
            i, s = (lax.broadcasted_iota(jnp.int32, (chunk, chunk), axis) for axis in range(2))
            tile_ref[:, pl.ds(here, chunk)] = jnp.where(i == s, 0.0, tile_ref[:, pl.ds(here, chunk)])

        if exempt_first:

            @pl.when(begin == 0)
            def keep_first() -> None:
                first_ref[:, pl.ds(pl.multiple_of(index * block, LANES), block)] = tile_ref[:1]

        first_group = lax.div(begin, SUBLANES)

        def scan(strip: Any, _: Any) -> None:
            local = pl.ds(pl.multiple_of(strip * width, LANES), width)
            mine = pl.ds(pl.multiple_of(index * block + strip * width, LANES), width)
            limit_8S = jnp.broadcast_to(threshold * norm_ref[0, :, mine], (SUBLANES, width))
            latest_8S, value_8S, sum_8S = latest_ref[:, mine], value_ref[:, mine], sum_ref[:, mine]
            added_8S = jnp.zeros_like(sum_8S)
            if exempt > 1:  # groups of rows whose slot in a sublane is before the latest similar slot of the turn before
                sublane_8S = lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 0).astype(jnp.float32)
                below_8S = (below_ref[:, mine] - sublane_8S) * (1 / SUBLANES)
            for i in range(chunk // SUBLANES):
                group = (first_group + i).astype(jnp.float32)
                similarity_8S = tile_ref[i * SUBLANES : (i + 1) * SUBLANES, local]
                is_alike_8S = similarity_8S > limit_8S
                if exempt > 1:
                    is_alike_8S &= group < below_8S
                latest_8S = jnp.where(is_alike_8S, group, latest_8S)
                value_8S = jnp.where(is_alike_8S, similarity_8S, value_8S)
                added_8S += similarity_8S
            latest_ref[:, mine], value_ref[:, mine] = latest_8S, value_8S
            sum_ref[:, mine] = jnp.where(turn == 0, sum_8S + added_8S, sum_8S)

        lax.fori_loop(0, block // width, scan, None)

    @pl.when((index * block < extent) & (other_index * block < extent))
    def _() -> None:
        parts = lax.div(extent - other_index * block + chunk - 1, chunk)
        lax.fori_loop(0, lax.min(parts, block // chunk), compare, None)

    @pl.when((index == blocks - 1) & (other_index == blocks - 1))
    def _() -> None:
        num_blocks, num_chunks = lax.div(extent + block - 1, block), lax.div(extent + chunk - 1, chunk)

        @pl.when(turn == 0)
        def _() -> None:
            total_ref[0] = sum_ref[...].sum(axis=0, keepdims=True) / norm_ref[0]

        def settle(index: Any, _: Any) -> None:
            """Reduces the latest similar slot over the sublanes, and writes its similarity to the first row of `value`."""
            mine = pl.ds(pl.multiple_of(index * block, LANES), block)
            sublane_8S = lax.broadcasted_iota(jnp.int32, (SUBLANES, block), 0).astype(jnp.float32)
            slot_8S = jnp.where(latest_ref[:, mine] < 0, -1.0, latest_ref[:, mine] * SUBLANES + sublane_8S)
            latest_1S = slot_8S.max(axis=0, keepdims=True)
            value_1S = jnp.where(slot_8S == latest_1S, value_ref[:, mine], 0.0).sum(axis=0, keepdims=True)
            if exempt_first:
                value_1S = jnp.where((latest_1S < 0) & (turn == 0), first_ref[:, mine], value_1S)
            below_ref[:, mine] = latest_1S
            value_ref[:1, mine] = jnp.where(slot_ref[0, :, mine] >= 0, value_1S / norm_ref[0, :, mine], 0.0)

        def exempt_from(part: Any, _: Any) -> None:
            begin = pl.multiple_of(part * chunk, LANES)
            value_I1 = value_ref[:1, pl.ds(begin, chunk)].reshape(chunk, 1)
            latest_I1 = jnp.maximum(below_ref[:, pl.ds(begin, chunk)], 0.0).reshape(chunk, 1)

            def take_off(strip: Any, _: Any) -> None:
                mine = pl.ds(pl.multiple_of(strip * width, LANES), width)
                slot_8S = jnp.broadcast_to(slot_ref[0, :, mine], (SUBLANES, width))
                exempted_8S = jnp.zeros((SUBLANES, width), jnp.float32)
                for i in range(0, chunk, SUBLANES):
                    is_here_8S = latest_I1[i : i + SUBLANES] == slot_8S
                    exempted_8S += jnp.where(is_here_8S, value_I1[i : i + SUBLANES], 0.0)
                total_ref[0, :, mine] -= exempted_8S.sum(axis=0, keepdims=True)

            lax.fori_loop(0, num_blocks * (block // width), take_off, None)

        lax.fori_loop(0, num_blocks, settle, None)
        lax.fori_loop(0, num_chunks, exempt_from, None)
