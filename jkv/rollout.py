"""`jkv.Rollout`: an engine kept open between the updates of a trainer, which samples groups and says from what they came.

    rollout = jkv.Rollout(model, jkv.r_kv(budget=256), max_new_tokens=2048)
    for prompts in batches:
        out = rollout(prompts, n=8, return_trace=True)   # [8 * len(prompts), T] tokens, log-probabilities, mask
        params = train(params, out)
        rollout.update(params)                           # no recompile

A group's prompt is prefilled once and its pages are shared by reference count, while every sample evicts on its own. Logarithms
of probabilities are those of the exact distribution that each token was drawn from, the compressed cache's, end tokens
included: they differ from a trainer's dense forward pass, which `jkv.rl` measures and corrects, or replays.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.cache import DEFAULT_PAGE_SIZE
from jkv.checks import check_counts, typed
from jkv.engine.engine import Engine
from jkv.engine.interrupts import deferred_interrupt
from jkv.engine.requests import DEFAULT_NEW_TOKENS, check_model, encode_prompts, make_request, spread_policies
from jkv.engine.results import Result, make_result
from jkv.engine.samples import Sample
from jkv.generate import engine_for, make_requests, progress_bar
from jkv.model.params import Model, Params
from jkv.model.sampling import Sampling
from jkv.policies import Policy

DEFAULT_PROMPT_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Rollouts(Result):
    """Finished samples, prompt-major, as a trainer takes them; fields of `jkv.Result`, and:

    Attributes:
      tokens: `[N, T]` int32, end tokens included, right-padded with `pad_id`.
      mask: `[N, T]` bool, completion tokens; a trainer that compares tokens with `pad_id` instead loses end tokens equal to it.
      policy_version: `[N, T]` int32, of the weights that drew each token (0 for those the rollout was built with, one more for
        each `update`); -1 in padding.
      prompt_index: `[N]` of each sample's prompt in the call, or among all handed in since nothing was pending.
      sample_index: `[N]` of each sample among those of its prompt.
      seeds: `[N]` of each sample's draws: given, or fresh entropy.
      pad_id: the token that fills up rows.
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
    """A sample that was handed in, and where it belongs."""

    prompt: int
    index: int  # among the samples of its prompt
    ticket: int
    sample: Sample


class Rollout:
    """Samples groups of completions with the weights of the moment; programs compile once and the pool stays.

    Args:
      model_or_params: what `jkv.load` returns, or bare `Params` (prompts are token ids then).
      policy: how caches stay small; None keeps them whole.
      max_prompt_tokens: of any prompt; None is 512, or half of the model's positions where these are fewer than 1,024.
      max_new_tokens: of any completion; None is 1,024 or what the model's positions leave.
      n: samples of a prompt, where a call does not say; the pool has room for the prompts of such groups.
      max_running: rows decoded together, refilled as they finish.
      page_size: slots of a page.
      kv_memory: bytes of the pool, or "auto" for what the device has free; None takes what the rows need.
      num_pages: pages of the pool, in place of bytes.
      pad_id: fills up rows; None is the tokenizer's own, or 0.
      chunk: decode steps between two looks of the host, at most: 16, 8, 4, 2 or 1.
      order: whom to admit first: "arrival", or "longest".
      max_stop_ids: the most stop ids of a call.
      mesh: devices to run on, see `jkv.Engine`.

    Attributes:
      engine: the `jkv.Engine` beneath.

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
        max_running: int = 32,
        page_size: int = DEFAULT_PAGE_SIZE,
        kv_memory: int | str | None = None,
        num_pages: int | None = None,
        pad_id: int | None = None,
        chunk: int = 16,
        order: str = "arrival",
        max_stop_ids: int = 8,
        mesh: Any = None,
    ) -> None:
        check_counts(max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, n=n, max_running=max_running)
        check_counts(page_size=page_size, max_stop_ids=max_stop_ids)
        model = check_model(model_or_params)
        positions = model.config.max_positions
        self.n, self.max_prompt_tokens = n, max_prompt_tokens or min(DEFAULT_PROMPT_TOKENS, positions // 2)
        self.max_new_tokens = max_new_tokens or min(DEFAULT_NEW_TOKENS, positions - self.max_prompt_tokens)
        self.policy = spread_policies(policy, 1)[0]
        self.pad_id = check_pad(model, pad_id)
        longest = make_request(
            model,
            np.zeros(self.max_prompt_tokens, np.int32),
            policy=self.policy,
            sampling=Sampling(),
            seed=0,
            identity=0,
            sample=0,
            max_new_tokens=self.max_new_tokens,
            stop_ids=(),
            stop_strings=(),
        )
        self.engine: Engine = engine_for(
            model,
            [[longest] * max(n, 2)],
            max_running=max_running,
            page_size=page_size,
            kv_memory=kv_memory,
            num_pages=num_pages,
            chunk=chunk,
            order=order,
            max_stop_ids=max_stop_ids,
            mesh=mesh,
        )
        self._pending: list[Pending] = []
        self._num_prompts = 0  # handed in since nothing was pending
        self._has_warned: set[str] = set()

    @property
    def model(self) -> Model:
        """The model with the weights in use."""
        return self.engine.model

    @property
    def version(self) -> int:
        """Of the weights in use: how often they were replaced."""
        return self.engine.version

    @property
    def pending(self) -> int:
        """Samples that were handed in and not returned yet."""
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

        Ctrl-C returns those that are finished; the others are pending, for `run` to go on with or `cancel` to drop.

        Raises:
          ValueError: bad input, told before anything compiles; or samples of an earlier call are pending.
        """
        if self._pending:
            raise ValueError(f"A call starts with nothing pending; {self.pending} samples are. Call run() or cancel() first.")
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
        """Hands in `n` samples of each prompt, for `run`.

        Args:
          prompts: a string or a sequence of token ids, or a list of either.
          n: samples of each.
          sampling: temperature, top-p, top-k, seed; None is temperature 1 with nothing cut, what a policy gradient needs.
          seed: in place of the sampling's; None there too draws fresh entropy, which `stats.seed` reports. An equal seed gives
            equal tokens, whatever runs beside them.
          max_new_tokens: of each completion; None is the rollout's own limit.
          stop_ids: tokens that end a completion, in place of the model's own; `()` never stops.
          stop_strings: texts that end a completion.
          return_trace: whether to record what each query read, for exact replay. Every policy of this package has a trace.
          first_sample: the index of the first sample of a prompt in the random keys: n calls of one sample each, counted up,
            draw what one call of n samples draws.

        Raises:
          ValueError: bad input, told before anything compiles; nothing is handed in, and what is pending goes on.
        """
        n = self.n if n is None else n
        check_counts(n=n, max_new_tokens=max_new_tokens)
        ids = encode_prompts(self.model, prompts)
        self._check_lengths(ids, max_new_tokens)
        if self._pending and return_trace != self.engine.is_traced:
            raise ValueError(
                f"All pending samples are traced, or none; {self.pending} are pending with return_trace="
                f"{self.engine.is_traced}. Call run() or cancel() first."
            )
        settings = Sampling() if sampling is None else typed("sampling", sampling, Sampling)
        settings = settings if seed is None else dataclasses.replace(settings, seed=seed)
        requests = make_requests(
            self.model,
            ids,
            [self.policy] * len(ids),
            settings,
            n,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            first_sample=first_sample,
        )
        for request in (request for group in requests for request in group):
            self.engine.check(request)
        self._warn_of_cuts(settings)
        if self.pad_id in requests[0][0].stop_ids and self.pad_id not in self.model.config.end_ids:
            self._warn("pad", pad_warning(self.pad_id))
        if not self._pending:
            self.engine.reset_stats()
            self.engine.is_traced, self._num_prompts = typed("return_trace", return_trace, bool), 0
        for prompt, group in enumerate(requests, self._num_prompts):
            for index, request in enumerate(group):
                ticket = self.engine.submit_requests([request])
                self._pending.append(Pending(prompt, index, ticket, self.engine.tickets[ticket][0]))
        self._num_prompts += len(requests)

    def run(self, max_steps: int | None = None, until_done: int | None = None, progress: bool | None = None) -> Rollouts:
        """Goes on with what is pending and returns what is finished; the rest stays, pages and all, for the next `run`.

        A part of a run may hold a part of a group: give `prompt_index` to `jkv.rl.group_advantages`, which refuses that.
        Weights may be updated in between: what is pending goes on with the keys that it has, `policy_version` says which
        tokens are whose, and its trace replays under no single weights.

        Args:
          max_steps: decode steps after which to return, rounded up to whole chunks (of up to `chunk` steps).
          until_done: finished samples after which to return.
          progress: whether to show a bar; None shows it in a terminal or notebook.

        Raises:
          ValueError: a count below one.
        """
        check_counts(max_steps=max_steps, until_done=until_done)
        if self._pending:
            self.engine.wake()
        begun, wanted = self.engine.stats.steps, min(until_done or self.pending, self.pending)
        total = sum(one.sample.remaining for one in self._pending)
        with progress_bar(total, progress, "rollout") as on_events, contextlib.suppress(KeyboardInterrupt):
            while sum(one.sample.is_finished for one in self._pending) < wanted:
                if max_steps is not None and self.engine.stats.steps - begun >= max_steps:
                    break
                on_events(self.engine.step())
        return self._take([one for one in self._pending if one.sample.is_finished])

    def cancel(self) -> Rollouts:
        """Ends what is pending and returns it, with the tokens that there are and the reason "cancelled"."""
        for one in self._pending:
            self.engine.cancel(one.ticket)
        return self._take(list(self._pending))

    def update(self, params: Params) -> None:
        """Samples with new weights from now on; no program compiles anew, and prompts that the old ones prefilled are dropped.

        The arrays are used as they are: they may be the trainer's own, as long as it does not donate them before the next
        update. On a mesh they lie as `jkv.engine.mesh.shard` places them.

        Raises:
          ValueError: weights of another structure, configuration, shape, type or sharding, or not finite; the old ones stay.
        """
        self.engine.update(params.params if isinstance(params, Model) else params)

    def sleep(self, forget_weights: bool = False) -> None:
        """Frees the pool for the trainer; samples that are pending wait in host memory.

        With `forget_weights` it lets go of the weights too, so that those a trainer replaces are not held twice; `update` must
        bring some before the next call.
        """
        self.engine.sleep(forget_weights)

    def wake(self) -> None:
        """Allocates the pool again; `run` does it too."""
        self.engine.wake()

    def _check_lengths(self, prompts: Sequence[np.ndarray], max_new_tokens: int | None) -> None:
        """Refuses what the programs have no room for."""
        for i, prompt in enumerate(prompts):
            if len(prompt) > self.max_prompt_tokens:
                raise ValueError(
                    f"A prompt may have {self.max_prompt_tokens} tokens here, max_prompt_tokens; prompt {i} has {len(prompt)}. "
                    "Shorten it, or build the rollout with a higher limit."
                )
        if max_new_tokens is not None and max_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"A completion may have {self.max_new_tokens} tokens here, the rollout's max_new_tokens; got {max_new_tokens}. "
                "Lower it, or build the rollout with a higher limit."
            )

    def _warn_of_cuts(self, sampling: Sampling) -> None:
        """Says once that cut distributions bias what a trainer makes of the samples."""
        if sampling.draws == "truncated":
            self._warn(
                "cut",
                f"top_k={sampling.top_k}, top_p={sampling.top_p} cut the distribution: `logprobs` are those of what is left, "
                "`logprobs_full` those before, and a ratio of either with a trainer's log-probabilities is biased. Sample with "
                "top_p=1 and top_k=0 to train on it.",
            )

    def _warn(self, what: str, text: str) -> None:
        """Warns once."""
        if what not in self._has_warned:
            self._has_warned.add(what)
            warnings.warn(text, stacklevel=4)

    def _take(self, finished: list[Pending]) -> Rollouts:
        """Finished samples out of the engine, in order; Ctrl-C waits, for it would lose them."""
        with deferred_interrupt():
            out = self._gather(finished)
            gone = set(self.engine.take([one.ticket for one in finished]))
            self._pending = [one for one in self._pending if one.sample not in gone]
        return out

    def _gather(self, finished: list[Pending]) -> Rollouts:
        """Finished samples as arrays."""
        samples = [one.sample for one in finished]
        result = make_result(self.model, samples, self.engine.stats, self.engine.is_traced)
        mask = np.arange(result.tokens.shape[1], dtype=np.int32) < result.lengths[:, None]
        version = np.full(result.tokens.shape, -1, np.int32)
        for row, sample in zip(version, samples, strict=True):
            row[: len(sample.completion.versions)] = sample.completion.versions
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(Result)}
        return Rollouts(
            **fields | {"tokens": np.where(mask, result.tokens, np.int32(self.pad_id))},
            mask=mask,
            policy_version=version,
            prompt_index=np.array([one.prompt for one in finished], np.int32),
            sample_index=np.array([one.index for one in finished], np.int32),
            seeds=np.array([sample.request.seed for sample in samples], np.int64),
            pad_id=self.pad_id,
        )


def check_pad(model: Model, pad_id: int | None) -> int:
    """The token that fills up rows; warns where it is an end token."""
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
    """What padding with an end token does."""
    return (
        f"pad_id={pad_id} is also an end token: a trainer that masks with `tokens != pad_id` drops every end token from its "
        "loss, so that the policy never learns to stop. Use `out.mask`, or pass another pad_id."
    )
