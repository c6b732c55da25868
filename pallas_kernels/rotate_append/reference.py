"""Plain XLA: a rotation, then scatters with full advanced indices; with other indices, some backend copies the pool."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised import Numbers, like, put


def rotate_append(
    kv: Numbers,
    projected: Float[Array, "B heads H"],
    cos: Float[Array, "B half"],
    sin: Float[Array, "B half"],
    address: Int[Array, "*L B K"],
    ring: Float[Array, "C N H"] | None = None,
    ring_at: Int[Array, " B"] | None = None,
    layer: Int[Array, ""] | int | None = None,
) -> tuple[Numbers, Float[Array, "B N H"], Float[Array, "C N H"] | None]:
    """See `pallas_kernels.rotate_append`."""
    address = address if layer is None else address[layer]
    num_kv_heads, page_size = address.shape[1], kv.shape[2]
    num_heads = projected.shape[1] - 2 * num_kv_heads
    turned = rotate(projected[:, : num_heads + num_kv_heads], cos, sin)
    query, key, value = turned[:, :num_heads], turned[:, num_heads:], projected[:, num_heads + num_kv_heads :]
    kv_BK2H = like(kv, jnp.stack([key, value], axis=2))
    page, offset = address // page_size, address % page_size
    key_or_value = jnp.arange(2, dtype=jnp.int32)
    kv = put(kv, (page[..., None], key_or_value, offset[..., None]), kv_BK2H)
    if ring is not None:
        ring = ring.at[ring_at].set(query.astype(ring.dtype), mode="promise_in_bounds", unique_indices=True)
    return kv, query, ring


def rotate(
    x: Float[Array, "*B heads H"], cos: Float[Array, "*#B half"], sin: Float[Array, "*#B half"]
) -> Float[Array, "*B heads H"]:
    """Rotary embedding in the half-split convention of Hugging Face; channels beyond the rotary size are unchanged."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    wide = x[..., : 2 * half].astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
