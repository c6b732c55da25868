"""`jkv.Rollouts`: finished samples as the arrays that a trainer reads, conversations of several turns among them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.engine.results import Result, make_result
from jkv.engine.samples import Sample
from jkv.engine.stats import RunStats
from jkv.errors import refused
from jkv.model.params import Model
from jkv.model.top_tokens import LEAST_REST, NO_TOKEN, TopTokens
from jkv.reasoning.marks import completion_decoder


@dataclasses.dataclass(frozen=True, repr=False)
class Rollouts(Result):
    """Finished samples for a trainer, prompt-major. Fields of `jkv.Result`, whose padding values replies have too, and:

    Attributes:
      tokens: `[N, T]` int32, all that follows the prompt, end tokens and the replies of conversations included, right-padded
        with `pad_id`.
      mask: `[N, T]` bool, tokens that the model drew, in every turn; replies and padding are False. A trainer that compares
        tokens with `pad_id` instead loses end tokens equal to it.
      prompt_index: `[N]` index of each sample's prompt in the call, or among all submitted since nothing was pending.
      sample_index: `[N]` index of each sample among its prompt's samples.
      seeds: `[N]` seed of each sample's draws: given, or fresh entropy.
      pad_id: the padding token.
      top: the most likely tokens at each place under the model's own distribution, if `top_logprobs=k` asked for them, as
        arrays: `tokens` and `logprobs`, `[N, T, k]`, best first, and `rest`, `[N, T]`, the log-probability of all others
        together. Token -1 with `-inf` stands where there is none: in replies and padding, and beyond what a sample asked for.
    """

    mask: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), bool))
    prompt_index: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    sample_index: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    seeds: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    pad_id: int = 0
    top: TopTokens | None = None

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
            rule = f"Prompts must fit the width; the longest has {longest} tokens, the width is {width}. Raise it."
            raise refused(rule, width="does_not_fit")
        padded = np.full((len(self.prompts), width), self.pad_id, np.int32)
        for row, prompt in zip(padded, self.prompts, strict=True):
            row[width - len(prompt) :] = prompt
        return padded


@dataclasses.dataclass(eq=False)
class Item:
    """A submitted sample that was not returned yet.

    Attributes:
      prompt: index of its prompt.
      index: among the samples of that prompt.
      ticket: the engine's, of the turn in progress.
      sample: of the turn in progress.
      earlier: the turns of its conversation before that one, each with the reply after it.
      reason: why the conversation ended, where its last turn does not say it.
    """

    prompt: int
    index: int
    ticket: int
    sample: Sample
    earlier: list[tuple[Sample, np.ndarray]] = dataclasses.field(default_factory=list)
    reason: str = ""

    @property
    def turns(self) -> list[tuple[Sample, np.ndarray]]:
        """Its turns, each with the reply after it; none follows the last one."""
        return [*self.earlier, (self.sample, np.zeros(0, np.int32))]

    @property
    def first(self) -> Sample:
        """The sample of its first turn."""
        return self.earlier[0][0] if self.earlier else self.sample

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt."""
        return sum(turn.completion.num_tokens + len(reply) for turn, reply in self.turns)

    def drop_empty_turn(self) -> None:
        """Forgets a last turn that ended before its first token, and the reply that it would have read."""
        if self.earlier and not self.sample.completion.tokens:
            self.reason = self.reason or self.sample.completion.finish_reason
            self.sample, _ = self.earlier.pop()

    def columns(self) -> dict[str, np.ndarray]:
        """The fields of `Rollouts` after the prompt, `[T]`."""
        fields: dict[str, list[Any]] = {name: [] for name in FILL}
        for turn, reply in self.turns:
            drawn, count = turn.completion, len(reply)
            fields["tokens"] += [*drawn.tokens, *reply.tolist()]
            fields["mask"] += [True] * drawn.num_tokens + [False] * count
            fields["logprobs"] += [*drawn.log_probs, *[0.0] * count]
            fields["logprobs_full"] += [*drawn.log_probs_full, *[0.0] * count]
            fields["policy_version"] += [*drawn.versions, *[-1] * count]
        return {name: np.array(values, FILL[name].dtype) for name, values in fields.items()}

    def top(self) -> list[dict[int, float]]:
        """The most likely tokens of each token after the prompt, none for replies."""
        return [place for turn, reply in self.turns for place in (*turn.completion.top, *({} for _ in reply))]


FILL = {  # what stands where a sample has no token; the padding token replaces that of `tokens`
    "tokens": np.int32(0),
    "mask": np.bool_(False),
    "logprobs": np.float32(0),
    "logprobs_full": np.float32(0),
    "policy_version": np.int32(-1),
}


def gather(model: Model, items: Sequence[Item], stats: RunStats, is_traced: bool, pad_id: int) -> Rollouts:
    """Finished samples as arrays, in the order of the items."""
    samples = [item.sample for item in items]
    columns = [item.columns() for item in items]
    for item in items:
        if model.tokenizer is not None and item.earlier:
            write_text(model.tokenizer, item)
    result = make_result(model, samples, stats, is_traced)
    lengths = np.array([item.num_tokens for item in items], np.int32)
    arrays = {}
    for name, fill in FILL.items():
        fill = fill.dtype.type(pad_id) if name == "tokens" else fill
        arrays[name] = np.full((len(items), np.max(lengths, initial=0)), fill)
        for row, column in zip(arrays[name], columns, strict=True):
            row[: len(column[name])] = column[name]
    num_top = max((item.first.request.top_logprobs for item in items), default=0)
    tops = [item.top() for item in items] if num_top else []
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(Result)}
    return Rollouts(
        **fields
        | arrays
        | {
            "lengths": lengths,
            "prompts": [item.first.request.prompt for item in items],
            "finish_reason": [item.reason or item.sample.completion.finish_reason for item in items],
            "top_logprobs": tops if num_top else None,
        },
        top=top_tokens(tops, arrays["tokens"].shape[1], num_top, model.config.vocab_size) if num_top else None,
        prompt_index=np.array([item.prompt for item in items], np.int32),
        sample_index=np.array([item.index for item in items], np.int32),
        seeds=np.array([sample.request.seed for sample in samples], np.int64),
        pad_id=pad_id,
    )


def top_tokens(tops: Sequence[Sequence[dict[int, float]]], width: int, count: int, vocab_size: int) -> TopTokens:
    """The most likely tokens of samples as arrays of `width` tokens and `count` choices."""
    shape = len(tops), width, count
    found = TopTokens(np.full(shape, NO_TOKEN, np.int32), np.full(shape, -np.inf, np.float32), np.zeros(shape[:2], np.float32))
    for row, places in enumerate(tops):
        for t, place in enumerate(places):
            found.tokens[row, t, : len(place)], found.logprobs[row, t, : len(place)] = list(place), list(place.values())
    total = np.exp(found.logprobs.astype(np.float64)).sum(axis=-1)
    rest = np.log(np.maximum(1 - total, LEAST_REST))
    is_all = (found.tokens != NO_TOKEN).sum(axis=-1) == vocab_size
    return found._replace(rest=np.where(is_all, -np.inf, rest).astype(np.float32))


def write_text(tokenizer: Any, item: Item) -> None:
    """Decodes a conversation's turns and replies as one text, without the tokens that ended turns.

    Where that fails, it ends with the reason "error".
    """
    completion = item.sample.completion
    before = [token for turn, reply in item.earlier for token in [*turn.text_tokens, *reply.tolist()]]
    try:
        completion.text = completion_decoder(tokenizer)([*before, *item.sample.text_tokens])
    except Exception as error:
        completion.text, completion.error, item.reason = "", completion.error or error, "error"
