"""Pallas for NVIDIA GPUs: a program per block of rows loops over blocks of columns; for the gradients of columns, vice versa.

It starts at the first block that one of its rows may read and stops after the last one, so causal attention costs half. Of
sorted columns it visits those blocks alone that a row may read, from a list.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import shared_of_multiprocessor
from pallas_kernels.launch import dot, launch, load, store
from pallas_kernels.replay_attention import pallas

HEAD_SIZES = (16, 32, 64, 128, 256)
PROGRAMS = 264  # two per multiprocessor of a large GPU
SMALL = 128 * 1024  # bytes of shared memory of a multiprocessor, of which GPUs like L4 and RTX 3090 have fewer


class Tile(NamedTuple):
    """The size of a program's tile, and its resources."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


class Settings(NamedTuple):
    """The settings of the passes."""

    forward: Tile
    backward_query: Tile
    backward_columns: Tile
    interpret: Any
    lists: bool = False  # whether rows have a list of blocks to visit


def why_not(query: Any, key: Any, value: Any, position: Any, begin: Any, end: Any, *_: Any, sorts: bool = False) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if reason := pallas.why_not_floats(query, key, value):
        return reason
    if query.shape[3] not in HEAD_SIZES:
        return f"the head size must be one of {HEAD_SIZES}; got {query.shape[3]}"
    if max(query.shape[0], key.shape[2]) > 65535:
        return f"there must be at most 65535 batch rows and as many KV heads; got {query.shape[0]} and {key.shape[2]}"
    return None


def settings_for(query: Any, key: Any, begin: Any, interpret: Any) -> Settings:
    """Large tiles for tensor cores, smaller ones if they do not fit, and fewer rows if multiprocessors would be idle."""
    (batch, num_tokens, num_heads, head_size), num_kv_heads = query.shape, key.shape[2]
    num_rows, num_columns = num_tokens * num_heads // num_kv_heads, begin.shape[2]
    if query.dtype == jnp.float32:
        wide = head_size > 128
        tiles = [Tile(32, 16 if wide else 32, 4, 1)] * 2 + [Tile(16 if wide else 32, 32, 4, 1)]
    elif head_size > 128:
        is_small = shared_of_multiprocessor() < SMALL
        tiles = [Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 32 if is_small else 64, 4, 1)]
    else:
        tiles = [Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)]
        if batch * num_kv_heads * pl.cdiv(num_rows, 128) < PROGRAMS:
            tiles[0] = Tile(64, 64, 4, 3)
    rows, columns = (max(16, 1 << (size - 1).bit_length()) for size in (num_rows, num_columns))
    tiles = [tile._replace(rows=min(tile.rows, rows), columns=min(tile.columns, columns)) for tile in tiles]
    return Settings(tiles[0], tiles[1], tiles[2], interpret)


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
    settings = settings_for(query, key, begin, interpret)._replace(lists=sorts)
    rows, columns = (max(getattr(tile, name) for tile in settings[:3]) for name in ("rows", "columns"))
    passes = pallas.Passes(forward, backward, settings)
    return pallas.attend(passes, rows, columns, query, key, value, position, begin, end, source, sink, sorts)


def forward(settings: Settings, query: Array, *args: Array) -> tuple[Array, Array]:
    """The output of every row and the log of its softmax's denominator, 0 where it reads nothing."""
    out_shape = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    inputs = (query, *args)
    return walk(attend_rows, settings.forward, settings.interpret, inputs, out_shape, "replay_attention", settings.lists)


def backward(settings: Settings, *args: Array) -> tuple[Array, Array, Array]:
    """The gradients of query, key and value."""
    key, value = backward_columns(settings, *args)
    return backward_query(settings, *args), key, value


def backward_query(settings: Settings, query: Array, *args: Array) -> Array:
    """The query's gradient."""
    out_shape, name = jax.ShapeDtypeStruct(query.shape, query.dtype), "replay_attention_backward_query"
    inputs = (query, *args)
    return walk(find_query_gradient, settings.backward_query, settings.interpret, inputs, out_shape, name, settings.lists)


def backward_columns(settings: Settings, query: Array, key: Array, *args: Array) -> tuple[Array, Array]:
    """The gradients of key and value."""
    out_shape, name = (jax.ShapeDtypeStruct(key.shape, key.dtype),) * 2, "replay_attention_backward_columns"
    inputs = (query, key, *args)
    return walk(
        find_column_gradients, settings.backward_columns, settings.interpret, inputs, out_shape, name, is_by_columns=True
    )


def walk(
    body: Any,
    tile: Tile,
    interpret: Any,
    inputs: tuple[Array, ...],
    out_shape: Any,
    name: str,
    lists: bool = False,
    is_by_columns: bool = False,
) -> Any:
    """Launches a program per block of rows (or of columns), with the blocks of the others to visit (`visit`)."""
    query, key, _, position, begin, end, *_ = inputs
    may_read_BKIC = pallas.may_read(position, begin, end, tile.rows, tile.columns)
    axis = 2 if is_by_columns else 3
    index = lax.broadcasted_iota(jnp.int32, may_read_BKIC.shape, axis)
    if lists:
        stop = may_read_BKIC.sum(axis=axis, dtype=jnp.int32)
        start = pallas.to_visit(may_read_BKIC, axis)
    else:
        stop = jnp.where(may_read_BKIC, index + 1, 0).max(axis=axis)
        start = jnp.where(may_read_BKIC, index, may_read_BKIC.shape[axis]).min(axis=axis)  # not below `stop` if nothing is read
    grid = (start.shape[2], key.shape[1], query.shape[0])
    return launch(
        functools.partial(body, tile),
        start,
        stop,
        *inputs,
        name=name,
        grid=grid,
        out_shape=out_shape,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )


def visit(start_ref: Any, stop_ref: Any, place: tuple[Any, ...], step: Any, carry: Any) -> Any:
    """Calls `step` for each block to visit: from `start` to `stop`, or the first `stop` of the list in `start`."""
    stop = load(stop_ref.at[place])
    if len(start_ref.shape) == len(place):
        return lax.fori_loop(load(start_ref.at[place]), stop, step, carry)
    return lax.fori_loop(0, stop, lambda at, carry: step(load(start_ref.at[(*place, at)]), carry), carry)


def block(index: Any, size: int) -> Any:
    """The slice of a block on its axis."""
    return pl.ds(index * size, size)


def attend_rows(
    tile: Tile,
    start_ref: Any,
    stop_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    position_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    out_ref: Any,
    log_total_ref: Any,
) -> None:
    """Attends for a block of rows; the last block runs first, since causal rows at the end read the most columns."""
    i, k, b = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_size, rows = query_ref.shape[3], block(i, tile.rows)
    query_IH, position_I = load(query_ref.at[b, k, rows, :]), load(position_ref.at[b, rows])

    def attend(j: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        peak_I, total_I, sum_IH = carry
        columns = block(j, tile.columns)
        key_CH = load(key_ref.at[b, k, columns, :])
        begin_C, end_C = load(begin_ref.at[b, k, columns]), load(end_ref.at[b, k, columns])
        is_visible_IC = (begin_C[None] <= position_I[:, None]) & (position_I[:, None] < end_C[None])
        logits_IC = exact_dot(query_IH, key_CH.T) * head_size**-0.5
        logits_IC = jnp.where(is_visible_IC, logits_IC, -jnp.inf)
        new_peak_I = jnp.maximum(peak_I, jnp.max(logits_IC, axis=1))
        base_I = jnp.where(new_peak_I == -jnp.inf, 0.0, new_peak_I)  # the row reads nothing so far
        weight_IC, scale_I = jnp.exp(logits_IC - base_I[:, None]), jnp.exp(peak_I - base_I)
        value_CH = load(value_ref.at[b, k, columns, :])
        sum_IH = sum_IH * scale_I[:, None] + exact_dot(weight_IC.astype(value_CH.dtype), value_CH)
        return new_peak_I, total_I * scale_I + jnp.sum(weight_IC, axis=1), sum_IH

    begin = (
        jnp.full((tile.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((tile.rows,), jnp.float32),
        jnp.zeros((tile.rows, head_size), jnp.float32),
    )
    peak_I, total_I, sum_IH = visit(start_ref, stop_ref, (b, k, i), attend, begin)
    is_empty_I = peak_I == -jnp.inf
    total_I = jnp.where(is_empty_I, 1.0, total_I)
    store(out_ref.at[b, k, rows, :], (sum_IH / total_I[:, None]).astype(out_ref.dtype))
    store(log_total_ref.at[b, k, rows], jnp.log(total_I) + jnp.where(is_empty_I, 0.0, peak_I))


def find_query_gradient(
    tile: Tile,
    start_ref: Any,
    stop_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    position_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    log_total_ref: Any,
    grad_ref: Any,
    delta_ref: Any,
    out_ref: Any,
) -> None:
    """Computes the gradient of the queries of a block of rows."""
    i, k, b = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_size, rows = query_ref.shape[3], block(i, tile.rows)
    query_IH, grad_IH = load(query_ref.at[b, k, rows, :]), load(grad_ref.at[b, k, rows, :])
    position_I = load(position_ref.at[b, rows])
    log_total_I, delta_I = load(log_total_ref.at[b, k, rows]), load(delta_ref.at[b, k, rows])
    scale = head_size**-0.5

    def add(j: Any, sum_IH: Any) -> Any:
        columns = block(j, tile.columns)
        key_CH, value_CH = load(key_ref.at[b, k, columns, :]), load(value_ref.at[b, k, columns, :])
        begin_C, end_C = load(begin_ref.at[b, k, columns]), load(end_ref.at[b, k, columns])
        is_visible_IC = (begin_C[None] <= position_I[:, None]) & (position_I[:, None] < end_C[None])
        logits_IC = exact_dot(query_IH, key_CH.T) * scale
        weight_IC = jnp.where(is_visible_IC, jnp.exp(logits_IC - log_total_I[:, None]), 0.0)
        slope_IC = weight_IC * (exact_dot(grad_IH, value_CH.T) - delta_I[:, None])
        return sum_IH + exact_dot(slope_IC.astype(key_CH.dtype), key_CH)

    none = jnp.zeros((tile.rows, head_size), jnp.float32)
    sum_IH = visit(start_ref, stop_ref, (b, k, i), add, none)
    store(out_ref.at[b, k, rows, :], (sum_IH * scale).astype(out_ref.dtype))


def find_column_gradients(
    tile: Tile,
    start_ref: Any,
    stop_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    position_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    log_total_ref: Any,
    grad_ref: Any,
    delta_ref: Any,
    key_out_ref: Any,
    value_out_ref: Any,
) -> None:
    """Computes the gradients of a block of columns; the first block runs first, since causal rows read it the most."""
    j, k, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_size, columns = query_ref.shape[3], block(j, tile.columns)
    key_CH, value_CH = load(key_ref.at[b, k, columns, :]), load(value_ref.at[b, k, columns, :])
    begin_C, end_C = load(begin_ref.at[b, k, columns]), load(end_ref.at[b, k, columns])
    scale = head_size**-0.5

    def add(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        key_sum_CH, value_sum_CH = carry
        rows = block(i, tile.rows)
        query_IH, grad_IH = load(query_ref.at[b, k, rows, :]), load(grad_ref.at[b, k, rows, :])
        position_I = load(position_ref.at[b, rows])
        log_total_I, delta_I = load(log_total_ref.at[b, k, rows]), load(delta_ref.at[b, k, rows])
        is_visible_CI = (begin_C[:, None] <= position_I[None]) & (position_I[None] < end_C[:, None])
        logits_CI = exact_dot(key_CH, query_IH.T) * scale
        weight_CI = jnp.where(is_visible_CI, jnp.exp(logits_CI - log_total_I[None]), 0.0)
        value_sum_CH = value_sum_CH + exact_dot(weight_CI.astype(grad_IH.dtype), grad_IH)
        slope_CI = weight_CI * (exact_dot(value_CH, grad_IH.T) - delta_I[None])
        return key_sum_CH + exact_dot(slope_CI.astype(query_IH.dtype), query_IH), value_sum_CH

    none = jnp.zeros((tile.columns, head_size), jnp.float32)
    sums = visit(start_ref, stop_ref, (b, k, j), add, (none, none))
    store(key_out_ref.at[b, k, columns, :], (sums[0] * scale).astype(key_out_ref.dtype))
    store(value_out_ref.at[b, k, columns, :], sums[1].astype(value_out_ref.dtype))


def exact_dot(x: Array, y: Array) -> Array:
    """The product at the precision of its inputs."""
    return dot(x, y, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT)
