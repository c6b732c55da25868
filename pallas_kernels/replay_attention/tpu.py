"""Pallas for TPU: flash attention over tiles, pipelined by Pallas; tiles with nothing visible are neither fetched nor computed.

The ranges that decide this are in scalar memory, two numbers per block, where the index maps read them too: a skipped tile
requests block 0, with which the next run of tiles usually starts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.replay_attention import pallas

BLOCK = 512  # rows or columns per tile, at most; half for wide heads, so that two buffers of each fit
WIDE = 512  # bytes of a wide head, at least
MOST_HEAD = 1024  # bytes of a head, at most
MOST_RANGES = 1 << 17  # numbers in scalar memory, which has 1 MiB
LANES = 128  # blocks are multiples of this


class Settings(NamedTuple):
    """The settings of the passes."""

    rows: int  # per tile
    columns: int
    interpret: Any


def why_not(query: Any, key: Any, value: Any, position: Any, begin: Any, end: Any, *_: Any, sorts: bool = False) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if reason := pallas.why_not_floats(query, key, value):
        return reason
    head_size = query.shape[3]
    if head_size % 64 or head_size * query.dtype.itemsize > MOST_HEAD:
        most = MOST_HEAD // query.dtype.itemsize
        return f"the head size must be a multiple of 64 and at most {most} in {query.dtype}; got {head_size}"
    rows, columns = blocks_of(query, key, begin)
    num_rows, num_columns = query.shape[1] * query.shape[2] // key.shape[2], begin.shape[2]
    ranges = 2 * query.shape[0] * (pl.cdiv(num_rows, rows) + key.shape[2] * pl.cdiv(num_columns, columns))
    if ranges > MOST_RANGES:
        return f"the ranges of all blocks must be at most {MOST_RANGES} numbers; got {ranges}"
    return None


def blocks_of(query: Any, key: Any, begin: Any) -> tuple[int, int]:
    """Rows and columns of a tile, for few tiles with little padding."""
    most = BLOCK if query.shape[3] * query.dtype.itemsize < WIDE else BLOCK // 2
    return even(query.shape[1] * query.shape[2] // key.shape[2], most), even(begin.shape[2], most)


def even(size: int, most: int) -> int:
    """The smallest block of which the fewest possible, each at most `most`, cover `size`."""
    count = pl.cdiv(size, most)
    return pl.cdiv(pl.cdiv(size, count), LANES) * LANES


@functools.partial(jax.jit, static_argnames=("interpret", "sorts"))
def replay_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    position: Int[Array, "B T"],
    begin: Int[Array, "B K C"],
    end: Int[Array, "B K C"],
    source: Int[Array, "B K C"] | None,
    sink: Float[Array, " N"] | None = None,
    interpret: Any = False,
    sorts: bool = False,
) -> Float[Array, "B T N H"]:
    """See `pallas_kernels.replay_attention`. Columns stay in their order: a step of the grid costs as much as a small tile."""
    rows, columns = blocks_of(query, key, begin)
    passes = pallas.Passes(forward, backward_query, backward_columns, Settings(rows, columns, interpret))
    return pallas.attend(passes, rows, columns, query, key, value, position, begin, end, source, sink)


def forward(settings: Settings, query: Array, *args: Array) -> tuple[Array, Array]:
    """The output of every row and the log of its softmax's denominator, 0 where it reads nothing."""
    numbers = jax.ShapeDtypeStruct((*query.shape[:2], 1, query.shape[2]), jnp.float32)
    out, log_total = launch(
        attend_tile,
        settings,
        (query, *args),
        out=("wide rows", "row numbers"),
        out_shape=(jax.ShapeDtypeStruct(query.shape, query.dtype), numbers),
        scratch=[(settings.rows, 1), (settings.rows, 1), (settings.rows, query.shape[3])],
        name="replay_attention",
    )
    return out, log_total[:, :, 0]


def backward_query(settings: Settings, query: Array, *args: Array) -> Array:
    """The query's gradient."""
    return launch(
        add_query_gradient,
        settings,
        (query, *args),
        out="wide rows",
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        scratch=[(settings.rows, query.shape[3])],
        name="replay_attention_backward_query",
    )


def backward_columns(settings: Settings, query: Array, key: Array, *args: Array) -> tuple[Array, Array]:
    """The gradients of key and value."""
    return launch(
        add_column_gradients,
        settings,
        (query, key, *args),
        out=("wide columns", "wide columns"),
        out_shape=(jax.ShapeDtypeStruct(key.shape, key.dtype),) * 2,
        scratch=[(settings.columns, key.shape[3])] * 2,
        is_by_columns=True,
        name="replay_attention_backward_columns",
    )


INPUTS = ("wide rows", "wide columns", "wide columns", "position", "span", "row numbers", "wide rows", "row numbers")


def launch(
    body: Any,
    settings: Settings,
    inputs: tuple[Array, ...],
    *,
    out: Any,
    out_shape: Any,
    scratch: list[tuple[int, int]],
    name: str,
    is_by_columns: bool = False,
) -> Any:
    """Launches a pass over all tiles, by blocks of rows (or of columns); inputs are as in `INPUTS`."""
    rows, columns, interpret = settings
    query, key, value, position, begin, end, *more = inputs
    (batch, heads, num_rows, head_size), num_columns = query.shape, key.shape[2]
    num_blocks = num_rows // rows, num_columns // columns

    def tile(outer: Any, inner: Any) -> tuple[Any, Any]:
        return (inner, outer) if is_by_columns else (outer, inner)

    def may_read(b: Any, k: Any, outer: Any, inner: Any, row_smem_ref: Any, column_smem_ref: Any) -> Any:
        """Whether a row of a tile may read one of its columns."""
        i, j = tile(outer, inner)
        row, column = b * 2 * num_blocks[0] + i, (b * heads + k) * 2 * num_blocks[1] + j
        lowest, highest = row_smem_ref[row], row_smem_ref[row + num_blocks[0]]
        return (column_smem_ref[column] <= highest) & (lowest < column_smem_ref[column + num_blocks[1]])

    def at(*grid: Any) -> tuple[Any, Any]:
        b, k, outer, inner, *ranges = grid
        return tile(outer, jnp.where(may_read(b, k, outer, inner, *ranges), inner, 0))

    specs = {
        "wide rows": pl.BlockSpec((None, None, rows, head_size), lambda *grid: (grid[0], grid[1], at(*grid)[0], 0)),
        "wide columns": pl.BlockSpec((None, None, columns, head_size), lambda *grid: (grid[0], grid[1], at(*grid)[1], 0)),
        "position": pl.BlockSpec((None, 1, rows), lambda *grid: (grid[0], 0, at(*grid)[0])),
        "span": pl.BlockSpec((None, None, 2, columns), lambda *grid: (grid[0], grid[1], 0, at(*grid)[1])),
        "row numbers": pl.BlockSpec((None, None, 1, rows), lambda *grid: (grid[0], grid[1], 0, at(*grid)[0])),
    }

    def run(row_smem_ref: Any, column_smem_ref: Any, *refs: Any) -> None:
        b, k, outer, inner = (pl.program_id(axis) for axis in range(4))
        is_first, is_last = inner == 0, inner == pl.num_programs(3) - 1
        body(is_first, may_read(b, k, outer, inner, row_smem_ref, column_smem_ref), is_last, *refs)

    outer, inner = tile(*num_blocks)
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, heads, outer, inner),
            in_specs=[specs[name] for name in INPUTS[: 5 + len(more)]],
            out_specs=jax.tree.map(specs.get, out),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name=name,
    )(
        *(x.ravel() for x in pallas.ranges(position, begin, end, rows, columns)),
        query,
        key,
        value,
        position[:, None],
        jnp.stack([begin, end], axis=2),
        *(x if x.ndim == 4 else x[:, :, None] for x in more),
    )


def attend_tile(
    is_first: Any,
    may_read: Any,
    is_last: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    position_ref: Any,
    span_ref: Any,
    out_ref: Any,
    log_total_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    sum_ref: Any,
) -> None:
    """Adds a tile to the running softmax of its rows."""

    @pl.when(is_first)
    def _() -> None:
        peak_ref[...] = jnp.full(peak_ref.shape, -jnp.inf, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    @pl.when(may_read)
    def _() -> None:
        position_I1 = upright(position_ref[...])
        is_visible_IC = (span_ref[0:1] <= position_I1) & (position_I1 < span_ref[1:2])
        logits_IC = dot(query_ref[...], key_ref[...], 1, 1) * query_ref.shape[1] ** -0.5
        logits_IC = jnp.where(is_visible_IC, logits_IC, -jnp.inf)
        peak_I1 = peak_ref[...]
        new_peak_I1 = jnp.maximum(peak_I1, jnp.max(logits_IC, axis=1, keepdims=True))
        base_I1 = jnp.where(new_peak_I1 == -jnp.inf, 0.0, new_peak_I1)  # the row reads nothing so far
        weight_IC, scale_I1 = jnp.exp(logits_IC - base_I1), jnp.exp(peak_I1 - base_I1)
        peak_ref[...] = new_peak_I1
        total_ref[...] = total_ref[...] * scale_I1 + weight_IC.sum(axis=1, keepdims=True)
        sum_ref[...] = sum_ref[...] * scale_I1 + dot(weight_IC.astype(value_ref.dtype), value_ref[...], 1, 0)

    @pl.when(is_last)
    def _() -> None:
        peak_I1 = peak_ref[...]
        is_empty_I1 = peak_I1 == -jnp.inf
        total_I1 = jnp.where(is_empty_I1, 1.0, total_ref[...])
        out_ref[...] = (sum_ref[...] / total_I1).astype(out_ref.dtype)
        log_total_I1 = jnp.log(total_I1) + jnp.where(is_empty_I1, 0.0, peak_I1)
        log_total_ref[...] = jnp.broadcast_to(log_total_I1, (out_ref.shape[0], LANES)).T[:1]


def add_query_gradient(
    is_first: Any,
    may_read: Any,
    is_last: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    position_ref: Any,
    span_ref: Any,
    log_total_ref: Any,
    grad_ref: Any,
    delta_ref: Any,
    out_ref: Any,
    sum_ref: Any,
) -> None:
    """Adds the contribution of a tile's columns to the gradient of its queries."""

    @pl.when(is_first)
    def _() -> None:
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    scale = query_ref.shape[1] ** -0.5

    @pl.when(may_read)
    def _() -> None:
        position_I1, log_total_I1, delta_I1 = (upright(ref[...]) for ref in (position_ref, log_total_ref, delta_ref))
        is_visible_IC = (span_ref[0:1] <= position_I1) & (position_I1 < span_ref[1:2])
        logits_IC = dot(query_ref[...], key_ref[...], 1, 1) * scale
        weight_IC = jnp.where(is_visible_IC, jnp.exp(logits_IC - log_total_I1), 0.0)
        slope_IC = weight_IC * (dot(grad_ref[...], value_ref[...], 1, 1) - delta_I1)
        sum_ref[...] += dot(slope_IC.astype(key_ref.dtype), key_ref[...], 1, 0)

    @pl.when(is_last)
    def _() -> None:
        out_ref[...] = (sum_ref[...] * scale).astype(out_ref.dtype)


def add_column_gradients(
    is_first: Any,
    may_read: Any,
    is_last: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    position_ref: Any,
    span_ref: Any,
    log_total_ref: Any,
    grad_ref: Any,
    delta_ref: Any,
    key_out_ref: Any,
    value_out_ref: Any,
    key_sum_ref: Any,
    value_sum_ref: Any,
) -> None:
    """Adds the contribution of a tile's rows to the gradients of its columns; weights are columns first, never transposed."""

    @pl.when(is_first)
    def _() -> None:
        key_sum_ref[...] = jnp.zeros(key_sum_ref.shape, jnp.float32)
        value_sum_ref[...] = jnp.zeros(value_sum_ref.shape, jnp.float32)

    scale = query_ref.shape[1] ** -0.5

    @pl.when(may_read)
    def _() -> None:
        begin_C1, end_C1 = upright(span_ref[0:1]), upright(span_ref[1:2])
        is_visible_CI = (begin_C1 <= position_ref[...]) & (position_ref[...] < end_C1)
        logits_CI = dot(key_ref[...], query_ref[...], 1, 1) * scale
        weight_CI = jnp.where(is_visible_CI, jnp.exp(logits_CI - log_total_ref[...]), 0.0)
        value_sum_ref[...] += dot(weight_CI.astype(grad_ref.dtype), grad_ref[...], 1, 0)
        slope_CI = weight_CI * (dot(value_ref[...], grad_ref[...], 1, 1) - delta_ref[...])
        key_sum_ref[...] += dot(slope_CI.astype(query_ref.dtype), query_ref[...], 1, 0)

    @pl.when(is_last)
    def _() -> None:
        key_out_ref[...] = (key_sum_ref[...] * scale).astype(key_out_ref.dtype)
        value_out_ref[...] = value_sum_ref[...].astype(value_out_ref.dtype)


def upright(x_1I: Array) -> Array:
    """The row as a column; a reshape would need a gather, which TPU v4 does not have."""
    return jnp.broadcast_to(x_1I, (LANES, x_1I.shape[1])).T[:, :1]


def dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """The product over an axis of each input, at the precision of the inputs."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)
