"""`jkv chat --url` with servers that stall, break off or send what is no completion: one line each, and a history in order."""

import http.server
import io
import json
import signal
import socket
import subprocess
import threading

import pytest

from jkv import cli
from tests.cli.test_interrupts import start

WHOLE = 'data: {"choices": [{"delta": {"content": "42"}}]}\n\n'
DONE = "data: [DONE]\n\n"


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers each chat with the next text of the server's script, and breaks off after it, or stalls if it is a `Stall`."""

    def do_GET(self):
        self.respond(b'{"data": [{"id": "first"}, {"id": "second"}]}')

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        text = self.server.script.pop(0)
        self.respond(text.removesuffix("STALL").encode())
        self.server.came.set()
        if text.endswith("STALL"):
            self.wfile.flush()
            try:
                is_gone = self.connection.recv(1) == b""  # until the client leaves
            except ConnectionResetError:  # in whose socket something was unread
                is_gone = True
            self.server.gone.append(is_gone)
            self.server.left.set()

    def respond(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def scripted():
    """A server; `script` are its next answers, `bodies` what it was sent."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.script, server.bodies, server.gone = [], [], []
    server.came, server.left = threading.Event(), threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def talk(capsys, monkeypatch, url, lines, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    status = cli.main(["chat", "--url", url, *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def turns(body):
    return [message["content"] for message in body["messages"]]


def test_other_lines_of_a_stream_are_skipped_and_the_first_model_is_named(capsys, monkeypatch, scripted):
    delta = {"choices": [{"delta": {"reasoning_content": "6*7", "content": None}}], "usage": None}
    empty = {"choices": None, "usage": {"completion_tokens": 3, "kv": {"held_tokens": 1, "evicted_tokens": 2}}}
    scripted.script = [
        f": ping\n\nevent: x\ndata:{json.dumps(delta)}\n\n{WHOLE}data: {json.dumps(empty)}\n\n{DONE}",
        WHOLE + DONE,
    ]
    status, out, err = talk(capsys, monkeypatch, scripted.url, ["a", "b"])
    assert (status, out, err) == (0, "6*7\n\n42\n42\n", "[3 tokens, 1 tokens held, 2 evicted]\n")
    assert [body["model"] for body in scripted.bodies] == ["first", "first"]
    assert turns(scripted.bodies[1]) == ["a", "42", "b"]
    scripted.script = [WHOLE + DONE]
    talk(capsys, monkeypatch, scripted.url + "/v1/", ["a"], "--model", "second")
    assert scripted.bodies[-1]["model"] == "second"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (WHOLE, "broke off"),
        ("", "broke off"),
        (f"{WHOLE}data: 5\n\n{DONE}", "must send chunks of a chat completion"),
        (f"data: {{\n\n{DONE}", "must send chunks of a chat completion"),
        (f'data: {{"choices": 5}}\n\n{DONE}', "must send chunks of a chat completion"),
        (f'data: {{"choices": [{{"delta": {{"content": 5}}}}]}}\n\n{DONE}', "must send chunks of a chat completion"),
        (f'{WHOLE}data: {{"error": {{"message": "no memory"}}}}\n\n{DONE}', "The server stopped: no memory"),
    ],
    ids=["no end", "nothing", "number", "no JSON", "choices", "content", "error"],
)
def test_what_is_no_whole_answer_leaves_the_conversation(capsys, monkeypatch, scripted, text, words):
    scripted.script = [WHOLE + DONE, text, WHOLE + DONE]
    status, _, err = talk(capsys, monkeypatch, scripted.url, ["a", "b", "c"])
    assert status == 0
    assert words in err
    assert "Traceback" not in err
    assert turns(scripted.bodies[2]) == ["a", "42", "c"]


def test_a_server_of_another_protocol_is_one_line(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as place:

        def answer():
            client, _ = place.accept()
            client.sendall(b"220 mail ready\r\n")
            client.close()

        thread = threading.Thread(target=answer)
        thread.start()
        status, _, err = talk(capsys, monkeypatch, f"http://127.0.0.1:{place.getsockname()[1]}", ["a"])
        thread.join()
    assert status == 0
    assert err.count("\n") == 1
    assert "BadStatusLine" in err


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://", "http://[::1", "ftp://a"])
def test_a_url_that_is_none_is_refused(capsys, monkeypatch, url):
    status, _, err = talk(capsys, monkeypatch, url, ["a"])
    assert (status, err.count("\n")) == (2, 1)
    assert "--url must begin with http" in err


@pytest.mark.parametrize(
    ("first", "history"), [("STALL", ["b"]), (f"{WHOLE}STALL", ["a", "42", "b"])], ids=["no token", "token"]
)
def test_an_interrupt_ends_the_answer_and_not_the_program(scripted, first, history):
    """What came before it stays in the conversation, if anything did; the server sees its client go."""
    scripted.script = [first, WHOLE + DONE]
    process = start(["chat", "--url", scripted.url], stdin=subprocess.PIPE)
    process.stdin.write("a\n")
    process.stdin.flush()
    assert scripted.came.wait(60)
    if "42" in first:
        assert process.stdout.read(2) == "42"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "[stopped]\n"
    out, err = process.communicate("b\n", timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out == "\n42\n"
    assert turns(scripted.bodies[1]) == history
    assert scripted.left.wait(60)
    assert scripted.gone == [True]


@pytest.mark.parametrize(
    "given",
    [["--parse-special"], ["--speculate", "ngram"], ["--drafts", "3"], ["--kv-dtype", "int8"], ["--max-positions", "64"]],
    ids=lambda given: given[0],
)
def test_options_of_an_engine_are_refused_beside_a_server(capsys, given):
    assert cli.main(["chat", "--url", "http://127.0.0.1:1", *given]) == 2
    assert f"{given[0]} is for a model that is loaded here; got --url." in capsys.readouterr().err
