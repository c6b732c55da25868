"""`jkv.generate`: prompts in, completions out; a thin front of the engine that checks, sizes the pool and tidies the result."""

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.engine import Completion, Engine, Request, chunk_of, num_reserved_pages, page_bytes
from jkv.params import Model, Params
from jkv.policies import POLICIES, Policy, full
from jkv.pool import num_pages_of
from jkv.sampling import Sampling, request_id
from jkv.score import Trace, round_up

DEFAULT_NEW_TOKENS = 1024
DEFAULT_PAGE_SIZE = 16
DEFAULT_RUNNING = 32


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call held and took, measured on the pool itself. Bytes and seconds."""

    prompt_tokens: int
    generated_tokens: int
    evicted: float  # tokens dropped from the cache, averaged over layers and KV heads, summed over samples
    compactions: int  # summed over samples
    kv_bytes: int  # held, mean over decode chunks
    peak_kv_bytes: int
    dense_kv_bytes: int  # what full caches of the same rows would have held at their peak
    tokens_per_second: float  # generated tokens by decode seconds
    decode_seconds: float  # compaction included, compile time not
    prefill_seconds: float
    compile_seconds: float
    prefills: int
    seed: int  # of the random draws: given, or drawn


@dataclasses.dataclass(frozen=True)
class Result:
    """Completions, prompt-major: the n samples of the first prompt, then of the second, also for one prompt.

    Attributes:
      text: completions without end tokens or anything from a stop string on; None without a tokenizer.
      tokens: `[n, T]` int32, end tokens included, right-padded with 0.
      lengths: `[n]` tokens of each completion.
      logprobs: `[n, T]` float32, of each token under the exact distribution it was drawn from (temperature 0: temperature
        1's); 0 in padding.
      finish_reason: of each sample: "eos" (an end token of the model), "stop" (a stop id or string of the caller), "length", or
        "nan" (the model gave no finite probabilities).
      stats: one record for the call.
      trace: attention columns for `jkv.score`, when asked for.
      prompts: the token ids before each completion.
      sampling: the settings of each sample.
    """

    text: list[str] | None
    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    finish_reason: list[str]
    stats: Stats
    trace: Trace | None
    prompts: list[np.ndarray]
    sampling: list[Sampling]


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
    kv_memory: int | None = None,
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
      max_running: rows decoded together; None takes as many as there are samples, up to 32.
      page_size: slots of a page.
      kv_memory: bytes of the pool; None takes what the rows need.
      return_trace: whether to record the attention columns, for exact replay with `jkv.score`.
      progress: whether to show a bar; None shows it in a terminal or notebook.

    Raises:
      ValueError: bad input, told before anything compiles.
    """
    model = model_or_params if isinstance(model_or_params, Model) else Model(model_or_params)
    params, config = model.params, model.params.config
    check_counts(n=n, max_new_tokens=max_new_tokens, max_running=max_running, page_size=page_size, kv_memory=kv_memory)
    sampling = Sampling(temperature=0.0) if sampling is None else sampling
    prompts = encode_prompts(model, prompt_or_prompts)
    policies = spread_policies(policy, len(prompts))
    check_weights(params)
    ends = config.end_ids if stop_ids is None else check_stop_ids(stop_ids, config.vocab_size)
    stop_at = find_stop(model, stop_strings)
    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
    seen: dict[int, int] = {}  # the j-th equal prompt goes on with the sample index
    requests = []
    for i, (prompt, chosen) in enumerate(zip(prompts, policies, strict=True)):
        limit = new_token_limit(i, len(prompt), max_new_tokens, config.max_positions)
        check_prompt_fits(chosen, i, len(prompt))
        for _ in range(n):
            sample = seen.get(request_id(prompt), 0)
            seen[request_id(prompt)] = sample + 1
            requests.append(Request(prompt, chosen, sampling, seed, limit, ends, sample, stop_at))

    engine = make_engine(params, requests, max_running, page_size, kv_memory, return_trace)
    with progress_bar(sum(request.max_new_tokens for request in requests), progress) as on_tokens:
        completions = engine.run(requests, on_tokens)
    return make_result(model, requests, completions, engine, seed, stop_strings)


def check_counts(**values: int | None) -> None:
    """Refuses counts below one."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")


def encode_prompts(model: Model, prompt_or_prompts: Any) -> list[np.ndarray]:
    """Token ids of every prompt, checked."""
    prompts = [prompt_or_prompts] if isinstance(prompt_or_prompts, str) else list(prompt_or_prompts)
    if not prompts:
        raise ValueError("There must be at least one prompt, and a prompt at least one token; got none.")
    if not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0:  # a flat sequence of token ids
        prompts = [prompt_or_prompts]
    return [encode_prompt(model, i, prompt) for i, prompt in enumerate(prompts)]


def encode_prompt(model: Model, index: int, prompt: Any) -> np.ndarray:
    """One prompt's token ids."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError("A text prompt needs a model with a tokenizer; this one has none. Pass token ids.")
        prompt = model.tokenizer.encode(prompt)
    ids = np.asarray(prompt)
    if ids.size == 0:
        raise ValueError(f"A prompt must hold at least one token; prompt {index} is empty.")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"A prompt is a string or a flat sequence of token ids; prompt {index} is {ids.dtype}{list(ids.shape)}."
        )
    vocab_size = model.config.vocab_size
    if ids.min() < 0 or ids.max() >= vocab_size:
        worst = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"Token ids must lie in [0, {vocab_size}); prompt {index} holds {worst}.")
    return ids.astype(np.int32)


def spread_policies(policy: Any, num_prompts: int) -> list[Policy]:
    """One policy for each prompt."""
    if policy is None:
        policy = full()
    policies: list[Any] = [policy] * num_prompts if isinstance(policy, Policy | str) else list(policy)
    if len(policies) != num_prompts:
        raise ValueError(f"policy is one, or one for each prompt; got {len(policies)} for {num_prompts} prompts.")
    for each in policies:
        if not isinstance(each, Policy):
            raise ValueError(
                f"policy must be made by a recipe such as jkv.r_kv(budget=256); known: {sorted(POLICIES)}; got {each!r}."
            )
    return policies


def check_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Stop ids that the model can produce."""
    for token in stop_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_ids must be token ids in [0, {vocab_size}); got {token}.")
    return tuple(int(token) for token in stop_ids)


def check_prompt_fits(policy: Policy, index: int, prompt_length: int) -> None:
    """Refuses a protected prompt that its budget cannot hold."""
    if policy.evict and policy.evict.protect_prompt and policy.budget is not None and prompt_length > policy.budget:
        raise ValueError(
            f"{policy.name} never drops the prompt, so its budget must hold it; prompt {index} has {prompt_length} tokens, "
            f"the budget is {policy.budget} slots. Raise the budget."
        )


def new_token_limit(index: int, prompt_length: int, asked: int | None, max_positions: int) -> int:
    """The most new tokens of a request."""
    left = max_positions - prompt_length
    if left < 1 or (asked or 1) > left:
        raise ValueError(
            f"Prompt and completion must fit the model's {max_positions} positions; prompt {index} has {prompt_length} tokens "
            f"and max_new_tokens is {asked or 'not given'}. Shorten the prompt or lower max_new_tokens."
        )
    return min(DEFAULT_NEW_TOKENS, left) if asked is None else asked


@jax.jit
def all_finite(params: Params) -> jax.Array:
    """Whether no weight is NaN or infinite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def check_weights(params: Params) -> None:
    """Refuses weights with NaN or infinity, naming the first."""
    if not bool(all_finite(params)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not bool(jnp.isfinite(leaf).all()):
                name = jax.tree_util.keystr(path)
                raise ValueError(f"Weights must be finite; params{name} holds NaN or infinity. Reload or retrain the model.")


def make_engine(
    params: Params,
    requests: Sequence[Request],
    max_running: int | None,
    page_size: int,
    kv_memory: int | None,
    is_traced: bool,
) -> Engine:
    """An engine whose rows, pages and tables fit the requests; shapes are rounded so that few of them ever compile."""
    num_rows = max_running or min(1 << (len(requests) - 1).bit_length(), DEFAULT_RUNNING)
    max_slots = max(request.max_slots for request in requests)
    max_pages = num_pages_of(round_up(max_slots), page_size)
    num_pages = num_rows * num_reserved_pages(params, max_pages * page_size, page_size)
    if kv_memory is not None:
        num_pages = min(num_pages, kv_memory // page_bytes(params, page_size))
        needed = num_reserved_pages(params, max_slots, page_size)
        if needed > num_pages:
            heads = params.config.num_layers * params.config.num_kv_heads
            raise ValueError(
                f"The pool must hold the largest request: {max_slots} slots = {num_pages_of(max_slots, page_size)} pages of "
                f"{page_size} for each of {heads} layer-heads = {needed} pages of {page_bytes(params, page_size)} bytes = "
                f"{needed * page_bytes(params, page_size)} bytes; got kv_memory={kv_memory}. Raise kv_memory, or lower the "
                "budget, max_new_tokens or page_size."
            )
    policies = [request.policy for request in requests]
    return Engine(
        params,
        num_rows=num_rows,
        num_pages=num_pages,
        max_pages=max_pages,
        page_size=page_size,
        window=max(policy.evict.window if policy.evict else 0 for policy in policies),
        max_stop_ids=max(1, *(len(request.stop_ids) for request in requests)),
        chunk=chunk_of(policies),
        truncates=any(request.sampling.truncates for request in requests),
        is_traced=is_traced,
    )


def find_stop(model: Model, stop_strings: Sequence[str]) -> Callable[[list[int]], int | None] | None:
    """A function from tokens so far to how many of them end with a stop string, or None."""
    if not stop_strings:
        return None
    if model.tokenizer is None:
        raise ValueError("stop_strings need a model with a tokenizer; this one has none. Use stop_ids.")
    if isinstance(stop_strings, str) or not all(stop_strings):
        raise ValueError(f"stop_strings is a sequence of texts that are not empty; got {stop_strings!r}.")
    decode = model.tokenizer.decode

    def stop_at(tokens: list[int]) -> int | None:
        def is_stopped(count: int) -> bool:
            return any(stop in decode(tokens[:count]) for stop in stop_strings)

        if not is_stopped(len(tokens)):
            return None
        return next(count for count in range(1, len(tokens) + 1) if is_stopped(count))

    return stop_at


@contextlib.contextmanager
def progress_bar(total: int, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """A bar of generated tokens."""
    from tqdm.auto import tqdm

    disable = None if progress is None else not progress
    with tqdm(total=total, unit="tok", desc="generate", disable=disable, leave=False) as bar:
        yield lambda made: bar.update(made) and None


def make_result(
    model: Model,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    engine: Engine,
    seed: int,
    stop_strings: Sequence[str],
) -> Result:
    """Padded arrays, texts, statistics and the trace."""
    lengths = np.array([len(c.tokens) for c in completions], np.int32)
    tokens = np.zeros((len(completions), lengths.max()), np.int32)
    log_probs = np.zeros(tokens.shape, np.float32)
    for i, completion in enumerate(completions):
        tokens[i, : lengths[i]], log_probs[i, : lengths[i]] = completion.tokens, completion.log_probs
    text = None
    if model.tokenizer is not None:
        text = [decode_text(model, completion.tokens, stop_strings) for completion in completions]
    run = engine.stats
    stats = Stats(
        prompt_tokens=sum(len(request.prompt) for request in requests),
        generated_tokens=int(lengths.sum()),
        evicted=sum(c.evicted for c in completions),
        compactions=sum(c.compactions for c in completions),
        kv_bytes=round(run.kv_bytes),
        peak_kv_bytes=run.peak_kv_bytes,
        dense_kv_bytes=run.dense_kv_bytes,
        tokens_per_second=int(lengths.sum()) / max(run.decode_seconds, 1e-9),
        decode_seconds=run.decode_seconds,
        prefill_seconds=run.prefill_seconds,
        compile_seconds=run.compile_seconds,
        prefills=run.prefills,
        seed=seed,
    )
    return Result(
        text=text,
        tokens=tokens,
        lengths=lengths,
        logprobs=log_probs,
        finish_reason=[completion.finish_reason for completion in completions],
        stats=stats,
        trace=make_trace(completions) if engine.is_traced else None,
        prompts=[request.prompt for request in requests],
        sampling=[request.sampling for request in requests],
    )


def decode_text(model: Model, tokens: list[int], stop_strings: Sequence[str]) -> str:
    """A completion's text, cut before the first stop string."""
    text = model.tokenizer.decode(tokens, skip_special_tokens=True)
    return text[: min([text.find(stop) for stop in stop_strings if stop in text], default=len(text))]


def make_trace(completions: Sequence[Completion]) -> Trace:
    """The columns of every sample: each token's own, ended where it was evicted."""
    ends = [completion.ends for completion in completions if completion.ends is not None]
    num_columns = max(end.shape[-1] for end in ends)
    padded = [np.pad(end, [(0, 0), (0, 0), (0, num_columns - end.shape[-1])]) for end in ends]
    end = np.stack(padded)
    own = np.broadcast_to(np.arange(num_columns, dtype=np.int32), end.shape)  # a view: costs no memory
    return Trace(own, own, end)
