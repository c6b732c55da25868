"""Plain XLA for a CPU: each block of query rows loops over a list of those blocks of columns that one of them may read.

The gradients of queries and columns come from one walk over the same lists, since a CPU adds to one place at a time. Products
are in float32, whatever the inputs are.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.replay_attention import pallas, reference

ROWS, COLUMNS = 256, 128  # per tile
LEAST = reference.BLOCK  # queries, which plain XLA takes at once


class Tiles(NamedTuple):
    """The size of a tile."""

    rows: int
    columns: int


def why_not(query: Any, key: Any, value: Any, position: Any, begin: Any, end: Any, *_: Any, sorts: bool = False) -> str | None:
    """Why it is not used for these arguments; None when it is."""
    if reason := pallas.why_not_floats(query, key, value):
        return reason
    if query.shape[1] <= LEAST:
        return f"there must be more than {LEAST} queries; got {query.shape[1]}"
    return None


@functools.partial(jax.jit, static_argnames=("sorts", "rows", "columns"))
def replay_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    position: Int[Array, "B T"],
    begin: Int[Array, "B K C"],
    end: Int[Array, "B K C"],
    source: Int[Array, "B K C"] | None,
    sink: Float[Array, " N"] | None = None,
    sorts: bool = False,
    rows: int = ROWS,
    columns: int = COLUMNS,
) -> Float[Array, "B T N H"]:
    """See `pallas_kernels.replay_attention`."""
    passes = pallas.Passes(forward, backward, Tiles(rows, columns))
    return pallas.attend(passes, rows, columns, query, key, value, position, begin, end, source, sink, sorts)


def forward(tiles: Tiles, *args: Array) -> tuple[Array, Array]:
    """The output of every row and the log of its softmax's denominator, 0 where it reads nothing."""
    return by_head(of_head, tiles, *args)


def backward(tiles: Tiles, *args: Array) -> tuple[Array, Array, Array]:
    """The gradients of query, key and value."""
    return by_head(gradients_of_head, tiles, *args)


def by_head(body: Any, tiles: Tiles, query: Array, key: Array, value: Array, position: Array, *more: Array) -> Any:
    """Calls the body with one KV head's arrays in blocks, and its lists; results have the axes of the inputs."""
    (batch, heads), (begin, end, *numbers) = query.shape[:2], more
    may_read = pallas.may_read(position, begin, end, *tiles)
    count, order = may_read.sum(axis=3, dtype=jnp.int32), pallas.to_visit(may_read, axis=3)

    def blocks(x: Array, size: int) -> Array:
        return x.reshape(batch * heads, -1, size, *x.shape[3:])

    of_heads = jnp.broadcast_to(position[:, None], query.shape[:3])
    rows = tuple(blocks(x, tiles.rows) for x in (query, of_heads, *numbers))
    columns = tuple(blocks(x, tiles.columns) for x in (key, value, begin, end))
    lists = tuple(x.reshape(batch * heads, *x.shape[2:]) for x in (count, order))
    results = lax.map(lambda head: body(*head), (lists, rows, columns))
    return jax.tree.map(lambda x: x.reshape(batch, heads, -1, *x.shape[3:]), results)


def of_head(lists: tuple[Array, ...], rows: tuple[Array, ...], columns: tuple[Array, ...]) -> tuple[Array, Array]:
    """The running softmax of each block of rows over the blocks of columns on its list."""

    def of_rows(block: tuple[tuple[Array, ...], tuple[Array, ...]]) -> tuple[Array, Array]:
        (count, order), (query_IH, position_I) = block
        scaled_IH = query_IH.astype(jnp.float32) * query_IH.shape[1] ** -0.5

        def attend(at: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            peak_I, total_I, sum_IH = carry
            key_CH, value_CH, begin_C, end_C = tile(columns, order[at])
            logits_IC = dot(scaled_IH, key_CH, 1, 1)
            logits_IC = jnp.where(visible(position_I, begin_C, end_C), logits_IC, -jnp.inf)
            new_peak_I = jnp.maximum(peak_I, jnp.max(logits_IC, axis=1))
            base_I = jnp.where(new_peak_I == -jnp.inf, 0.0, new_peak_I)  # the row reads nothing so far
            weight_IC, scale_I = jnp.exp(logits_IC - base_I[:, None]), jnp.exp(peak_I - base_I)
            sum_IH = sum_IH * scale_I[:, None] + dot(weight_IC, value_CH, 1, 0)
            return new_peak_I, total_I * scale_I + jnp.sum(weight_IC, axis=1), sum_IH

        none = jnp.full(position_I.shape, -jnp.inf), jnp.zeros(position_I.shape), jnp.zeros(query_IH.shape)
        peak_I, total_I, sum_IH = lax.fori_loop(0, count, attend, none)
        is_empty_I = peak_I == -jnp.inf
        total_I = jnp.where(is_empty_I, 1.0, total_I)
        log_total_I = jnp.log(total_I) + jnp.where(is_empty_I, 0.0, peak_I)
        return (sum_IH / total_I[:, None]).astype(query_IH.dtype), log_total_I

    return lax.map(of_rows, (lists, rows))


def gradients_of_head(
    lists: tuple[Array, ...], rows: tuple[Array, ...], columns: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """Each tile's weights are computed once more, and added to the gradients of its rows and columns."""
    num_blocks, size, head_size = columns[0].shape
    none = jnp.zeros((num_blocks, size, head_size), jnp.float32)

    def of_rows(sums: tuple[Array, Array], block: Any) -> tuple[tuple[Array, Array], Array]:
        (count, order), (query_IH, position_I, log_total_I, grad_IH, delta_I) = block
        scale = head_size**-0.5
        scaled_IH, grad_IH = query_IH.astype(jnp.float32) * scale, grad_IH.astype(jnp.float32)

        def add(at: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            sum_IH, key_sum, value_sum = carry
            key_CH, value_CH, begin_C, end_C = tile(columns, order[at])
            logits_IC = dot(scaled_IH, key_CH, 1, 1)
            is_visible_IC = visible(position_I, begin_C, end_C)
            weight_IC = jnp.where(is_visible_IC, jnp.exp(logits_IC - log_total_I[:, None]), 0.0)
            slope_IC = weight_IC * (dot(grad_IH, value_CH, 1, 1) - delta_I[:, None])
            key_sum = key_sum.at[order[at]].add(dot(slope_IC, scaled_IH, 0, 0))
            value_sum = value_sum.at[order[at]].add(dot(weight_IC, grad_IH, 0, 0))
            return sum_IH + dot(slope_IC, key_CH, 1, 0), key_sum, value_sum

        sum_IH, *sums_of_columns = lax.fori_loop(0, count, add, (jnp.zeros(query_IH.shape), *sums))
        return tuple(sums_of_columns), (sum_IH * scale).astype(query_IH.dtype)

    (key_sum, value_sum), of_query = lax.scan(of_rows, (none, none), (lists, rows))
    return of_query, key_sum.astype(columns[0].dtype), value_sum.astype(columns[1].dtype)


def tile(columns: tuple[Array, ...], index: Any) -> tuple[Array, ...]:
    """A block of keys, values, begins and ends; floats in float32."""
    key_CH, value_CH, begin_C, end_C = (lax.dynamic_index_in_dim(x, index, keepdims=False) for x in columns)
    return key_CH.astype(jnp.float32), value_CH.astype(jnp.float32), begin_C, end_C


def visible(position_I: Int[Array, " I"], begin_C: Int[Array, " C"], end_C: Int[Array, " C"]) -> Bool[Array, "I C"]:
    """Which columns each row reads."""
    return (begin_C <= position_I[:, None]) & (position_I[:, None] < end_C)


def dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """The product over an axis of each input."""
    return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())), precision=lax.Precision.HIGHEST)
