"""How fast each policy is in a fixed pool: the same requests of a forced length, from an ample pool to a tight one.

The shape is R-KV's stress test (256 requests of 700 + 1,024 tokens; budget 256, interval 128), all lengths divided by `scale`.
Each engine has as many rows as the pool can keep busy, so that no policy pays for rows that stand idle; the policies take
turns. Time is wall time from the first request handed in to the last token, prefill, host and engine included; compiling is
not, for every engine's programs run once before.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.bench.fixtures import usual_page_size
from jkv.bench.rounds import GREEDY, in_turns, median_and_spread, timer
from jkv.engine.engine import Engine
from jkv.engine.memory import num_row_pages, page_bytes
from jkv.engine.scheduler import CHUNKS
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.model.params import Model
from jkv.policies import make
from jkv.reports import Report, digits, footnote, markdown

REQUESTS, PROMPT, NEW_TOKENS, BUDGET, INTERVAL = 256, 700, 1024, 256, 128  # of the paper's test
PAPER_POOLS = {430_000: (13902, 12177), 282_000: (10503, 12282), 134_000: (7838, 10371), 60_000: (4958, 6566)}
SOURCE = "R-KV (2505.24133), vLLM port, H100, Qwen2.5-Math-7B: pool tokens, tokens/s of full and of R-KV"


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests of one forced length, and the pool that they share."""

    requests: int
    prompt: int  # tokens
    new_tokens: int
    pool_tokens: int

    def rows(self, policy: Policy, num_layers: int) -> int:
        """Rows that the pool keeps busy: by what a request reserves, or, unbounded, holds at half its length."""
        most = float(policy.most_slots(self.prompt, self.new_tokens, num_layers).mean())
        held = most if policy.is_bounded else (self.prompt + most) / 2
        return max(1, min(self.requests, round(self.pool_tokens / held)))


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one run took, and held."""

    seconds: float
    compile_seconds: float
    host_seconds: float
    tokens: int
    concurrency: float  # mean running rows of a decode chunk
    peak_concurrency: int
    occupancy: float
    preemptions: int
    compactions: int
    kv_bytes: float
    peak_kv_bytes: int


def run(model: Model, load: Load, policy: Policy, page_size: int | None = None) -> Ran:
    """All requests of a load through a fresh engine, no end token; the pool is rounded up to whole pages."""
    page_size = page_size or usual_page_size()
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, model.config.vocab_size, (load.requests, load.prompt), dtype=np.int32)
    config = model.config
    peak, before = 0, 0
    with timer() as seconds:
        engine = Engine(
            model,
            max_running=load.rows(policy, config.num_layers),
            max_slots=policy.widest(load.prompt, load.new_tokens, config.num_layers, config.num_kv_heads),
            page_size=page_size,
            num_pages=num_row_pages(model.params, load.pool_tokens, page_size),
            policies=[policy],
            max_stop_ids=1,
        )
        tickets = [engine.submit(prompt, policy, GREEDY, max_new_tokens=load.new_tokens, stop_ids=()) for prompt in prompts]
        while not engine.is_idle:
            engine.step()
            peak, before = max(peak, engine.stats.sample_chunks - before), engine.stats.sample_chunks
    stats, results = engine.stats, [engine.result(ticket) for ticket in tickets]
    assert stats.tokens == load.requests * load.new_tokens, "a forced length was not reached"
    return Ran(
        seconds=seconds.running,
        compile_seconds=seconds.compiling,
        host_seconds=stats.host_seconds,
        tokens=stats.tokens,
        concurrency=stats.sample_chunks / stats.chunks,
        peak_concurrency=peak,
        occupancy=stats.occupancy,
        preemptions=stats.preemptions,
        compactions=sum(result.stats.compactions for result in results),
        kv_bytes=stats.kv_bytes,
        peak_kv_bytes=stats.peak_kv_bytes,
    )


def summary(runs: Sequence[Ran]) -> dict[str, Any]:
    """Figures of the rounds of one contender; all but the times are the same in each."""
    rate, spread = median_and_spread([one.tokens / one.seconds for one in runs])
    one = runs[-1]
    return {
        "tokens_per_second": digits(rate),
        "spread": spread,
        "host_share": digits(sum(run.host_seconds for run in runs) / sum(run.seconds for run in runs)),
        "compile_seconds": digits(sum(run.compile_seconds for run in runs)),
        "concurrency": round(one.concurrency, 2),
        "peak_concurrency": one.peak_concurrency,
        "occupancy": round(one.occupancy, 4),
        "preemptions": one.preemptions,
        "compactions": one.compactions,
        "kv_bytes": round(one.kv_bytes),
        "peak_kv_bytes": one.peak_kv_bytes,
    }


def scaled_policy(name: str, scale: float) -> Policy:
    """A policy at the paper's budget and interval divided by `scale`; the interval stays whole chunks of the engine."""
    interval = max(CHUNKS[0], round(INTERVAL / scale / CHUNKS[0]) * CHUNKS[0])
    if name == "full":
        return make(name, {})
    if name == "rpc":  # of its own paper, by the same scale
        return make(name, {"interval": max(CHUNKS[0], round(1024 / scale)), "window": CHUNKS[0]})
    return make(name, {"budget": round(BUDGET / scale)} | ({} if name in ("h2o", "tova", "quest") else {"interval": interval}))


def measure(
    model: Model,
    policies: Sequence[str],
    scale: float,
    requests: int,
    rounds: int,
    pools: Sequence[int] = tuple(PAPER_POOLS),
    report: Report = print,
) -> dict[str, Any]:
    """Every policy at every one of the paper's `pools`, the full cache beside each.

    Raises:
      ValueError: so few requests that a pool of their size holds not one of them.
    """
    if min(pools) * requests < (PROMPT + NEW_TOKENS) * REQUESTS:
        least = -(-(PROMPT + NEW_TOKENS) * REQUESTS // min(pools))
        raise refused(
            f"The tightest pool must hold a request: {min(pools):,} tokens for {REQUESTS} requests of {PROMPT + NEW_TOKENS} "
            f"are less than one for {requests}. Ask for at least {least} requests.",
            pools="does_not_fit",
        )
    prompt, new_tokens = round(PROMPT / scale), round(NEW_TOKENS / scale)
    chosen = {name: scaled_policy(name, scale) for name in dict.fromkeys(["full", *policies])}
    shrink = requests / REQUESTS / scale
    records: list[dict[str, Any]] = []
    for tokens in pools:
        paper_full, paper_r_kv = PAPER_POOLS[tokens]
        load = Load(requests, prompt, new_tokens, round(tokens * shrink))
        results = in_turns(
            {name: lambda policy=policy, load=load: run(model, load, policy) for name, policy in chosen.items()}, rounds
        )
        base = summary(results["full"])["tokens_per_second"]
        for name, runs in results.items():
            figures = summary(runs)
            records.append(
                {"policy": name, "settings": repr(chosen[name]), "rows": load.rows(chosen[name], model.config.num_layers)}
                | {"pool_tokens": load.pool_tokens, "pool_bytes": pool_bytes(model, load)}
                | {"pool_share": digits(load.pool_tokens / (requests * (prompt + new_tokens)))}
                | figures
                | {"ratio": digits(figures["tokens_per_second"] / base)}
                | {"paper_ratio": digits(paper_r_kv / paper_full) if name == "r_kv" else None}
            )
            report(records[-1])
    return {
        "model": repr(model),
        "scale": scale,
        "requests": requests,
        "prompt": prompt,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "source": SOURCE,
        "records": records,
    }


def pool_bytes(model: Model, load: Load) -> int:
    """Of whole pages in every layer and KV head."""
    page_size = usual_page_size()
    return num_row_pages(model.params, load.pool_tokens, page_size) * page_bytes(model.params, page_size)


def pays_from(records: Sequence[dict[str, Any]], policy: str) -> dict[str, Any]:
    """The pool, as a share of the full caches, from which down a policy is as fast as full in all: between two, by a line.

    `found` says what that is: "crossing", "always" (from the largest pool measured on), or "never" (slower in the smallest).

    >>> two = [{"policy": "x", "pool_share": 1.0, "ratio": 0.9}, {"policy": "x", "pool_share": 0.5, "ratio": 1.1}]
    >>> pays_from(two, "x")
    {'found': 'crossing', 'pool_share': 0.75}
    """
    mine = sorted((one["pool_share"], one["ratio"]) for one in records if one["policy"] == policy)
    if mine[0][1] < 1:
        return {"found": "never", "pool_share": None}
    for (smaller, fast), (larger, slow) in itertools.pairwise(mine):
        if slow < 1:
            return {"found": "crossing", "pool_share": digits(larger - (larger - smaller) * (1 - slow) / (fast - slow))}
    return {"found": "always", "pool_share": mine[-1][0]}


COLUMNS = (
    "pool, tokens",
    "of full",
    "policy",
    "tokens/s",
    "against full",
    "paper",
    "running, mean (peak)",
    "peak MB",
    "preempted",
    "host",
)
PAYS = {
    "crossing": "from {:.0%} of the full caches down",
    "always": "from {:.0%}, the largest, down",
    "never": "not in the tightest pool",
}


def row_of(one: dict[str, Any]) -> tuple[Any, ...]:
    """A line of the table."""
    return (
        f"{one['pool_tokens']:,}",
        f"{one['pool_share']:.0%}",
        one["policy"],
        f"{one['tokens_per_second']:,.0f} ± {one['spread'] / 2:.0%}",
        f"{one['ratio']:.2f}",
        f"{one['paper_ratio']:.2f}" if one["paper_ratio"] else "",
        f"{one['concurrency']:.1f} ({one['peak_concurrency']})",
        f"{one['peak_kv_bytes'] / 1e6:.1f}",
        one["preemptions"],
        f"{one['host_share']:.1%}",
    )


def table(record: dict[str, Any]) -> str:
    """Pools down, policies as rows of each."""
    names = dict.fromkeys(one["policy"] for one in record["records"] if one["policy"] != "full")
    found = {name: pays_from(record["records"], name) for name in names}
    pays = "; ".join(f"`{name}` {PAYS[one['found']].format(one['pool_share'] or 0)}" for name, one in found.items())
    shape = f"{record['requests']} requests of {record['prompt']} + {record['new_tokens']} tokens, {record['model']}"
    caption = (
        f"{shape}: R-KV's stress test, lengths divided by {record['scale']:g}. Ratios are against full in the same pool and "
        f"run; absolute figures are not the paper's. Compression pays: {pays}."
    )
    return f"{caption}\n\n{markdown(COLUMNS, map(row_of, record['records']))}\n\n{footnote(record)}"
