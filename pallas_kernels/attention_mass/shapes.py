"""The arguments of real calls: the score of a compaction, and a prefill chunk that sums the mass of its queries."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (
    Case("score"),
    Case("score, ages and log-weights", options={"window": 32, "with_age": True, "weighted": True}),
)


def arguments(
    model: ModelShape, workload: Workload, *, window: int = 8, with_age: bool = False, weighted: bool = False
) -> tuple[Any, ...]:
    """Shapes of the queries, keys, masks, ages and log-weights of every row. R-KV's window is 8, RPC's 32."""
    rows, slots = workload.num_rows(model), workload.slots
    age = of(jnp.int32, rows, slots) if with_age else None
    log_weight = of(jnp.float32, rows, slots) if weighted else None
    query = of(workload.dtype, rows, model.group, window, model.head_size)
    key = of(workload.dtype, rows, slots, model.head_size)
    return query, key, of(jnp.bool_, rows, slots), of(jnp.bool_, rows, window), age, log_weight


def values(model: ModelShape, workload: Workload, **options: Any) -> tuple[Any, ...]:
    """Normal queries and keys; all slots are candidates, from oldest to newest, with multiplicities of 1 to 4 in turn."""
    query, key, is_candidate, is_query, age, log_weight = arguments(model, workload, **options)
    keys = jax.random.split(jax.random.key(0))
    slot = jnp.arange(key.shape[1], dtype=jnp.int32)
    age = age if age is None else jnp.broadcast_to(key.shape[1] - 1 - slot, age.shape)
    log_weight = (
        log_weight if log_weight is None else jnp.broadcast_to(jnp.log((1 + slot % 4).astype(jnp.float32)), log_weight.shape)
    )
    drawn = (jax.random.normal(random, x.shape, x.dtype) for random, x in zip(keys, (query, key), strict=True))
    return *drawn, jnp.ones(is_candidate.shape, bool), jnp.ones(is_query.shape, bool), age, log_weight


def num_bytes(model: ModelShape, workload: Workload, **options: Any) -> int:
    """Bytes of the keys and queries, read once, and of the scores, written."""
    query, key, is_candidate, *_ = arguments(model, workload, **options)
    return (key.size + query.size) * key.dtype.itemsize + 4 * is_candidate.size
