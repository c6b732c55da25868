"""What clients send, as frozen dataclasses that check it: OpenAI's fields, vLLM's, and a policy with its settings."""

import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from jkv.checks import check_length, did_you_mean, shown, typed
from jkv.model.params import Model
from jkv.model.sampling import SAMPLING_FIELDS, Sampling
from jkv.policies import POLICIES, Policy, make
from jkv.serving.errors import RefusalError
from jkv.serving.options import ServerOptions

F = TypeVar("F", bound="Fields")
IGNORED = {  # of OpenAI and vLLM: they change nothing in a completion
    *("audio", "function_call", "include_stop_str_in_output", "metadata", "modalities", "moderation"),
    *("parallel_tool_calls", "prediction", "priority", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort"),
    *("safety_identifier", "service_tier", "skip_special_tokens", "spaces_between_special_tokens", "store", "tool_choice"),
    *("user", "verbosity", "web_search_options"),
}
REFUSED: dict[str, tuple[Any, str]] = {  # they would change a completion: the value that does not, and why others are refused
    "best_of": (None, "all n samples are returned"),
    "functions": ([], "no tools are called"),
    "logit_bias": ({}, "the engine adds nothing to single logits"),
    "min_tokens": (0, "the engine has no least length"),
    "response_format": ({"type": "text"}, "the engine constrains no text"),
    "suffix": ("", "the model completes to the right only"),
    "tools": ([], "no tools are called"),
    "use_beam_search": (False, "tokens are drawn"),
}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
MOST_TOP = 1  # of most likely tokens: the engine computes the drawn token's log-probability alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """The fields of both endpoints; None is the server's default.

    Attributes:
      policy, settings: how the cache stays small. Without `policy`, `settings` change those of the server's policy.
      ignore_eos: whether the model's own end tokens end nothing.
      return_token_ids: whether the response has token ids.
      kv_dtype: the pool's format, if it is named: all requests share one pool.
      cache_salt: requests share pages of the prefix cache with those of the same salt alone.
      prompt_piece: tokens of a prompt that are prefilled before its first compaction; None is all.

    Raises:
      ValueError: a field of another type, or out of its range.
    """

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[Any] | None = None
    stop_token_ids: list[Any] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    request_id: str | None = None
    cache_salt: str | None = None
    prompt_piece: int | None = None
    policy: str | None = None
    kv_dtype: str | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, typed(field.name, getattr(self, field.name), field.type))
        if self.top_k == -1:  # vLLM's word for all tokens
            object.__setattr__(self, "top_k", 0)
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are those of a stream; got them without stream=true. Leave them out.")
        for name, value in (self.stream_options or {}).items():
            if name not in STREAM_OPTIONS or not isinstance(value, bool):
                known = ", ".join(STREAM_OPTIONS)
                raise ValueError(f"stream_options has {known}, each true or false; got {shown(name)}: {shown(value)}.")

    def check_format(self, served: str | None) -> None:
        """Refuses another format of the cache than the served one; None is the weights' own."""
        if self.kv_dtype not in (None, served):
            own = "is in the weights' own dtype" if served is None else f"is in {served}"
            raise ValueError(
                f"kv_dtype is the pool's, which all requests share and which {own}; got {shown(self.kv_dtype)}. "
                "Leave it out, or ask a server that was started with --kv-dtype."
            )

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def counts_each_chunk(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.includes_usage and bool((self.stream_options or {}).get("continuous_usage_stats"))

    @property
    def stop_strings(self) -> list[Any]:
        """The texts that end a completion."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def stop_ids(self, model: Model) -> list[Any] | None:
        """The tokens that end a completion; None for the model's own."""
        if self.stop_token_ids is None and not self.ignore_eos:
            return None
        return [*(() if self.ignore_eos else model.config.end_ids), *(self.stop_token_ids or [])]

    def sampling(self, model: Model) -> Sampling:
        """The model's own sampling, greedy where it has none, with what the request changes."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}
        return dataclasses.replace(model.sampling or Sampling(temperature=0.0), **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFields(Fields):
    """A body of `/v1/chat/completions`.

    Attributes:
      store: whether the response's row is kept, so that a later request may continue it.
      previous_response_id: the response that this request continues; `messages` then holds the new messages alone.
    """

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True
    store: bool = False
    previous_response_id: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top(self.top_logprobs, self)
        is_talk = self.store or self.previous_response_id is not None
        if is_talk and self.n != 1:
            raise ValueError(f"n must be 1 with store or previous_response_id, as a conversation is one text; got {self.n}.")
        if self.store and self.stop_strings:
            raise ValueError(
                f"stop cannot end a response with store=true, whose row would hold tokens from beyond it; got "
                f"{shown(self.stop)}. Use stop_token_ids."
            )
        if self.previous_response_id is not None and self.continue_final_message:
            raise ValueError(
                "continue_final_message needs the whole conversation; got it with previous_response_id. Leave one out."
            )

    @property
    def limit(self) -> int | None:
        """The most new tokens; None is what fits."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionFields(Fields):
    """A body of `/v1/completions`; 16 new tokens by default, as OpenAI has it."""

    prompt: str | list[Any]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top(self.logprobs, self)
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo=true; got 0.")
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("logprobs of an echoed prompt are not streamed; got echo, stream and logprobs. Leave out one.")

    @property
    def limit(self) -> int | None:
        """The most new tokens."""
        return self.max_tokens


def check_top(count: int | None, fields: Fields) -> None:
    """Refuses most likely tokens that the engine does not compute: it has the drawn one, the first where it is greedy."""
    if count is None or count == 0:
        return
    is_greedy = fields.temperature == 0
    if not 0 < count <= MOST_TOP or not is_greedy:
        raise ValueError(
            "The engine computes the log-probability of the drawn token alone, which is the most likely one at temperature 0; "
            f"got {shown(count)} most likely tokens at temperature {fields.temperature}. Ask for 0, or for 1 with "
            "temperature 0."
        )


def parse(text: bytes) -> dict[str, Any]:
    """The object of a JSON body.

    Raises:
      RefusalError: no UTF-8, no JSON, or no object.
    """
    try:
        body = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise RefusalError(400, f"A body must be UTF-8; byte {error.start} is not. Encode the text as UTF-8.") from None
    except RecursionError:
        raise RefusalError(400, "A body must be JSON that is not nested so deep; it has too many levels. Flatten it.") from None
    except ValueError as error:
        raise RefusalError(400, f"A body must be JSON; {error}. Correct it.") from None
    if not isinstance(body, dict):
        raise RefusalError(400, f"A body must be a JSON object; got {shown(body)}. Send {{...}}.")
    return body


def read_fields(kind: type[F], body: Mapping[str, Any]) -> tuple[F, list[str]]:
    """A request's fields, and the names of those that are ignored. `null` is a default.

    Raises:
      RefusalError: a field that is unknown, missing, wrong, or would change the completion in a way that this server cannot.
    """
    known = {field.name: field for field in dataclasses.fields(kind) if field.name != "settings"}
    given: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    ignored = []
    for name, value in body.items():
        if name in REFUSED:
            neutral, why = REFUSED[name]
            if value is not None and value != neutral:
                raise RefusalError(400, f"{name} is not served, because {why}; got {shown(value)}. Leave it out.", name)
        elif name in IGNORED and name not in known:
            ignored.append(name)
        elif value is None:
            continue
        elif name in known:
            given[name] = value
        elif name in SETTINGS:
            settings[name] = value
        else:
            near = did_you_mean(name, [*known, *SETTINGS])
            raise RefusalError(
                400, f"{shown(name)} is no field of this endpoint, and no setting of a policy.{near}", shown(name)
            )
    for name, field in known.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in given and not has_default:
            raise RefusalError(400, f"{name} is needed; got none. Add it to the body.", name)
    try:
        return kind(**given, settings=settings), ignored
    except ValueError as error:
        raise RefusalError(400, str(error), next((name for name in known if str(error).startswith(name)), None)) from None


def settings_of_policies() -> dict[str, bool]:
    """The names of all policies' settings, and whether a client may give them: those that name files of the server may not."""
    found: dict[str, bool] = {}
    for build in POLICIES.values():
        for name, parameter in inspect.signature(build).parameters.items():
            opens = any(word in str(parameter.annotation) for word in ("Path", "Callable"))
            found[name] = found.get(name, True) and not opens
    return found


SETTINGS = settings_of_policies()


def policy_of(fields: Fields, options: ServerOptions) -> Policy:
    """The policy of a request.

    Raises:
      ValueError: an unknown name or setting, one of the wrong type, or one that names a file.
    """
    for name, value in fields.settings.items():
        if not SETTINGS[name]:
            raise ValueError(
                f"{name} names a file of the server, which clients cannot choose; got {shown(value)}. Leave it out."
            )
        if isinstance(value, list | dict):
            check_length(name, value, 64, "values")
    if fields.policy is not None:
        if options.allowed and fields.policy not in (options.policy, *options.allowed):
            known = ", ".join(dict.fromkeys([options.policy, *options.allowed]))
            raise ValueError(f"policy must be one of {known} on this server; got {shown(fields.policy)}. Name one of them.")
        return make(fields.policy, fields.settings)
    return make(options.policy, {**options.settings, **fields.settings})
