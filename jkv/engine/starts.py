"""How a row starts: its prompt is prefilled, after what the prefix cache holds of it, or it is forked from another one's."""

import copy
from typing import Any

import numpy as np

from jkv.engine import prefill, prefix_reuse
from jkv.engine.clocks import is_ready
from jkv.engine.filling import Pieces
from jkv.engine.memory import STEP_PIECE
from jkv.engine.samples import Completion, Sample, Start, pieces_in_use, split_by_ownership
from jkv.eviction.schedules import ask
from jkv.reasoning.sentences import new_log


def start(runner: Any, row: int, sample: Sample) -> Pieces:
    """Prefills a prompt into its row, from where the prefix cache ends, and compacts it if it is longer than the budget.

    Where it enters in pieces, that is its first one, and the others follow.
    """
    prompt, config, done = sample.request.prompt[: sample.request.first_prompt], runner.model.config, 0
    sample.filled, sample.heads, sample.version = np.full(config.num_paged_layers, len(prompt)), None, runner.version
    sample.sentences = new_log(runner.model, sample.request.policy.sentences)
    sample.trace, sample.routes = runner.new_trace(sample), runner.new_routes()
    with runner.meter.clock("prefill_seconds"):
        if runner.prefix_cache.piece:
            runner.state, done = prefix_reuse.adopt(runner.programs, runner.state, runner.prefix_cache, row, sample)
            runner.meter.found(sample, done)
    yield from append(runner, row, sample, prompt[done:], done)
    if sample.pieces:
        with runner.meter.clock("prefill_seconds"):
            in_use = pieces_in_use(runner.meter.running)
            runner.state = prefix_reuse.keep(runner.programs, runner.state, runner.prefix_cache, row, sample, done, in_use)
    runner.sharer.start(sample)
    runner.meter.row(sample)
    runner.meter.stats.prefills += 1
    yield from append_pending(runner, row, sample)


def append_pending(runner: Any, row: int, sample: Sample) -> Pieces:
    """Prefills what is left of a sample's prompt, with a compaction before and after wherever one is due."""
    while sample.pending:
        if sample.is_due:
            runner.compact({row: sample})
        first = len(sample.request.prompt) - sample.pending
        count = piece_of(sample)
        yield from append(runner, row, sample, sample.request.prompt[first : first + count])
        count_new(sample, count)
        runner.meter.row(sample)
    if sample.is_due:
        runner.compact({row: sample})


def append(runner: Any, row: int, sample: Sample, tokens: np.ndarray, done: int | None = None) -> Pieces:
    """Prefills tokens into a row, after those that it has: the first `done` of its prompt, or None if it has evicted."""
    for token, count in prefill.chunks(tokens, runner.prefill_sizes):
        yield int(count[0])
        num_pages = None
        if done is not None:
            done += int(count[0])
            num_pages = prefill.pages_to_read(done, runner.capacity.page_size, runner.state.cache.pool.page_table.shape[-1])
        runner.meter.stats.prefilled += int(count[0])
        with runner.meter.clock("prefill_seconds"), runner.meter.stats.idle.dispatching(is_ready(runner.state)):
            args = runner.params, runner.state, np.asarray([row], np.int32), token, count, runner.gate
            options = {"num_pages": num_pages, "returns_experts": runner.routed_experts}
            runner.state, hidden, held, experts = runner.programs.prefill_chunk(*args, **options)
            runner.held.append(held)
            if sample.routes is not None:
                sample.routes.add(experts, int(count[0]))
            if sample.sentences is not None:
                sample.sentences.take(token[0, : count[0]], np.asarray(hidden)[0, : count[0]])


def fork(runner: Any, admitted: dict[int, Sample]) -> Pieces:
    """Starts rows from the same prompt, which is prefilled once, in the first row, and forked to all."""
    first, sample = next(iter(admitted.items()))
    prefix = sample.prefix
    if prefix.start is None:
        one = copy.copy(sample)  # which nobody can cancel while it is prefilled
        one.completion = Completion()
        yield from start(runner, first, one)
        runner.state, snapshot = runner.programs.detach(runner.state, np.int32(first))
        prefix.start = Start(snapshot, one.completion, one.sentences, one.trace, one.routes)
        prefix.error = prefix.error or one.completion.error
        prefix.filled, prefix.heads = one.filled, one.heads  # fewer than were reserved, if scores decided how many
        prefix.num_pages = min(prefix.num_pages, one.num_pages(0, *runner.capacity.sizes))
        sample.completion.peak_kv_bytes = max(sample.completion.peak_kv_bytes, one.completion.peak_kv_bytes)
    begin = prefix.start
    with runner.meter.clock("prefill_seconds"):
        for owns_all, group in split_by_ownership(admitted):
            runner.state = runner.programs.fork(runner.state, begin.snapshot, runner.pad_rows(group), owns_all)
    for sample in admitted.values():
        completion, known = sample.completion, begin.completion
        sample.filled, sample.heads, sample.version = prefix.filled, prefix.heads, runner.version
        completion.is_forked, completion.error = True, completion.error or prefix.error
        for name in ("compactions", "evicted", "cached_tokens"):
            setattr(completion, name, getattr(known, name))
        sample.sentences = None if begin.sentences is None else begin.sentences.copy()
        runner.sharer.start(sample)
        sample.routes = None if begin.routes is None else begin.routes.copy()
        sample.trace = None if begin.trace is None else runner.new_trace(sample)
        if sample.trace is not None and begin.trace is not None:
            sample.trace.fork_from(begin.trace, len(sample.request.prompt))
    runner.meter.stats.forks += len(admitted)


def count_new(sample: Sample, count: int) -> None:
    """Counts new tokens that were appended to a sample's row."""
    if sample.trace is not None:
        sample.trace.extended(count)
    sample.filled = sample.filled + count
    sample.heads = None if sample.heads is None else sample.heads + count
    sample.pending -= count


def piece_of(sample: Sample) -> int:
    """How many new tokens are appended before the row may have to be compacted."""
    policy = sample.request.policy
    steps = None if policy.schedule is None else ask(policy.name, policy.schedule, "steps_until_due", sample.clock)
    return min(sample.pending, STEP_PIECE if policy.evicts_in_steps else steps or sample.pending)
