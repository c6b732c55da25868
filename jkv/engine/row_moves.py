"""How rows move: out of the batch into the pool or host memory, back again, and to another engine; always bit for bit.

The scheduler decides which rows move (`jkv.engine.scheduler`): it preempts, and `swap_out` copies.

`programs` is `jkv.engine.programs`, or the same programs on a mesh (`jkv.engine.mesh`). Each function takes the device state
and returns the next one.

A packed row goes on in another engine, also in another process or on another machine. It has what a swapped-out row has and the
sample's host records, without the policy, which the other engine has already, and without callbacks. The other engine must have
the same settings and weights of the same shapes. A row that goes on there draws the tokens that it would have drawn here.
"""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jkv.cache.pool import NULL_PAGE
from jkv.engine.clocks import running_seconds
from jkv.engine.kept_rows import KeptRows
from jkv.engine.outputs import Event
from jkv.engine.processes import host
from jkv.engine.row import Place, Row, SwappedPages, SwappedRow
from jkv.engine.samples import Prefix, Sample, stop_finder
from jkv.engine.state import Snapshot, State
from jkv.eviction import Policy
from jkv.policies import full

BLOCK = 512  # pages that one program moves, equally many of each KV head

# Between batch, pool and host memory.


def settle(programs: Any, state: State, kept_rows: KeptRows) -> State:
    """Carries out what the scheduler has decided about kept rows: detaches, then swaps out, then frees."""
    leaving, kept_rows.leaving = kept_rows.leaving, {}
    for index, kept in leaving.items():
        state, snapshot = programs.detach(state, np.int32(index))
        # Pages stay in the pool; the rest is outside of it, where only the rows of the batch have room.
        kept.row.snapshot = snapshot._replace(beside=host(snapshot.beside))
        if kept_rows.copies:
            kept.row.swapped = copy_out(programs, state, kept.row.snapshot, None)
    swapping, kept_rows.swapping = kept_rows.swapping, []
    for kept in swapping:
        assert kept.row.snapshot is not None
        kept.row.swapped = kept.row.swapped or copy_out(programs, state, kept.row.snapshot, None)
    freed, kept_rows.freed = kept_rows.freed, []
    for kept in (*swapping, *freed):
        state = free(programs, state, kept.row)
    return state


def free(programs: Any, state: State, row: Row) -> State:
    """The state without the pages of a detached row, which may have a copy in host memory."""
    if row.snapshot is not None:
        state, row.snapshot = programs.free(state, row.snapshot.block_table), None
    return state


def attach(programs: Any, state: State, index: int, row: Row) -> State:
    """The state with a detached row, or else its copy in host memory, in an empty row of the batch, which owns its pages."""
    snapshot = row.snapshot
    if snapshot is None:
        assert row.swapped is not None
        return swap_in(programs, state, index, row.swapped, None, None)
    is_own = np.zeros(snapshot.block_table.page_table.shape, bool)
    state = programs.attach(state, snapshot, np.int32(index), is_own)
    return free(programs, state, row)


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


# To another engine.


def can_move(sample: Sample) -> bool:
    """Whether another engine could go on with a running sample's row."""
    request = sample.request
    return not sample.is_finished and request.policy.share is None and not request.num_kept and not request.keep


def pack(sample: Sample, row: SwappedRow) -> bytes:
    """A running sample with a copy of its row, as one that is swapped out and belongs to no engine."""
    one = copy.copy(sample)
    one.row = dataclasses.replace(sample.row, place=Place.HOST, swapped=row)
    one.request = dataclasses.replace(sample.request, policy=full())
    one.reads_prefix, one.num_shared_pieces, one.pieces, one.prefix = False, 0, (), Prefix(None)
    one.on_tokens, one.stops, one.text, one.emitted, one.walk = None, None, None, None, None
    one.submitted = sample.seconds  # since then: clocks of two processes differ
    return pickle.dumps(one)


def unpack(content: bytes, policy: Policy, tokenizer: Any, on_tokens: Callable[[Event], None] | None) -> Sample:
    """The sample that was packed, with what belongs to its new engine."""
    sample: Sample = pickle.loads(content)
    sample.request = dataclasses.replace(sample.request, policy=policy)
    sample.index, sample.submitted = 0, running_seconds() - sample.submitted
    sample.stops = stop_finder(tokenizer, sample.request)
    if sample.stops is not None:
        sample.stops.find(sample.completion.tokens)
    sample.on_tokens, sample.num_emitted, sample.num_emitted_tokens = on_tokens, 0, 0
    return sample
