"""The samples that one caller of a rollout has submitted; sessions of several threads run in one batch."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack

from jkv.checks import check_counts, typed
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.outputs import Event
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, make_requests
from jkv.model.sampling import Sampling
from jkv.progress import progress_bar
from jkv.rollout.results import Item, Rollouts, gather


class SampleOptions(TypedDict, total=False):
    """What a rollout is asked for besides prompts, by name. What is left out is the rollout's setting; so is None.

    Attributes:
      n, max_new_tokens, stop_ids, stop_strings, first_sample, cache_salt, parse_special: see `jkv.RequestOptions`.
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
    parse_special: bool


class Session:
    """Samples of one caller: `submit` them, `run` until some or all are finished, `cancel` the rest.

    A rollout has a session of its own, for the methods of the same names. Each thread that submits and runs takes another
    (`jkv.Rollout.session`): all of them share the pool and the batch, and none sees the samples of another. Statistics are
    those of the whole engine since it had nothing pending.

    Args:
      rollout: the `jkv.Rollout`; None for the session that it is itself.

    Attributes:
      items: the samples that were not returned yet, by the engine's ticket.
      finished: the items that have finished, in that order. A turn looks at these and at its events, never at all items.
    """

    def __init__(self, rollout: Any) -> None:
        self._other, self.items, self.finished = rollout, dict[int, Item](), deque[Item]()
        self._num_prompts = 0  # submitted since nothing was pending
        self.rollout.sessions.add(self)

    @property
    def rollout(self) -> Any:
        """The rollout: this session itself, where no other is given."""
        return self if self._other is None else self._other

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
        engine = self.rollout.engine
        with self.rollout.callers.alone():
            requests = [[dataclasses.replace(one, keep=keep) for one in group] for group in self._requests(prompts, **options)]
            self._check_trace(return_trace)
            for request in (request for group in requests for request in group):
                engine.check(request)
            self.rollout.warn_of(requests[0][0])
            with deferred_interrupts():
                if not self.rollout.num_pending:
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
        **options: Any,
    ) -> list[list[Request]]:
        """The checked requests of each prompt."""
        rollout = self.rollout
        n = rollout.n if n is None else n
        check_counts(n=n, max_new_tokens=max_new_tokens)
        parse_special = typed("parse_special", options.get("parse_special", False), bool)
        ids = encode_prompts(rollout.model, prompts, parse_special, prompt_mask, rollout.prompt_pad)
        rollout.check_lengths(ids, max_new_tokens)
        drawing = Sampling() if sampling is None else typed("sampling", sampling, Sampling)
        drawing = drawing if seed is None else dataclasses.replace(drawing, seed=seed)
        limit = max_new_tokens or rollout.max_new_tokens
        own: Any = {"policy": rollout.policy, "prompt_piece": rollout.prompt_piece}
        return make_requests(rollout.model, ids, RequestOptions(sampling=drawing, max_new_tokens=limit, n=n, **own, **options))

    def _check_trace(self, return_trace: bool) -> None:
        """Refuses to trace some of the pending samples and not the others."""
        rollout = self.rollout
        if rollout.num_pending and typed("return_trace", return_trace, bool) != rollout.engine.is_traced:
            raise ValueError(
                f"All pending samples are traced, or none; {rollout.num_pending} are pending with return_trace="
                f"{rollout.engine.is_traced}. Call run() or cancel() first."
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
          RuntimeError: an earlier turn ended in the middle, because a device program failed; `reset` repairs it.
        """
        check_counts(max_steps=max_steps, until_done=until_done)
        engine, callers = self.rollout.engine, self.rollout.callers
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
        with deferred_interrupts(), self.rollout.callers.alone():
            for item in self.items.values():
                self.rollout.engine.cancel(item.ticket)
                item.drop_empty_turn()
            return self._take(self.items.values())

    def own(self, events: Sequence[Event]) -> list[Event]:
        """The events of this session's samples."""
        return [event for event in events if event.ticket in self.items]

    def note(self, ended: Sequence[int]) -> None:
        """Notes which of the tickets that have ended are of this session's samples."""
        self.finished += [self.items[ticket] for ticket in ended if ticket in self.items]

    def find_ended(self) -> None:
        """Finds the samples that have ended where no turn of a session saw it, such as in `Engine.run`."""
        known = set(self.finished)
        self.finished += [one for one in self.items.values() if one.sample.is_finished and one not in known]

    def hand_over(self, other: "Session") -> None:
        """Gives pending samples to another session, whose indices of prompts go on."""
        with self.rollout.callers.alone():
            self.find_ended()  # also those that a conversation has taken to ask for a reply
            other.items |= self.items
            other.finished += self.finished
            other._num_prompts = max(other._num_prompts, self._num_prompts)
            self.items, self.finished = {}, deque()

    def _take(self, items: Iterable[Item]) -> Rollouts:
        """Takes finished samples from the engine, in the order of the prompts."""
        rollout, taken = self.rollout, sorted(items, key=lambda item: (item.prompt, item.index))
        out = gather(rollout.model, taken, rollout.engine.stats, rollout.engine.is_traced, rollout.pad_id)
        rollout.engine.take([item.ticket for item in taken])
        self.finished.clear()
        for item in taken:
            del self.items[item.ticket]
            if item.sample.request.keep:
                rollout.engine.release(item.ticket)
        return out


def check_names(options: Any) -> None:
    """Refuses options that are no `SampleOptions`."""
    if unknown := sorted(set(options) - set(SampleOptions.__annotations__)):
        raise TypeError(
            f"Options of samples are {', '.join(SampleOptions.__annotations__)}; got {', '.join(unknown)}. Settings of the "
            "engine, the policy and prompt_piece are given to jkv.Rollout."
        )
