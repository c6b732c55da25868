"""What is compiled before the first client comes, and what clients are answered until then."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import jkv
from jkv.engine import ahead_of_time
from jkv.engine.clocks import COMPILING
from jkv.serving.warm_up import LEVELS, WarmUp, sizes
from tests.serving.conftest import SETTINGS, Running, make_engine
from tests.support.foreseen import compile_later

httpx = pytest.importorskip("httpx")

R_KV = jkv.r_kv(**SETTINGS)
USUAL = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.2, "min_p": 0.1},
]
PENALISED = [{"temperature": 0.7, "min_p": 0.1, "frequency_penalty": 0.5}, {"temperature": 0.0, "repetition_penalty": 1.1}]


def engine_of(model, **others):
    """An engine as `jkv serve` makes it, with few slots."""
    return jkv.Engine(model, max_running=3, max_slots=512, page_size=16, policies=[R_KV], chunk=16, first_chunk=2, **others)


@pytest.mark.parametrize("level", ["most", "all"])
@pytest.mark.parametrize("policy", [R_KV, jkv.full()], ids=str)
def test_usual_requests_compile_nothing_after_the_warm_up(chat_model, policy, level):
    with jkv.Service(engine_of(chat_model)) as service:
        WarmUp(service, policy, level).run()
        assert service.engine.stats.steps == 0  # it is not counted
        compiled = COMPILING.count
        ask_usually(service, policy, level)
        assert COMPILING.count == compiled


def ask_usually(service, policy, level):
    """The requests that are warm after a level of the warm-up."""
    asked = {"policy": policy, "max_new_tokens": 70, "stop_ids": ()}
    samplings = USUAL + PENALISED * (level == "all")
    tickets = [service.submit([i] * 30, sampling=jkv.Sampling(**one), **asked) for i, one in enumerate(samplings)]
    tickets += [service.submit([9] * 30, sampling=jkv.Sampling(temperature=0.2, top_p=0.9), model_logprobs=True, **asked)]
    tickets += [service.submit([6] * length, sampling=jkv.Sampling(temperature=1.0), **asked) for length in (90, 270)]
    if level == "all":
        tickets += [service.submit([6] * 90, n=3, sampling=jkv.Sampling(temperature=1.0), **asked)]
        first = service.submit([7] * 9, keep=True, **asked)
        first.result()
        tickets.append(first.extend([8] * 20, max_new_tokens=9, stop_ids=()))
    for ticket in tickets:
        ticket.result()


@pytest.mark.parametrize("level", ["most", "all"])
@pytest.mark.parametrize("policy", [R_KV, jkv.full()], ids=str)
def test_usual_requests_wait_for_no_program_after_the_warm_up(chat_model, policy, level, monkeypatch):
    with jkv.Service(engine_of(chat_model, prefix_cache=True, prefix_piece=16), compiles_apart=True) as service:
        WarmUp(service, policy, level).run()
        assert service.engine.scheduler.prefix_cache.num_pages == 0
        compile_later(service)
        compiled, compile_apart = [], ahead_of_time.compile_apart

        def noted(program, fixed, shapes):
            compiled.append((program.__name__, fixed))
            return compile_apart(program, fixed, shapes)

        monkeypatch.setattr(ahead_of_time, "compile_apart", noted)
        ask_usually(service, policy, level)
    assert compiled == []


def test_nothing_is_compiled_that_nobody_asked_for(chat_model):
    engine = engine_of(chat_model)
    with jkv.Service(engine) as service:
        counts = [WarmUp(service, jkv.full(), level).num_steps for level in LEVELS]
    assert LEVELS == ("most", "first", "all")
    assert counts[1] == 2 < counts[0] < counts[2]
    assert sizes(engine, jkv.full(), "most") == [16, 8, 2, 1]
    assert sizes(engine, R_KV, "most") == sizes(engine, jkv.full(), "all") == [16, 8, 4, 2, 1]


@pytest.mark.parametrize("policy", [jkv.reason_cache(), jkv.streaming_llm(budget=48, interval=8, positions="cache")], ids=str)
def test_what_a_policy_refuses_is_left_out(chat_model, policy):
    engine = jkv.Engine(chat_model, max_running=2, max_slots=64, page_size=16, policies=[policy], max_stop_ids=8, chunk=8)
    with jkv.Service(engine) as service:
        WarmUp(service, policy, "all").run()
        assert not service.engine.tickets
        assert service.submit([5, 6], policy=policy, max_new_tokens=4, stop_ids=()).result().lengths.tolist() == [4]


def test_a_cold_server_refuses_requests_and_says_how_far_it_is(chat_model):
    server, goes_on, ended = Running(make_engine(chat_model)), threading.Event(), threading.Event()
    warm_up = WarmUp(server.service, R_KV, "first")
    warm_up._steps = [lambda: None, goes_on.wait]
    warm_up.num_steps = 3
    server.app.state.server.warm_up = warm_up
    try:
        warm_up.start(ended.set)
        while warm_up.num_done < 1:
            time.sleep(0.01)
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "b=3;?b"}]}
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"):
            answer = httpx.post(server.url + path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert "warming up, 1 of 3" in answer.json()["error"]["message"]
        for path in ("/health", "/ping", "/v1/models"):
            assert httpx.get(server.url + path).status_code == 503
        for path in ("/version", "/metrics", "/load", "/"):
            assert httpx.get(server.url + path).status_code == 200
        goes_on.set()
        assert ended.wait(60)
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.post(server.url + "/v1/messages", json=body).status_code == 200
    finally:
        server.close()


def test_a_cold_server_ends_at_once_when_it_is_asked_to():
    """A compilation that takes a minute would keep the process from ending by itself."""
    code = (
        "import time, sys, jkv.serving.warm_up as w; from jkv import cli\n"
        "w.steps_of = lambda service, *_: [lambda: service.call(lambda engine: time.sleep(60)).result()]\n"
        "sys.exit(cli.main(['serve', 'tiny-reasoner', '--port', '0']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        lines = iter(process.stderr.readline, "")
        address = next(found[1] for line in lines if (found := re.search(r" at (http://\S+)", line)))
        assert "warming up, 0 of 2" in next(lines)
        while True:
            try:
                assert httpx.get(f"{address}/health", timeout=60).status_code == 503
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.stderr.close()
