"""Responses that are not streamed."""

from collections.abc import Sequence
from typing import Any

from jkv.engine.results import Result
from jkv.model.params import Model
from jkv.reasoning.marks import completion_decoder, marks_of
from jkv.reasoning.token_bytes import PartReader
from jkv.reasoning.token_text import decoder_of
from jkv.serving.jobs import Job
from jkv.serving.requests import ChatFields, CompletionFields, Fields
from jkv.serving.responses import (
    Head,
    Likely,
    chat_log_probs,
    drawn,
    joined,
    message_of,
    reason_of,
    text_log_probs,
    usage_of,
)


def whole(
    model: Model, head: Head, job: Job, results: Sequence[Result], scores: Sequence[list[Likely | None]] | None
) -> dict[str, Any]:
    """The response of a call; `scores` are how likely the prompts' tokens are, if they are echoed with that."""
    fields = job.fields
    if isinstance(fields, ChatFields):
        choices = [chat_choice(model, fields, result, i, job.thinks) for result in results for i in range(fields.n)]
    else:
        choices = text_choices(model, fields, job, results, scores)
    for index, choice in enumerate(choices):
        choice["index"] = index
    more = {"prompt_token_ids": job.prompts[0].tolist()} if fields.return_token_ids else {}
    usage = usage_of(model, job.prompts, results, job.thinks, head.is_chat)
    return head.body(choices, usage=usage, **more)


def chat_choice(model: Model, fields: ChatFields, result: Result, sample: int, thinks: bool) -> dict[str, Any]:
    """A completion of a chat."""
    assert result.text is not None
    tokens, log_probs = drawn_of(result, sample, fields)
    reader = PartReader(model.tokenizer, completion_decoder(model.tokenizer))
    return {
        "index": 0,
        "message": message_of(result.text[sample], thinks, fields.include_reasoning, marks_of(model.tokenizer)),
        "logprobs": chat_log_probs(reader, tokens, log_probs, fields.top_logprobs) if fields.logprobs else None,
        "finish_reason": reason_of(result.finish_reason[sample]),
        **({"token_ids": tokens} if fields.return_token_ids else {}),
    }


def text_choices(
    model: Model,
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
            tokens, log_probs = ([], []) if result is None else drawn_of(result, sample, fields)
            text = "" if result is None or result.text is None else result.text[sample]
            record = None
            if fields.logprobs is not None:
                reader = PartReader(model.tokenizer, completion_decoder(model.tokenizer), len(echoed))
                record = text_log_probs(reader, tokens, drawn(tokens, log_probs), fields.logprobs)
            if scores is not None and record is not None:
                reader = PartReader(model.tokenizer, decoder_of(model.tokenizer))
                record = joined(text_log_probs(reader, prompt.tolist(), scores[i], fields.logprobs), record)
            reason = "length" if result is None else reason_of(result.finish_reason[sample])
            more = {"token_ids": tokens} if fields.return_token_ids else {}
            choices.append({"index": 0, "text": echoed + text, "logprobs": record, "finish_reason": reason, **more})
    return choices


def drawn_of(result: Result, sample: int, fields: Fields) -> tuple[list[int], list[float]]:
    """A sample's tokens and their log-probabilities, under the distribution that was asked for."""
    tokens, log_probs = tokens_of(result, sample)
    if fields.model_logprobs:
        assert result.model_logprobs is not None
        log_probs = result.model_logprobs[sample, : len(tokens)].tolist()
    return tokens, log_probs


def tokens_of(result: Result, sample: int) -> tuple[list[int], list[float]]:
    """A sample's tokens and their log-probabilities under the distributions that they were drawn from."""
    length = int(result.lengths[sample])
    return result.tokens[sample, :length].tolist(), result.logprobs[sample, :length].tolist()
