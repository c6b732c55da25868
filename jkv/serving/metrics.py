"""Prometheus metrics of a server: by vLLM's names where they mean the same, and jkv's own."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from jkv.engine.clocks import LEAST, PER_DECADE, Latency
from jkv.engine.engine import Engine
from jkv.engine.results import Result
from jkv.engine.row import Place
from jkv.engine.stats import TIMED, SampleStats
from jkv.serving.responses import reason_of

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
LONG = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LABELS = ("model_name", "engine")


class Metrics:
    """Counts what a server does; `page` is what Prometheus reads.

    Args:
      engine: whose gauges are read with each page.
      name: of the model, a label of every metric.
      num_unbegun: how many samples were submitted and wait for the engine to take them.
    """

    def __init__(self, engine: Engine, name: str, num_unbegun: Callable[[], int] = lambda: 0) -> None:
        engine.runner.meter.times_compactions = True
        self.registry, self.labels = CollectorRegistry(), (name, "0")
        self.registry.register(EngineCollector(engine, self.labels, num_unbegun))
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self.success = self._counter("vllm:request_success", "Finished samples.", "finished_reason")
        self.refused = self._counter("jkv:requests_refused", "Requests that were not served.", "status")
        self.evicted = self._counter("jkv:evicted_tokens", "Tokens dropped, averaged over layers and KV heads.", "policy")
        self.compactions = self._counter("jkv:compactions", "Compactions of rows.", "policy")
        self.forgotten = self._counter(
            "jkv:responses_forgotten", "Stored responses that nothing can continue any more.", "reason"
        )
        about = " of finished samples, compilation excluded."
        whole = " of finished samples, from the arrival of the request on, compilation included."
        self.histograms = {
            "first": self._histogram("vllm:time_to_first_token_seconds", "Until the first token" + whole, SECONDS),
            "queue": self._histogram("vllm:request_queue_time_seconds", "Until there was a row" + about, LONG),
            "prefill": self._histogram("vllm:request_prefill_time_seconds", "From a row to the first token" + about, LONG),
            "decode": self._histogram("vllm:request_decode_time_seconds", "From the first token to the end" + about, LONG),
            "inference": self._histogram("vllm:request_inference_time_seconds", "From a row to the end" + about, LONG),
            "end": self._histogram("vllm:e2e_request_latency_seconds", "Until the end" + whole, LONG),
            "prompt": self._histogram("vllm:request_prompt_tokens", "Prompt tokens of finished requests.", TOKENS),
            "generation": self._histogram("vllm:request_generation_tokens", "Tokens of finished samples.", TOKENS),
            "n": self._histogram("vllm:request_params_n", "Samples asked for.", COUNTS),
            "max_tokens": self._histogram("vllm:request_params_max_tokens", "Limits of new tokens, where given.", TOKENS),
        }

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Any:
        return Histogram(name, about, LABELS, registry=self.registry, buckets=buckets).labels(*self.labels)

    def count_refusal(self, status: int) -> None:
        """Counts a request that was not served."""
        self.refused.labels(*self.labels, str(status)).inc()

    def count_forgotten(self, reason: str) -> None:
        """Counts a stored response that is forgotten."""
        self.forgotten.labels(*self.labels, reason).inc()

    def count_result(self, result: Result, n: int, limit: int | None, arrival: float) -> None:
        """Counts a finished request of one prompt; its first byte came when `time.perf_counter` read `arrival`."""
        of, num_prompt = self.histograms, len(result.prompts[0])
        self.prompt_tokens.labels(*self.labels).inc(num_prompt)
        of["prompt"].observe(num_prompt)
        of["n"].observe(n)
        if limit:
            of["max_tokens"].observe(limit)
        for sample, reason, policy in zip(result.samples, result.finish_reason, result.policies, strict=True):
            self.success.labels(*self.labels, reason_of(reason) or "").inc()
            self.evicted.labels(*self.labels, policy.name).inc(sample.evicted)
            self.compactions.labels(*self.labels, policy.name).inc(sample.compactions)
            of["generation"].observe(sample.num_tokens)
            before = until_first(sample, arrival) - sample.first_seconds  # it was submitted, and what compiled meanwhile
            of["end"].observe(before + sample.seconds)
            if sample.num_tokens:
                of["queue"].observe(sample.queued_seconds)
                of["first"].observe(until_first(sample, arrival))
                of["prefill"].observe(sample.first_seconds - sample.queued_seconds)
                of["decode"].observe(sample.seconds - sample.first_seconds)
                of["inference"].observe(sample.seconds - sample.queued_seconds)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


@dataclasses.dataclass(frozen=True)
class EngineCollector(Collector):
    """What the engine itself knows, read when it is asked for. Only numbers are read, so the engine may run meanwhile."""

    engine: Engine
    labels: tuple[str, str]
    num_unbegun: Callable[[], int] = lambda: 0

    def collect(self) -> Iterable[Any]:
        """The families."""
        engine, stats = self.engine, self.engine.stats
        scheduler = engine.scheduler
        running = len(scheduler.running)
        waiting = len(scheduler.waiting) + len(scheduler.held) + self.num_unbegun()
        rows = engine.scheduler.kept_rows
        held = stats.held_pages if running else rows.num_pages  # which count an idle engine's kept rows at their most
        for name, about, value in (
            ("vllm:num_requests_running", "Samples in rows.", running),
            ("vllm:num_requests_waiting", "Samples that wait for a row, or for the engine to take them.", waiting),
            ("vllm:kv_cache_usage_perc", "Share of the pool's pages in use; 1 is all.", held / engine.num_pages),
            ("jkv:kv_bytes", "Bytes of the pages in use.", held * engine.page_bytes),
            (
                "jkv:kv_bytes_if_full",
                "Bytes that full caches of the running rows would fill.",
                running and stats.held_dense_bytes,
            ),
            ("jkv:kept_pages", "Pages that kept rows in the pool hold at most.", rows.num_pages),
            ("jkv:kept_host_bytes", "Bytes of the kept rows in host memory.", rows.host_bytes),
            ("jkv:form_bytes", "Bytes of the tables of forms on each device.", engine.runner.forms.num_bytes),
        ):
            gauge = GaugeMetricFamily(name, about, labels=LABELS)
            gauge.add_metric(self.labels, value)
            yield gauge
        yield self.labelled(
            GaugeMetricFamily,
            "jkv:kept_rows",
            "Rows that are kept for a next turn, or wait to begin it.",
            "place",
            {"device": len(rows.at(Place.POOL)), "host": len(rows.at(Place.HOST))},
        )
        yield self.labelled(
            CounterMetricFamily, "jkv:kept_rows_dropped", "Kept rows that no turn continued.", "reason", dict(rows.dropped)
        )
        for name, about, value in (
            ("vllm:generation_tokens", "Tokens drawn.", stats.tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens that the prefix cache held.", stats.prefix_hits),
            ("vllm:num_preemptions", "Samples swapped out to make room.", stats.preemptions),
            ("jkv:prefills", "Prompts prefilled.", stats.prefills),
            ("jkv:turns", "Samples that continued a kept row.", stats.turns),
            ("jkv:forks", "Samples that started from a prompt prefilled for several.", stats.forks),
            ("jkv:row_steps", "Rows times decode steps; vllm:generation_tokens is how many drew a token.", stats.row_steps),
            ("jkv:speculated_row_steps", "Row steps that checked guesses of the next tokens.", stats.speculated_steps),
            ("vllm:spec_decode_num_draft_tokens", "Guesses of the next tokens that were checked.", stats.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Guesses of the next tokens that proved right.", stats.accepted),
            ("jkv:engine_seconds", "Of the engine's steps, compilation excluded.", stats.seconds),
            ("jkv:host_seconds", "Of these, what did not wait for the device.", stats.host_seconds),
            (
                "jkv:between_steps_seconds",
                "Between engine steps while requests are unfinished.",
                stats.idle.between,
            ),
            ("jkv:idle_seconds", "Of engine steps, with no device program in flight, at most.", stats.idle.seconds),
        ):
            counter = CounterMetricFamily(name, about, labels=LABELS)
            counter.add_metric(self.labels, value)
            yield counter
        sums = [(str(float(bound)), float(stats.step_tokens.up_to(bound))) for bound in STEP_TOKENS]
        by_step = [*sums, ("+Inf", float(stats.step_tokens.counts.sum()))], float(stats.step_tokens.total)
        for name, about, counts in (
            ("vllm:inter_token_latency_seconds", "Between two tokens of a sample.", cumulative(stats.between_tokens, SECONDS)),
            (
                "jkv:compaction_seconds",
                f"Of one in {TIMED} compactions of a row, from an idle device until it is done, compilation excluded.",
                cumulative(stats.compaction, SECONDS),
            ),
            (
                "vllm:iteration_tokens_total",
                "Prompt and drawn tokens of an engine step (up to 16 decode steps).",
                by_step,
            ),
        ):
            histogram = HistogramMetricFamily(name, about, labels=LABELS)
            histogram.add_metric(self.labels, *counts)
            yield histogram

    def labelled(self, kind: Any, name: str, about: str, label: str, values: Mapping[str, float]) -> Any:
        """A family with one more label."""
        family = kind(name, about, labels=(*LABELS, label))
        for value, number in values.items():
            family.add_metric((*self.labels, value), number)
        return family


def until_first(sample: SampleStats, arrival: float) -> float:
    """Seconds from a request's arrival until a sample's first token, as its client sees it; 0 without one."""
    return sample.first_at - arrival if sample.num_tokens else 0.0


def cumulative(latency: Latency, buckets: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """A latency as Prometheus has histograms: the count up to each bound (to 5 %), and the sum of seconds.

    >>> latency = Latency()
    >>> latency.add(0.01, 3)
    >>> cumulative(latency, (0.005, 0.02))[0]
    [('0.005', 0.0), ('0.02', 3.0), ('+Inf', 3.0)]
    """
    counts = latency.counts.copy()
    middles = LEAST * 10 ** ((np.arange(len(counts)) + 0.5) / PER_DECADE)
    up_to = [(str(bound), float(counts[middles <= bound].sum())) for bound in buckets]
    return [*up_to, ("+Inf", float(counts.sum()))], float(counts @ middles)
