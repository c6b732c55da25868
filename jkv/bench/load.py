"""An open-loop HTTP load: each request is sent when it is due, however late the answers to others are.

Streamed completions of any server with OpenAI's endpoints, over sockets of the standard library, so that the client costs
little next to the server. All times count from the moment that a request was due: one that the client could only send late
has waited too. `late` shows by how much.
"""

import asyncio
import dataclasses
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

MOST_LINE = 1 << 20  # bytes of a server's line
REFUSED = 429  # the status of a request that would wait behind too many


@dataclasses.dataclass
class Answer:
    """What became of a request; seconds count from when it was due.

    Attributes:
      late: until it was sent.
      first: until the first event with text; None without one.
      last: until the last such event.
      end: until the stream ended.
      gaps: seconds between events with text.
      tokens: of the completion, by the server's usage.
      status: of HTTP; 0 where there was no response.
      error: why it failed; empty if it was served.
    """

    late: float = 0.0
    first: float | None = None
    last: float = 0.0
    end: float = 0.0
    gaps: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    status: int = 0
    error: str = ""

    @property
    def is_served(self) -> bool:
        """Whether the completion is whole."""
        return not self.error

    @property
    def is_refused(self) -> bool:
        """Whether the server had no room for it."""
        return self.status == REFUSED

    @property
    def per_token(self) -> float:
        """Mean seconds from one token to the next, where the first event may hold several; 0 for fewer than two tokens."""
        return (self.last - (self.first or 0.0)) / max(self.tokens - 1, 1) if self.tokens > 1 else 0.0


def poisson_arrivals(rate: float, count: int, seed: int) -> np.ndarray:
    """Seconds at which requests arrive, at random and independently of each other; `inf` a second: all at 0.

    >>> poisson_arrivals(float("inf"), 2, 0)
    array([0., 0.])
    >>> bool(abs(poisson_arrivals(10.0, 10_000, 0)[-1] / 1_000 - 1) < 0.05)
    True
    """
    return np.cumsum(np.random.default_rng(seed).exponential(1.0, count)) / rate


async def send_all(
    url: str, bodies: Sequence[Mapping[str, Any]], arrivals: Sequence[float], key: str | None, seconds: float
) -> list[Answer]:
    """Sends each body when it is due, and returns the answers in the order of the bodies.

    Args:
      url: of the endpoint.
      bodies: JSON objects with `stream` and the usage.
      arrivals: seconds from now.
      key: the bearer key.
      seconds: after which a request has failed.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(body: Mapping[str, Any], due: float) -> Answer:
        await asyncio.sleep(began + due - loop.time())
        answer = Answer(late=loop.time() - began - due)
        try:
            async with asyncio.timeout(seconds):
                await read_answer(url, body, key, began + due, answer)
        except TimeoutError:
            answer.error = f"no end within {seconds:g} seconds"
        except (OSError, EOFError, ValueError) as error:
            answer.error = str(error) or type(error).__name__
        answer.end = loop.time() - began - due
        return answer

    return await asyncio.gather(*(one(body, due) for body, due in zip(bodies, arrivals, strict=True)))


async def read_answer(url: str, body: Mapping[str, Any], key: str | None, due: float, answer: Answer) -> None:
    """Sends one request and notes when the events of its answer come.

    Raises:
      OSError, EOFError: the connection broke.
      ValueError: the answer is no whole completion.
    """
    loop, is_over = asyncio.get_running_loop(), False
    async for data in events_of(url, body, key, answer):
        now = loop.time() - due
        if data == "[DONE]":
            is_over = True
            break
        event = json.loads(data)
        if "error" in event:
            raise ValueError(event["error"].get("message", "an error within the stream"))
        if usage := event.get("usage"):
            answer.tokens = usage["completion_tokens"]
        if any(has_text(choice) for choice in event.get("choices", [])):
            if answer.first is None:
                answer.first = now
            else:
                answer.gaps.append(now - answer.last)
            answer.last = now
    if not is_over or answer.first is None:
        raise ValueError("The stream ended early.")


def has_text(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of a chunk has text of the model, reasoning included."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content"))


async def events_of(url: str, body: Mapping[str, Any], key: str | None, answer: Answer) -> AsyncIterator[str]:
    """The data of server-sent events."""
    place = urllib.parse.urlsplit(url)
    secure = ssl.create_default_context() if place.scheme == "https" else None
    port = place.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(place.hostname, port, ssl=secure, limit=MOST_LINE)
    try:
        content = json.dumps(body).encode()
        head = [f"POST {place.path} HTTP/1.1", f"host: {place.netloc}", "content-type: application/json"]
        head += [f"content-length: {len(content)}", "connection: close"] + [f"authorization: Bearer {key}"] * bool(key)
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        await writer.drain()
        words = (await reader.readline()).split()
        if len(words) < 2:
            raise ValueError("The server closed the connection without a response.")
        answer.status = int(words[1])
        fields = [line async for line in head_lines(reader)]
        if answer.status != 200:
            text = await reader.read(MOST_LINE)
            raise ValueError(f"status {answer.status}: {text[:500].decode(errors='replace')}")
        is_chunked = any(line.replace(" ", "").startswith("transfer-encoding:chunked") for line in fields)
        async for line in chunked_lines(reader) if is_chunked else plain_lines(reader):
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
    finally:
        writer.close()


async def head_lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of a response's head, in lower case."""
    while line := (await reader.readline()).strip():
        yield line.decode("latin-1").lower()


async def plain_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a body that ends with the connection."""
    while line := await reader.readline():
        yield line


async def line_of(reader: asyncio.StreamReader) -> bytes:
    """The next line, which must be there."""
    if line := await reader.readline():
        return line
    raise EOFError("The connection was cut.")


async def chunked_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a chunked body, wherever its chunks are cut."""
    rest = b""
    while size := int((await line_of(reader)).split(b";")[0], 16):
        rest += await reader.readexactly(size)
        await reader.readline()
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line
