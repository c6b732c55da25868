"""`jkv serve` and `jkv chat --url` at a terminal: a server in a process of its own, a conversation, and a graceful end."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from jkv import cli
from tests.serving.conftest import TEMPLATE, chat_model, running  # noqa: F401 -- fixtures

pytest.importorskip("uvicorn")
PROMPT = "b=1;c=2;d=b+c;?d"


def run(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such-model", "--port", 0), "tiny-reasoner"),
        (("tiny-reasoner", "--policy", "r_kv"), "r_kv needs budget="),
        (("tiny-reasoner", "--policies", "rkv"), "Did you mean r_kv?"),
        (("tiny-reasoner", "--port", 99999), "port must be at most 65,535"),
        (("tiny-reasoner", "--time-limit", 0), "time_limit must be above 0"),
        (("tiny-reasoner", "--port", 0, "--kv-memory", "many"), "kv_memory"),
        (("tiny-reasoner", "--adapter", "no-name"), "--adapter takes NAME=FOLDER, each name once; got 'no-name'"),
        (("tiny-reasoner", "--adapter", "a=x", "--adapter", "a=y"), "each name once; got 'a=y'"),
        (("tiny-reasoner", "--port", 0, "--adapter", "tiny-reasoner=x"), "another name than the model"),
        (("tiny-reasoner", "--port", 0, "--adapter", "a=no-such-folder"), "no-such-folder"),
        (("tiny-reasoner", "--port", 0, "--max-adapters", -1), "max_adapters must lie"),
        (("tiny-reasoner", "--port", 0, "--adapter-rank", 0), "adapter_rank must lie"),
        (("tiny-reasoner", "--port", 0, "--trainer", "--host", "0.0.0.0"), "--trainer needs a key"),
        (("tiny-reasoner", "--port", 0, "--weights-root", "."), "--weights-root is for --trainer"),
        (("tiny-reasoner", "--port", 0, "--trainer", "--weights-root", "no-such-folder"), "must be a folder that exists"),
    ],
)
def test_each_error_is_one_line(capsys, arguments, words):
    status, out, err = run(capsys, "serve", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("jkv: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken_is_named(capsys, running):  # noqa: F811
    status, _, err = run(capsys, "serve", "tiny-reasoner", "--port", running.address[1])
    assert status == 2
    assert "Address already in use" in err


def test_a_conversation_over_http(capsys, monkeypatch, running):  # noqa: F811
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n\n/new\n{PROMPT}\n"))
    status, out, err = run(capsys, "chat", "--url", running.url, "--temperature", 0, "--policy", "full")
    assert status == 0
    assert out.count("\\boxed{d=3}") == 2
    assert len(re.findall(r"tokens held, \d+ evicted", err)) == 2


def test_what_the_server_refuses_is_one_line(capsys, monkeypatch, running):  # noqa: F811
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
    status, _, err = run(capsys, "chat", "--url", running.url, "--policy", "r_kv")
    assert status == 0
    assert err == "jkv: The server refused it: r_kv needs budget=; its settings are: " + err.partition("are: ")[2]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
    assert "Is `jkv serve` running there?" in run(capsys, "chat", "--url", "http://127.0.0.1:1")[2]
    assert "must begin with http" in run(capsys, "chat", "--url", "127.0.0.1:8000")[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_starts_answers_and_ends_when_it_is_asked_to(number):
    command = [
        sys.executable,
        "-m",
        "jkv",
        "serve",
        "tiny-reasoner",
        "--policy",
        "r_kv",
        "--budget",
        "64",
        "--port",
        "0",
        "--trainer",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ, start_new_session=True)
    try:
        while not (found := re.search(r"ready at (http://\S+)", line := process.stderr.readline())):
            assert process.poll() is None
            assert re.search(
                r"serving tiny-reasoner, policy r_kv.* at http://|warming up, \d+ of \d+|warm after .* programs", line
            )
        with urllib.request.urlopen(f"{found[1]}/weights_version", timeout=300) as answer:
            assert json.load(answer) == {"weights_version": 0}
        body = json.dumps({"prompt": PROMPT, "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{found[1]}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        assert '"tokens": 8' in process.stderr.readline()
        body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
        request = urllib.request.Request(f"{found[1]}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.readline()
            process.send_signal(number)  # which lets it end
            rest = answer.read().decode()
        assert '"finish_reason":"length"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stderr.close()
