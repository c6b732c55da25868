"""Which pages a decode step reads (Quest): a bound on each page's logits from the smallest and largest of its keys."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.cache.pool import num_pages_of


class ReadRules(NamedTuple):
    """What each batch row reads."""

    num_pages: Int[Array, " B"]  # pages of a layer and KV head, the current one included; UNLIMITED for all of them
    dense_layers: Int[Array, " B"]  # first layers that read everything
    averages: Bool[Array, " B"]  # whether a group's query heads go by the mean of their bounds, not the largest


class Choice(NamedTuple):
    """A table of the chosen pages, in order, the current one last."""

    page_table: Int[Array, "R MP"]
    length: Int[Array, " R"]  # slots to read
    entry: Int[Array, "R MP"]  # which entry of the row's table each is
    is_read: Bool[Array, "R MP"]  # by entry of the row's table


def pages_read(budget: int, page_size: int) -> int:
    """Pages of a layer and KV head that a step reads for a budget of slots, the current one included; dense layers read all.

    >>> pages_read(100, 16), pages_read(8, 16)
    (6, 1)
    """
    return max(1, budget // page_size)


def bound(query: Float[Array, "R G H"], bounds: Float[Array, "R MP 2 H"], averages: Bool[Array, " R"]) -> Float[Array, "R MP"]:
    """The largest logit, before scaling, that a key between a page's bounds could have; of a group, the largest or the mean.

    A channel adds `max(q * low, q * high)`: `q * high` where q is positive, `q * low` where it is negative.
    """
    bounds = jnp.where(jnp.isfinite(bounds), bounds, 0)  # a page that holds nothing
    low, high = bounds[:, :, 0], bounds[:, :, 1]
    up, down = jnp.maximum(query, 0), jnp.minimum(query, 0)
    total = jnp.einsum("rgh,rph->rgp", up, high, preferred_element_type=jnp.float32)
    total += jnp.einsum("rgh,rph->rgp", down, low, preferred_element_type=jnp.float32)
    return jnp.where(averages[:, None], total.mean(axis=1), total.max(axis=1))


def choose_pages(
    worth: Float[Array, "R MP"],
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"],
    page_size: int,
    num_pages: Int[Array, " R"],
) -> Choice:
    """The current page and the `num_pages - 1` others of the largest `worth`; ties go to the earlier page."""
    index = jnp.arange(page_table.shape[1], dtype=jnp.int32)
    current = (length - 1) // page_size
    worth = jnp.where(index < current[:, None], worth, -jnp.inf)
    worth = jnp.where(index == current[:, None], jnp.inf, worth)
    rank = jnp.argsort(jnp.argsort(-worth, axis=-1, stable=True), axis=-1, stable=True)
    is_read = (rank < num_pages[:, None]) & (index < num_pages_of(length, page_size)[:, None])
    order = jnp.argsort(~is_read, axis=-1, stable=True).astype(jnp.int32)
    unread = num_pages_of(length, page_size) - is_read.sum(axis=-1, dtype=jnp.int32)  # all of them full
    return Choice(jnp.take_along_axis(page_table, order, axis=-1), length - unread * page_size, order, is_read)
