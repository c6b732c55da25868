"""The open-loop load against a server of a few lines that answers as a test wants it to."""

import asyncio
import json

import numpy as np
import pytest

from jkv.bench.load import poisson_arrivals, send_all
from jkv.bench.serve import figures, table
from jkv.cli.bench import rates

USAGE = {"choices": [], "usage": {"completion_tokens": 5}}
TEXTS = [{"choices": [{"text": text}]} for text in ("", "a", "b", "c")]  # the first event has no text
WHOLE = "".join(f"data: {json.dumps(event)}\n\n" for event in (*TEXTS, USAGE)) + "data: [DONE]\n\n"


def chunked(text, size):
    """A body in chunks of so many bytes."""
    data = text.encode()
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


def response(status, body, *fields):
    return "\r\n".join([f"HTTP/1.1 {status} x", *fields, "", ""]).encode() + body


def sent(bodies, content, arrivals=None, seconds=60.0):
    """The answers, and the bodies in the order in which they came; each is answered with `content` once all have come."""
    came = []

    async def everything():
        are_all_there = asyncio.Event()

        async def serve(reader, writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            came.append((json.loads(await reader.readexactly(length)), head))
            if len(came) == len(bodies):
                are_all_there.set()
            await are_all_there.wait()
            writer.write(content)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
            return await send_all(url, bodies, arrivals or [0.0] * len(bodies), "secret", seconds)

    return asyncio.run(everything()), came


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_events_are_read_wherever_chunks_are_cut(size):
    chunks = "transfer-encoding: chunked"
    (answer,), came = sent([{"prompt": "p"}], response(200, chunked(WHOLE, size), chunks))
    assert answer.error == ""
    assert (answer.tokens, answer.status, len(answer.gaps)) == (5, 200, 2)
    assert 0 < answer.first <= answer.last <= answer.end
    assert answer.last == pytest.approx(answer.first + sum(answer.gaps))
    assert came[0][0] == {"prompt": "p"}
    assert "authorization: bearer secret" in came[0][1]


def test_a_late_answer_delays_no_request():
    bodies = [{"i": i} for i in range(8)]
    answers, came = sent(bodies, response(200, WHOLE.encode()), poisson_arrivals(400.0, 8, 0).tolist(), 20.0)
    assert sorted(body["i"] for body, _ in came) == list(range(8))  # the server answers none before it has all
    assert all(answer.is_served and answer.tokens == 5 for answer in answers)


@pytest.mark.parametrize(
    ("body", "words", "is_refused"),
    [
        (response(429, b"full"), "status 429: full", True),
        (response(500, b"broken"), "status 500: broken", False),
        (response(200, WHOLE.replace("data: [DONE]\n\n", "").encode()), "The stream ended early.", False),
        (response(200, b"data: [DONE]\n\n"), "The stream ended early.", False),
        (response(200, b'data: {"error": {"message": "no weights"}}\n\n'), "no weights", False),
        (response(200, chunked(WHOLE, 50)[:70], "transfer-encoding: chunked"), "70 bytes|bytes read|was cut", False),
        (b"", "without a response", False),
    ],
    ids=["refused", "broken", "without its end", "without a token", "an error event", "cut", "silence"],
)
def test_what_is_no_whole_completion_is_not_served(body, words, is_refused):
    (answer,), _ = sent([{}], body)
    assert not answer.is_served
    assert answer.is_refused == is_refused
    assert any(word in answer.error for word in words.split("|"))
    found = figures([answer], np.zeros(1), (1e9, 1e9))
    assert (found["served"], found["refused"], found["failed"], found["good"]) == (0, is_refused, not is_refused, 0)
    assert found["first_token_ms"] is None
    about = {"command": "c", "date": "d", "machine": {"load": None, "cores": 1, "processor": "p"}, "versions": {}}
    shares = {"policy": "full", "rate": None, "occupancy": None, "host_share": None, "idle_share": None}
    given = {"requests": 1, "new_tokens": 4, "budget": 8, "url": "u", "limits_ms": [1, 1], "records": [found | shares]}
    assert "| full | all at once | 0, " in table(given | {"about": about})


def test_a_server_that_is_not_there_has_failed():
    (answer,) = asyncio.run(send_all("http://127.0.0.1:1/v1/completions", [{}], [0.0], None, 60.0))
    assert answer.error


def test_arrivals_are_those_of_a_rate_whatever_the_rate():
    slow, fast = poisson_arrivals(1.0, 4_000, 7), poisson_arrivals(10.0, 4_000, 7)
    assert slow == pytest.approx(10 * fast)
    gaps = np.diff(slow)
    assert gaps.mean() == pytest.approx(1.0, rel=0.05)
    assert gaps.std() == pytest.approx(1.0, rel=0.08)  # as the exponential distribution has it
    assert rates("2,inf") == [2.0, float("inf")]
