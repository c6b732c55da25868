"""Chooses the pages of a sequence that are shared (ReasonCache, MemShare): host arithmetic for one row.

If a thought is similar to an earlier one (`jkv.reasoning.thoughts`), its pages are candidates. The device measures their
distance to the earlier pages. A page below a percentile of the distances so far is shared: it leaves the row's table, and the
earlier page is weighted as if it were read twice. A page covers the same tokens in every layer and KV head. Only pages that
are full (or closed at the end of a thought), and never compacted, are shared.

Time is counted in the row's generated tokens. The decision at a multiple of `interval` uses what the row held `interval` tokens
earlier. The host therefore has the time of a chunk, and once the threshold is set the result of a row does not depend on other
rows.
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
from jkv.checks import check_between, check_known, check_least, need_tokenizer
from jkv.errors import InputError, refused
from jkv.model.params import Model
from jkv.reasoning.thoughts import Filter, FilterStats, ThoughtFinder, make_index
from jkv.reasoning.token_text import facts_of
from pallas_kernels.largest_slots import ROUNDING

COMPARED = ("rotated", "raw", "values")
METRICS = ("euclid", "cosine")
PAIRINGS = ("ordinal", "all")
DEFAULT_FILTER = Filter()
MOST_DISTANCES = 1 << 16  # kept in the statistics


@dataclasses.dataclass(frozen=True)
class Share:
    """Which pages are shared.

    Attributes:
      filter: which thoughts are similar.
      percentile: the percentage of candidate distances below the threshold; 100 accepts all.
      warm_up: the number of candidates that set the threshold. Nothing is shared before.
      refresh: after so many more candidates the threshold is set again, by the last `warm_up` of them; None keeps the first.
      threshold: a fixed distance in place of the percentile, for example that of an earlier run
        (`stats.sharing.thresholds[policy.share].value`).
      cap: the largest relative distance that may be shared, `|a - b|` over the root mean square of the two norms; None for no
        limit.
      compare_on: "rotated" for cached keys and values; "raw" for keys as if both pages were at the same position, and values;
        or "values" alone.
      metric: "euclid" or "cosine".
      bias: whether a page of multiplicity m has m times the weight in attention.
      align_steps: whether each thought starts a new page, with vacant slots at the end of the page before. A thought does not
        start a new page within half a page of tokens after the last one that did, so no row is more than half vacant.
      match: the share of token ids that two pages must have in common, slot by slot.
      pairing: "ordinal" for the i-th page of one thought with the i-th of the other; "all" for all pairs.
      include_prompt: whether pages of the prompt may replace others.
      interval: generated tokens between two decisions.
      random: None, or the seed of the random baseline. It shares as many pages as if `percentile` of the candidates were
        accepted, but the pages are drawn at random and nothing is measured.

    Raises:
      ValueError: a field is out of range.
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
    match: float = 0.0
    pairing: str = "ordinal"
    include_prompt: bool = False
    interval: int = 16
    random: int | None = None
    refresh: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.percentile <= 100:
            rule = "{field} is the percentage of distances that are accepted, in (0, 100]; got {got}."
            raise InputError(rule, field="percentile", code="out_of_range", got=self.percentile)
        check_least(1, warm_up=self.warm_up, interval=self.interval)
        check_least(1, " distance, or None", refresh=self.refresh)
        check_between(0, 1, " of a page's tokens", match=self.match)
        check_least(0, ", or None", random=self.random, threshold=self.threshold, cap=self.cap)
        check_known(COMPARED, compare_on=self.compare_on)
        check_known(METRICS, metric=self.metric)
        check_known(PAIRINGS, pairing=self.pairing)

    def steps_until_due(self, generated: int) -> int:
        """Decode steps to the next decision."""
        return self.interval - generated % self.interval

    def most_slots(self, tokens: int) -> int:
        """The largest number of slots that so many tokens take; with aligned thoughts at most half of the slots are vacant."""
        return 2 * tokens if self.align_steps else tokens


@dataclasses.dataclass
class Threshold:
    """The distance below which pages are shared. All sequences of an engine use one threshold.

    Attributes:
      share: the settings that it belongs to.
      value: the distance; None during the warm-up.
      latest: the last `warm_up` distances; empty where the threshold is fixed.
      num_seen: how many there have been.
      is_fixed: whether the settings give the distance.
      distances: distances of the first `MOST_DISTANCES` candidates, in the order of measurement.
      relative: the same distances relative to the norms of the pages.
    """

    share: Share
    value: float | None = None
    latest: collections.deque[float] = dataclasses.field(default_factory=collections.deque)
    num_seen: int = 0
    is_fixed: bool = dataclasses.field(default=False, init=False)
    distances: list[float] = dataclasses.field(default_factory=list)
    relative: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.share.threshold is not None:
            self.value = self.share.threshold
        elif self.share.percentile == 100:
            self.value = math.inf
        self.is_fixed = self.value is not None

    def observe(self, distances: Sequence[float], relative: Sequence[float]) -> None:
        """Adds the distances of more candidates."""
        room = MOST_DISTANCES - len(self.distances)
        self.distances += distances[:room]
        self.relative += relative[:room]
        if self.is_fixed:
            return
        for distance in distances:  # at fixed counts, however many are measured together
            self.latest.append(distance)
            self.num_seen += 1
            if len(self.latest) > self.share.warm_up:
                self.latest.popleft()
            after = self.num_seen - self.share.warm_up
            if after == 0 or (after > 0 and self.share.refresh is not None and after % self.share.refresh == 0):
                self.value = float(np.percentile(self.latest, self.share.percentile))


@dataclasses.dataclass
class SharingStats:
    """Counts and host seconds of sharing in an engine so far.

    Attributes:
      filter: counts of stage 1.
      shifted: pairs of pages, from similar thoughts, with too few tokens in common slot by slot: the cost of missing alignment.
      empty_slots: slots per layer and KV head that are vacant because a thought starts a page.
      candidates: pairs of pages that were measured.
      judged: candidates after the warm-up.
      near: judged candidates below the threshold.
      shared: pages that were replaced by an earlier one, the nearest of several.
      deferred: near candidates whose earlier page was itself replaced in the same decision; measured and counted once more.
      filter_seconds: stage 1, while the device decodes.
      filter_waits: chunks that finished on the device before stage 1 did on the host.
      measure_seconds: stage 2, waiting for distances and deciding.
      thresholds: the threshold of each `Policy.share`, with the distances.
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
        """The share of judged candidates that were below the threshold."""
        return self.near / max(self.judged, 1)


class Layout:
    """The pages of one row: their tokens, their order in the block table, and their multiplicity."""

    def __init__(self, page_size: int, prompt: int) -> None:
        self.page_size = page_size
        # By page, numbered in the order of their first tokens.
        self.first: list[int] = []  # position of the first token
        self.count: list[int] = []  # tokens
        self.sealed: list[int | None] = []  # the number of generated tokens when it was closed; None while it is open
        self.multiplicity: list[int] = []
        self.root: list[int] = []  # the page that replaces it, or itself
        self.table: list[int] = []  # the pages of the block table, in order
        self.num_tokens = 0
        for _ in range(prompt):
            self.append(0)

    @property
    def num_slots(self) -> int:
        """Slots of the row in each layer and KV head, vacant ones included."""
        if not self.table:
            return 0
        last = self.table[-1]
        return (len(self.table) - 1) * self.page_size + (self.count[last] if self.sealed[last] is None else self.page_size)

    def append(self, generated: int) -> None:
        """Adds one token."""
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
        """Closes the last page."""
        if self.table and self.sealed[self.table[-1]] is None:
            self.sealed[self.table[-1]] = generated

    def pages_within(self, begin: int, end: int) -> range:
        """The pages whose tokens all lie in [begin, end)."""
        start = bisect.bisect_left(self.first, begin)
        stop = bisect.bisect_left(self.first, end)
        if stop > start and self.first[stop - 1] + self.count[stop - 1] > end:
            stop -= 1
        return range(start, stop)

    def is_sealed(self, page: int, horizon: int) -> bool:
        """Whether the page was closed when `horizon` tokens were generated."""
        sealed = self.sealed[page]
        return sealed is not None and sealed <= horizon

    def is_full(self, page: int) -> bool:
        """Whether each of its slots holds a token."""
        return self.count[page] == self.page_size

    def positions(self, page: int) -> np.ndarray:
        """The positions of the page's tokens."""
        return np.arange(self.first[page], self.first[page] + self.count[page])

    def replace(self, page: int, kept: int) -> None:
        """Removes `page` from the table; `kept` replaces it and takes over its multiplicity."""
        self.table.remove(page)
        self.multiplicity[kept] += self.multiplicity[page]
        self.root = [kept if root == page else root for root in self.root]


class Pair(NamedTuple):
    """A page, and the earlier page that may replace it."""

    page: int
    kept: int


class Sharing:
    """The state of sharing for one row."""

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
        self.judged = self.layout if share.random is None else Layout(page_size, len(prompt))  # as without the random baseline
        self.is_over = False  # true as soon as the row is compacted
        self.ended_thought = True  # whether the last token ended a thought
        self.since_aligned = len(prompt)  # tokens since a thought last started a page
        index = make_index(share.filter, model.config.vocab_size, embedding)
        begin = 0 if share.include_prompt else len(prompt)
        self._finder = ThoughtFinder(share.filter, facts, model.tokenizer.decode, index, stats.filter, begin)
        self._matched: collections.deque[tuple[int, list[int]]] = collections.deque()  # a thought, and similar earlier ones
        self._pages: dict[int, range] = {}  # by thought
        self._deferred: list[Pair] = []  # to measure again
        self._num_read = begin
        self._rng = None if share.random is None else np.random.default_rng([share.random, *identity])

    def append(self, tokens: Sequence[int]) -> None:
        """Adds the row's next tokens to the layout. Cheap: their text is not read."""
        layouts = (self.layout,) if self.judged is self.layout else (self.layout, self.judged)
        size = self.layout.page_size
        for token in tokens:
            self.generated += 1
            is_end = bool(self.facts.ends_thought[token])
            if self.share.align_steps and self.ended_thought and not is_end and 2 * self.since_aligned >= size:
                self.stats.empty_slots += -self.layout.num_slots % size
                for layout in layouts:
                    layout.fill(self.generated)
                self.since_aligned = 0
            self.ended_thought, self.since_aligned = is_end, self.since_aligned + 1
            for layout in layouts:
                layout.append(self.generated)
            self.tokens.append(token)

    def find_similar(self) -> None:
        """Finds the thoughts in the tokens since the last call, and similar earlier ones."""
        while self._num_read < len(self.tokens) and not self.is_over:
            token, self._num_read = self.tokens[self._num_read], self._num_read + 1
            found = self._finder.take(token, max(0, self._num_read - self.num_prompt))
            if found is not None and found[1]:
                self._matched.append(found)

    def candidates(self, now: int) -> list[Pair]:
        """The pairs of pages to measure for the decision after `now` generated tokens; each pair is returned once.

        A thought is used once the token after it exists, because that token decides whether the last page is closed.
        """
        thoughts, horizon, root = self._finder.thoughts, now - self.share.interval, self.judged.root
        couple: Any = itertools.product if self.share.pairing == "all" else zip
        pairs = dict.fromkeys((page, root[kept]) for page, kept in self._deferred)
        self._deferred = []
        while self._matched and thoughts[self._matched[0][0]].closed < horizon:
            newer, earlier = self._matched.popleft()
            of_new = self._pages_of(newer)
            for older in earlier:
                of_old = self._pages_of(older)
                pairs |= dict.fromkeys((page, root[other]) for page, other in couple(of_new, of_old))
        return [Pair(page, kept) for page, kept in pairs if self._is_candidate(page, kept, horizon)]

    def _pages_of(self, index: int) -> range:
        """The pages whose tokens all belong to one thought."""
        if index not in self._pages:
            thought = self._finder.thoughts[index]
            self._pages[index] = self.judged.pages_within(thought.begin, thought.end)
        return self._pages[index]

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
        """Shares each page with its nearest candidate below the threshold, in the order of pages. Returns the shared pairs.

        Distances that are equal up to `ROUNDING` are ties: of equally near pages the earliest is taken.
        """
        slack, cap = 1 + ROUNDING, math.inf if self.share.cap is None else self.share.cap
        near = [i for i in range(len(pairs)) if distance[i] <= slack * threshold and relative[i] <= slack * cap]
        self.stats.near += len(near)
        least: dict[int, float] = {}
        for i in near:
            least[pairs[i].page] = min(distance[i], least.get(pairs[i].page, math.inf))
        nearest: dict[int, Pair] = {}
        for pair in sorted(pairs[i] for i in near if distance[i] <= slack * least[pairs[i].page]):
            nearest.setdefault(pair.page, pair)
        return [pair for pair in nearest.values() if self._replace(self.layout, pair)]

    def decide_at_random(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Shares as many pages as if `percentile` of the candidates were accepted, but with random pairs."""
        assert self._rng is not None
        done = []
        for pair in {pair.page: pair for pair in reversed(pairs)}.values():
            if 100 * self._rng.random() < self.share.percentile and self._replace(self.judged, pair):
                table, layout = self.layout.table, self.layout
                own = [page for page in table if layout.first[page] >= self.num_prompt and layout.is_full(page)]
                if len(own) >= 2:
                    kept, page = sorted(self._rng.choice(own, 2, replace=False).tolist())
                    layout.replace(page, kept)
                    done.append(Pair(page, kept))
        return done

    def _replace(self, layout: Layout, pair: Pair) -> bool:
        """Replaces a page. If the other page was itself replaced just before, the pair is deferred and measured again."""
        if layout.root[pair.page] != pair.page:
            return False
        if layout.root[pair.kept] != pair.kept:
            self._deferred.append(pair)
            self.stats.deferred += 1
            return False
        layout.replace(pair.page, pair.kept)
        return True

    def entries(self, before: Sequence[int], max_pages: int) -> tuple[np.ndarray, np.ndarray]:
        """The kept entries of the table `before`, and the log-weight of each: [MP], the arguments of `pool.take_pages`."""
        place, layout = {page: i for i, page in enumerate(before)}, self.layout
        entries, log_weight = np.full(max_pages, EMPTY, np.int32), np.zeros(max_pages, np.float32)
        entries[: len(layout.table)] = [place[page] for page in layout.table]
        if self.share.bias:
            log_weight[: len(layout.table)] = np.log([layout.multiplicity[page] for page in layout.table])
        return entries, log_weight


def distances(share: Share, squares: np.ndarray, num_tokens: np.ndarray, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """The distance of each pair of pages, and the same relative to the norms of the pages; `squares` is of `block_distance`.

    "euclid" is ReasonCache's distance: the norm of the difference, of keys and of values, averaged over layers and over both,
    divided by the tokens and KV heads of a page. "cosine" is `1 - cosine`, averaged over layers, keys and values. The distance
    of pages that are equal up to rounding is 0 in either.
    """
    squares = np.asarray(squares, np.float64)
    apart, size = np.sqrt(squares[..., 2]), np.sqrt(squares[..., :2].mean(axis=-1))  # [I, L, 2]
    apart = np.where(apart <= ROUNDING * size, 0.0, apart)
    relative = apart / np.maximum(size, 1e-30)
    if share.metric == "cosine":
        product = (squares[..., 0] + squares[..., 1] - squares[..., 2]) / 2
        apart = 1 - product / np.maximum(np.sqrt(squares[..., 0] * squares[..., 1]), 1e-30)
        apart = np.where(apart <= ROUNDING, 0.0, apart)
    else:
        apart = apart / (num_tokens[:, None, None] * num_kv_heads)
    first = 1 if share.compare_on == "values" else 0
    return apart[..., first:].mean(axis=(1, 2)), relative[..., first:].mean(axis=(1, 2))


def check_tokenizer(model: Model, name: str) -> None:
    """Refuses a model whose text cannot be split into thoughts.

    Raises:
      ValueError: the model has no tokenizer, or no token of it contains a blank line.
    """
    need_tokenizer(model.tokenizer, f"{name} needs the text of tokens to find thoughts")
    if not facts_of(model.tokenizer, model.config.vocab_size).is_break.any():
        raise refused(
            f"{name} splits text into thoughts at blank lines, and no token of this tokenizer contains one. Use a policy that "
            "evicts.",
            model="unsupported",
        )
