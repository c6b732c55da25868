"""`jkv.generate`: prompts in, completions out, from an engine that is sized for the call."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jkv.engine.engine import Engine
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.memory import cap_to_free, most_pages, most_slots, num_row_pages, page_bytes
from jkv.engine.options import EngineOptions
from jkv.engine.outputs import Event
from jkv.engine.requests import Request, RequestOptions, check_model, encode_prompts, make_requests
from jkv.engine.results import Result, make_result
from jkv.model.params import Model, Params
from jkv.model.sampling import Sampling
from jkv.policies import Policy
from jkv.replay.score import round_up

PROMPT_ROOM = 256  # slots of a shared prompt that a pool has room for, at least
DEFAULT_RUNNING = 32


def generate(
    model_or_params: Model | Params,
    prompt_or_prompts: Any,
    policy: Policy | Sequence[Policy] | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int | None = None,
    n: int = 1,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    *,
    on_tokens: Callable[[Event], None] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Completions of one prompt or a list of them, decoded from a paged cache that `policy` keeps small.

    Args:
      model_or_params: what `jkv.load` returns; or bare `Params`, with token ids as prompts.
      prompt_or_prompts: a string or a sequence of token ids, or a list of either.
      policy, sampling, max_new_tokens, n, stop_ids, stop_strings: see `jkv.RequestOptions`.
      on_tokens: receives a `jkv.Event` for each sample and chunk (`event.ticket` is the prompt's index). If it raises, that
        prompt's samples end with the reason "error", a warning gives the exception, and the others continue.
      progress: whether to show a bar; None shows it in a terminal or notebook.
      settings: settings of the engine by name, such as `max_running`, `page_size`, `kv_memory` and `return_trace`: see
        `jkv.EngineOptions`.

    Ctrl-C, pressed any number of times, ends the call after the turn in progress. The result then has all tokens so far, and
    unfinished samples have the reason "cancelled".

    Raises:
      ValueError: bad input, refused before anything compiles.
      TypeError: an unknown argument; the known ones are listed.
    """
    model, options = check_model(model_or_params), EngineOptions().changed(settings)
    request_options = RequestOptions(
        policy=policy, sampling=sampling, max_new_tokens=max_new_tokens, n=n, stop_ids=stop_ids, stop_strings=stop_strings
    )
    requests = make_requests(model, encode_prompts(model, prompt_or_prompts), request_options)
    engine = engine_for(model, requests, options)
    with deferred_interrupts(ends_here=True):
        tickets = [engine.submit_requests(group, on_tokens) for group in requests]
        with progress_bar(sum(request.max_new_tokens for group in requests for request in group), progress) as on_events:
            engine.run(on_events)
        return result_of(engine, tickets, options.return_trace)


def result_of(engine: Engine, tickets: Sequence[int], is_traced: bool) -> Result:
    """The result of finished requests; warns of callbacks that raised."""
    samples = engine.take(tickets)
    for error in {id(s.completion.error): s.completion.error for s in samples if s.completion.error}.values():
        warnings.warn(f"on_tokens or an encoder raised {error!r}; the samples of its prompt were ended", stacklevel=3)
    return make_result(engine.model, samples, engine.stats, is_traced)


def engine_for(model: Model, requests: Sequence[Sequence[Request]], options: EngineOptions) -> Engine:
    """An engine sized for these requests, grouped by prompt; sizes that `options` give are kept."""
    params, every, n = model.params, [request for group in requests for request in group], len(requests[0])
    policies, page_size = [group[0].policy for group in requests], options.page_size
    num_rows = options.max_running or min(1 << (len(every) - 1).bit_length(), DEFAULT_RUNNING)
    max_slots = round_up(max(most_slots(params, request) for request in every))
    num_pages = options.num_pages
    if options.kv_memory is None and num_pages is None:
        num_pages = default_num_pages(params, every, n, num_rows, max_slots, page_size)
        has_bounds = any(policy.read is not None for policy in policies)
        num_pages = cap_to_free(params, num_pages, page_bytes(params, page_size, has_bounds))
    return Engine(
        model,
        options,
        max_running=num_rows,
        max_slots=max_slots,
        num_pages=num_pages,
        policies=policies,
        max_stop_ids=max(options.max_stop_ids, *(len(request.stop_ids) for request in every)),
    )


def default_num_pages(
    params: Params, requests: Sequence[Request], n: int, num_rows: int, max_slots: int, page_size: int
) -> int:
    """Pages for full rows, and for the prompts that running samples may share.

    The number does not depend on whether prompts are equal, nor on their lengths up to `PROMPT_ROOM` slots: the pool's size is
    a compiled shape, and other prompts must compile nothing.
    """
    widest_row = max(most_pages(params, request, page_size) for request in requests)  # unequal heads may round up more often
    rows = num_rows * max(widest_row, num_row_pages(params, max_slots, page_size))
    if len(requests) == 1:
        return rows
    longest = max(int(request.first_slots(1).max()) for request in requests)
    prefix = num_row_pages(params, min(max_slots, max(PROMPT_ROOM, round_up(longest))), page_size)
    return rows + (-(-num_rows // max(n, 2)) + 1) * prefix


@contextlib.contextmanager
def progress_bar(total: int, progress: bool | None, title: str = "generate") -> Iterator[Callable[[list[Event]], None]]:
    """A bar of generated tokens; with `progress=None`, only the main thread shows one."""
    from tqdm.auto import tqdm

    is_main = threading.current_thread() is threading.main_thread()
    disable = not progress if progress is not None else (None if is_main else True)
    with tqdm(total=total, unit="tok", desc=title, disable=disable, leave=False) as bar:
        yield lambda events: bar.update(sum(len(event.tokens) for event in events)) and None
