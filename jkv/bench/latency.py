"""How long a user waits: for the first token, and from one token to the next, by rows and policy.

All requests of a batch are handed in at once, as many as there are rows, each of a forced length. Times are the engine's own
(`Stats.first_token_p50` and so on), compiling excluded: the programs run once before. A chunk's tokens reach the host together.
"""

import functools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.bench.fixtures import usual_page_size
from jkv.bench.rounds import GREEDY, in_turns
from jkv.engine.engine import Engine
from jkv.engine.results import complete
from jkv.engine.stats import RunStats
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.model.params import Model
from jkv.reports import Report, digits, footnote, markdown

FIGURES = ("first_token_p50", "first_token_p99", "token_p50", "token_p99")


def measure(
    model: Model,
    policies: Sequence[Policy],
    *,
    batches: Sequence[int],
    chunks: Sequence[int],
    prompt: int,
    new_tokens: int,
    rounds: int,
    report: Report = print,
) -> dict[str, Any]:
    """Milliseconds at every batch, chunk and policy: the median of `rounds` runs.

    Raises:
      ValueError: requests longer than the model's positions.
    """
    if prompt + new_tokens > model.config.max_positions:
        rule = f"{prompt} + {new_tokens} tokens must fit the model's {model.config.max_positions} positions. Lower them."
        raise refused(rule, new_tokens="does_not_fit")
    records = []
    for batch in batches:
        for chunk in chunks:
            runs = {
                policy.name: functools.partial(
                    serve, engine_of(model, policy, batch, chunk, prompt + new_tokens), policy, batch, prompt, new_tokens
                )
                for policy in policies
            }
            for name, turns in in_turns(runs, rounds).items():
                medians = {figure: statistics.median(turn[i] for turn in turns) for i, figure in enumerate(FIGURES)}
                figures = {f"{figure}_ms": digits(1e3 * seconds) for figure, seconds in medians.items()}
                records.append({"policy": name, "batch": batch, "chunk": chunk} | figures)
                report(records[-1])
    return {
        "model": repr(model),
        "prompt": prompt,
        "new_tokens": new_tokens,
        "page_size": usual_page_size(),
        "rounds": rounds,
        "records": records,
    }


def engine_of(model: Model, policy: Policy, batch: int, chunk: int, length: int) -> Engine:
    """An engine for whole rows."""
    return Engine(model, max_running=batch, max_slots=length, policies=[policy], chunk=chunk, max_stop_ids=1)


def serve(engine: Engine, policy: Policy, batch: int, prompt: int, new_tokens: int) -> tuple[float, ...]:
    """Seconds of one batch of requests: `FIGURES`."""
    engine.reset_stats()
    draws = np.random.default_rng(0).integers(1, engine.model.config.vocab_size, (batch, prompt), dtype=np.int32)
    tickets = [engine.submit(tokens, policy, GREEDY, max_new_tokens=new_tokens, stop_ids=()) for tokens in draws]
    engine.run()
    for ticket in tickets:
        complete(engine.result(ticket))
    stats: RunStats = engine.stats
    first, between = stats.first_token, stats.between_tokens
    return first.quantile(0.5), first.quantile(0.99), between.quantile(0.5), between.quantile(0.99)


def table(record: dict[str, Any]) -> str:
    """One line for each batch, chunk and policy."""
    head = ("policy", "rows", "chunk", "first token p50, ms", "p99", "between tokens p50, ms", "p99")
    rows = [
        (one["policy"], one["batch"], one["chunk"], *(f"{one[f'{figure}_ms']:,.3g}" for figure in FIGURES))
        for one in record["records"]
    ]
    about = (
        f"{record['model']}: {record['prompt']} + {record['new_tokens']} tokens, all requests at once. Median of "
        f"{record['rounds']} rounds; policies take turns."
    )
    return f"{about}\n\n{markdown(head, rows)}\n\n{footnote(record)}"
