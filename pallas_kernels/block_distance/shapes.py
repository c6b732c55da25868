"""The arguments of real calls: 64 pairs of pages of a model."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (
    Case("64 pairs"),
    Case("64 pairs, keys turned", options={"turned": True}),
    Case("64 pairs, int8", workload={"kv_format": "int8"}),
    Case("64 pairs, int4, keys turned", workload={"kv_format": "int4"}, options={"turned": True}),
)


def arguments(model: ModelShape, workload: Workload, *, pairs: int = 64, turned: bool = False) -> tuple[Any, ...]:
    """Shapes of the pool, both pages of each pair, its number of tokens and, if `turned`, the angles of its keys."""
    pages = of(jnp.int32, pairs, model.num_layers, model.num_kv_heads)
    angle: jax.ShapeDtypeStruct | None = None
    if turned:
        angle = of(jnp.float32, pairs, model.head_size // 2)
    return workload.pool(model), pages, pages, of(jnp.int32, pairs), angle


def values(model: ModelShape, workload: Workload, **options: Any) -> tuple[Any, ...]:
    """Normal, full pages in random pairs; random angles."""
    kv, first, second, num_tokens, angle = arguments(model, workload, **options)
    keys = jax.random.split(jax.random.key(0), 3)
    pages = (
        jax.random.randint(random, x.shape, 1, kv.shape[0], jnp.int32)
        for random, x in zip(keys[1:], (first, second), strict=True)
    )
    whole = jnp.full(num_tokens.shape, workload.page_size, jnp.int32)
    return (
        workload.random_pool(model, keys[0]),
        *pages,
        whole,
        angle if angle is None else 100 * jax.random.uniform(keys[1], angle.shape),
    )


def num_bytes(model: ModelShape, workload: Workload, **options: Any) -> int:
    """Bytes of both pages of every pair, in every layer and KV head, read once."""
    _, first, *_ = arguments(model, workload, **options)
    return 2 * first.size * 2 * workload.page_size * workload.vector_bytes(model)
