"""The turns of a conversation: a finished request that was kept is extended by new tokens.

What is checked before a turn is queued, and what the sample of a turn takes from the row that the last one left.

New tokens are prefilled in pieces. Each piece ends where a compaction may be due, and the compaction runs before the next
piece. Schedules count every token after the first turn's prompt, whether drawn or given, so a row never holds more slots than
if the model had drawn them all. For a policy that evicts in each step, a compaction follows every `STEP_PIECE` new tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from jkv.checks import out_of_range, shown, typed
from jkv.engine.kept_rows import ENDS, KeptRow, KeptRows, Transcript
from jkv.engine.prompts import check_ids, is_endless, num_elements
from jkv.engine.requests import Request, RequestOptions, make_requests
from jkv.engine.row import Place
from jkv.engine.samples import Sample, stop_finder
from jkv.errors import InputError, refused
from jkv.model.params import Model

RULE = "extend takes a flat list of token ids"
LOST = (
    "The conversation's row was lost with the pool, and the engine reset. Submit the whole conversation again; an engine with "
    "copy_kept=True keeps copies."
)


def check_keep(request: Request) -> None:
    """Refuses to keep a row whose next turn could not continue it, and a prompt whose next piece could not.

    Raises:
      ValueError: the reason.
    """
    if not request.keep and not request.num_before:
        return
    policy, why = request.policy, ""
    if policy.share is not None:
        why = "{name} compares pages of a text from its beginning, and its record of them ends with a request"
    elif policy.moves_sinks:
        why = "{name} reads its sinks at another position in each step, which prefill of a later turn does not"
    elif request.keep and request.stop_strings:
        why = "a stop string is found after a chunk, and the row then holds tokens from beyond it; end turns by {stop_ids}"
    elif policy.read is not None and not request.num_kept and request.num_before:
        why = "{name} chooses pages for each query, which prefill does not"
    if why and not (request.keep or request.num_kept):
        rule = "{field} needs a row that new tokens can continue; " + why + ". Leave {field} out."
        raise InputError(rule, field="prompt_piece", code="unsupported", name=policy.name)
    if why:
        rule = "{field} needs a row that a later turn can continue; " + why + ". Leave {field} out, or change that."
        raise InputError(rule, field="keep", code="unsupported", name=policy.name)


def with_keep(requests: Sequence[Request], keep: bool) -> list[Request]:
    """Requests whose rows are kept, if they are to be."""
    keep = typed("keep", keep, bool)
    return [dataclasses.replace(request, keep=keep) for request in requests]


def check_tokens(tokens: Any, vocab_size: int, max_positions: int) -> np.ndarray:
    """The token ids of a turn, `[T]` int32.

    Raises:
      ValueError: none, something else, or ids out of range.
    """
    if isinstance(tokens, str):
        rule = RULE + "; got {got}. Encode texts with the model's tokenizer."
        raise InputError(rule, field="tokens", code="wrong_type", got=shown(tokens))
    count = 0 if is_endless(tokens) else num_elements(tokens, RULE, "tokens")
    if count > max_positions:
        rule = RULE + ", no more than the model's {most} positions; got {got:,}. Shorten it."
        raise InputError(rule, field="tokens", code="does_not_fit", most=max_positions, got=count)
    return check_ids(tokens, RULE, "the list", vocab_size, "tokens")


def next_request(model: Model, kept: KeptRow, tokens: Any, options: RequestOptions, keep: bool) -> Request:
    """The request of a kept row's next turn.

    Raises:
      ValueError: tokens outside of the vocabulary, settings that a turn cannot change, or a conversation that is too long.
    """
    last, config = kept.request, model.config
    for name in ("policy", "n", "first_sample", "cache_salt", "adapter", "prompt_piece", "parse_special"):
        default = next(field.default for field in dataclasses.fields(options) if field.name == name)
        if getattr(options, name) != default:
            rule = "A turn continues one sample with its policy, salt and adapter; got {field}={got}. Leave it out."
            raise InputError(rule, field=name, code="conflict", got=shown(getattr(options, name)))
    new = check_tokens(tokens, config.vocab_size, config.max_positions)
    prompt = np.concatenate([kept.transcript.tokens, new])
    if len(prompt) + (options.max_new_tokens or 1) > config.max_positions:
        rule = (
            "A conversation must fit the model's {most} positions; this one has {before} tokens, got {new} new ones, and "
            "{max_new_tokens} is {asked}. Shorten the turn, or submit a shorter conversation."
        )
        about = {"most": config.max_positions, "before": len(kept.transcript.tokens), "new": len(new)}
        raise InputError(rule, field="tokens", code="does_not_fit", asked=shown(options.max_new_tokens), **about)
    sampling = options.sampling or (last.sampling if options.forced_tokens is None else None)
    options = dataclasses.replace(options, sampling=sampling, first_sample=last.sample)
    request = make_requests(model, [prompt], options, last.identity)[0][0]
    return dataclasses.replace(
        request,
        policy=last.policy,
        until=last.until,
        seed=last.seed if sampling == last.sampling else request.seed,
        cache_salt=last.cache_salt,
        adapter=last.adapter,
        keep=typed("keep", keep, bool),
        num_kept=len(kept.transcript.tokens),
        first=last.first_prompt,
    )


def find(tickets: Mapping[int, list[Sample]], kept_rows: KeptRows, ticket: int, sample: int) -> KeptRow:
    """The row that a turn continues, or a ValueError that says why there is none."""
    ticket, sample = typed("ticket", ticket, int), typed("sample", sample, int)
    if group := tickets.get(ticket):
        reasons = [one.completion.finish_reason if one.is_finished else None for one in group]
        check_end(sample, group[0].request.keep, reasons)
    return kept_rows.find(ticket, sample)


def check_end(sample: int, keep: bool, reasons: Sequence[str | None] | None) -> None:
    """Refuses a turn after a sample that is not kept, still runs or ended otherwise than by `ENDS`.

    Args:
      keep: whether the request was submitted with it.
      reasons: by which each sample of the request ended, None where one runs; None while all do.
    """
    if not keep:
        raise refused("extend continues a kept request; this one was not. Submit it again, with keep=True.", ticket="invalid")
    if reasons is not None and not 0 <= sample < len(reasons):
        raise out_of_range("sample", f"be one of the request's {len(reasons)}", sample)
    reason = None if reasons is None else reasons[sample]
    if reason is None:
        raise refused("extend continues a finished request; this one still runs. Wait for its result.", ticket="conflict")
    if reason not in ENDS:
        rule = (
            f"extend continues a request that finished by {' or '.join(ENDS)}; this one ended by {reason!r}. Submit it again."
        )
        raise refused(rule, ticket="conflict")


def begin(sample: Sample, kept: KeptRow) -> None:
    """Lets a fresh sample continue a kept row."""
    sample.resumes, sample.earlier = kept, kept.transcript
    sample.pending = len(sample.request.prompt) - sample.request.num_kept
    records = kept.row.records
    sample.row = kept.row.fork(None if records is None else records.continued(sample.request))
    sample.row.cached_tokens, sample.row.version = sample.request.num_kept, 0  # the version is known once its row is attached


def restart(sample: Sample, kept_rows: KeptRows, tokenizer: Any, version: int) -> bool:
    """Makes an unfinished sample ready for an empty pool: fresh, or swapped out.

    False if it has failed itself, or continues a row that is lost.
    """
    if sample.completion.error is not None:
        return False
    kept = sample.resumes or sample.resumed
    sample.row.place = Place.NOWHERE if sample.row.swapped is None else Place.HOST
    if sample.is_swapped and sample.request.num_kept:
        return True
    if sample.request.num_kept and (kept is None or kept.row.swapped is None):
        sample.resumes, sample.completion.error = None, RuntimeError(LOST)
        return False
    sample.restart(stop_finder(tokenizer, sample.request), version)
    if kept is not None:
        kept_rows.return_to_host(kept)
        begin(sample, kept)
    return True


def end(sample: Sample, kept_rows: KeptRows, num_pages: int) -> None:
    """At the end of a turn: writes its transcript, and keeps its row if it is to be kept; its pages are `num_pages` at most."""
    request, completion = sample.request, sample.completion
    if not (request.keep or request.num_kept):
        return
    kept_rows.free(sample.resumes)  # of a turn that ended before it began
    sample.resumes = sample.resumed = None
    completion.transcript = transcript_of(sample)
    if request.keep and completion.finish_reason in ENDS:
        kept = KeptRow(request, completion.transcript, dataclasses.replace(sample.row, num_pages=num_pages))
        kept_rows.add(sample.ticket, sample.index, kept)


def transcript_of(sample: Sample) -> Transcript:
    """The conversation up to a sample's last token."""
    completion, prompt, earlier = sample.completion, sample.request.prompt, sample.earlier
    num_old, num_drawn = 0 if earlier is None else len(earlier.tokens), completion.num_tokens
    between = len(prompt) - num_old
    version = completion.versions[0] if completion.versions else sample.row.version

    def joined(field: str, given: ArrayLike, drawn: ArrayLike, dtype: DTypeLike) -> np.ndarray:
        old = [] if earlier is None else [getattr(earlier, field)]
        return np.concatenate([*old, np.asarray(given, dtype), np.asarray(drawn, dtype)])

    return Transcript(
        joined("tokens", prompt[num_old:], completion.tokens, np.int32),
        joined("loss_mask", [False] * between, [True] * num_drawn, bool),
        joined("logprobs", [0.0] * between, completion.log_probs, np.float32),
        joined("versions", [version] * between, completion.versions, np.int32),
    )
