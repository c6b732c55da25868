"""Which pages a decode step reads (Quest): a bound on each page's logits from the smallest and largest of its keys."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
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


def columns_of(reads: np.ndarray, prompt: int, page_size: int, never: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Attention columns (source, begin, end: [L, K, C]) of a row whose steps read the pages `reads` ([steps, L, K, MP]).

    The prompt's queries read everything. A token has a column for each time without a break in which its page is read.
    """
    steps, layers, heads, _ = reads.shape
    total = prompt + steps
    before, after = np.ones((prompt, *reads.shape[1:]), bool), np.zeros((1, *reads.shape[1:]), bool)
    reads = np.concatenate([before, reads, after])
    lists = [[spans_of(reads[:, layer, head], total, page_size, never) for head in range(heads)] for layer in range(layers)]
    width = max(spans.shape[1] for row in lists for spans in row)
    padded = np.array([[np.pad(spans, [(0, 0), (0, width - spans.shape[1])]) for spans in row] for row in lists], np.int32)
    source, begin, end = np.moveaxis(padded, 2, 0)
    return source, begin, end


def spans_of(is_read: np.ndarray, total: int, page_size: int, never: int) -> np.ndarray:
    """Columns of one layer and head, from which pages each query reads ([total + 1, MP]; none after the last): [3, C]."""
    change = np.diff(is_read.astype(np.int8), axis=0, prepend=0)
    page, begin = np.nonzero(change.T == 1)
    end = np.nonzero(change.T == -1)[1]
    source = page[:, None] * page_size + np.arange(page_size)
    begin = np.maximum(begin[:, None], source)
    end = np.broadcast_to(np.where(end == total, never, end)[:, None], source.shape)
    is_column = (source < total) & (begin < end)
    return np.stack([source[is_column], begin[is_column], end[is_column]])
