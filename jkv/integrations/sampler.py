"""`JkvSampler`: an engine behind the asynchronous sampler protocol of tunix's distributed trainers, which MaxText's RL shares.

    sampler = JkvSampler(model, jkv.r_kv(budget=512), max_running=64, return_trace=True)
    await sampler.start()
    responses = await sampler.sample(requests)
    await sampler.pre_weight_sync(sync)      # finishes the turn in progress
    await sampler.weight_sync(sync)          # checks the new weights, and holds them beside the old ones
    await sampler.post_weight_sync(sync)     # switches; rows go on where they stopped

The protocol (google/tunix, `tunix/experimental/rollout/sampler.py`, October 2026) is duck-typed: requests and responses have
its fields, and neither library imports the other's. Requests come and go while the engine runs; a policy of each is possible. A
response's `metadata` holds what the protocol has no field for: `policy_versions` of the weights behind each token, and the
`trace` for exact replay, where the engine has `return_trace`.
"""

import asyncio
import collections
import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jkv.checkpoints.state_dicts import params_from
from jkv.engine.engine import Engine
from jkv.engine.requests import RequestOptions, check_model
from jkv.engine.results import Result
from jkv.engine.service import Service, Ticket
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.model.padding import check_not_padded
from jkv.model.params import Model, Params
from jkv.model.sampling import Sampling

REASONS = {"stop": "stop", "length": "length", "cancelled": "cancelled"}  # every other reason is an error
UNKNOWN, WAITING, DONE, FAILED = "UNKNOWN", "PENDING", "SUCCESS", "FAILED"  # of a transfer of weights
MOST_TRANSFERS = 1_000  # of which the status is remembered


@dataclasses.dataclass(kw_only=True)
class ErrorInfo:
    """Why a request failed.

    Attributes:
      error_type: name of the exception, or the finish reason.
      message: what it says.
      retryable: whether the same request may succeed later.
      traceback: where it was raised, if it was.
    """

    error_type: str
    message: str
    retryable: bool = False
    traceback: str = ""


@dataclasses.dataclass(kw_only=True)
class SamplingResponse:
    """One completion.

    Attributes:
      request_id: the request's.
      text: of the completion, without end tokens; empty without a tokenizer.
      prompt_token_ids: `[P]` int32.
      token_ids: `[T]` int32, end tokens included.
      logprobs: `[T]` float32, under the exact distribution that each token was drawn from; None if they were not asked for.
      finish_reason: "stop", "length", "cancelled" or "error".
      routed_experts: None: no experts are reported.
      error: why it failed; None if it did not.
      metadata: `policy_versions` `[T]` int32, and `trace`, a `jkv.Trace` or None.
    """

    request_id: str = ""
    text: str = ""
    prompt_token_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    token_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray | None = None
    finish_reason: str = "stop"
    routed_experts: Any = None
    error: ErrorInfo | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class LoadInfo:
    """How busy a sampler is.

    Attributes:
      num_requests_waiting: samples without a row.
      num_requests_running: samples with one.
      kv_cache_usage_perc: share of the pool's pages that are reserved, 0 to 1.
    """

    request_id: str = ""
    num_requests_waiting: int = 0
    num_requests_running: int = 0
    kv_cache_usage_perc: float = 0.0
    error: ErrorInfo | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


class JkvSampler:
    """A sampler of one engine, for any number of tasks.

    Args:
      model_or_params: what `jkv.load` returns, or bare `Params` (prompts are token ids then).
      policy: how caches stay small; None keeps them whole. A request may name another in `metadata["policy"]`, which needs no
        data that the engine does not keep.
      convert: makes `Params` of the weights of a `weight_sync`, such as `jkv.integrations.tunix.params_of`; None takes what
        `jkv.params_from` does: `Params`, Hugging Face state dicts and MaxText's parameters.
      engine: settings of the engine by name: see `jkv.EngineOptions`.

    Attributes:
      version: the policy version of the weights in use, as the last sync named it.

    Raises:
      ValueError: a setting out of its range.
    """

    def __init__(
        self,
        model_or_params: Model | Params,
        policy: Policy | None = None,
        *,
        convert: Callable[[Any], Params] | None = None,
        **engine: Any,
    ) -> None:
        self._model, self._policy, self._convert = check_model(model_or_params), policy, convert
        self._settings = {"policies": None if policy is None else [policy]} | engine
        self._engine: Engine | None = None
        self._service: Service | None = None
        self._staged: Params | None = None
        self._transfers: dict[str, str] = {}
        self.version = 0

    # Life.

    def initialize(self) -> None:
        """Makes the engine, if there is none."""
        if self._engine is None:
            self._engine = Engine(self._model, **self._settings)

    async def start(self, **_: Any) -> bool:
        """Starts the thread that owns the engine."""
        if self._service is None:
            self.initialize()
            assert self._engine is not None
            self._service = Service(self._engine)
        return True

    async def stop(self, *, mode: str = "abort", **_: Any) -> bool:
        """Ends it. Unfinished requests are cancelled, or with the mode "wait" finished first."""
        if self._service is not None:
            await self._service.close(mode)
            self._service = None
        return True

    async def pause(self, *, mode: str = "keep", **_: Any) -> bool:
        """Runs nothing until `resume`; the mode says what becomes of unfinished requests: see `Service.pause`."""
        await self._running.pause(mode)
        return True

    async def resume(self, **_: Any) -> bool:
        """Ends a pause."""
        await self._running.resume()
        return True

    async def get_mesh(self, **_: Any) -> jax.sharding.Mesh | None:
        """The engine's devices; None for one device."""
        self.initialize()
        assert self._engine is not None
        return self._engine.mesh

    async def get_load_info(self, **_: Any) -> LoadInfo:
        """How busy the engine is between two turns."""
        return await self._running.call(load_of)

    @property
    def _running(self) -> Service:
        if self._service is None:
            raise RuntimeError("A sampler must be started before it samples; call `await sampler.start()`.")
        return self._service

    # Samples.

    async def sample(self, sampling_requests: Any, **_: Any) -> Any:
        """A completion of each request; a list for a list, else one.

        A request has `prompt` (a text, token ids or a conversation), `sampling_params` (`max_tokens`, `temperature`, `top_p`,
        `top_k`, `seed`, `return_logprobs`), `request_id` and `metadata`, or is a bare prompt. Equal prompts of a call that
        have equal seeds are samples of one group: they share a prefill, and draw different tokens.

        A request that cannot be served has a response with the reason "error" and `error`; the others are not affected. If
        the task that waits is cancelled, so are its requests.
        """
        is_list = isinstance(sampling_requests, list | tuple) and not is_prompt(sampling_requests)
        requests = list(sampling_requests) if is_list else [sampling_requests]
        check_not_padded(self._running.engine.model, [getattr(request, "prompt", request) for request in requests])
        service, seen = self._running, collections.Counter[tuple[str, Any]]()
        waited: list[Ticket | ErrorInfo] = []
        for request in requests:
            try:
                waited.append(self._submit(service, request, seen))
            except (ValueError, TypeError) as error:
                waited.append(info_of(error))
        tickets = [one for one in waited if isinstance(one, Ticket)]
        try:
            await asyncio.gather(*(wrapped(ticket) for ticket in tickets), return_exceptions=True)
        except asyncio.CancelledError:
            for ticket in tickets:
                ticket.cancel()
            raise
        responses = [response_of(request, one) for request, one in zip(requests, waited, strict=True)]
        return responses if is_list else responses[0]

    def _submit(self, service: Service, request: Any, seen: collections.Counter[tuple[str, Any]]) -> Ticket:
        params, metadata = getattr(request, "sampling_params", None), getattr(request, "metadata", None) or {}
        prompt = getattr(request, "prompt", request)
        options = options_of(params, metadata.get("policy", self._policy))
        seed = None if options.sampling is None else options.sampling.seed
        key = prompt if isinstance(prompt, str) else repr(list(prompt)), seed
        index, seen[key] = seen[key], seen[key] + 1
        if seed is not None:
            options = dataclasses.replace(options, first_sample=index)
        return service.submit(prompt, options)

    # Weights.

    def get_target_state(self) -> Any:
        """Shapes, types and shardings of the weights, as a pytree of `jax.ShapeDtypeStruct`."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._params)

    async def get_weight_sync_metadata(self, **_: Any) -> dict[str, Any]:
        """The same, with the version in use."""
        return {"policy_version": self.version, "state": self.get_target_state()}

    async def bind_weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """Nothing is to be bound: weights come with the request, as arrays of this process."""
        self._note(sync_request, WAITING)
        return True

    async def pre_weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """Pauses after the turn in progress; rows keep their pages."""
        self._note(sync_request, WAITING)
        await self.pause()
        return True

    async def weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """Converts the request's `weights` and holds them beside those in use.

        Raises:
          ValueError: a request without weights, or with weights of another model; those in use stay.
        """
        weights = getattr(sync_request, "weights", None)
        try:
            if weights is None:
                raise refused(
                    "weight_sync takes the new weights in the request's `weights`; got none. Transfers by other means (Raiden) "
                    "are not supported: gather the weights in this process.",
                    weights="missing",
                )
            self._staged = params_from(weights if self._convert is None else self._convert(weights), self._params)
        except Exception:
            self._note(sync_request, FAILED)
            raise
        return True

    async def post_weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """Switches to the weights that are held, and goes on. Unfinished rows keep the keys that they have.

        Raises:
          ValueError: none are held, or they are of another structure, shape or type, or not finite; the old ones stay, and
            samples go on with them.
        """
        staged, self._staged = self._staged, None
        try:
            if staged is None:
                raise ValueError("post_weight_sync switches to the weights of a weight_sync; none came. Call that first.")
            await self._running.update(staged)
            self.version = getattr(sync_request, "policy_version", None) or self.version + 1
            self._note(sync_request, DONE)
        except Exception:
            self._note(sync_request, FAILED)
            raise
        finally:
            await self.resume()
        return True

    async def abort_weight_sync(self, sync_request: Any = None, **_: Any) -> bool:
        """Drops the weights that are held, and goes on with those in use."""
        self._staged = None
        self._note(sync_request, FAILED)
        await self.resume()
        return True

    async def get_transfer_status(self, req_id: Any, **_: Any) -> str:
        """The status of a request of weights, by its id: "PENDING", "SUCCESS" or "FAILED", or "UNKNOWN" for another."""
        return self._transfers.get(str(req_id), UNKNOWN)

    async def migrate_kv_cache(self, source_server_id: str, target_server_id: str, token_ids: list[int], **_: Any) -> bool:
        """Raises NotImplementedError: a compressed row belongs to its engine."""
        raise NotImplementedError("Rows do not move between samplers. Send a conversation to the sampler that holds its row.")

    @property
    def _params(self) -> Params:
        return (self._model if self._engine is None else self._engine.model).params

    def _note(self, sync_request: Any, status: str) -> None:
        self._transfers[str(getattr(sync_request, "request_id", ""))] = status
        while len(self._transfers) > MOST_TRANSFERS:
            del self._transfers[next(iter(self._transfers))]


def is_prompt(value: Any) -> bool:
    """Whether a list is one prompt: token ids, or the messages of a conversation."""
    return bool(value) and all(isinstance(one, int | np.integer | dict) for one in value)


async def wrapped(ticket: Ticket) -> Result:
    """A ticket's result."""
    return await ticket


def options_of(params: Any, policy: Policy | None) -> RequestOptions:
    """A request's options from its sampling parameters; their defaults are the protocol's: 64 tokens at temperature 1.

    Raises:
      ValueError: what no engine does (beams, logits), or a value out of its range.
    """
    given = {name: getattr(params, name, None) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    beams = getattr(params, "beam_size", None)
    if beams not in (None, 1):
        rule = f"Tokens are drawn, not searched for by beams; got beam_size={beams}. Leave it out."
        raise refused(rule, beam_size="unsupported")
    for name in ("return_logits", "return_routed_experts"):
        if getattr(params, name, False):
            rule = f"{name} is not supported: an engine returns tokens and their log-probabilities. Leave it out."
            raise refused(rule, **{name: "unsupported"})
    sampling = Sampling(
        temperature=1.0 if given["temperature"] is None else given["temperature"],
        top_p=1.0 if given["top_p"] is None else given["top_p"],
        top_k=given["top_k"] or 0,
        seed=given["seed"],
    )
    return RequestOptions(policy=policy, sampling=sampling, max_new_tokens=given["max_tokens"] or 64)


def response_of(request: Any, ended: Ticket | ErrorInfo) -> SamplingResponse:
    """The response to a request that has ended, or was refused."""
    identity = str(getattr(request, "request_id", ""))
    if isinstance(ended, ErrorInfo):
        return SamplingResponse(request_id=identity, finish_reason="error", error=ended)
    error = ended.exception()
    if error is not None:
        return SamplingResponse(request_id=identity, finish_reason="error", error=info_of(error, retryable=True))
    result = ended.result()
    count, reason = int(result.lengths[0]), result.finish_reason[0]
    failure = None if reason in REASONS else ErrorInfo(error_type=reason, message=f"The completion ended by {reason!r}.")
    wants = getattr(getattr(request, "sampling_params", None), "return_logprobs", False)
    return SamplingResponse(
        request_id=identity,
        text="" if result.text is None else result.text[0],
        prompt_token_ids=np.asarray(result.prompts[0], np.int32),
        token_ids=result.tokens[0, :count],
        logprobs=result.logprobs[0, :count] if wants else None,
        finish_reason=REASONS.get(reason, "error"),
        error=failure,
        metadata={"policy_versions": result.policy_version[0, :count], "trace": result.trace},
    )


def info_of(error: BaseException, retryable: bool = False) -> ErrorInfo:
    """What an exception says."""
    lines = "".join(traceback.format_exception(error))
    return ErrorInfo(error_type=type(error).__name__, message=str(error), retryable=retryable, traceback=lines)


def load_of(engine: Engine) -> LoadInfo:
    """An engine's load, on its own thread."""
    scheduler = engine.scheduler
    waiting = sum(not sample.is_finished for sample in (*scheduler.held, *(sample for _, sample in scheduler.waiting)))
    return LoadInfo(
        num_requests_waiting=waiting,
        num_requests_running=len(scheduler.running),
        kv_cache_usage_perc=scheduler.reserved / engine.num_pages,
    )
