"""Errors in OpenAI's shape, with the names that clients have for the engine's arguments."""

import re
from collections.abc import Mapping
from typing import Any

from jkv.errors import InputError

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}  # by status
MESSAGE_KINDS = {  # of Anthropic's Messages API
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CODES = {
    400: "invalid",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    409: "conflict",
    413: "too_long",
    415: "unsupported",
    429: "rate_limited",
    499: "client_gone",
    503: "unavailable",
}  # by status, where an error has none of its own
NAMES = {  # of the engine's arguments, for clients
    "keep": "store",
    "kv_memory": "--kv-memory",
    "max_new_tokens": "max_tokens",
    "max_slots": "the server's --context",
    "max_stop_ids": "the server's limit",
    "page_size": "--page-size",
    "stop_ids": "stop_token_ids",
    "stop_strings": "stop",
}


TOO_LONG = "context_length_exceeded"


class RefusalError(Exception):
    """A request that is not served.

    Args:
      status: of HTTP.
      message: the rule, what was got, how to fix it.
      param: the field that is wrong, if it is one.
      code: the kind of mistake; empty is the status's own.
      headers: of the response.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})


def refusal_of(error: ValueError, names: Mapping[str, str] = NAMES) -> RefusalError:
    """The refusal of a request that broke a rule, with the client's names of arguments.

    >>> error = InputError("{field} must be at least 1.", field="max_new_tokens", code="out_of_range")
    >>> refusal = refusal_of(error)
    >>> str(refusal), refusal.param, refusal.code
    ('max_tokens must be at least 1.', 'max_tokens', 'out_of_range')
    """
    if not isinstance(error, InputError):
        return RefusalError(400, str(error))
    param = None if error.field is None else names.get(error.field, error.field)
    if error.code == "does_not_fit" and error.field in (None, "prompt", "tokens"):
        return RefusalError(400, too_long(error, names), param or names.get("prompt", "prompt"), TOO_LONG)
    return RefusalError(400, error.told(names), param, error.code)


def too_long(error: InputError, names: Mapping[str, str]) -> str:
    """A prompt or completion that does not fit, in the words by which clients know this error."""
    own, most, length, asked = error.told(names), *(error.values.get(name) for name in ("most", "length", "asked"))
    if not isinstance(most, int):  # it is the pool that is too small
        return own
    count = str(length).replace(",", "")
    if "asked" not in error.values or not count.isdigit():
        return f"This model's maximum context length is {most} tokens. However, this request needs more: {own}"
    field, begin = names.get("max_new_tokens", "max_new_tokens"), f"your prompt has {count} tokens"
    if str(asked).isdigit():
        begin = (
            f"you requested {int(count) + int(str(asked))} tokens ({count} in the prompt, {asked} in the completion, {field})"
        )
    return f"This model's maximum context length is {most} tokens. However, {begin}. Shorten the prompt, or lower {field}."


def without_folders(message: str) -> str:
    """A message in which absolute paths of files are names alone: clients need not know where the server keeps them.

    Paths of endpoints stay.

    >>> without_folders("/srv/models/config.json is damaged, and '/srv/my models/x'. Use /v1/completions or /generate.")
    "config.json is damaged, and 'x'. Use /v1/completions or /generate."
    """
    message = re.sub(r"""(['"])(?:/|[A-Za-z]:\\)(?!v1/)[^'"\n]*[/\\]([^'"/\\\n]*)\1""", r"\1\2\1", message)
    return re.sub(r"""(?<![\w/:.])(?:/(?!v1/)|\b[A-Za-z]:\\)(?:[^/\\\s'"]+[/\\])+""", "", message)


def error_at(
    path: str, status: int, message: str, param: str | None = None, code: str = "", is_own: bool = False
) -> dict[str, Any]:
    """The body of an error response of an endpoint, in the shape of its API."""
    if path.startswith("/v1/messages"):
        return message_error(status, message, is_own)
    return error_body(status, message, param, code, is_own)


def message_error(status: int, message: str, is_own: bool = False) -> dict[str, Any]:
    """The body of an error response in the shape of Anthropic's Messages API.

    >>> message_error(429, "Try again later.")
    {'type': 'error', 'error': {'type': 'rate_limit_error', 'message': 'Try again later.'}}
    """
    kind = MESSAGE_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message if is_own else without_folders(message)}}


def error_body(status: int, message: str, param: str | None = None, code: str = "", is_own: bool = False) -> dict[str, Any]:
    """The body of an error response; `is_own` says that the message names no file of the server.

    >>> error_body(400, "n must be at least 1; got 0.", "n", "out_of_range")["error"]["type"]
    'invalid_request_error'
    """
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": message if is_own else without_folders(message),
            "type": kind,
            "param": param,
            "code": code or CODES.get(status, "server_error"),
        }
    }
