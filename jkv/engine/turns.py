"""The turns of a conversation: a finished request is extended by new tokens, which alone are prefilled, into the same row.

New tokens enter a compressed row in pieces that end where its schedule may be due, with the compaction between them. Schedules
count every token after the first turn's prompt, drawn or not, so the row holds no more than one that had drawn all of them. A
policy that evicts in each step compacts after every `STEP_PIECE` new tokens instead.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jkv.checks import shown, typed
from jkv.engine import swap
from jkv.engine.conversations import ENDS, Conversations, KeptRow, Transcript
from jkv.engine.filling import Pieces
from jkv.engine.memory import STEP_PIECE, most_pages
from jkv.engine.outputs import Event
from jkv.engine.programs import State
from jkv.engine.prompts import is_endless, num_elements
from jkv.engine.requests import Request, RequestOptions, make_requests
from jkv.engine.samples import Completion, Sample, stop_finder
from jkv.engine.starts import append
from jkv.engine.timing import COMPILING
from jkv.model.params import Model

RULE = "extend takes a flat list of at least one token id"
LOST = "The conversation's row was lost with the pool, and the engine reset. Submit the whole conversation again."


# Requests.


def check_keep(request: Request) -> None:
    """Refuses to keep a row whose next turn could not continue it.

    Raises:
      ValueError: the reason.
    """
    if not request.keep and not request.num_kept:
        return
    policy, why = request.policy, ""
    if policy.share is not None:
        why = f"{policy.name} compares pages of a text from its beginning, and its record of them ends with a request"
    elif policy.moves_sinks:
        why = f"{policy.name} reads its sinks at another position in each step, which prefill of a later turn does not"
    elif request.keep and request.stop_strings:
        why = "a stop string is found after a chunk, and the row then holds tokens from beyond it; end turns by stop_ids"
    if why:
        raise ValueError(f"keep=True needs a row that a later turn can continue; {why}. Leave keep out, or change that.")


def kept(requests: Sequence[Request], keep: bool) -> list[Request]:
    """Requests whose rows are kept, if they are to be."""
    keep = typed("keep", keep, bool)
    return [dataclasses.replace(request, keep=keep) for request in requests]


def check_tokens(tokens: Any, vocab_size: int, max_positions: int) -> np.ndarray:
    """The token ids of a turn, `[T]` int32.

    Raises:
      ValueError: none, something else, or ids out of range.
    """
    if isinstance(tokens, str) or is_endless(tokens):
        raise ValueError(f"{RULE}; got {shown(tokens)}. Encode texts with the model's tokenizer.")
    if not 0 < num_elements(tokens) <= max_positions:
        raise ValueError(f"{RULE}, and no more than the model's {max_positions} positions; got {num_elements(tokens):,}.")
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{RULE}; got {shown(tokens)}. Flatten it.") from None
    if ids.dtype == object and ids.ndim == 1 and all(isinstance(token, int) for token in ids):
        raise ValueError(f"Token ids must lie in [0, {vocab_size}); got {shown(max(ids, key=abs))}. Correct it.")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{RULE}; got {ids.dtype}{list(ids.shape)}. Flatten it, or convert it.")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"Token ids must lie in [0, {vocab_size}); got {wrong}. Correct it.")
    return ids.astype(np.int32)


def next_request(model: Model, kept: KeptRow, tokens: Any, options: RequestOptions, keep: bool) -> Request:
    """The request of a kept row's next turn.

    Raises:
      ValueError: tokens that are none of the model, settings that a turn cannot change, or a conversation that is too long.
    """
    last, config = kept.request, model.config
    for name in ("policy", "n", "first_sample"):
        default = next(field.default for field in dataclasses.fields(options) if field.name == name)
        if getattr(options, name) != default:
            raise ValueError(
                f"A turn continues one sample with its policy; got {name}={shown(getattr(options, name))}. Leave it out."
            )
    new = check_tokens(tokens, config.vocab_size, config.max_positions)
    prompt = np.concatenate([kept.transcript.tokens, new])
    if len(prompt) + (options.max_new_tokens or 1) > config.max_positions:
        raise ValueError(
            f"A conversation must fit the model's {config.max_positions} positions; this one has {len(kept.transcript.tokens)} "
            f"tokens, got {len(new)} new ones, and max_new_tokens is {shown(options.max_new_tokens)}. Shorten the turn, or "
            "submit a shorter conversation."
        )
    sampling = options.sampling or (last.sampling if options.forced_tokens is None else None)
    options = dataclasses.replace(options, sampling=sampling, first_sample=last.sample)
    request = make_requests(model, [prompt], options, last.identity)[0][0]
    return dataclasses.replace(
        request,
        policy=last.policy,
        until=last.until,
        seed=last.seed if sampling == last.sampling else request.seed,
        cache_salt=last.cache_salt,
        keep=typed("keep", keep, bool),
        num_kept=len(kept.transcript.tokens),
        first=last.first_prompt,
    )


# The engine's methods.


def extend(
    engine: Any,
    ticket: int,
    tokens: Sequence[int],
    *,
    sample: int = 0,
    keep: bool = True,
    on_tokens: Callable[[Event], None] | None = None,
    **settings: Any,
) -> int:
    """Queues the next turn of a request that was kept and is finished; returns the turn's own ticket.

    Only the new tokens are prefilled, into the row that the request left. The result's prompt is everything before the
    completion; `Result.transcripts` has the whole conversation with a loss mask.

    Args:
      ticket: of the last turn; it is extended once.
      tokens: the new token ids, such as a user's message or what a tool returned.
      sample: index of the sample that goes on, where the request had several.
      keep: whether the row is kept again at the end of this turn.
      on_tokens: see `Engine.submit`.
      settings: `max_new_tokens`, `sampling`, `stop_ids` and `forced_tokens` of `jkv.RequestOptions`. Sampling and seed are
        those of the last turn if they are left out.

    Raises:
      ValueError: a ticket without a kept row (unfinished, failed, cancelled, not kept, closed, extended already), tokens that
        are none, or a turn that this engine can never serve; nothing is changed.
    """
    kept = find(engine, ticket, sample)
    request = next_request(engine.model, kept, tokens, RequestOptions(**settings), keep)
    return submit_turn(engine, ticket, sample, kept, request, on_tokens)


def find(engine: Any, ticket: int, sample: int) -> KeptRow:
    """The row that a turn continues, or a ValueError that says why there is none."""
    for name, number in (("ticket", ticket), ("sample", sample)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise ValueError(f"{name} must be a number; got {shown(number)}. Pass what submit returned.")
    group = engine.tickets.get(ticket, [])
    if group and not 0 <= sample < len(group):
        raise ValueError(f"sample must be one of the request's {len(group)}; got {sample}.")
    if group:
        one = group[sample]
        if not one.request.keep:
            raise ValueError(f"extend continues a kept request; that of ticket {ticket} was not. Submit it with keep=True.")
        if not one.is_finished:
            raise ValueError(f"extend continues a finished request; that of ticket {ticket} still runs. Wait for its result.")
        if one.completion.finish_reason not in ENDS:
            raise ValueError(
                f"extend continues a request that finished by {' or '.join(ENDS)}; that of ticket {ticket} ended by "
                f"{one.completion.finish_reason!r}. Submit the conversation again."
            )
    return engine.scheduler.conversations.find(ticket, sample)


def submit_turn(
    engine: Any,
    ticket: int,
    index: int,
    kept: KeptRow,
    request: Request,
    on_tokens: Callable[[Event], None] | None = None,
) -> int:
    """Queues the request of a kept row's next turn.

    Raises:
      ValueError: a request that this engine can never serve, or a row that is gone.
    """
    request = engine.check(request)
    engine.scheduler.conversations.find(ticket, index)
    with engine._guard.changing("extend"):
        engine.scheduler.conversations.use(ticket, index, kept)
        number = next(engine._ticket)
        sample = Sample(number, 0, request, Completion(), most_pages(engine.model.params, request, engine.capacity.page_size))
        sample.on_tokens, sample.stops = on_tokens, stop_finder(engine.model.tokenizer, request)
        sample.submitted = time.perf_counter() - COMPILING.seconds
        begin(sample, kept)
        engine.tickets[number] = [sample]
        engine.scheduler.add(sample)
    return number


def release(engine: Any, ticket: int) -> None:
    """Frees the rows that a kept request left, in the pool or in host memory. An unfinished one leaves none at its end.

    Its result stays. Nothing happens where nothing is kept.
    """
    with engine._guard.turn("release"):
        for sample in engine.tickets.get(ticket, []):
            if not sample.is_finished:
                sample.request = dataclasses.replace(sample.request, keep=False)
        engine.scheduler.conversations.release(ticket)
        if not engine.is_asleep:
            engine.runner.release([])


# Samples and rows.


def begin(sample: Sample, kept: KeptRow) -> None:
    """Lets a fresh sample continue a kept row."""
    sample.resumes, sample.earlier = kept, kept.transcript
    sample.pending = len(sample.request.prompt) - sample.request.num_kept
    sample.filled, sample.heads, sample.keeps_all = kept.filled, kept.heads, kept.keeps_all
    sample.sentences = None if kept.sentences is None else kept.sentences.copy()
    sample.trace = None if kept.trace is None else kept.trace.grown(sample.request.most_tokens)
    completion = sample.completion
    completion.evicted, completion.compactions = kept.evicted, kept.compactions
    completion.cached_tokens = sample.request.num_kept


def restart(engine: Any, sample: Sample) -> bool:
    """Makes an unfinished sample ready for an empty pool: fresh, or swapped out. False if it continues a row that is lost."""
    if not sample.request.num_kept:
        sample.restart(stop_finder(engine.model.tokenizer, sample.request), engine.runner.version)
        return True
    is_waiting = sample.resumes is not None and sample.resumes.swapped is not None
    sample.is_running, sample.is_swapped = False, sample.swapped is not None
    if is_waiting or sample.is_swapped:
        return True
    sample.resumes, sample.completion.error = None, RuntimeError(LOST)
    return False


def end(sample: Sample, conversations: Conversations, num_pages: int) -> None:
    """At the end of a turn: writes its transcript, and keeps its row if it is to be kept; its pages are `num_pages` at most."""
    request, completion = sample.request, sample.completion
    if not (request.keep or request.num_kept):
        return
    conversations.free(sample.resumes)  # of a turn that ended before it began
    sample.resumes = None
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


# The device.


def settle(programs: Any, state: State, conversations: Conversations) -> State:
    """The state after what the scheduler has decided about kept rows: some are detached, swapped out or freed."""
    leaving, conversations.leaving = conversations.leaving, {}
    for row, kept in leaving.items():
        state, kept.snapshot = programs.detach(state, np.int32(row))
    swapping, conversations.swapping = conversations.swapping, []
    for kept in swapping:
        assert kept.snapshot is not None
        kept.swapped = swap.copy_out(programs, state, kept.snapshot, None)
    freed, conversations.freed = conversations.freed, []
    for kept in (*swapping, *freed):
        if kept.snapshot is not None:
            state, kept.snapshot = programs.free(state, kept.snapshot.block_table), None
    return state


def attach(programs: Any, state: State, row: int, kept: KeptRow) -> State:
    """The state with a kept row in an empty row of the batch, which then owns its pages."""
    if kept.swapped is not None:
        return swap.swap_in(programs, state, row, kept.swapped, None, None)
    snapshot = kept.snapshot
    assert snapshot is not None
    is_own = np.zeros(snapshot.block_table.page_table.shape, bool)
    state = programs.attach(state, snapshot, np.int32(row), is_own)
    return programs.free(state, snapshot.block_table)


def resume(runner: Any, row: int, sample: Sample) -> Pieces:
    """Attaches the row of a sample's last turn, and prefills the new tokens, with compactions where they are due."""
    kept = sample.resumes
    assert kept is not None
    with runner.meter.clock("prefill_seconds" if kept.swapped is None else "swap_seconds"):
        runner.state = attach(runner.programs, runner.state, row, kept)
    sample.resumes, sample.version = None, runner.version
    while sample.pending:
        if sample.is_due:
            runner.compact({row: sample})
        start = len(sample.request.prompt) - sample.pending
        count = piece_of(sample)
        yield from append(runner, row, sample, sample.request.prompt[start : start + count])
        count_new(sample, count)
        runner.meter.row(sample)
    if sample.is_due:
        runner.compact({row: sample})


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
    steps = None if policy.schedule is None else policy.schedule.steps_until_due(sample.clock)
    return min(sample.pending, STEP_PIECE if policy.evicts_in_steps else steps or sample.pending)
