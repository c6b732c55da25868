"""Requests, one per sample, made and checked before anything compiles."""

import collections
import dataclasses
import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.slot_size import slot_size_of
from jkv.checkpoints.state_dicts import params_from
from jkv.checks import check_between, check_counts, check_least, check_length, did_you_mean, out_of_range, shown, typed
from jkv.engine.form_checks import check_form, start_of
from jkv.engine.prompts import check_ids, num_elements, too_long
from jkv.errors import InputError, refused
from jkv.eviction import Policy
from jkv.eviction.byte_budget import check_sealing, in_slots
from jkv.eviction.policy import compacted, until_token
from jkv.forms import Form
from jkv.limits import MOST_SAMPLES
from jkv.model.joined import GROUPS, joined_of
from jkv.model.params import Model, ModelConfig, Params
from jkv.model.sampling import MOST_TOP, Sampling, request_id
from jkv.model.weights import all_finite, check_same, committed, joined_as
from jkv.policies import POLICIES, full
from jkv.reasoning.sentences import Sentences
from pallas_kernels.quantised import Format

MOST_NEW_TOKENS = 32_768  # of a completion whose limit is left open: as far as makers of reasoning models run theirs
MOST_STOPS = 1_000  # stop strings of a request
LONGEST_STOP = 1_000  # characters of each
MOST_BIAS = 100  # OpenAI's and vLLM's limit
MOST_BAD_WORDS, LONGEST_BAD_WORD = 32, 8  # sequences of a request, and tokens of each
MOST_ENDS = 32  # tokens that end a request with min_tokens


@dataclasses.dataclass(frozen=True)
class Request:
    """One sample to generate; token ids, checked by `make_requests`.

    Attributes:
      prompt: `[T]` int32.
      policy: how its cache stays small.
      sampling: how its tokens are drawn.
      seed: the seed of its draws: the sampling's, or a fresh one.
      identity: the prompt's number in the random keys: the caller's, or a hash of its tokens.
      sample: index among the samples of equal prompts.
      max_new_tokens: the most tokens of the completion.
      has_open_limit: whether the caller gave no such limit, so that an engine may lower it.
      until: the token after which its policy evicts no more; None if there is none.
      forced: the first tokens of its completion, `[F]` int32, taken in place of draws.
      stop_ids: tokens that end it.
      stop_strings: texts that end it.
      cache_salt: requests of another salt share neither its prefill nor its pages in the prefix cache.
      adapter: the name of its adapter; empty for none.
      keep: whether its row is kept when it finishes, for a next turn (`jkv.engine.kept_rows`).
      num_kept: leading tokens of the prompt whose keys and values its kept row has already; 0 for a first turn.
      first: tokens of the first turn's prompt, where this is a later turn, or of the prompt's first piece, where it enters in
        pieces; else 0.
      model_logprobs: whether log-probabilities under the model's own distribution are returned, too.
      top_logprobs: how many most likely tokens of each place are returned.
      logit_bias: tokens, and what is added to their logits.
      allowed_ids: the only tokens that may be drawn; empty for all.
      min_tokens: tokens before any that ends it may be drawn.
      bad_words: sequences of tokens that its completion may not hold.
      form: what its answer must be.
      form_start: how its completion begins: `jkv.forms.tables.ANSWERS`, or `MAY_THINK`, or `THINKS`.
      form_on_host: whether the host follows its form, so that chunks have one step while it runs.
      client: who asks; clients take turns (`jkv.engine.rounds`), and all without a name are one.
      priority: requests with a lower number are admitted first.
    """

    prompt: np.ndarray
    policy: Policy
    sampling: Sampling
    seed: int
    identity: int
    sample: int
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    has_open_limit: bool = False
    until: int | None = None
    forced: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    cache_salt: str = ""
    adapter: str = ""
    keep: bool = False
    num_kept: int = 0
    first: int = 0
    model_logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    form: Form | None = None
    form_start: int = 0
    form_on_host: bool = False
    client: str = ""
    priority: int = 0

    @property
    def has_biases(self) -> bool:
        """Whether it changes the logits of single tokens."""
        return bool(self.logit_bias or self.allowed_ids or self.min_tokens)

    @property
    def first_prompt(self) -> int:
        """Tokens of the prompt of its first turn, or of its first piece: what schedules and protection count as the prompt."""
        return self.first or len(self.prompt)

    @property
    def num_before(self) -> int:
        """Tokens after these and before this completion; schedules count them as generated."""
        return len(self.prompt) - self.first_prompt

    @property
    def most_generated(self) -> int:
        """The most tokens after the first turn's prompt."""
        return self.num_before + self.max_new_tokens

    @property
    def most_tokens(self) -> int:
        """The most tokens of prompt and completion together."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def may_stop(self) -> bool:
        """Whether anything but its limit may end it."""
        return bool(self.stop_ids or self.stop_strings) and len(self.forced) < self.max_new_tokens

    def first_slots(self, num_layers: int) -> np.ndarray:
        """`Row.filled` when the first token is drawn, or the prompt's second piece enters."""
        return compacted(self.policy, self.policy.uncut(self.first_prompt, num_layers), self.first_prompt, 0)

    @property
    def stays_whole(self) -> bool:
        """Whether its policy cannot compact the prompt before the first token is drawn."""
        target = self.policy.target(len(self.prompt), 0)
        return not self.num_before and (target is None or (target >= len(self.prompt) and self.policy.is_even))

    @property
    def prefix(self) -> tuple[str, bytes, str, int, Policy | Sentences | None]:
        """A key; requests with equal keys can share a prefill. It holds the adapter, the prompt, the salt, the size of the
        first piece, the rule that finds sentences (if any), and the whole policy if it may compact the prompt.
        """
        rules = self.policy.sentences if self.stays_whole else self.policy
        return self.adapter, self.prompt.tobytes(), self.cache_salt, self.first, rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How prompts are completed: the arguments for one request, as `generate`, `Engine.submit` and `Rollout` take them.

    Attributes:
      policy: how the cache stays small, such as `jkv.r_kv(budget=256)`; None keeps the full cache. For several prompts, one
        policy or a list of one for each.
      sampling: temperature, top-p, top-k, min-p, penalties, seed; None is what the model's generation_config.json says, and
        greedy where it says nothing (for `Rollout`, temperature 1).
      max_new_tokens: the most tokens of a completion; None is what the model's positions leave, up to 32,768, and for a policy
        without a fixed budget no more than the pool or the free memory holds (for `Rollout`, up to 1,024).
      n: samples of each prompt; a call may have 131,072 samples in all.
      stop_ids: tokens that end a completion, instead of the model's own; `()` never stops.
      stop_strings: texts that end a completion (checked after each chunk, then cut exactly); up to 1,000, of up to 1,000
        characters.
      first_sample: the index of a prompt's first sample in the random keys: n calls of one sample each, with ascending
        indices, draw the same tokens as one call of n samples.
      forced_tokens: the token ids that a completion begins with, in place of draws; for several prompts, one list for all or a
        list of one for each. Their log-probabilities show how well the model predicts any text with a small cache. They end no
        completion; `max_new_tokens=None` is their number, and `sampling=None` is greedy, with log-probabilities of
        temperature 1.
      cache_salt: requests share prefills and pages of the prefix cache only with requests of the same salt, such as one for
        each user. Whether a prompt was computed before then shows in no other user's times and counts. It changes no tokens.
      adapter: the name of a low-rank adapter that the engine holds (`Engine.add_adapter`); None for the model itself.
      prompt_piece: tokens of a prompt that are prefilled before it is compacted for the first time. What follows enters as a
        later turn of a conversation does, in pieces of at most the policy's interval, with a compaction where one is due. So a
        prompt of any length needs no more slots than the budget and an interval, or `prompt_piece`. The first piece is then
        what schedules and protection count as the prompt, and each sample prefills by itself. None prefills whole prompts and
        compacts them once, as the papers do; policies that evict nothing always do.
      parse_special: whether the text of a control token, such as `<|im_end|>`, is this token in a message, too. By default only
        the chat template's own text makes control tokens, so that no user's text ends a turn or begins one. Prompts that are a
        text, and not messages, always may have them.
      model_logprobs: whether the result also has each token's log-probability under the model's own distribution: at
        temperature 1, without penalties and cuts.
      top_logprobs: how many most likely tokens of each place the result also has, under the model's own distribution; up to 64.
      logit_bias: token ids, and what is added to their logits before anything else, in [-100, 100]. The log-probabilities of
        the draws are of the changed distribution; `jkv.score` knows neither these changes nor the following ones.
      allowed_token_ids: the only token ids that may be drawn; None for all.
      min_tokens: tokens before one that ends the completion may be drawn; stop texts may end it before.
      bad_words: sequences of token ids that the completion may not hold: the last token of each is not drawn after the others.
        Up to 32, of up to 8 tokens.
      form: what the answer must be, such as JSON of a schema: `jkv.forms.json`, `regex` or `choice`; None for any text. What
        the model thinks before the answer is free. The log-probabilities of the draws are of the tokens that the form allows.
      priority: as in vLLM: requests with a lower number are admitted first, and rows with a higher number are preempted first.
        It changes no tokens.

    Raises:
      ValueError: a setting of another type, or out of its range.
    """

    policy: Policy | Sequence[Policy] | None = None
    sampling: Sampling | None = None
    max_new_tokens: int | None = None
    n: int = 1
    stop_ids: Sequence[int] | None = None
    stop_strings: Sequence[str] = ()
    first_sample: int = 0
    forced_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None
    cache_salt: str = ""
    adapter: str | None = None
    prompt_piece: int | None = None
    parse_special: bool = False
    model_logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    bad_words: Sequence[Sequence[int]] = ()
    form: Form | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"n": int, "max_new_tokens": int | None, "first_sample": int, "cache_salt": str}
        kinds |= {"adapter": str | None, "prompt_piece": int | None, "parse_special": bool, "model_logprobs": bool}
        kinds |= {"top_logprobs": int, "min_tokens": int, "priority": int}
        for name, kind in kinds.items():  # Python's numbers: products of NumPy's small ones overflow.
            object.__setattr__(self, name, typed(name, getattr(self, name), kind))
        check_counts(n=self.n, max_new_tokens=self.max_new_tokens, prompt_piece=self.prompt_piece)
        check_num_samples(self.n, 1)
        check_between(0, MOST_TOP, top_logprobs=self.top_logprobs)
        check_least(0, min_tokens=self.min_tokens)
        check_sampling(self.sampling)


def check_model(model_or_params: Any) -> Model:
    """A model whose weights are finite; bare `Params` have no tokenizer."""
    if not isinstance(model_or_params, Model | Params):
        is_name = isinstance(model_or_params, str | os.PathLike)
        remedy = "Write model = jkv.load(...), with a name or a folder, and pass model first." if is_name else "Load it first."
        rule = f"The model must be what jkv.load returns, or bare Params; got {shown(model_or_params)}. {remedy}"
        raise refused(rule, model="wrong_type")
    model = model_or_params if isinstance(model_or_params, Model) else Model(model_or_params)
    check_shape(model.config)
    check_weights(model.params)
    return model


def check_shape(config: ModelConfig) -> None:
    """Refuses a configuration that no program computes."""
    rotated = config.rotary_size or config.head_size
    if rotated % 2 or rotated > config.head_size:
        raise refused(
            f"RoPE rotates an even number of channels, at most the head's; got {rotated} of {config.head_size}. Correct "
            "head_size or rotary_size.",
            rotary_size="out_of_range",
        )
    for heads in (config.num_kv_heads, config.in_windows.num_kv_heads):
        if heads < 1 or config.num_query_heads % heads:
            got = f"{config.num_query_heads} and {heads}"
            rule = f"num_query_heads must be a multiple of num_kv_heads; got {got}. Correct either."
            raise refused(rule, num_kv_heads="out_of_range")


def check_sampling(sampling: Any) -> Sampling:
    """The sampling settings, checked; None is greedy."""
    if sampling is not None and not isinstance(sampling, Sampling):
        rule = "{field} must be a jkv.Sampling, such as jkv.Sampling(temperature=0.7); got {got}."
        raise InputError(rule, field="sampling", code="wrong_type", got=shown(sampling))
    return Sampling(temperature=0.0) if sampling is None else sampling


def make_requests(
    model: Model,
    prompts: Sequence[np.ndarray],
    options: RequestOptions,
    identity: int | None = None,
    kv_format: Format | None = None,
) -> list[list[Request]]:
    """The n requests of each prompt by `options`, checked against the model.

    Equal prompts continue one count of sample indices, and all requests have one seed. `identity` is the number of all prompts
    in the random keys; None is a hash of each prompt's tokens. `kv_format` is the pool's, for budgets in bytes.

    Raises:
      ValueError: a request that the model cannot serve, or sample indices or a number beyond 32 bits.
    """
    first, n, config = options.first_sample, options.n, model.config
    check_num_samples(n, len(prompts))
    if not 0 <= first <= 2**32 - n * len(prompts):
        raise out_of_range("first_sample", "lie in [0, 2**32), with the n samples that follow", first)
    if identity is not None and not 0 <= typed("request", identity, int) < 2**32:
        raise out_of_range("request", "lie in [0, 2**32), or be None for a hash of the prompt", identity)
    policies = spread_policies(options.policy, len(prompts), model.params, kv_format)
    forced = spread_forced(options, len(prompts), config.vocab_size)
    default = model.sampling if options.forced_tokens is None else None
    sampling = check_sampling(default if options.sampling is None else options.sampling)
    check_forcing(options, sampling)
    seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
    ends = config.end_ids if options.stop_ids is None else check_stop_ids(options.stop_ids, config.vocab_size)
    check_stop_strings(model, options.stop_strings)
    biases = biases_of(options, ends, config.vocab_size)
    form_on_host = check_form(model, options, ends, MOST_ENDS)
    seen: collections.Counter[int] = collections.Counter()
    requests = []
    for i, (prompt, policy) in enumerate(zip(prompts, policies, strict=True)):
        asked = len(forced[i]) or None if options.max_new_tokens is None else options.max_new_tokens
        limit = new_token_limit(i, len(prompt), asked, config.max_positions)
        if len(forced[i]) > limit:
            rule = "{field} must hold the forced tokens; got {count} of them for prompt {i}, and {field}={limit}. Raise it."
            count = len(forced[i])
            raise InputError(rule, field="max_new_tokens", code="does_not_fit", count=count, i=i, limit=limit)
        evicts = policy.evict is not None or policy.evicts_in_steps
        piece = min(len(prompt), options.prompt_piece or len(prompt)) if evicts else len(prompt)
        check_prompt_fits(policy, i, piece)
        prompt_id = request_id(prompt) if identity is None else identity
        samples = range(first + seen[prompt_id], first + seen[prompt_id] + n)
        common = (prompt, policy, sampling, seed, prompt_id)
        rest: Any = (limit, ends, tuple(options.stop_strings), asked is None, until_token(policy, model), forced[i])
        named: Any = {"cache_salt": options.cache_salt, "first": piece if piece < len(prompt) else 0}
        named |= {"adapter": options.adapter or "", "priority": options.priority}
        named |= {"model_logprobs": options.model_logprobs, "top_logprobs": options.top_logprobs} | biases
        named |= {"form": options.form, "form_start": 0 if options.form is None else start_of(model, prompt)}
        named |= {"form_on_host": form_on_host}
        if options.min_tokens > limit:
            rule = "{field} must be at most {max_new_tokens}, {limit} here; got {got}."
            raise InputError(rule, field="min_tokens", code="conflict", limit=limit, got=options.min_tokens)
        requests.append([Request(*common, sample, *rest, **named) for sample in samples])
        seen[prompt_id] += n
    return requests


def check_num_samples(n: int, num_prompts: int) -> None:
    """Refuses more samples than a call may have."""
    if n * num_prompts > MOST_SAMPLES:
        rule = "A call may have {most:,} samples, prompts times {field}; got {prompts:,} times {n}. Split the call."
        raise InputError(rule, field="n", code="out_of_range", most=MOST_SAMPLES, prompts=num_prompts, n=shown(n))


def spread_policies(
    policy: Any, num_prompts: int, params: Params | None = None, kv_format: Format | None = None
) -> list[Policy]:
    """One policy for each prompt; budgets in bytes become slots of the model, in pages of the format."""
    if policy is None:
        policy = full()
    is_list = isinstance(policy, Sequence) and not isinstance(policy, str)
    if is_list and num_elements(policy) != num_prompts:
        rule, got = "{field} must be one policy, or a list of one for each prompt; got {got} prompts.", num_elements(policy)
        raise InputError(rule, field="policy", code="conflict", got=f"{got} for {num_prompts}")
    policies: list[Any] = list(policy) if is_list else [policy] * num_prompts
    if params is not None:
        slot = slot_size_of(params, kv_format)
        policies = [in_slots(each, slot) for each in policies]
    for each in policies:
        if not isinstance(each, Policy):
            raise wrong_policy(each)
        check_sealing(each, kv_format)
    return policies


def wrong_policy(given: Any) -> InputError:
    """The error about what is no policy: a name, a recipe that was not called, a score, or anything else."""
    rule, near = "{field} must be made by a recipe such as jkv.r_kv(budget=256); known: {known}; got {got}.{near}", ""
    if isinstance(given, str):
        near = did_you_mean(f"jkv.{given}", [f"jkv.{name}" for name in POLICIES])
    elif callable(given):
        name = getattr(given, "__name__", type(given).__name__)
        rule = "{field} must be made by a recipe such as jkv.r_kv(budget=256); got {got}, which was not called.{near}"
        near = f" Call it, as in {name}(budget=256); of a score, jkv.evict_by({name}, budget=256) makes a policy."
    known = ", ".join(sorted(POLICIES))
    return InputError(rule, field="policy", code="wrong_type", known=known, got=shown(given), near=near)


def spread_forced(options: RequestOptions, num_prompts: int, vocab_size: int) -> list[np.ndarray]:
    """The forced tokens of each prompt."""
    given: Any = options.forced_tokens
    if given is None:
        return [np.zeros(0, np.int32)] * num_prompts
    is_each = isinstance(given, Sequence) and len(given) > 0 and all(np.ndim(tokens) == 1 for tokens in given)
    if is_each and len(given) != num_prompts:
        rule = "{field} must be token ids, or a list of them for each prompt; got {got} prompts."
        raise InputError(rule, field="forced_tokens", code="conflict", got=f"{len(given)} lists for {num_prompts}")
    each = given if is_each else [given] * num_prompts
    rule = "forced_tokens must be a flat list of token ids"
    return [check_ids(tokens, rule, f"that of prompt {i}", vocab_size, "forced_tokens") for i, tokens in enumerate(each)]


def check_forcing(options: RequestOptions, sampling: Sampling) -> None:
    """Refuses forced tokens with settings that could cut them."""
    if options.forced_tokens is None:
        return
    if sampling.draws == "truncated":
        rule = "{field} need a distribution that cuts none of them; got top_p, top_k or min_p. Leave them out of sampling."
        raise InputError(rule, field="forced_tokens", code="conflict")
    for name in ("allowed_token_ids", "min_tokens", "bad_words"):
        if getattr(options, name):
            raise InputError("{field} may exclude forced tokens; got both. Leave one out.", field=name, code="conflict")
    if options.stop_strings:
        raise InputError("{field} would cut forced tokens; got both. Leave one out.", field="stop_strings", code="conflict")


def biases_of(options: RequestOptions, ends: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """What a request changes of single logits: fields of `Request`, checked. `ends` are the tokens that end it."""
    bias, allowed = options.logit_bias or {}, options.allowed_token_ids
    check_length("logit_bias", list(bias), vocab_size, "token ids")
    if allowed is not None:
        check_length("allowed_token_ids", allowed, vocab_size, "token ids")
    check_length("bad_words", options.bad_words, MOST_BAD_WORDS, "lists of token ids")
    for word in options.bad_words:
        if check_length("bad_words", word, LONGEST_BAD_WORD, "token ids") == 0:
            raise out_of_range("bad_words", "have at least one token each", word)
    words = [token for word in options.bad_words for token in word]
    for field, ids in (("logit_bias", bias), ("allowed_token_ids", allowed or ()), ("bad_words", words)):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
                raise out_of_range(field, f"have token ids in [0, {vocab_size})", token)
    for value in bias.values():
        check_between(-MOST_BIAS, MOST_BIAS, logit_bias=typed("logit_bias", value, float))
    never = {word[0] for word in options.bad_words if len(word) == 1} | (set(ends) if options.min_tokens else set())
    if allowed is not None and not set(allowed) - never:
        rule = "{field} must have a token that may be drawn: no bad word, and with min_tokens one that ends nothing; got {got}."
        raise InputError(rule, field="allowed_token_ids", code="conflict", got=shown(list(allowed)))
    if options.min_tokens and len(ends) > MOST_ENDS:
        rule = "{field} need at most {most} tokens that end a completion; got {got}."
        raise InputError(rule, field="min_tokens", code="conflict", most=MOST_ENDS, got=len(ends))
    return {
        "logit_bias": tuple((int(token), float(value)) for token, value in bias.items()),
        "allowed_ids": tuple(sorted({int(token) for token in allowed or ()})),
        "min_tokens": options.min_tokens,
        "bad_words": tuple(tuple(map(int, word)) for word in options.bad_words),
    }


def check_stop_ids(stop_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Stop ids, checked to be tokens of the model, and no more than it has."""
    check_length("stop_ids", stop_ids, vocab_size, "token ids")
    if np.ndim(stop_ids) != 1 or any(isinstance(x, bool) or not isinstance(x, int | np.integer) for x in stop_ids):
        rule = "{field} must be a list of token ids; got {got}."
        raise InputError(rule, field="stop_ids", code="wrong_type", got=shown(stop_ids))
    for token in stop_ids:
        if not 0 <= token < vocab_size:
            raise out_of_range("stop_ids", f"be token ids in [0, {vocab_size})", token)
    return tuple(int(token) for token in stop_ids)


def check_prompt_fits(policy: Policy, index: int, prompt_length: int) -> None:
    """Refuses a protected prompt that the budget cannot hold."""
    if prompt_length > policy.longest_prompt:
        assert policy.evict is not None
        least = policy.longest_prompt + policy.evict.recent
        of_layer = "" if least == policy.budget else f" on average, and {least} in the last layer"
        rule = (
            "{name} never drops the prompt, so its {field} must hold it and the {recent} most recent slots; prompt {index} has "
            "{length} tokens, the {field} is {budget}. Raise it."
        )
        budget, about = f"{policy.budget} slots{of_layer}", {"name": policy.name, "recent": policy.evict.recent}
        raise InputError(rule, field="budget", code="does_not_fit", index=index, length=prompt_length, budget=budget, **about)


def new_token_limit(index: int, prompt_length: int, asked: int | None, max_positions: int) -> int:
    """The most new tokens of a request."""
    left = max_positions - prompt_length
    if left < 1 or (asked or 1) > left:
        raise too_long(index, str(prompt_length), asked, max_positions)
    return min(MOST_NEW_TOKENS, left) if asked is None else asked


def new_weights(old: Params, given: Any) -> Params:
    """What `update` is given, in the form and on the devices of the weights in use, which stay as they are.

    Raises:
      ValueError: `jkv.params_from` refuses it, or it has another structure, shape, type or sharding, or is not finite.
    """
    params = params_from(given, old)
    params = joined_as(old, params)
    check_same(old, params)
    check_weights(params)
    return committed(params, old)


def check_weights(params: Params) -> None:
    """Refuses weights that hold NaN or infinity, and names the first; and a matrix beside the joined one (`joined_of`)."""
    for layer in params.layers:
        for weights, field in itertools.product((layer, layer.delta), GROUPS):
            joined_of(weights, field)
    if not all_finite(params):
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not bool(jnp.isfinite(leaf).all()):
                name = jax.tree_util.keystr(path)
                rule = f"Weights must be finite; params{name} holds NaN or infinity. Reload or retrain the model."
                raise refused(rule, params="out_of_range")


def check_stop_strings(model: Model, stop_strings: Sequence[str]) -> None:
    """Refuses stop strings that are empty, too many or too long, or that no tokenizer can find."""
    is_list = isinstance(stop_strings, Sequence) and not isinstance(stop_strings, str)
    if is_list:
        check_length("stop_strings", stop_strings, MOST_STOPS, "texts")
    if not is_list or not all(isinstance(stop, str) and stop for stop in stop_strings):
        rule = "{field} must be a sequence of texts that are not empty; got {got}."
        raise InputError(rule, field="stop_strings", code="wrong_type", got=shown(stop_strings))
    longest = max(map(len, stop_strings), default=0)
    if longest > LONGEST_STOP:
        rule = "{field} must have at most {most:,} characters each; got a text of {got:,}. Shorten it."
        raise InputError(rule, field="stop_strings", code="too_long", most=LONGEST_STOP, got=longest)
    if stop_strings and model.tokenizer is None:
        rule = "{field} need a model with a tokenizer; this one has none. Use {stop_ids}."
        raise InputError(rule, field="stop_strings", code="unsupported")
