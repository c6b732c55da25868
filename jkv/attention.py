"""How the decoder attends when its cache is the pool: one `Attend` for decoding, one for a chunk of a prompt.

Both append the new keys and values first and then read the pool; both remember the last queries when a policy scores by them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from jkv import pool as pages
from jkv.pool import EMPTY, Pool

NEVER = jnp.iinfo(jnp.int32).max  # the end of a column that is never dropped


class Cache(NamedTuple):
    """What attention carries through the layers."""

    pool: Pool
    query_ring: Float[Array, "L B W N H"] | None  # the query of position p lies at p % W; None when no policy needs it


class DecodeAttention(NamedTuple):
    """Every row's next token (T = 1) reads the row's pages."""

    address: Int[Array, "L B K T"]
    length: Int[Array, "L B K"]  # filled slots, the new ones included
    position: Int[Array, " B"]

    def __call__(
        self,
        layer: int,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        cache: Cache,
    ) -> tuple[Float[Array, "B T N H"], Cache]:
        """`jkv.model.Attend`."""
        batch, _, num_heads, head_size = query.shape
        pool = pages.append(cache.pool, self.address[layer], key, value)
        rows = batch * key.shape[2]
        log_weight = pool.slot_data.get("log_weight")
        out, _ = kernels.paged_attention(
            query.reshape(rows, -1, head_size),
            pool.kv,
            pool.page_table[layer].reshape(rows, -1),
            self.length[layer].reshape(rows),
            None if log_weight is None else log_weight[layer].reshape(rows, -1),
        )
        ring = cache.query_ring
        if ring is not None:
            row = jnp.arange(batch, dtype=jnp.int32)
            ring = ring.at[layer, row, self.position % ring.shape[2]].set(query[:, 0])
        return out.reshape(batch, 1, num_heads, head_size), Cache(pool, ring)


class PrefillAttention(NamedTuple):
    """A chunk of one row's prompt reads what the row holds already and itself, causally."""

    address: Int[Array, "L 1 K T"]
    row: Int[Array, " 1"]
    position: Int[Array, "1 T"]
    num_new: Int[Array, " 1"]

    def __call__(
        self,
        layer: int,
        query: Float[Array, "1 T N H"],
        key: Float[Array, "1 T K H"],
        value: Float[Array, "1 T K H"],
        cache: Cache,
    ) -> tuple[Float[Array, "1 T N H"], Cache]:
        """`jkv.model.Attend`."""
        pool = pages.append(cache.pool, self.address[layer], key, value)
        length = pool.length.at[layer, self.row].add(self.num_new[:, None])
        key_1KSH, value_1KSH, begin_1KS = pages.gather(pool.replace(length=length), layer, self.row)
        out = kernels.replay_attention(
            query,
            jnp.moveaxis(key_1KSH, 1, 2),
            jnp.moveaxis(value_1KSH, 1, 2),
            self.position,
            begin_1KS,
            jnp.where(begin_1KS == EMPTY, EMPTY, NEVER),
        )
        ring = cache.query_ring
        if ring is not None:
            window = ring.shape[2]
            offset = jnp.arange(query.shape[1], dtype=jnp.int32)
            is_last = (offset < self.num_new) & (offset >= self.num_new - window)
            where = jnp.where(is_last, self.position[0] % window, window)
            ring = ring.at[layer, self.row, where].set(query[0], mode="drop")
        return out, Cache(pool, ring)


def last_queries(
    ring: Float[Array, "L B W N H"], layer: int | Int[Array, ""], row: Int[Array, " R"], num_seen: Int[Array, " R"], window: int
) -> Float[Array, "R N W H"]:
    """The last `window` queries of some rows, oldest first."""
    when = num_seen[:, None] - window + jnp.arange(window, dtype=jnp.int32)
    query_RWNH = ring[layer, row[:, None], when % ring.shape[2]]
    return jnp.moveaxis(query_RWNH, 1, 2)
