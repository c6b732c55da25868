"""Responses in OpenAI's shapes, with vLLM's fields for reasoning and token ids, and the cache's figures."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jkv.checks import described
from jkv.engine.results import Result
from jkv.engine.stats import SampleStats
from jkv.model.params import Model
from jkv.reasoning.marks import Marks, marks_of
from jkv.reasoning.token_bytes import PartReader
from jkv.serving.reasoning import ReasoningSplitter, num_reasoning_tokens

REASONS = {"cancelled": "abort"}  # the others have the same name here
FAILURES = ("error", "nan")


@dataclasses.dataclass(frozen=True)
class Head:
    """What all parts of a response begin with.

    Attributes:
      kind: "chat.completion" or "text_completion".
      model: the model's name.
    """

    kind: str
    model: str
    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether it is of the chat endpoint."""
        return self.kind == "chat.completion"

    @property
    def id(self) -> str:
        """The response's id."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.name}"

    def body(self, choices: list[dict[str, Any]], is_chunk: bool = False, **more: Any) -> dict[str, Any]:
        """A response, or a chunk of a stream."""
        kind = self.kind + ".chunk" * (is_chunk and self.is_chat)
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def reason_of(reason: str) -> str | None:
    """A finish reason; None as long as there is none."""
    return REASONS.get(reason, reason) or None


def message_of(text: str, thinks: bool, includes_reasoning: bool, marks: Marks) -> dict[str, Any]:
    """A chat message with its reasoning, if it has any."""
    splitter = ReasoningSplitter(thinks, marks)
    parts = [splitter.push(text), splitter.finish()]
    reasoning, content = ("".join(part) for part in zip(*parts, strict=True))
    return {"role": "assistant", "content": content, **reasoning_fields(reasoning if includes_reasoning else "")}


def reasoning_fields(reasoning: str) -> dict[str, str]:
    """Reasoning under the names that clients read: vLLM's and DeepSeek's."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def chat_log_probs(reader: PartReader, tokens: Sequence[int], log_probs: Sequence[float], top: int | None) -> dict[str, Any]:
    """Log-probabilities of a chat's tokens; `top` is of greedy draws alone, where the most likely token is the drawn one."""
    content = []
    for part, log_prob in zip(reader.read(tokens), log_probs, strict=True):
        one = {"token": part.name, "logprob": log_prob, "bytes": list(part.value)}
        content.append({**one, "top_logprobs": [one] if top else []})
    return {"content": content, "refusal": None}


class Likely(NamedTuple):
    """How likely a token is, and which one is most likely in its place."""

    log_prob: float
    best: int
    best_log_prob: float


def drawn(tokens: Sequence[int], log_probs: Sequence[float]) -> list["Likely | None"]:
    """How likely drawn tokens are; they count as the most likely ones, which is asked for at temperature 0 alone."""
    return [Likely(log_prob, token, log_prob) for token, log_prob in zip(tokens, log_probs, strict=True)]


def text_log_probs(
    reader: PartReader, tokens: Sequence[int], likely: Sequence[Likely | None], top: int | None
) -> dict[str, Any]:
    """Log-probabilities of a text's tokens, None for one without a predecessor; offsets count the text's characters.

    With `top`, also the most likely token of each place, beside the text's own.
    """
    parts, best = [], []
    for token, one in zip(tokens, likely, strict=True):
        names = [] if one is None or one.best == token else [(reader.name(one.best), one.best_log_prob)]
        parts += reader.read([token])
        best.append(one and dict([*names, (parts[-1].name, one.log_prob)]))
    return {
        "tokens": [part.name for part in parts],
        "token_logprobs": [None if one is None else one.log_prob for one in likely],
        "top_logprobs": best if top else None,
        "text_offset": [part.start for part in parts],
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The log-probabilities of a text that goes on in a second one."""
    return {name: values and values + second[name] for name, values in first.items()}


def usage_of(model: Model, prompts: Sequence[Any], results: Sequence[Result], thinks: bool, is_chat: bool) -> dict[str, Any]:
    """Tokens of prompts and completions, and what the cache held of them at the end.

    `cached_tokens` are those of prompts that the prefix cache, or a conversation's row, held when the first sample of each
    started.

    `kv` has tokens averaged over layers and KV heads and summed over samples, and the sum of the samples' peak bytes.
    """
    marks = marks_of(model.tokenizer)
    begin, *ends = (model.tokenizer.encode(mark, add_special_tokens=False) for mark in (marks.begin, *marks.ends))
    completions = [result.tokens[i, :length].tolist() for result in results for i, length in enumerate(result.lengths)]
    samples = [sample for result in results for sample in result.samples]
    num_prompt, num_new = sum(map(len, prompts)), sum(map(len, completions))
    seen = sum(len(prompt) for result in results for prompt in result.prompts) + num_new
    num_reasoning = sum(num_reasoning_tokens(tokens, thinks, begin, ends) for tokens in completions) if is_chat else 0
    evicted = sum(sample.evicted + sample.shared for sample in samples)
    return {
        **counts(num_prompt, num_new),
        "prompt_tokens_details": {"cached_tokens": sum(result.samples[0].cached_tokens for result in results)},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
        "kv": held_tokens(seen, evicted) | {"bytes": sum(sample.peak_kv_bytes for sample in samples)},
    }


def held_tokens(seen: int, evicted: float) -> dict[str, int]:
    """How many of the tokens seen are in the cache, and how many are not, summed over samples."""
    return {"held_tokens": max(0, round(seen - evicted)), "evicted_tokens": round(evicted)}


def counts(num_prompt: int, num_new: int) -> dict[str, int]:
    """The tokens of a usage."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def failure_of(results: Sequence[Result]) -> str:
    """Why no completion can be returned; empty if one can."""
    for result in results:
        for reason, sample in zip(result.finish_reason, result.samples, strict=True):
            if reason in FAILURES:
                return describe_failure(reason, sample)
    return ""


def describe_failure(reason: str, sample: SampleStats) -> str:
    """A failed sample in a sentence."""
    if reason == "nan":
        return "The model gave no finite probabilities. Check its weights."
    return f"A sample ended with an error: {described(sample.error)}."
