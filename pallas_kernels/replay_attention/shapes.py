"""The arguments of real calls: a prefill chunk, and the replay of whole rows, which scoring uses too."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (
    Case("chunk of a prompt"),
    Case("replay", {"batch": 2}, {"tokens": 1024, "replayed": True}),
    Case("replay, gradient", {"batch": 2}, {"tokens": 1024, "replayed": True}, is_gradient=True),
)


def arguments(model: ModelShape, workload: Workload, *, tokens: int = 256, replayed: bool = False) -> tuple[Any, ...]:
    """Shapes of a chunk of `tokens` queries of one prompt over a whole table.

    With `replayed`, shapes of whole rows instead: the queries are all tokens of every row, over as many columns with sources.
    """
    batch = workload.batch if replayed else 1
    num_columns = tokens if replayed else workload.max_pages() * workload.page_size
    query = of(workload.dtype, batch, tokens, model.num_query_heads, model.head_size)
    key = of(workload.dtype, batch, num_columns, model.num_kv_heads, model.head_size)
    columns = of(jnp.int32, batch, model.num_kv_heads, num_columns)
    source: jax.ShapeDtypeStruct | None = columns if replayed else None
    return query, key, key, of(jnp.int32, batch, tokens), columns, columns, source


def values(model: ModelShape, workload: Workload, **options: Any) -> tuple[Any, ...]:
    """A chunk at the end of a full row; replayed, each key is read from its token on, and seven of eight end early."""
    query, key, value, position, begin, _, source = arguments(model, workload, **options)
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = (jax.random.normal(random, x.shape, x.dtype) for random, x in zip(keys, (query, key, value), strict=True))
    token = jnp.arange(query.shape[1], dtype=jnp.int32)
    column = jnp.broadcast_to(jnp.arange(begin.shape[-1], dtype=jnp.int32), begin.shape)
    if source is not None:
        lasting = jnp.where(column % 8 == 0, begin.shape[-1], begin.shape[-1] // 8)
        return *drawn, jnp.broadcast_to(token, position.shape), column, column + lasting, column
    when = workload.slots - query.shape[1] + token
    is_filled = column < workload.slots
    end = jnp.where(is_filled, jnp.iinfo(jnp.int32).max, -1)
    return *drawn, jnp.broadcast_to(when, position.shape), jnp.where(is_filled, column, -1), end, None


def num_bytes(model: ModelShape, workload: Workload, **options: Any) -> int:
    """Bytes of queries, keys and values, read once, and of outputs, written; the time goes into arithmetic."""
    query, key, *_ = arguments(model, workload, **options)
    return 2 * (query.size + key.size) * query.dtype.itemsize
