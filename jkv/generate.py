"""`jkv.generate`: prompts in, completions out; a thin front of the engine that sizes it for one call."""

import collections
import contextlib
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jkv.cache import DEFAULT_PAGE_SIZE
from jkv.checks import check_counts, typed
from jkv.engine.engine import Engine
from jkv.engine.memory import at_most_free, most_pages, num_row_pages, page_bytes, widest
from jkv.engine.requests import Request, check_model, check_sampling, encode_prompts, make_request, spread_policies
from jkv.engine.results import Event, Result, make_result
from jkv.model.params import Model, Params
from jkv.model.sampling import Sampling, request_id
from jkv.policies import Policy
from jkv.replay.score import round_up

PROMPT_ROOM = 256  # slots
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
    max_running: int | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
    kv_memory: int | str | None = None,
    num_pages: int | None = None,
    order: str = "arrival",
    chunk: int = 16,
    on_tokens: Callable[[Event], None] | None = None,
    return_trace: bool = False,
    progress: bool | None = None,
) -> Result:
    """Completions of one prompt or a list of them, decoded from a paged cache that `policy` keeps small.

    Args:
      model_or_params: what `jkv.load` returns; or bare `Params`, with token ids as prompts.
      prompt_or_prompts: a string or a sequence of token ids, or a list of either.
      policy: one, or one for each prompt (`jkv.r_kv(budget=256)`); None keeps the full cache.
      sampling: temperature, top-p, top-k, seed; None is greedy.
      max_new_tokens: the most tokens of a completion; None is 1,024 or what the model's positions leave.
      n: samples of each prompt.
      stop_ids: tokens that end a completion, in place of the model's own; `()` never stops.
      stop_strings: texts that end a completion (checked once a chunk of up to 16 tokens, then cut exactly).
      max_running: rows decoded together, refilled as they finish; None takes as many as there are samples, up to 32.
      page_size: slots of a page.
      kv_memory: bytes of the pool, or "auto" for what the device has free; None takes what the rows need. With less, fewer
        rows run at a time, and samples without a bounded policy may be put aside to host memory meanwhile.
      num_pages: pages of the pool, in place of bytes.
      order: whom to admit first: "arrival", or "longest" (prompt and limit), which shortens the tail of a batch.
      chunk: decode steps between two looks of the host, at most: 16, 8, 4, 2 or 1.
      on_tokens: hears a `jkv.Event` for each sample and chunk (`event.ticket` is the prompt's index). If it raises, that
        prompt's samples end with the reason "error", a warning says why, and the others go on.
      return_trace: whether to record the attention columns, for exact replay with `jkv.score`.
      progress: whether to show a bar; None shows it in a terminal or notebook.

    Raises:
      ValueError: bad input, told before anything compiles.
    """
    model = check_model(model_or_params)
    check_counts(n=n, max_new_tokens=max_new_tokens, max_running=max_running, page_size=page_size)
    prompts = encode_prompts(model, prompt_or_prompts)
    requests = make_requests(
        model,
        prompts,
        spread_policies(policy, len(prompts)),
        check_sampling(sampling),
        n,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
    )
    engine = engine_for(
        model,
        requests,
        max_running=max_running,
        page_size=page_size,
        kv_memory=kv_memory,
        num_pages=num_pages,
        chunk=chunk,
        order=order,
        return_trace=return_trace,
    )
    tickets = [engine.submit_requests(group, on_tokens) for group in requests]
    with progress_bar(sum(request.max_new_tokens for group in requests for request in group), progress) as on_events:
        engine.run(on_events)
    samples = engine.take(tickets)
    for error in {id(s.completion.error): s.completion.error for s in samples if s.completion.error}.values():
        warnings.warn(f"on_tokens or an encoder raised {error!r}; the samples of its prompt were ended", stacklevel=2)
    return make_result(model, samples, engine.stats, return_trace)


def make_requests(
    model: Model,
    prompts: Sequence[np.ndarray],
    policies: Sequence[Policy],
    sampling: Sampling,
    n: int,
    *,
    max_new_tokens: int | None,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    first_sample: int = 0,
) -> list[list[Request]]:
    """The n requests of each prompt, checked. The j-th equal prompt goes on with the sample index; all have one seed.

    Raises:
      ValueError: a request that the model cannot serve, or sample indices beyond 32 bits.
    """
    if not 0 <= typed("first_sample", first_sample, int) <= 2**32 - n * len(prompts):
        raise ValueError(f"first_sample must lie in [0, 2**32), with the samples that follow; got {first_sample}.")
    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
    seen: collections.Counter[int] = collections.Counter()
    requests = []
    for i, (prompt, policy) in enumerate(zip(prompts, policies, strict=True)):
        identity = request_id(prompt)
        requests.append(
            [
                make_request(
                    model,
                    prompt,
                    policy=policy,
                    sampling=sampling,
                    seed=seed,
                    identity=identity,
                    sample=first_sample + seen[identity] + sample,
                    max_new_tokens=max_new_tokens,
                    stop_ids=stop_ids,
                    stop_strings=stop_strings,
                    index=i,
                )
                for sample in range(n)
            ]
        )
        seen[identity] += n
    return requests


def engine_for(
    model: Model,
    requests: Sequence[Sequence[Request]],
    *,
    max_running: int | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
    kv_memory: int | str | None = None,
    num_pages: int | None = None,
    max_stop_ids: int = 8,
    **options: Any,
) -> Engine:
    """An engine sized for these requests, the samples of each prompt in a group; `options` are the engine's own."""
    params, every, n = model.params, [request for group in requests for request in group], len(requests[0])
    policies = [group[0].policy for group in requests]
    num_rows = max_running or min(1 << (len(every) - 1).bit_length(), DEFAULT_RUNNING)
    max_slots = round_up(max(widest(params, request) for request in every))
    if kv_memory is None and num_pages is None:
        num_pages = default_num_pages(params, every, n, num_rows, max_slots, page_size)
        has_bounds = any(policy.read is not None for policy in policies)
        num_pages = at_most_free(params, num_pages, page_bytes(params, page_size, has_bounds))
    return Engine(
        model,
        max_running=num_rows,
        max_slots=max_slots,
        page_size=page_size,
        kv_memory=kv_memory,
        num_pages=num_pages,
        policies=policies,
        max_stop_ids=max(max_stop_ids, *(len(request.stop_ids) for request in every)),
        **options,
    )


def default_num_pages(
    params: Params, requests: Sequence[Request], n: int, num_rows: int, max_slots: int, page_size: int
) -> int:
    """Pages for full rows, and for the prompts that samples may share at a time.

    These have room whether or not prompts are equal, and the same for prompts of up to `PROMPT_ROOM` slots: the pool's size
    is a shape, and what prompts say must compile nothing.
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
    """A bar of generated tokens; where nobody says, only the main thread shows one."""
    from tqdm.auto import tqdm

    is_main = threading.current_thread() is threading.main_thread()
    disable = not progress if progress is not None else (None if is_main else True)
    with tqdm(total=total, unit="tok", desc=title, disable=disable, leave=False) as bar:
        yield lambda events: bar.update(sum(len(event.tokens) for event in events)) and None
