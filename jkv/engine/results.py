"""Results: completions as padded arrays, texts, statistics and the trace."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv import notebook
from jkv.checks import counted, described, need_tokenizer
from jkv.engine.kept_rows import Transcript
from jkv.engine.outputs import text_of
from jkv.engine.samples import Sample
from jkv.engine.stats import RunStats, SampleStats, Stats
from jkv.errors import refused
from jkv.eviction.policy import Policy
from jkv.model.experts import RouteRecorder
from jkv.model.params import Model, ModelConfig
from jkv.model.sampling import Sampling
from jkv.reasoning.marks import MOST_MARK, Marks, marks_of
from jkv.replay.trace import Trace, join_traces

FAILED = ("error", "nan")  # finish reasons
SHOWN, WIDTH = 5, 60  # samples, and characters of each, that a result shows of itself


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """Completions, prompt-major: the n samples of the first prompt, then of the second, also for one prompt.

    Attributes:
      text: completions without the token that ended them, without special tokens, and without anything from a stop string on;
        None without a tokenizer.
      tokens: `[n, T]` int32, end tokens included, right-padded with 0.
      lengths: `[n]` tokens of each completion.
      logprobs: `[n, T]` float32, of each token under the exact distribution it was drawn from (for temperature 0, under that of
        temperature 1); 0 in padding.
      logprobs_full: the same before penalties, top-k, top-p and min-p: under the model's own distribution, with temperature.
      model_logprobs: `[n, T]` float32, under the model's own distribution: at temperature 1, without penalties and cuts. None
        unless asked for (`jkv.RequestOptions`).
      top_logprobs: of each token of each sample, the most likely tokens at its place under the model's own distribution, best
        first, with their log-probabilities. None unless asked for.
      finish_reason: of each sample: "stop" (an end token of the model, or a stop id or stop string), "length",
        "cancelled" (by the caller, or Ctrl-C; its tokens are kept), "error" (something of its own failed: `samples[i].error`
        has the exception), or "nan" (the model gave no finite probabilities).
      stats: statistics of the whole call.
      trace: attention columns for `jkv.score`, when asked for.
      prompts: the token ids before each completion.
      sampling: the settings of each sample.
      policies: the policy of each sample.
      samples: statistics of each sample.
      tokenizer: the model's, None without one.
      slot_bytes: bytes of a token's key and value in one layer and KV head.
      policy_version: `[n, T]` int32, version of the weights behind each token (0 for the engine's first, and one more for each
        `update`, `add_adapter` and `update_adapter`, for whom it concerns); -1 in padding.
      routed_experts: `[n, T, L, A]` small integers, with `routed_experts=True`: the experts that each token of prompt and
        completion, as one sequence, went through in each layer that has any; 0 in padding.
      vocab_size: of the model.
      transcripts: of each sample that was kept or continues a kept one, its conversation over all turns; else None.
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
    policies: list[Policy]
    samples: list[SampleStats]
    logprobs_full: np.ndarray
    tokenizer: Any = dataclasses.field(default=None, repr=False, compare=False)
    slot_bytes: int = 0
    transcripts: list[Transcript | None] | None = None
    policy_version: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.int32))
    routed_experts: np.ndarray | None = None
    model_logprobs: np.ndarray | None = None
    top_logprobs: list[list[dict[int, float]]] | None = None
    vocab_size: int = 0

    def __repr__(self) -> str:
        lines = [
            f"  {i}: {prompt} + {length} tokens, {reason}, ends in {end}" for i, prompt, length, reason, end in self._shown
        ]
        return "\n".join([self._title, *lines] + ["  ..."] * (len(self.lengths) > SHOWN))

    def _repr_html_(self) -> str:
        more = [("...",) * 5] * (len(self.lengths) > SHOWN)
        return notebook.table(
            self._title, ("sample", "prompt tokens", "new tokens", "finished by", "ends in"), [*self._shown, *more]
        )

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} of {counted(len(self.lengths), 'sample')}; {self.stats.summary}"

    @property
    def _shown(self) -> list[tuple[int, int, int, str, str]]:
        """Of the first samples: index, tokens of the prompt, new tokens, finish reason, end of the text or the last tokens."""
        ends = [
            repr(self.text[i][-WIDTH:]) if self.text is not None else str(self.tokens[i, max(0, length - 10) : length])
            for i, length in enumerate(self.lengths[:SHOWN].tolist())
        ]
        prompts = [len(prompt) for prompt in self.prompts]
        return list(zip(range(SHOWN), prompts, self.lengths.tolist(), self.finish_reason, ends, strict=False))

    @property
    def reasoning(self) -> list[str]:
        """What each completion says before its answer: up to `</think>`, or the mark of another format (`split`); all
        of it where that mark is missing and thinking was begun, in the prompt or in the completion; else nothing. See `split`.
        """
        return [reasoning for reasoning, _ in self.split()]

    @property
    def answer(self) -> list[str]:
        """What each completion says after its reasoning."""
        return [answer for _, answer in self.split()]

    def split(self, begin: str | None = None, end: str | None = None) -> list[tuple[str, str]]:
        """The reasoning and the answer of each completion, without the marks between which a model thinks.

        None uses the tokenizer's marks: `<think>` and `</think>`, or the marks of another format (`jkv.reasoning.marks`).

        Raises:
          ValueError: a model without a tokenizer, or an empty mark.
        """
        need_tokenizer(self.tokenizer, "Reasoning and answer are texts", "Decode the tokens first.")
        assert self.text is not None
        own = marks_of(self.tokenizer)
        marks = Marks(own.begin if begin is None else begin, own.ends if end is None else (end,))
        if not marks.begin or not all(marks.ends):
            raise refused(f"The marks must be texts; got {begin!r} and {end!r}.", begin="wrong_type")
        tails = [self.tokenizer.decode(prompt[-MOST_MARK:]) for prompt in self.prompts]
        return [split_text(text, marks.is_open(tail), marks) for text, tail in zip(self.text, tails, strict=True)]


def split_text(text: str, thinks: bool, marks: Marks) -> tuple[str, str]:
    """Reasoning and answer of one text; `thinks` says that thinking was begun before it."""
    head, mark, tail = marks.cut(text)
    if not mark and not thinks and marks.begin not in text:
        return "", text
    before, found, inside = head.partition(marks.begin)
    return (inside if found and not before.strip() else head).strip(), tail.strip()


def reason_of(out: Result, index: int) -> str:
    """Why a sample failed, as errors say it."""
    error = out.samples[index].error
    return f"with the reason {out.finish_reason[index]!r}{'' if error is None else f' ({described(error)})'}"


def complete(out: Result) -> Result:
    """A result whose samples have all come to their own ends, for what is measured or learned from it.

    Raises:
      RuntimeError: some have failed.
      KeyboardInterrupt: Ctrl-C has cancelled some.
    """
    failed = [i for i, reason in enumerate(out.finish_reason) if reason in FAILED]
    if failed:
        raise RuntimeError(
            f"{counted(len(failed), 'sample')} of {len(out.finish_reason)} failed, so the others are no measurement; the first "
            f"is {failed[0]}, {reason_of(out, failed[0])}."
        ) from out.samples[failed[0]].error
    if "cancelled" in out.finish_reason:
        raise KeyboardInterrupt
    return out


def make_result(model: Model, samples: Sequence[Sample], run: RunStats, is_traced: bool) -> Result:
    """The result of finished samples; `run` holds the statistics of the engine that ran them."""
    requests, completions = [sample.request for sample in samples], [sample.completion for sample in samples]
    lengths = np.array([len(c.tokens) for c in completions], np.int32)
    tokens = np.zeros((len(completions), np.max(lengths, initial=0)), np.int32)
    log_probs, log_probs_full, log_probs_own = np.zeros((3, *tokens.shape), np.float32)
    version = np.full(tokens.shape, -1, np.int32)
    for i, completion in enumerate(completions):
        tokens[i, : lengths[i]], log_probs[i, : lengths[i]] = completion.tokens, completion.log_probs
        log_probs_own[i, : len(completion.log_probs_own)] = completion.log_probs_own
        log_probs_full[i, : lengths[i]], version[i, : lengths[i]] = completion.log_probs_full, completion.versions
    text = None
    if model.tokenizer is not None:
        text = [text_of(model.tokenizer, sample) for sample in samples]
    traces = [completion.trace for completion in completions if completion.trace is not None]
    return Result(
        text=text,
        tokens=tokens,
        lengths=lengths,
        logprobs=log_probs,
        finish_reason=[completion.finish_reason for completion in completions],
        stats=Stats.of(samples, run),
        trace=join_traces(traces) if is_traced and 0 < len(traces) == len(completions) else None,  # a row for each sample
        prompts=[request.prompt for request in requests],
        sampling=[request.sampling for request in requests],
        policies=[request.policy for request in requests],
        samples=[SampleStats.of(sample) for sample in samples],
        logprobs_full=log_probs_full,
        tokenizer=model.tokenizer,
        transcripts=[c.transcript for c in completions] if any(c.transcript for c in completions) else None,
        policy_version=version,
        routed_experts=experts_of(model.config, samples),
        model_logprobs=log_probs_own if any(request.model_logprobs for request in requests) else None,
        top_logprobs=[c.top for c in completions] if any(request.top_logprobs for request in requests) else None,
        vocab_size=model.config.vocab_size,
        slot_bytes=2 * model.params.config.head_size * model.params.embedding.dtype.itemsize,
    )


def experts_of(config: ModelConfig, samples: Sequence[Sample]) -> np.ndarray | None:
    """The experts of samples whose experts were recorded, padded to the longest: [n, T, L, A]."""
    recorders = [sample.completion.routes for sample in samples]
    if not any(recorders):
        return None
    totals = [len(sample.request.prompt) + sample.completion.num_tokens for sample in samples]
    out = RouteRecorder().finish(max(totals), config)[None].repeat(len(samples), axis=0)
    for row, recorder, total in zip(out, recorders, totals, strict=True):
        if recorder is not None:
            row[:total] = recorder.finish(total, config)
    return out
