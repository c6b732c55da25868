"""Plain XLA: one block of queries at a time over all columns; the backward pass computes it again."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.sinks import softmax_beside

BLOCK = 128


def replay_attention(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
    position: Int[Array, "B T"],
    begin: Int[Array, "B K C"],
    end: Int[Array, "B K C"],
    source: Int[Array, "B K C"] | None,
    sink: Float[Array, " N"] | None = None,
    sorts: bool = False,
) -> Float[Array, "B T N H"]:
    """See `pallas_kernels.replay_attention`."""
    batch, num_tokens, num_heads, head_size = query_BTNH.shape
    group = num_heads // key_BSKH.shape[2]
    key_BKCH = take_columns(key_BSKH, source, begin < end)
    value_BKCH = take_columns(value_BSKH, source, begin < end)

    @jax.checkpoint
    def attend(block: tuple[Float[Array, "B I N H"], Int[Array, "B I"]]) -> Float[Array, "B I N H"]:
        query_BINH, position_BI = block
        query_BIKGH = query_BINH.reshape(batch, -1, key_BKCH.shape[1], group, head_size)
        logits_BKGIC = jnp.einsum("bikgh,bkch->bkgic", query_BIKGH, key_BKCH, preferred_element_type=jnp.float32)
        when_B1I1 = position_BI[:, None, :, None]
        is_visible_BKIC = (begin[:, :, None] <= when_B1I1) & (when_B1I1 < end[:, :, None])
        logits_BKGIC = logits_BKGIC * head_size**-0.5
        is_visible_BKGIC = is_visible_BKIC[:, :, None]
        if sink is None:
            weight_BKGIC = jax.nn.softmax(logits_BKGIC, axis=-1, where=is_visible_BKGIC)
        else:
            sink_KG11 = sink.astype(jnp.float32).reshape(-1, group, 1, 1)
            weight_BKGIC = softmax_beside(sink_KG11, logits_BKGIC, is_visible_BKGIC)
        # The axis of queries moves afterwards: XLA for CPU refuses the bf16 product that would move it.
        out_BKGIH = jnp.einsum(
            "bkgic,bkch->bkgih", weight_BKGIC.astype(value_BKCH.dtype), value_BKCH, preferred_element_type=jnp.float32
        )
        return jnp.moveaxis(out_BKGIH, 3, 1).reshape(query_BINH.shape).astype(query_BTNH.dtype)

    if num_tokens <= BLOCK:
        return attend((query_BTNH, position))
    padding = -num_tokens % BLOCK

    def blocks(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, -1, BLOCK, *x.shape[2:]), 1, 0)

    out = jnp.moveaxis(jax.lax.map(attend, (blocks(query_BTNH), blocks(position))), 0, 1)
    return out.reshape(batch, -1, num_heads, head_size)[:, :num_tokens]


def take_columns(x_BSKH: Float[Array, "B S K H"], source: Int[Array, "B K C"] | None, is_used: Array) -> Array:
    """The columns of each KV head, `[B, K, C, H]`; columns that no query reads are 0, since 0 * NaN is NaN."""
    x_BKSH = jnp.moveaxis(x_BSKH, 1, 2)
    if source is not None:
        x_BKSH = jnp.take_along_axis(x_BKSH, source[..., None], axis=2)
    return jnp.where(is_used[..., None], x_BKSH, 0)
