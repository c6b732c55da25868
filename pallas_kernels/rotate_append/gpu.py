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
from pallas_kernels.quantised import Format, Numbers, Quantised, codes_of, half_scales, is_rotated, nearest, why_no_codes

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
WARP_ELEMENTS = 256  # per warp: 16 bytes of bfloat16 per thread


def why_not(
    kv: Any, projected: Any, cos: Any, sin: Any, address: Any, ring: Any = None, ring_at: Any = None, layer: Any = None
) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if reason := why_no_codes(kv):
        return reason
    if projected.dtype not in FLOATS or kv.dtype not in FLOATS:
        return f"heads and pool must be float32, bfloat16 or float16; got {projected.dtype} and {kv.dtype}"
    if is_rotated(kv) and kv.shape[3] < 2 * kv.format.group:
        return f"heads of {kv.format.name} must have at least {2 * kv.format.group} channels; got {kv.shape[3]}"
    if cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        return f"cosines and sines must be float32; got {cos.dtype} and {sin.dtype}"
    if ring is not None and ring.dtype not in FLOATS:
        return f"the ring must be float32, bfloat16 or float16; got {ring.dtype}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def rotate_append(
    kv: Numbers,
    projected: Float[Array, "B heads H"],
    cos: Float[Array, "B half"],
    sin: Float[Array, "B half"],
    address: Int[Array, "*L B K"],
    ring: Float[Array, "C N H"] | None = None,
    ring_at: Int[Array, " B"] | None = None,
    layer: Int[Array, ""] | int | None = None,
    interpret: Any = False,
) -> tuple[Numbers, Float[Array, "B N H"], Float[Array, "C N H"] | None]:
    """See `pallas_kernels.rotate_append`."""
    (batch, num_all, head_size), num_kv_heads = projected.shape, address.shape[-1]
    num_heads = num_all - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    elements = pl.next_power_of_2(group) * pl.next_power_of_2(head_size)
    address = address if layer is not None else address[None]
    layer = jnp.reshape(jnp.int32(0 if layer is None else layer), (1,))
    pool, treedef = jax.tree.flatten(kv)  # numbers, or codes and scales
    format = kv.format if isinstance(kv, Quantised) else None
    updated = [*pool, *([] if ring is None else [ring])]  # in place
    entries = [] if ring is None else [ring_at]
    query_shape = jax.ShapeDtypeStruct((batch, num_heads, head_size), projected.dtype)
    given = (projected, cos, sin, address, layer, *entries)
    query, *results = launch(
        functools.partial(rotate_head, format, ring is not None),
        *(*given, *updated),
        name="rotate_append",
        grid=(batch, num_kv_heads),
        out_shape=[query_shape, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated)],
        num_warps=max(1, min(8, elements // WARP_ELEMENTS)),
        aliases={len(given) + i: 1 + i for i in range(len(updated))},
        interpret=interpret,
    )
    kv = jax.tree.unflatten(treedef, results[: len(pool)])
    return kv, query, None if ring is None else results[-1]


def rotate_head(
    format: Format | None,
    has_ring: bool,
    projected_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    address_ref: Any,
    layer_ref: Any,
    *refs: Any,
) -> None:
    """Handles one KV head of one row, with the query heads that read it."""
    ring_at_ref, *refs = refs if has_ring else (None, *refs)  # type: ignore[assignment]
    query_ref, kv_ref, *refs = refs[len(refs) // 2 :]  # type: ignore[assignment]  # outputs: the pool and the ring are updated
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
        entry, ring_ref = load(ring_at_ref.at[row]), refs[-1]
        store(ring_ref.at[entry, query_head_G1, channel_H[None]], query_GH.astype(ring_ref.dtype), mask=is_query_GH)

    one_1, address = jnp.zeros((1, 1), jnp.int32), load(address_ref.at[layer_ref[0], row, kv_head])
    page, offset = lax.div(address, page_size), lax.rem(address, page_size)
    key_1H = turned(num_heads + kv_head + one_1, one_1 == 0)
    value_head = num_heads + num_kv_heads + kv_head
    if format is not None and format.group is not None:
        refs_of_head = projected_ref, cos_ref, sin_ref, kv_ref, refs[0]
        for part, head in enumerate((num_heads + kv_head, value_head)):
            store_groups(format, refs_of_head, row, head, part, (page, part, offset))
        return
    value_1H = load(projected_ref.at[row, value_head + one_1, channel_H[None]], mask=is_channel_H[None], other=0.0)
    for half, vector_1H in enumerate((key_1H, value_1H)):
        if format is not None:
            vector_1H, scale_1 = codes_of(jnp.where(is_channel_H[None], vector_1H.astype(jnp.float32), 0.0), format)
            store(refs[0].at[page, half, offset + one_1[0]], scale_1)
        store(kv_ref.at[page, half, offset + one_1, channel_H[None]], vector_1H.astype(kv_ref.dtype), mask=is_channel_H[None])


def store_groups(format: Any, refs: Any, row: Any, head: Any, part: int, at: tuple[Any, Any, Any]) -> None:
    """Stores the codes of 4 bits of a key (part 0), once it is rotated by its position, or of a value."""
    projected_ref, cos_ref, sin_ref, kv_ref, scale_ref = refs
    head_size, half, width = projected_ref.shape[2], cos_ref.shape[1], format.group
    groups = head_size // width
    group_N, within_W = jnp.arange(groups, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)
    channel_NW = group_N[:, None] * width + within_W[None]
    vector_NW = load(projected_ref.at[row, head, channel_NW]).astype(jnp.float32)
    if part == 0:
        is_turned, is_first = channel_NW < 2 * half, channel_NW < half
        angle = jnp.where(is_first, channel_NW, channel_NW - half)
        cos = load(cos_ref.at[row, angle], mask=is_turned, other=1.0)
        sin = load(sin_ref.at[row, angle], mask=is_turned, other=0.0)
        partner = jnp.where(is_first, channel_NW + half, channel_NW - half)
        other_NW = load(projected_ref.at[row, head, partner], mask=is_turned, other=0.0).astype(jnp.float32)
        vector_NW = vector_NW * cos + other_NW * jnp.where(is_first, -sin, sin)
        vector_NW = vector_NW.astype(projected_ref.dtype).astype(jnp.float32)
    codes = []
    for first in (0, groups // 2):  # those in the low halves of bytes, then those in the high ones
        own_I = first + jnp.arange(groups // 2, dtype=jnp.int32)
        rotated_IW = hadamard_rows(vector_NW, own_I) * head_size**-0.5
        scale_I = half_scales(jnp.max(jnp.abs(rotated_IW), axis=1), format)
        store(scale_ref.at[*at, own_I], lax.bitcast_convert_type(scale_I, jnp.uint16))
        code_IW = jnp.clip(rotated_IW / scale_I.astype(jnp.float32)[:, None], -format.most, format.most)
        codes.append((nearest(code_IW) + 8).astype(jnp.int32))
    byte_IW = jnp.arange(groups // 2, dtype=jnp.int32)[:, None] * width + within_W[None]
    store(kv_ref.at[*at, byte_IW], (codes[0] | (codes[1] << 4)).astype(kv_ref.dtype))


def hadamard_rows(x_NW: Any, own_I: Any) -> Any:
    """Some groups of a vector times Sylvester's matrix, whose sign is a product of one of the groups and one within them."""
    groups, width = x_NW.shape
    group_N, within_W = jnp.arange(groups, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)
    mixed_IW = (x_NW[:, None, :] * sign(group_N[:, None] & own_I[None])[:, :, None]).sum(axis=0)
    return (mixed_IW[:, :, None] * sign(within_W[:, None] & within_W[None])[None]).sum(axis=1)


def sign(bits: Any) -> Any:
    """-1 where an odd number of bits is set, else 1."""
    return jnp.where(lax.population_count(bits) % 2 == 1, -1.0, 1.0)
