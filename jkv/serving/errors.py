"""Errors in OpenAI's shape."""

from collections.abc import Mapping
from typing import Any

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}  # by status


class RefusalError(Exception):
    """A request that is not served.

    Args:
      status: of HTTP.
      message: the rule, what was got, how to fix it.
      param: the field that is wrong, if it is one.
      headers: of the response.
    """

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.headers = status, param, dict(headers or {})


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error response.

    >>> error_body(400, "n must be at least 1; got 0.", "n")["error"]["type"]
    'invalid_request_error'
    """
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
