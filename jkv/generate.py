"""`jkv.generate`: prompts in, completions out, from an engine that is sized for the call."""

import contextlib
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jkv.checkpoints.adapters import Adapter, load_adapter
from jkv.checks import described
from jkv.engine.backend import Backend
from jkv.engine.engine import Engine
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.options import EngineOptions
from jkv.engine.outputs import Event
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, check_model, make_requests
from jkv.engine.results import Result, make_result
from jkv.engine.samples import Sample
from jkv.engine.sizing import sized
from jkv.engine.stats import RunStats
from jkv.errors import InputError
from jkv.eviction import Policy
from jkv.forms import Form
from jkv.model.params import Model, Params
from jkv.model.sampling import SAMPLING_FIELDS, Sampling
from jkv.progress import progress_bar
from jkv.replicas.replicas import Replicas
from jkv.replicas.threads import at_place, places_of, replica_mesh

LOGGER = logging.getLogger("jkv")


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
    parse_special: bool = False,
    form: Form | None = None,
    adapter: Adapter | None = None,
    prompt_mask: Any = None,
    on_tokens: Callable[[Event], None] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Completions of one prompt or a list of them, decoded from a paged cache that `policy` keeps small.

    Args:
      model_or_params: what `jkv.load` returns; or bare `Params`, with token ids as prompts.
      prompt_or_prompts: a string, a conversation (a list of messages such as `{"role": "user", "content": "..."}`, which the
        tokenizer's chat template turns into text), or a sequence of token ids; or a list of these; or what a tokenizer of
        Hugging Face returns for texts.
      policy, sampling, max_new_tokens, n, stop_ids, stop_strings, forced_tokens, prompt_piece, parse_special, form: see
        `jkv.RequestOptions`.
      adapter: a low-rank adapter that all prompts use, in the forms of `jkv.load_adapter`: a folder of peft, or weights that
        have one. An engine holds several, for each request to choose from.
      prompt_mask: of padded rows of token ids, on either side: 1 for each token and 0 for padding, as a tokenizer's
        `attention_mask`. Rows that look padded are refused without it.
      on_tokens: receives a `jkv.Event` for each sample and chunk (`event.ticket` is the prompt's index), or on replicas for
        each sample at its end. If it raises, that prompt's samples end with the reason "error", a warning gives the exception,
        and the others continue.
      progress: whether to show a bar; None shows it in a terminal or notebook.
      settings: settings of the engine by name, such as `max_running`, `page_size`, `kv_memory`, `mesh` and `return_trace`: see
        `jkv.EngineOptions`. Each call moves weights that are not on its mesh; `jkv.load(..., mesh=...)` reads them there.
        Without `sampling`, also the fields of `jkv.Sampling`, such as `temperature=0.6, top_p=0.95, seed=0`, which change the
        model's own sampling.

    Ctrl-C, pressed any number of times, ends the call after the turn in progress. The result then has all tokens so far, and
    unfinished samples have the reason "cancelled".

    Raises:
      ValueError: bad input, refused before anything compiles.
      TypeError: an unknown argument; the known ones are listed.
    """
    model, known = check_model(model_or_params), [*inspect.signature(generate).parameters, *SAMPLING_FIELDS]
    model = model if adapter is None else load_adapter(model, adapter)
    sampling, options = sampling_of(model, sampling, settings), EngineOptions().changed(settings, known)
    request_options = RequestOptions(
        policy=policy,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        n=n,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        forced_tokens=forced_tokens,
        prompt_piece=prompt_piece,
        parse_special=parse_special,
        form=form,
    )
    prompts = encode_prompts(model, prompt_or_prompts, request_options.parse_special, prompt_mask)
    requests = make_requests(model, prompts, request_options, kv_format=options.kv_format)
    with engine_for(model, requests, options) as engine, deferred_interrupts(ends_here=True):
        tickets = [engine.submit_requests(group, on_tokens) for group in requests]
        with progress_bar(sum(map(len, requests)), progress) as on_events:
            engine.run(on_events)
        return result_of(engine, tickets, options.return_trace)


def result_of(engine: Backend, tickets: Sequence[int], is_traced: bool) -> Result:
    """The result of finished requests; warns of what has failed."""
    samples = engine.take(tickets)
    result = make_result(engine.model, samples, engine.stats, is_traced)
    failed = [i for i, sample in enumerate(samples) if sample.completion.error]
    for error in {id(samples[i].completion.error): samples[i].completion.error for i in failed}.values():
        warnings.warn(f"{described(error)} has ended samples with the reason 'error', of {failed}", stacklevel=3)
    warn_of_length(samples)
    log_programs(engine.stats)
    return result


def log_programs(stats: RunStats) -> None:
    """Says how long programs compiled, and which kernels they hold."""
    kernels = ", ".join(f"{name} by {chosen}" for name, chosen in stats.kernels.items())
    LOGGER.info("compiled in %.1f s; kernels: %s", stats.compile_seconds, kernels)


def warn_of_length(samples: Sequence[Sample]) -> None:
    """Logs that most samples which something could have ended were cut by a limit, and warns if it was not the caller's."""
    may_stop = [sample for sample in samples if sample.request.may_stop]
    limits = [sample.request.max_new_tokens for sample in may_stop if sample.completion.finish_reason == "length"]
    if 2 * len(limits) > len(may_stop):
        LOGGER.info("%d of %d samples were cut after %d tokens", len(limits), len(samples), max(limits))
        if any(sample.request.has_open_limit for sample in may_stop):
            warnings.warn(  # without figures, so that Python shows it once
                "More than half of the samples were cut by the default limit (what positions and memory leave, up to 32,768 "
                "tokens) before the model ended them. Give max_new_tokens, or a policy with a budget.",
                stacklevel=4,
            )


def sampling_of(model: Model, sampling: Sampling | None, settings: dict[str, Any]) -> Sampling | None:
    """The sampling with the fields of `jkv.Sampling` among the settings, which are taken out of them.

    Raises:
      InputError: both a sampling and fields; or fields that cut draws, and nothing says that tokens are drawn.
    """
    given = {name: settings.pop(name) for name in SAMPLING_FIELDS if name in settings}
    if not given:
        return sampling
    names = ", ".join(given)
    if sampling is not None:
        rule = "sampling and its fields exclude each other; got both, with {names}. Write sampling=jkv.Sampling(...) with all."
        raise InputError(rule, field=next(iter(given)), code="conflict", names=names)
    own = model.sampling or Sampling(temperature=0)
    if own.temperature == 0 and "temperature" not in given and {"top_p", "top_k", "min_p"} & given.keys():
        rule = "{names} would cut draws, and this model is decoded greedily unless told otherwise. Give temperature too."
        raise InputError(rule, field=next(iter(given)), code="missing", names=names)
    return dataclasses.replace(own, **given)


@contextlib.contextmanager
def engine_for(model: Model, requests: Sequence[Sequence[Request]], options: EngineOptions) -> Iterator[Backend]:
    """An engine for these requests, grouped by prompt, or replicas on a mesh with an axis "data", which end with the block."""
    engine = make_engine(model, requests, options)
    try:
        yield engine
    finally:
        engine.close()


def make_engine(model: Model, requests: Sequence[Sequence[Request]], options: EngineOptions) -> Backend:
    """An engine sized for these requests, grouped by prompt; on a mesh with an axis "data", one for each of its rows."""
    mesh = replica_mesh(options.mesh, model.params)
    if mesh is None:
        return Engine(*sized(model, options, requests))
    places = places_of(mesh, None)
    _, options = sized(*at_place(model, options, places[0]), requests, len(places))
    return Replicas(model, dataclasses.replace(options, mesh=None), mesh=mesh)
