"""A row: the pages of one text, and what the host knows of them.

A row is in one of three places. In the batch, each decode step appends to it. Detached, its pages are in the pool, and a
snapshot holds their references: a prompt that samples start from, or a row that is kept between two turns of a conversation. Or
it is swapped out to host memory. The scheduler decides which rows move, and `jkv.engine.row_moves` moves them.
"""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from jkv.engine.processes import host
from jkv.engine.records import Records
from jkv.engine.state import Snapshot
from jkv.eviction import Policy


class Place(enum.Enum):
    """Where the pages of a row are, or are about to be: the scheduler decides, and the runner follows before the next chunk."""

    NOWHERE = "nowhere"
    BATCH = "batch"
    POOL = "pool"
    HOST = "host"


@dataclasses.dataclass(frozen=True)
class SwappedPages:
    """Pages in host memory."""

    place: np.ndarray  # [L, K, MP] int32: index among its head's stored pages of each entry of a row's table, -1 for none
    content: Any  # a `jkv.cache.pool.PageContent`, on the host


@dataclasses.dataclass(frozen=True)
class SwappedRow:
    """The copy of a row in host memory, without the pages of its prefix."""

    snapshot: Any  # a `jkv.engine.state.Snapshot`, on the host
    own: SwappedPages
    is_shared: np.ndarray  # [L, K, MP] entries that hold the prefix's pages

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.snapshot, self.own.place, self.own.content, self.is_shared)))


@dataclasses.dataclass(eq=False)
class Row:
    """The host's record of a row.

    Attributes:
      place: where its pages are.
      filled: `[L]` mean slots of a KV head in each layer, or `[L, K]` slots where its policy has budgets of KV heads; None
        until its pages are reserved.
      heads: `[L, K]` slots of each KV head, where scores decided how many stay; None where `filled` says it.
      keeps_all: whether the token has come after which its policy evicts no more.
      version: of the weights that made its logits.
      evicted: tokens dropped, averaged over layers and KV heads.
      compactions: how often it was compacted.
      cached_tokens: tokens of its prompt that were not prefilled, because the prefix cache or a kept row held them.
      records: its trace, sentences and experts, where something is recorded.
      num_pages: the most pages that it holds, where it is outside of the batch.
      snapshot: its block table, logits and queries on the device, where its pages are in the pool alone.
      swapped: its copy in host memory.
    """

    place: Place = Place.NOWHERE
    filled: Any = None
    heads: Any = None
    keeps_all: bool = False
    version: int = 0
    evicted: float = 0.0
    compactions: int = 0
    cached_tokens: int = 0
    records: Records | None = None
    num_pages: int = 0
    snapshot: Snapshot | None = None
    swapped: SwappedRow | None = None

    @property
    def page_table(self) -> np.ndarray | None:
        """Its pages in the pool, `[L, K, MP]`, where a snapshot holds them; waits for the device."""
        return None if self.snapshot is None else host(self.snapshot.block_table.page_table)

    def fork(self, records: Records | None) -> "Row":
        """Another row that begins with the same content, and has records of its own; it has no place yet."""
        return dataclasses.replace(self, place=Place.NOWHERE, records=records, num_pages=0, snapshot=None, swapped=None)

    def append(self, count: int) -> None:
        """Counts new slots in every layer and KV head."""
        self.filled = self.filled + count
        self.heads = None if self.heads is None else self.heads + count

    def pages_with(self, policy: Policy, growth: int, num_kv_heads: int, page_size: int, num_shards: int = 1) -> int:
        """The most pages with `growth` more slots; each of the shards of a mesh takes as many as the fullest."""
        slots = self.filled if self.heads is None else self.heads
        return policy.num_pages(slots + growth, num_kv_heads, page_size, num_shards)
