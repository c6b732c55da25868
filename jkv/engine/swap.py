"""Rows and pages in host memory: what the engine puts aside when the pool is short, and brings back bit for bit.

`programs` are the engine's: `jkv.engine.programs`, or those of a mesh.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jkv.cache.pool import TRASH
from jkv.engine.programs import State

BLOCK = 512  # pages moved at once, as many of each KV head, so that one program serves any number


@dataclasses.dataclass(frozen=True)
class Pages:
    """Pages in host memory."""

    place: np.ndarray  # [L, K, MP] int32: which of its head's lies at each entry of a row's table, -1 for none
    content: Any  # a `Content`, on the host


@dataclasses.dataclass(frozen=True)
class Aside:
    """A row put aside: everything of it that is not in the pages of its prefix."""

    snapshot: Any  # a `Snapshot` on the host
    own: Pages
    is_shared: np.ndarray  # [L, K, MP] entries that hold the prefix's pages


def put_aside(programs: Any, state: State, row: int, prefix_table: np.ndarray | None) -> Aside:
    """A copy of a row in host memory, but for the pages at `prefix_table` ([L, K, MP]), which stay where they are."""
    snapshot = jax.device_get(programs.look(state, np.int32(row)))
    table = snapshot.seat.page_table
    is_shared = np.zeros(table.shape, bool) if prefix_table is None else (table == prefix_table) & (table != TRASH)
    return Aside(snapshot, read_pages(programs, state, table, (table != TRASH) & ~is_shared), is_shared)


def bring_back(
    programs: Any, state: State, row: int, aside: Aside, prefix_table: np.ndarray | None, prefix_aside: Pages | None
) -> State:
    """The state with the copy in an empty row; the prefix's pages are shared at `prefix_table`, or copied from host memory."""
    table, is_own = np.zeros_like(aside.snapshot.seat.page_table), aside.own.place >= 0
    if prefix_table is None:
        is_own = is_own | aside.is_shared
    else:
        table = np.where(aside.is_shared, prefix_table, TRASH)
    snapshot = aside.snapshot._replace(seat=aside.snapshot.seat._replace(page_table=table))
    state = programs.sit(state, snapshot, np.int32(row), is_own)
    table = np.asarray(programs.look(state, np.int32(row)).seat.page_table)
    state = write_pages(programs, state, table, aside.own, aside.own.place >= 0)
    if prefix_table is None and aside.is_shared.any():
        assert prefix_aside is not None
        state = write_pages(programs, state, table, prefix_aside, aside.is_shared)
    return state


def read_pages(programs: Any, state: State, table: np.ndarray, is_read: np.ndarray) -> Pages:
    """Pages at some entries of a table."""
    page, place = by_head(table, is_read), np.full(table.shape, -1, np.int32)
    for head in range(table.shape[1]):
        place[:, head][is_read[:, head]] = np.arange(is_read[:, head].sum(), dtype=np.int32)
    starts = range(0, max(page.shape[1], 1), block_of(page))
    blocks = [jax.device_get(programs.read_pages(state, pad_block(page, start))) for start in starts]
    return Pages(place, jax.tree.map(lambda *parts: np.concatenate(parts, axis=1)[:, : page.shape[1]], *blocks))


def write_pages(programs: Any, state: State, table: np.ndarray, stored: Pages, is_written: np.ndarray) -> State:
    """The state with stored pages at some entries of a table."""
    page, place = by_head(table, is_written), by_head(stored.place, is_written)
    head = np.arange(len(page))[:, None]
    for start in range(0, page.shape[1], block_of(page)):
        which = pad_block(place, start)
        block = jax.tree.map(lambda x, which=which: x[head, which], stored.content)
        state = programs.write_pages(state, pad_block(page, start), block)
    return state


def by_head(table: np.ndarray, is_listed: np.ndarray) -> np.ndarray:
    """What a table ([L, K, MP]) has at some entries, a list for each KV head: [K, I], padded with 0.

    A program takes pages by head because a mesh splits the heads, and each shard counts its own pages.
    """
    lists = [table[:, head][is_listed[:, head]] for head in range(table.shape[1])]
    longest = max(map(len, lists))
    return np.stack([np.pad(one, (0, longest - len(one))) for one in lists])


def block_of(x: np.ndarray) -> int:
    """Entries of each head that are moved at once."""
    return max(1, BLOCK // len(x))


def pad_block(x: np.ndarray, start: int) -> np.ndarray:
    """A block of each head from `start` on, padded with 0 (the trash page, or any page whose content then goes there)."""
    size = block_of(x)
    x = x[:, start : start + size]
    return np.pad(x, [(0, 0), (0, size - x.shape[1])]).astype(np.int32)
