"""Sessions: the samples that each caller of a rollout has submitted, and the threads that run them in one batch."""

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from jkv.checks import check_counts, typed
from jkv.engine.backend import Backend
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.options import GIVEN_ELSEWHERE
from jkv.engine.outputs import Event
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, make_requests
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.forms import Form
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.progress import progress_bar
from jkv.rollout.results import Item, Rollouts, gather

LOOK_SECONDS = 0.2  # between two looks of a thread that waits, which may have been interrupted


class SampleOptions(TypedDict, total=False):
    """What a rollout is asked for besides prompts, by name. What is left out is the rollout's setting; so is None.

    Attributes:
      n, max_new_tokens, stop_ids, stop_strings, first_sample, cache_salt, adapter, parse_special, form: see
        `jkv.RequestOptions`.
      top_logprobs: how many most likely tokens of each place `Rollouts.top` has, up to 64; 0 is none.
      sampling: None is temperature 1 without cuts and penalties, as a policy gradient needs it.
      seed: replaces the sampling's seed; if both are None, fresh entropy is drawn, and `stats.seed` reports it. An equal seed
        gives equal tokens, whatever else is in the batch.
      prompt_mask: of padded rows of token ids, on either side: 1 for each token and 0 for padding, as a tokenizer's
        `attention_mask`. Rows that begin or end with `pad_id` are refused without it.
      return_trace: whether to record what each query read, for exact replay. All policies of this package can be traced.
    """

    n: int | None
    sampling: Sampling | None
    seed: int | None
    max_new_tokens: int | None
    stop_ids: Sequence[int] | None
    stop_strings: Sequence[str]
    prompt_mask: Any
    return_trace: bool
    first_sample: int
    cache_salt: str
    adapter: str | None
    parse_special: bool
    form: Form | None
    top_logprobs: int | None


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What samples have where a call names nothing else, and their limits: see `jkv.Rollout`.

    Attributes:
      prompt_pad: the padding token, if it was given: rows of token ids that begin or end with it need a mask.
    """

    policy: Policy
    n: int
    max_prompt_tokens: int
    max_new_tokens: int
    prompt_piece: int | None
    pad_id: int
    prompt_pad: int | None
    top_logprobs: int = 0

    def check_lengths(self, prompts: Sequence[np.ndarray], max_new_tokens: int | None) -> None:
        """Refuses lengths above the limits of this rollout."""
        for i, prompt in enumerate(prompts):
            if len(prompt) > self.max_prompt_tokens:
                raise refused(
                    f"A prompt may have {self.max_prompt_tokens} tokens, the rollout's max_prompt_tokens; prompt {i} has "
                    f"{len(prompt)}. Shorten it, or build the rollout with a higher limit.",
                    prompts="does_not_fit",
                )
        if max_new_tokens is not None and max_new_tokens > self.max_new_tokens:
            raise refused(
                f"A completion may have {self.max_new_tokens} tokens, the rollout's max_new_tokens; got {max_new_tokens}. "
                "Lower it, or build the rollout with a higher limit.",
                max_new_tokens="does_not_fit",
            )


class Callers:
    """The threads that use a rollout's engine, which has no thread of its own: one at a time, and those who wait run its steps.

    A served engine (`jkv.engine.service`) has an owner thread. A trainer's has none: what a thread sets for itself in JAX, such
    as a precision or a device, then also holds for the samples that it waits for.

    Args:
      engine: runs their requests.

    Attributes:
      sessions: all that are in use.
      warned: the kinds of warnings that were given.
    """

    def __init__(self, engine: Backend) -> None:
        self.engine, self.sessions, self.warned, self._num_running = engine, weakref.WeakSet[Session](), set[str](), 0
        self._changed = threading.Condition()
        self._is_busy = False  # a thread has the engine
        self._num_asking = 0  # threads that want it between two steps

    @property
    def num_pending(self) -> int:
        """Samples of all sessions that were submitted and not returned yet."""
        return sum(session.pending for session in list(self.sessions))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The caller's thread has the engine inside the block, after the step in progress. Blocks do not nest."""
        with self._changed:
            self._num_asking += 1
            try:
                self._changed.wait_for(lambda: not self._is_busy)
                self._is_busy = True
            finally:
                self._num_asking -= 1
        try:
            yield
        finally:
            self._let_go()

    def run(self, is_over: Callable[[], object], on_events: Callable[[list[Event]], None]) -> None:
        """Runs steps, or waits while another thread runs them, until `is_over`.

        Calls of other threads go before the next step. While another thread has put the engine to sleep, this one waits.

        Args:
          is_over: whether the caller has what it waits for; it is asked between steps.
          on_events: receives the events of the steps that this thread runs.

        Raises:
          RuntimeError: an earlier step ended in the middle, in this thread or another one.
        """
        with self._running():
            while self._take_step(is_over):
                try:
                    events = self.engine.step()
                    self._note(events)
                finally:
                    self._let_go()
                on_events(events)

    def _note(self, events: Sequence[Event]) -> None:
        """Notes which samples have finished, for the sessions that they are of, whoever runs the step."""
        ended = [event.ticket for event in events if event.finish_reason]
        for session in list(self.sessions) if ended else ():
            session.note(ended)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Counts the threads that run steps or wait for them."""
        with self._changed:
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                is_last = not self._num_running
            if is_last:  # nothing runs between steps while nobody waits
                with self.alone():
                    self.engine.rest()

    def _take_step(self, is_over: Callable[[], object]) -> bool:
        """Waits until this thread may run a step; False once it is over."""
        with self._changed:
            while self._is_busy or not is_over():
                if not (self._is_busy or self._num_asking or self.engine.is_asleep):
                    self._is_busy = True
                    return True
                self._changed.wait(LOOK_SECONDS)
        return False

    def _let_go(self) -> None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()


class Session:
    """Samples of one caller: `submit` them, `run` until some or all are finished, `cancel` the rest.

    A rollout has a session of its own, for the methods of the same names. Each thread that submits and runs takes another
    (`jkv.Rollout.session`): all of them share the pool and the batch, and none sees the samples of another. Statistics are
    of the whole engine since it was last idle.

    Args:
      callers: the threads that use the engine.
      defaults: settings of samples, and their limits.

    Attributes:
      engine: the `jkv.Engine` that runs the samples, or the replicas. Not to be called while another thread uses the rollout.
      items: the samples that were not returned yet, by the engine's ticket.
      finished: the items that have finished, in that order. A step looks at these and at its events, never at all items.
    """

    def __init__(self, callers: Callers, defaults: Defaults) -> None:
        self.callers, self.engine, self.defaults = callers, callers.engine, defaults
        self.items, self.finished = dict[int, Item](), deque[Item]()
        self._num_prompts = 0  # submitted since nothing was pending
        callers.sessions.add(self)

    @property
    def model(self) -> Model:
        """The model with the weights in use."""
        return self.engine.model

    @property
    def pending(self) -> int:
        """The number of submitted samples that were not returned yet."""
        return len(self.items)

    def submit(self, prompts: Any, **options: Unpack[SampleOptions]) -> None:
        """Queues `n` samples of each prompt for `run`.

        Args:
          prompts: a text, a list of token ids or a conversation (a list of messages), or a list of these; or what a tokenizer
            of Hugging Face returns for texts.
          options: see `jkv.rollout.SampleOptions`.

        Raises:
          ValueError: bad input, refused before anything compiles; nothing is queued, and pending samples are not affected.
          TypeError: an unknown option; the known ones are listed.
        """
        self.queue(prompts, **options)

    def queue(self, prompts: Any, *, keep: bool = False, **options: Unpack[SampleOptions]) -> None:
        """`submit`; with `keep`, samples leave their rows for a next turn."""
        check_names(options)
        return_trace = options.pop("return_trace", False)
        engine = self.engine
        with self.callers.alone():
            requests = [[dataclasses.replace(one, keep=keep) for one in group] for group in self._requests(prompts, **options)]
            self._check_trace(return_trace)
            for request in (request for group in requests for request in group):
                engine.check(request)
            self._warn_of(requests[0][0])
            with deferred_interrupts():
                if not self.callers.num_pending:
                    engine.reset_stats()
                    engine.is_traced = return_trace
                if not self.items:
                    self._num_prompts = 0
                for prompt, group in enumerate(requests, self._num_prompts):
                    for index, request in enumerate(group):
                        ticket = engine.submit_requests([request])
                        self.items[ticket] = Item(prompt, index, ticket, engine.tickets[ticket][0])
                self._num_prompts += len(requests)

    def _requests(
        self,
        prompts: Any,
        n: int | None = None,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_new_tokens: int | None = None,
        prompt_mask: Any = None,
        top_logprobs: int | None = None,
        **options: Any,
    ) -> list[list[Request]]:
        """The checked requests of each prompt."""
        defaults, model = self.defaults, self.model
        n = defaults.n if n is None else n
        check_counts(n=n, max_new_tokens=max_new_tokens)
        parse_special = typed("parse_special", options.get("parse_special", False), bool)
        ids = encode_prompts(model, prompts, parse_special, prompt_mask, defaults.prompt_pad)
        defaults.check_lengths(ids, max_new_tokens)
        drawing = Sampling() if sampling is None else typed("sampling", sampling, Sampling)
        drawing = drawing if seed is None else dataclasses.replace(drawing, seed=seed)
        limit = max_new_tokens or defaults.max_new_tokens
        own: Any = {"policy": defaults.policy, "prompt_piece": defaults.prompt_piece}
        own["top_logprobs"] = defaults.top_logprobs if top_logprobs is None else top_logprobs
        return make_requests(model, ids, RequestOptions(sampling=drawing, max_new_tokens=limit, n=n, **own, **options))

    def _check_trace(self, return_trace: bool) -> None:
        """Refuses to trace some of the pending samples and not the others."""
        num_pending = self.callers.num_pending
        if num_pending and typed("return_trace", return_trace, bool) != self.engine.is_traced:
            raise refused(
                f"All pending samples are traced, or none; {num_pending} are pending with return_trace="
                f"{self.engine.is_traced}. Call run() or cancel() first.",
                return_trace="conflict",
            )

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
          ValueError: a count below 1.
          RuntimeError: an earlier step ended in the middle, because a device program failed; `reset` repairs it.
        """
        check_counts(max_steps=max_steps, until_done=until_done)
        engine, callers = self.engine, self.callers
        with deferred_interrupts(ends_here=True) as presses:
            with callers.alone():
                if self.items:
                    engine.wake()
                begun = 0 if max_steps is None else engine.stats.steps
                wanted = min(until_done or self.pending, self.pending)

            def is_over() -> bool:
                if engine.is_idle:
                    self.find_ended()
                is_late = max_steps is not None and engine.stats.steps - begun >= max_steps
                return bool(presses) or is_late or len(self.finished) >= wanted

            with progress_bar(wanted, progress, "rollout") as show:
                callers.run(is_over, lambda events: show(self.own(events)))
            with callers.alone():
                return self._take(self.finished)

    def cancel(self) -> Rollouts:
        """Cancels pending samples and returns them with their tokens so far and the reason "cancelled"."""
        with deferred_interrupts(), self.callers.alone():
            for item in self.items.values():
                self.engine.cancel(item.ticket)
                item.drop_empty_turn()
            return self._take(self.items.values())

    def own(self, events: Sequence[Event]) -> list[Event]:
        """The events of this session's samples."""
        return [event for event in events if event.ticket in self.items]

    def note(self, ended: Sequence[int]) -> None:
        """Notes which of the tickets that have ended are of this session's samples."""
        self.finished += [self.items[ticket] for ticket in ended if ticket in self.items]

    def find_ended(self) -> None:
        """Finds the samples that have ended where no step of a session saw it, such as in `Engine.run`."""
        known = set(self.finished)
        self.finished += [one for one in self.items.values() if one.sample.is_finished and one not in known]

    def hand_over(self, other: "Session") -> None:
        """Gives pending samples to another session, whose indices of prompts go on."""
        with self.callers.alone():
            self.find_ended()  # also those that a conversation has taken to ask for a reply
            other.items |= self.items
            other.finished += self.finished
            other._num_prompts = max(other._num_prompts, self._num_prompts)
            self.items, self.finished = {}, deque()

    def _take(self, items: Iterable[Item]) -> Rollouts:
        """Takes finished samples from the engine, in the order of the prompts."""
        engine, taken = self.engine, sorted(items, key=lambda item: (item.prompt, item.index))
        out = gather(self.model, taken, engine.stats, engine.is_traced, self.defaults.pad_id)
        engine.take([item.ticket for item in taken])
        self.finished.clear()
        for item in taken:
            del self.items[item.ticket]
            if item.sample.request.keep:
                engine.release(item.ticket)
        return out

    def _warn_of(self, request: Request) -> None:
        """Warns once that a distribution that is cut or penalised biases a trainer's ratios, and of padding by a stop token."""
        sampling, pad_id = request.sampling, self.defaults.pad_id
        if pad_id in request.stop_ids and pad_id not in self.model.config.end_ids:
            self._warn("pad", pad_warning(pad_id))
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
        if kind not in self.callers.warned:
            self.callers.warned.add(kind)
            warnings.warn(text, stacklevel=5)


def check_names(options: Any) -> None:
    """Refuses options that are no `SampleOptions`."""
    if unknown := sorted(set(options) - set(SampleOptions.__annotations__)):
        place = "Settings of the engine, the policy and prompt_piece are given to jkv.Rollout."
        place = next((GIVEN_ELSEWHERE[name].strip() for name in unknown if name in GIVEN_ELSEWHERE), place)
        known = ", ".join(SampleOptions.__annotations__)
        raise TypeError(f"Options of samples are {known}; got {', '.join(unknown)}. {place}")


def pad_warning(pad_id: int) -> str:
    """The warning about padding with an end token."""
    return (
        f"pad_id={pad_id} is also an end token: a trainer that masks with `tokens != pad_id` drops every end token from its "
        "loss, so the policy never learns to stop. Use `out.mask`, or pass another pad_id."
    )
