"""Rows that stay between the turns of a conversation: where they are, and which of them goes to the host first.

When a request that was submitted with `keep=True` finishes, its row is detached: its pages stay in the pool and stay reserved,
and its row of the batch is free. When pages are needed, kept rows are swapped out to host memory, the least recently used
first, before a running row is preempted. The next turn (`jkv.engine.turns`) attaches the row again, and prefills its new tokens
alone.

Host arithmetic, no device: `jkv.engine.row_moves` moves the pages.
"""

import dataclasses

import numpy as np

from jkv.checks import shown
from jkv.engine.requests import Request
from jkv.engine.row import Place, Row
from jkv.errors import InputError

ENDS = ("stop", "length")  # finish reasons after which a row is kept
MOST_ENDED = 10_000  # samples for which we remember why they have no row


@dataclasses.dataclass(frozen=True)
class Transcript:
    """A conversation up to the end of a turn, as one sequence: prompts, completions and the tokens between them.

    Attributes:
      tokens: `[T]` int32.
      loss_mask: `[T]` bool, True for tokens that the model drew.
      logprobs: `[T]` float32, as `Result.logprobs`; 0 for tokens that it did not draw.
      versions: `[T]` int32, of the weights behind each drawn token; for others, of those that prefilled them.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


@dataclasses.dataclass(eq=False)
class KeptRow:
    """A row between two turns, in the pool or in host memory.

    Attributes:
      request: of the turn that ended.
      transcript: everything up to its end.
      row: detached; it has a copy in host memory where it was swapped out, or where the engine copies kept rows.
    """

    request: Request
    transcript: Transcript
    row: Row


class KeptRows:
    """All kept rows of an engine.

    Attributes:
      held: those with pages in the pool or in host memory, the least recently used first.
      dropped: how many were freed or lost without a next turn, by the reason: "closed" or "lost".
      fresh: those whose sample has finished in the current step, and which the batch has still, by ticket and sample.
      leaving: rows of the batch that are to be detached, by row.
      swapping: those that are to be swapped out.
      freed: those whose pages are to be freed.
      copies: whether those in the pool have a copy in host memory too (`jkv.EngineOptions.copy_kept`).
    """

    copies = False

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], KeptRow] = {}  # by ticket and sample
        self._ended: dict[tuple[int, int], str] = {}
        self.held: dict[KeptRow, None] = {}
        self.dropped = {"closed": 0, "lost": 0}
        self.fresh: dict[tuple[int, int], KeptRow] = {}
        self.leaving: dict[int, KeptRow] = {}
        self.swapping: list[KeptRow] = []
        self.freed: list[KeptRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def all(self) -> list[KeptRow]:
        """Every row that a next turn may continue, or is about to."""
        return list({*self._rows.values(), *self.held})

    def at(self, place: Place) -> list[KeptRow]:
        """Those whose pages are in the pool, or in host memory (or about to be); any thread may call it."""
        return [kept for kept in tuple(self.held) if kept.row.place is place]

    @property
    def num_pages(self) -> int:
        """Pages of the pool that are reserved for kept rows; any thread may read it."""
        return sum(kept.row.num_pages for kept in self.at(Place.POOL))

    @property
    def host_bytes(self) -> int:
        """Bytes of the rows in host memory; any thread may read it."""
        return sum(kept.row.swapped.nbytes for kept in tuple(self.held) if kept.row.swapped is not None)

    def pages_of(self, kept: KeptRow | None) -> int:
        """Pages of the pool that are reserved for a kept row; 0 for a row that is not in the pool."""
        return kept.row.num_pages if kept is not None and kept.row.place is Place.POOL else 0

    def add(self, ticket: int, sample: int, kept: KeptRow) -> None:
        """Keeps the row of a sample that finished."""
        self._rows[ticket, sample] = self.fresh[ticket, sample] = kept

    def detach(self, row: int, ticket: int, sample: int) -> bool:
        """Takes a finished sample's row from the batch, if it is kept; it is then the most recently used one.

        Its next turn may be queued already, by a callback that has seen its end.
        """
        kept = self.fresh.pop((ticket, sample), None)
        if kept is None:
            return False
        self.leaving[row] = kept
        kept.row.place = Place.POOL
        self.held[kept] = None
        return True

    def find(self, ticket: int, sample: int) -> KeptRow:
        """The row that a sample's next turn continues.

        Raises:
          ValueError: there is none.
        """
        kept = self._rows.get((ticket, sample))
        if kept is None:
            why = self._ended.get((ticket, sample), "it was never given, or its request was not submitted with keep=True")
            rule = (
                "extend continues a finished request that was kept; {got} has no row: {why}. Submit it again, with keep=True."
            )
            got = f"sample {shown(sample)} of ticket {shown(ticket)}"
            raise InputError(rule, field="ticket", code="not_found", got=got, why=why)
        return kept

    def check(self, ticket: int, sample: int, kept: KeptRow) -> None:
        """Refuses a row that is not the one which a sample has left.

        Raises:
          ValueError: another turn has it, or it is gone.
        """
        if self.find(ticket, sample) is not kept:
            rule = "extend continues a request once; that of {field} {ticket} was replaced. Take the last ticket."
            raise InputError(rule, field="ticket", code="conflict", ticket=ticket)

    def use(self, ticket: int, sample: int, kept: KeptRow) -> None:
        """Gives a row to its next turn, which waits for a place in the batch."""
        self._remove(ticket, sample, "it was extended, and the conversation goes on in the later ticket")
        if kept in self.held:
            del self.held[kept]
            self.held[kept] = None

    def attach(self, kept: KeptRow | None) -> None:
        """A row gets a place in the batch again: its pages are the running sample's."""
        if kept is not None:
            self.held.pop(kept, None)
            kept.row.place = Place.BATCH

    def return_to_host(self, kept: KeptRow) -> None:
        """Leaves a row its copy in host memory, if it has one, after the pool was lost."""
        kept.row.snapshot = None
        if kept.row.swapped is not None:
            kept.row.place = Place.HOST
            self.held[kept] = None

    def swap_out(self, other_than: KeptRow | None = None) -> bool:
        """Decides that the least recently used row is swapped out; False if there is none."""
        kept = next((one for one in self.at(Place.POOL) if one is not other_than), None)
        if kept is not None:
            kept.row.place = Place.HOST
            self.swapping.append(kept)
        return kept is not None

    def free(self, kept: KeptRow | None) -> None:
        """Frees a row that no turn continues."""
        if kept is not None:
            self.held.pop(kept, None)
            self.fresh = {key: one for key, one in self.fresh.items() if one is not kept}
            self.swapping = [one for one in self.swapping if one is not kept]
            self.freed.append(kept)

    def release(self, ticket: int) -> None:
        """Frees the rows of a ticket, if it has any."""
        for number, sample in [key for key in self._rows if key[0] == ticket]:
            self.free(self._rows[number, sample])
            self._remove(number, sample, "it was closed")
            self.dropped["closed"] += 1

    def lose(self) -> None:
        """Forgets the rows that were in the pool alone, which is lost; those with a copy in host memory stay."""
        for ticket, sample in [key for key, kept in self._rows.items() if kept.row.swapped is None]:
            self._remove(ticket, sample, "the pool was lost with it, and the engine reset")
            self.dropped["lost"] += 1
        held = tuple(self.held)
        self.held.clear()
        for kept in held:
            self.return_to_host(kept)
        self.fresh.clear()
        self.leaving.clear()
        self.swapping.clear()
        self.freed.clear()

    def _remove(self, ticket: int, sample: int, why: str) -> None:
        del self._rows[ticket, sample]
        self._ended[ticket, sample] = why
        while len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
