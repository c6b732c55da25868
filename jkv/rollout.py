"""`jkv.Rollout`: samples groups of completions for a trainer, with the exact log-probability of each token.

The engine stays open between updates of the weights:

    rollout = jkv.Rollout(model, jkv.r_kv(budget=256), max_new_tokens=2048)
    for prompts in batches:
        out = rollout(prompts, n=8, return_trace=True)   # [8 * len(prompts), T] tokens, log-probabilities, mask
        params = train(params, out)
        rollout.update(params)                           # no recompile

A group's prompt is prefilled once and its pages are shared by reference count; every sample evicts by itself. Log-probabilities
are those of the exact distribution that each token, end tokens included, was drawn from with the compressed cache. They differ
from those of a trainer's dense forward pass; `jkv.rl` measures and corrects the difference, or replays the trace.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.checks import check_counts, typed
from jkv.engine.engine import Engine
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.options import EngineOptions
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import RequestOptions, check_model, make_requests, spread_policies
from jkv.engine.results import Result, make_result
from jkv.engine.samples import Sample
from jkv.generate import DEFAULT_RUNNING, engine_for, progress_bar
from jkv.model.params import Model, Params
from jkv.model.sampling import Sampling
from jkv.policies import Policy

DEFAULT_PROMPT_TOKENS, DEFAULT_NEW_TOKENS = 512, 1024


@dataclasses.dataclass(frozen=True, repr=False)
class Rollouts(Result):
    """Finished samples for a trainer, prompt-major. Fields of `jkv.Result`, and:

    Attributes:
      tokens: `[N, T]` int32, end tokens included, right-padded with `pad_id`.
      mask: `[N, T]` bool, completion tokens; a trainer that compares tokens with `pad_id` instead loses end tokens equal to it.
      policy_version: `[N, T]` int32, version of the weights behind each token (0 for the rollout's first weights, one more for
        each `update`); -1 in padding.
      prompt_index: `[N]` index of each sample's prompt in the call, or among all submitted since nothing was pending.
      sample_index: `[N]` index of each sample among those of its prompt.
      seeds: `[N]` seed of each sample's draws: given, or fresh entropy.
      pad_id: the padding token.
    """

    mask: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), bool))
    policy_version: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.int32))
    prompt_index: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    sample_index: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    seeds: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    pad_id: int = 0

    def ragged(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Each completion's tokens (int32) and their log-probabilities (float32), without padding."""
        spans = [slice(0, int(length)) for length in self.lengths]
        return [row[span] for row, span in zip(self.tokens, spans, strict=True)], [
            row[span] for row, span in zip(self.logprobs, spans, strict=True)
        ]

    def left_padded_prompts(self, width: int | None = None) -> np.ndarray:
        """Prompts as `[N, width]` int32, padded on the left with `pad_id`; the width of the longest by default.

        Raises:
          ValueError: a prompt is wider.
        """
        longest = max((len(prompt) for prompt in self.prompts), default=0)
        width = longest if width is None else width
        if longest > width:
            raise ValueError(f"Prompts must fit the width; the longest has {longest} tokens, the width is {width}. Raise it.")
        padded = np.full((len(self.prompts), width), self.pad_id, np.int32)
        for row, prompt in zip(padded, self.prompts, strict=True):
            row[width - len(prompt) :] = prompt
        return padded


@dataclasses.dataclass(frozen=True)
class Pending:
    """A submitted sample that was not returned yet."""

    prompt: int  # index among the prompts
    index: int  # among the samples of its prompt
    ticket: int
    sample: Sample


class Rollout:
    """Samples groups of completions with the current weights; programs compile once and the pool is kept.

    Args:
      model_or_params: what `jkv.load` returns, or bare `Params` (prompts are token ids then).
      policy: how caches stay small; None keeps them whole.
      max_prompt_tokens: the most tokens of a prompt; None is 512, or half of the model's positions if they are below 1,024.
      max_new_tokens: the most tokens of a completion; None is 1,024 or what the model's positions leave.
      n: default number of samples of a prompt; the pool has room for the prompts of such groups.
      pad_id: the padding token; None is the tokenizer's, or 0.
      settings: of the engine by name, such as `max_running`, `page_size`, `kv_memory` and `mesh`: see `jkv.EngineOptions`.

    Attributes:
      engine: the `jkv.Engine` that runs the samples.

    Raises:
      ValueError: a setting out of its range, or lengths that the model's positions do not hold.
    """

    def __init__(
        self,
        model_or_params: Model | Params,
        policy: Policy | None = None,
        *,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        n: int = 1,
        pad_id: int | None = None,
        **settings: Any,
    ) -> None:
        check_counts(max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, n=n)
        options = EngineOptions(max_running=DEFAULT_RUNNING).changed(settings, inspect.signature(Rollout).parameters)
        model = check_model(model_or_params)
        positions = model.config.max_positions
        self.n, self.max_prompt_tokens = n, max_prompt_tokens or min(DEFAULT_PROMPT_TOKENS, positions // 2)
        self.max_new_tokens = max_new_tokens or min(DEFAULT_NEW_TOKENS, positions - self.max_prompt_tokens)
        self.policy = spread_policies(policy, 1, model.params, options.kv_format)[0]
        self.pad_id = check_pad(model, pad_id)
        request_options = RequestOptions(policy=self.policy, n=max(n, 2), max_new_tokens=self.max_new_tokens, stop_ids=())
        longest = make_requests(model, [np.zeros(self.max_prompt_tokens, np.int32)], request_options)
        self.engine: Engine = engine_for(model, longest, options)
        self._pending: list[Pending] = []
        self._num_prompts = 0  # submitted since nothing was pending
        self._has_warned: set[str] = set()

    @property
    def model(self) -> Model:
        """The model with the weights in use."""
        return self.engine.model

    @property
    def version(self) -> int:
        """The version of the weights in use: how often they were replaced."""
        return self.engine.runner.version

    @property
    def pending(self) -> int:
        """The number of submitted samples that were not returned yet."""
        return len(self._pending)

    @property
    def is_asleep(self) -> bool:
        """Whether the pool is freed."""
        return self.engine.is_asleep

    def __call__(
        self,
        prompts: Any,
        n: int | None = None,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_new_tokens: int | None = None,
        stop_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        return_trace: bool = False,
        first_sample: int = 0,
        progress: bool | None = None,
    ) -> Rollouts:
        """All samples of some prompts: `submit`, then `run` to the end.

        Ctrl-C returns the finished samples; the others stay pending, and `run` continues or `cancel` ends them.

        Raises:
          ValueError: bad input, refused before anything compiles; or samples of an earlier call are pending.
        """
        if self._pending:
            raise ValueError(
                f"A call must start with no pending samples; {self.pending} samples are. Call run() or cancel() first."
            )
        with deferred_interrupts(ends_here=True):
            self.submit(prompts, n, sampling, seed, max_new_tokens, stop_ids, stop_strings, return_trace, first_sample)
            return self.run(progress=progress)

    def submit(
        self,
        prompts: Any,
        n: int | None = None,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_new_tokens: int | None = None,
        stop_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        return_trace: bool = False,
        first_sample: int = 0,
    ) -> None:
        """Queues `n` samples of each prompt for `run`.

        Args:
          prompts: a text, a list of token ids or a conversation (a list of messages), or a list of these.
          n, max_new_tokens, stop_ids, stop_strings, first_sample: see `jkv.RequestOptions`; None is the rollout's setting.
          sampling: None is temperature 1 without cuts and penalties, as a policy gradient needs it.
          seed: replaces the sampling's seed; if both are None, fresh entropy is drawn, and `stats.seed` reports it. An equal
            seed gives equal tokens, whatever else is in the batch.
          return_trace: whether to record what each query read, for exact replay. All policies of this package can be traced.

        Raises:
          ValueError: bad input, refused before anything compiles; nothing is queued, and pending samples are not affected.
        """
        n = self.n if n is None else n
        check_counts(n=n, max_new_tokens=max_new_tokens)
        ids = encode_prompts(self.model, prompts)
        self._check_lengths(ids, max_new_tokens)
        if self._pending and return_trace != self.engine.runner.is_traced:
            raise ValueError(
                f"All pending samples are traced, or none; {self.pending} are pending with return_trace="
                f"{self.engine.runner.is_traced}. Call run() or cancel() first."
            )
        settings = Sampling() if sampling is None else typed("sampling", sampling, Sampling)
        settings = settings if seed is None else dataclasses.replace(settings, seed=seed)
        request_options = RequestOptions(
            policy=self.policy,
            sampling=settings,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            n=n,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            first_sample=first_sample,
        )
        requests = make_requests(self.model, ids, request_options)
        for request in (request for group in requests for request in group):
            self.engine.check(request)
        self._warn_of_cuts(settings)
        if self.pad_id in requests[0][0].stop_ids and self.pad_id not in self.model.config.end_ids:
            self._warn("pad", pad_warning(self.pad_id))
        typed("return_trace", return_trace, bool)
        with deferred_interrupts():
            if not self._pending:
                self.engine.reset_stats()
                self.engine.runner.is_traced, self._num_prompts = return_trace, 0
            for prompt, group in enumerate(requests, self._num_prompts):
                for index, request in enumerate(group):
                    ticket = self.engine.submit_requests([request])
                    self._pending.append(Pending(prompt, index, ticket, self.engine.tickets[ticket][0]))
            self._num_prompts += len(requests)

    def run(self, max_steps: int | None = None, until_done: int | None = None, progress: bool | None = None) -> Rollouts:
        """Continues pending samples and returns the finished ones; the others keep their pages until the next `run`.

        The result may hold only a part of a group: pass `prompt_index` to `jkv.rl.group_advantages`, which refuses that.
        Weights may be updated between two runs: pending samples keep their cached keys and values, `policy_version` records
        the weights of each token, and no single set of weights replays their trace.

        Args:
          max_steps: returns after this many decode steps, rounded up to whole chunks (of up to `chunk` steps).
          until_done: returns after this many samples have finished.
          progress: whether to show a bar; None shows it in a terminal or notebook.

        Raises:
          ValueError: a count below item.
          RuntimeError: an earlier turn ended in the middle, because a device program failed; `reset` repairs it.
        """
        check_counts(max_steps=max_steps, until_done=until_done)
        with deferred_interrupts(ends_here=True) as presses:
            if self._pending:
                self.engine.wake()
            begun, wanted = self.engine.stats.steps, min(until_done or self.pending, self.pending)
            with progress_bar(wanted, progress, "rollout") as on_events:
                while sum(item.sample.is_finished for item in self._pending) < wanted and not presses:
                    if max_steps is not None and self.engine.stats.steps - begun >= max_steps:
                        break
                    on_events(self.engine.step())
            return self._take([item for item in self._pending if item.sample.is_finished])

    def cancel(self) -> Rollouts:
        """Cancels pending samples and returns them with their tokens so far and the reason "cancelled"."""
        with deferred_interrupts():
            for item in self._pending:
                self.engine.cancel(item.ticket)
            return self._take(list(self._pending))

    def reset(self) -> None:
        """Makes an empty pool, and starts pending samples again: see `jkv.Engine.reset`. `run` then continues them."""
        self.engine.reset()

    def update(self, params: Params) -> None:
        """Uses new weights from the next step on; nothing compiles, and prompts that the old weights prefilled are dropped.

        The arrays are not copied: they may be the trainer's own, as long as it does not donate them before the next update. On
        a mesh they must be sharded as by `jkv.shard`.

        Raises:
          ValueError: weights of another structure, configuration, shape, type or sharding, or not finite; the old ones stay.
        """
        self.engine.update(params.params if isinstance(params, Model) else params)

    def sleep(self, forget_weights: bool = False) -> None:
        """Frees the pool for the trainer; pending samples are swapped out to host memory.

        With `forget_weights` it drops its references to the weights too, so that a trainer's old weights are freed when it
        replaces them; call `update` before the next run.
        """
        self.engine.sleep(forget_weights)

    def wake(self) -> None:
        """Allocates the pool again; `run` also does."""
        self.engine.wake()

    def _check_lengths(self, prompts: Sequence[np.ndarray], max_new_tokens: int | None) -> None:
        """Refuses lengths above the limits of this rollout."""
        for i, prompt in enumerate(prompts):
            if len(prompt) > self.max_prompt_tokens:
                raise ValueError(
                    f"A prompt may have {self.max_prompt_tokens} tokens, the rollout's max_prompt_tokens; prompt {i} has "
                    f"{len(prompt)}. Shorten it, or build the rollout with a higher limit."
                )
        if max_new_tokens is not None and max_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"A completion may have {self.max_new_tokens} tokens, the rollout's max_new_tokens; got {max_new_tokens}. "
                "Lower it, or build the rollout with a higher limit."
            )

    def _warn_of_cuts(self, sampling: Sampling) -> None:
        """Warns once that a distribution that is cut or penalised biases a trainer's ratios."""
        if sampling.draws == "truncated":
            self._warn(
                "cut",
                f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p} cut the distribution: `logprobs` are "
                "those after the cut, `logprobs_full` those before it; a ratio of either with a trainer's log-probabilities is "
                "biased. Sample with top_p=1, top_k=0 and min_p=0 to train on it.",
            )
        if sampling.penalises:
            self._warn(
                "penalty",
                f"repetition_penalty={sampling.repetition_penalty}, presence_penalty={sampling.presence_penalty}, "
                f"frequency_penalty={sampling.frequency_penalty} change the distribution: `logprobs` are those after the "
                "penalties, `logprobs_full` those before; a ratio of either with a trainer's log-probabilities is biased. "
                "Sample without penalties to train on it.",
            )

    def _warn(self, kind: str, text: str) -> None:
        """Warns once of each kind."""
        if kind not in self._has_warned:
            self._has_warned.add(kind)
            warnings.warn(text, stacklevel=4)

    def _take(self, finished: list[Pending]) -> Rollouts:
        """Takes finished samples from the engine, in order."""
        out = self._gather(finished)
        taken = set(self.engine.take([item.ticket for item in finished]))
        self._pending = [item for item in self._pending if item.sample not in taken]
        return out

    def _gather(self, finished: list[Pending]) -> Rollouts:
        """Finished samples as arrays."""
        samples = [item.sample for item in finished]
        result = make_result(self.model, samples, self.engine.stats, self.engine.runner.is_traced)
        mask = np.arange(result.tokens.shape[1], dtype=np.int32) < result.lengths[:, None]
        version = np.full(result.tokens.shape, -1, np.int32)
        for row, sample in zip(version, samples, strict=True):
            row[: len(sample.completion.versions)] = sample.completion.versions
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(Result)}
        return Rollouts(
            **fields | {"tokens": np.where(mask, result.tokens, np.int32(self.pad_id))},
            mask=mask,
            policy_version=version,
            prompt_index=np.array([item.prompt for item in finished], np.int32),
            sample_index=np.array([item.index for item in finished], np.int32),
            seeds=np.array([sample.request.seed for sample in samples], np.int64),
            pad_id=self.pad_id,
        )


def check_pad(model: Model, pad_id: int | None) -> int:
    """The padding token, checked; warns if it is an end token."""
    config = model.config
    if pad_id is None:
        own = getattr(model.tokenizer, "pad_token_id", None)
        pad_id = 0 if own is None else own
    if not 0 <= typed("pad_id", pad_id, int) < config.vocab_size:
        raise ValueError(f"pad_id must be a token id in [0, {config.vocab_size}); got {pad_id}.")
    if pad_id in config.end_ids:
        warnings.warn(pad_warning(pad_id), stacklevel=3)
    return pad_id


def pad_warning(pad_id: int) -> str:
    """The warning about padding with an end token."""
    return (
        f"pad_id={pad_id} is also an end token: a trainer that masks with `tokens != pad_id` drops every end token from its "
        "loss, so the policy never learns to stop. Use `out.mask`, or pass another pad_id."
    )
