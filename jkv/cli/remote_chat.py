"""`jkv chat --url` talks with a model that `jkv serve`, or any other server with OpenAI's endpoints, runs."""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from jkv.checks import shown
from jkv.cli.generate import for_terminal
from jkv.cli.inputs import read_line, read_settings
from jkv.cli.serve import KEY
from jkv.model.sampling import SAMPLING_FIELDS

MOST_LINE = 1 << 20  # characters of a server's line
SECONDS = 600.0  # of silence


def run(options: argparse.Namespace) -> int:
    """Reads messages and prints answers until the input ends."""
    if not options.url.startswith(("http://", "https://")):
        raise ValueError(f"--url must begin with http:// or https://, such as http://127.0.0.1:8000; got {shown(options.url)}.")
    address = options.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    begin = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(begin)
    while (line := read_line()) is not None:
        if line == "/new":
            messages = list(begin)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                content = show(chunks(address, {**body_of(options), "messages": messages}))
            except ValueError as error:
                messages.pop()
                print(f"jkv: {error}", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": content})
    return 0


def body_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of every request: what the command line gives."""
    given = {name: getattr(options, name) for name in (*SAMPLING_FIELDS, "policy")} | {"max_tokens": options.max_new_tokens}
    given |= read_settings(options.budget, options.set)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {name: value for name, value in given.items() if value is not None} | stream


def chunks(address: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed completion.

    Raises:
      ValueError: the server cannot be reached, or refuses the request.
    """
    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY):
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            while line := answer.readline(MOST_LINE).decode(errors="replace"):
                data = line.strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    yield read_chunk(data)
    except urllib.error.HTTPError as error:
        raise ValueError(f"The server refused it: {message_in(error.read(MOST_LINE))}") from None
    except OSError as error:
        raise ValueError(f"{address} must answer; {error}. Is `jkv serve` running there?") from None


def read_chunk(data: str) -> dict[str, Any]:
    """A chunk; an error that the server sends in its place is raised."""
    try:
        chunk = json.loads(data)
    except ValueError:
        raise ValueError(f"The server must send JSON; got {shown(data)}.") from None
    if "error" in chunk:
        raise ValueError(f"The server stopped: {message_in(data.encode())}")
    return chunk


def message_in(text: bytes) -> str:
    """The message of an error in OpenAI's shape."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return shown(text)


def show(stream: Iterator[dict[str, Any]]) -> str:
    """Prints a completion as it comes, then the cache's figures. Returns its content."""
    content, was_reasoning = "", False
    usage: dict[str, Any] = {}
    for chunk in stream:
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", {})
            reasoning, text = delta.get("reasoning") or "", delta.get("content") or ""
            is_answer = bool(text) and was_reasoning
            was_reasoning = (was_reasoning or bool(reasoning)) and not text
            content += text
            sys.stdout.write(for_terminal(reasoning + "\n\n" * is_answer + text))
            sys.stdout.flush()
    print()
    kv = usage.get("kv", {})
    held = f", {kv['held_tokens']:,} tokens held, {kv['evicted_tokens']:,} evicted" if kv else ""
    print(f"[{usage.get('completion_tokens', 0):,} tokens{held}]", file=sys.stderr)
    return content
