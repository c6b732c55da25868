"""Endpoints for trainers (`jkv serve --trainer`): token ids in and out, pauses, and new weights from the server's disk.

The names are those of vLLM and SGLang where they have one: `/pause?mode=`, `/is_paused`, `token_ids`, `sampling_params`,
`model_path`. `jkv.serving.run` adds the routes to an application whose server was started for a trainer.
"""

import asyncio
import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.weight_reading import kept_as
from jkv.checkpoints.weight_reading import read_weights as read_checkpoint
from jkv.checks import shown, typed
from jkv.engine.engine import Engine
from jkv.engine.results import Result
from jkv.errors import InputError
from jkv.model.params import Model, Params
from jkv.model.weights import check_config
from jkv.serving.app import Endpoint, Server, header_of, id_of
from jkv.serving.errors import RefusalError
from jkv.serving.jobs import Job, gathered, until_gone
from jkv.serving.requests import PROCESSED, CompletionFields, ignored_of, read_fields
from jkv.serving.responses import Head, failure_of, reason_of, tokens_of

IDS = ("token_ids", "input_ids", "prompt")  # vLLM's name, SGLang's, and that of `/v1/completions`
ALIASES = {"max_new_tokens": "max_tokens"}  # SGLang's
ALWAYS = ("logprobs", "return_logprob")  # every response has them


@dataclasses.dataclass(frozen=True)
class TrainerOptions:
    """What a trainer may do.

    Attributes:
      weights_root: the folder that holds the checkpoints which `/update_weights` may read; None refuses all.

    Raises:
      ValueError: no folder.
    """

    weights_root: Path | None = None

    def __post_init__(self) -> None:
        if self.weights_root is not None and not self.weights_root.is_dir():
            rule = "--weights-root must be a folder that exists; got {got}. Make it first."
            raise InputError(rule, field="weights_root", code="not_found", got=shown(str(self.weights_root)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateFields(CompletionFields):
    """A body of `/generate`: token ids alone, and by default as many new tokens as fit."""

    prompt: list[Any]
    max_tokens: int | None = None
    logprobs_mode: str = PROCESSED

    @property
    def names(self) -> dict[str, str]:
        """What the client called the engine's arguments."""
        return super().names | {"prompt": "token_ids"}

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.prompt if self.prompt and isinstance(self.prompt[0], list) else [self.prompt]
        if not all(isinstance(row, list) and all(type(token) is int for token in row) for row in rows):
            rule = "{field} must be a list of token ids, or a list of such lists; got {got}."
            raise InputError(rule, field="token_ids", code="wrong_type", got=shown(self.prompt))
        if self.logprobs_mode != PROCESSED:
            rule = "{field} must be {mode} at /generate: trainers need the distribution that draws; got {got}. Leave it out."
            got = shown(self.logprobs_mode)
            raise InputError(rule, field="logprobs_mode", code="unsupported", mode=PROCESSED, got=got)
        for name in ("stream", "echo"):
            if getattr(self, name):
                rule = "{field} is not served at /generate, whose responses are whole; got true. Leave it out."
                raise InputError(rule, field=name, code="unsupported")


class Trainer:
    """The endpoints of a trainer.

    Args:
      server: whose engine, limits and key they share.
      options: what the trainer may do.
    """

    def __init__(self, server: Server, options: TrainerOptions) -> None:
        self.server, self.service, self.options = server, server.service, options
        self._updates = asyncio.Lock()  # so that at most two copies of the weights are in memory

    async def generate(self, request: Request) -> Response:
        """`/generate`: the completions of prompts of token ids, with what a trainer learns from."""
        server = self.server
        body = flattened(await server.read_body(request))
        fields, headers = read_fields(GenerateFields, body), request.state.headers
        request.state.names = fields.names
        if ignored := ignored_of(GenerateFields, body):
            headers["x-jkv-ignored"] = header_of(ignored)
        if fields.request_id is not None:
            headers["x-request-id"] = id_of(request, fields.request_id)
        server.check_model(fields.model)
        fields.check_format(self.service.engine.options.kv_dtype)
        server.check_room(fields.n * fields.num_prompts)
        job = await server.make_job(fields, None)
        server.check_room(job.num_open)
        head = Head("generate", fields.model or server.name)
        tickets = server.submit(job, head, None)
        finish = server.begin(request, job, tickets, headers["x-request-id"])
        try:
            results = await until_gone(request, asyncio.ensure_future(gathered(tickets)))
        finally:
            finish()
        if failure := failure_of(results):
            raise RefusalError(500, failure)
        return JSONResponse(
            {"id": f"gen-{secrets.token_hex(12)}", "model": head.model, **samples_of(job, results)}, headers=headers
        )

    async def pause(self, request: Request) -> Response:
        """`/pause?mode=`: nothing runs from the response on; "abort" is the default, as it is vLLM's."""
        await self.service.pause(request.query_params.get("mode", "abort"))
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """`/resume`: ends a pause."""
        await self.service.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """`/is_paused`."""
        return JSONResponse({"is_paused": self.service.is_paused})

    async def weights_version(self, request: Request) -> Response:
        """`/weights_version`: how often the weights were replaced."""
        return JSONResponse({"weights_version": self.service.engine.runner.version})

    async def update_weights(self, request: Request) -> Response:
        """`/update_weights`: weights of a checkpoint folder, used from the next turn on. Refused ones change nothing."""
        body = await self.server.read_body(request)
        if body.keys() != {"model_path"}:
            rule = 'The body must be {{"{field}": FOLDER}}; got {got}.'
            raise InputError(rule, field="model_path", code="missing", got=shown(sorted(body)))
        name = typed("model_path", body["model_path"], str)
        async with self._updates:
            params = await asyncio.to_thread(self.read, name)
            version = await self.service.call(lambda engine: replace_weights(engine, params))
        return JSONResponse({"weights_version": version})

    def read(self, name: str) -> Params:
        """The weights of a folder below the root; the reader of checkpoints refuses files that are links out of their folder.

        Raises:
          RefusalError: no root, a folder outside of it or without a checkpoint, or one that is still written.
          ValueError: a folder that cannot be read, another model, a damaged file, or weights that are not finite.
        """
        if self.options.weights_root is None:
            raise RefusalError(403, "/update_weights needs a server with --weights-root; this one has none. Start it with one.")
        root = self.options.weights_root.resolve()
        try:
            folder = (root / name).resolve()
            if not folder.is_relative_to(root):
                raise RefusalError(
                    403, f"model_path must lie in --weights-root; got {shown(name)}. Save it there.", "model_path"
                )
            if not folder.is_dir():
                raise RefusalError(404, f"model_path must be a folder of --weights-root; got {shown(name)}.", "model_path")
            before = states_of(folder)
            params = read_weights(folder, self.server.model)
            if states_of(folder) != before:
                raise RefusalError(
                    409,
                    f"model_path must not change while it is read, or it may have weights of two steps; {shown(name)} did. "
                    "Write to another folder, rename it, and send the request then.",
                    "model_path",
                )
            return params
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            rule = "{field} must be a folder that can be read; {error}."
            raise InputError(rule, field="model_path", code="not_found", error=str(error)) from None

    def routes(self) -> list[Route]:
        """All of them, each behind the trainer's key."""
        posts: dict[str, Endpoint] = {
            "/generate": self.generate,
            "/pause": self.pause,
            "/resume": self.resume,
            "/update_weights": self.update_weights,
        }
        gets: dict[str, Endpoint] = {"/is_paused": self.is_paused, "/weights_version": self.weights_version}
        return [
            *(
                Route(path, self.server.guarded(of_no_page(one), is_trainer=True), methods=["POST"])
                for path, one in posts.items()
            ),
            *(Route(path, self.server.guarded(of_no_page(one), is_trainer=True)) for path, one in gets.items()),
        ]


def add_routes(app: Starlette, options: TrainerOptions) -> None:
    """Adds a trainer's endpoints to an application.

    Raises:
      InputError: clients have keys, and the trainer has none.
    """
    access = app.state.server.access
    if access.keys and access.trainer_key is None:
        rule = "A trainer's endpoints need {field} where clients have keys, which replace no weights; got none. Give one."
        raise InputError(rule, field="trainer_key", code="missing")
    app.router.routes.extend(Trainer(app.state.server, options).routes())


def of_no_page(endpoint: Endpoint) -> Endpoint:
    """An endpoint that refuses browsers: a page of another site could otherwise pause a server on the user's own machine."""

    async def answer(request: Request) -> Response:
        if "origin" in request.headers:
            raise RefusalError(403, f"{request.url.path} is for trainers, which send no Origin header; got one. Leave it out.")
        return await endpoint(request)

    return answer


def flattened(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body by their names here; `sampling_params` holds some of them.

    >>> flattened({"input_ids": [5], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True})
    {'prompt': [5], 'max_tokens': 8}

    Raises:
      InputError: a field that is given twice, or no prompt.
    """
    inner = typed("sampling_params", body.get("sampling_params") or {}, dict)
    fields: dict[str, Any] = {}
    for name, value in [*body.items(), *inner.items()]:
        if name in ("sampling_params", *ALWAYS) or value is None:
            continue
        own = "prompt" if name in IDS else ALIASES.get(name, name)
        if own == "prompt" and not isinstance(value, list):
            rule = "{field} must be a list of token ids; got {got}. Encode texts at /tokenize."
            raise InputError(rule, field=name, code="wrong_type", got=shown(value))
        if own in fields:
            rule = "A field is given once; got {got} a second time. Leave one out."
            raise InputError(rule, field=name, code="conflict", got=shown(name))
        fields[own] = value
    if "prompt" not in fields:
        raise InputError("{field} is needed; got none. Add it to the body.", field="token_ids", code="missing")
    return fields


def samples_of(job: Job, results: Sequence[Result]) -> dict[str, Any]:
    """The samples of all prompts, prompt-major, and the number of tokens.

    `logprobs` are those of the tokens under the distributions that they were drawn from, and `weights_versions` the versions
    of the weights that drew them.
    """
    choices: list[dict[str, Any]] = []
    for prompt, result in enumerate(results):
        for sample, reason in enumerate(result.finish_reason):
            tokens, log_probs = tokens_of(result, sample)
            choice = {"index": len(choices), "prompt_index": prompt, "token_ids": tokens, "logprobs": log_probs}
            choice["weights_versions"] = result.policy_version[sample, : len(tokens)].tolist()
            choices.append(choice | {"finish_reason": reason_of(reason)})
    before, after = sum(map(len, job.prompts)), sum(len(choice["token_ids"]) for choice in choices)
    return {"choices": choices, "usage": {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}}


def read_weights(folder: Path, model: Model) -> Params:
    """The weights of a checkpoint folder, of the model's configuration and dtype, placed as its own are.

    The folder's tokenizer and end tokens are not read: the model keeps its own. On a mesh, each device gets its part alone.

    Raises:
      ValueError: another configuration (before any weight is read), a damaged file, or weights that are not finite.
    """
    own = {name: getattr(model.config, name) for name in ("end_ids", "whole_experts")}
    config = dataclasses.replace(checkpoint.read_config(folder), **own)
    check_config(model.config, config)
    return read_checkpoint(folder, config, *kept_as(model.params))


def states_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Each file of a folder, with its inode, size and time of change."""
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def replace_weights(engine: Engine, params: Params) -> int:
    """Uses new weights from the next turn on; returns their version."""
    engine.update(params)
    return engine.runner.version
