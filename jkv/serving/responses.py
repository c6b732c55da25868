"""Responses in OpenAI's shapes, with vLLM's fields for reasoning and token ids, and the cache's figures; whole here, in pieces
in `jkv.serving.streaming`.
"""

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jkv.checks import described
from jkv.engine.results import Result
from jkv.engine.service import Ticket
from jkv.engine.stats import SampleStats
from jkv.model.params import Model
from jkv.reasoning.channels import ChannelReader
from jkv.reasoning.marks import TAGS, Marks, completion_decoder, marks_of
from jkv.reasoning.token_bytes import PartReader
from jkv.reasoning.token_text import decoder_of
from jkv.reasoning.tool_calls import CallPiece, Segment, Thought, apart, thinking_in
from jkv.serving.jobs import Calls, Job
from jkv.serving.requests import ChatFields, CompletionFields, Fields


class Parts(NamedTuple):
    """New text of each part."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """Receives a completion's text piece by piece, and returns what is certain of its reasoning and its content.

    What comes before the mark that ends the thinking is reasoning where the prompt or the text itself begins to think, and
    content otherwise. The marks, and white space at the ends of each part, belong to neither; where nothing thinks, the text is
    content as it is.

    Args:
      thinks: whether the prompt ends in thinking.
      marks: of the model (`jkv.reasoning.marks`).

    >>> splitter = ReasoningSplitter(thinks=False)
    >>> splitter.push("<think>3*7=1</th"), splitter.push("ink> d=1"), splitter.finish()
    (Parts(reasoning='3*7=1', content=''), Parts(reasoning='', content='d=1'), Parts(reasoning='', content=''))
    """

    def __init__(self, thinks: bool, marks: Marks = TAGS) -> None:
        self._marks = marks
        self._place = "start"  # then reasoning and answer; or content, where nothing thinks
        self._otherwise = "reasoning" if thinks else "content"  # than a mark at the start
        self._text = ""  # that is not certain yet
        self._has_begun = False  # whether the part in progress has any text

    def push(self, text: str) -> Parts:
        """Adds the next piece of text."""
        self._text += text
        if self._place == "start":
            self._start()
        reasoning = self._take_reasoning() if self._place == "reasoning" else ""
        content = self._take(self._text) if self._place in ("answer", "content") else ""
        return Parts(reasoning, content)

    def finish(self) -> Parts:
        """What is left when the text has ended."""
        place, text = self._otherwise if self._place == "start" else self._place, self._text
        self._text = ""
        if place == "content":
            return Parts("", text)
        rest = text.rstrip() if self._has_begun else text.strip()
        return Parts(rest if place == "reasoning" else "", "")

    def _start(self) -> None:
        """Decides whether the text thinks, once it is long enough."""
        bare, begin = self._text.lstrip(), self._marks.begin
        before, end, tail = self._marks.cut(bare)
        if bare.startswith(begin):
            self._place, self._text = "reasoning", bare.removeprefix(begin)
        elif end and not before and self._otherwise == "content":  # it answers at once
            self._place, self._text = "answer", tail
        elif not any(mark.startswith(bare) and mark != bare for mark in (begin, *self._marks.ends)):
            self._place = self._otherwise

    def _take_reasoning(self) -> str:
        """The reasoning that is certain; goes on to the answer at the mark."""
        head, mark, tail = self._marks.cut(self._text)
        if mark:
            reasoning = self._take(head).rstrip()
            self._place, self._text, self._has_begun = "answer", tail, False
            return reasoning
        held = self._marks.num_held(head)
        return self._take(head[: len(head) - held], head[len(head) - held :])

    def _take(self, text: str, held: str = "") -> str:
        """Of a text, what may be passed on; white space waits for what follows it. `held` is kept for later."""
        if self._place == "content":
            self._text = ""
            return text
        if not self._has_begun:
            text = text.lstrip()
        certain = text.rstrip()
        self._has_begun |= bool(certain)
        self._text = text[len(certain) :] + held
        return certain


class AnswerReader:
    """Receives a completion's text piece by piece: its reasoning, its content and its tool calls, which only content has.

    Args:
      marks: of the model's thinking.
      thinks: whether the prompt ends in thinking.
      calls: how calls are found; None where there are none.
    """

    def __init__(self, marks: Marks, thinks: bool, calls: Calls | None) -> None:
        self._reasoning, self.calls = ReasoningSplitter(thinks, marks), calls
        self._reader = None if calls is None else calls.reader(thinks)
        self.has_calls = False

    def push(self, text: str, is_last: bool) -> list[Segment]:
        """Adds the next or last piece of text, and returns the segments that are certain by now, in order."""
        if isinstance(self._reader, ChannelReader):
            found = self._reader.read(text, is_last)
        else:
            reasoning, content = self._reasoning.push(text)
            if is_last:
                last = self._reasoning.finish()
                reasoning, content = reasoning + last.reasoning, content + last.content
            answer: list[Segment] = [content] if self._reader is None else self._reader.read(content, is_last=False)
            answer += self._reader.read("", is_last=True) if self._reader is not None and is_last else []
            found = [one for one in (Thought(reasoning) if reasoning else "", *answer) if one]
        self.has_calls |= any(isinstance(one, CallPiece) for one in found)
        return found

    def tool_calls(self, pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
        """The calls of a message, or of a stream's delta, each with its index; the first piece of a call gives it an id."""
        found: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            one = found.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            if piece.name is not None:
                assert self.calls is not None
                one |= {"id": self.calls.form.new_id(), "type": "function", "function": {"name": piece.name, "arguments": ""}}
            one["function"]["arguments"] += piece.arguments
        return list(found.values())

    def reason(self, reason: str | None) -> str | None:
        """The finish reason of a choice: an answer that ends by itself with calls waits for their results."""
        return "tool_calls" if reason == "stop" and self.has_calls else reason


def num_reasoning_tokens(tokens: Sequence[int], thinks: bool, begin: Sequence[int], ends: Sequence[Sequence[int]]) -> int:
    """The number of a completion's tokens up to the end of its thinking; all if it thinks to its end, 0 if it does not think.

    `begin` and `ends` are the tokens of the marks.

    >>> num_reasoning_tokens([2, 9, 9, 3, 7], False, begin=[2], ends=[[3]])
    4
    """
    tokens = list(tokens)
    if not thinks and tokens[: len(begin)] != list(begin):
        return 0
    for count in range(len(tokens) + 1):
        if any(tokens[max(0, count - len(end)) : count] == list(end) for end in ends if end):
            return count
    return len(tokens)


def num_thought(model: Model, tokens: Sequence[int], thinks: bool) -> int:
    """The number of a completion's tokens up to the end of its thinking, by the model's own marks."""
    marks = marks_of(model.tokenizer)
    known = marks.begin, *marks.ends, *marks.calls
    begin, *ends = (model.tokenizer.encode(mark, add_special_tokens=False) for mark in known)
    return num_reasoning_tokens(tokens, thinks, begin, ends)


REASONS = {"cancelled": "abort"}  # the others have the same name here
FAILURES = ("error", "nan")
IDS = {"chat.completion": "chatcmpl-", "response": "resp_", "message": "msg_"}  # how ids begin, by kind


@dataclasses.dataclass(frozen=True)
class Head:
    """What all parts of a response begin with.

    Attributes:
      kind: "chat.completion" or "text_completion" of OpenAI's older endpoints, "response" of the Responses API, "message" of
        Anthropic's Messages API.
      model: the model's name.
      cut: the finish reason of what the server ended before its time.
    """

    kind: str
    model: str
    cut: str = "abort"
    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether it answers messages, and no text."""
        return self.kind in ("chat.completion", "response", "message")

    @property
    def id(self) -> str:
        """The response's id."""
        return IDS.get(self.kind, "cmpl-") + self.name

    def reason(self, reason: str) -> str | None:
        """The finish reason of a choice; None as long as there is none."""
        return self.cut if reason == "cancelled" else reason_of(reason)

    def body(self, choices: list[dict[str, Any]], is_chunk: bool = False, **more: Any) -> dict[str, Any]:
        """A response, or a chunk of a stream."""
        kind = self.kind + ".chunk" * (is_chunk and self.is_chat)
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


class Writer(NamedTuple):
    """How the answer of a call is written.

    Attributes:
      head: what it begins with.
      whole: the JSON object of a whole answer, of a job, its results, and how likely the prompts' tokens are.
      stream: the events of a job's tickets.
      ping: the event of a stream that has nothing to say; None is a comment.
    """

    head: Head
    whole: Callable[[Job, Sequence[Result], Sequence[list["Likely | None"]] | None], dict[str, Any]]
    stream: Callable[[Job, Sequence[Ticket]], AsyncIterator[str]]
    ping: str | None = None


def reason_of(reason: str) -> str | None:
    """A finish reason; None as long as there is none."""
    return REASONS.get(reason, reason) or None


def message_of(text: str, reader: AnswerReader, includes_reasoning: bool = False) -> dict[str, Any]:
    """A chat message with its reasoning and its tool calls, if it has any."""
    segments = reader.push(text, is_last=True)
    content, pieces = apart(segments)
    reasoning = thinking_in(segments)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in reader.tool_calls(pieces)]
    message = {"role": "assistant", "content": None if calls and not content else content}
    return message | ({"tool_calls": calls} if calls else {}) | reasoning_fields(reasoning if includes_reasoning else "")


def reasoning_fields(reasoning: str) -> dict[str, str]:
    """Reasoning under the names that clients read: vLLM's and DeepSeek's."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


class Likely(NamedTuple):
    """How likely a token is, and the most likely ones in its place, best first."""

    log_prob: float
    best: Mapping[int, float]


def likely_of(
    fields: Fields, tokens: Sequence[int], log_probs: Sequence[float], top: Sequence[Mapping[int, float]]
) -> list[Likely | None]:
    """How likely drawn tokens are; without `top`, the drawn tokens are the most likely ones, if these are asked for."""
    if fields.top[1] and not top:
        top = [{token: log_prob} for token, log_prob in zip(tokens, log_probs, strict=True)]
    return [Likely(log_prob, best) for log_prob, best in zip(log_probs, top or [{}] * len(log_probs), strict=True)]


def chat_log_probs(reader: PartReader, tokens: Sequence[int], likely: Sequence[Likely | None]) -> dict[str, Any]:
    """Log-probabilities of a chat's tokens, with the most likely tokens of each place."""
    content = []
    for token, one in zip(tokens, likely, strict=True):
        assert one is not None
        top = [shown_token(*reader.other(other), log_prob) for other, log_prob in one.best.items()]
        (part,) = reader.read([token])
        content.append({**shown_token(part.name, part.value, one.log_prob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def shown_token(name: str, value: bytes, log_prob: float) -> dict[str, Any]:
    """A token with its log-probability."""
    return {"token": name, "logprob": log_prob, "bytes": list(value)}


def text_log_probs(
    reader: PartReader, tokens: Sequence[int], likely: Sequence[Likely | None], top: int | None
) -> dict[str, Any]:
    """Log-probabilities of a text's tokens, None for one without a predecessor; offsets count the text's characters.

    With `top`, also the most likely tokens of each place, beside the text's own.
    """
    parts, best = [], []
    for token, one in zip(tokens, likely, strict=True):
        names = [] if one is None else [(reader.other(other)[0], log_prob) for other, log_prob in one.best.items()]
        parts += reader.read([token])
        best.append(one and dict([*names, (parts[-1].name, one.log_prob)]))
    return {
        "tokens": [part.name for part in parts],
        "token_logprobs": [None if one is None else one.log_prob for one in likely],
        "top_logprobs": best if top else None,
        "text_offset": [part.start for part in parts],
    }


def best_of(likely: Sequence[Likely | None], count: int | None) -> list[Likely | None]:
    """No more than `count` most likely tokens of each place."""
    return [one and one._replace(best=dict(list(one.best.items())[: count or 0])) for one in likely]


def prompt_log_probs(model: Model, tokens: Sequence[int], likely: Sequence[Likely | None], count: int) -> list[Any]:
    """A prompt's log-probabilities in vLLM's shape: by token id, each place's own token and `count` most likely ones.

    The rank is that among these, None for an own token that is none of them.
    """
    found: list[Any] = []
    for token, one in zip(tokens, best_of(likely, count), strict=True):
        if one is None:
            found.append(None)
            continue
        ranks: dict[int, int | None] = {other: rank for rank, other in enumerate(one.best, 1)}
        place = {token: one.log_prob} | dict(one.best) | {token: one.log_prob}
        text = model.tokenizer.decode
        found.append({str(t): {"logprob": p, "rank": ranks.get(t), "decoded_token": text([t])} for t, p in place.items()})
    return found


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The log-probabilities of a text that goes on in a second one."""
    return {name: values and values + second[name] for name, values in first.items()}


def usage_of(model: Model, prompts: Sequence[Any], results: Sequence[Result], thinks: bool, is_chat: bool) -> dict[str, Any]:
    """Tokens of prompts and completions, and what the cache held of them at the end.

    `cached_tokens` are the tokens of prompts that the prefix cache, or a conversation's row, held when the first sample of a
    prompt started.

    `kv` has tokens averaged over layers and KV heads and summed over samples, and the sum of the samples' peak bytes.
    """
    completions = [result.tokens[i, :length].tolist() for result in results for i, length in enumerate(result.lengths)]
    samples = [sample for result in results for sample in result.samples]
    num_prompt, num_new = sum(map(len, prompts)), sum(map(len, completions))
    seen = sum(len(prompt) for result in results for prompt in result.prompts) + num_new
    num_reasoning = sum(num_thought(model, tokens, thinks) for tokens in completions) if is_chat else 0
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


def whole(
    model: Model, head: Head, job: Job, results: Sequence[Result], scores: Sequence[list[Likely | None]] | None
) -> dict[str, Any]:
    """The response of a call; `scores` are how likely the prompts' tokens are, if it has that."""
    fields = job.fields
    if isinstance(fields, ChatFields):
        choices = [chat_choice(model, head, fields, result, i, job) for result in results for i in range(fields.n)]
    else:
        choices = text_choices(model, head, fields, job, results, scores)
    for index, choice in enumerate(choices):
        choice["index"] = index
        if scores is not None and fields.prompt_logprobs is not None:
            i = index // fields.n
            choice["prompt_logprobs"] = prompt_log_probs(model, job.prompts[i].tolist(), scores[i], fields.prompt_logprobs)
    more = {"prompt_token_ids": job.prompts[0].tolist()} if fields.return_token_ids else {}
    usage = usage_of(model, job.prompts, results, job.thinks, head.is_chat)
    return head.body(choices, usage=usage, **more)


def chat_choice(model: Model, head: Head, fields: ChatFields, result: Result, sample: int, job: Job) -> dict[str, Any]:
    """A completion of a chat."""
    assert result.text is not None
    tokens, likely = drawn_of(result, sample, fields)
    reader = PartReader(model.tokenizer, completion_decoder(model.tokenizer))
    answer = AnswerReader(marks_of(model.tokenizer), job.thinks, job.calls)
    return {
        "index": 0,
        "message": message_of(result.text[sample], answer, fields.include_reasoning),
        "logprobs": chat_log_probs(reader, tokens, likely) if fields.logprobs else None,
        "finish_reason": answer.reason(head.reason(result.finish_reason[sample])),
        **({"token_ids": tokens} if fields.return_token_ids else {}),
    }


def text_choices(
    model: Model,
    head: Head,
    fields: CompletionFields,
    job: Job,
    results: Sequence[Result],
    scores: Sequence[list[Likely | None]] | None,
) -> list[dict[str, Any]]:
    """The completions of all prompts, prompt-major."""
    choices = []
    for i, prompt in enumerate(job.prompts):
        result = results[i] if results else None
        echoed = decoder_of(model.tokenizer)(prompt.tolist()) if fields.echo else ""
        for sample in range(fields.n):
            tokens, likely = ([], []) if result is None else drawn_of(result, sample, fields)
            text = "" if result is None or result.text is None else result.text[sample]
            record = None
            if fields.logprobs is not None:
                reader = PartReader(model.tokenizer, completion_decoder(model.tokenizer), len(echoed))
                record = text_log_probs(reader, tokens, likely, fields.logprobs)
            if scores is not None and record is not None and fields.echo:
                reader = PartReader(model.tokenizer, decoder_of(model.tokenizer))
                record = joined(
                    text_log_probs(reader, prompt.tolist(), best_of(scores[i], fields.logprobs), fields.logprobs), record
                )
            reason = "length" if result is None else head.reason(result.finish_reason[sample])
            more = {"token_ids": tokens} if fields.return_token_ids else {}
            choices.append({"index": 0, "text": echoed + text, "logprobs": record, "finish_reason": reason, **more})
    return choices


def drawn_of(result: Result, sample: int, fields: Fields) -> tuple[list[int], list[Likely | None]]:
    """A sample's tokens and how likely they are, under the distribution that was asked for."""
    tokens, log_probs = tokens_of(result, sample)
    if fields.model_logprobs:
        assert result.model_logprobs is not None
        log_probs = result.model_logprobs[sample, : len(tokens)].tolist()
    return tokens, likely_of(fields, tokens, log_probs, [] if result.top_logprobs is None else result.top_logprobs[sample])


def tokens_of(result: Result, sample: int) -> tuple[list[int], list[float]]:
    """A sample's tokens and their log-probabilities under the distributions that they were drawn from."""
    length = int(result.lengths[sample])
    return result.tokens[sample, :length].tolist(), result.logprobs[sample, :length].tolist()
