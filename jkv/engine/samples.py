"""What the engine remembers on the host about each sample, and about prompts that samples share."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jkv.cache.pool import EMPTY
from jkv.engine.programs import Snapshot
from jkv.engine.requests import Request, compacted
from jkv.engine.results import AgainColumns, Completion, Event
from jkv.engine.swap import SwappedPages, SwappedRow
from jkv.engine.timing import COMPILING
from jkv.reasoning.sentences import SentenceLog
from jkv.reasoning.sharing import Pair, Sharing
from jkv.reasoning.steering import Thinking
from jkv.reasoning.token_text import StopFinder, TextStream


@dataclasses.dataclass(eq=False)
class Prefix:
    """A prompt that samples start from; when several do, it is prefilled once and its full pages are shared.

    What gave way on the device is prefilled again for those who start, and is in host memory for those who were swapped out.
    """

    key: Any  # by which it is found: what its requests share, and the version of the weights that prefill it
    samples: "set[Sample]" = dataclasses.field(default_factory=set)  # those not finished
    is_held: bool = False  # whether its pages are in the pool, or are about to be
    filled: Any = None  # [L] slots of each layer's heads, on average
    num_pages: int = 0  # at most
    num_full_pages: int = 0  # at least: those that rows can share
    start: "Start | None" = None  # from when it is prefilled
    swapped: "SwappedPages | None" = None

    @property
    def is_idle(self) -> bool:
        """Whether it is in the pool and no row reads it."""
        return self.is_held and not any(sample.shares for sample in self.samples)

    @property
    def is_needed(self) -> bool:
        """Whether a sample is to start from it, reads it, or will when it comes back."""
        return any(sample.is_fresh or sample.shares or sample.swapped for sample in self.samples)


@dataclasses.dataclass(frozen=True)
class Start:
    """A prefilled prompt on the device."""

    snapshot: Snapshot
    page_table: np.ndarray  # the snapshot's, on the host
    completion: Completion  # what compressing the prompt did
    sentences: SentenceLog | None  # of the prompt, for policies that go by them


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample through its life: waiting, running, swapped out, finished."""

    ticket: int
    index: int  # among the samples of its ticket
    request: Request
    completion: Completion
    most_pages: int  # that it ever holds, its prompt in and compacted
    priority: tuple[int, int]  # the smallest is admitted first
    prefix: Prefix
    on_tokens: Callable[[Event], None] | None
    stops: StopFinder | None
    submitted: float  # when, on a clock that stands still while anything compiles
    is_running: bool = False
    shares: bool = False  # whether its row reads the prefix's pages
    swapped: SwappedRow | None = None
    version: int = 0  # of the weights that made its logits
    generated: int = 0
    filled: Any = None  # [L] slots of each layer's heads, on average; None before it is first considered
    text: TextStream | None = None
    thinking: Thinking = dataclasses.field(default_factory=Thinking)  # what steering goes by
    sentences: SentenceLog | None = None  # of a row whose policy goes by them
    sharing: Sharing | None = None  # of a row whose policy shares pages
    num_told: int = 0  # characters of the text that were in an event
    num_told_tokens: int = 0

    @property
    def seconds(self) -> float:
        """Since it was submitted, without those of compiling."""
        return time.perf_counter() - COMPILING.seconds - self.submitted

    @property
    def is_finished(self) -> bool:
        """Whether it is over, for whatever reason."""
        return bool(self.completion.finish_reason)

    @property
    def is_fresh(self) -> bool:
        """Whether it has not started yet."""
        return not self.is_running and self.swapped is None and not self.is_finished

    @property
    def is_forking(self) -> bool:
        """Whether it starts from its prefix."""
        return self.shares and self.swapped is None

    @property
    def shared_table(self) -> np.ndarray | None:
        """Where the pages of its prefix lie that its row reads: [L, K, MP]."""
        if not self.shares:
            return None
        assert self.prefix.start is not None
        return self.prefix.start.page_table

    @property
    def compacted(self) -> Any:
        """What `filled` is after the compaction that is due now, if any."""
        return compacted(self.request.policy, self.filled, len(self.request.prompt), self.generated)

    @property
    def is_due(self) -> bool:
        """Whether its row is to be compressed now."""
        return not self.is_finished and bool((self.compacted < self.filled).any())

    def note_sharing(self, pairs: Sequence[Pair]) -> None:
        """Notes that pages left and others stand for them: what read their tokens reads the others', as often, from now on."""
        assert self.sharing is not None
        layout, completion = self.sharing.layout, self.completion
        completion.shared += sum(layout.count[page] for page, _ in pairs)
        if completion.ends is None:
            return
        now, gone = len(self.request.prompt) + self.generated, [page for page, _ in pairs]
        is_dropped = np.zeros(completion.ends.shape[-1], bool)
        is_dropped[np.concatenate([layout.positions(page) for page in gone])] = True
        completion.ends[..., is_dropped] = now
        if completion.again is None:
            completion.again = AgainColumns()
        completion.again.drop(is_dropped, now)
        if self.sharing.share.bias:
            again = [np.tile(layout.positions(kept), layout.stands_for[page]) for page, kept in pairs if kept not in gone]
            completion.again.add(np.concatenate(again), now)

    def note_shift(self, count: int) -> None:
        """Notes how far the queries of the next `count` steps turn for the sinks: as many positions as were dropped."""
        start, completion = len(self.request.prompt) + self.generated, self.completion
        if completion.sink_shift is None:
            completion.sink_shift = np.zeros(self.request.most_tokens, np.int32)
        completion.sink_shift[start : start + count] = int(self.filled[0]) - start

    def note_steering(self, amount: np.ndarray) -> None:
        """Notes how much of its vector each of the next tokens got."""
        start, completion = len(self.request.prompt) + self.generated, self.completion
        if completion.steered is None:
            completion.steered = np.zeros(self.request.most_tokens, np.float32)
        completion.steered[start : start + len(amount)] = amount

    def note_steps(self, count: int, goes_on: bool, dropped: np.ndarray | None) -> None:
        """Counts what `count` steps gave up (`dropped` [steps, L, K] positions, when traced); a last step gives up nothing."""
        policy, completion, start = self.request.policy, self.completion, len(self.request.prompt) + self.generated
        budgets = policy.layer_budgets(len(self.filled))
        filled = self.filled + count
        evicted = np.maximum(0, filled - (not goes_on) - budgets)
        self.filled = filled - evicted
        completion.compactions += int(evicted.max())
        completion.evicted += float(evicted.mean())
        if dropped is not None and completion.ends is not None:
            step, layer, head = np.nonzero(dropped[:count] != EMPTY)
            completion.ends[layer, head, dropped[step, layer, head]] = start + step + 1

    @property
    def remaining(self) -> int:
        """Tokens until its limit."""
        return self.request.max_new_tokens - self.generated
