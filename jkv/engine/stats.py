"""Statistics of an engine: bytes, counted on the pool itself, occupancy and latencies."""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jkv import notebook
from jkv.cache.page_selection import pages_read
from jkv.cache.pool import num_pages_of
from jkv.checks import counted, size
from jkv.engine.clocks import COMPILING, Counts, IdleClock, Latency, clock
from jkv.engine.parts.drafting import why_no_guesses
from jkv.engine.samples import Sample
from jkv.engine.scheduler import Actions
from jkv.model.params import ModelConfig
from jkv.reasoning.sentences import SentenceLog
from jkv.reasoning.sharing import SharingStats
from pallas_kernels.dispatch import taken

TIMED = 64  # of this many compactions, one is timed
# How the statistics of several engines become one (`merged_stats`); all other numbers are summed.
SIDE_BY_SIDE = ("seconds", "decode_seconds", "prefill_seconds", "swap_seconds", "compile_seconds")  # the longest counts
MEANS = {"amsr": "steps", "kv_bytes_per_sample": "sample_chunks"}  # and what weighs them
ALIKE = ("platform", "page_size")


@dataclasses.dataclass(frozen=True)
class SampleStats:
    """Statistics of one sample. Seconds count from its submission, without compilation.

    Attributes:
      num_tokens: tokens of its completion.
      peak_kv_bytes: the most bytes of pages that its row held; pages shared with other rows count in full.
      queued_seconds: until it had a row.
      first_seconds: until its first tokens were drawn.
      first_at: the reading of `time.perf_counter` at that moment, in the process that drew them; 0 without tokens.
      seconds: until it was finished.
      compactions: how often its row was compacted, in a conversation since its first turn.
      evicted: tokens dropped, averaged over layers and KV heads, likewise.
      shared: tokens whose page was replaced by an earlier one.
      saved: the share of its pages that had been freed by its end.
      preemptions: how often it was swapped out to make room for others.
      is_forked: whether it started from a prompt that was prefilled for several samples.
      cached_tokens: tokens of its prompt that were not prefilled, because the prefix cache or a kept row held them.
      error: what failed of its own, if anything: its callback, its policy, its text.
    """

    num_tokens: int
    peak_kv_bytes: int
    queued_seconds: float
    first_seconds: float
    first_at: float
    seconds: float
    compactions: int
    evicted: float
    shared: int
    saved: float
    preemptions: int
    is_forked: bool
    cached_tokens: int
    error: BaseException | None

    @classmethod
    def of(cls, sample: Sample) -> "SampleStats":
        """The statistics of a finished sample."""
        return cls(**{field.name: getattr(sample.completion, field.name) for field in dataclasses.fields(cls)})

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of its completion, from when it had a row."""
        return self.num_tokens / max(self.seconds - self.queued_seconds, 1e-9)


@dataclasses.dataclass
class RunStats:
    """Statistics of an engine: bytes counted on the pool itself, and seconds without compile time."""

    kv_bytes: float = 0.0  # mean over decode chunks
    kv_bytes_per_sample: float = 0.0  # the same, divided by the running samples
    peak_kv_bytes: int = 0
    peak_sentence_bytes: int = 0  # of embeddings in host memory, for policies that compare sentences
    dense_kv_bytes: int = 0  # peak bytes of full caches of the same rows
    seconds: float = 0.0  # all of `Engine.step`, with or without rows
    decode_seconds: float = 0.0  # waiting for decode chunks, and for the compactions before them
    prefill_seconds: float = 0.0
    swap_seconds: float = 0.0  # to and from host memory
    compile_seconds: float = 0.0
    chunks: int = 0
    sample_chunks: int = 0  # summed over the chunks' running samples
    row_steps: int = 0  # rows times decode steps
    tokens: int = 0  # row steps that drew a token
    speculated_steps: int = 0  # row steps of chunks that check guesses; each draws a token, and one more for each that is right
    speculated_tokens: int = 0  # tokens of these steps
    drafted: int = 0  # guesses that were checked
    idle_row_steps: int = 0  # of rows that had their tokens of a chunk while others went on
    not_drafted: dict[str, int] = dataclasses.field(default_factory=dict)  # row steps of rows without guesses, by the reason
    prefills: int = 0
    forks: int = 0  # samples that started from a prompt prefilled for several
    prefix_queries: int = 0  # prompt tokens that were looked for in the prefix cache
    prefix_hits: int = 0  # tokens of such prompts that it held, so that they were not prefilled
    preemptions: int = 0
    started: int = 0  # samples that got a row
    amsr: float = 0.0  # mean over decode steps of the share of pages that rows do not hold or do not read
    steps: int = 0  # decode steps
    platform: str = "cpu"  # of the device: cpu, tpu, cuda
    page_size: int = 0  # slots of a page
    held_pages: int = 0  # now, or when the last row ended
    held_dense_bytes: int = 0  # of full caches of the same rows
    sharing: SharingStats = dataclasses.field(default_factory=SharingStats)
    queued_seconds: float = 0.0  # until samples had a row, summed
    first_token: Latency = dataclasses.field(default_factory=Latency)  # seconds from a sample's submission
    between_tokens: Latency = dataclasses.field(default_factory=Latency)  # seconds from one token of a sample to the next
    idle: IdleClock = dataclasses.field(default_factory=IdleClock)  # of the device, because the host was busy
    turns: int = 0  # that continued a kept row
    compactions: int = 0  # dispatched
    compaction: Latency = dataclasses.field(default_factory=Latency)  # seconds of one in `TIMED`, where a server asks for them
    step_tokens: Counts = dataclasses.field(default_factory=Counts)  # prompt and drawn tokens of each step that decoded
    prefilled: int = 0  # prompt tokens since the last chunk was read

    @property
    def kernels(self) -> dict[str, str]:
        """The implementations of each kernel that programs of this process used on this platform."""
        return taken(self.platform)

    @property
    def accepted(self) -> int:
        """Guesses that proved right."""
        return self.speculated_tokens - self.speculated_steps

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row gets in a step; 1 without guesses."""
        return self.speculated_tokens / self.speculated_steps if self.speculated_steps else 1.0

    @property
    def occupancy(self) -> float:
        """The share of row steps that drew a token."""
        return self.tokens / max(self.row_steps, 1)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, compilation excluded."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def host_seconds(self) -> float:
        """Seconds of the loop itself, without waiting for device programs and without compilation."""
        return self.seconds - self.decode_seconds - self.prefill_seconds - self.swap_seconds


@dataclasses.dataclass(frozen=True, repr=False)
class Stats:
    """Statistics of a call: bytes counted on the pool itself, and seconds without compile time."""

    prompt_tokens: int
    generated_tokens: int
    evicted: float  # tokens dropped from the cache, averaged over layers and KV heads, summed over samples
    shared: int  # tokens whose page was replaced by an earlier one, summed over samples
    amsr: float  # average memory saving ratio: mean over decode steps of the share of the rows' pages that are saved
    final_amsr: float  # the same when each sample ended, mean over samples that generated
    affected_ratio: float  # tokens evicted or shared, by all tokens, prompts included
    sharing: SharingStats | None  # statistics of page sharing; None if no policy shares
    compactions: int  # summed over samples
    kv_bytes: int  # held, mean over decode chunks
    kv_bytes_per_sample: float  # the same, divided by the running samples
    peak_kv_bytes: int
    peak_sentence_bytes: int  # of embeddings in host memory, for policies that compare sentences
    dense_kv_bytes: int  # peak bytes of full caches of the same rows
    tokens_per_second: float  # generated tokens, by all seconds without compilation
    decode_tokens_per_second: float  # the same, by decode seconds only
    seconds: float
    decode_seconds: float  # compaction included
    prefill_seconds: float
    swap_seconds: float
    host_seconds: float  # of the loop itself
    compile_seconds: float
    occupancy: float  # share of row steps that drew a token
    tokens_per_step: float  # of a row; more than 1 where guesses proved right (`speculate`)
    drafted: int  # guesses that were checked
    accepted: int  # guesses that proved right
    not_drafted: dict[str, int]  # steps of rows that get no guesses while others do, by the reason
    prefills: int
    forks: int  # samples that started from a prompt prefilled for several
    cached_tokens: (
        int  # prompt tokens that the prefix cache or a kept row held, and that were not prefilled, summed over samples
    )
    turns: int  # samples that continued a kept row
    preemptions: int
    queued_seconds: float  # mean over samples, until they had a row
    first_token_p50: float  # seconds from submission to the first token: the median of samples
    first_token_p99: float
    token_p50: float  # seconds between two tokens of a sample; the tokens of a chunk reach the host together
    token_p99: float
    kernels: dict[str, str]  # implementations used so far: "tpu", "gpu", "cpu", or plain XLA's "reference"
    page_size: int  # slots of a page
    seed: int | None  # of the random draws: given, or fresh; None where all samples are greedy

    @property
    def summary(self) -> str:
        """The statistics that matter most, in one line."""
        held, whole = size(self.peak_kv_bytes), size(self.dense_kv_bytes)
        saved = self.kv_bytes_saved / max(self.dense_kv_bytes, 1)
        parts = [
            f"peak KV {held} of a full cache's {whole} ({saved:.0%} saved)"
            if saved > 0
            else f"peak KV {held} in whole pages, of which a full cache's tokens fill {whole}",
            f"{self.evicted:,.0f} tokens evicted in {counted(self.compactions, 'compaction')}",
            f"{self.shared:,} tokens shared" if self.sharing is not None else "",
            f"{self.tokens_per_second:,.0f} tokens/s",
            f"{self.tokens_per_step:.2f} tokens a step" if self.drafted else "",
            f"compiled in {self.compile_seconds:.1f} s",
            f"seed {self.seed}" if self.seed is not None else "",
        ]
        return "; ".join(part for part in parts if part)

    def __repr__(self) -> str:
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        lines = [
            f"  {name}: {size(x) if 'bytes' in name else f'{x:,.4g}' if isinstance(x, float) else x}" for name, x in fields
        ]
        return "\n".join(["Stats", *lines])

    def _repr_html_(self) -> str:
        lines = [line.strip().partition(": ") for line in repr(self).splitlines()[1:]]
        return notebook.table(self.summary, ("figure", "value"), [(name, value) for name, _, value in lines])

    @property
    def kv_bytes_saved(self) -> int:
        """Bytes that full caches of the same rows would have held at their peak, minus those held; below 0 for a full cache,
        whose last pages are partly empty.
        """
        return self.dense_kv_bytes - self.peak_kv_bytes

    @classmethod
    def of(cls, samples: Sequence[Sample], run: RunStats) -> "Stats":
        """The statistics of a call, from its finished samples and the engine that ran them."""
        per_sample = [SampleStats.of(sample) for sample in samples]
        prompt_tokens, num_tokens = sum(len(sample.request.prompt) for sample in samples), sum(s.num_tokens for s in per_sample)
        evicted, shared = sum((s.evicted for s in per_sample), 0.0), sum(s.shared for s in per_sample)
        return cls(
            prompt_tokens=prompt_tokens,
            generated_tokens=num_tokens,
            evicted=evicted,
            shared=shared,
            amsr=run.amsr,
            final_amsr=sum((s.saved for s in per_sample), 0.0) / max(sum(sample.generated > 0 for sample in samples), 1),
            affected_ratio=(evicted + shared) / max(1, prompt_tokens + num_tokens),
            sharing=copy.deepcopy(run.sharing) if any(sample.request.policy.share for sample in samples) else None,
            compactions=sum(s.compactions for s in per_sample),
            kv_bytes=round(run.kv_bytes),
            kv_bytes_per_sample=run.kv_bytes_per_sample,
            peak_kv_bytes=run.peak_kv_bytes,
            peak_sentence_bytes=run.peak_sentence_bytes,
            dense_kv_bytes=run.dense_kv_bytes,
            tokens_per_second=run.tokens_per_second,
            decode_tokens_per_second=run.tokens / max(run.decode_seconds, 1e-9),
            seconds=run.seconds,
            decode_seconds=run.decode_seconds,
            prefill_seconds=run.prefill_seconds,
            swap_seconds=run.swap_seconds,
            host_seconds=run.host_seconds,
            compile_seconds=run.compile_seconds,
            occupancy=run.occupancy,
            tokens_per_step=run.tokens_per_step,
            drafted=run.drafted,
            accepted=run.accepted,
            not_drafted=dict(run.not_drafted),
            prefills=run.prefills,
            forks=run.forks,
            cached_tokens=sum(sample.completion.cached_tokens for sample in samples),
            turns=sum(sample.request.num_kept > 0 for sample in samples),
            preemptions=run.preemptions,
            queued_seconds=sum((s.queued_seconds for s in per_sample), 0.0) / max(len(per_sample), 1),
            first_token_p50=run.first_token.quantile(0.5),
            first_token_p99=run.first_token.quantile(0.99),
            token_p50=run.between_tokens.quantile(0.5),
            token_p99=run.between_tokens.quantile(0.99),
            kernels=run.kernels,
            page_size=run.page_size,
            seed=next((sample.request.seed for sample in samples if sample.request.sampling.temperature), None),
        )


def merged_stats(runs: Sequence[RunStats]) -> RunStats:
    """The statistics of engines that run side by side: bytes and counts are summed, of seconds the most is taken."""
    if not runs:
        return RunStats()
    out = copy.deepcopy(runs[0])
    for name in (field.name for field in dataclasses.fields(RunStats) if field.name not in ALIKE):
        values = [getattr(run, name) for run in runs]
        if name in SIDE_BY_SIDE:
            setattr(out, name, max(values))
        elif name in MEANS:
            weights = [getattr(run, MEANS[name]) for run in runs]
            setattr(out, name, float(np.dot(values, weights)) / max(sum(weights), 1))
        elif isinstance(values[0], int | float):
            setattr(out, name, sum(values))
        elif isinstance(values[0], Latency):
            getattr(out, name).counts = np.sum([latency.counts for latency in values], axis=0)
    out.idle.seconds, out.idle.between = (max(getattr(run.idle, name) for run in runs) for name in ("seconds", "between"))
    for run in runs[1:]:
        add_counts(out.sharing, run.sharing)
        for reason, count in run.not_drafted.items():
            out.not_drafted[reason] = out.not_drafted.get(reason, 0) + count
    return out


def add_counts(total: Any, other: Any) -> None:
    """Adds the numbers of a record to another record of its kind, also in records inside; thresholds stay the first's."""
    for field in dataclasses.fields(total):
        mine, theirs = getattr(total, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(mine):
            add_counts(mine, theirs)
        elif isinstance(mine, int | float):
            setattr(total, field.name, mine + theirs)


class Meter:
    """Measures an engine into `stats`.

    Args:
      config: the model's.
      running: the scheduler's record of samples by row.
      itemsize: bytes of one element of a key or value.
      page_size: slots of a page.
      page_bytes: bytes of a page.
      row_bytes: bytes of the arrays that all rows have outside pages.
      state_bytes: bytes of one row's recurrent states, which a full cache has too.
      max_running: rows.
      platform: the device's.
    """

    def __init__(
        self,
        config: ModelConfig,
        running: Mapping[int, Sample],
        *,
        itemsize: int,
        page_size: int,
        page_bytes: int,
        row_bytes: int,
        state_bytes: int,
        max_running: int,
        platform: str,
    ) -> None:
        self.config, self.running, self.itemsize = config, running, itemsize
        self.page_size, self.page_bytes, self.row_bytes = page_size, page_bytes, row_bytes
        self.state_bytes = state_bytes
        self.max_running, self.platform = max_running, platform
        self.times_compactions = False  # whether anybody asks how long they take
        self.reset()

    def reset(self) -> None:
        """Starts from zero."""
        self.stats = RunStats(platform=self.platform, page_size=self.page_size)

    def clock(self, field: str) -> contextlib.AbstractContextManager[None]:
        """Adds the seconds of a block to a field, compilation excluded."""
        return clock(self.stats, field)

    def scheduled(self, actions: Actions) -> None:
        """Counts a step's preemptions, and samples that got their first row."""
        self.stats.preemptions += len(actions.swap_out)
        for sample in actions.admit.values():
            if not sample.completion.queued_seconds:
                sample.completion.queued_seconds = sample.seconds
                self.stats.started += 1
                self.stats.queued_seconds += sample.completion.queued_seconds

    def found(self, sample: Sample, count: int) -> None:
        """Counts the tokens of a prompt that the prefix cache held."""
        sample.row.cached_tokens = count
        self.stats.prefix_queries += len(sample.request.prompt)
        self.stats.prefix_hits += count

    @contextlib.contextmanager
    def compaction(self, state: Callable[[], Any]) -> Iterator[None]:
        """Counts a compaction, which a block dispatches; with `times_compactions`, times one in `TIMED` from an idle device on.

        The host does not wait for the others, so how long they take is not known. `state` returns arrays of the device state.
        """
        stats = self.stats
        stats.compactions += 1
        if not self.times_compactions or stats.compactions % TIMED != 1:
            yield
            return
        jax.block_until_ready(state())
        began, compiled = time.perf_counter(), COMPILING.seconds
        yield
        jax.block_until_ready(state())
        stats.compaction.add(time.perf_counter() - began - (COMPILING.seconds - compiled))

    def chunk(self, held: int, num_steps: int, num_tokens: int) -> None:
        """Counts a decode chunk that has run `num_steps`, after which the pool holds `held` pages."""
        stats, rows = self.stats, len(self.running)
        counts = [self._held_and_seen(sample) for sample in self.running.values()]
        saved = 1 - sum(held for held, _ in counts) / max(sum(seen for _, seen in counts), 1)
        stats.row_steps += num_steps * self.max_running
        stats.tokens += num_tokens
        stats.steps += num_steps
        stats.amsr += (saved - stats.amsr) * num_steps / max(stats.steps, 1)
        kv_bytes = held * self.page_bytes + self.row_bytes
        stats.kv_bytes += (kv_bytes - stats.kv_bytes) / (stats.chunks + 1)
        held_by_rows = held * self.page_bytes + self.row_bytes * rows / self.max_running
        stats.kv_bytes_per_sample += (held_by_rows - rows * stats.kv_bytes_per_sample) / (stats.sample_chunks + rows)
        stats.chunks += 1
        stats.sample_chunks += rows
        stats.step_tokens.add(num_tokens + stats.prefilled)
        stats.prefilled = 0
        self.peak(held)

    def speculated(self, rows: Mapping[int, Sample], outputs: Any) -> None:
        """Counts the guesses of a chunk (`ChunkOutputs` on the host) of these rows."""
        stats, steps, num_tokens = self.stats, int(outputs.row_steps.sum()), int(outputs.is_real.sum())
        for i, sample in rows.items():
            if reason := why_no_guesses(sample.request):
                stats.not_drafted[reason] = stats.not_drafted.get(reason, 0) + int(outputs.row_steps[i])
        stats.speculated_steps += steps
        stats.speculated_tokens += num_tokens
        stats.drafted += int(outputs.drafted.sum())
        stats.idle_row_steps += int(outputs.num_loops) * int((outputs.row_steps > 0).sum()) - steps

    def tokens(self, sample: Sample, count: int) -> None:
        """Notes when a sample's `count` new tokens reached the host. Within a chunk, each has an equal part of the time."""
        completion, now = sample.completion, sample.seconds
        if not completion.first_seconds:
            completion.first_seconds, completion.first_at = now, time.perf_counter()
            self.stats.first_token.add(now)
        elif count:
            self.stats.between_tokens.add((now - completion.last_seconds) / count, count)
        completion.last_seconds = now

    def peak(self, held: int) -> None:
        """Records the pages in use now, and the bytes that full caches of the same rows would hold, if they are peaks."""
        config, stats = self.config, self.stats
        stats.peak_kv_bytes = max(stats.peak_kv_bytes, held * self.page_bytes + self.row_bytes)
        seen = [sample.num_seen for sample in self.running.values()]
        numbers = config.num_paged_layers * sum(seen) * config.num_kv_heads * config.head_size
        own = config.in_windows
        in_windows = config.num_ring_layers * sum(min(n, config.window) for n in seen)
        dense = 2 * (numbers + in_windows * own.num_kv_heads * own.head_size) * self.itemsize + len(seen) * self.state_bytes
        stats.dense_kv_bytes = max(stats.dense_kv_bytes, dense)
        stats.held_pages, stats.held_dense_bytes = held, dense

    def row(self, sample: Sample) -> None:
        """Counts the pages of one row."""
        num_pages = sample.num_pages(0, self.config.num_kv_heads, self.page_size)
        sample.completion.peak_kv_bytes = max(sample.completion.peak_kv_bytes, num_pages * self.page_bytes)

    def sentences(self, logs: Collection[SentenceLog]) -> None:
        """Counts the embeddings in host memory."""
        held = sum(log.nbytes for log in logs)
        self.stats.peak_sentence_bytes = max(self.stats.peak_sentence_bytes, held)

    def saved(self, sample: Sample) -> float:
        """The share of a sample's pages that it does not hold or does not read."""
        held, seen = self._held_and_seen(sample)
        return 1 - held / max(seen, 1)

    def _held_and_seen(self, sample: Sample) -> tuple[float, int]:
        """Pages that a row holds (or reads, if its policy selects pages), and pages that all of its tokens would fill.

        Heads that compete for a layer's slots may each hold a page more than is counted here.
        """
        policy, config = sample.request.policy, self.config
        whole = num_pages_of(sample.num_seen, self.page_size)
        slots = sample.row.filled if sample.row.heads is None else sample.row.heads
        held = float(num_pages_of(slots, self.page_size).sum() * (config.num_kv_heads if slots.ndim == 1 else 1))
        if policy.read is not None:
            dense = policy.read.num_dense(config.num_paged_layers) / config.num_paged_layers
            read = min(whole, pages_read(policy.read.budget, self.page_size))
            held *= dense + (1 - dense) * read / whole
        return held, config.num_paged_layers * config.num_kv_heads * whole
