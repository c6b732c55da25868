"""Completions as server-sent events: OpenAI's chunks, then the usage if it was asked for, then `[DONE]`."""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from jkv.engine.outputs import Event
from jkv.engine.service import Ticket
from jkv.model.params import Model
from jkv.reasoning.marks import completion_decoder, marks_of
from jkv.reasoning.token_bytes import PartReader
from jkv.reasoning.token_text import decoder_of
from jkv.reasoning.tool_calls import apart, thinking_in
from jkv.serving.errors import error_body
from jkv.serving.jobs import Job
from jkv.serving.requests import ChatFields, CompletionFields, Fields
from jkv.serving.responses import (
    FAILURES,
    AnswerReader,
    Head,
    Likely,
    chat_log_probs,
    counts,
    describe_failure,
    held_tokens,
    likely_of,
    reasoning_fields,
    text_log_probs,
    usage_of,
)

LOGGER = logging.getLogger("jkv.serving")
COMMENT = ": ping\n\n"  # which every reader of server-sent events skips


class EventStream(StreamingResponse):
    """A stream of events that calls `finish` at its end, whoever ends it.

    Args:
      events: texts of events.
      finish: is called once, also where the client went before the first event.
      headers: of the response.
      seconds: in which the client must take each part; a slower one is dropped, so that it keeps no place from others.
      ping: what is sent after `ping_seconds` without an event, so that no proxy between takes the connection for dead.
      ping_seconds: 0 sends none.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        finish: Callable[[], None],
        headers: dict[str, str],
        seconds: float,
        ping: str = COMMENT,
        ping_seconds: float = 0.0,
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**headers, "cache-control": "no-cache"})
        self.finish, self.seconds, self.ping, self.ping_seconds = finish, seconds, ping.encode(), ping_seconds
        self.sent = math.inf  # when the last part was sent; infinite while one is

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the events."""

        async def send_in_time(message: Any) -> None:
            self.sent = math.inf
            try:
                async with asyncio.timeout(self.seconds):
                    await send(message)
            except TimeoutError:
                raise ClientDisconnect from None
            self.sent = time.monotonic()

        try:
            await super().__call__(scope, receive, send_in_time)
        except ClientDisconnect:
            LOGGER.info("A client took nothing for %g seconds, or has gone.", self.seconds)
        finally:
            self.finish()

    async def stream_response(self, send: Any) -> None:
        """Sends the events, and pings between them."""
        pings = asyncio.create_task(self.send_pings(send))
        try:
            await super().stream_response(send)
        finally:
            pings.cancel()

    async def send_pings(self, send: Any) -> None:
        """A ping whenever nothing was sent for `ping_seconds`, until it is cancelled or the client has gone."""
        with contextlib.suppress(ClientDisconnect):
            while self.ping_seconds:
                await asyncio.sleep(max(0.0, min(self.ping_seconds, self.sent + self.ping_seconds - time.monotonic())))
                if self.sent + self.ping_seconds <= time.monotonic():
                    await send({"type": "http.response.body", "body": self.ping, "more_body": True})


def sse(data: dict[str, Any]) -> str:
    r"""An event of a stream.

    >>> sse({"a": 1})
    'data: {"a":1}\n\n'
    """
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def typed_sse(data: dict[str, Any]) -> str:
    r"""An event of a stream whose events have names, each its data's type.

    >>> typed_sse({"type": "ping"})
    'event: ping\ndata: {"type":"ping"}\n\n'
    """
    return f"event: {data['type']}\n{sse(data)}"


async def stream(model: Model, head: Head, job: Job, tickets: Sequence[Ticket]) -> AsyncIterator[str]:
    """The events of a call."""
    fields, num_prompt, num_new = job.fields, sum(map(len, job.prompts)), 0
    evicted: dict[tuple[int, int], float] = {}  # of each sample
    more: dict[str, Any] = {"usage": None} if fields.includes_usage else {}
    if fields.counts_each_chunk:
        more["usage"] = counts(num_prompt, 0)
    chunks = make_chunks(model, head, job)
    try:
        for choice in chunks.prompts():
            yield sse(head.body([choice], is_chunk=True, **more))
        async with contextlib.aclosing(merged(tickets)) as events:
            async for index, event in events:
                if event.finish_reason in FAILURES:
                    result = await tickets[index]
                    raise RuntimeError(describe_failure(event.finish_reason, result.samples[event.sample]))
                num_new += len(event.tokens)
                evicted[index, event.sample] = event.evicted
                if fields.counts_each_chunk:
                    kv = held_tokens(fields.n * num_prompt + num_new, sum(evicted.values()))
                    more["usage"] = counts(num_prompt, num_new) | {"kv": kv}
                for choice in chunks.of(index * fields.n + event.sample, event):
                    yield sse(head.body([choice], is_chunk=True, **more))
        if fields.includes_usage:
            results = [await ticket for ticket in tickets]
            usage = usage_of(model, job.prompts, results, job.thinks, head.is_chat)
            yield sse(head.body([], is_chunk=True, usage=usage))
    except Exception as error:
        yield sse(error_body(500, str(error)))
    yield "data: [DONE]\n\n"


async def merged(tickets: Sequence[Ticket]) -> AsyncGenerator[tuple[int, Event]]:
    """The events of several requests as they come, each with the index of its ticket."""
    queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue()

    async def pump(index: int, ticket: Ticket) -> None:
        try:
            async for event in ticket:
                queue.put_nowait((index, event))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, ticket)) for index, ticket in enumerate(tickets)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


class ChatChunks:
    """The chunks of each sample of a chat: the role, then reasoning, content and tool calls, then the finish reason."""

    def __init__(self, model: Model, head: Head, job: Job) -> None:
        assert isinstance(job.fields, ChatFields)
        self.fields, self.head = job.fields, head
        self.begun = set[int]()  # samples whose role was sent
        marks = marks_of(model.tokenizer)
        self.answers = [AnswerReader(marks, job.thinks, job.calls) for _ in range(job.num_samples)]
        self.readers = [PartReader(model.tokenizer, completion_decoder(model.tokenizer)) for _ in range(job.num_samples)]

    def prompts(self) -> list[dict[str, Any]]:
        """Nothing: a chat's messages are not echoed."""
        return []

    def of(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The chunks of an event. The role comes with the first tokens: a client that times its first chunk times them."""
        answer, fields = self.answers[index], self.fields
        segments = answer.push(event.text or "", is_last=bool(event.finish_reason))
        reasoning, (content, pieces) = thinking_in(segments), apart(segments)
        delta: dict[str, Any] = reasoning_fields(reasoning if fields.include_reasoning else "")
        delta |= ({"content": content} if content else {}) | ({"tool_calls": answer.tool_calls(pieces)} if pieces else {})
        more: dict[str, Any] = {"token_ids": event.tokens} if fields.return_token_ids else {}
        if fields.logprobs and event.tokens:
            more["logprobs"] = chat_log_probs(self.readers[index], event.tokens, likely_in(event, fields))
        chunks = [] if index in self.begun else [choice(index, delta={"role": "assistant", "content": ""})]
        self.begun.add(index)
        if delta or (more and event.tokens):
            chunks.append(choice(index, delta=delta, **more))
        if event.finish_reason:
            chunks.append(choice(index, answer.reason(self.head.reason(event.finish_reason)), delta={}))
        return chunks


class TextChunks:
    """The chunks of each sample of a completion; with `echo`, the prompt comes first."""

    def __init__(self, model: Model, head: Head, job: Job) -> None:
        assert isinstance(job.fields, CompletionFields)
        self.fields, self.head, self.has_more = job.fields, head, bool(job.groups)
        decode = decoder_of(model.tokenizer)
        self.echoed = [decode(prompt.tolist()) * job.fields.echo for prompt in job.prompts for _ in range(job.fields.n)]
        own = completion_decoder(model.tokenizer)
        self.readers = [PartReader(model.tokenizer, own, len(text)) for text in self.echoed]

    def prompts(self) -> list[dict[str, Any]]:
        """The prompts, if they are to be echoed."""
        if not self.fields.echo:
            return []
        reason = None if self.has_more else "length"
        return [choice(index, reason, text=text, logprobs=None) for index, text in enumerate(self.echoed)]

    def of(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The chunk of an event."""
        fields, text = self.fields, event.text or ""
        log_probs = None
        if fields.logprobs is not None:
            log_probs = text_log_probs(self.readers[index], event.tokens, likely_in(event, fields), fields.logprobs)
        more = {"token_ids": event.tokens} if fields.return_token_ids else {}
        return [choice(index, self.head.reason(event.finish_reason), text=text, logprobs=log_probs, **more)]


def make_chunks(model: Model, head: Head, job: Job) -> ChatChunks | TextChunks:
    """The maker of a call's chunks."""
    return ChatChunks(model, head, job) if isinstance(job.fields, ChatFields) else TextChunks(model, head, job)


def likely_in(event: Event, fields: Fields) -> list[Likely | None]:
    """How likely an event's tokens are, under the distribution that was asked for."""
    log_probs = event.model_logprobs if fields.model_logprobs else event.logprobs
    return likely_of(fields, event.tokens, log_probs, event.top_logprobs)


def choice(index: int, reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """A choice of a chunk."""
    return {"index": index, **fields, "finish_reason": reason}
