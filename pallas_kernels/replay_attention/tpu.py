"""Pallas for TPU: flash attention over a list of tiles, pipelined by Pallas.

Tiles in which nothing is visible by the ranges of positions and spans are not on the list; an output block that reads nothing
has one tile there, to write its zeros. The list is in scalar memory, where the index maps read it. It has two halves, the even
output blocks and the odd ones, one for each core of chips that have two. The grid is as long as the longer half, which depends
on the data. Attention weights have columns first: the peak and the sum of rows lie along the lanes of a register then, and do
not take one lane each.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic as pltpu
from pallas_kernels.replay_attention import pallas

BLOCK = 512  # rows or columns per tile, at most; half for wide heads, so that two buffers of each fit
SORTED_BLOCKS = 1024, 128  # rows and columns per tile of sorted columns, at most: narrow tiles hold less that nobody reads
WIDE = 512  # bytes of a wide head, at least
MOST_HEAD = 1024  # bytes of a head, at most
MOST_TILES = 1 << 17  # of a list, in scalar memory, which has 1 MiB
MOST_HEADS = 1 << 13  # in all rows, so that a code fits in 31 bits
LANES = 128  # blocks are multiples of this
HALVES = 2


class Settings(NamedTuple):
    """The settings of the passes."""

    rows: int  # per tile
    columns: int
    interpret: Any


class Tiles(NamedTuple):
    """The tiles that a call visits. Output blocks are numbered through all heads, and so are input blocks.

    A call has the output blocks from `first` on, of which even ones are in the first half. A code has, from the high bits, the
    place of the output block in its half, the input block, and in one bit whether it is read. Codes ascend.
    """

    code: Int[Array, "halves most"]  # the greatest int32 after the last one
    length: Int[Array, " halves"]
    first: Int[Array, "1"]


def why_not(query: Any, key: Any, value: Any, position: Any, begin: Any, end: Any, *_: Any, sorts: bool = False) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if reason := pallas.why_not_floats(query, key, value):
        return reason
    head_size = query.shape[3]
    if head_size % 64 or head_size * query.dtype.itemsize > MOST_HEAD:
        most = MOST_HEAD // query.dtype.itemsize
        return f"the head size must be a multiple of 64 and at most {most} in {query.dtype}; got {head_size}"
    rows, columns = blocks_of(query, key, begin, sorts)
    most_blocks = max(pl.cdiv(query.shape[1] * query.shape[2] // key.shape[2], rows), pl.cdiv(begin.shape[2], columns))
    if HALVES * most_blocks > MOST_TILES:
        return f"there must be at most {MOST_TILES // HALVES} blocks of queries or of columns; got {most_blocks}"
    if (heads := query.shape[0] * key.shape[2]) > MOST_HEADS:
        return f"there must be at most {MOST_HEADS} KV heads in all rows; got {heads}"
    return None


def blocks_of(query: Any, key: Any, begin: Any, sorts: bool) -> tuple[int, int]:
    """Rows and columns of a tile, for few tiles with little padding."""
    most_rows, most_columns = SORTED_BLOCKS if sorts else (BLOCK, BLOCK)
    if query.shape[3] * query.dtype.itemsize >= WIDE:
        most_rows, most_columns = most_rows // 2, max(LANES, most_columns // 2)
    return even(query.shape[1] * query.shape[2] // key.shape[2], most_rows), even(begin.shape[2], most_columns)


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
    """See `pallas_kernels.replay_attention`."""
    rows, columns = blocks_of(query, key, begin, sorts)
    passes = pallas.Passes(forward, backward, Settings(rows, columns, interpret))
    return pallas.attend(passes, rows, columns, query, key, value, position, begin, end, source, sink, sorts)


def forward(settings: Settings, query: Array, *args: Array) -> tuple[Array, Array]:
    """The output of every row and the log of its softmax's denominator, 0 where it reads nothing."""
    out, log_total = launch(
        attend_tile,
        settings,
        (query, *args),
        out=(("wide rows", query.dtype), ("row numbers", jnp.float32)),
        scratch=[(1, settings.rows), (1, settings.rows), (query.shape[3], settings.rows)],
        name="replay_attention",
    )
    return out.reshape(query.shape), log_total.reshape(query.shape[:3])


def backward(settings: Settings, *args: Array) -> tuple[Array, Array, Array]:
    """The gradients of query, key and value."""
    key, value = backward_columns(settings, *args)
    return backward_query(settings, *args), key, value


def backward_query(settings: Settings, query: Array, *args: Array) -> Array:
    """The query's gradient."""
    (grad,) = launch(
        add_query_gradient,
        settings,
        (query, *args),
        out=(("wide rows", query.dtype),),
        scratch=[(query.shape[3], settings.rows)],
        name="replay_attention_backward_query",
    )
    return grad.reshape(query.shape)


def backward_columns(settings: Settings, query: Array, key: Array, *args: Array) -> tuple[Array, Array]:
    """The gradients of key and value."""
    grads = launch(
        add_column_gradients,
        settings,
        (query, key, *args),
        out=(("wide columns", key.dtype),) * 2,
        scratch=[(settings.columns, key.shape[3])] * 2,
        is_by_columns=True,
        name="replay_attention_backward_columns",
    )
    return grads[0].reshape(key.shape), grads[1].reshape(key.shape)


INPUTS = ("wide rows", "wide columns", "wide columns", "position", "span", "row numbers", "wide rows", "row numbers")


def launch(
    body: Any,
    settings: Settings,
    inputs: tuple[Array, ...],
    *,
    out: tuple[tuple[str, Any], ...],
    scratch: list[tuple[int, int]],
    name: str,
    is_by_columns: bool = False,
) -> tuple[Array, ...]:
    """Launches a pass over the tiles to visit; inputs are as in `INPUTS`, `out` has the kinds of outputs and their types.

    An output is `[blocks, ...]`, with the blocks of rows (or of columns) of all heads.
    """
    rows, columns, interpret = settings
    query, key, value, position, begin, end, *more = inputs
    shapes = {
        "wide rows": (rows, query.shape[3]),
        "wide columns": (columns, key.shape[3]),
        "position": (1, rows),
        "span": (2, columns),
        "row numbers": (1, rows),
    }
    spans = jnp.stack([x.reshape(-1, columns) for x in (begin, end)], axis=1)
    of_heads = jnp.broadcast_to(position[:, None], query.shape[:3])
    operands = [
        x.reshape(-1, *shapes[kind]) for kind, x in zip(INPUTS, (query, key, value, of_heads, spans, *more), strict=False)
    ]
    may_read_BKIC = pallas.may_read(position, begin, end, rows, columns)
    may_read_BKPQ = jnp.swapaxes(may_read_BKIC, 2, 3) if is_by_columns else may_read_BKIC
    tiles = tiles_to_visit(may_read_BKPQ)
    total, bits = may_read_BKPQ.size // may_read_BKPQ.shape[3], bits_of(may_read_BKPQ.size // may_read_BKPQ.shape[2])
    num_calls, _, most = tiles.code.shape
    size = HALVES * (most // may_read_BKPQ.shape[3])

    def at(half: Any, step: Any, code_ref: Any, length_ref: Any, _: Any) -> tuple[Any, Any, Any]:
        """What a step does: `decoded` of its code. Beyond either end of a half: what its first or last step does."""
        return decoded(code_ref[half * most + jnp.clip(step, 0, length_ref[half] - 1)], half, bits)

    def own(*grid: Any) -> tuple[Any, int, int]:
        first_ref = grid[-1]
        return jnp.minimum(first_ref[0] + at(*grid)[0], total - 1), 0, 0

    def other(*grid: Any) -> tuple[Any, int, int]:
        return at(*grid)[1], 0, 0

    def output(*grid: Any) -> tuple[Any, int, int]:
        return at(*grid)[0], 0, 0

    def spec(kind: str, index: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shapes[kind]), index)

    def run(code_ref: Any, length_ref: Any, first_ref: Any, *refs: Any) -> None:
        half, step = pl.program_id(0), pl.program_id(1)
        steps = [at(half, step + more, code_ref, length_ref, first_ref) for more in (-1, 0, 1)]
        before, now, after = (place for place, _, _ in steps)
        is_read, last = steps[1][2] == 1, length_ref[half] - 1

        @pl.when(step <= last)
        def _() -> None:
            body((step == 0) | (before != now), is_read, (step == last) | (after != now), *refs)

    def call(tiles: Tiles) -> tuple[Array, ...]:
        by_columns = ("wide columns", "span")
        return pl.pallas_call(
            run,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(tiles),
                grid=(HALVES, tiles.length.max()),
                in_specs=[spec(x, own if (x in by_columns) == is_by_columns else other) for x in INPUTS[: len(operands)]],
                out_specs=tuple(spec(kind, output) for kind, _ in out),
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=tuple(jax.ShapeDtypeStruct((size, *shapes[kind]), dtype) for kind, dtype in out),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
            interpret=interpret,
            name=name,
        )(tiles.code.ravel(), tiles.length, tiles.first, *operands)

    if num_calls == 1:
        return tuple(x[:total] for x in call(jax.tree.map(lambda x: x[0], tiles)))
    return tuple(x.reshape(-1, *x.shape[2:])[:total] for x in lax.map(call, tiles))


def decoded(code: Any, half: Any, bits: int) -> tuple[Any, Any, Any]:
    """The output block, counted from the first of its call, the input block, and 1 if it is read."""
    return HALVES * (code >> bits + 1) + half, code >> 1 & (1 << bits) - 1, code & 1


def bits_of(num_blocks: int) -> int:
    """The bits of a code that number these blocks."""
    return (num_blocks - 1).bit_length()


def tiles_to_visit(may_read: Bool[Array, "B K P Q"]) -> Tiles:
    """The lists of one or more calls, each field with the calls first."""
    num_heads, num_own, num_other = math.prod(may_read.shape[:2]), *may_read.shape[2:]
    total = num_heads * num_own
    num_calls = pl.cdiv(total, MOST_TILES // num_other // HALVES * HALVES)
    size = HALVES * pl.cdiv(total, HALVES * num_calls)
    may_read = jnp.pad(may_read.reshape(total, num_other), [(0, num_calls * size - total), (0, 0)])
    is_listed = may_read.at[:, 0].max(~may_read.any(axis=1))
    head = jnp.minimum(jnp.arange(num_calls * size, dtype=jnp.int32) // num_own, num_heads - 1)
    place = jnp.arange(num_calls * size, dtype=jnp.int32) % size // HALVES
    other = head[:, None] * num_other + jnp.arange(num_other, dtype=jnp.int32)
    code = (place[:, None] << bits_of(num_heads * num_other) | other) << 1 | may_read.astype(jnp.int32)
    code = jnp.where(is_listed, code, jnp.iinfo(jnp.int32).max)

    def in_halves(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(num_calls, size // HALVES, HALVES, num_other), 2, 1).reshape(num_calls, HALVES, -1)

    first = size * jnp.arange(num_calls, dtype=jnp.int32)[:, None]
    return Tiles(lax.sort(in_halves(code), dimension=2), in_halves(is_listed).sum(axis=2, dtype=jnp.int32), first)


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
        is_visible_CI = visible(span_ref, position_ref)
        logits_CI = dot(key_ref[...], query_ref[...], 1, 1) * query_ref.shape[1] ** -0.5
        logits_CI = jnp.where(is_visible_CI, logits_CI, -jnp.inf)
        peak_1I = peak_ref[...]
        new_peak_1I = jnp.maximum(peak_1I, jnp.max(logits_CI, axis=0, keepdims=True))
        base_1I = jnp.where(new_peak_1I == -jnp.inf, 0.0, new_peak_1I)  # the row reads nothing so far
        weight_CI, scale_1I = jnp.exp(logits_CI - base_1I), jnp.exp(peak_1I - base_1I)
        peak_ref[...] = new_peak_1I
        total_ref[...] = total_ref[...] * scale_1I + weight_CI.sum(axis=0, keepdims=True)
        sum_ref[...] = sum_ref[...] * scale_1I + dot(value_ref[...], weight_CI.astype(value_ref.dtype), 0, 0)

    @pl.when(is_last)
    def _() -> None:
        peak_1I = peak_ref[...]
        is_empty_1I = peak_1I == -jnp.inf
        total_1I = jnp.where(is_empty_1I, 1.0, total_ref[...])
        out_ref[...] = (sum_ref[...] / total_1I).T.astype(out_ref.dtype)
        log_total_ref[...] = jnp.log(total_1I) + jnp.where(is_empty_1I, 0.0, peak_1I)


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
        logits_CI = dot(key_ref[...], query_ref[...], 1, 1) * scale
        weight_CI = jnp.where(visible(span_ref, position_ref), jnp.exp(logits_CI - log_total_ref[...]), 0.0)
        slope_CI = weight_CI * (dot(value_ref[...], grad_ref[...], 1, 1) - delta_ref[...])
        sum_ref[...] += dot(key_ref[...], slope_CI.astype(key_ref.dtype), 0, 0)

    @pl.when(is_last)
    def _() -> None:
        out_ref[...] = (sum_ref[...] * scale).T.astype(out_ref.dtype)


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
    """Adds the contribution of a tile's rows to the gradients of its columns."""

    @pl.when(is_first)
    def _() -> None:
        key_sum_ref[...] = jnp.zeros(key_sum_ref.shape, jnp.float32)
        value_sum_ref[...] = jnp.zeros(value_sum_ref.shape, jnp.float32)

    scale = query_ref.shape[1] ** -0.5

    @pl.when(may_read)
    def _() -> None:
        logits_CI = dot(key_ref[...], query_ref[...], 1, 1) * scale
        weight_CI = jnp.where(visible(span_ref, position_ref), jnp.exp(logits_CI - log_total_ref[...]), 0.0)
        value_sum_ref[...] += dot(weight_CI.astype(grad_ref.dtype), grad_ref[...], 1, 0)
        slope_CI = weight_CI * (dot(value_ref[...], grad_ref[...], 1, 1) - delta_ref[...])
        key_sum_ref[...] += dot(slope_CI.astype(query_ref.dtype), query_ref[...], 1, 0)

    @pl.when(is_last)
    def _() -> None:
        key_out_ref[...] = (key_sum_ref[...] * scale).astype(key_out_ref.dtype)
        value_out_ref[...] = value_sum_ref[...].astype(value_out_ref.dtype)


def visible(span_ref: Any, position_ref: Any) -> Array:
    """Which columns (first axis) each row reads."""
    # Spans upright; a reshape would need a gather, which TPU v4 does not have.
    begin_C1, end_C1 = (jnp.broadcast_to(span_ref[i : i + 1], (LANES, span_ref.shape[1])).T[:, :1] for i in (0, 1))
    return (begin_C1 <= position_ref[...]) & (position_ref[...] < end_C1)


def dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """The product over an axis of each input, at the precision of the inputs."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)
