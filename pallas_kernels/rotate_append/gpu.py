"""Pallas for NVIDIA GPUs: one program per row and KV head, in place of a rotation and two scatters.

A program rotates the query heads of its group and its key, and writes all that it has: queries, the ring, key and value.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.launch import launch, load, store

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
WARP_ELEMENTS = 256  # per warp: 16 bytes of bfloat16 per thread


def why_not(
    kv: Any, projected: Any, cos: Any, sin: Any, address: Any, ring: Any = None, ring_at: Any = None, layer: Any = None
) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if projected.dtype not in FLOATS or kv.dtype not in FLOATS:
        return f"heads and pool must be float32, bfloat16 or float16; got {projected.dtype} and {kv.dtype}"
    if cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        return f"cosines and sines must be float32; got {cos.dtype} and {sin.dtype}"
    if ring is not None and ring.dtype not in FLOATS:
        return f"the ring must be float32, bfloat16 or float16; got {ring.dtype}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def rotate_append(
    kv: Float[Array, "P 2 page H"],
    projected: Float[Array, "B heads H"],
    cos: Float[Array, "B half"],
    sin: Float[Array, "B half"],
    address: Int[Array, "*L B K"],
    ring: Float[Array, "C N H"] | None = None,
    ring_at: Int[Array, " B"] | None = None,
    layer: Int[Array, ""] | int | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "P 2 page H"], Float[Array, "B N H"], Float[Array, "C N H"] | None]:
    """See `pallas_kernels.rotate_append`."""
    (batch, num_all, head_size), num_kv_heads = projected.shape, address.shape[-1]
    num_heads = num_all - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    elements = pl.next_power_of_2(group) * pl.next_power_of_2(head_size)
    address = address if layer is not None else address[None]
    layer = jnp.reshape(jnp.int32(0 if layer is None else layer), (1,))
    rings: list[Any] = [] if ring is None else [ring, ring_at]
    shapes: list[Any] = [kv, jax.ShapeDtypeStruct((batch, num_heads, head_size), projected.dtype), *rings[:1]]
    kv, query, *new_ring = launch(
        rotate_head,
        *(projected, cos, sin, address, layer, kv, *rings),
        name="rotate_append",
        grid=(batch, num_kv_heads),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes],
        num_warps=max(1, min(8, elements // WARP_ELEMENTS)),
        aliases={5: 0} | ({6: 2} if rings else {}),
        interpret=interpret,
    )
    return kv, query, new_ring[0] if new_ring else None


def rotate_head(projected_ref: Any, cos_ref: Any, sin_ref: Any, address_ref: Any, layer_ref: Any, *refs: Any) -> None:
    """Handles one KV head of one row, with the query heads that read it."""
    has_ring = len(refs) == 6  # inputs: the pool, the ring, its entries; outputs: the pool, queries, the ring
    kv_ref, query_ref = refs[3:5] if has_ring else refs[1:3]
    row, kv_head = pl.program_id(0), pl.program_id(1)
    (_, num_all, head_size), half, page_size = projected_ref.shape, cos_ref.shape[1], kv_ref.shape[2]
    num_heads = query_ref.shape[1]
    num_kv_heads = (num_all - num_heads) // 2
    group = num_heads // num_kv_heads
    channel_H = jnp.arange(pl.next_power_of_2(head_size), dtype=jnp.int32)
    is_channel_H, is_turned_H, is_first_H = channel_H < head_size, channel_H < 2 * half, channel_H < half
    partner_H = jnp.where(is_first_H, channel_H + half, channel_H - half)
    angle_H = jnp.where(is_first_H, channel_H, channel_H - half)
    cos_H = load(cos_ref.at[row, angle_H], mask=is_turned_H, other=1.0)
    sin_H = load(sin_ref.at[row, angle_H], mask=is_turned_H, other=0.0)
    sin_H = jnp.where(is_first_H, -sin_H, sin_H)

    def turned(head: Any, is_head: Any) -> Any:
        own = load(projected_ref.at[row, head, channel_H[None]], mask=is_head & is_channel_H[None], other=0.0)
        other = load(projected_ref.at[row, head, partner_H[None]], mask=is_head & is_turned_H[None], other=0.0)
        return (own.astype(jnp.float32) * cos_H[None] + other.astype(jnp.float32) * sin_H[None]).astype(projected_ref.dtype)

    head_G1 = jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32)[:, None]
    is_query_G1, query_head_G1 = head_G1 < group, kv_head * group + head_G1
    query_GH, is_query_GH = turned(query_head_G1, is_query_G1), is_query_G1 & is_channel_H[None]
    store(query_ref.at[row, query_head_G1, channel_H[None]], query_GH, mask=is_query_GH)
    if has_ring:
        entry, ring_ref = load(refs[2].at[row]), refs[5]
        store(ring_ref.at[entry, query_head_G1, channel_H[None]], query_GH.astype(ring_ref.dtype), mask=is_query_GH)

    one_1, address = jnp.zeros((1, 1), jnp.int32), load(address_ref.at[layer_ref[0], row, kv_head])
    page, offset = lax.div(address, page_size), lax.rem(address, page_size)
    key_1H = turned(num_heads + kv_head + one_1, one_1 == 0)
    value_head = num_heads + num_kv_heads + kv_head
    value_H = load(projected_ref.at[row, value_head, channel_H], mask=is_channel_H, other=0.0)
    store(kv_ref.at[page, 0, offset + one_1, channel_H[None]], key_1H.astype(kv_ref.dtype), mask=is_channel_H[None])
    store(kv_ref.at[page, 1, offset, channel_H], value_H.astype(kv_ref.dtype), mask=is_channel_H)
