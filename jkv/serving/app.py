"""The application: OpenAI's endpoints over a served engine, and what a server needs around them."""

import asyncio
import contextlib
import hmac
import importlib.metadata
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jkv.checks import DISTRIBUTION, shown, typed
from jkv.engine.results import Result
from jkv.engine.service import Service
from jkv.engine.tickets import Ticket
from jkv.model.params import Model
from jkv.serving.conversations import Conversations, Stored
from jkv.serving.errors import RefusalError, error_body
from jkv.serving.jobs import Encoder, Job, flat, make_job, make_turn
from jkv.serving.metrics import Metrics
from jkv.serving.options import ServerOptions
from jkv.serving.requests import ChatFields, CompletionFields, parse, read_fields
from jkv.serving.responses import Head, Likely, failure_of
from jkv.serving.streaming import EventStream, stream
from jkv.serving.whole import prompt_log_probs, whole

LOGGER = logging.getLogger("jkv.serving")
RETRY_SECONDS = 1  # after which a client that was refused may try again
LONGEST_ID = 128  # characters of a request's id
TOKENIZER_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
PAGE = Path(__file__).with_name("page.html")
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
        if model.tokenizer is None:
            raise ValueError("A server passes texts, and this model has no tokenizer. Take a model that has one.")
        self.service, self.options = service, options
        self.name = options.name or model.name
        self.encoder, self.metrics = Encoder(model), Metrics(service.engine, self.name)
        self.most_open = service.engine.capacity.max_running + options.max_waiting
        self.num_open, self.began = 0, int(time.time())
        self.conversations = Conversations(options, self.metrics.count_forgotten)

    @property
    def model(self) -> Model:
        """The model with the weights in use."""
        return self.service.engine.model

    # Completions.

    async def complete(self, request: Request) -> Response:
        """`/v1/chat/completions` and `/v1/completions`."""
        kind, name = KINDS[request.url.path]
        fields, ignored = read_fields(kind, await self.read_body(request))
        headers = {"x-request-id": id_of(request, fields.request_id)}
        if ignored:
            headers["x-jkv-ignored"] = ", ".join(sorted(ignored))
        self.check_model(fields.model)
        fields.check_format(self.service.engine.options.kv_dtype)
        self.check_room(fields.n)
        head = Head(name, self.name)
        last = self.last_of(fields)
        job = await self.make_job(fields, last)
        self.check_room(job.num_samples)
        tickets = self.submit(job, head, last)
        finish = self.begin(request, job, tickets, headers["x-request-id"])
        if fields.stream:
            return EventStream(stream(self.model, head, job, tickets), finish, headers, self.options.send_seconds)
        try:
            results, scores = await until_gone(request, asyncio.gather(gathered(tickets), self.score(job)))
        finally:
            finish()
        if failure := failure_of(results):
            raise RefusalError(500, failure)
        return JSONResponse(whole(self.model, head, job, results, scores), headers=headers)

    def last_of(self, fields: ChatFields | CompletionFields) -> Stored | None:
        """The response that a call continues, if it continues one."""
        if not isinstance(fields, ChatFields):
            return None
        if fields.store and not self.options.max_conversations:
            raise RefusalError(
                400, "store=true needs a server that keeps responses; --max-conversations is 0 here. Leave it out.", "store"
            )
        return None if fields.previous_response_id is None else self.conversations.find(fields.previous_response_id)

    async def make_job(self, fields: ChatFields | CompletionFields, last: Stored | None) -> Job:
        """Encodes and checks a call."""
        kv_format = self.service.engine.options.kv_format
        if last is None:
            return await asyncio.to_thread(make_job, self.encoder, fields, self.options, kv_format)
        assert isinstance(fields, ChatFields)
        assert last.ticket is not None
        try:
            row = self.service.kept_row(last.ticket)
        except ValueError as error:  # such as after a reset
            raise RefusalError(404, str(error), "previous_response_id") from None
        return await asyncio.to_thread(make_turn, self.encoder, fields, self.options, row, last.messages, kv_format)

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
            messages = [*before, *map(flat, fields.messages)]
            self.conversations.add(head.id, Stored(tickets[0], messages, job.thinks))
        return tickets

    async def score(self, job: Job) -> list[list[Likely | None]] | None:
        """How likely the prompts' tokens are, if they are to be echoed with that."""
        fields = job.fields
        if not isinstance(fields, CompletionFields) or not fields.echo or fields.logprobs is None:
            return None
        return await self.service.call(lambda engine: prompt_log_probs(engine.model, job.prompts))

    def begin(self, request: Request, job: Job, tickets: Sequence[Ticket], name: str) -> Callable[[], None]:
        """Counts a call as open and starts its clock; returns what must be called at its end, whatever ends it."""
        began, count = time.perf_counter(), job.num_samples
        self.num_open += count

        def cancel() -> None:
            for ticket in tickets:
                ticket.cancel()

        timer = asyncio.get_running_loop().call_later(self.options.time_limit, cancel)

        def finish() -> None:
            timer.cancel()
            cancel()
            self.num_open -= count
            for ticket in tickets:
                ticket.add_done_callback(lambda ended: self.count(ended, job))
            results = [ticket.result() for ticket in tickets if ticket.done() and not ticket.exception()]
            LOGGER.info(log_line(request.url.path, name, job, results, time.perf_counter() - began))

        return finish

    def count(self, ticket: Any, job: Job) -> None:
        """Counts a finished request."""
        if ticket.exception() is None:
            self.metrics.count_result(ticket.result(), job.fields.n, job.fields.limit)

    def check_model(self, name: str | None) -> None:
        """Refuses another model's name."""
        if name not in (None, "", self.name):
            raise RefusalError(404, f"model must be {self.name}, the one that is served; got {shown(name)}.", "model")

    def check_room(self, count: int) -> None:
        """Refuses samples that would wait behind too many others."""
        if count > self.most_open:
            raise RefusalError(
                400, f"A request may have {self.most_open} samples here; got {shown(count)}. Ask for fewer.", "n"
            )
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

    async def models(self, request: Request) -> Response:
        """`/v1/models`: the one that is served."""
        own = {"id": self.name, "object": "model", "created": self.began, "owned_by": "jkv"}
        more = {"max_model_len": self.model.config.max_positions, "policy": self.options.policy}
        return JSONResponse({"object": "list", "data": [own | more]})

    async def health(self, request: Request) -> Response:
        """`/health` and `/ping`: 200 as long as requests are served."""
        failure = self.service.failure
        return JSONResponse(error_body(503, failure), 503) if failure else Response()

    async def version(self, request: Request) -> Response:
        """`/version`."""
        return JSONResponse({"version": importlib.metadata.version(DISTRIBUTION)})

    async def show_metrics(self, request: Request) -> Response:
        """`/metrics`."""
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`: the token ids of `prompt`, or of `messages`."""
        body = await self.read_body(request)
        if "messages" in body:
            ids = await asyncio.to_thread(self.encoder.encode_chat, body["messages"], add_generation_prompt=True)
        else:
            prompt = typed("prompt", body.get("prompt"), str)
            adds = typed("add_special_tokens", body.get("add_special_tokens", True), bool)
            ids = await asyncio.to_thread(self.encoder.encode_text, prompt, adds)
        tokens = ids.tolist()
        return JSONResponse({"count": len(tokens), "max_model_len": self.model.config.max_positions, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`: the text of `tokens`."""
        tokens = typed("tokens", (await self.read_body(request)).get("tokens"), list)
        (ids,) = await asyncio.to_thread(self.encoder.encode, [tokens]) if tokens else ([],)
        return JSONResponse({"prompt": self.model.tokenizer.decode(ids)})

    async def tokenizer_info(self, request: Request) -> Response:
        """`/tokenizer_info`: the special tokens and the chat template, for clients without the tokenizer."""
        return JSONResponse({name: getattr(self.model.tokenizer, name, None) for name in TOKENIZER_FIELDS})

    async def page(self, request: Request) -> Response:
        """`/`: a page to chat on, or to complete texts on where the model has no chat template."""
        is_chat = bool(getattr(self.model.tokenizer, "chat_template", None))
        return HTMLResponse(PAGE.read_text(encoding="utf-8").replace("IS_CHAT", str(is_chat).lower()))

    def guarded(self, endpoint: Endpoint, is_open: bool = False) -> Endpoint:
        """An endpoint that answers with an error in OpenAI's shape, and asks for the key unless it is open."""

        async def answer(request: Request) -> Response:
            try:
                if not is_open:
                    self.check_key(request)
                return await endpoint(request)
            except ClientDisconnect:
                status, message, param, headers = 499, "The client has gone.", None, {}
            except RefusalError as error:
                status, message, param, headers = error.status, str(error), error.param, error.headers
            except ValueError as error:
                status, message, param, headers = 400, str(error), None, {}
            except Exception as error:
                LOGGER.exception("%s failed", request.url.path)
                status, message, param, headers = (503 if self.service.failure else 500), str(error), None, {}
            self.metrics.count_refusal(status)
            LOGGER.info("%s: %d %s", request.url.path, status, shown(message))
            return JSONResponse(error_body(status, message, param), status, headers)

        return answer

    def check_key(self, request: Request) -> None:
        """Refuses a request without the key."""
        key = self.options.api_key
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if key is not None and not (kind.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())):
            message = "The header must be `Authorization: Bearer KEY` with the server's key; it is missing or wrong."
            raise RefusalError(401, message, headers={"www-authenticate": "Bearer"})


def make_app(service: Service, options: ServerOptions | None = None) -> Starlette:
    """The application of a served engine."""
    server = Server(service, options or ServerOptions())
    routes = [
        *(Route(path, server.guarded(server.complete), methods=["POST"]) for path in KINDS),
        Route("/v1/models", server.guarded(server.models)),
        Route("/tokenize", server.guarded(server.tokenize), methods=["POST"]),
        Route("/detokenize", server.guarded(server.detokenize), methods=["POST"]),
        Route("/tokenizer_info", server.guarded(server.tokenizer_info)),
        Route("/health", server.guarded(server.health, is_open=True)),
        Route("/ping", server.guarded(server.health, is_open=True), methods=["GET", "POST"]),
        Route("/version", server.guarded(server.version, is_open=True)),
        Route("/metrics", server.guarded(server.show_metrics, is_open=True)),
        Route("/", server.guarded(server.page, is_open=True)),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        server.conversations.close()
        server.encoder.close()

    async def refuse(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        return JSONResponse(error_body(error.status_code, message), error.status_code)

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refuse})
    app.state.server = server
    return app


def id_of(request: Request, given: str | None) -> str:
    """The request's id: the client's if it is a short one, or a fresh one."""
    name = given or request.headers.get("x-request-id", "")
    is_fine = 0 < len(name) <= LONGEST_ID and name.isascii() and name.isprintable()
    return name if is_fine else secrets.token_hex(16)


async def gathered(tickets: Sequence[Ticket]) -> list[Result]:
    """The results of requests."""
    return [await ticket for ticket in tickets]


async def until_gone(request: Request, work: Awaitable[Any]) -> Any:
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


def log_line(path: str, name: str, job: Job, results: Sequence[Result], seconds: float) -> str:
    """A request in one line, without its text."""
    record = {
        "id": name,
        "prompt_tokens": sum(map(len, job.prompts)),
        "tokens": sum(int(result.lengths.sum()) for result in results),
        "finish": sorted({reason for result in results for reason in result.finish_reason}) or ["abort"],
        "policy": job.groups[0][0].policy.name if job.groups else None,
        "seconds": round(seconds, 3),
        "first_token": round(max((s.first_seconds for result in results for s in result.samples), default=0.0), 3),
        "evicted": round(sum(s.evicted for result in results for s in result.samples)),
    }
    return f"{path} {json.dumps(record)}"
