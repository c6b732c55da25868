"""The settings of a server, documented once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jkv.checks import check_counts, check_known, check_least, out_of_range, typed
from jkv.errors import InputError
from jkv.policies import POLICIES, recipe_of
from jkv.reasoning.tool_calls import FORMS
from jkv.serving.access import ANY, DEFAULT, ORIGIN, TRAINER, is_host


def setting(default: Any, help: str) -> Any:
    """A field of a dataclass with a line of help, for the command line as well."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server treats requests; each field has its line of help, which `jkv serve --help` shows.

    Raises:
      ValueError: a setting out of its range.
    """

    name: str = setting("", "the model's name for clients; default: its own")
    policy: str = setting("full", "of requests that name none; see `jkv policies`")
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, metadata={"help": "of that policy"})
    own: tuple[str, ...] = setting((), "policies of your own, as module:name, that requests may name beside the known ones")
    allowed: tuple[str, ...] = setting((), "policies that requests may name; default: all. The server's own always may")
    parse_special: bool = setting(False, "whether messages may make control tokens (`jkv.RequestOptions`)")
    tool_form: str = setting("", f"how the model writes tool calls: {', '.join(FORMS)}; default: what the chat template shows")
    api_key: str | None = setting(None, "what clients send as a bearer key; None asks for none")
    api_keys: Mapping[str, str] = dataclasses.field(default_factory=dict, metadata={"help": "more such keys, each with a name"})
    trainer_key: str | None = setting(None, "the key of a trainer's endpoints; None asks for none")
    hosts: tuple[str, ...] = setting((), "names under which clients may call the server; empty takes all")
    origins: tuple[str, ...] = setting((), "sites whose pages may call the server, such as https://example.com")
    priorities: tuple[str, ...] = setting(
        (), "names of keys whose requests may set `priority`, * for all requests; default: none, and the field is ignored"
    )
    abort_reason: bool = setting(
        False, 'the finish reason of what the server ended before its time is "abort", and not "length", the one of OpenAI'
    )
    max_body: int = setting(1 << 22, "bytes of a request's body")
    max_waiting: int = setting(256, "samples that may wait for a row; more are refused with status 429")
    max_conversations: int = setting(
        64, "responses with store=true whose rows are kept at a time; the oldest are forgotten first, and 0 keeps none"
    )
    conversation_seconds: float = setting(1800.0, "how long each of them is kept after its end")
    time_limit: float = setting(3600.0, "seconds after which a request ends with what it has")
    body_seconds: float = setting(30.0, "seconds in which a body must arrive")
    send_seconds: float = setting(60.0, "seconds in which a client must take what a stream sends, or is dropped")

    ping_seconds: float = setting(15.0, "seconds without an event after which a stream sends a ping; 0 sends none")

    def __post_init__(self) -> None:
        for name in typed("own", self.own, tuple):
            recipe_of(name)
        for name in typed("allowed", self.allowed, tuple):
            check_known((*POLICIES, self.policy, *self.own), allowed=name)
        typed("parse_special", self.parse_special, bool)
        typed("abort_reason", self.abort_reason, bool)
        check_known(("", *FORMS), tool_form=typed("tool_form", self.tool_form, str))
        check_counts(max_body=self.max_body)
        for name in ("max_waiting", "max_conversations"):
            check_least(0, **{name: typed(name, getattr(self, name), int)})
        for name in ("time_limit", "body_seconds", "send_seconds", "conversation_seconds"):
            if not typed(name, getattr(self, name), float) > 0:
                raise out_of_range(name, "be above 0 seconds", getattr(self, name))
        if not typed("ping_seconds", self.ping_seconds, float) >= 0:
            raise out_of_range("ping_seconds", "be 0 seconds or more", self.ping_seconds)
        for name in typed("hosts", self.hosts, tuple):
            if name != ANY and not is_host(name):
                raise out_of_range("hosts", "be names or addresses without a port, or *", name)
        for name in typed("origins", self.origins, tuple):
            if name != ANY and not ORIGIN.fullmatch(name):
                raise out_of_range("origins", "be sites such as https://example.com, or *", name)
        for name in typed("priorities", self.priorities, tuple):
            check_known((ANY, *self.keys.values(), *([] if self.trainer_key is None else [TRAINER])), priorities=name)
        given = {"api_key": self.api_key, "trainer_key": self.trainer_key} | {
            f"api_keys {n}": k for k, n in self.api_keys.items()
        }
        for field, key in given.items():
            key = typed(field, key, str | None)
            if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
                raise out_of_range(field, "be printable ASCII, as headers are, and not empty", key)
        if self.trainer_key is not None and self.trainer_key in self.keys:
            rule = "{field} must differ from the keys of clients, who could otherwise replace the weights. Make a separate key."
            raise InputError(rule, field="trainer_key", code="conflict")

    def may_order(self, key: str) -> bool:
        """Whether requests with the key of this name may set their priority."""
        return ANY in self.priorities or key in self.priorities

    @property
    def keys(self) -> dict[str, str]:
        """The name of each key of clients, by key."""
        return dict(self.api_keys) | ({} if self.api_key is None else {self.api_key: DEFAULT})
