"""`jkv.generate`: prompts in, completions out, from an engine that is sized for the call."""

import contextlib
import dataclasses
import inspect
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jkv.engine.engine import Engine
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.memory import (
    cap_to_free,
    coarse,
    free_pool_bytes,
    lowered,
    most_pages,
    most_slots,
    num_row_pages,
    page_bytes,
    page_size_for,
)
from jkv.engine.mesh import mesh_for, num_pools
from jkv.engine.options import EngineOptions
from jkv.engine.outputs import Event
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, check_model, make_requests
from jkv.engine.results import Result, make_result
from jkv.engine.samples import Sample
from jkv.engine.stats import RunStats
from jkv.model.params import Model, Params
from jkv.model.sampling import Sampling
from jkv.model.sharding import shard
from jkv.policies import Policy
from jkv.replay.score import round_up

LOGGER = logging.getLogger("jkv")
PROMPT_ROOM = 256  # slots of a shared prompt that a pool has room for, at least
DEFAULT_RUNNING = 32
DRAW_SECONDS = 0.2  # between two drawings of a bar


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
    forced_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
    prompt_piece: int | None = None,
    on_tokens: Callable[[Event], None] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Completions of one prompt or a list of them, decoded from a paged cache that `policy` keeps small.

    Args:
      model_or_params: what `jkv.load` returns; or bare `Params`, with token ids as prompts.
      prompt_or_prompts: a string, a conversation (a list of messages such as `{"role": "user", "content": "..."}`, which the
        tokenizer's chat template turns into text), or a sequence of token ids; or a list of these.
      policy, sampling, max_new_tokens, n, stop_ids, stop_strings, forced_tokens, prompt_piece: see
        `jkv.RequestOptions`.
      on_tokens: receives a `jkv.Event` for each sample and chunk (`event.ticket` is the prompt's index). If it raises, that
        prompt's samples end with the reason "error", a warning gives the exception, and the others continue.
      progress: whether to show a bar; None shows it in a terminal or notebook.
      settings: settings of the engine by name, such as `max_running`, `page_size`, `kv_memory`, `mesh` and `return_trace`: see
        `jkv.EngineOptions`. Each call moves weights that are not on its mesh; `jkv.load(..., mesh=...)` reads them there.

    Ctrl-C, pressed any number of times, ends the call after the turn in progress. The result then has all tokens so far, and
    unfinished samples have the reason "cancelled".

    Raises:
      ValueError: bad input, refused before anything compiles.
      TypeError: an unknown argument; the known ones are listed.
    """
    model, options = check_model(model_or_params), EngineOptions().changed(settings, inspect.signature(generate).parameters)
    request_options = RequestOptions(
        policy=policy,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        n=n,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        forced_tokens=forced_tokens,
        prompt_piece=prompt_piece,
    )
    prompts = encode_prompts(model, prompt_or_prompts)
    requests = make_requests(model, prompts, request_options, kv_format=options.kv_format)
    engine = engine_for(model, requests, options)
    with deferred_interrupts(ends_here=True):
        tickets = [engine.submit_requests(group, on_tokens) for group in requests]
        with progress_bar(sum(map(len, requests)), progress) as on_events:
            engine.run(on_events)
        return result_of(engine, tickets, options.return_trace)


def result_of(engine: Engine, tickets: Sequence[int], is_traced: bool) -> Result:
    """The result of finished requests; warns of callbacks that raised."""
    samples = engine.take(tickets)
    for error in {id(s.completion.error): s.completion.error for s in samples if s.completion.error}.values():
        warnings.warn(f"on_tokens or an encoder raised {error!r}; the samples of its prompt were ended", stacklevel=3)
    warn_of_length(samples)
    log_programs(engine.stats)
    return make_result(engine.model, samples, engine.stats, is_traced)


def log_programs(stats: RunStats) -> None:
    """Says how long programs compiled, and which kernels they hold."""
    kernels = ", ".join(f"{name} by {chosen}" for name, chosen in stats.kernels.items())
    LOGGER.info("compiled in %.1f s; kernels: %s", stats.compile_seconds, kernels)


def warn_of_length(samples: Sequence[Sample]) -> None:
    """Warns where most samples were cut by their limit, unless nothing could have ended them earlier."""
    may_stop = [sample for sample in samples if sample.request.may_stop]
    limits = [sample.request.max_new_tokens for sample in may_stop if sample.completion.finish_reason == "length"]
    if 2 * len(limits) > len(may_stop):
        LOGGER.info("%d of %d samples were cut after %d tokens", len(limits), len(samples), max(limits))
        is_open = any(sample.request.has_open_limit for sample in may_stop)
        limit, remedy = (
            (
                "the default limit (what positions and memory leave, up to 32,768 tokens)",
                "Give max_new_tokens, or a policy with a budget",
            )
            if is_open
            else ("max_new_tokens", "Raise it for whole answers")
        )
        warnings.warn(  # without figures, so that Python shows it once
            f"More than half of the samples were cut by {limit} before the model ended them. {remedy}.", stacklevel=4
        )


def engine_for(model: Model, requests: Sequence[Sequence[Request]], options: EngineOptions) -> Engine:
    """An engine sized for these requests, grouped by prompt; sizes that `options` give are kept.

    Weights are placed on their mesh first, because the pool gets what they leave free on each of its devices.
    """
    mesh = mesh_for(options.mesh, model.params)
    if mesh is not None:
        options = dataclasses.replace(options, mesh=mesh)
        model = dataclasses.replace(model, params=shard(model.params, mesh))
    num_shards = num_pools(mesh)
    params, n, page_size = model.params, len(requests[0]), page_size_for(model.params, options.page_size, options.kv_format)
    policies = [group[0].policy for group in requests]
    every = [request for group in lowered_to_memory(model, requests, options) for request in group]
    num_rows = options.max_running or min(1 << (len(every) - 1).bit_length(), DEFAULT_RUNNING)
    max_slots = options.max_slots or round_up(max(most_slots(params, request) for request in every))
    num_pages = options.num_pages
    if options.kv_memory is None and num_pages is None:
        num_pages = default_num_pages(params, every, n, num_rows, max_slots, page_size, num_shards)
        has_bounds = any(policy.read is not None for policy in policies)
        bytes_per_page = page_bytes(params, page_size, has_bounds, options.kv_format)
        num_pages = cap_to_free(params, num_pages, bytes_per_page, num_shards)
    return Engine(
        model,
        options,
        max_running=num_rows,
        max_slots=max_slots,
        num_pages=num_pages,
        policies=policies,
        max_stop_ids=max(options.max_stop_ids, *(len(request.stop_ids) for request in every)),
    )


def lowered_to_memory(model: Model, requests: Sequence[Sequence[Request]], options: EngineOptions) -> list[list[Request]]:
    """Requests whose limit of new tokens was left open, with no more than one row of the pool, or of the free memory, holds."""
    params, page_size, config = model.params, page_size_for(model.params, options.page_size, options.kv_format), model.config
    if not any(group[0].has_open_limit for group in requests):
        return [list(group) for group in requests]
    num_shards = num_pools(options.mesh)
    has_bounds = any(group[0].policy.read is not None for group in requests)
    bytes_per_page = page_bytes(params, page_size, has_bounds, options.kv_format)
    num_pages = options.num_pages
    if num_pages is None:
        num_bytes = options.kv_memory if isinstance(options.kv_memory, int) else free_pool_bytes(params, num_shards)
        num_pages = coarse(max(1, num_bytes // bytes_per_page))
    sizes = {"max_slots": options.max_slots or config.max_positions, "num_pages": num_pages, "page_size": page_size}
    sizes["num_shards"] = num_shards
    found: dict[tuple[int, Policy], int] = {}  # equal prompts' lengths and policies are looked up once
    for group in requests:
        key = len(group[0].prompt), group[0].policy
        if key not in found:
            found[key] = lowered(params, group[0], **sizes).max_new_tokens
    return [
        [
            dataclasses.replace(one, max_new_tokens=found[len(one.prompt), one.policy]) if one.has_open_limit else one
            for one in group
        ]
        for group in requests
    ]


def default_num_pages(
    params: Params, requests: Sequence[Request], n: int, num_rows: int, max_slots: int, page_size: int, num_shards: int
) -> int:
    """Pages for full rows, and for the prompts that running samples may share.

    The number does not depend on whether prompts are equal, nor on their lengths up to `PROMPT_ROOM` slots: the pool's size is
    a compiled shape, and other prompts must compile nothing.
    """
    # Unequal heads may round up more often.
    widest_row = max(most_pages(params, request, page_size, num_shards) for request in requests)
    rows = num_rows * max(widest_row, num_row_pages(params, max_slots, page_size))
    if len(requests) == 1:
        return rows
    longest = max(int(request.first_slots(1).max()) for request in requests)
    prefix = num_row_pages(params, min(max_slots, max(PROMPT_ROOM, round_up(longest))), page_size)
    return rows + (-(-num_rows // max(n, 2)) + 1) * prefix


@contextlib.contextmanager
def progress_bar(num_samples: int, progress: bool | None, title: str = "generate") -> Iterator[Callable[[list[Event]], None]]:
    """A bar of finished samples, with tokens a second; with `progress=None`, only the main thread shows one.

    Its clock starts after the first turn, in which the programs are compiled.
    """
    from tqdm.auto import tqdm

    is_main = threading.current_thread() is threading.main_thread()
    disable = not progress if progress is not None else (None if is_main else True)
    began = drawn = 0.0
    num_tokens = 0
    with tqdm(total=num_samples, unit="sample", desc=f"{title}: compiling", disable=disable, leave=False) as bar:

        def show(events: list[Event]) -> None:
            nonlocal began, drawn, num_tokens
            now = time.perf_counter()
            if began:
                num_tokens += sum(len(event.tokens) for event in events)
                bar.set_postfix_str(f"{num_tokens / max(now - began, 1e-9):,.0f} tokens/s", refresh=False)
            else:
                began = now
                bar.set_description(title, refresh=False)
                bar.reset(num_samples)
            bar.update(sum(bool(event.finish_reason) for event in events))
            if now - drawn > DRAW_SECONDS and not bar.disable:
                drawn = now
                bar.refresh()

        yield show
