"""`jkv chat --url` talks with a model that `jkv serve`, or any other server with OpenAI's endpoints, runs."""

import argparse
import contextlib
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from jkv.checks import shown
from jkv.cli.generate import for_terminal
from jkv.cli.inputs import read_line
from jkv.cli.options import read_settings
from jkv.cli.serve import KEY
from jkv.errors import refused
from jkv.model.sampling import SAMPLING_FIELDS

MOST_LINE = 1 << 20  # characters of a server's line
SECONDS = 600.0  # of silence


OF_THE_ENGINE = (  # options that the server's own command takes
    *("parse_special", "dtype", "weight_dtype", "max_positions", "mesh", "page_size", "kv_dtype"),
    *("speculate", "drafts", "kernels"),
)


class Piece(NamedTuple):
    """What a chunk of a stream adds to an answer."""

    reasoning: str
    content: str
    usage: dict[str, Any]


def run(options: argparse.Namespace) -> int:
    """Reads messages and prints answers until the input ends. An answer that Ctrl-C ends stays in the conversation; a message
    without a whole answer leaves it.
    """
    for name in OF_THE_ENGINE:
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            rule = f"{flag} is for a model that is loaded here; got --url. Give it to `jkv serve` instead."
            raise refused(rule, **{name: "conflict"})
    base, body = address_of(options.url), body_of(options)
    begin = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(begin)
    while (line := read_line()) is not None:
        if line == "/new":
            messages = list(begin)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                content = show(pieces(base, body | {"messages": messages}))
            except ValueError as error:
                content = None
                print(f"jkv: {error}", file=sys.stderr)
            if content is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": content})
    return 0


def address_of(url: str) -> str:
    """The address of a server's endpoints, which ends in `/v1`.

    >>> address_of("http://127.0.0.1:8000/"), address_of("https://example.org/v1")
    ('http://127.0.0.1:8000/v1', 'https://example.org/v1')

    Raises:
      ValueError: another scheme, no host, or a port that is none.
    """
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_fine = False
    if not is_fine:
        rule = f"--url must begin with http:// or https://, such as http://127.0.0.1:8000; got {shown(url)}."
        raise refused(rule, url="invalid")
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def body_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of every request: what the command line gives."""
    given = {name: getattr(options, name) for name in (*SAMPLING_FIELDS, "model", "policy")}
    given |= {"max_tokens": options.max_new_tokens} | read_settings(options.budget, options.set)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {name: value for name, value in given.items() if value is not None} | stream


def pieces(base: str, body: dict[str, Any]) -> Generator[Piece]:
    """The pieces of a streamed completion; a body without a model asks for the first that the server lists.

    Raises:
      ValueError: the server cannot be reached, refuses the request, sends something else, or breaks off.
    """
    body = body if "model" in body else body | {"model": first_model(base)}
    with opened(f"{base}/chat/completions", body) as answer:
        while line := answer.readline(MOST_LINE).decode(errors="replace"):
            field, _, data = line.strip().partition(":")
            if field != "data":  # a comment, another field, or the end of an event
                continue
            if data.strip() == "[DONE]":
                return
            yield read_piece(data)
    raise ValueError(
        "The server must end an answer with [DONE]; it broke off. The answer is not whole: send the message again."
    )


def first_model(base: str) -> str:
    """The name of the first model that a server lists.

    Raises:
      ValueError: it lists none.
    """
    with opened(f"{base}/models") as answer:
        text = answer.read(MOST_LINE)
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise ValueError(f"{base}/models must list a model; got {shown(text)}. Name one with --model.") from None


@contextlib.contextmanager
def opened(address: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
    """A server's response, to be read in the block; a POST where there is a body.

    Raises:
      ValueError: the server cannot be reached, refuses the request, or breaks off.
    """
    headers = {} if body is None else {"content-type": "application/json"}
    if key := os.environ.get(KEY):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=SECONDS) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        text = b""
        with contextlib.suppress(OSError, http.client.HTTPException):
            text = error.read(MOST_LINE)
        raise ValueError(f"The server refused it: {message_in(text)}") from None
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{address} must answer; {error!r}. Is `jkv serve` running there?") from None


def read_piece(data: str) -> Piece:
    """What the data of an event adds; an error that the server sends in its place is raised.

    >>> read_piece('{"choices": [{"delta": {"reasoning": "3 * 7", "content": null}}]}')
    Piece(reasoning='3 * 7', content='', usage={})
    """
    wrong = f"The server must send chunks of a chat completion, as JSON; got {shown(data.strip())}."
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(wrong) from None
    if isinstance(chunk, dict) and chunk.get("error"):
        raise ValueError(f"The server stopped: {message_in(data.encode())}")
    try:
        deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
        reasoning = "".join(delta.get("reasoning") or delta.get("reasoning_content") or "" for delta in deltas)
        return Piece(reasoning, "".join(delta.get("content") or "" for delta in deltas), dict(chunk.get("usage") or {}))
    except (AttributeError, TypeError, ValueError):
        raise ValueError(wrong) from None


def message_in(text: bytes) -> str:
    """The message of an error in OpenAI's shape."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return shown(text)


def show(stream: Generator[Piece]) -> str | None:
    """Prints an answer as it comes, then the cache's figures. Returns its content, also where Ctrl-C ends it; None where it
    then has none yet.
    """
    content, was_reasoning, is_stopped = "", False, False
    usage: dict[str, Any] = {}
    with contextlib.closing(stream):  # which ends the request
        try:
            for reasoning, text, counts in stream:
                usage = counts or usage
                is_answer = bool(text) and was_reasoning
                was_reasoning = (was_reasoning or bool(reasoning)) and not text
                content += text
                sys.stdout.write(for_terminal(reasoning + "\n\n" * is_answer + text))
                sys.stdout.flush()
        except KeyboardInterrupt:
            is_stopped = True
        finally:
            print()
    if line := "[stopped]" if is_stopped else figures(usage):
        print(line, file=sys.stderr)
    return None if is_stopped and not content else content


def figures(usage: dict[str, Any]) -> str:
    """The tokens of an answer, and what the cache holds of them where the server counts it; empty where it counts none.

    >>> figures({"completion_tokens": 40, "kv": {"held_tokens": 32, "evicted_tokens": 8}})
    '[40 tokens, 32 tokens held, 8 evicted]'
    """
    kv = usage.get("kv")
    kv = kv if isinstance(kv, dict) else {}
    counts = usage.get("completion_tokens"), kv.get("held_tokens"), kv.get("evicted_tokens")
    nouns = "tokens", "tokens held", "evicted"
    known = [f"{count:,} {noun}" for count, noun in zip(counts, nouns, strict=True) if isinstance(count, int | float)]
    return f"[{', '.join(known)}]" if known else ""
