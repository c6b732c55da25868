"""What is recorded of a row while it is prefilled, decoded and compacted: its trace, its sentences, and its tokens' experts.

`Row.records` is None where nothing is recorded, and a plain step never enters this file. A new kind of record is a field of
`Records`, and each moment that it needs passes it on.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jkv.engine.requests import Request
from jkv.eviction import Policy
from jkv.model.experts import RouteRecorder
from jkv.model.params import Model
from jkv.reasoning.sentences import SentenceLog, new_log
from jkv.reasoning.sharing import Layout, Pair
from jkv.replay.trace import TraceRecorder


class RowOutputs(NamedTuple):
    """One row's outputs of a chunk, on the host; only steps that drew a token."""

    tokens: list[int]
    log_probs: list[float]
    log_probs_full: list[float]
    goes_on: bool  # whether the row still runs
    dropped: np.ndarray | None  # [steps, L, K] positions that steps evicted, EMPTY for none; None unless traced
    is_read: np.ndarray | None  # [steps, L, K, MP] entries of the page table that steps read; None unless traced
    steered: np.ndarray | None  # [steps] multiple of the steering vector added to each token; None unless traced
    hidden: np.ndarray | None  # [steps, D] after the final norm; None unless sentences are compared
    experts: np.ndarray | None = None  # [steps, L, A] that its tokens went through; None unless asked for
    log_probs_own: Sequence[float] = ()  # of the model's own distribution, for requests that ask for it
    top_tokens: Sequence[list[int]] = ()  # the most likely ones at each place, for requests that ask for them
    top_log_probs: Sequence[list[float]] = ()


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of one row; None for what nobody asks for."""

    trace: TraceRecorder | None = None
    sentences: SentenceLog | None = None
    routes: RouteRecorder | None = None

    def fork(self, trace: TraceRecorder | None) -> "Records":
        """The records of a row that begins with the same content; `trace` is its own, which begins as this one."""
        sentences = None if self.sentences is None else self.sentences.copy()
        return Records(trace, sentences, None if self.routes is None else self.routes.copy())

    def fork_for(self, request: Request, model: Model) -> "Records":
        """The records of a row that begins with the prompt of this one, whose policy may be another."""
        trace = None if self.trace is None else new_trace(request, model)
        if trace is not None and self.trace is not None:
            trace.fork_from(self.trace, len(request.prompt))
        return self.fork(trace)

    def continued(self, request: Request) -> "Records":
        """The records of a row that goes on with all of this one, for a request with more tokens."""
        return self.fork(None if self.trace is None else self.trace.grown(request.most_tokens))

    def prefilled(self, tokens: np.ndarray, hidden: Any, experts: Any) -> None:
        """Tokens of a prompt went through the model, `[T]`; of `hidden` `[1, T', D]` and `experts` `[T', L, A]`, T count."""
        if self.routes is not None:
            self.routes.add(experts, len(tokens))
        if self.sentences is not None:
            self.sentences.take(tokens, np.asarray(hidden)[0, : len(tokens)])

    def extended(self, count: int) -> None:
        """A later part of the prompt was prefilled, after a compaction may have been."""
        if self.trace is not None:
            self.trace.extended(count)

    def decoded(self, outputs: RowOutputs, policy: Policy, now: int, num_slots: int) -> None:
        """A chunk was decoded, before which the row had seen `now` tokens, and had `num_slots` slots in its first layer."""
        if self.trace is not None:
            if policy.moves_sinks:
                self.trace.shifted(now, len(outputs.tokens), num_slots - now)
            if outputs.dropped is not None and policy.evicts_in_steps:
                self.trace.dropped_in_steps(outputs.dropped, now)
            if outputs.is_read is not None and policy.read:
                self.trace.read(outputs.is_read)
            if outputs.steered is not None and policy.steer:
                self.trace.steered(now, outputs.steered)
        if self.routes is not None:
            self.routes.land()  # the prompt's are there by now
            self.routes.add(outputs.experts)
        if self.sentences is not None and outputs.hidden is not None:
            self.sentences.take(outputs.tokens, outputs.hidden)

    def compacted(self, dropped: np.ndarray | None, is_left: np.ndarray | None, now: int) -> None:
        """A compaction dropped positions ([L, K, S], EMPTY for kept; None unless traced).

        The positions in `is_left` stayed (None unless sentences are compared).
        """
        if self.sentences is not None and is_left is not None:
            self.sentences.forget(is_left)
        if self.trace is not None and dropped is not None:
            self.trace.dropped(dropped, now)

    def shared(self, pairs: Sequence[Pair], layout: Layout, counts_again: bool, now: int) -> None:
        """Pages were replaced by others, (replaced, kept), which later queries read once more for each if it `counts_again`."""
        if self.trace is None:
            return
        removed, repeated = [page for page, _ in pairs], [np.zeros(0, np.int32)]
        if counts_again:
            repeated += [
                np.tile(layout.positions(kept), layout.multiplicity[page]) for page, kept in pairs if kept not in removed
            ]
        dropped = np.concatenate([layout.positions(page) for page in removed])
        self.trace.shared(dropped, np.concatenate(repeated), now)


def new_records(request: Request, model: Model, is_traced: bool, routed_experts: bool) -> Records | None:
    """The records of a row that begins, or None if nobody asks for any."""
    trace = new_trace(request, model) if is_traced else None
    sentences = new_log(model, request.policy.sentences)
    routes = RouteRecorder() if routed_experts else None
    return None if trace is sentences is routes is None else Records(trace, sentences, routes)


def new_trace(request: Request, model: Model) -> TraceRecorder:
    """An empty trace of a request."""
    policy, size = request.policy, (model.config.num_paged_layers, model.config.num_kv_heads, request.most_tokens)
    return TraceRecorder(*size, sinks=policy.num_moving_sinks, steer=policy.steer)
