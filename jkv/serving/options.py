"""The settings of a server, documented once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jkv.checks import check_counts, check_known, check_least, out_of_range, typed
from jkv.policies import POLICIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server treats requests.

    Attributes:
      name: the model's, as clients name it; empty is the model's own.
      policy: the name of the policy of requests that name none; a key of `jkv.POLICIES`.
      settings: of that policy.
      allowed: policies that requests may name; none: all of them. The server's own is always allowed.
      parse_special: whether messages may make control tokens (`jkv.RequestOptions`).
      api_key: what clients send as a bearer key; None asks for none.
      max_body: bytes of a request's body.
      max_waiting: samples that may wait for a row; more are refused with status 429.
      max_conversations: responses whose rows are kept at a time, for requests with `store`; the oldest are forgotten first. 0
        keeps none.
      conversation_seconds: how long each is kept after its end.
      time_limit: seconds after which a request ends with what it has.
      body_seconds: seconds in which a body must arrive.
      send_seconds: seconds in which a client must take what a stream sends; a slower one is dropped.

    Raises:
      ValueError: a setting out of its range.
    """

    name: str = ""
    policy: str = "full"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    parse_special: bool = False
    api_key: str | None = None
    max_body: int = 1 << 22
    max_waiting: int = 256
    max_conversations: int = 64
    conversation_seconds: float = 1800.0
    time_limit: float = 3600.0
    body_seconds: float = 30.0
    send_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in typed("allowed", self.allowed, tuple):
            check_known(POLICIES, allowed=name)
        typed("parse_special", self.parse_special, bool)
        check_counts(max_body=self.max_body)
        for name in ("max_waiting", "max_conversations"):
            check_least(0, **{name: typed(name, getattr(self, name), int)})
        for name in ("time_limit", "body_seconds", "send_seconds", "conversation_seconds"):
            if not typed(name, getattr(self, name), float) > 0:
                raise out_of_range(name, "be above 0 seconds", getattr(self, name))
        key = typed("api_key", self.api_key, str | None)
        if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
            raise out_of_range("api_key", "be printable ASCII, as headers are, and not empty", key)
