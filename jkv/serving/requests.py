"""What clients send, as frozen dataclasses that check it: OpenAI's fields, vLLM's, and a policy with its settings.

`jkv.serving.jobs` makes a `jkv.RequestOptions` of them.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import json
import types
from collections.abc import Mapping
from typing import Any, TypeVar

from jkv.checks import MOST_SHOWN, check_length, did_you_mean, out_of_range, shown, typed
from jkv.engine.prompts import encode_text
from jkv.errors import InputError
from jkv.eviction import Policy
from jkv.forms import Form
from jkv.model.params import Model
from jkv.model.sampling import SAMPLING_FIELDS, Sampling
from jkv.policies import POLICIES, make
from jkv.policies.own import is_own
from jkv.serving.errors import NAMES
from jkv.serving.form_fields import field_of, fields_of, form_of
from jkv.serving.messages import MOST_TOOLS, functions_of, unread_of
from jkv.serving.options import ServerOptions

F = TypeVar("F", bound="Body")
GRAMMAR = "grammars are in Lark's syntax or llama.cpp's. Send guided_grammar"
REFUSED: dict[str, tuple[Any, str]] = {  # they would change a completion: the value that does not, and why others are refused
    "audio": (None, "the model writes text alone"),
    "chat_template": (None, "conversations have the model's own template"),
    "documents": ([], "conversations are messages and tools"),
    "functions": ([], "it is the older form of tools. Send tools"),
    "include_stop_str_in_output": (False, "a text ends before its stop text"),
    "modalities": (["text"], "the model writes text alone"),
    "previous_response_id": (None, "only chats are stored"),
    **dict.fromkeys(("ebnf", "structural_tag"), (None, GRAMMAR)),
    "return_token_strs": (False, "token ids have texts at /detokenize"),
    "skip_special_tokens": (True, "special tokens are left out of texts; return_token_ids has them"),
    "store": (False, "only chats are stored"),
    "suffix": ("", "the model completes to the right only"),
    "tools": ([], "only chats call tools"),
    "use_beam_search": (False, "tokens are drawn"),
    "web_search_options": (None, "nothing is searched"),
}
LONGEST_NUMBER = 100  # characters of one that comes as a text
LIKE = 0.9  # how like a known name an unknown one is that is taken for a mistake, of at most 1
IN_TEMPLATES = {  # names that rendering sets itself: a request has separate fields for them, or may not set them
    *("add_generation_prompt", "chat_template", "compiled_template", "continue_final_message", "conversation"),
    *("conversations", "messages", "return_assistant_tokens_mask", "return_dict", "self", "tokenize", "tools"),
}
TOOL_CHOICES = ("auto", "none")
LIMITS = ("max_tokens", "max_completion_tokens")
MOST_TOP = 20  # most likely tokens of a place that a client may ask for: OpenAI's limit
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"  # vLLM's names of distributions: the model's own, and what is drawn from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Body:
    """A body whose fields have the types of their annotations; None is the server's default.

    Raises:
      ValueError: a field of another type, or out of its range.
    """

    model: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """What the client called the engine's arguments."""
        return NAMES

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, typed(field.name, getattr(self, field.name), field.type))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateFields(Body):
    """What the chat template receives beside the messages.

    Attributes:
      tools: functions that the model may call.
      tool_choice: "auto"; "required", or a function, `{"type": "function", "function": {"name": ...}}`: the answer is nothing
        but calls of them; or "none": then the template receives no tools, and calls are not looked for.
      parallel_tool_calls: whether a response may have several calls; otherwise it has the first one.
    """

    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length("tools", self.tools or [], MOST_TOOLS, "tools")
        functions = functions_of(self.tools or [])
        if self.must_call and not self.must_call <= functions.keys():
            rule = "{field} must be a function of tools ({known}); got {got}. Correct the name."
            known, got = ", ".join(functions) or "there are none", shown(self.tool_choice)
            raise InputError(rule, field="tool_choice", code="not_found", known=known, got=got)
        for name in self.chat_template_kwargs or {}:
            if name in IN_TEMPLATES:
                rule = "{field} are the template's variables; got {name}, which rendering itself sets. Leave it out."
                raise InputError(rule, field="chat_template_kwargs", code="conflict", name=name)

    @property
    def must_call(self) -> set[str]:
        """The functions one of which the answer must call; empty if it need not call any.

        Raises:
          InputError: another choice than the known ones.
        """
        choice = self.tool_choice
        if choice == "required":
            return set(functions_of(self.tools or [])) or {""}
        if choice in (None, *TOOL_CHOICES):
            return set()
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            rule = '{field} must be {known} or {{"type": "function", "function": {{"name": ...}}}}; got {got}.'
            known = ", ".join(f'"{name}"' for name in (*TOOL_CHOICES, "required"))
            raise InputError(rule, field="tool_choice", code="unsupported", known=known, got=shown(choice))
        return {function["name"]}

    @property
    def functions(self) -> dict[str, Any] | None:
        """The functions that the model may call, each with its JSON schema; None if it may call none."""
        return functions_of(self.tools) if self.tools and self.tool_choice != "none" else None

    @property
    def template(self) -> dict[str, Any]:
        """The options of the chat template."""
        begins = self.add_generation_prompt and not self.continue_final_message
        given = {"add_generation_prompt": begins, "continue_final_message": self.continue_final_message}
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        tools = {} if self.functions is None else {"tools": self.tools}
        return given | effort | tools | (self.chat_template_kwargs or {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeFields(TemplateFields):
    """A body of `/tokenize`: a text, or a conversation, whose template adds special tokens by itself."""

    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None

    @property
    def names(self) -> dict[str, str]:
        """What the client called the engine's arguments."""
        return NAMES if self.messages is None else NAMES | {"prompt": "messages"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.messages is None):
            raise InputError("{field} or messages must be given, and not both. Send one.", field="prompt", code="conflict")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetokenizeFields(Body):
    """A body of `/detokenize`."""

    tokens: list[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields(Body):
    """The fields of both endpoints; None is the server's default.

    Attributes:
      policy, settings: how the cache stays small. Without `policy`, `settings` change the settings of the server's policy.
      ignore_eos: whether the model's own end tokens end nothing.
      return_token_ids: whether the response has token ids.
      logprobs_mode: under which distribution log-probabilities are: RAW is the model's own, at temperature 1 and without
        penalties and cuts; PROCESSED is the one that tokens are drawn from.
      logit_bias: what is added to the logits of tokens, whose ids are texts in JSON.
      allowed_token_ids: the only tokens that may be drawn.
      min_tokens: tokens before the completion may end by a token.
      bad_words: texts that the completion may not hold.
      response_format, structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar: the form of the answer
        (`jkv.serving.form_fields`).
      prompt_logprobs: whether the response has the log-probabilities of the prompt's tokens, and of how many most likely ones.
      kv_dtype: the pool's format, if it is named: all requests share one pool.
      cache_salt: requests share pages of the prefix cache only with requests of the same salt.
      prompt_piece: tokens of a prompt that are prefilled before its first compaction; None is all.
      priority: requests with a lower number are served first; ignored unless the key may set it (`ServerOptions.priorities`).

    Raises:
      ValueError: a field of another type, or out of its range.
    """

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
    logprobs_mode: str = RAW
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: list[Any] | None = None
    min_tokens: int = 0
    bad_words: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    prompt_piece: int | None = None
    priority: int = 0
    policy: str | None = None
    kv_dtype: str | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in LIMITS:
            if getattr(self, name, None) == -1:  # as others' clients write no limit
                object.__setattr__(self, name, None)
        if self.logprobs_mode not in (RAW, PROCESSED):
            rule = "{field} must be {raw}, of the model's own distribution, or {drawn}, of the one that draws; got {got}."
            about = {"raw": RAW, "drawn": PROCESSED, "got": shown(self.logprobs_mode)}
            raise InputError(rule, field="logprobs_mode", code="unknown_name", **about)
        check_top("prompt_logprobs", self.prompt_logprobs)
        if self.prompt_logprobs is not None and self.stream:
            raise InputError(
                "{field} are not streamed; got stream=true. Leave out one.", field="prompt_logprobs", code="conflict"
            )
        if self.stream_options is not None and not self.stream:
            rule = "{field} are a stream's; got them without stream=true. Leave them out."
            raise InputError(rule, field="stream_options", code="conflict")
        for name, value in (self.stream_options or {}).items():
            if name not in STREAM_OPTIONS or not isinstance(value, bool):
                rule, got = "{field} has {known}, each true or false; got {got}.", f"{shown(name)}: {shown(value)}"
                raise InputError(rule, field="stream_options", code="wrong_type", known=", ".join(STREAM_OPTIONS), got=got)

    def check_format(self, served: str | None) -> None:
        """Refuses another format of the cache than the served one; None is the weights' own."""
        if self.kv_dtype not in (None, served):
            own = "is in the weights' own dtype" if served is None else f"is in {served}"
            rule = (
                "{field} is the pool's, which all requests share and which {own}; got {got}. Leave it out, or ask a server "
                "that was started with --kv-dtype."
            )
            raise InputError(rule, field="kv_dtype", code="unsupported", own=own, got=shown(self.kv_dtype))

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
        return [self.stop] if self.stop and isinstance(self.stop, str) else list(self.stop or ())

    def stop_ids(self, model: Model) -> list[Any] | None:
        """The tokens that end a completion; None for the model's own."""
        if self.stop_token_ids is None and not self.ignore_eos:
            return None
        return [*(() if self.ignore_eos else model.config.end_ids), *(self.stop_token_ids or [])]

    @property
    def top(self) -> tuple[str, int | None]:
        """The field that asks for the most likely tokens of each place, and how many."""
        raise NotImplementedError

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return 1

    @property
    def num_scored(self) -> int | None:
        """How many most likely tokens are looked for at each place of the prompts; None where prompts are not scored."""
        return self.prompt_logprobs

    @property
    def model_logprobs(self) -> bool:
        """Whether it has those under the model's own distribution."""
        return self.has_logprobs and self.logprobs_mode == RAW

    def returned(self, sampling: Sampling) -> dict[str, Any]:
        """What the engine returns of each token, as `RequestOptions` have it; the drawn one may be the most likely one."""
        count = self.top[1] or 0
        return {"model_logprobs": self.model_logprobs, "top_logprobs": count * (count > 1 or not self.draws_best(sampling))}

    @property
    def excluded(self) -> dict[str, Any]:
        """What changes the logits of single tokens, as `RequestOptions` have it."""
        return {"logit_bias": self.biases, "allowed_token_ids": self.allowed_token_ids or None, "min_tokens": self.min_tokens}

    def bad_tokens(self, model: Model) -> list[list[int]]:
        """The token ids of the bad words, at the beginning of a word and inside of one, as vLLM has them."""
        found: list[list[int]] = []
        for word in self.bad_words or ():
            if not isinstance(word, str) or not word.strip():
                rule = "{field} must be texts, not empty; got {got}."
                raise InputError(rule, field="bad_words", code="wrong_type", got=shown(word))
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = list(encode_text(model, 0, text, is_chat=True))
                if ids and ids not in found:
                    found.append(ids)
        return found

    @property
    def form_field(self) -> str | None:
        """The field that asks for a form of the answer; None where none does.

        Raises:
          InputError: several do.
        """
        return field_of(vars(self))

    @property
    def form(self) -> Form | None:
        """The form of the answer.

        Raises:
          InputError: one that is none, or that is not served.
        """
        name = self.form_field
        return None if name is None else form_of(name, getattr(self, name))

    @property
    def limit_name(self) -> str:
        """The field that is the limit of new tokens."""
        return "max_tokens"

    @property
    def names(self) -> dict[str, str]:
        """What the client called the engine's arguments."""
        return super().names | {
            "max_new_tokens": self.limit_name,
            "form": [*fields_of(vars(self)), "tools"][0],
        }

    def sampling(self, model: Model) -> Sampling:
        """The model's own sampling, greedy where it has none, with what the request changes.

        Raises:
          ValueError: a value out of its range, or most likely tokens of another distribution than the model's own.
        """
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}
        given |= {} if self.seed is None else {"seed": seed_of(self.seed)}
        sampling = dataclasses.replace(model.sampling or Sampling(temperature=0.0), **given)
        name, count = self.top
        if count and not self.model_logprobs and not self.draws_best(sampling):
            rule = "{field} are of the model's own distribution; got {got} with {mode}, which are of another. Leave out one."
            raise InputError(rule, field=name, code="conflict", got=shown(count), mode=PROCESSED)
        return sampling

    def draws_best(self, sampling: Sampling) -> bool:
        """Whether each drawn token is the most likely one of the model's own distribution."""
        return sampling.temperature == 0 and not (
            sampling.penalises or self.bad_words or self.form_field or any(self.excluded.values())
        )

    @property
    def biases(self) -> dict[int, Any] | None:
        """What is added to the logits of tokens.

        Raises:
          InputError: a token that is no number, or two that are the same.
        """
        found: dict[int, Any] = {}
        for name, value in (self.logit_bias or {}).items():
            if not (name.isdecimal() and name.isascii()) or int(name) in found:
                rule = '{field} must be an object of token ids and biases, such as {{"50256": -100}}; got {got}.'
                raise InputError(rule, field="logit_bias", code="wrong_type", got=shown(name))
            found[int(name)] = lenient(value, float)
        return found or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFields(TemplateFields, Fields):
    """A body of `/v1/chat/completions`.

    Attributes:
      store: whether the response's row is kept, so that a later request may continue it.
      previous_response_id: the response that this request continues; `messages` then holds the new messages alone.
    """

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    include_reasoning: bool = True
    store: bool = False
    previous_response_id: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top(*self.top)
        if self.top_logprobs and not self.logprobs:
            rule = "{field} needs logprobs=true; got {got} without it. Send both, or neither."
            raise InputError(rule, field="top_logprobs", code="conflict", got=self.top_logprobs)
        if self.must_call and self.form_field:
            rule = "{field} is the form of the answer already; got {other} too. Leave one out."
            raise InputError(rule, field="tool_choice", code="conflict", other=self.form_field)
        if self.limit == 0:
            raise out_of_range(self.limit_name, "be at least 1", 0)
        is_talk = self.store or self.previous_response_id is not None
        if is_talk and self.n != 1:
            rule = "{field} must be 1 with store or previous_response_id, as a conversation is one text; got {got}."
            raise InputError(rule, field="n", code="conflict", got=self.n)
        if self.store and self.stop_strings:
            rule = (
                "{field} cannot end a response with store=true, whose row would hold tokens from beyond it; got {got}. Use "
                "stop_token_ids."
            )
            raise InputError(rule, field="stop", code="conflict", got=shown(self.stop))
        if self.previous_response_id is not None and self.continue_final_message:
            rule = "{field} needs the whole conversation; got it with previous_response_id. Leave one out."
            raise InputError(rule, field="continue_final_message", code="conflict")

    @property
    def limit(self) -> int | None:
        """The most new tokens; None is what fits."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        """The field that is the limit of new tokens."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def names(self) -> dict[str, str]:
        """What the client called the engine's arguments."""
        return super().names | {"prompt": "messages", "tokens": "messages"}

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return self.logprobs

    @property
    def top(self) -> tuple[str, int | None]:
        """The field that asks for the most likely tokens of each place, and how many."""
        return "top_logprobs", self.top_logprobs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionFields(Fields):
    """A body of `/v1/completions`; 16 new tokens by default, as OpenAI has it."""

    prompt: str | list[Any]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top(*self.top)
        if self.max_tokens == 0 and not self.echo:
            raise out_of_range("max_tokens", "be at least 1, or 0 with echo=true", 0)
        if self.echo and self.stream and self.logprobs is not None:
            rule = "{field} of an echoed prompt are not streamed; got echo, stream and {field}. Leave out one."
            raise InputError(rule, field="logprobs", code="conflict")

    @property
    def num_prompts(self) -> int:
        """How many prompts there are: a list of numbers is one."""
        has_many = isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], str | list)
        return len(self.prompt) if has_many else 1

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return self.logprobs is not None

    @property
    def num_scored(self) -> int | None:
        """How many most likely tokens are looked for at each place of the prompts; None where prompts are not scored."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    @property
    def limit(self) -> int | None:
        """The most new tokens."""
        return self.max_tokens

    @property
    def top(self) -> tuple[str, int | None]:
        """The field that asks for the most likely tokens of each place, and how many."""
        return "logprobs", self.logprobs


def seed_of(seed: int) -> int | None:
    """The engine's seed, of 32 bits, for one of 64 bits with a sign; those that the engine has stay. -1 is fresh entropy.

    >>> seed_of(7), seed_of(-1), seed_of(2**40) == seed_of(2**40) != seed_of(-(2**40))
    (7, None, True)
    """
    if not -(2**63) <= seed < 2**63:
        raise out_of_range("seed", "lie in [-2**63, 2**63), -1 is a random one", seed)
    if 0 <= seed < 2**32:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=4).digest()
    return None if seed == -1 else int.from_bytes(digest, "little")


def check_top(name: str, count: int | None) -> None:
    """Refuses more most likely tokens of a place than there may be."""
    if count is not None and not 0 <= count <= MOST_TOP:
        raise out_of_range(name, f"lie in [0, {MOST_TOP}]", count)


def parse(text: bytes) -> dict[str, Any]:
    """The object of a JSON body.

    Raises:
      InputError: no UTF-8, no JSON, or no object.
    """
    try:
        body = json.loads(text.decode())
    except UnicodeDecodeError as error:
        rule = "A body must be UTF-8; byte {place} is not. Encode the text as UTF-8."
        raise InputError(rule, code="bad_json", place=error.start) from None
    except RecursionError:
        rule = "A body must be JSON that is not nested so deep; it has too many levels. Flatten it."
        raise InputError(rule, code="bad_json") from None
    except ValueError as error:
        raise InputError("A body must be JSON; {error}. Correct it.", code="bad_json", error=str(error)) from None
    if not isinstance(body, dict):
        raise InputError("A body must be a JSON object, {{...}}; got {got}.", code="bad_json", got=shown(body))
    return body


def ignored_of(kind: type[Body], body: Mapping[str, Any]) -> list[str]:
    """The names of ignored fields of a body and its messages, which clients of other servers send."""
    known = {field.name for field in dataclasses.fields(kind)} | REFUSED.keys() | SETTINGS.keys() | {"best_of"}
    return [name for name in body if name not in known] + sorted(unread_of(body.get("messages")))


def read_fields(kind: type[F], body: Mapping[str, Any]) -> F:
    """A request's fields. `null` is a default, and a field that is unknown is ignored.

    Raises:
      InputError: a field that is misspelt, missing, of another type, out of its range, or that would change the completion in a
        way that this server cannot.
    """
    known = {field.name: field for field in dataclasses.fields(kind) if field.name != "settings"}
    given: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in body.items():
        if name in REFUSED and name not in known:
            check_neutral(name, value, *REFUSED[name])
        elif name == "best_of" and "n" in known:
            if value is not None and value != (body.get("n") or 1):
                rule = "{field} must be n, as all n samples are returned; got {got}. Leave it out."
                raise InputError(rule, field=name, code="unsupported", got=shown(value))
        elif value is None:
            continue
        elif name in known:
            given[name] = lenient(value, known[name].type)
        elif name in SETTINGS and issubclass(kind, Fields):
            settings[name] = value
        else:
            near = did_you_mean(name, [*known, *REFUSED, *(SETTINGS if issubclass(kind, Fields) else ())], LIKE)
            if near or name in SETTINGS:
                rule = "{got} is no field of this endpoint, and no setting of a policy.{near}"
                raise InputError(rule, field=name[:MOST_SHOWN], code="unknown_name", got=shown(name), near=near)
    for name, field in known.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in given and not has_default:
            raise InputError("{field} is needed; got none. Add it to the body.", field=name, code="missing")
    if settings:
        given["settings"] = settings
    return kind(**given)


def check_neutral(name: str, value: Any, neutral: Any, why: str) -> None:
    """Refuses a field that is not served, but for the value that changes nothing."""
    if value is not None and value != neutral:
        rule = "{field} is not served, because {why}; got {got}. Leave it out."
        raise InputError(rule, field=name, code="unsupported", why=why, got=shown(value))


def lenient(value: Any, wanted: Any) -> Any:
    """A number that came as a text, a whole number that came with a point, or a truth value that came as either.

    >>> lenient("8", int | None), lenient(8.0, int), lenient("0.5", float | None), lenient("true", bool), lenient("8", str)
    (8, 8, 0.5, True, '8')
    """
    kinds = wanted.__args__ if isinstance(wanted, types.UnionType) else (wanted,)
    if bool in kinds and not isinstance(value, dict | list):
        return {"true": True, "false": False, 1: True, 0: False}.get(value.lower() if isinstance(value, str) else value, value)
    if isinstance(value, str) and str not in kinds and len(value) <= LONGEST_NUMBER:
        for kind in (int, float):
            if kind in kinds or (kind is float and int in kinds):
                with contextlib.suppress(ValueError):
                    return lenient(kind(value), wanted)
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        return int(value)
    return value


def settings_of_policies() -> dict[str, bool]:
    """The names of all policies' settings, and whether a client may give them: those that name files of the server may not."""
    found: dict[str, bool] = {}
    for build in POLICIES.values():
        for name, parameter in inspect.signature(build).parameters.items():
            opens = any(word in str(parameter.annotation) for word in ("Path", "Callable"))
            found[name] = found.get(name, True) and not opens
    return found


SETTINGS = settings_of_policies()
BODIES = (ChatFields, CompletionFields, TokenizeFields, DetokenizeFields)
KNOWN = {*SETTINGS, *REFUSED, *(field.name for kind in BODIES for field in dataclasses.fields(kind))}


def policy_of(fields: Fields, options: ServerOptions) -> Policy:
    """The policy of a request.

    Raises:
      ValueError: an unknown name or setting, one of the wrong type, or one that names a file.
    """
    for name, value in fields.settings.items():
        if not SETTINGS[name]:
            rule = "{field} names a file of the server, which clients cannot choose; got {got}. Leave it out."
            raise InputError(rule, field=name, code="unsupported", got=shown(value))
        if isinstance(value, list | dict):
            check_length(name, value, 64, "values")
    if fields.policy is not None:
        known = dict.fromkeys((options.policy, *(options.allowed or (*POLICIES, *options.own))))
        if (options.allowed or is_own(fields.policy)) and fields.policy not in known:  # a client's name imports nothing
            rule = "{field} must be one of {known} on this server; got {got}."
            raise InputError(rule, field="policy", code="unsupported", known=", ".join(known), got=shown(fields.policy))
        return make(fields.policy, fields.settings)
    return make(options.policy, {**options.settings, **fields.settings})
