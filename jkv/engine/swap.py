"""Rows and pages in host memory: swapped out when the pool is short of pages, and swapped in again bit for bit.

`programs` are the engine's: `jkv.engine.programs`, or those of a mesh.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jkv.cache.pool import NULL_PAGE
from jkv.engine.processes import host
from jkv.engine.programs import Snapshot, State

BLOCK = 512  # pages that one program moves, equally many of each KV head


@dataclasses.dataclass(frozen=True)
class SwappedPages:
    """Pages in host memory."""

    place: np.ndarray  # [L, K, MP] int32: index among its head's stored pages of each entry of a row's table, -1 for none
    content: Any  # a `jkv.cache.page_content.PageContent`, on the host


@dataclasses.dataclass(frozen=True)
class SwappedRow:
    """A row that was swapped out, without the pages of its prefix."""

    snapshot: Any  # a `jkv.engine.programs.Snapshot`, on the host
    own: SwappedPages
    is_shared: np.ndarray  # [L, K, MP] entries that hold the prefix's pages

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.snapshot, self.own.place, self.own.content, self.is_shared)))


def swap_out(programs: Any, state: State, row: int, prefix_table: np.ndarray | None) -> SwappedRow:
    """A copy of a row in host memory, without the pages at `prefix_table` ([L, K, MP]), which stay in the pool."""
    return copy_out(programs, state, programs.snapshot_row(state, np.int32(row)), prefix_table)


def copy_out(programs: Any, state: State, snapshot: Snapshot, prefix_table: np.ndarray | None) -> SwappedRow:
    """`swap_out` of a row that may be detached, by its snapshot."""
    on_host: Any = host(snapshot)
    table = on_host.block_table.page_table
    is_shared = np.zeros(table.shape, bool) if prefix_table is None else (table == prefix_table) & (table != NULL_PAGE)
    return SwappedRow(on_host, read_pages(programs, state, table, (table != NULL_PAGE) & ~is_shared), is_shared)


def swap_in(
    programs: Any,
    state: State,
    row: int,
    swapped: SwappedRow,
    prefix_table: np.ndarray | None,
    swapped_prefix: SwappedPages | None,
) -> State:
    """The state with the copy in an empty row; the prefix's pages are shared at `prefix_table`, or copied from the host too."""
    table, is_own = np.zeros_like(swapped.snapshot.block_table.page_table), swapped.own.place >= 0
    if prefix_table is None:
        is_own = is_own | swapped.is_shared
    else:
        table = np.where(swapped.is_shared, prefix_table, NULL_PAGE)
    snapshot = swapped.snapshot._replace(block_table=swapped.snapshot.block_table._replace(page_table=table))
    state = programs.attach(state, snapshot, np.int32(row), is_own)
    table = host(programs.snapshot_row(state, np.int32(row)).block_table.page_table)
    state = write_pages(programs, state, table, swapped.own, swapped.own.place >= 0)
    if prefix_table is None and swapped.is_shared.any():
        assert swapped_prefix is not None
        state = write_pages(programs, state, table, swapped_prefix, swapped.is_shared)
    return state


def read_pages(programs: Any, state: State, table: np.ndarray, is_read: np.ndarray) -> SwappedPages:
    """Copies pages at the entries `is_read` of a table to host memory."""
    page, place = by_head(table, is_read), np.full(table.shape, -1, np.int32)
    for head in range(table.shape[1]):
        place[:, head][is_read[:, head]] = np.arange(is_read[:, head].sum(), dtype=np.int32)
    starts = range(0, max(page.shape[1], 1), block_of(page))
    blocks = [host(programs.read_pages(state, pad_block(page, start))) for start in starts]
    return SwappedPages(place, jax.tree.map(lambda *parts: np.concatenate(parts, axis=1)[:, : page.shape[1]], *blocks))


def write_pages(programs: Any, state: State, table: np.ndarray, stored: SwappedPages, is_written: np.ndarray) -> State:
    """The state with stored pages at the entries `is_written` of a table."""
    page, place = by_head(table, is_written), by_head(stored.place, is_written)
    head = np.arange(len(page))[:, None]
    for start in range(0, page.shape[1], block_of(page)):
        which = pad_block(place, start)
        block = jax.tree.map(lambda x, which=which: x[head, which], stored.content)
        state = programs.write_pages(state, pad_block(page, start), block)
    return state


def by_head(table: np.ndarray, is_listed: np.ndarray) -> np.ndarray:
    """The entries `is_listed` of a table ([L, K, MP]), listed by KV head: [K, I], padded with 0.

    Programs take pages by head, because a mesh splits the heads and each shard has its own page ids.
    """
    lists = [table[:, head][is_listed[:, head]] for head in range(table.shape[1])]
    longest = max(map(len, lists))
    return np.stack([np.pad(pages, (0, longest - len(pages))) for pages in lists])


def block_of(x: np.ndarray) -> int:
    """The number of pages of each head that one program moves."""
    return max(1, BLOCK // len(x))


def pad_block(x: np.ndarray, start: int) -> np.ndarray:
    """A block of each head from `start` on, padded with 0 (the null page, or any page whose content is then dropped)."""
    size = block_of(x)
    x = x[:, start : start + size]
    return np.pad(x, [(0, 0), (0, size - x.shape[1])]).astype(np.int32)
