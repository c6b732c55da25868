"""Facts of an engine for its user: its model, its pool, what runs, and of which version the weights are."""

from typing import Any

from jkv import notebook
from jkv.checks import size


def text(engine: Any) -> str:
    """What `repr` shows of an engine."""
    capacity, scheduler = engine.capacity, engine.scheduler
    waiting = len(scheduler.waiting) + len(scheduler.held)
    pool = engine.num_pages * engine.page_bytes
    state = "freed, while the engine is asleep" if engine.is_asleep else "on the device"
    return "\n".join(
        [
            f"Engine of {engine.model}",
            f"  pool: {engine.num_pages:,} pages of {capacity.page_size} slots, {size(pool)}; {state}",
            f"  rows: {capacity.max_running}, of at most {engine.max_slots:,} slots in a layer and KV head",
            f"  requests: {len(engine.tickets)}; samples: {len(scheduler.running)} running, {waiting} waiting",
            f"  so far: {engine.stats.tokens:,} tokens, at most {size(engine.stats.peak_kv_bytes)} of keys and values held",
        ]
    )


def html(engine: Any) -> str:
    """What a notebook shows of an engine."""
    return notebook.text(text(engine))


def version(engine: Any) -> int:
    """The version of the weights in use: how often they were replaced."""
    return engine.runner.version


def is_traced(engine: Any) -> bool:
    """Whether samples are traced; may be set while none is unfinished."""
    return engine.runner.is_traced


def trace(engine: Any, is_traced: bool) -> None:
    """Sets whether samples are traced."""
    engine.runner.is_traced = is_traced
