"""Pallas for TPU: the logits stay in VMEM, and the keys of short rows are fetched once.

A grid step takes several short rows, as they are after compaction, and computes each softmax at once. A row whose logits do not
fit is split into blocks of slots. Each block is fetched twice: first for the largest logit and the denominator of each query,
then for the mass. Blocks beyond a row's last candidate are neither fetched nor computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic as pltpu
from pallas_kernels.attention_mass import pallas

LANES = 128
LOGITS = 512 * 1024  # per grid step: 2 MiB
QUERIES = 512  # per grid step, over all heads
KEY_BYTES = 1 << 21  # per grid step
MOST_ROWS = 4  # per grid step
MOST_SLOTS = 1 << 18  # the mass of more slots does not fit in VMEM
MOST_TABLE = 1 << 16  # rows; each one has a number in scalar memory


def why_not(
    query: Any, key: Any, is_candidate: Any, is_query: Any, age: Any, log_weight: Any, sink: Any = None, over_group: str = "max"
) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if reason := pallas.why_not(query, key):
        return reason
    rows, num_slots, head_size = key.shape
    if head_size % 64:
        return f"the head size must be a multiple of 64; got {head_size}"
    if head_size > 512:
        return f"the head size must be at most 512; got {head_size}"
    if over_group == "max" and query.shape[1] > QUERIES // 8:
        return f"a group must have at most {QUERIES // 8} heads; got {query.shape[1]}"
    if num_slots > MOST_SLOTS:
        return f"a row must have at most {MOST_SLOTS} slots; got {num_slots}"
    if rows > MOST_TABLE:
        return f"there must be at most {MOST_TABLE} rows; got {rows}"
    return None


def up(size: int, unit: int) -> int:
    """The size rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


@functools.partial(jax.jit, static_argnames=("over_group", "interpret"))
def attention_mass(
    query: Float[Array, "R G W H"],
    key: Float[Array, "R S H"],
    is_candidate: Bool[Array, "R S"],
    is_query: Bool[Array, "R W"],
    age: Int[Array, "R S"] | None,
    log_weight: Float[Array, "R S"] | None,
    sink: Float[Array, "R G"] | None = None,
    *,
    over_group: str,
    interpret: Any = False,
) -> Float[Array, "R S"]:
    """See `pallas_kernels.attention_mass`."""
    terms = pallas.terms(query, is_candidate, is_query, log_weight, sink, over_group)
    query_RDVH, bias_RS, share_RV, after_V, sink_RV = terms
    (num_rows, heads, num_queries, head_size), num_slots = query_RDVH.shape, key.shape[1]
    window = min(up(num_queries, 8), max(8, QUERIES // heads // 8 * 8))  # queries per grid step
    windows = -(-num_queries // window)
    row_bytes = head_size * key.dtype.itemsize
    most = max(LANES, min(LOGITS // (heads * window), KEY_BYTES // row_bytes) // LANES * LANES)
    blocks = -(-num_slots // most)
    block = up(-(-num_slots // blocks), LANES)
    passes, rows = (1, 1) if blocks == 1 else (2, 1)
    while blocks == 1 and rows < MOST_ROWS and rows < num_rows and 2 * rows * block * row_bytes <= KEY_BYTES:
        rows *= 2
    padded_rows, padded_slots = up(num_rows, rows), blocks * block

    def pad(x: Array, value: float | int, *sizes: int) -> Array:
        return jnp.pad(x, [(0, size - old) for size, old in zip(sizes, x.shape, strict=True)], constant_values=value)

    query_RDVH = pad(query_RDVH, 0, padded_rows, heads, windows * window, head_size)
    query_RCVH = jnp.swapaxes(query_RDVH.reshape(padded_rows, heads, windows, window, head_size), 1, 2)
    query_RCVH = query_RCVH.reshape(padded_rows, windows, heads * window, head_size)
    share_RCV1 = pad(share_RV, 0, padded_rows, windows * window).reshape(padded_rows, windows, window, 1)
    bias_R1S = pad(bias_RS, -jnp.inf, padded_rows, padded_slots)[:, None]
    slot = jnp.arange(1, padded_slots + 1, dtype=jnp.int32)
    extent = jnp.where(bias_R1S[:, 0] > -jnp.inf, slot, 0).max(axis=1)

    def of_window(row: Any, window: Any, *_: Any) -> tuple[Any, ...]:
        return row, window, 0, 0

    def of_row(row: Any, *_: Any) -> tuple[Any, ...]:
        return row, 0, 0

    def block_of(row: Any, index: Any, extent_ref: Any) -> Any:
        if blocks == 1:
            return 0
        return lax.min(index, lax.max(lax.div(extent_ref[row] + block - 1, block) - 1, 0))

    def of_block(row: Any, window: Any, turn: Any, index: Any, extent_ref: Any) -> tuple[Any, ...]:
        return row, block_of(row, index, extent_ref), 0

    def of_lanes(row: Any, window: Any, turn: Any, index: Any, extent_ref: Any) -> tuple[Any, ...]:
        return row, 0, block_of(row, index, extent_ref)

    inputs = [query_RCVH, share_RCV1, key, bias_R1S]
    in_specs = [
        pl.BlockSpec((rows, 1, heads * window, head_size), of_window),
        pl.BlockSpec((rows, 1, window, 1), of_window),
        pl.BlockSpec((rows, block, head_size), of_block),
        pl.BlockSpec((rows, 1, block), of_lanes),
    ]
    if age is not None:
        inputs += [
            pad(age.astype(jnp.int32), 0, padded_rows, padded_slots)[:, None],
            pad(after_V, 0, windows * window).reshape(windows, window, 1),
        ]
        in_specs.append(pl.BlockSpec((rows, 1, block), of_lanes))
        in_specs.append(pl.BlockSpec((1, window, 1), lambda row, window, *_: (window, 0, 0)))
    if sink_RV is not None:
        inputs.append(pad(sink_RV, 0, padded_rows, windows * window).reshape(padded_rows, windows, window, 1))
        in_specs.append(pl.BlockSpec((rows, 1, window, 1), of_window))
    mass = pl.pallas_call(
        functools.partial(add_block, heads, blocks, block, age is not None, sink is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(padded_rows // rows, windows, passes, blocks),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((rows, 1, padded_slots), of_row),
            scratch_shapes=[pltpu.VMEM((window, 1), jnp.float32), pltpu.VMEM((window, 1), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((padded_rows, 1, padded_slots), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="attention_mass",
    )(extent, *inputs)
    return mass[:num_rows, 0, :num_slots]


def add_block(heads: int, blocks: int, block: int, has_age: bool, has_sink: bool, extent_smem_ref: Any, *refs: Any) -> None:
    """Adds the mass from some of the queries: for some whole rows, or in one visit to a block of one row."""
    # inputs, outputs, scratch
    query_ref, share_ref, key_ref, bias_ref, *rest = refs
    age_ref, after_ref, *rest = rest if has_age else (None, None, *rest)
    sink_ref, mass_ref, peak_ref, total_ref = rest if has_sink else (None, *rest)
    turn, index = pl.program_id(2), pl.program_id(3)
    rows, head_size = key_ref.shape[0], key_ref.shape[2]
    precision = lax.Precision.HIGHEST if key_ref.dtype == jnp.float32 else None

    @pl.when((pl.program_id(1) == 0) & (turn == 0) & (index == 0))
    def _() -> None:
        mass_ref[...] = jnp.zeros_like(mass_ref)

    def logits_of(row: int) -> Any:
        """Logits of a row; -inf where a query does not see a slot, which may hold anything."""
        logits = lax.dot_general(
            query_ref[row, 0], key_ref[row], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        logits_VS = logits.reshape(heads, -1, block).max(axis=0) if heads > 1 else logits
        bias_1S = bias_ref[row]
        is_seen_VS = jnp.broadcast_to(bias_1S > -jnp.inf, logits_VS.shape)
        if age_ref is not None:
            is_seen_VS &= age_ref[row] >= after_ref[0]
        return jnp.where(is_seen_VS, logits_VS * head_size**-0.5 + bias_1S, -jnp.inf)

    def base_of(peak_V1: Any) -> Any:
        return jnp.where(peak_V1 == -jnp.inf, 0.0, peak_V1)  # the query sees nothing so far

    def mass_of(weight_VS: Any, total_V1: Any, row: int) -> Any:
        return (weight_VS * (share_ref[row, 0] / jnp.where(total_V1 == 0, 1.0, total_V1))).sum(axis=0, keepdims=True)

    if blocks == 1:
        for row in range(rows):
            logits_VS = logits_of(row)
            peak_V1 = logits_VS.max(axis=1, keepdims=True)
            if sink_ref is not None:
                peak_V1 = jnp.maximum(peak_V1, sink_ref[row, 0])
            weight_VS = jnp.exp(logits_VS - base_of(peak_V1))
            total_V1 = weight_VS.sum(axis=1, keepdims=True)
            if sink_ref is not None:
                total_V1 += jnp.exp(sink_ref[row, 0] - peak_V1)
            mass_ref[row] += mass_of(weight_VS, total_V1, row)
        return

    is_filled = index * block < extent_smem_ref[pl.program_id(0)]

    @pl.when((turn == 0) & (index == 0))
    def _() -> None:
        peak_ref[...] = jnp.full_like(peak_ref, -jnp.inf) if sink_ref is None else sink_ref[0, 0]
        total_ref[...] = jnp.zeros_like(total_ref) if sink_ref is None else jnp.ones_like(total_ref)

    @pl.when((turn == 0) & is_filled)
    def _() -> None:
        logits_VS = logits_of(0)
        peak_V1 = jnp.maximum(peak_ref[...], logits_VS.max(axis=1, keepdims=True))
        weight_VS = jnp.exp(logits_VS - base_of(peak_V1))
        total_ref[...] = total_ref[...] * jnp.exp(peak_ref[...] - base_of(peak_V1)) + weight_VS.sum(axis=1, keepdims=True)
        peak_ref[...] = peak_V1

    @pl.when((turn == 1) & is_filled)
    def _() -> None:
        logits_VS = logits_of(0)
        weight_VS = jnp.exp(logits_VS - base_of(peak_ref[...]))
        mass_ref[0, :, pl.ds(pl.multiple_of(index * block, LANES), block)] += mass_of(weight_VS, total_ref[...], 0)
