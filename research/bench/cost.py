"""Where a decode step's time goes, and how that grows with length, batch and budget.

The whole is an engine's: wall time of decoding by its steps, compactions and host included. Its parts are timed alone, at the
same shapes and the same mean number of slots (`research.bench.step_breakdown`): attention over the pages of all layers; the
weights (the decoder with nothing to attend to, embedding to logits); the pool's page tables (reserve, append, advance); the
draw of a token; and, spread over the steps of an interval, the score and the compaction without it. Host time is the engine's
own account. Parts that run alone are not fused with each other, so their sum may lie on either side of the whole: `rest` is
what is left over, and bounds the error of the parts.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.bench.fixtures import usual_page_size
from jkv.bench.rounds import GREEDY, in_turns
from jkv.engine.engine import Engine
from jkv.engine.results import complete
from jkv.eviction import Policy
from jkv.model.params import Model
from jkv.policies import full, r_kv
from jkv.reports import Report, digits, footnote, markdown
from research.bench.step_breakdown import STEPS, seconds_of_parts

PARTS = ("attention", "weights", "pool", "sampling", "scoring", "compaction", "host", "rest")
INTERVAL = 64  # steps between two compactions, and those that are timed of a full cache


class Point(NamedTuple):
    """One shape of decoding."""

    varied: str  # length, batch or budget
    policy: Policy
    batch: int
    slots: int  # of a row, on average while it decodes


def points(lengths: Sequence[int], batches: Sequence[int], budgets: Sequence[int], length: int, batch: int) -> list[Point]:
    """One thing varied at a time: full caches by length and batch, R-KV by budget and, at the largest, by batch."""
    evicting = [(r_kv(budget, INTERVAL), budget + INTERVAL // 2) for budget in budgets]
    return [
        *(Point("length", full(), batch, slots) for slots in lengths),
        *(Point("batch", full(), rows, length) for rows in batches if rows != batch),
        *(Point("budget", policy, batch, slots) for policy, slots in evicting),
        *(Point("batch", evicting[-1][0], rows, evicting[-1][1]) for rows in batches if rows != batch),
    ]


def measure(model: Model, chosen: Sequence[Point], rounds: int, report: Report = print) -> dict[str, Any]:
    """Microseconds of a step at every point, by part.

    Raises:
      ValueError: a point longer than the model's positions.
    """
    longest = max(point.slots + INTERVAL for point in chosen)
    if longest > model.config.max_positions:
        raise ValueError(
            f"Lengths, with {INTERVAL} steps more, must fit the model's {model.config.max_positions} positions; got {longest}."
        )
    records = []
    for point in chosen:
        turns = in_turns({point: lambda point=point: engine_step(model, point)}, rounds)[point]
        whole, host = (statistics.median(values) for values in zip(*turns, strict=True))
        parts = seconds_of_parts(model.params, point.policy, point.batch, point.slots, INTERVAL, rounds) | {"host": host}
        parts["rest"] = whole - sum(parts.values())
        records.append(
            {"varied": point.varied, "policy": point.policy.name, "budget": point.policy.budget, "batch": point.batch}
            | {"slots": point.slots, "step_us": digits(1e6 * whole), "tokens_per_second": digits(point.batch / whole)}
            | {"parts_us": {name: digits(1e6 * parts[name]) for name in PARTS if name in parts}}
        )
        report(records[-1])
        jax.clear_caches()  # no later point has these shapes
    return {"model": repr(model), "interval": INTERVAL, "page_size": usual_page_size(), "rounds": rounds, "records": records}


def engine_step(model: Model, point: Point) -> tuple[float, float]:
    """Seconds of a step as an engine takes it, compactions included, and those of them that are the host's own.

    The first chunk, which admits and prefills, counts for nothing. The prompt is as long as a row is after a compaction, so
    that what is timed goes through whole intervals.
    """
    policy, batch, slots = point.policy, point.batch, point.slots
    steps = STEPS + (2 if policy.evict else 1) * INTERVAL
    prompt = slots - INTERVAL // 2
    if not policy.evict:
        prompt -= STEPS
    sizes: Any = {"max_running": batch, "max_slots": prompt + steps, "page_size": usual_page_size()}
    engine = Engine(model, **sizes, policies=[policy], max_stop_ids=1)
    for tokens in np.random.default_rng(0).integers(1, model.config.vocab_size, (batch, prompt), dtype=np.int32):
        engine.submit(tokens, policy, GREEDY, max_new_tokens=steps, stop_ids=())
    engine.step()
    stats = engine.stats
    before = stats.seconds, stats.host_seconds, stats.steps
    engine.run()
    for ticket in list(engine.tickets):
        complete(engine.result(ticket))
    taken = stats.steps - before[2]
    return (stats.seconds - before[0]) / taken, (stats.host_seconds - before[1]) / taken


def table(record: dict[str, Any]) -> str:
    """Each part's share of a step, and how a step grows."""
    head = ("varied", "policy", "batch", "slots", "step, µs", "tokens/s", *PARTS)
    rows = [
        (
            one["varied"],
            one["policy"] + (f" {one['budget']}" if one["budget"] else ""),
            one["batch"],
            one["slots"],
            f"{one['step_us']:,.0f}",
            f"{one['tokens_per_second']:,.0f}",
            *(f"{one['parts_us'][name] / one['step_us']:.0%}" if name in one["parts_us"] else "" for name in PARTS),
        )
        for one in record["records"]
    ]
    caption = (
        f"{record['model']}; R-KV compacts every {record['interval']} steps. Parts run alone, as shares of the engine's step; "
        "`rest` is what they leave of it, or have too much."
    )
    return f"{caption}\n\n{markdown(head, rows)}\n\n{footnote(record)}"
