"""What clients and metrics time: nothing is sent before there are tokens, and seconds count from a request's arrival."""

import json
import socket
import time

import pytest

httpx = pytest.importorskip("httpx")

BODY = {"messages": [{"role": "user", "content": "b=3;c=7;d=b*c;?d"}], "max_tokens": 8, "stream": True}
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
SLOW = 0.5  # seconds between a request's head and its body


def value(server, name):
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_the_role_comes_before_the_first_text_of_each_sample(tiny):
    answer = httpx.post(f"{tiny.url}/v1/chat/completions", json=BODY | {"n": 2}, timeout=60)
    choices = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]
    for index in range(2):
        first, second = [choice["delta"] for choice in choices if choice["index"] == index][:2]
        assert first == {"role": "assistant", "content": ""}
        assert second.get("reasoning") or second.get("content")


def test_nothing_is_sent_before_there_are_tokens(tiny):
    data = json.dumps(BODY).encode()
    head = HEAD.format(len(data))
    tiny.service.pause("keep").result()
    with socket.create_connection(tiny.address[:2]) as client:
        client.sendall(head.encode() + data)
        time.sleep(0.5)
        seen = client.recv(1 << 16)  # the headers of the answer
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1 << 16)
        assert b"data:" not in seen
        tiny.service.resume().result()
        client.settimeout(60)
        while b'"role":"assistant"' not in seen:
            seen += client.recv(1 << 16)


def test_the_time_to_the_first_token_counts_from_the_arrival_of_the_request(tiny):
    names = ("vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum")
    before = [value(tiny, name) for name in names]
    data = json.dumps(BODY | {"stream": False}).encode()
    head = HEAD.format(len(data))
    with socket.create_connection(tiny.address[:2]) as client:
        began = time.perf_counter()
        client.sendall(head.encode())
        time.sleep(SLOW)
        client.sendall(data)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        whole = time.perf_counter() - began
    tiny.wait_until_idle()
    first, end = (value(tiny, name) - old for name, old in zip(names, before, strict=True))
    assert SLOW * 0.9 < first <= end < whole
