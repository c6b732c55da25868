"""A kept row: what a sample leaves at the end of a turn, and how the next one continues it on the device.

New tokens enter a compressed row in pieces that end where its schedule may be due, with the compaction between them. Schedules
count every token after the first turn's prompt, drawn or not, so the row holds no more than one that had drawn all of them. A
policy that evicts in each step compacts after every `STEP_PIECE` new tokens instead.
"""

from typing import Any

import numpy as np

from jkv.engine import swap
from jkv.engine.conversations import ENDS, Conversations, KeptRow, Transcript
from jkv.engine.processes import host
from jkv.engine.programs import State
from jkv.engine.samples import Sample, stop_finder

LOST = (
    "The conversation's row was lost with the pool, and the engine reset. Submit the whole conversation again; an engine with "
    "copy_kept=True keeps copies."
)


def begin(sample: Sample, kept: KeptRow) -> None:
    """Lets a fresh sample continue a kept row."""
    sample.resumes, sample.earlier = kept, kept.transcript
    sample.pending = len(sample.request.prompt) - sample.request.num_kept
    sample.filled, sample.heads, sample.keeps_all = kept.filled, kept.heads, kept.keeps_all
    sample.sentences = None if kept.sentences is None else kept.sentences.copy()
    sample.trace = None if kept.trace is None else kept.trace.grown(sample.request.most_tokens)
    sample.routes = None if kept.routes is None else kept.routes.copy()
    completion = sample.completion
    completion.evicted, completion.compactions = kept.evicted, kept.compactions
    completion.cached_tokens = sample.request.num_kept


def restart(sample: Sample, conversations: Conversations, tokenizer: Any, version: int) -> bool:
    """Makes an unfinished sample ready for an empty pool: fresh, or swapped out.

    False if it has failed itself, or continues a row that is lost.
    """
    if sample.completion.error is not None:
        return False
    kept, sample.is_running, sample.is_swapped = sample.resumes or sample.resumed, False, sample.swapped is not None
    if sample.is_swapped and sample.request.num_kept:
        return True
    if sample.request.num_kept and (kept is None or kept.swapped is None):
        sample.resumes, sample.completion.error = None, RuntimeError(LOST)
        return False
    sample.restart(stop_finder(tokenizer, sample.request), version)
    if kept is not None:
        conversations.return_to_host(kept)
        begin(sample, kept)
    return True


def end(sample: Sample, conversations: Conversations, num_pages: int) -> None:
    """At the end of a turn: writes its transcript, and keeps its row if it is to be kept; its pages are `num_pages` at most."""
    request, completion = sample.request, sample.completion
    if not (request.keep or request.num_kept):
        return
    conversations.free(sample.resumes)  # of a turn that ended before it began
    sample.resumes = sample.resumed = None
    completion.transcript = transcript_of(sample)
    if request.keep and completion.finish_reason in ENDS:
        kept = KeptRow(
            request=request,
            transcript=completion.transcript,
            filled=sample.filled,
            heads=sample.heads,
            keeps_all=sample.keeps_all,
            sentences=sample.sentences,
            trace=sample.trace,
            routes=sample.routes,
            evicted=completion.evicted,
            compactions=completion.compactions,
            num_pages=num_pages,
        )
        conversations.add(sample.ticket, sample.index, kept)


def transcript_of(sample: Sample) -> Transcript:
    """The conversation up to a sample's last token."""
    completion, prompt, earlier = sample.completion, sample.request.prompt, sample.earlier
    num_old, num_drawn = 0 if earlier is None else len(earlier.tokens), completion.num_tokens
    between = len(prompt) - num_old
    version = completion.versions[0] if completion.versions else sample.version

    def joined(field: str, given: Any, drawn: Any, dtype: Any) -> np.ndarray:
        old = [] if earlier is None else [getattr(earlier, field)]
        return np.concatenate([*old, np.asarray(given, dtype), np.asarray(drawn, dtype)])

    return Transcript(
        joined("tokens", prompt[num_old:], completion.tokens, np.int32),
        joined("loss_mask", [False] * between, [True] * num_drawn, bool),
        joined("logprobs", [0.0] * between, completion.log_probs, np.float32),
        joined("versions", [version] * between, completion.versions, np.int32),
    )


def settle(programs: Any, state: State, conversations: Conversations) -> State:
    """The state after what the scheduler has decided about kept rows: some are detached, swapped out or freed."""
    leaving, conversations.leaving = conversations.leaving, {}
    for row, kept in leaving.items():
        state, snapshot = programs.detach(state, np.int32(row))
        # Pages stay in the pool; the rest is outside of it, where only the rows of the batch have room.
        kept.snapshot = snapshot._replace(beside=host(snapshot.beside))
        if conversations.copies:
            kept.swapped = swap.copy_out(programs, state, kept.snapshot, None)
    swapping, conversations.swapping = conversations.swapping, []
    for kept in swapping:
        assert kept.snapshot is not None
        kept.swapped = kept.swapped or swap.copy_out(programs, state, kept.snapshot, None)
    freed, conversations.freed = conversations.freed, []
    for kept in (*swapping, *freed):
        if kept.snapshot is not None:
            state, kept.snapshot = programs.free(state, kept.snapshot.block_table), None
    return state


def attach(programs: Any, state: State, row: int, kept: KeptRow) -> State:
    """The state with a kept row in an empty row of the batch, which then owns its pages."""
    snapshot = kept.snapshot
    if snapshot is None:
        assert kept.swapped is not None
        return swap.swap_in(programs, state, row, kept.swapped, None, None)
    is_own = np.zeros(snapshot.block_table.page_table.shape, bool)
    state = programs.attach(state, snapshot, np.int32(row), is_own)
    return programs.free(state, snapshot.block_table)
