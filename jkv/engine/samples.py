"""The engine's host records of each sample, and of prompts that samples share; each has a `jkv.engine.row.Row`."""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jkv.engine.clocks import running_seconds
from jkv.engine.kept_rows import KeptRow, Transcript
from jkv.engine.memory import STEP_PIECE
from jkv.engine.records import RowOutputs
from jkv.engine.requests import Request
from jkv.engine.row import Place, Row
from jkv.errors import refused
from jkv.eviction import AfterPrompt, Policy
from jkv.eviction.policy import compacted
from jkv.eviction.schedules import ask
from jkv.forms.host_walks import HostWalk
from jkv.forms.tables import Walk
from jkv.model.experts import RouteRecorder
from jkv.reasoning.marks import completion_decoder
from jkv.reasoning.sharing import Pair, Sharing
from jkv.reasoning.steering import Thinking
from jkv.reasoning.token_text import StopFinder, TextStream, decoder_of
from jkv.replay.trace import Trace


@dataclasses.dataclass
class Completion:
    """The tokens and counts of a sample so far; what its row counts is added at its end."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    log_probs_full: list[float] = dataclasses.field(default_factory=list)  # before penalties and cuts
    log_probs_own: list[float] = dataclasses.field(default_factory=list)  # of the model's own distribution, where asked for
    top: list[dict[int, float]] = dataclasses.field(default_factory=list)  # the most likely tokens', where asked for
    versions: list[int] = dataclasses.field(default_factory=list)  # of the weights behind each token
    finish_reason: str = ""
    trace: Trace | None = None  # of the finished sample, when traced
    routes: RouteRecorder | None = None  # the experts of its tokens, where asked for
    transcript: Transcript | None = None  # of the conversation that the finished sample is a turn of
    compactions: int = 0
    evicted: float = 0.0  # tokens dropped, averaged over layers and KV heads
    shared: int = 0  # tokens whose page was replaced by an earlier one
    saved: float = 0.0  # share of its pages that sharing and eviction had freed at its end
    preemptions: int = 0
    is_forked: bool = False
    cached_tokens: int = 0  # of its prompt, whose keys and values were in the prefix cache or in a kept row
    peak_kv_bytes: int = 0
    queued_seconds: float = 0.0
    first_seconds: float = 0.0
    first_at: float = 0.0  # the reading of `time.perf_counter` when its first tokens came
    last_seconds: float = 0.0  # until its latest tokens
    seconds: float = 0.0
    error: BaseException | None = None
    text: str | None = None  # of a finished sample, where another process has decoded it

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.tokens)


class Status(enum.Enum):
    """What a sample does."""

    WAITING = "waiting"
    FILLING = "filling"  # its prompt enters its row
    RUNNING = "running"
    FINISHED = "finished"  # it may still have its row, until the end of the step


class Progress(NamedTuple):
    """The counters of a sample that grow with each chunk."""

    generated: int
    filled: Any  # of its row (`Row.filled`)


class Rank(NamedTuple):
    """The place of a sample in the queue; the smallest is admitted first, and preempted last."""

    priority: int = 0  # its request's
    length: int = 0  # minus its most tokens, if the longest are admitted first; else 0
    round: int = 0  # its client's (`jkv.engine.rounds`)
    number: int = 0  # samples that were added before it


@dataclasses.dataclass(eq=False)
class Prefix:
    """A prompt that samples start from; when several do, it is prefilled once and its full pages are shared.

    If its pages were freed, it is prefilled again for new samples, and copied from host memory for samples that are swapped
    in.
    """

    key: Any  # the version of the weights (None for those in use), `Request.prefix`, and whether the prefix cache serves it
    samples: "set[Sample]" = dataclasses.field(default_factory=set)  # unfinished ones
    fresh: "set[Sample]" = dataclasses.field(default_factory=set)  # those that have not started; any number
    readers: "set[Sample]" = dataclasses.field(default_factory=set)  # those whose rows read its pages
    absent: "set[Sample]" = dataclasses.field(default_factory=set)  # those that are swapped out
    row: Row = dataclasses.field(default_factory=Row)  # detached; it has a snapshot once it is prefilled
    num_full_pages: int = 0  # the fewest full pages, which rows can share
    error: BaseException | None = None  # of its compaction, which whoever starts from its pages has too

    @property
    def is_held(self) -> bool:
        """Whether its pages are in the pool, or are about to be."""
        return self.row.place is Place.POOL

    @property
    def is_idle(self) -> bool:
        """Whether it is in the pool and no row reads it."""
        return self.is_held and not self.readers

    @property
    def is_needed(self) -> bool:
        """Whether an unfinished sample reads it, or may read it when it starts or is swapped in."""
        return bool(self.fresh or self.readers or self.absent)

    @property
    def adapter(self) -> str:
        """The adapter of its samples; empty for none."""
        return str(self.key[1][0])

    @property
    def reuses(self) -> bool:
        """Whether its samples may start from the prefix cache."""
        return self.key is not None and self.key[-1]

    def sort(self, sample: "Sample") -> None:
        """Notes what one of its samples does now: to be called when that changes, so that nobody has to go through all."""
        is_own = sample in self.samples
        for group, belongs in (
            (self.fresh, sample.is_fresh),
            (self.readers, sample.reads_prefix),
            (self.absent, sample.is_swapped),
        ):
            if is_own and belongs:
                group.add(sample)
            else:
                group.discard(sample)

    def leave(self) -> "Prefix":
        """Splits off the samples that have started, with the pages; this prefix keeps the others, and has no pages."""
        started = dataclasses.replace(self, samples=self.readers | self.absent, fresh=set())
        self.samples -= started.samples
        self.readers, self.absent = set(), set()
        self.forget()
        return started

    def leave_pool(self) -> None:
        """Its pages are to be freed; swapped-out samples need a copy of them."""
        self.row.place = Place.HOST if self.absent else Place.NOWHERE

    def forget(self) -> None:
        """It has no pages, in the pool or on the host."""
        self.row, self.error = Row(), None


@dataclasses.dataclass(eq=False)
class Sample:
    """One sample through its life: see `Status` for what it does, and `jkv.engine.row.Place` for where its row is."""

    ticket: int
    index: int  # among the samples of its ticket
    request: Request
    completion: Completion
    most_pages: int  # that it holds once its prompt is prefilled and compacted
    rank: Rank = dataclasses.field(default_factory=Rank)  # the smallest is admitted first; the scheduler sets it, and `prefix`
    prefix: Prefix = dataclasses.field(default_factory=lambda: Prefix(None))
    on_tokens: Callable[[Any], None] | None = None
    stops: StopFinder | None = None
    submitted: float = 0.0  # time of submission, on a clock that stops during compilation
    row: Row = dataclasses.field(default_factory=Row)
    is_filling: bool = False  # whether it runs, and its prompt is not in its row yet
    num_passing: int = 0  # pages that it needs besides its reservation while its row is filled
    resumes: KeptRow | None = None  # the kept row of its last turn, until it has a row itself
    resumed: KeptRow | None = None  # that row, once it has: perhaps with a copy to start again from
    earlier: Transcript | None = None  # the conversation up to its last turn
    pending: int = 0  # last tokens of its prompt that are not prefilled yet, after its first piece or of a later turn
    reads_prefix: bool = False  # whether its row reads the prefix's pages
    pieces: tuple[bytes, ...] = ()  # keys of its prompt in the prefix cache; empty if its policy cannot use the cache
    pieces_version: tuple[int, int] | None = None  # weights' version and number of cache clears, for `pieces`
    num_shared_pieces: int = 0  # leading ones whose pages its row shares with the cache, and never rewrites
    generated: int = 0
    thinking: Thinking = dataclasses.field(default_factory=Thinking)  # progress that sets the strength of steering
    sharing: Sharing | None = None  # of a row whose policy shares pages
    walk: Walk | HostWalk | None = None  # through its form, for the parts of a step
    text: TextStream | None = None
    num_emitted: int = 0  # characters of the text that events have had
    num_emitted_tokens: int = 0
    emitted: Completion | None = None  # what events have had of before it restarted
    planned: list[Progress] = dataclasses.field(default_factory=list)  # before each chunk that is dispatched and not read yet

    def __post_init__(self) -> None:
        self.pending = 0 if self.request.num_kept else self.request.num_before

    @property
    def progress(self) -> Progress:
        """Its counters, which run ahead of its tokens while chunks are planned."""
        return Progress(self.generated, self.row.filled)

    @property
    def text_tokens(self) -> list[int]:
        """The tokens of its text: all but the one that ended it, be it special or not."""
        tokens = self.completion.tokens
        is_ended = self.completion.finish_reason == "stop" and bool(tokens) and tokens[-1] in self.request.stop_ids
        return tokens[:-1] if is_ended else tokens

    @property
    def seconds(self) -> float:
        """Seconds since submission, compilation excluded."""
        return running_seconds() - self.submitted

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for any reason."""
        return bool(self.completion.finish_reason)

    @property
    def status(self) -> Status:
        """What it does."""
        if self.is_finished:
            return Status.FINISHED
        if not self.is_running:
            return Status.WAITING
        return Status.FILLING if self.is_filling else Status.RUNNING

    @property
    def is_running(self) -> bool:
        """Whether it has a row of the batch, or is about to get it."""
        return self.row.place is Place.BATCH

    @property
    def is_swapped(self) -> bool:
        """Whether its row is in host memory: until it is swapped in, also when it has a place in the batch again."""
        return self.row.place is Place.HOST or self.row.swapped is not None

    @property
    def is_fresh(self) -> bool:
        """Whether it has not started yet."""
        return self.status is Status.WAITING and not self.is_swapped

    @property
    def keeps_pieces(self) -> bool:
        """Whether its row never rewrites the full pages of its prompt, so that they are counted once, as the prefix cache's."""
        policy = self.request.policy
        return self.request.stays_whole and keeps_prefix(policy) and policy.share is None and not self.reads_prefix

    @property
    def is_forking(self) -> bool:
        """Whether it starts from its prefix."""
        return self.reads_prefix and not self.is_swapped

    @property
    def source(self) -> int | None:
        """The id of the prefix that it forks from when it is admitted; None if it is prefilled or swapped in by itself."""
        return id(self.prefix) if self.is_forking else None

    @property
    def num_seen(self) -> int:
        """Tokens of prompt and completion so far."""
        return len(self.request.prompt) + self.generated - self.pending

    @property
    def clock(self) -> int:
        """Tokens after the prompt of its first turn so far: the time of schedules."""
        return self.num_seen - self.request.first_prompt

    @property
    def remaining(self) -> int:
        """Tokens until its limit."""
        return self.request.max_new_tokens - self.generated

    def num_pages(self, growth: int, num_kv_heads: int, page_size: int, num_shards: int = 1) -> int:
        """The most pages of its row with `growth` more slots; each of the shards of a mesh takes as many as the fullest."""
        return self.row.pages_with(self.request.policy, growth, num_kv_heads, page_size, num_shards)

    @property
    def budgets(self) -> Any:
        """The most slots that the next compaction leaves in each layer, [L], or in each KV head, [L, K]."""
        target: Any = self.request.policy.target(self.request.first_prompt, self.clock)
        if not self.request.policy.is_planned:
            return np.full(len(self.row.filled), self.num_seen)
        return self.request.policy.budgets(target, len(self.row.filled), self.num_seen)

    @property
    def compacted(self) -> Any:
        """`filled` after the compaction that is due now, if any; the most that it may be, where scores decide how many stay."""
        if self.row.keeps_all:
            return self.row.filled
        return compacted(self.request.policy, self.row.filled, self.request.first_prompt, self.clock)

    @property
    def is_due(self) -> bool:
        """Whether its row is to be compacted now."""
        if self.is_finished or self.row.keeps_all:
            return False
        if not self.request.policy.is_planned:
            target = self.request.policy.target(self.request.first_prompt, self.clock)
            return target is not None and bool((self.row.filled > target).any())
        return bool((self.compacted < self.row.filled).any())

    def restart(self, stops: StopFinder | None, version: int) -> None:
        """Makes it fresh, at its place in the queue; `version` is of the weights that it will start with. Events go on where
        they stopped.

        A sample whose tokens came from other weights may draw other tokens, so its events start again at the first.
        """
        completion = Completion(queued_seconds=self.completion.queued_seconds, preemptions=self.completion.preemptions)
        fresh = Sample(
            self.ticket, self.index, self.request, completion, self.most_pages, on_tokens=self.on_tokens, stops=stops
        )
        fresh.submitted, fresh.rank, fresh.prefix = self.submitted, self.rank, self.prefix
        if all(each == version for each in self.completion.versions):
            fresh.text, fresh.num_emitted, fresh.num_emitted_tokens = self.text, self.num_emitted, self.num_emitted_tokens
            fresh.emitted = self.emitted if self.is_behind else self.completion
        vars(self).update(vars(fresh))

    @property
    def is_behind(self) -> bool:
        """Whether it restarted, and has not drawn all of the tokens again that events have had."""
        return self.completion.num_tokens < self.num_emitted_tokens

    def recall(self) -> None:
        """Takes the tokens that events have had as its own, where it ends before it has drawn them again."""
        if self.is_behind and self.emitted is not None:
            for name in ("tokens", "log_probs", "log_probs_full", "log_probs_own", "top", "versions"):
                setattr(self.completion, name, getattr(self.emitted, name)[: self.num_emitted_tokens])

    @property
    def can_plan(self) -> bool:
        """Whether its counters after a chunk are known before its tokens are, unless it ends."""
        policy = self.request.policy
        reads_text = policy.share or policy.steer or policy.sentences or self.request.until is not None
        return policy.is_planned and not reads_text and not self.request.form_on_host

    def plan(self, num_steps: int) -> None:
        """Counts a chunk that is dispatched, as if no token ended the sample before its limit."""
        self.planned.append(self.progress)
        count = min(num_steps, self.remaining)
        self.row.filled = self.row.filled + count
        self.row.filled = self.row.filled - self._evicted_in_steps(goes_on=self.remaining > count)
        self.generated += count

    def land(self) -> tuple[Progress, list[Progress]]:
        """Undoes the counters of all planned chunks; returns what `plan_again` needs to redo all but the first."""
        now, (first, *others) = self.progress, self.planned
        (self.generated, self.row.filled), self.planned = first, []
        return now, others

    def plan_again(self, progress: Progress, planned: list[Progress]) -> None:
        """Runs ahead again by the chunks that are not read yet, once the first one is counted."""
        assert not planned or self.generated == planned[0].generated
        assert not planned or np.array_equal(self.row.filled, planned[0].filled)
        (self.generated, self.row.filled), self.planned = progress, planned

    def _evicted_in_steps(self, goes_on: bool) -> Any:
        """[L] slots that steps have evicted, given those filled if they had not. The last step of a sample evicts nothing."""
        policy = self.request.policy
        if not policy.evicts_in_steps:
            return np.zeros_like(self.row.filled)
        return np.maximum(0, self.row.filled - (not goes_on) - policy.layer_budgets(len(self.row.filled)))

    def count_new(self, count: int) -> None:
        """Counts new tokens of its prompt that were appended to its row."""
        if self.row.records is not None:
            self.row.records.extended(count)
        self.row.append(count)
        self.pending -= count

    @property
    def next_piece(self) -> int:
        """How many of the pending tokens are appended before the row may have to be compacted."""
        policy = self.request.policy
        steps = None if policy.schedule is None else ask(policy.name, policy.schedule, "steps_until_due", self.clock)
        return min(self.pending, STEP_PIECE if policy.evicts_in_steps else steps or self.pending)

    def advance(self, row: RowOutputs) -> None:
        """Records a chunk, then counts its tokens and slots."""
        count = len(row.tokens)
        if self.row.records is not None:
            self.row.records.decoded(row, self.request.policy, self.num_seen, int(self.row.filled.flat[0]))
        self.row.append(count)
        evicted = self._evicted_in_steps(row.goes_on)
        self.row.filled = self.row.filled - evicted
        self.row.compactions += int(evicted.max())
        self.row.evicted += float(evicted.mean())
        if self.sharing is not None:
            self.sharing.append(row.tokens)
            if not self.sharing.is_over:
                self.row.filled = np.full_like(self.row.filled, self.sharing.layout.num_slots)
        self.generated += count
        self.row.keeps_all |= self.request.until in row.tokens

    def compact(self, dropped: np.ndarray | None, is_left: np.ndarray | None = None, left: np.ndarray | None = None) -> None:
        """Counts the compaction that was due, and records what it dropped and left (`Records.compacted`).

        `left` are the slots that are left ([L, K]), where scores decided how many.
        """
        self.row.heads = left
        compacted = self.compacted if left is None else left.mean(axis=1)
        self.row.compactions += 1
        self.row.evicted += float((self.row.filled - compacted).mean())
        self.row.filled = compacted
        if self.sharing is not None:
            self.sharing.is_over = True
        if self.row.records is not None:
            self.row.records.compacted(dropped, is_left, self.num_seen)

    def share(self, pairs: Sequence[Pair]) -> None:
        """Counts replaced pages. Later queries read the kept page once more for each of them."""
        assert self.sharing is not None
        layout = self.sharing.layout
        self.completion.shared += sum(layout.count[page] for page, _ in pairs)
        self.row.filled = np.full_like(self.row.filled, layout.num_slots)
        if self.row.records is not None:
            self.row.records.shared(pairs, layout, self.sharing.share.bias, self.num_seen)


def keeps_prefix(policy: Policy) -> bool:
    """Whether a row never rewrites the full pages of its prompt once it has started, so that shared ones stay shared."""
    return policy.evict is None or isinstance(policy.schedule, AfterPrompt) or policy.evict.protect_prompt


def pieces_in_use(running: Mapping[int, Sample]) -> set[bytes]:
    """The keys of pieces of the prefix cache whose pages running rows count as the cache's."""
    return {key for sample in running.values() for key in sample.pieces[: sample.num_shared_pieces]}


def split_by_ownership(admitted: dict[int, Sample]) -> Iterator[tuple[bool, list[int]]]:
    """Groups rows by `owns_all`: rows that evict in steps write into their prompt's pages, so they must own them."""
    for owns_all in (False, True):
        group = [row for row, sample in admitted.items() if sample.request.policy.evicts_in_steps == owns_all]
        if group:
            yield owns_all, group


def stop_finder(tokenizer: Any, request: Request) -> StopFinder | None:
    """A finder of a request's stop strings in the text of one sample, with or without special tokens; None if it has none."""
    if not request.stop_strings:
        return None
    others = [completion_decoder(tokenizer)] if hasattr(tokenizer, "all_special_ids") else []  # some have no name
    return StopFinder(decoder_of(tokenizer), request.stop_strings, *others)


def samples_of(tickets: Mapping[int, list[Sample]], ticket: int) -> list[Sample]:
    """The samples of a request.

    Raises:
      ValueError: an unknown ticket.
    """
    if ticket not in tickets:
        rule = f"No request has the ticket {ticket}: it was never given, or its result was already taken."
        raise refused(rule, ticket="not_found")
    return tickets[ticket]


def take_finished(tickets: dict[int, list[Sample]], taken: Sequence[int]) -> list[Sample]:
    """The samples of finished requests, in order; the requests are dropped.

    Raises:
      ValueError: an unknown ticket, or one that is not finished; nothing is dropped.
    """
    samples = {ticket: samples_of(tickets, ticket) for ticket in taken}
    for ticket, group in samples.items():
        if not all(sample.is_finished for sample in group):
            raise refused(f"Request {ticket} is not finished. Call run() or stream() first.", ticket="conflict")
    for ticket in samples:
        del tickets[ticket]
    return [sample for group in samples.values() for sample in group]
