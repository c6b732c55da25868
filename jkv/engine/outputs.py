"""Tokens to text, stop strings, finish reasons, events and streaming callbacks."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jkv.engine.faults import blame
from jkv.engine.interrupts import call, is_interrupt
from jkv.engine.records import RowOutputs
from jkv.engine.samples import Sample
from jkv.model.params import Model
from jkv.reasoning.marks import completion_decoder
from jkv.reasoning.token_text import TextStream, cut, num_certain


@dataclasses.dataclass(frozen=True)
class Event:
    """The new tokens of one sample after a chunk.

    Attributes:
      ticket: the request's (`Engine.submit`); for `jkv.generate`, the index of the prompt.
      sample: index among the request's samples.
      tokens: the new tokens.
      logprobs: their log-probabilities, as `Result.logprobs`.
      text: the new text, if there is a tokenizer and events are streamed. Characters that may be part of a stop string wait for
        a later event.
      finish_reason: empty as long as the sample runs.
      evicted: tokens of prompt and completion that are not in the cache any more, averaged over layers and KV heads.
      model_logprobs: as `Result.model_logprobs`; empty unless asked for.
      top_logprobs: as a sample's of `Result.top_logprobs`; empty unless asked for.
    """

    ticket: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    text: str | None
    finish_reason: str
    evicted: float = 0.0
    model_logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)


class Outputs:
    """Collects every chunk's tokens into completions, and emits them as events.

    Args:
      model: gives the tokenizer.
      tickets: the engine's record of the samples of each request.
      finish: ends a sample with a reason.

    Attributes:
      events: not yet returned by `Engine.step`.
      raised: a callback's KeyboardInterrupt, which `Engine.step` raises at the end of the step.
      is_streaming: whether events carry text for requests without a callback too.
    """

    def __init__(self, model: Model, tickets: Mapping[int, Sequence[Sample]], finish: Callable[[Sample, str], None]) -> None:
        self.tokenizer = model.tokenizer
        self.events: list[Event] = []
        self.raised: BaseException | None = None
        self.is_streaming = False
        self._tickets, self._finish = tickets, finish
        self._collected: dict[Sample, None] = {}  # samples with tokens that no event has carried yet, in order

    def collect(self, sample: Sample, row: RowOutputs, version: int) -> None:
        """Adds a chunk's tokens to the completion, for the sample's next event, and ends the sample if it is finished.

        `version` is of the weights that ran the chunk; the logits of the first token came from `sample.row.version`.
        """
        completion, tokens, log_probs = sample.completion, row.tokens, row.log_probs
        reason = self._reason(sample, row)
        kept = None
        with blame(sample):
            kept = sample.stops.find(tokens) if sample.stops else None
        if kept is not None:
            tokens, log_probs, reason = tokens[:kept], log_probs[:kept], "stop"
        completion.tokens += tokens
        completion.log_probs += log_probs
        completion.log_probs_full += row.log_probs_full[: len(tokens)]
        if sample.request.model_logprobs:
            completion.log_probs_own += row.log_probs_own[: len(tokens)]
        if sample.request.top_logprobs:
            pairs = zip(row.top_tokens[: len(tokens)], row.top_log_probs, strict=False)
            completion.top += [dict(zip(ids, values, strict=True)) for ids, values in pairs]
        completion.versions += [sample.row.version, *[version] * len(tokens)][: len(tokens)]
        sample.row.version = version
        self._collected[sample] = None
        if sample.completion.error is not None:
            reason = "error"
        if reason:
            self._finish(sample, reason)

    def _reason(self, sample: Sample, row: RowOutputs) -> str:
        """The finish reason that follows from a chunk's tokens; empty if the sample continues."""
        if not np.isfinite(row.log_probs[-1]):
            return "nan"
        is_drawn = sample.completion.num_tokens + len(row.tokens) > len(sample.request.forced)
        if is_drawn and row.tokens[-1] in sample.request.stop_ids:
            return "stop"
        return "length" if sample.remaining <= 0 else ""

    def emit_collected(self) -> None:
        """Emits an event for every sample with new tokens; a callback may end others, whose events then come first."""
        while self._collected:
            self.emit(next(iter(self._collected)))

    def emit(self, sample: Sample) -> None:
        """Makes an event of a sample's new tokens, for the caller of `Engine.step` and the request's callback.

        A callback that raises ends its request with the reason "error", exits included; the other requests continue. So does a
        tokenizer that cannot decode the sample's tokens, which ends the sample alone.
        """
        self._collected.pop(sample, None)
        completion, start, text = sample.completion, sample.num_emitted_tokens, None
        tokens, log_probs = completion.tokens[start:], completion.log_probs[start:]
        if not tokens and not sample.is_finished:  # it was restarted, and has not come to the end of its earlier events
            return
        if self.tokenizer is not None and (self.is_streaming or sample.on_tokens or sample.text):
            with blame(sample):
                text = self._new_text(sample)
            if text is None and not sample.is_finished:
                self._finish(sample, "error")
            elif text is None:
                completion.finish_reason = "error"
        sample.num_emitted_tokens = max(start, completion.num_tokens)
        left = sample.row.evicted + completion.shared
        place = sample.ticket, sample.index
        others = completion.log_probs_own[start:], completion.top[start:]
        event = Event(*place, tokens, log_probs, text, completion.finish_reason, left, *others)
        self.events.append(event)
        if sample.on_tokens is not None and (error := call(sample.on_tokens, event)):
            if is_interrupt(error):
                self.raised = error  # `Engine.step` raises it at the end of the step, when nothing can be lost
            sample.completion.error = error
            for other in self._tickets.get(sample.ticket, []):
                other.on_tokens = None
                if not other.is_finished:
                    other.completion.error = error
                    self._finish(other, "error")
                    self.emit(other)

    def _new_text(self, sample: Sample) -> str:
        """The text that no event has had yet and that neither later tokens nor a stop string can change."""
        if sample.text is None:
            sample.text = TextStream(completion_decoder(self.tokenizer))
        sample.text.push(sample.text_tokens[sample.text.num_tokens :])
        if sample.is_finished:
            sample.text.finish()
        stops = sample.request.stop_strings
        text = cut(sample.text.text, stops)
        end = len(text) if sample.is_finished else num_certain(text, stops)
        start, sample.num_emitted = sample.num_emitted, max(sample.num_emitted, end)
        return text[start : sample.num_emitted]

    def forget(self) -> None:
        """Forgets the chunk in progress, but for the ends of samples; events of earlier ones stay."""
        for sample in [one for one in self._collected if one.is_finished]:
            self.emit(sample)
        self._collected.clear()

    def take(self) -> list[Event]:
        """Returns and clears the events since the last call."""
        events, self.events = self.events, []
        return events


def text_of(tokenizer: Any, sample: Sample) -> str:
    """The text of a finished sample, to which its events add up.

    Where the tokenizer cannot decode its tokens, its reason becomes "error", and its text is what its events had.
    """
    completion = sample.completion
    if completion.text is None:
        with blame(sample):
            completion.text = cut(completion_decoder(tokenizer)(sample.text_tokens), sample.request.stop_strings)
    if completion.text is None:
        completion.text, completion.finish_reason = "", "error"
        if sample.text is not None:
            completion.text = sample.text.text[: sample.num_emitted]
    return completion.text
