"""Endpoints for trainers (`jkv serve --trainer`): token ids in and out, pauses and sleep, new weights and adapters from disk.

Names are vLLM's and SGLang's where they have one: `/pause?mode=`, `/is_paused`, `/sleep?level=`, `/load_lora_adapter`,
`token_ids`, `sampling_params`, `model_path`. `jkv.serving.run` adds the routes to an application whose server was started for a
trainer.
"""

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jkv.checkpoints import adapters
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.weight_reading import kept_as
from jkv.checkpoints.weight_reading import read_weights as read_checkpoint
from jkv.checks import check_known, shown, typed
from jkv.engine.engine import Engine
from jkv.engine.results import Result
from jkv.engine.service import MODES
from jkv.errors import InputError
from jkv.model.params import LowRank, Model, Params
from jkv.model.weights import check_config
from jkv.serving.access import client_of
from jkv.serving.app import Endpoint, Server, header_of, id_of
from jkv.serving.errors import RefusalError
from jkv.serving.jobs import Job, gathered, until_gone
from jkv.serving.requests import PROCESSED, CompletionFields
from jkv.serving.responses import Head, failure_of, reason_of, tokens_of

IDS = ("token_ids", "input_ids", "prompt")  # vLLM's name, SGLang's, and the name in `/v1/completions`
ALIASES = {"max_new_tokens": "max_tokens", "lora_path": "model"}  # SGLang's; its `lora_path` is an adapter's name
ALWAYS = ("logprobs", "return_logprob")  # every response has them
LEVELS = ("1", "2")  # of sleep
OF_BROWSERS = ("origin", "sec-fetch-site")  # headers that browsers send; a GET, such as for an image, has only the second
POOL = "kv_cache"
TAGS = (POOL, "weights")  # parts that vLLM wakes separately
LORA_FIELDS = ("lora_name", "lora_path", "load_inplace")
LORA_NAMES = {"name": "lora_name", "adapter": "lora_path"}  # the engine's arguments, as clients name them
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TrainerOptions:
    """What a trainer may do.

    Attributes:
      weights_root: the folder that holds the checkpoints and adapters which the trainer may name; None refuses all.

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
        self._sleeping = asyncio.Lock()
        self._is_waking = False  # whether to wake as soon as there are weights again

    async def generate(self, request: Request) -> Response:
        """`/generate`: the completions of prompts of token ids, with what a trainer learns from."""
        server = self.server
        body = flattened(await server.read_body(request))
        fields, headers = server.fields_of(GenerateFields, body, request), request.state.headers
        if fields.request_id is not None:
            headers["x-request-id"] = id_of(request, fields.request_id)
        server.check_awake()
        server.check_model(fields.model)
        fields.check_format(self.service.engine.options.kv_dtype)
        server.check_room(fields.n * fields.num_prompts)
        job = await server.make_job(fields, None, client_of(request))
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
            version = await self.service.call(lambda engine: replace_weights(engine, params, self._is_waking))
            self._is_waking = False
        return JSONResponse({"weights_version": version})

    def read(self, name: str) -> Params:
        """The weights of a folder below the root: see `read_folder`."""
        return self.read_folder("model_path", name, lambda folder: read_weights(folder, self.server.model))

    def read_folder(self, field: str, name: str, read: Callable[[Path], T]) -> T:
        """Reads a folder below the root; readers refuse files that are links to outside of the folder.

        Raises:
          RefusalError: no root, a folder outside of it or without a checkpoint, or one that is still written.
          ValueError: a folder that cannot be read, another model, a damaged file, or weights that are not finite.
        """
        if self.options.weights_root is None:
            raise RefusalError(403, f"{field} needs a server with --weights-root; this one has none. Start it with one.", field)
        root = self.options.weights_root.resolve()
        try:
            folder = (root / name).resolve()
            if not folder.is_relative_to(root):
                raise RefusalError(403, f"{field} must lie in --weights-root; got {shown(name)}. Save it there.", field)
            if not folder.is_dir():
                raise RefusalError(404, f"{field} must be a folder of --weights-root; got {shown(name)}.", field)
            before = states_of(folder)
            found = read(folder)
            if states_of(folder) != before:
                raise RefusalError(
                    409,
                    f"{field} must not change while it is read, or it may have weights of two steps; {shown(name)} did. "
                    "Write to another folder, rename it, and send the request then.",
                    field,
                )
            return found
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            rule = "{field} must be a folder that can be read; {error}."
            raise InputError(rule, field=field, code="not_found", error=str(error)) from None

    async def load_adapter(self, request: Request) -> Response:
        """`/load_lora_adapter`: an adapter of a folder, which requests name as their model from then on.

        With `load_inplace` it replaces the adapter of that name, from the next step on.
        """
        request.state.names = LORA_NAMES
        body = await self.server.read_body(request)
        name, path = (typed(field, body.get(field), str) for field in ("lora_name", "lora_path"))
        replaces, engine = typed("load_inplace", body.get("load_inplace") or False, bool), self.service.engine
        if ignored := [field for field in body if field not in LORA_FIELDS]:
            request.state.headers["x-jkv-ignored"] = header_of(ignored)
        if name == self.server.name or (name in engine.adapters and not replaces):
            got = "the model's" if name == self.server.name else "an adapter's; load_inplace replaces it"
            raise RefusalError(400, f"lora_name must be a new name; got {shown(name)}, {got}.", "lora_name", "conflict")
        if not engine.options.max_adapters:
            rule = "An adapter needs a server with places for adapters; this one has none. Start it with --max-adapters."
            raise RefusalError(400, rule, "lora_name", "unsupported")
        async with self._updates:
            model = self.server.model
            found = await asyncio.to_thread(
                self.read_folder, "lora_path", path, lambda folder: adapters.read_folder(folder, model.params)
            )
            version = await self.service.call(lambda engine: put_adapter(engine, name, found))
        return self.loaded(request, f"LoRA adapter '{name}' added successfully.", version)

    async def unload_adapter(self, request: Request) -> Response:
        """`/unload_lora_adapter`: frees an adapter's place, unless a request or a stored response uses it."""
        request.state.names = LORA_NAMES
        name = typed("lora_name", (await self.server.read_body(request)).get("lora_name"), str)
        if name not in self.service.engine.adapters:
            raise RefusalError(404, f"lora_name must be the name of an adapter; got {shown(name)}.", "lora_name")
        try:
            version = await self.service.call(lambda engine: take_adapter(engine, name))
        except InputError as error:
            raise RefusalError(409, str(error), "lora_name") from None
        return self.loaded(request, f"LoRA adapter '{name}' removed successfully.", version)

    def loaded(self, request: Request, done: str, version: int) -> Response:
        """The answer to a change of adapters: vLLM's text below `/v1`, elsewhere SGLang's object."""
        if request.url.path.startswith("/v1/"):
            return PlainTextResponse(f"Success: {done}")
        names = self.service.engine.adapters
        return JSONResponse({"success": True, "loaded_adapters": names, "weights_version": version})

    async def clear_prefix_cache(self, request: Request) -> Response:
        """`/reset_prefix_cache` and `/flush_cache`: no later prompt reuses what the cache holds now."""
        await self.service.clear_prefix_cache()
        return JSONResponse({"success": True})

    async def sleep(self, request: Request) -> Response:
        """`/sleep?level=&mode=`: frees the pool of pages, and at level 2 the weights too, once requests have paused.

        Until `/wake_up`, new requests are refused with 503. Earlier requests that are unfinished wait for the end of the sleep.
        """
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
        check_known(LEVELS, level=level)
        check_known(MODES, mode=mode)
        async with self._sleeping:
            self._is_waking = False
            stays_paused = self.service.is_paused
            if not self.service.engine.is_asleep:
                await self.service.pause(mode)
            await self.service.call(lambda engine: engine.sleep(forget_weights=level == "2"))
            if not stays_paused:
                await self.service.resume()  # nothing runs while the engine sleeps
        return JSONResponse({"is_sleeping": True})

    async def wake_up(self, request: Request) -> Response:
        """`/wake_up?tags=`: allocates the pool, at once or as soon as there are weights again."""
        tags = request.query_params.getlist("tags")
        for tag in tags:
            check_known(TAGS, tags=tag)
        async with self._sleeping:
            if not tags or POOL in tags:
                self._is_waking = not await self.service.call(wake)
        return await self.is_sleeping(request)

    async def is_sleeping(self, request: Request) -> Response:
        """`/is_sleeping`: whether requests are refused until the end of a sleep."""
        return JSONResponse({"is_sleeping": self.service.engine.is_asleep})

    def routes(self) -> list[Route]:
        """All of them, each behind the trainer's key."""
        posts: dict[str, Endpoint] = {
            "/generate": self.generate,
            "/pause": self.pause,
            "/resume": self.resume,
            "/update_weights": self.update_weights,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/reset_prefix_cache": self.clear_prefix_cache,
            "/flush_cache": self.clear_prefix_cache,
            **{f"{start}/load_lora_adapter": self.load_adapter for start in ("", "/v1")},
            **{f"{start}/unload_lora_adapter": self.unload_adapter for start in ("", "/v1")},
        }
        gets: dict[str, Endpoint] = {
            "/is_paused": self.is_paused,
            "/is_sleeping": self.is_sleeping,
            "/weights_version": self.weights_version,
            "/flush_cache": self.clear_prefix_cache,
        }
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
        if found := [name for name in OF_BROWSERS if name in request.headers]:
            rule = f"{request.url.path} is for trainers, which do not send the header {found[0]}; got one. Leave it out."
            raise RefusalError(403, rule)
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

    `logprobs` are under the distributions that the tokens were drawn from, and `weights_versions` the versions
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


def replace_weights(engine: Engine, params: Params, wakes: bool) -> int:
    """Uses new weights from the next step on, and wakes an engine that waited for them; returns their version."""
    engine.update(params)
    if wakes:
        engine.wake()
    return engine.version


def put_adapter(engine: Engine, name: str, found: Mapping[str, LowRank]) -> int:
    """Adds an adapter, or replaces the adapter of that name; returns the version of the weights."""
    (engine.update_adapter if name in engine.adapters else engine.add_adapter)(name, found)
    return engine.version


def take_adapter(engine: Engine, name: str) -> int:
    """Removes an adapter; returns the version of the weights."""
    engine.remove_adapter(name)
    return engine.version


def wake(engine: Engine) -> bool:
    """Wakes an engine that has weights; returns whether it has."""
    if engine.has_weights:
        engine.wake()
    return engine.has_weights
