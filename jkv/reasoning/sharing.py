"""Which pages of a sequence stand in for others (ReasonCache, MemShare): arithmetic on the host about one row.

A reasoning step that is like an earlier one (`jkv.reasoning.steps`) makes its pages candidates; the device says how far apart
they are;
what is below a percentile of all distances seen is shared: the newer page leaves the row's table, and the older counts for
both, which is exactly what reading it twice would be. Pages are the same in every layer and KV head, and only those are shared
that are full (or ended where a step did) and were never compacted.

Time is counted in the row's own generated tokens: at every multiple of `interval`, what was found `interval` tokens before is
shared. So the host has a chunk's time to look, and a row's result does not depend on its neighbours once the threshold is
known.
"""

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jkv.cache.pool import EMPTY
from jkv.model.params import Model
from jkv.reasoning.steps import Filter, FilterStats, StepFinder, make_library
from jkv.reasoning.token_text import facts_of

COMPARED = ("rotated", "raw", "values")
METRICS = ("euclid", "cosine")
PAIRINGS = ("ordinal", "all")
DEFAULT_FILTER = Filter()
MOST_DISTANCES = 1 << 16  # that statistics keep


@dataclasses.dataclass(frozen=True)
class Share:
    """Which pages are the same.

    Attributes:
      filter: which steps are alike.
      percentile: the share of candidate distances, in percent, that are small enough; 100 takes all.
      warm_up: candidates whose distances settle the threshold; until then nothing is shared.
      threshold: a distance in place of the percentile, such as an earlier run's
        (`stats.sharing.thresholds[policy.share].value`).
      cap: the largest relative distance, `|a - b|` by the norm of either, that is shared in any case; None for no limit.
      compare_on: "rotated" keys, as they are cached, and values; "raw" keys, as if both stood at the same place; or "values"
        alone.
      metric: "euclid" or "cosine".
      bias: whether a page that stands for m counts m times.
      align_steps: whether steps start on pages of their own, the rest of the last one left empty; but for those that follow
        less than half a page of text since the last that did, so that no row is more than half empty.
      match: the share of token ids that two pages must have in common, place by place.
      pairing: "ordinal", the i-th page of a step with the i-th of the other; or "all" of them with each other.
      include_prompt: whether pages of the prompt may stand in for others.
      interval: generated tokens between two decisions.
      random: a seed: as many pages are shared as would be, `percentile` of the candidates being near enough, but any with any
        (the baseline), and none is measured; None shares those found.

    Raises:
      ValueError: a field out of its range.
    """

    filter: Filter = DEFAULT_FILTER
    percentile: float = 80.0
    warm_up: int = 1024
    threshold: float | None = None
    cap: float | None = None
    compare_on: str = "rotated"
    metric: str = "euclid"
    bias: bool = True
    align_steps: bool = False
    match: float = 0.75
    pairing: str = "ordinal"
    include_prompt: bool = False
    interval: int = 16
    random: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile is the share of distances that are small enough, in (0, 100]; got {self.percentile}.")
        if self.warm_up < 1 or self.interval < 1:
            raise ValueError(f"warm_up and interval must be at least 1; got {self.warm_up=}, {self.interval=}.")
        if not 0 <= self.match <= 1:
            raise ValueError(f"match is a share of a page's tokens and must lie in [0, 1]; got {self.match}.")
        if self.random is not None and self.random < 0:
            raise ValueError(f"random is a seed >= 0, or None; got {self.random}.")
        for name, value in (("threshold", self.threshold), ("cap", self.cap)):
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is a distance >= 0, or None; got {value}.")
        for name, known in (("compare_on", COMPARED), ("metric", METRICS), ("pairing", PAIRINGS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}; got {getattr(self, name)!r}.")

    def steps_until_due(self, generated: int) -> int:
        """Steps to the next decision."""
        return self.interval - generated % self.interval

    def most_slots(self, tokens: int) -> int:
        """The most slots that so many tokens fill: at most half of each page's end is left empty where steps are aligned."""
        return 2 * tokens if self.align_steps else tokens


@dataclasses.dataclass
class Threshold:
    """The distance below which pages are shared; settled once for all sequences of an engine.

    Attributes:
      share: whose.
      value: the distance; None as long as the warm-up lasts.
      distances: of the first `MOST_DISTANCES` candidates, in the order in which they were measured.
      relative: the same, by the norms of the pages themselves.
    """

    share: Share
    value: float | None = None
    distances: list[float] = dataclasses.field(default_factory=list)
    relative: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.share.threshold is not None:
            self.value = self.share.threshold
        elif self.share.percentile == 100:
            self.value = math.inf

    def observe(self, distances: Sequence[float], relative: Sequence[float]) -> None:
        """Takes the distances of more candidates."""
        room = max(MOST_DISTANCES, self.share.warm_up) - len(self.distances)
        self.distances += distances[:room]
        self.relative += relative[:room]
        if self.value is None and len(self.distances) >= self.share.warm_up:
            self.value = float(np.percentile(self.distances[: self.share.warm_up], self.share.percentile))


@dataclasses.dataclass
class SharingStats:
    """What sharing found and did in an engine so far. Seconds are of the host.

    Attributes:
      filter: stage 1, counted.
      shifted: pairs of pages of alike steps that had too few tokens in common, place by place: what alignment costs.
      empty_slots: slots of a layer and KV head left empty so that steps start pages.
      candidates: pairs of pages that were measured.
      judged: of them, those after the warm-up.
      near: of those, the ones near enough.
      shared: pages given up; of several candidates for one page the nearest counts.
      deferred: those whose older page had just been given up itself; measured, and counted, once more.
      filter_seconds: of stage 1, while the device decoded.
      filter_waits: chunks that the device had finished before stage 1 was.
      measure_seconds: of stage 2, waiting for distances and deciding.
      thresholds: by `Policy.share`, the distance below which pages are shared, and all distances seen.
    """

    filter: FilterStats = dataclasses.field(default_factory=FilterStats)
    shifted: int = 0
    empty_slots: int = 0
    candidates: int = 0
    judged: int = 0
    near: int = 0
    shared: int = 0
    deferred: int = 0
    filter_seconds: float = 0.0
    filter_waits: int = 0
    measure_seconds: float = 0.0
    thresholds: dict[Share, Threshold] = dataclasses.field(default_factory=dict)

    @property
    def accept_rate(self) -> float:
        """The share of candidates, after the warm-up, that were near enough."""
        return self.near / max(self.judged, 1)


class Layout:
    """The pages of one row: what each holds, which are in the table, in order, and which stand for how many."""

    def __init__(self, page_size: int, prompt: int) -> None:
        self.page_size = page_size
        self.first: list[int] = []  # position of each page's first token; pages are numbered as they begin
        self.count: list[int] = []  # its tokens
        self.sealed: list[int | None] = []  # after how many generated tokens it took no more; None if it still does
        self.multiplicity: list[int] = []
        self.root: list[int] = []  # the page that stands for it, or itself
        self.table: list[int] = []
        self.num_tokens = 0
        for _ in range(prompt):
            self.append(0)

    @property
    def num_slots(self) -> int:
        """Slots of the row, empty ones included, in each layer and KV head."""
        if not self.table:
            return 0
        last = self.table[-1]
        return (len(self.table) - 1) * self.page_size + (self.count[last] if self.sealed[last] is None else self.page_size)

    def append(self, generated: int) -> None:
        """One more token."""
        if not self.table or self.sealed[self.table[-1]] is not None:
            self.table.append(len(self.first))
            self.root.append(len(self.first))
            self.first.append(self.num_tokens)
            self.count.append(0)
            self.sealed.append(None)
            self.multiplicity.append(1)
        self.num_tokens += 1
        last = self.table[-1]
        self.count[last] += 1
        if self.count[last] == self.page_size:
            self.sealed[last] = generated

    def fill(self, generated: int) -> None:
        """The last page takes no more."""
        if self.table and self.sealed[self.table[-1]] is None:
            self.sealed[self.table[-1]] = generated

    def inside(self, begin: int, end: int) -> range:
        """The pages that hold nothing but tokens in [begin, end)."""
        start = bisect.bisect_left(self.first, begin)
        stop = bisect.bisect_left(self.first, end)
        if stop > start and self.first[stop - 1] + self.count[stop - 1] > end:
            stop -= 1
        return range(start, stop)

    def is_sealed(self, page: int, horizon: int) -> bool:
        """Whether it took its last token within so many generated ones."""
        sealed = self.sealed[page]
        return sealed is not None and sealed <= horizon

    def is_full(self, page: int) -> bool:
        """Whether each of its slots holds a token."""
        return self.count[page] == self.page_size

    def positions(self, page: int) -> np.ndarray:
        """Those of its tokens."""
        return np.arange(self.first[page], self.first[page] + self.count[page])

    def give_up(self, page: int, kept: int) -> None:
        """`kept` stands for `page`, and for what that one stood for."""
        self.table.remove(page)
        self.multiplicity[kept] += self.multiplicity[page]
        self.root = [kept if root == page else root for root in self.root]


class Pair(NamedTuple):
    """A page that may leave, and the one that would stand for it."""

    page: int
    kept: int


class Sharing:
    """What sharing knows about one row."""

    def __init__(
        self,
        share: Share,
        model: Model,
        prompt: np.ndarray,
        page_size: int,
        stats: SharingStats,
        embedding: Callable[[], np.ndarray],
        identity: tuple[int, int] = (0, 0),
    ) -> None:
        facts = facts_of(model.tokenizer, model.config.vocab_size)
        self.share, self.facts, self.stats = share, facts, stats
        self.tokens: list[int] = prompt.tolist()
        self.num_prompt, self.generated = len(prompt), 0
        self.layout = Layout(page_size, len(prompt))
        self.judged = self.layout if share.random is None else Layout(page_size, len(prompt))  # as it would be, not at random
        self.is_over = False  # once the row was compacted
        self.was_end, self.since = True, len(prompt)  # whether the last token ended a step; tokens since the last aligned one
        library = make_library(share.filter, model.config.vocab_size, embedding)
        begin = 0 if share.include_prompt else len(prompt)
        self._finder = StepFinder(share.filter, facts, model.tokenizer.decode, library, stats.filter, begin)
        self._waiting: collections.deque[tuple[int, list[int]]] = collections.deque()  # a step, and those that it is like
        self._pages: dict[int, range] = {}  # of steps
        self._again: list[Pair] = []
        self._num_looked = begin
        self._rng = None if share.random is None else np.random.default_rng([share.random, *identity])

    def append(self, tokens: Sequence[int]) -> None:
        """The row's next tokens: where they lie. Cheap, and no look at what they say."""
        layouts = (self.layout,) if self.judged is self.layout else (self.layout, self.judged)
        size = self.layout.page_size
        for token in tokens:
            self.generated += 1
            is_end = bool(self.facts.ends_step[token])
            if self.share.align_steps and self.was_end and not is_end and 2 * self.since >= size:
                self.stats.empty_slots += -self.layout.num_slots % size
                for layout in layouts:
                    layout.fill(self.generated)
                self.since = 0
            self.was_end, self.since = is_end, self.since + 1
            for layout in layouts:
                layout.append(self.generated)
            self.tokens.append(token)

    def look(self) -> None:
        """Finds steps in the tokens that it has not looked at, and the earlier ones that they are like."""
        while self._num_looked < len(self.tokens) and not self.is_over:
            token, self._num_looked = self.tokens[self._num_looked], self._num_looked + 1
            found = self._finder.take(token, max(0, self._num_looked - self.num_prompt))
            if found is not None and found[1]:
                self._waiting.append(found)

    def candidates(self, now: int) -> list[Pair]:
        """The pairs of pages to be measured for the decision after `now` generated tokens, each told once.

        Steps are taken when the token after them is there, too: then it is settled which page they end in.
        """
        steps, horizon, root = self._finder.steps, now - self.share.interval, self.judged.root
        couple: Any = itertools.product if self.share.pairing == "all" else zip
        pairs = dict.fromkeys((page, root[kept]) for page, kept in self._again)
        self._again = []
        while self._waiting and steps[self._waiting[0][0]].closed < horizon:
            newer, earlier = self._waiting.popleft()
            of_new = self._pages_of(newer)
            for older in earlier:
                of_old = self._pages_of(older)
                pairs |= dict.fromkeys((page, root[other]) for page, other in couple(of_new, of_old))
        return [Pair(page, kept) for page, kept in pairs if self._is_candidate(page, kept, horizon)]

    def _pages_of(self, step: int) -> range:
        """The pages that hold nothing but a step's tokens."""
        if step not in self._pages:
            self._pages[step] = self.judged.inside(self._finder.steps[step].begin, self._finder.steps[step].end)
        return self._pages[step]

    def _is_candidate(self, page: int, kept: int, horizon: int) -> bool:
        layout = self.judged
        if page == kept or layout.root[page] != page or layout.root[kept] != kept or layout.first[page] < self.num_prompt:
            return False
        if not all(layout.is_sealed(one, horizon) for one in (page, kept)) or layout.count[page] != layout.count[kept]:
            return False
        ours, theirs = (self.tokens[layout.first[one] : layout.first[one] + layout.count[one]] for one in (page, kept))
        same = sum(token == other for token, other in zip(ours, theirs, strict=True))
        self.stats.shifted += same < self.share.match * len(ours)
        return same >= self.share.match * len(ours)

    def decide(self, pairs: Sequence[Pair], distance: np.ndarray, relative: np.ndarray, threshold: float) -> list[Pair]:
        """Shares what is near enough, nearest first for each page in its order, and returns it; the layout follows."""
        nearest: dict[int, Pair] = {}
        for i in sorted(range(len(pairs)), key=lambda i: (pairs[i].page, distance[i], pairs[i].kept)):
            if distance[i] <= threshold and (self.share.cap is None or relative[i] <= self.share.cap):
                self.stats.near += 1
                nearest.setdefault(pairs[i].page, pairs[i])
        return [pair for pair in nearest.values() if self._give_up(self.layout, pair)]

    def decide_at_random(self, pairs: Sequence[Pair]) -> list[Pair]:
        """As many pages given up as would be if `percentile` of the candidates were near enough, but any for any."""
        assert self._rng is not None
        done = []
        for pair in {pair.page: pair for pair in reversed(pairs)}.values():
            if 100 * self._rng.random() < self.share.percentile and self._give_up(self.judged, pair):
                table, layout = self.layout.table, self.layout
                own = [page for page in table if layout.first[page] >= self.num_prompt and layout.is_full(page)]
                if len(own) >= 2:
                    kept, page = sorted(self._rng.choice(own, 2, replace=False).tolist())
                    layout.give_up(page, kept)
                    done.append(Pair(page, kept))
        return done

    def _give_up(self, layout: Layout, pair: Pair) -> bool:
        """Lets a page go, unless the one that would stand for it went a moment ago: what stands for that is measured next."""
        if layout.root[pair.page] != pair.page:
            return False
        if layout.root[pair.kept] != pair.kept:
            self._again.append(pair)
            self.stats.deferred += 1
            return False
        layout.give_up(pair.page, pair.kept)
        return True

    def entries(self, before: Sequence[int], max_pages: int) -> tuple[np.ndarray, np.ndarray]:
        """How the table follows from the one `before`, and the log-weight of each page left: [MP], for `pool.take_pages`."""
        place, layout = {page: i for i, page in enumerate(before)}, self.layout
        entries, log_weight = np.full(max_pages, EMPTY, np.int32), np.zeros(max_pages, np.float32)
        entries[: len(layout.table)] = [place[page] for page in layout.table]
        if self.share.bias:
            log_weight[: len(layout.table)] = np.log([layout.multiplicity[page] for page in layout.table])
        return entries, log_weight


def distances(share: Share, squares: np.ndarray, num_tokens: np.ndarray, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """What `block_distance` gave ([I, L, 2, 3]) as one distance for each pair, and as one relative to the pages' own norms.

    Euclid is ReasonCache's: the mean over layers of the norms of the keys' and the values' difference, by twice the tokens and
    KV heads of a page. Cosine is one less the cosine, the mean over layers of that of keys and that of values.
    """
    squares = np.asarray(squares, np.float64)
    apart, size = np.sqrt(squares[..., 2]), np.sqrt(squares[..., :2].mean(axis=-1))  # [I, L, 2]
    relative = apart / np.maximum(size, 1e-30)
    if share.metric == "cosine":
        product = (squares[..., 0] + squares[..., 1] - squares[..., 2]) / 2
        apart = 1 - product / np.maximum(np.sqrt(squares[..., 0] * squares[..., 1]), 1e-30)
    else:
        apart = apart / (num_tokens[:, None, None] * num_kv_heads)
    first = 1 if share.compare_on == "values" else 0
    return apart[..., first:].mean(axis=(1, 2)), relative[..., first:].mean(axis=(1, 2))


def check_tokenizer(model: Model, name: str) -> None:
    """Refuses a model whose text cannot be divided into steps.

    Raises:
      ValueError: no tokenizer, or one without a blank line.
    """
    if model.tokenizer is None:
        raise ValueError(
            f"{name} finds reasoning steps by the text of tokens, and this model has no tokenizer. Load one with it."
        )
    if not facts_of(model.tokenizer, model.config.vocab_size).is_break.any():
        raise ValueError(
            f"{name} divides text into steps at blank lines, and no token of this model's tokenizer holds one. Use a policy "
            "that evicts."
        )
