"""The shared part of the kernels: gathers columns, folds heads into rows, and differentiates three passes of a platform.

A tile is a block of query rows (the G heads of a token are neighbours) times a block of columns; its weights exist only while
it is computed. The forward pass saves its output and the log of each softmax's denominator, from which the backward passes
compute the weights of a tile again. One loops over columns for the gradient of queries, the other over queries for that of
columns, so two tiles never add to the same place at once. The ranges of positions and spans show which tiles have nothing
visible. Columns that end early may be sorted first, so that those of a tile are read at the same time. The sink of a head needs
no pass of its own: it scales the output and raises the log of the denominator, from which the backward passes then compute the
right weights. Letters: I query rows of a KV head (T * G, padded), C columns (padded), NI and NC their blocks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.replay_attention.reference import take_columns

FIRST, LAST = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
LEAST_SPAN = 256  # shorter spans count as one of this length: a tile has as many queries, or nearly


class Passes(NamedTuple):
    """The kernels of a platform; each is called as `f(settings, query, key, value, position, begin, end, ...)`."""

    forward: Callable[..., Any]  # -> output [B, K, I, H], log of the denominators [B, K, I]
    backward: Callable[..., Any]  # (..., log_total, grad, delta) -> gradients of query, key and value
    settings: Any  # hashable


def why_not_floats(query: Any, key: Any, value: Any) -> str | None:
    """Why no kernel can take these queries, keys and values; None when one can."""
    if query.dtype not in (jnp.float32, jnp.bfloat16) or not query.dtype == key.dtype == value.dtype:
        got = f"{query.dtype}, {key.dtype} and {value.dtype}"
        return f"queries, keys and values must all be float32 or all bfloat16; got {got}"
    return None


def attend(
    passes: Passes,
    rows_multiple: int,
    columns_multiple: int,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    position: Int[Array, "B T"],
    begin: Int[Array, "B K C"],
    end: Int[Array, "B K C"],
    source: Int[Array, "B K C"] | None,
    sink: Float[Array, " N"] | None = None,
    sorts: bool = False,
) -> Float[Array, "B T N H"]:
    """`pallas_kernels.replay_attention` by the passes of a platform, with rows and columns padded to these multiples."""
    batch, num_tokens, num_heads, head_size = query.shape
    num_kv_heads, is_used = key.shape[2], begin < end
    group, num_columns = num_heads // num_kv_heads, begin.shape[2]
    num_rows = num_tokens * group
    more_rows, more_columns = -num_rows % rows_multiple, -num_columns % columns_multiple

    query_BKTGH = jnp.moveaxis(query.reshape(batch, num_tokens, num_kv_heads, group, head_size), 1, 2)
    query_BKIH = pad(query_BKTGH.reshape(batch, num_kv_heads, num_rows, head_size), more_rows)
    key_BKCH, value_BKCH = (take_columns(x, source, is_used) for x in (key, value))
    if sorts:
        order = order_of(position, begin, end)
        begin, end, is_used = (jnp.take_along_axis(x, order, axis=2) for x in (begin, end, is_used))
        key_BKCH, value_BKCH = permuted(key_BKCH, order), permuted(value_BKCH, order)
    key_BKCH, value_BKCH = pad(key_BKCH, more_columns), pad(value_BKCH, more_columns)
    # Padded rows repeat the last position, which widens no tile's range; their output is cut off.
    position_BI = jnp.pad(jnp.repeat(position.astype(jnp.int32), group, axis=1), [(0, 0), (0, more_rows)], mode="edge")
    begin_BKC, end_BKC = (
        jnp.pad(jnp.where(is_used, x, never).astype(jnp.int32), [(0, 0), (0, 0), (0, more_columns)], constant_values=never)
        for x, never in ((begin, LAST), (end, FIRST))
    )
    sink_KI = None
    if sink is not None:
        sink_KI = jnp.tile(sink.astype(jnp.float32).reshape(num_kv_heads, group), (1, num_tokens))
        sink_KI = jnp.pad(sink_KI, [(0, 0), (0, more_rows)])
    out_BKIH = attend_columns(passes, query_BKIH, key_BKCH, value_BKCH, position_BI, begin_BKC, end_BKC, sink_KI)
    out_BKTGH = out_BKIH[:, :, :num_rows].reshape(query_BKTGH.shape)
    return jnp.moveaxis(out_BKTGH, 2, 1).reshape(query.shape)


def order_of(position: Int[Array, "B T"], begin: Int[Array, "B K C"], end: Int[Array, "B K C"]) -> Int[Array, "B K C"]:
    """The order of columns by the length of their spans, in powers of 2, and then by their end.

    Neighbours are then read at nearly the same time for nearly as long, so few tiles have something visible (docs/replay.md has
    counts).
    """
    end = jnp.minimum(end, position.max(axis=1)[:, None, None] + 1)
    octave = 31 - jax.lax.clz(jnp.maximum(end - jnp.minimum(begin, end), LEAST_SPAN).astype(jnp.int32))
    place = jax.lax.broadcasted_iota(jnp.int32, begin.shape, 2)
    return jax.lax.sort((jnp.where(begin < end, octave, 32), end.astype(jnp.int32), place), num_keys=2)[2]


@jax.custom_vjp
def permuted(x: Float[Array, "B K C H"], order: Int[Array, "B K C"]) -> Float[Array, "B K C H"]:
    """The columns in another order; the gradient is gathered too, and not added up by place."""
    return jnp.take_along_axis(x, order[..., None], axis=2)


permuted.defvjp(
    lambda x, order: (permuted(x, order), order), lambda order, grad: (permuted(grad, jnp.argsort(order, axis=2)), None)
)


def pad(x: Float[Array, "B K I H"], more: int) -> Array:
    """Pads with zeros after the last row."""
    return jnp.pad(x, [(0, 0), (0, 0), (0, more), (0, 0)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_columns(
    passes: Passes,
    query: Float[Array, "B K I H"],
    key: Float[Array, "B K C H"],
    value: Float[Array, "B K C H"],
    position: Int[Array, "B I"],
    begin: Int[Array, "B K C"],
    end: Int[Array, "B K C"],
    sink: Float[Array, "K I"] | None,
) -> Float[Array, "B K I H"]:
    """The output of every row over the columns whose span contains its position, and over its sink."""
    return forward(passes, query, key, value, position, begin, end, sink)[0]


def forward(passes: Passes, *args_and_sink: Any) -> tuple[Array, tuple[Any, ...]]:
    """The output, and the residuals of the backward pass, none larger than the rows or the columns."""
    *args, sink = args_and_sink
    out, log_total = passes.forward(passes.settings, *args)
    if sink is not None:
        out = (out.astype(jnp.float32) * jax.nn.sigmoid(log_total - sink)[..., None]).astype(out.dtype)
        log_total = jnp.logaddexp(log_total, sink)
    return out, (*args_and_sink, out, log_total)


def backward(passes: Passes, kept: tuple[Any, ...], grad: Array) -> tuple[Array | None, ...]:
    """Gradients of query, key, value and sink: for the softmax, the sink is a column whose value is 0."""
    *args, sink, out, log_total = kept
    delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    of_sink = None if sink is None else -jnp.sum(jnp.exp(sink - log_total) * delta, axis=0)
    return *passes.backward(passes.settings, *args, log_total, grad, delta), None, None, None, of_sink


attend_columns.defvjp(forward, backward)


def may_read(
    position: Int[Array, "B I"], begin: Int[Array, "B K C"], end: Int[Array, "B K C"], rows: int, columns: int
) -> Bool[Array, "B K NI NC"]:
    """Whether a query of each block of rows may read a column of each block: which tiles are visited."""
    rows_B2I, columns_BK2C = ranges(position, begin, end, rows, columns)
    lowest, highest = rows_B2I[:, None, 0, :, None], rows_B2I[:, None, 1, :, None]
    return (columns_BK2C[:, :, 0, None] <= highest) & (lowest < columns_BK2C[:, :, 1, None])


def to_visit(may_read: Bool[Array, "B K NI NC"], axis: int) -> Int[Array, "B K NI NC"]:
    """The blocks of an axis with those to visit first, both in order."""
    index = jax.lax.broadcasted_iota(jnp.int32, may_read.shape, axis)
    return jax.lax.sort((~may_read, index), dimension=axis, num_keys=1)[1]


def ranges(
    position: Int[Array, "B I"], begin: Int[Array, "B K C"], end: Int[Array, "B K C"], rows: int, columns: int
) -> tuple[Int[Array, "B 2 NI"], Int[Array, "B K 2 NC"]]:
    """The least and greatest position of each block of rows; the least begin and greatest end of each block of columns."""
    position, begin, end = (
        x.reshape(*x.shape[:-1], -1, size) for x, size in ((position, rows), (begin, columns), (end, columns))
    )
    row_ranges = jnp.stack([position.min(axis=-1), position.max(axis=-1)], axis=-2)
    return row_ranges, jnp.stack([begin.min(axis=-1), end.max(axis=-1)], axis=-2)
