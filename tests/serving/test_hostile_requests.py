"""Bad input, wrong keys and vanished clients: each is answered in one line, or dropped, and nobody else's tokens change."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest

import jkv
from tests.serving.conftest import SETTINGS, Running, make_engine

pytest.importorskip("uvicorn")

from jkv.engine.clocks import COMPILING
from jkv.engine.stats import TIMED
from jkv.errors import CODES
from jkv.serving.errors import TOO_LONG
from jkv.serving.messages_api import PING
from jkv.serving.options import ServerOptions
from jkv.serving.requests import CompletionFields, policy_of
from jkv.serving.streaming import COMMENT, EventStream
from jkv.serving.warm_up import WarmUp

httpx = pytest.importorskip("httpx")

PROMPT = "b=3;c=7;d=b*c;e=d+b;?e"
TEXT = {"prompt": PROMPT, "max_tokens": 48, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
LONG = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.fixture(scope="module")
def expected(chat_model):
    """The greedy tokens of `TEXT`, by `jkv.generate`."""
    out = jkv.generate(chat_model, PROMPT, jkv.r_kv(**SETTINGS), max_new_tokens=48, page_size=16, progress=False)
    return out.tokens[0, : out.lengths[0]].tolist()


def post(tiny, body, path="/v1/completions", **others):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | others.pop("headers", {})
    return httpx.post(tiny.url + path, content=content, headers=headers, timeout=120, **others)


BAD = [
    ("no json", b"{", 400, "must be JSON"),
    ("no object", b"[1]", 400, "must be a JSON object"),
    ("no utf-8", b'{"prompt": "\xff"}', 400, "must be UTF-8; byte 12"),
    ("nested", DEEP, 400, "nested so deep"),
    ("long number", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "must be JSON"),
    ("large body", b'{"prompt": "' + b"a" * (1 << 22) + b'"}', 413, "bytes"),
    ("no prompt", {}, 400, "prompt is needed"),
    ("empty prompt", {"prompt": ""}, 400, "at least one token"),
    ("messages", {"prompt": [{"role": "user"}]}, 400, "/v1/chat/completions"),
    ("surrogate", {"prompt": "\ud800"}, 400, "Unicode"),
    ("token", {"prompt": [1, 2, 99999]}, 400, "Token ids must lie in"),
    ("ragged", {"prompt": [[1], "a", None]}, 400, "prompt"),
    ("long prompt", {"prompt": [5] * 3000}, 400, "maximum context length is 2048 tokens. However, your prompt has 3000 tokens"),
    ("context", {"prompt": [5] * 1020, "max_tokens": 500, "policy": "full"}, 400, "1024 slots"),
    ("n", TEXT | {"n": 0}, 400, "n must be at least 1"),
    ("many", TEXT | {"n": 100}, 400, "16 samples"),
    ("type", TEXT | {"n": "two"}, 400, "n must be a whole number"),
    ("bool", TEXT | {"stream": 2}, 400, "stream must be True or False"),
    ("temperature", TEXT | {"temperature": -1}, 400, "temperature must be"),
    ("nan", b'{"prompt": "b=3", "temperature": NaN}', 400, "temperature must be"),
    ("top_p", TEXT | {"top_p": 2}, 400, "top_p must lie in"),
    ("format", TEXT | {"kv_dtype": "int8"}, 400, "in the weights' own dtype"),
    ("seed", TEXT | {"seed": -(2**63) - 1}, 400, "seed must lie in"),
    ("stop", TEXT | {"stop": [""]}, 400, "not empty"),
    ("stop ids", TEXT | {"stop_token_ids": list(range(20))}, 400, "stop_token_ids must be at most"),
    ("max_tokens", TEXT | {"max_tokens": 0}, 400, "max_tokens must be at least 1"),
    ("logprobs", TEXT | {"logprobs": 21}, 400, "logprobs must lie in [0, 20]"),
    ("min_tokens", TEXT | {"min_tokens": 49}, 400, "min_tokens must be at most"),
    ("logit_bias", TEXT | {"logit_bias": {"5": 101}}, 400, "logit_bias must lie in [-100, 100]"),
    ("unknown", TEXT | {"temprature": 1}, 400, "Did you mean temperature?"),
    ("policy", TEXT | {"policy": "rkv"}, 400, "Did you mean r_kv?"),
    ("budget", TEXT | {"policy": "r_kv"}, 400, "r_kv needs budget="),
    ("needs", TEXT | {"policy": "h2o", "budget": 64}, 400, "h2o needs"),
    ("setting", TEXT | {"interval": "often"}, 400, "interval must be a whole number"),
    ("file", TEXT | {"policy": "seal", "vector": "/etc/passwd"}, 400, "names a file of the server"),
    ("stream options", TEXT | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("model", TEXT | {"model": "gpt-4"}, 404, "model must be tiny"),
]
BAD_CHATS = [
    ("no messages", CHAT | {"messages": []}, 400, "at least one message"),
    ("no role", CHAT | {"messages": [{"content": "a"}]}, 400, "no role"),
    ("image", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "must be texts"),
    ("tools", CHAT | {"tools": [{"type": "function"}]}, 400, "must be functions"),
    ("json", CHAT | {"response_format": {"type": "json_object"}}, 400, "tokens can write"),
    ("top_logprobs", CHAT | {"logprobs": True, "top_logprobs": 21}, 400, "must lie in [0, 20]"),
    ("template", CHAT | {"chat_template_kwargs": {"conversations": 1}}, 400, ""),
]


def test_bad_input_of_each_kind_is_refused_while_others_are_served(tiny, expected):
    """A request that is under way while all of it comes has its own tokens."""
    got = []
    threads = [threading.Thread(target=lambda: got.append(post(tiny, TEXT).json())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for path, cases in (("/v1/completions", BAD), ("/v1/chat/completions", BAD_CHATS)):
        for name, body, status, words in cases:
            answer = post(tiny, body, path)
            error = answer.json()["error"]
            assert answer.status_code == status, (name, answer.text)
            assert words in error["message"], (name, error["message"])
            assert error["code"] in (*CODES, TOO_LONG), (name, error)
            assert error["type"].endswith("error")
            assert len(error["message"]) < 1500, name
    for thread in threads:
        thread.join()
    assert [one["choices"][0]["token_ids"] for one in got] == [expected] * 2
    assert post(tiny, TEXT).json()["choices"][0]["token_ids"] == expected


def test_too_many_prompts_are_refused_before_any_is_encoded(tiny, monkeypatch):
    def fail(*_):
        raise AssertionError("it is encoded")

    monkeypatch.setattr(tiny.app.state.server.encoder, "encode", fail)
    for prompt in (["a"] * 500_000, [[5]] * 500_000, ["a"] * 9):  # as many as a body holds
        answer = post(tiny, {"prompt": prompt, "n": 2, "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert f"got {2 * len(prompt)}" in answer.json()["error"]["message"]
    assert "it is encoded" in post(tiny, {"prompt": [5] * 9, "max_tokens": 1}).json()["error"]["message"]  # one prompt


def test_another_content_type_is_refused(tiny):
    """A page of another site may send text, but no JSON, to a server on the user's own machine."""
    assert post(tiny, TEXT, headers={"content-type": "text/plain"}).status_code == 415


def test_paths_and_methods_that_are_none_have_an_error_in_the_same_shape(tiny):
    assert httpx.get(tiny.url + "/v1/nothing").json()["error"]["code"] == "not_found"
    assert httpx.get(tiny.url + "/v1/completions").json()["error"]["code"] == "method_not_allowed"


@contextlib.contextmanager
def connection(tiny, body, path="/v1/completions"):
    """A client of its own, which has sent a request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(tiny.address[:2]) as client:
        client.sendall(head.encode() + data)
        yield client


@pytest.mark.parametrize("moment", ["at once", "after the first event", "without a stream", "in the queue"])
def test_a_client_that_goes_away_leaves_no_page_held(tiny, expected, moment):
    drawn = tiny.engine.stats.tokens
    with contextlib.ExitStack() as stack:
        body = LONG | {"stream": moment != "without a stream", "n": 8 if moment == "in the queue" else 2}
        client = stack.enter_context(connection(tiny, body))
        if moment == "after the first event":
            seen = b""
            while b"data:" not in seen:
                seen += client.recv(1 << 16)
        elif moment != "at once":
            while not tiny.engine.scheduler.running:
                time.sleep(0.01)
    tiny.wait_until_idle()
    assert tiny.engine.stats.tokens - drawn < 900  # of 1,800 or more
    assert post(tiny, TEXT).json()["choices"][0]["token_ids"] == expected


def test_a_client_that_sends_nothing_more_is_dropped(tiny):
    options = tiny.app.state.server.options
    object.__setattr__(options, "body_seconds", 0.2)
    try:
        with socket.create_connection(tiny.address[:2]) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
            )
            assert b"408" in client.recv(1 << 16).split(b"\r\n")[0]
    finally:
        object.__setattr__(options, "body_seconds", 30.0)


def test_a_full_queue_is_answered_with_429_and_when_to_try_again(tiny):
    with connection(tiny, LONG | {"n": 12, "stream": True}) as client:
        client.recv(1)
        answer = post(tiny, TEXT | {"n": 8})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"


def test_tokens_and_texts_convert(tiny):
    tokens = post(tiny, {"prompt": PROMPT}, "/tokenize").json()
    assert tokens["count"] == len(tokens["tokens"]) > 10
    assert post(tiny, {"tokens": tokens["tokens"]}, "/detokenize").json() == {"prompt": PROMPT}
    assert post(tiny, {"messages": CHAT["messages"]}, "/tokenize").json()["tokens"] == tokens["tokens"]
    assert post(tiny, {"prompt": PROMPT, "add_special_tokens": False}, "/tokenize").json() == tokens  # this model adds none
    assert post(tiny, {"prompt": PROMPT, "add_special_tokens": "no"}, "/tokenize").status_code == 400
    assert post(tiny, {"prompt": ""}, "/tokenize").json()["tokens"] == []
    assert post(tiny, {"tokens": []}, "/detokenize").json() == {"prompt": ""}
    assert post(tiny, {"tokens": ["a"]}, "/detokenize").status_code == 400
    assert post(tiny, {"prompt": 3}, "/tokenize").status_code == 400


def test_metrics_have_vllms_names_and_count(tiny):
    def value(name):
        lines = httpx.get(tiny.url + "/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    counters = ("vllm:request_success_total", "vllm:prompt_tokens_total", "jkv:evicted_tokens_total")
    names = {name: value(name) for name in counters}
    tokens, turns = value("vllm:generation_tokens_total"), value("vllm:iteration_tokens_total_sum")
    usage = post(tiny, TEXT | {"max_tokens": 64, "ignore_eos": True}).json()["usage"]
    tiny.wait_until_idle()
    assert value("vllm:request_success_total") == names["vllm:request_success_total"] + 1
    assert value("vllm:prompt_tokens_total") == names["vllm:prompt_tokens_total"] + usage["prompt_tokens"]
    assert value("vllm:generation_tokens_total") == tokens + 64
    assert round(value("jkv:evicted_tokens_total") - names["jkv:evicted_tokens_total"]) == usage["kv"]["evicted_tokens"] > 0
    assert 0 < value("vllm:time_to_first_token_seconds_count") <= value("vllm:e2e_request_latency_seconds_count")
    assert value("vllm:inter_token_latency_seconds_count") > 0
    assert value("vllm:iteration_tokens_total_sum") - turns == 64 + usage["prompt_tokens"]
    compactions = tiny.service.call(lambda engine: engine.stats.compactions).result()
    assert value("jkv:compaction_seconds_count") == -(-compactions // TIMED) > 0, "the first, and each 64th after it"
    assert value("vllm:num_requests_running") == value("vllm:kv_cache_usage_perc") == value("jkv:kv_bytes") == 0


@pytest.fixture(scope="module")
def strict(chat_model):
    """A server with a key and a short time limit."""
    one = Running(make_engine(chat_model), api_key="secret", time_limit=1.0)
    yield one
    one.close()


def test_a_wrong_key_is_refused_and_the_open_endpoints_need_none(strict):
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic secret"},
        {"authorization": "Bearer secre\u00e9"},
    ):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = post(strict, TEXT, path, headers=raw)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        assert httpx.get(strict.url + "/v1/models", headers=raw).status_code == 401
    for path in ("/health", "/ping", "/version", "/metrics", "/"):
        assert httpx.get(strict.url + path).status_code == 200
    assert httpx.get(strict.url + "/v1/models", headers={"authorization": "bearer secret"}).status_code == 200


def test_a_server_may_allow_some_policies_alone():
    options = ServerOptions(policy="r_kv", settings=SETTINGS, allowed=("tova",))
    fields = [CompletionFields(prompt="a", policy=name, settings={"budget": 64}) for name in ("tova", "r_kv", "h2o")]
    assert [policy_of(one, options).name for one in fields[:2]] == ["tova", "r_kv"]
    with pytest.raises(ValueError, match="policy must be one of r_kv, tova on this server"):
        policy_of(fields[2], options)
    assert policy_of(CompletionFields(prompt="a"), options).name == "r_kv"
    with pytest.raises(ValueError, match="Did you mean tova"):
        ServerOptions(allowed=("tovar",))


def test_the_served_format_may_be_named():
    fields = CompletionFields(prompt="a", kv_dtype="int8")
    fields.check_format("int8")
    with pytest.raises(ValueError, match="which is in fp8"):
        fields.check_format("fp8")


def test_a_client_that_takes_nothing_is_dropped_and_its_place_is_free():
    finished = []

    async def events():
        while True:
            yield "data: x\n\n"

    async def wait(*_):
        await asyncio.Event().wait()

    response = EventStream(events(), lambda: finished.append(True), {}, seconds=0.01)
    asyncio.run(asyncio.wait_for(response({"type": "http"}, wait, wait), 60))
    assert finished == [True]


@pytest.mark.parametrize("ping", [COMMENT, PING])
def test_a_stream_that_is_silent_sends_pings_between_whole_events(ping):
    sent, three = [], asyncio.Event()

    async def events():
        yield "data: first\n\n"
        await three.wait()
        yield "data: last\n\n"

    async def send(message):
        sent.append(message.get("body", b"").decode())
        if sent.count(ping) == 3:
            three.set()

    async def wait():
        await asyncio.Event().wait()

    response = EventStream(events(), lambda: None, {}, 60, ping, 0.001)
    asyncio.run(asyncio.wait_for(response({"type": "http"}, wait, send), 60))
    whole = [text for text in sent if text not in ("", ping)]
    assert whole == ["data: first\n\n", "data: last\n\n"]
    assert sent[0] == "" == sent[-1]  # the head and the end
    assert sent.index(ping) > sent.index(whole[0])


def test_a_queued_stream_of_each_api_sends_pings_that_its_readers_skip(tiny):
    options = tiny.app.state.server.options
    object.__setattr__(options, "ping_seconds", 0.001)
    tiny.service.pause().result()
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a=1;?a"}], "max_tokens": 4, "stream": True}
    asked = {
        "/v1/chat/completions": (chat, ": ping"),
        "/v1/responses": ({"input": "a=1;?a", "max_output_tokens": 4, "stream": True, "store": False}, ": ping"),
        "/v1/messages": (chat, "event: ping"),
    }
    try:
        for path, (body, ping) in asked.items():
            with httpx.stream("POST", tiny.url + path, json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                for _ in range(3):
                    assert ping in lines  # reads until it comes
                tiny.service.resume().result()
                assert answer.status_code == 200
                assert any("completed" in line or "message_stop" in line or "[DONE]" in line for line in lines)
            tiny.service.pause().result()
    finally:
        object.__setattr__(options, "ping_seconds", 15.0)
        tiny.service.resume().result()


def test_a_warm_server_compiles_nothing_and_has_counted_nothing(chat_model):
    policies = [jkv.r_kv(**SETTINGS)]
    engine = jkv.Engine(chat_model, max_running=3, max_slots=96, chunk=8, policies=policies)  # nobody else has these programs
    with jkv.Service(engine) as service:
        WarmUp(service, jkv.r_kv(**SETTINGS), "first").run()
        assert service.call(lambda engine: engine.stats.tokens).result() == 0
        before = COMPILING.seconds
        service.submit("b=3;c=7;d=b*c;?d", policy=jkv.r_kv(**SETTINGS), max_new_tokens=12).result()
        assert COMPILING.seconds == before


def test_a_request_ends_at_the_time_limit_with_what_it_has(strict, monkeypatch):
    step = strict.engine.step
    monkeypatch.setattr(strict.engine, "step", lambda: (time.sleep(0.1), step())[1])
    headers = {"authorization": "Bearer secret"}
    out = post(strict, LONG, headers=headers).json()
    assert out["choices"][0]["finish_reason"] == "length"
    assert 0 <= out["usage"]["completion_tokens"] < 900
    streamed = post(strict, LONG | {"stream": True}, headers=headers).text
    assert '"finish_reason":"length"' in streamed
    assert streamed.endswith("data: [DONE]\n\n")


def test_a_stream_whose_steps_fail_ends_with_an_error_and_a_lost_engine_ends_the_service(chat_model, monkeypatch):
    one = Running(make_engine(chat_model))

    def fail(*_):
        raise ZeroDivisionError("planted")

    try:
        monkeypatch.setattr(one.engine.runner, "dispatch", fail)
        lines = post(one, LONG | {"stream": True}).text.split("\n\n")
        assert "planted" in json.loads(lines[-3].removeprefix("data: "))["error"]["message"]
        assert lines[-2] == "data: [DONE]"
        assert post(one, TEXT).status_code == 500
        monkeypatch.undo()
        assert post(one, TEXT).status_code == 200
        monkeypatch.setattr(one.engine.runner, "dispatch", fail)
        monkeypatch.setattr(one.engine, "reset", fail)
        assert post(one, TEXT).status_code == 503
        assert httpx.get(one.url + "/health").status_code == 503
    finally:
        one.close()
