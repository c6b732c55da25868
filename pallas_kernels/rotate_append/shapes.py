"""The arguments of real calls: one layer of a decode step of a model that R-KV compacts."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (
    Case("decode step", is_updated=True),
    Case("decode step, no ring", options={"has_ring": False}, is_updated=True),
    Case("decode step, int8", workload={"kv_format": "int8"}, is_updated=True),
    Case("decode step, int4", workload={"kv_format": "int4"}, is_updated=True),
)
WINDOW = 8  # queries that a row remembers


def arguments(model: ModelShape, workload: Workload, *, has_ring: bool = True) -> tuple[Any, ...]:
    """Shapes of the pool, a token's projected heads, its rotation, its address and, with `has_ring`, the ring of queries."""
    batch, num_all = workload.batch, model.num_query_heads + 2 * model.num_kv_heads
    angle = of(jnp.float32, batch, model.head_size // 2)
    ring = of(workload.dtype, batch * WINDOW, model.num_query_heads, model.head_size), of(jnp.int32, batch)
    projected, address = of(workload.dtype, batch, num_all, model.head_size), of(jnp.int32, batch, model.num_kv_heads)
    return workload.pool(model), projected, angle, angle, address, *(ring if has_ring else (None, None))


def values(model: ModelShape, workload: Workload, *, has_ring: bool = True) -> tuple[Any, ...]:
    """Normal heads and pool; every token goes to a random slot of a page of its own."""
    kv, projected, angle, _, address, ring, ring_at = arguments(model, workload, has_ring=has_ring)
    keys = jax.random.split(jax.random.key(0), 6)
    pages = 1 + jax.random.permutation(keys[0], kv.shape[0] - 1)[: address.size].reshape(address.shape)
    slot = pages * kv.shape[2] + jax.random.randint(keys[1], address.shape, 0, kv.shape[2])
    turn = jax.random.uniform(keys[2], angle.shape, jnp.float32, 0, 6.28)
    rings: tuple[Any, Any] = None, None
    if ring is not None:
        entry = jnp.arange(workload.batch, dtype=jnp.int32) * WINDOW
        rings = jax.random.normal(keys[5], ring.shape, ring.dtype), entry.astype(ring_at.dtype)
    heads = jax.random.normal(keys[4], projected.shape, projected.dtype)
    return workload.random_pool(model, keys[3]), heads, jnp.cos(turn), jnp.sin(turn), slot.astype(jnp.int32), *rings


def num_bytes(model: ModelShape, workload: Workload, *, has_ring: bool = True) -> int:
    """Bytes of heads, read once and written once, of queries written to the ring, and of cosines and sines."""
    numbers = (2 + has_ring) * model.num_query_heads + 2 * model.num_kv_heads
    num_bytes = numbers * model.head_size * jnp.dtype(workload.dtype).itemsize + 4 * model.head_size
    return workload.batch * (num_bytes + 2 * model.num_kv_heads * workload.vector_bytes(model))
