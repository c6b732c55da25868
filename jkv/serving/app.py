"""The application: OpenAI's endpoints over a served engine, and what a server needs around them."""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jkv.checks import DISTRIBUTION, MOST_SHOWN, need_tokenizer, shown
from jkv.engine.results import Result
from jkv.engine.service import Service, Ticket
from jkv.errors import InputError
from jkv.model import weights
from jkv.model.params import Model
from jkv.serving import messages_api, responses_api
from jkv.serving.about import About
from jkv.serving.access import Access, client_of
from jkv.serving.conversations import Answers, Conversations, Stored
from jkv.serving.encodings import RETRY_SECONDS, Encodings
from jkv.serving.errors import RefusalError, error_at, error_body, refusal_of
from jkv.serving.jobs import Encoder, Job, fitted, gathered, make_job, make_turn, until_gone, when_all_end
from jkv.serving.metrics import Metrics, until_first
from jkv.serving.options import ServerOptions
from jkv.serving.other_names import renamed
from jkv.serving.page import page
from jkv.serving.requests import (
    KNOWN,
    ChatFields,
    CompletionFields,
    F,
    TemplateFields,
    TokenizeFields,
    ignored_of,
    parse,
    read_fields,
)
from jkv.serving.responses import Head, Likely, Writer, failure_of, reason_of, whole
from jkv.serving.scoring import PromptScorer
from jkv.serving.streaming import COMMENT, EventStream, stream
from jkv.serving.warm_up import WarmUp

LOGGER = logging.getLogger("jkv.serving")
MOST_NAMES = 32  # of ignored fields in a header
EXPOSED = ("x-request-id", "x-jkv-ignored", "x-jkv-prompt-piece", "retry-after")  # headers that other sites' pages may read
LONGEST_ID = 128  # characters of a request's id
ABSENT = {  # endpoints of OpenAI that clients may expect, and why they are not here
    "/v1/embeddings": "this server completes texts, and makes no embeddings",
}
KINDS: dict[str, tuple[type[ChatFields] | type[CompletionFields], str]] = {
    "/v1/chat/completions": (ChatFields, "chat.completion"),
    "/v1/completions": (CompletionFields, "text_completion"),
}
Endpoint = Callable[[Request], Awaitable[Response]]


class Server:
    """The endpoints, and the counts of what is in flight.

    Args:
      service: of the engine; the server does not close it.
      options: limits, names and the default policy.

    Attributes:
      num_open: samples of requests that are not answered yet; changed in the event loop alone.
      conversations: responses that requests may continue.

    Raises:
      ValueError: a model without a tokenizer.
    """

    def __init__(self, service: Service, options: ServerOptions) -> None:
        model: Model = service.engine.model
        need_tokenizer(model.tokenizer, "A server passes texts")
        self.service, self.options = service, options
        self.name = options.name or model.name
        shapes = dataclasses.replace(model, params=weights.shapes_of(model.params))  # which keeps no weights alive
        self.encoder = Encoder(shapes, options.parse_special, options.tool_form)
        self.metrics = Metrics(service.engine, self.name, self.num_unbegun)
        self.most_open = service.engine.capacity.max_running + options.max_waiting
        self.encodings = Encodings(self.most_open)
        self.num_open, self.began = 0, int(time.time())
        self.unfinished: dict[Ticket, int] = {}  # and how many samples each has
        self.cancels = set[Callable[[], None]]()  # of open calls
        self.conversations = Conversations(options, self.metrics.count_forgotten)
        self.answers = Answers(options)
        self.scorer = PromptScorer(options.time_limit)
        self.warm_up: WarmUp | None = None  # which must be done before requests are served
        self.access = Access(options.keys, options.trainer_key, options.hosts)

    @property
    def model(self) -> Model:
        """The model with the weights in use."""
        return self.service.engine.model

    # Completions.

    async def complete(self, request: Request) -> Response:
        """`/v1/chat/completions` and `/v1/completions`."""
        kind, name = KINDS[request.url.path]
        fields = await self.read(kind, request)
        head = self.head(name, fields.model)
        writer = Writer(head, functools.partial(whole, self.model, head), functools.partial(stream, self.model, head))
        return await self.answer(request, fields, writer)

    async def respond(self, request: Request) -> Response:
        """`/v1/responses`. Without `store`, a response is stored as OpenAI does it, where it can be."""
        request.state.names = responses_api.NAMES
        asked = responses_api.read(await self.read_body(request))
        fields = self.fields_of(ChatFields, asked.chat, request, responses_api.NAMES, asked.unread)
        may_store = asked.stores is None and self.options.max_conversations > 0 and not fields.stop_strings
        if (last := self.last_of(fields)) is not None:
            responses_api.check_instructions(asked, last.messages)

        def unstored(error: InputError) -> ChatFields | None:
            return fields if may_store and error.field == "keep" else None

        head = self.head("response", fields.model)
        writer = responses_api.ResponseWriter(self.model, head, asked, self.answers.add)
        first = dataclasses.replace(fields, store=True) if may_store else fields
        return await self.answer(request, first, Writer(head, writer.whole, writer.stream), unstored)

    async def send_message(self, request: Request) -> Response:
        """`/v1/messages`. As Anthropic has it, a message whose limit is beyond the model's context ends with the context."""
        request.state.names = messages_api.NAMES
        body = await self.read_body(request)
        fields = self.fields_of(
            ChatFields, messages_api.chat_body(body), request, messages_api.NAMES, messages_api.unread(body)
        )
        head, reasons = self.head("message", fields.model), dict(messages_api.REASONS)

        def shorter(error: InputError) -> ChatFields | None:
            if error.code != "does_not_fit" or "asked" not in error.values:
                return None
            reasons["length"] = messages_api.WINDOW
            return dataclasses.replace(fields, max_tokens=None)

        writer = messages_api.MessageWriter(self.model, head, fields.stop_strings, reasons)
        return await self.answer(request, fields, Writer(head, writer.whole, writer.stream, messages_api.PING), shorter)

    async def count_tokens(self, request: Request) -> Response:
        """`/v1/messages/count_tokens`."""
        request.state.names = messages_api.NAMES
        body = messages_api.chat_body(await self.read_body(request), counts=True)
        fields = self.fields_of(TokenizeFields, body, request, messages_api.NAMES)
        self.check_model(fields.model)
        tokens = await self.encodings.run(client_of(request), self.encoder.tokenize, fields)
        return JSONResponse({"input_tokens": len(tokens)})

    async def stored_response(self, request: Request) -> Response:
        """`GET` and `DELETE` of `/v1/responses/{id}`."""
        name = request.path_params["name"]
        response = self.answers.find(name)
        if request.method != "DELETE":
            return JSONResponse(response)
        self.answers.forget(name)
        self.conversations.forget(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    def head(self, kind: str, model: str | None) -> Head:
        """What the answer to a call begins with, which names the model as the call does."""
        return Head(kind, model or self.name, "abort" if self.options.abort_reason else "length")

    async def answer(
        self,
        request: Request,
        fields: ChatFields | CompletionFields,
        writer: Writer,
        lesser: Callable[[InputError], ChatFields | None] = lambda error: None,
    ) -> Response:
        """Serves a call.

        Args:
          request: the HTTP request.
          fields: of the call.
          writer: writes its answer.
          lesser: what is served where the engine refuses `fields`, for an error; None raises it.
        """
        headers, head = request.state.headers, writer.head
        if fields.request_id is not None:
            headers["x-request-id"] = id_of(request, fields.request_id)
        self.check_awake()
        self.check_model(fields.model)
        fields.check_format(self.service.engine.options.kv_dtype)
        self.check_room(fields.n * fields.num_prompts)  # before any prompt is encoded
        last, client = self.last_of(fields), client_of(request)
        try:
            job = await until_gone(request, self.make_job(fields, last, client))
        except InputError as error:
            if (less := lesser(error)) is None:
                raise
            job = await until_gone(request, self.make_job(less, last, client))
        if job.row is None and (piece := max((group[0].first for group in job.groups), default=0)):
            headers["x-jkv-prompt-piece"] = str(piece)
        self.check_room(job.num_open)
        job = job.of_client(client)
        tickets = self.submit(job, head, last)
        finish = self.begin(request, job, tickets, headers["x-request-id"])
        if fields.stream:
            pings = writer.ping or COMMENT, self.options.ping_seconds
            return EventStream(writer.stream(job, tickets), finish, headers, self.options.send_seconds, *pings)
        try:
            results, scores = await until_gone(request, asyncio.gather(gathered(tickets), self.score(job)))
        finally:
            finish()
        if failure := failure_of(results):
            raise RefusalError(500, failure)
        # In a thread: log-probabilities of thousands of tokens would keep the loop from all other clients.
        return await asyncio.to_thread(lambda: JSONResponse(writer.whole(job, results, scores), headers=headers))

    def last_of(self, fields: ChatFields | CompletionFields) -> Stored | None:
        """The response that a call continues, if it continues one."""
        if not isinstance(fields, ChatFields):
            return None
        if fields.store and not self.options.max_conversations:
            rule = "{field} needs a server that keeps responses; --max-conversations is 0 here. Leave it out."
            raise InputError(rule, field="store", code="unsupported")
        return None if fields.previous_response_id is None else self.conversations.find(fields.previous_response_id)

    async def make_job(self, fields: ChatFields | CompletionFields, last: Stored | None, client: str) -> Job:
        """Encodes and checks a call."""
        kv_format = self.service.engine.options.kv_format
        adapter = None if fields.model in (None, "", self.name) else fields.model
        if last is None:
            job = await self.encodings.run(client, make_job, self.encoder, fields, self.options, kv_format, adapter)
            return dataclasses.replace(job, groups=[fitted(self.service.engine, group) for group in job.groups])
        assert isinstance(fields, ChatFields)
        assert last.ticket is not None
        try:
            row = self.service.kept_row(last.ticket)
        except ValueError as error:  # such as after a reset
            raise RefusalError(404, str(error), "previous_response_id") from None
        about = row, last.messages, kv_format, adapter
        return await self.encodings.run(client, make_turn, self.encoder, fields, self.options, *about)

    def submit(self, job: Job, head: Head, last: Stored | None) -> list[Ticket]:
        """Submits all requests of a call, or none; stores the response, if it is to be stored."""
        tickets: list[Ticket] = []
        fields = job.fields
        if last is not None:
            assert isinstance(fields, ChatFields)
            assert fields.previous_response_id is not None
            assert job.row is not None
            self.conversations.find(fields.previous_response_id)  # another call may have continued it in the meantime
            assert last.ticket is not None
            before = [*last.messages, last.reply]
            tickets.append(self.service.extend_request(last.ticket, job.groups[0][0], job.row, streams=fields.stream))
            self.conversations.go_on(fields.previous_response_id, head.id)
        else:
            before = []
            try:
                for group in job.groups:
                    tickets.append(self.service.submit_requests(group, fields.stream))
            except Exception:
                for ticket in tickets:
                    ticket.cancel()
                raise
        if isinstance(fields, ChatFields) and fields.store and tickets:
            messages = [*before, *self.encoder.plain(fields.messages)]
            self.conversations.add(head.id, Stored(tickets[0], messages, job.thinks, job.calls))
        return tickets

    async def score(self, job: Job) -> list[list[Likely | None]] | None:
        """How likely the prompts' tokens are, if the response has that."""
        count = job.fields.num_scored
        return None if count is None else await self.scorer.score(self.model, job.prompts, count)

    def begin(self, request: Request, job: Job, tickets: Sequence[Ticket], name: str) -> Callable[[], None]:
        """Counts a call as open and starts its clock; returns what must be called at its end, whatever ends it."""
        count = job.num_open
        self.num_open += count
        self.unfinished.update(zip(tickets, map(len, job.groups), strict=True))

        def cancel() -> None:
            for ticket in tickets:
                ticket.cancel()

        timer = asyncio.get_running_loop().call_later(self.options.time_limit, cancel)
        self.cancels.add(cancel)

        def finish() -> None:
            timer.cancel()
            cancel()
            self.cancels.discard(cancel)
            self.num_open -= count
            for ticket in tickets:
                self.unfinished.pop(ticket)
            seconds = time.perf_counter() - request.state.arrival
            when_all_end(tickets, lambda: self.record(request, name, job, tickets, seconds))

        return finish

    def end(self) -> None:
        """Cancels all open calls, which answer with what they have."""
        self.scorer.is_ending = True
        for cancel in list(self.cancels):
            cancel()

    def record(self, request: Request, name: str, job: Job, tickets: Sequence[Ticket], seconds: float) -> None:
        """Counts and logs a call whose requests have all ended."""
        results = [ticket.result() for ticket in tickets if not ticket.exception()]
        for result in results:
            self.metrics.count_result(result, job.fields.n, job.fields.limit, request.state.arrival)
        LOGGER.info(log_line(request, name, job, results, seconds))

    def num_unbegun(self) -> int:
        """Samples that were submitted, and that the engine has not taken yet."""
        return sum(count for ticket, count in tuple(self.unfinished.items()) if ticket.number < 0 and not ticket.done())

    async def read(self, kind: type[F], request: Request) -> F:
        """The fields of a request's body; a header of the answer names those that are ignored."""
        return self.fields_of(kind, await self.read_body(request), request)

    def fields_of(
        self,
        kind: type[F],
        body: Mapping[str, Any],
        request: Request,
        names: Mapping[str, str] | None = None,
        unread: Sequence[str] = (),
    ) -> F:
        """The fields of a body; `names` are the fields' names in another API, and `unread` that API's ignored fields."""
        body, unread = renamed(body, issubclass(kind, TemplateFields)), list(unread)
        if body.get("priority") is not None and not self.options.may_order(request.state.key):
            unread.append("priority")
            del body["priority"]
        if ignored := [*ignored_of(kind, body), *unread]:
            request.state.headers["x-jkv-ignored"] = header_of(ignored)
        fields = read_fields(kind, body)
        request.state.names = {**fields.names, **(names or {})}
        return fields

    def check_model(self, name: str | None) -> None:
        """Refuses names other than the model's and its adapters'."""
        adapters = self.service.engine.adapters
        if name not in (None, "", self.name, *adapters):
            or_adapter = f", or an adapter ({', '.join(adapters)})" if adapters else ""
            rule = f"model must be {self.name}, the one that is served{or_adapter}; got {shown(name)}."
            raise RefusalError(404, rule, "model")

    def check_awake(self) -> None:
        """Refuses to complete anything while the engine sleeps."""
        if self.service.engine.is_asleep:
            message = "The server is asleep, because its trainer uses the device. Try again later."
            raise RefusalError(503, message, headers={"retry-after": str(RETRY_SECONDS)})

    def check_room(self, count: int) -> None:
        """Refuses samples that would wait behind too many others."""
        if count > self.most_open:
            rule = "A request may have {most} samples here; got {got}. Ask for fewer."
            raise InputError(rule, field="n", code="out_of_range", most=self.most_open, got=shown(count))
        if self.num_open + count > self.most_open:
            message = (
                f"{self.num_open} of at most {self.most_open} samples are in flight, and {count} more came. Try again later."
            )
            raise RefusalError(429, message, headers={"retry-after": str(RETRY_SECONDS)})

    async def read_body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also keeps other sites' pages from calling a server on the user's own machine
            raise RefusalError(415, f"content-type must be application/json; got {shown(kind)}.")
        most, body = self.options.max_body, bytearray()
        try:
            async with asyncio.timeout(self.options.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise RefusalError(413, f"A body may have {most:,} bytes; this one has more. Shorten the prompt.")
        except TimeoutError:
            raise RefusalError(408, f"A body must arrive within {self.options.body_seconds:g} seconds; it did not.") from None
        return parse(bytes(body))

    # The others.

    async def health(self, request: Request) -> Response:
        """`/health` and `/ping`: 200 as long as requests are served."""
        if self.warm_up is not None:
            self.warm_up.check()
        failure = self.service.failure
        return JSONResponse(error_body(503, failure), 503) if failure else Response()

    async def version(self, request: Request) -> Response:
        """`/version`."""
        return JSONResponse({"version": importlib.metadata.version(DISTRIBUTION)})

    async def load(self, request: Request) -> Response:
        """`/load`: samples that are not answered yet."""
        return JSONResponse({"server_load": self.num_open})

    async def show_metrics(self, request: Request) -> Response:
        """`/metrics`."""
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def guarded(self, endpoint: Endpoint, is_open: bool = False, is_trainer: bool = False) -> Endpoint:
        """An endpoint that answers with an error in OpenAI's shape, and asks for a key, or the trainer's, unless it is open."""

        async def answer(request: Request) -> Response:
            request.state.arrival = time.perf_counter()
            request.state.headers, request.state.names = {"x-request-id": id_of(request, None)}, {}
            try:
                self.access.check_host(request.headers)
                request.state.key = "" if is_open else self.access.name_of(request.headers, is_trainer)
                if self.warm_up is not None and not is_open:
                    self.warm_up.check()
                response = await endpoint(request)
                for name, value in request.state.headers.items():
                    response.headers.setdefault(name, value)
                return response
            except ClientDisconnect:
                refusal = RefusalError(499, "The client has gone.")
            except RefusalError as error:
                refusal = error
            except ValueError as error:
                refusal = refusal_of(error, request.state.names)
            except Exception as error:
                LOGGER.exception("%s failed", request.url.path)
                refusal = RefusalError(503 if self.service.failure else 500, str(error))
            status, param, headers = refusal.status, refusal.param, request.state.headers | refusal.headers
            self.metrics.count_refusal(status)
            record = {"id": headers["x-request-id"], "status": status, "field": param if param in KNOWN else None}
            LOGGER.info("%s %s", shown(request.url.path), json.dumps(record))  # without the message, which may quote the text
            return JSONResponse(error_at(request.url.path, status, str(refusal), param, refusal.code), status, headers)

        return answer


def make_app(service: Service, options: ServerOptions | None = None) -> Starlette:
    """The application of a served engine."""
    server = Server(service, options or ServerOptions())
    about = About(server)
    routes = [
        *(Route(path, server.guarded(server.complete), methods=["POST"]) for path in KINDS),
        Route("/v1/responses", server.guarded(server.respond), methods=["POST"]),
        Route("/v1/responses/{name}", server.guarded(server.stored_response), methods=["GET", "DELETE"]),
        Route("/v1/messages", server.guarded(server.send_message), methods=["POST"]),
        Route("/v1/messages/count_tokens", server.guarded(server.count_tokens), methods=["POST"]),
        Route("/v1/models", server.guarded(about.models)),
        Route("/v1/models/{name:path}", server.guarded(about.one_model)),
        *(Route(path, server.guarded(absent(why)), methods=["POST"]) for path, why in ABSENT.items()),
        Route("/tokenize", server.guarded(about.tokenize), methods=["POST"]),
        Route("/detokenize", server.guarded(about.detokenize), methods=["POST"]),
        Route("/tokenizer_info", server.guarded(about.tokenizer_info)),
        Route("/health", server.guarded(server.health, is_open=True)),
        Route("/ping", server.guarded(server.health, is_open=True), methods=["GET", "POST"]),
        Route("/version", server.guarded(server.version, is_open=True)),
        Route("/load", server.guarded(server.load, is_open=True)),
        Route("/metrics", server.guarded(server.show_metrics, is_open=True)),
        Route("/", server.guarded(page, is_open=True)),
        Route("/static/{name:path}", server.guarded(page, is_open=True)),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        server.conversations.close()
        server.encodings.close()
        server.encoder.close()

    async def refuse(request: Request, error: Any) -> Response:
        hint = "" if request.url.path.startswith("/v1/") else " OpenAI's endpoints are below /v1."
        message = f"{request.method} {request.url.path}: {error.detail}.{hint if error.status_code == 404 else ''}"
        headers = {"x-request-id": id_of(request, None)} | dict(error.headers or {})
        body = error_at(request.url.path, error.status_code, message, is_own=True)
        return JSONResponse(body, error.status_code, headers)

    pages = Middleware(
        CORSMiddleware,
        allow_origins=server.options.origins,
        allow_methods=("DELETE", "GET", "POST"),
        allow_headers=("*",),
        expose_headers=EXPOSED,
    )
    middleware = [pages] if server.options.origins else []
    app = Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers={HTTPException: refuse})
    app.router.redirect_slashes = False  # a redirection has no body, and names the host that the client named
    app.state.server, app.state.about = server, about
    return app


def absent(why: str) -> Endpoint:
    """An endpoint that is not served."""

    async def refuse(request: Request) -> Response:
        raise RefusalError(404, f"{request.url.path} is not served: {why}.", code="unsupported")

    return refuse


def id_of(request: Request, given: str | None) -> str:
    """The request's id: the client's if it is a short one, or a fresh one."""
    name = given or request.headers.get("x-request-id", "")
    is_fine = 0 < len(name) <= LONGEST_ID and name.isascii() and name.isprintable()
    return name if is_fine else secrets.token_hex(16)


def header_of(names: Sequence[str]) -> str:
    r"""Names as the value of a header, whatever is in them.

    >>> header_of(["user", "a\nb"])
    'a\\nb, user'
    """
    safe = [name[:MOST_SHOWN].encode("unicode_escape").decode() for name in sorted(names)[:MOST_NAMES]]
    return ", ".join(safe)


def log_line(request: Request, name: str, job: Job, results: Sequence[Result], seconds: float) -> str:
    """A request in one line, without its text; seconds count from its arrival."""
    key, samples = request.state.key, [sample for result in results for sample in result.samples]
    end = "error" if job.groups else "length"  # without a result, where nothing was asked for or all failed
    record = {
        "id": name,
        **({"key": key} if key else {}),
        "prompt_tokens": sum(map(len, job.prompts)),
        "tokens": sum(int(result.lengths.sum()) for result in results),
        "finish": sorted({reason_of(reason) or "" for result in results for reason in result.finish_reason} or {end}),
        "policy": job.groups[0][0].policy.name if job.groups else None,
        "seconds": round(seconds, 3),
        "first_token": round(max((until_first(sample, request.state.arrival) for sample in samples), default=0.0), 3),
        "evicted": round(sum(sample.evicted for sample in samples)),
    }
    return f"{request.url.path} {json.dumps(record)}"
