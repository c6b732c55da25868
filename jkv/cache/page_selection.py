"""The pages that a decode step reads (Quest), by an upper bound on the logits of each page.

The bound follows from the elementwise minimum and maximum of the keys of a page.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.in_step_eviction import UNLIMITED
from jkv.cache.pool import Pool, num_pages_of
from jkv.model.sharding import gather_copies
from pallas_kernels.largest_slots import ROUNDING, levelled


class ReadRules(NamedTuple):
    """The read settings of each batch row."""

    num_pages: Int[Array, " B"]  # pages per layer and KV head, the current one included; UNLIMITED for all
    dense_layers: Int[Array, " B"]  # the first layers, which read all pages
    averages: Bool[Array, " B"]  # whether a query group uses the mean of its bounds, or the largest


class Choice(NamedTuple):
    """A table of the chosen pages, in the order of the row's table; the current page is last."""

    page_table: Int[Array, "R MP"]
    length: Int[Array, " R"]  # slots to read
    entry: Int[Array, "R MP"]  # index of each chosen page in the row's table
    is_read: Bool[Array, "R MP"]  # by entry of the row's table


def pages_read(budget: int, page_size: int) -> int:
    """Pages per layer and KV head that a step reads with a budget of slots, the current page included.

    >>> pages_read(100, 16), pages_read(8, 16)
    (6, 1)
    """
    return max(1, budget // page_size)


def bound(query: Float[Array, "R G H"], bounds: Float[Array, "R MP 2 H"], averages: Bool[Array, " R"]) -> Float[Array, "R MP"]:
    """An upper bound on the unscaled logits of each page; for a query group, the largest of its bounds or their mean.

    A channel adds `max(q * low, q * high)`: `q * high` where q is positive, `q * low` where it is negative.
    """
    bounds = jnp.where(jnp.isfinite(bounds), bounds, 0)  # an empty page
    low, high = bounds[:, :, 0], bounds[:, :, 1]
    up, down = jnp.maximum(query, 0), jnp.minimum(query, 0)
    total = jnp.einsum("rgh,rph->rgp", up, high, preferred_element_type=jnp.float32)
    total += jnp.einsum("rgh,rph->rgp", down, low, preferred_element_type=jnp.float32)
    own = jnp.where(averages[:, None], total.mean(axis=1), total.max(axis=1))
    of_copies = gather_copies(own[None], axis=0)
    return jnp.where(averages[:, None], of_copies.mean(axis=0), of_copies.max(axis=0))


def choose_in(
    layer: int,
    reads: ReadRules,
    query: Float[Array, "R G H"],
    pool: Pool,
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"],
) -> Choice:
    """The pages that each row and KV head reads in a layer."""
    num_heads = pool.page_table.shape[2]
    num_pages = jnp.where(layer < reads.dense_layers, UNLIMITED, reads.num_pages)
    worth = bound(query, pool.bounds[page_table], jnp.repeat(reads.averages, num_heads))
    return choose_pages(worth, page_table, length, pool.page_size, jnp.repeat(num_pages, num_heads))


def choose_pages(
    worth: Float[Array, "R MP"],
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"],
    page_size: int,
    num_pages: Int[Array, " R"],
) -> Choice:
    """The current page and the `num_pages - 1` others with the largest `worth`; of pages equal up to `ROUNDING` the earlier."""
    index = jnp.arange(page_table.shape[1], dtype=jnp.int32)
    current = (length - 1) // page_size
    worth = jnp.where(index < current[:, None], worth, -jnp.inf)
    worth = jnp.where(index == current[:, None], jnp.inf, worth)
    last = jnp.clip(num_pages, 1, worth.shape[-1])[:, None] - 1
    worth = levelled(worth, jnp.take_along_axis(-jnp.sort(-worth, axis=-1), last, axis=-1), ROUNDING)
    rank = jnp.argsort(jnp.argsort(-worth, axis=-1, stable=True), axis=-1, stable=True)
    is_read = (rank < num_pages[:, None]) & (index < num_pages_of(length, page_size)[:, None])
    order = jnp.argsort(~is_read, axis=-1, stable=True).astype(jnp.int32)
    unread = num_pages_of(length, page_size) - is_read.sum(axis=-1, dtype=jnp.int32)  # all of them full
    return Choice(jnp.take_along_axis(page_table, order, axis=-1), length - unread * page_size, order, is_read)
