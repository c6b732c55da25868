"""`jkv.Rollout`: samples groups of completions for a trainer, with the exact log-probability of each token.

The engine stays open between updates of the weights:

    rollout = jkv.Rollout(model, jkv.r_kv(budget=256), max_new_tokens=2048)
    for prompts in batches:
        out = rollout(prompts, n=8, return_trace=True)   # [8 * len(prompts), T] tokens, log-probabilities, mask
        params = train(params, out)
        rollout.update(params)                           # no recompile

A group's prompt is prefilled once and its pages are shared by reference count; every sample evicts by itself. Log-probabilities
are under the exact distribution that each token, end tokens included, was drawn from with the compressed cache. They differ
from the log-probabilities of a trainer's dense forward pass; `jkv.rl` corrects the difference, or replays the trace.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from jkv.checkpoints.adapters import Adapter
from jkv.checks import check_counts, typed
from jkv.engine.backend import Backend
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.options import EngineOptions
from jkv.engine.requests import RequestOptions, check_model, make_requests, spread_policies
from jkv.engine.sizing import DEFAULT_RUNNING
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.generate import make_engine
from jkv.model.params import Model, Params
from jkv.replicas.replicas import Replicas
from jkv.rollout.conversing import Limits, Reply, converse
from jkv.rollout.results import Rollouts
from jkv.rollout.session import Callers, Defaults, SampleOptions, Session, pad_warning

DEFAULT_PROMPT_TOKENS, DEFAULT_NEW_TOKENS = 512, 1024


class Rollout(Session):
    """Samples groups of completions with the current weights; programs compile once and the pool is kept.

    Any number of threads may use it. Calls and conversations of several threads run in one batch, on one pool; `submit` and
    `run` of several threads need a `session` each. The threads that wait run the engine's steps, one at a time.

    Args:
      model_or_params: what `jkv.load` returns, or bare `Params` (prompts are token ids then); or `jkv.Replicas`, for engines
        on other machines.
      policy: how caches stay small; None keeps them whole. Of replicas one of theirs; None is their first.
      max_prompt_tokens: the most tokens of a prompt; None is 512, or fewer where the model's positions leave no more, or half
        of the positions if they are below 1,024.
      max_new_tokens: the most tokens of a completion; None is 1,024 or what the model's positions leave.
      n: default number of samples of a prompt; the pool has room for the prompts of such groups.
      pad_id: the padding token; None is the tokenizer's, or 0. Rows of token ids that begin or end with it are refused, unless
        they have a `prompt_mask`.
      prompt_piece: tokens of a prompt that are prefilled before its first compaction, so that long prompts need no more slots
        than short ones: see `jkv.RequestOptions`.
      top_logprobs: how many most likely tokens of each place `Rollouts.top` has, under the model's own distribution, if a call
        names no other number; up to 64.
      settings: of the engine by name, such as `max_running`, `page_size`, `kv_memory` and `mesh`: see `jkv.EngineOptions`. A
        mesh with an axis "data" has an engine of these sizes for each of its rows.

    On replicas, samples come back whole: `run(until_done=...)` returns as they finish, and replicas rest between two runs.
    Conversations of several turns need a single engine.

    Attributes:
      engine: the `jkv.Engine` that runs the samples, or the replicas. Not to be called while another thread uses the rollout.
      callers: the threads that use it, and their sessions: this one, and the ones that `session` made.
      defaults: what samples have where a call names nothing else.

    Raises:
      ValueError: a setting out of its range, or lengths that the model's positions do not hold.
    """

    def __init__(
        self,
        model_or_params: Model | Params | Replicas,
        policy: Policy | None = None,
        *,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        n: int = 1,
        pad_id: int | None = None,
        prompt_piece: int | None = None,
        top_logprobs: int = 0,
        **settings: Any,
    ) -> None:
        check_counts(max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, n=n, prompt_piece=prompt_piece)
        replicas = model_or_params if isinstance(model_or_params, Replicas) else None
        given = EngineOptions(max_running=DEFAULT_RUNNING) if replicas is None else replicas.options
        options = given.changed(settings, inspect.signature(Rollout).parameters)
        model: Model = check_model(model_or_params) if replicas is None else replicas.model
        policy = replicas.policies[0] if replicas is not None and policy is None else policy
        max_prompt_tokens, max_new_tokens = fit_lengths(model.config.max_positions, max_prompt_tokens, max_new_tokens)
        policy = spread_policies(policy, 1, model.params, options.kv_format)[0]
        limits = max_prompt_tokens, max_new_tokens, prompt_piece
        defaults = Defaults(policy, n, *limits, check_pad(model, pad_id), prompt_pad=pad_id, top_logprobs=top_logprobs)
        widest: Any = {"n": max(n, 2), "max_new_tokens": max_new_tokens, "prompt_piece": prompt_piece}
        widest["top_logprobs"] = top_logprobs
        request_options = RequestOptions(policy=policy, stop_ids=(), **widest)
        longest = make_requests(model, [np.zeros(max_prompt_tokens, np.int32)], request_options)
        later = [[dataclasses.replace(one, num_kept=1) for one in group] for group in longest]  # a turn of `converse` is wider
        if replicas is not None and settings:
            rule = f"Engines of replicas are built; got {', '.join(settings)}. Give that to jkv.Replicas."
            raise refused(rule, **{next(iter(settings)): "conflict"})
        engine: Backend = make_engine(model, later, options) if replicas is None else replicas.session()
        if replicas is not None:
            engine.check(longest[0][0])
        super().__init__(Callers(engine), defaults)

    @property
    def version(self) -> int:
        """The version of the weights in use: how often they, or adapters, were replaced."""
        return self.engine.version

    @property
    def num_pending(self) -> int:
        """Samples of all sessions that were submitted and not returned yet."""
        return self.callers.num_pending

    @property
    def is_asleep(self) -> bool:
        """Whether the pool is freed."""
        return self.engine.is_asleep

    def __call__(self, prompts: Any, *, progress: bool | None = None, **options: Unpack[SampleOptions]) -> Rollouts:
        """All samples of some prompts: `submit`, then `run` to the end.

        Ctrl-C returns the finished samples; the others stay pending, and `run` continues or `cancel` ends them.

        Args:
          prompts, options: see `submit`.
          progress: see `run`.

        Raises:
          ValueError: bad input, refused before anything compiles; or samples of an earlier call are pending.
          TypeError: an unknown option; the known ones are listed.
        """
        self._check_none_pending()
        session = self.session()
        try:
            with deferred_interrupts(ends_here=True):
                session.submit(prompts, **options)
                return session.run(progress=progress)
        finally:
            session.hand_over(self)

    def converse(
        self,
        prompts: Any,
        reply: Reply,
        *,
        max_turns: int = 8,
        max_turn_tokens: int | None = None,
        workers: int = 0,
        progress: bool | None = None,
        on_error: str = "raise",
        **options: Unpack[SampleOptions],
    ) -> Rollouts:
        """Conversations: the model's turns, and between them what a tool, an environment or a user says.

        Each conversation is one row: a turn prefills the reply alone, and evictions of earlier turns stay in effect. It ends
        when `reply` returns None, after `max_turns` turns, or when its turns and replies fill `max_new_tokens` of the rollout
        (reason "length"). All that follows the prompt is one sequence of the result, whose `mask` is True for what the model
        drew; `jkv.rl.make_batch` and `jkv.score` read it as any other, its trace included.

        Args:
          prompts: see `submit`.
          reply: takes a `jkv.rollout.Turn` and returns the tokens before the next turn: token ids, a text (encoded as it
            stands, without control tokens unless `parse_special` is given), or None to end the conversation. If it raises or
            returns anything else, its conversation ends with the reason "error", `samples[i].error` has the exception, and
            the others go on.
          max_turns: the most turns of a conversation, at least 1.
          max_turn_tokens: the most tokens of a turn; None is what is left of `max_new_tokens`.
          workers: threads that call `reply`, for tools that take time; with 0 this thread calls it, and decoding waits.
          progress: see `run`.
          on_error: what becomes of a call where `reply` raised, once the other conversations have ended: "raise" raises
            `jkv.rollout.ReplyError`, which has all conversations, and "return" returns them with a warning.
          options: see `jkv.rollout.SampleOptions`; a conversation takes no `max_new_tokens`, `stop_strings` or `form`.

        Ctrl-C ends all unfinished conversations, which keep their turns so far (reason "cancelled").

        Raises:
          ValueError: bad input, or a policy or sampling that cannot go on in a later turn, refused before anything compiles; or
            samples of an earlier call are pending.
          ReplyError: `reply` raised, unless `on_error="return"`.
        """
        self._check_none_pending()
        session = self.session()
        limits = Limits(max_turns, max_turn_tokens, self.defaults.max_new_tokens)
        try:
            return converse(session, prompts, reply, limits, workers, progress, on_error, **options)
        finally:
            session.hand_over(self)

    def session(self) -> Session:
        """Another session: samples of its own, in the same batch. For a thread that submits and runs beside others."""
        return Session(self.callers, self.defaults)

    def _check_none_pending(self) -> None:
        if self.pending:
            raise ValueError(
                f"A call must start with no pending samples; {self.pending} samples are. Call run() or cancel() first."
            )

    def reset(self) -> None:
        """Makes an empty pool, and starts pending samples again: see `jkv.Engine.reset`. `run` then continues them."""
        with self.callers.alone():
            self.engine.reset()

    def update(self, params: Params | Mapping[str, Any]) -> None:
        """Uses new weights from the next step on; nothing compiles, and prompts that the old weights prefilled are dropped.

        The arrays of `Params` are not copied: they may be the trainer's own, as long as it does not donate them before the next
        update. On a mesh they must be sharded as by `jkv.shard`. NumPy arrays, Hugging Face state dicts and MaxText's
        parameters are copied: `jkv.params_from` has the forms.

        Raises:
          ValueError: weights of another structure, configuration, shape, type or sharding, or not finite; the old ones stay,
            and samples go on.
        """
        with self.callers.alone():
            self.engine.update(params)

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Puts a low-rank adapter into a free place of the engine; samples with `adapter=name` use it.

        The rollout is built with places: `max_adapters=`, `adapter_rank=`. `update_adapter` is then a trainer's update of the
        adapter alone: kilobytes, and the base is not read.

        Raises:
          ValueError: see `jkv.Engine.add_adapter`; nothing is changed.
        """
        with self.callers.alone():
            self.engine.add_adapter(name, adapter)

    def update_adapter(self, name: str, adapter: Adapter) -> None:
        """Replaces an adapter from the next step on; nothing compiles, and pending samples with it go on with the new one.

        `policy_version` records the version behind each token, which counts updates of weights and adapters together.

        Raises:
          ValueError: see `jkv.Engine.update_adapter`; nothing is changed.
        """
        with self.callers.alone():
            self.engine.update_adapter(name, adapter)

    def remove_adapter(self, name: str) -> None:
        """Frees the place of an adapter.

        Raises:
          ValueError: an unknown name, or an adapter that pending samples use; nothing is changed.
        """
        with self.callers.alone():
            self.engine.remove_adapter(name)

    def sleep(self, forget_weights: bool = False) -> None:
        """Frees the pool for the trainer; pending samples are swapped out to host memory.

        With `forget_weights` it drops its references to the weights too, so that a trainer's old weights are freed when it
        replaces them; call `update` before the next run.
        """
        with self.callers.alone():
            self.engine.sleep(forget_weights)

    def wake(self) -> None:
        """Allocates the pool again; `run` also does."""
        with self.callers.alone():
            self.engine.wake()


def fit_lengths(positions: int, prompt: int | None, new: int | None) -> tuple[int, int]:
    """The most tokens of a prompt and of a completion, which the model has positions for; None is a default.

    Raises:
      ValueError: they do not fit; the message names what was given.

    >>> fit_lengths(2048, None, None), fit_lengths(2048, None, 1900), fit_lengths(512, None, None)
    ((512, 1024), (148, 1900), (256, 256))
    """
    given: dict[str, Any] = {"max_prompt_tokens": prompt, "max_new_tokens": new}
    for name, count in given.items():
        if count is not None and count >= positions:
            raise refused(
                f"{name} must be below the model's {positions:,} positions, which prompt and completion share; got {count:,}. "
                "Lower it.",
                **{name: "does_not_fit"},
            )
    if prompt is not None and new is not None and prompt + new > positions:
        raise refused(
            f"max_prompt_tokens and max_new_tokens must fit the model's {positions:,} positions together; got {prompt:,} + "
            f"{new:,}. Lower either.",
            max_new_tokens="does_not_fit",
        )
    prompt = prompt or min(DEFAULT_PROMPT_TOKENS, positions // 2, positions - (new or 0))
    return prompt, new or min(DEFAULT_NEW_TOKENS, positions - prompt)


def check_pad(model: Model, pad_id: int | None) -> int:
    """The padding token, checked; warns if it is an end token."""
    config = model.config
    if pad_id is None:
        own = getattr(model.tokenizer, "pad_token_id", None)
        pad_id = 0 if own is None else own
    if not 0 <= typed("pad_id", pad_id, int) < config.vocab_size:
        raise refused(f"pad_id must be a token id in [0, {config.vocab_size}); got {pad_id}.", pad_id="out_of_range")
    if pad_id in config.end_ids:
        warnings.warn(pad_warning(pad_id), stacklevel=3)
    return pad_id
