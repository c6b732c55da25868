"""Jobs: a client's fields become checked requests that fit the engine, and an endpoint waits for their end, or for a client
that goes away.
"""

import asyncio
import bisect
import contextlib
import dataclasses
import queue
import re
import secrets
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest

from jkv.cache.slot_size import slot_size_of
from jkv.checkpoints.chat_template import ChatRenderer, ChatText, has_chat_template
from jkv.checkpoints.tokenizer import CheckpointTokenizer
from jkv.checks import shown
from jkv.engine import turns
from jkv.engine.engine import Engine
from jkv.engine.kept_rows import KeptRow
from jkv.engine.memory import most_slots
from jkv.engine.prompts import check_messages, encode_prompt, encode_prompts, encode_text
from jkv.engine.requests import Request, RequestOptions, make_requests
from jkv.engine.results import Result
from jkv.engine.service import Ticket
from jkv.errors import InputError
from jkv.eviction import Policy
from jkv.eviction.byte_budget import in_slots
from jkv.forms import Form
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.reasoning.channels import ChannelReader
from jkv.reasoning.marks import MOST_MARK, marks_of
from jkv.reasoning.tool_calls import FORMS, CallForm, CallSplitter, form_of
from jkv.serving.form_fields import form_of_calls
from jkv.serving.messages import plain_messages
from jkv.serving.options import ServerOptions
from jkv.serving.requests import ChatFields, CompletionFields, TokenizeFields, policy_of
from pallas_kernels.quantised import Format


async def gathered(tickets: Sequence[Ticket]) -> list[Result]:
    """The results of requests."""
    return [await ticket for ticket in tickets]


async def until_gone(request: HTTPRequest, work: Awaitable[Any]) -> Any:
    """What the work returns, unless the client goes away first.

    Raises:
      ClientDisconnect: it went.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # else their ends are reported as errors that nobody read


def when_all_end(tickets: Sequence[Ticket], act: Callable[[], None]) -> None:
    """Calls `act` once all requests have ended: at once, or in the thread that ends the last one."""
    open_ones, lock = len(tickets), threading.Lock()

    def ended(_: Any) -> None:
        nonlocal open_ones
        with lock:
            open_ones -= 1
            is_last = open_ones == 0
        if is_last:
            act()

    if not tickets:
        act()
    for ticket in tickets:
        ticket.add_done_callback(ended)


def fitted(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    """The samples of a prompt as they are, or with the prompt in pieces where it fits in pieces alone.

    A piece is as large as the row grows between two compactions of a short prompt: a prompt of any length then needs no more
    memory than its completion does. A client's own pieces stay.

    Raises:
      ValueError: a request that the engine can never serve.
    """
    try:
        engine.check(requests[0])
    except ValueError as error:
        pieces = [in_pieces(engine, request) for request in requests]
        try:
            engine.check(pieces[0])
        except ValueError:
            raise error from None
        if requests[0].first:
            rule = "{field} must be smaller, such as {piece}, or left out: {why}"
            raise InputError(rule, field="prompt_piece", code="does_not_fit", piece=pieces[0].first, why=error) from None
        return pieces
    return list(requests)


def in_pieces(engine: Engine, request: Request) -> Request:
    """A request whose prompt is compacted for the first time after its first piece, if its policy evicts at all."""
    policy, most = request.policy, engine.model.config.max_positions
    if policy.evict is None and not policy.evicts_in_steps:
        return request
    short = dataclasses.replace(request, prompt=request.prompt[:1], first=0, num_kept=0, max_new_tokens=most)
    piece = min(most_slots(engine.model.params, short), engine.max_slots)
    return dataclasses.replace(request, first=piece) if piece < len(request.prompt) else request


def longest_text(engine: Engine, policy: Policy) -> int:
    """The most tokens that prompt and completion may have together, whatever part of them is the prompt."""

    def is_too_long(length: int) -> bool:
        if length - 1 > policy.longest_prompt:
            return True
        prompt = np.zeros(length - 1, np.int32)
        try:
            fitted(engine, [Request(prompt, policy, Sampling(temperature=0.0), 0, 0, 0, 1, ())])
        except ValueError:
            return True
        return False

    return 1 + bisect.bisect_left(range(2, engine.model.config.max_positions + 1), True, key=is_too_long)


TOOL_VARIABLES = ("tools", "xml_tools")  # the latter is SmolLM3's


@dataclasses.dataclass(frozen=True)
class Calls:
    """How the tool calls of a response are found.

    Attributes:
      form: in which the model writes them.
      functions: the JSON schema of each function's arguments, by its name.
      has_many: whether a response may have several.
    """

    form: CallForm
    functions: Mapping[str, Any]
    has_many: bool = True

    def reader(self, thinks: bool) -> CallSplitter | ChannelReader:
        """A reader of one answer; `thinks` says whether its prompt ends in thinking."""
        if self.form.has_channels:
            return ChannelReader(self.functions, self.has_many, thinks)
        return CallSplitter(self.form, self.functions, self.has_many)


@dataclasses.dataclass(frozen=True)
class Job:
    """A call of an endpoint, ready to be submitted.

    Attributes:
      fields: what the client sent.
      prompts: token ids.
      groups: the requests of each prompt; none where only the prompt is asked for.
      thinks: whether the first prompt ends in thinking.
      calls: how tool calls are found; None where the model may call none.
      row: of the response that it continues, if it continues one.
    """

    fields: ChatFields | CompletionFields
    prompts: list[np.ndarray]
    groups: list[list[Request]]
    thinks: bool
    calls: Calls | None = None
    row: KeptRow | None = None

    def of_client(self, client: str) -> "Job":
        """The job with a client; the requests of different clients take turns."""
        groups = [[dataclasses.replace(request, client=client) for request in group] for group in self.groups]
        return dataclasses.replace(self, groups=groups)

    @property
    def num_samples(self) -> int:
        """Completions of all prompts."""
        return sum(map(len, self.groups))

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of its prompts are returned."""
        return self.fields.num_scored is not None

    @property
    def num_open(self) -> int:
        """What it counts for among the calls that a server has open: completions of all prompts, or prompts that are scored."""
        return max(self.num_samples, self.is_scored * len(self.prompts))


RENDERERS = 4  # processes at most; a server that renders one conversation at a time starts only one


def encoding_lock(tokenizer: Any) -> contextlib.AbstractContextManager[Any]:
    """The lock that encoding threads must hold: none if the tokenizers library encodes without changing the tokenizer."""
    return contextlib.nullcontext() if isinstance(tokenizer, CheckpointTokenizer) else threading.Lock()


class Encoder:
    """Encodes texts and conversations for many threads; it keeps the processes that render chat templates.

    A long text or a slow template delays no other, as long as a process is free.

    Args:
      model: gives tokenizer and template.
      parse_special: whether messages may make control tokens.
      tool_form: the name of the form in which the model writes tool calls; empty for the chat template's own.
    """

    def __init__(self, model: Model, parse_special: bool = False, tool_form: str = "") -> None:
        self.model, self.parse_special, self.tool_form = model, parse_special, tool_form
        self._lock = encoding_lock(model.tokenizer)
        count = RENDERERS if has_chat_template(model.tokenizer) else 0
        self._renderers = [ChatRenderer(model.tokenizer) for _ in range(count)]  # which start when they are needed
        self._idle: queue.LifoQueue[ChatRenderer] = queue.LifoQueue()
        for one in reversed(self._renderers):
            self._idle.put(one)

    def close(self) -> None:
        """Ends the processes."""
        for one in self._renderers:
            one.close()

    @property
    def renderer(self) -> ChatRenderer:
        """A process with the chat templates.

        Raises:
          InputError: the model has none.
        """
        if not self._renderers:
            rule = "Chat messages need a model with a chat template; this one has none. Use /v1/completions."
            raise InputError(rule, field="messages", code="unsupported")
        return self._renderers[0]

    def encode(self, prompt: Any) -> list[np.ndarray]:
        """Token ids of a text or a list of token ids, or of each of a list of these."""
        if isinstance(prompt, list) and any(isinstance(one, Mapping) for one in prompt):
            rule = "{field} must be a text or token ids; got chat messages. Send them to /v1/chat/completions."
            raise InputError(rule, field="prompt", code="wrong_type")
        with self._lock:
            return encode_prompts(self.model, prompt)

    def tokenize(self, fields: TokenizeFields) -> list[int]:
        """Token ids of a text or a conversation of any length, none of an empty text."""
        is_chat = fields.messages is not None
        text = fields.prompt or ""
        adds = not is_chat if fields.add_special_tokens is None else fields.add_special_tokens
        if is_chat:
            text = self._readable(self._render(self.plain(fields.messages), fields.template))
        with self._lock:
            return list(encode_text(unbounded(self.model), 0, text, is_chat=not adds)) if text else []

    def encode_chat(self, messages: Any, **options: Any) -> np.ndarray:
        """Token ids of a conversation; `options` are passed to the chat template."""
        text = self._readable(self._render(self.plain(messages), options))
        with self._lock:
            return encode_prompt(self.model, 0, text, is_chat=True)

    def _readable(self, text: ChatText) -> str:
        """A rendered text as it is to be encoded: with `parse_special`, it does not know what users wrote."""
        return str(text) if self.parse_special else text

    def plain(self, messages: Any) -> list[Any]:
        """Messages as the chat template reads them."""
        return plain_messages(messages, self.renderer.template)

    def calls(self, fields: ChatFields) -> Calls | None:
        """How the tool calls of a response are found; None where the model may call none.

        Raises:
          InputError: a template that passes no tools on, or that writes calls in an unknown form.
        """
        if fields.functions is None:
            return None
        template = self.renderer.template_for(fields.tools)
        if tool_variable(template) is None:
            rule = "{field} need a chat template that passes them on; this model's has no place for them. Leave them out."
            raise InputError(rule, field="tools", code="unsupported")
        form = FORMS[self.tool_form] if self.tool_form else form_of(template)
        if form is None:
            rule = (
                "{field} need a chat template that writes calls in a known form ({known}); this model's writes none. Leave "
                "them out, or start the server with --tool-form."
            )
            raise InputError(rule, field="tools", code="unsupported", known=", ".join(FORMS))
        return Calls(form, fields.functions, fields.parallel_tool_calls)

    def _render(self, messages: list[Any], options: Mapping[str, Any]) -> ChatText:
        """What the template writes of plain messages; it receives tools under the name that it reads."""
        options, tools = dict(options), options.get("tools")
        if tools and (name := tool_variable(self.renderer.template_for(tools))) not in (None, "tools"):
            options[name] = options["tools"]
        try:
            check_messages(self.model, 0, messages)
            renderer = self._idle.get()
            try:
                return renderer.render(messages, **options)
            finally:
                self._idle.put(renderer)
        except RecursionError:
            rule = "{field} and tools must not be nested so deep; they have too many levels. Flatten them."
            raise InputError(rule, field="messages", code="too_long") from None

    def encode_after(self, history: list[Any], messages: Any, last_token: int, **options: Any) -> np.ndarray:
        """Token ids of new messages after a reply, in the template's own form: from the end of the reply on.

        `history` are the messages before the reply, whose last token is `last_token`; if that is the mark that ends a reply, it
        is not repeated.

        Raises:
          ValueError: as `encode_chat`; or the template does not write a reply as it is, so that nothing comes after it.
        """
        mark = f"reply-{secrets.token_hex(8)}"
        whole = [*history, {"role": "assistant", "content": mark}, *self.plain(messages)]
        text = self._render(whole, options)
        if text.count(mark) != 1:
            rule = (
                "{field} needs a chat template that writes each reply once, as it is; this model's wrote it {count} times. "
                "Send the whole conversation without {field}."
            )
            raise InputError(rule, field="previous_response_id", code="unsupported", count=text.count(mark))
        after = text.after(mark)
        with self._lock:
            ids = encode_prompt(self.model, 0, self._readable(after), is_chat=True) if after else np.zeros(0, np.int32)
        return ids[1:] if len(ids) and ids[0] == last_token and last_token in self.model.config.end_ids else ids


def tool_variable(template: str) -> str | None:
    """The variable in which a chat template reads tools; None if it reads none.

    >>> tool_variable("{% if tools %}"), tool_variable("{% if xml_tools %}"), tool_variable("{{ messages }}")
    ('tools', 'xml_tools', None)
    """
    return next((name for name in TOOL_VARIABLES if re.search(rf"\{{[%{{][^%}}]*\b{name}\b", template)), None)


def unbounded(model: Model) -> Model:
    """The model as one of endless positions, for texts that are counted and not completed."""
    config = dataclasses.replace(model.config, max_positions=sys.maxsize)
    return dataclasses.replace(model, params=dataclasses.replace(model.params, config=config))


def make_turn(
    encoder: Encoder,
    fields: ChatFields,
    options: ServerOptions,
    row: KeptRow,
    history: list[Any],
    kv_format: Format | None = None,
    adapter: str | None = None,
) -> Job:
    """Encodes and checks a call that continues a response, which left a row; `history` are the messages before that.

    A policy may be given again: budgets in bytes are compared as slots of the pool, whose format is `kv_format`.

    Raises:
      ValueError: a request that the model cannot serve, or another policy than the conversation's.
    """
    model, policy = encoder.model, row.request.policy
    slot = slot_size_of(model.params, kv_format)
    if (fields.policy is not None or fields.settings) and in_slots(policy_of(fields, options), slot) != policy:
        rule = "A conversation keeps its {field}, {own}; got another with previous_response_id. Leave it out."
        raise InputError(rule, field="policy", code="conflict", own=str(policy))
    if fields.model and (adapter or "") != row.request.adapter:
        rule = "A conversation keeps its {field}; got another one with previous_response_id, {got}. Leave it out."
        raise InputError(rule, field="model", code="conflict", got=shown(fields.model))
    salt = row.request.cache_salt
    if fields.cache_salt not in (None, salt):
        rule = "{field} is the conversation's own with previous_response_id; got another one, {got}. Leave it out."
        raise InputError(rule, field="cache_salt", code="conflict", got=shown(fields.cache_salt))
    calls = encoder.calls(fields)
    new = encoder.encode_after(history, fields.messages, int(row.transcript.tokens[-1]), **fields.template)
    sampling = fields.sampling(model)
    request_options = RequestOptions(
        sampling=sampling,
        max_new_tokens=fields.limit,
        stop_ids=fields.stop_ids(model),
        stop_strings=fields.stop_strings,
        prompt_piece=fields.prompt_piece,
        **fields.returned(sampling),
        **fields.excluded,
        priority=fields.priority,
        bad_words=fields.bad_tokens(model),
        form=form_for(fields, calls),
    )
    request = turns.next_request(model, row, new, request_options, fields.store)
    thinks = ends_in_thinking(model, request.prompt)
    return Job(fields, [request.prompt], [[request]], thinks, calls, row)


def make_job(
    encoder: Encoder,
    fields: ChatFields | CompletionFields,
    options: ServerOptions,
    kv_format: Format | None = None,
    adapter: str | None = None,
) -> Job:
    """Encodes and checks a call; `kv_format` is that of the engine's pool, and `adapter` the name that it gives as its model.

    Raises:
      ValueError: a request that the model cannot serve.
    """
    model = encoder.model
    if adapter and fields.num_scored is not None:
        rule = "{field} scores prompts with the model itself; got the adapter {got}. Leave it out, or name the model."
        field = "echo" if fields.prompt_logprobs is None else "prompt_logprobs"
        raise InputError(rule, field=field, code="unsupported", got=shown(adapter))
    calls = None
    if isinstance(fields, ChatFields):
        calls = encoder.calls(fields)
        prompts = [encoder.encode_chat(fields.messages, **fields.template)]
    else:
        prompts = encoder.encode(fields.prompt)
    groups: list[list[Request]] = []
    if fields.limit != 0:
        sampling = fields.sampling(model)
        request_options = RequestOptions(
            policy=policy_of(fields, options),
            sampling=sampling,
            max_new_tokens=fields.limit,
            n=fields.n,
            stop_ids=fields.stop_ids(model),
            stop_strings=fields.stop_strings,
            cache_salt=fields.cache_salt or "",
            adapter=adapter,
            prompt_piece=fields.prompt_piece,
            **fields.returned(sampling),
            **fields.excluded,
            priority=fields.priority,
            bad_words=fields.bad_tokens(model),
            form=form_for(fields, calls),
        )
        made = make_requests(model, prompts, request_options, kv_format=kv_format)
        keep = isinstance(fields, ChatFields) and fields.store
        groups = [turns.with_keep(group, keep) for group in made]
    return Job(fields, prompts, groups, isinstance(fields, ChatFields) and ends_in_thinking(model, prompts[0]), calls)


def form_for(fields: ChatFields | CompletionFields, calls: Calls | None) -> Form | None:
    """The form of an answer: the one that the client asks for, or the one of calls that it requires.

    Raises:
      InputError: a form that is not served.
    """
    if calls is None or not isinstance(fields, ChatFields) or not fields.must_call:
        return fields.form
    functions = {name: schema for name, schema in calls.functions.items() if name in fields.must_call}
    return form_of_calls(calls.form, functions, calls.has_many)


def ends_in_thinking(model: Model, prompt: Sequence[int] | np.ndarray) -> bool:
    """Whether a prompt has begun to think, so that a completion begins with reasoning."""
    tail = model.tokenizer.decode(prompt[-MOST_MARK:])
    return marks_of(model.tokenizer).is_open(tail)
