"""Who may call a server: under which names it is called, with which keys, and from which pages.

A page of another site may let its own name resolve to this machine, and then read what a server answers there (DNS rebinding):
its requests name that site as their host, so a server that only this machine reaches refuses other names than its own.
"""

import hmac
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jkv.checks import shown
from jkv.errors import refused
from jkv.serving.errors import RefusalError

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # names under which a machine calls itself
ANY = "*"
DEFAULT = "default"  # the name of `--api-key`, which all clients may share
TRAINER = "trainer"  # the name of the trainer's key
ORIGIN = re.compile(r"https?://[^/\s]+")


class Access:
    """Checks requests before anything else.

    Args:
      keys: the name of each key, by key; empty asks for none.
      trainer_key: the key of a trainer's endpoints, which is good for the others too; None asks for none.
      hosts: names under which clients may call the server; empty, or one that is ANY, takes all.
    """

    def __init__(self, keys: Mapping[str, str], trainer_key: str | None, hosts: tuple[str, ...]) -> None:
        self.keys, self.trainer_key = keys, trainer_key
        self.hosts = frozenset() if ANY in hosts else frozenset(map(str.lower, hosts))

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Refuses a request that calls the server by another name."""
        host = headers.get("host")
        if self.hosts and host is not None and host_name(host) not in self.hosts:
            message = f"The host must be one of {', '.join(sorted(self.hosts))}; got {shown(host)}. Allow it with --hosts."
            raise RefusalError(403, message)

    def name_of(self, headers: Mapping[str, str], is_trainer: bool = False) -> str:
        """The name of a request's key; empty where none is asked for.

        Raises:
          RefusalError: no key, or one that is not good for this endpoint.
        """
        allowed = {} if is_trainer else dict(self.keys)
        if self.trainer_key is not None and (is_trainer or allowed):
            allowed[self.trainer_key] = TRAINER
        kind, _, given = headers.get("authorization", "").partition(" ")
        if not given and "x-api-key" in headers:  # as clients of Anthropic send it
            kind, given = "bearer", headers["x-api-key"]
        found = [name for key, name in allowed.items() if hmac.compare_digest(given.strip().encode(), key.encode())]
        if allowed and not (found and kind.lower() == "bearer"):
            whose = "the trainer's key" if is_trainer else "one of the server's keys"
            message = (
                f"The header must be `Authorization: Bearer KEY`, or `x-api-key: KEY`, with {whose}; it is missing or wrong."
            )
            raise RefusalError(401, message, headers={"www-authenticate": "Bearer"})
        return found[0] if found else ""


def client_of(request: Any) -> str:
    """The client of a starlette request (`client_named`); `request.state.key` is the name of the request's key."""
    return client_named(request.state.key, "" if request.client is None else request.client.host)


def client_named(key: str, address: str) -> str:
    """The client whose requests take turns with other clients': a key that has its own name, or else an address.

    What a body says, such as `user`, does not count: a client could call itself a thousand clients.

    >>> client_named("ann", "10.0.0.1"), client_named(DEFAULT, "10.0.0.1"), client_named("", "10.0.0.1")
    ('key ann', 'address 10.0.0.1', 'address 10.0.0.1')
    """
    return f"address {address}" if key in ("", DEFAULT) else f"key {key}"


def host_name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> host_name("Localhost:8000"), host_name("[::1]:8000"), host_name("example.com")
    ('localhost', '::1', 'example.com')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def is_host(name: str) -> bool:
    """Whether it is a name or an address, without a port.

    >>> is_host("box.local"), is_host("::1"), is_host("box:80")
    (True, True, False)
    """
    if ":" not in name:
        return re.fullmatch(r"[^\s/]+", name) is not None
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def read_keys(path: Path) -> dict[str, str]:
    """The keys of a file, each with its name: lines of a name and a key, or of a comment that begins with #.

    Raises:
      InputError: a file that cannot be read, or a line of another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise refused(f"--key-file must be a text file that can be read; {error}.", key_file="not_found") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) != 2 or parts[1] in found or parts[0] in found.values():
            rule = f"A line of --key-file must be a name and a key, each used once; line {number} is not. Correct it."
            raise refused(rule, key_file="invalid")
        found[parts[1]] = parts[0]
    if not found:
        raise refused("--key-file must have at least one line, a name and a key; it has none. Add one.", key_file="missing")
    return found
