"""Who may call a server: names, keys and pages; and what an error tells of the machine."""

import json
import logging
import socket

import pytest

from jkv.errors import InputError
from jkv.serving.access import read_keys
from jkv.serving.errors import error_body
from jkv.serving.options import ServerOptions
from tests.serving.conftest import Running, make_engine

pytest.importorskip("uvicorn")

from jkv.serving.run import listen, with_own_names
from jkv.serving.trainer import TrainerOptions, add_routes

httpx = pytest.importorskip("httpx")

BODY = {"prompt": [5, 6, 7], "max_tokens": 1}
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def guarded(chat_model):
    """A server with keys, a trainer's, names and pages."""
    options = with_own_names(ServerOptions(hosts=("box.local",)), listen("127.0.0.1", 0))
    keys = {"api_key": "key-one", "api_keys": {"key-two": "ann"}, "trainer_key": "key-three"}
    one = Running(make_engine(chat_model), hosts=options.hosts, origins=(PAGE,), priorities=("ann",), **keys)
    add_routes(one.app, TrainerOptions())
    yield one
    one.close()


def post(server, key="key-one", path="/v1/completions", **headers):
    given = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(server.url + path, json=BODY, headers=given | headers, timeout=60)


def test_a_server_of_this_machine_is_called_by_its_own_names_alone(guarded):
    for name in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:9", "box.local"):
        assert httpx.get(guarded.url + "/health", headers={"host": name}).status_code == 200, name
    for name in ("evil.example", "evil.example:8000", "localhost.evil.example", "", "127.0.0.1.nip.io", "[::2]"):
        for path in ("/metrics", "/", "/v1/models"):
            answer = httpx.get(guarded.url + path, headers={"host": name, "authorization": "Bearer key-one"})
            assert answer.status_code == 403, (name, path)
            assert answer.json()["error"]["code"] == "forbidden"
    with socket.create_connection(guarded.address[:2]) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in client.recv(1 << 16)


def test_only_loopback_has_names_by_itself():
    for host, names in (("127.0.0.1", {"localhost", "127.0.0.1", "::1"}), ("0.0.0.0", set())):
        with listen(host, 0) as place:
            assert set(with_own_names(ServerOptions(), place).hosts) == names


def test_each_key_has_a_name_in_the_log_and_opens_what_is_its_own(guarded, caplog):
    with caplog.at_level(logging.INFO, "jkv.serving"):
        for key in ("key-one", "key-two", "key-three"):
            assert post(guarded, key).status_code == 200
        guarded.wait_until_idle()
    records = [json.loads(one.partition(" ")[2]) for one in caplog.messages if '"finish"' in one]
    assert [record["key"] for record in records] == ["default", "ann", "trainer"]
    assert "key-" not in caplog.text
    for key in ("", "wrong", "key-on", "key-one1"):
        assert post(guarded, key).status_code == 401
    for key, status in (("key-one", 401), ("key-two", 401), ("", 401), ("key-three", 200)):
        given = {"authorization": f"Bearer {key}"} if key else {}
        assert httpx.get(guarded.url + "/weights_version", headers=given).status_code == status
        assert post(guarded, key, "/resume").status_code == status
    assert httpx.post(guarded.url + "/v1/completions", json=BODY, headers={"authorization": "Basic key-one"}).status_code == 401


def test_only_keys_that_the_operator_names_set_a_priority(guarded, monkeypatch):
    found, server = [], guarded.app.state.server
    submit = server.submit
    monkeypatch.setattr(server, "submit", lambda job, *rest: (found.append(job.groups[0][0].priority), submit(job, *rest))[1])
    body = {"token_ids": [5, 6], "max_tokens": 1, "priority": -3}
    for path, given in (
        ("/v1/completions", BODY | {"priority": "-3"}),
        ("/generate", body),
        ("/generate", {"token_ids": [5], "max_tokens": 1, "sampling_params": {"priority": -3}}),
    ):
        for key in ("key-three",) if path == "/generate" else ("key-one", "key-two", "key-three"):
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(guarded.url + path, json=given, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("x-jkv-ignored") == (None if key == "key-two" else "priority")
            assert found.pop() == (-3 if key == "key-two" else 0)
    headers = {"authorization": "Bearer key-two"}
    answer = httpx.post(guarded.url + "/v1/completions", json=BODY | {"priority": 0.5}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    everyone = ServerOptions(priorities=("*",))
    assert everyone.may_order("")
    assert everyone.may_order("ann")
    assert not ServerOptions().may_order("")


def test_pages_of_named_sites_may_call_it(guarded):
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = httpx.options(guarded.url + "/v1/completions", headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert post(guarded, origin=PAGE).headers["access-control-allow-origin"] == PAGE
    others = httpx.options(guarded.url + "/v1/completions", headers=asked | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in others.headers
    assert "access-control-allow-origin" not in post(guarded, origin="https://evil.example").headers
    assert post(guarded, "key-three", "/resume", origin=PAGE).status_code == 403  # no page trains


def test_embeddings_are_refused_by_name(guarded):
    error = post(guarded, path="/v1/embeddings")
    assert (error.status_code, error.json()["error"]["code"]) == (404, "unsupported")
    assert "embeddings" in error.json()["error"]["message"]


def test_an_error_shows_no_folder_of_the_machine():
    for text, shown in (
        ("The chat template of /models/of/us/tiny must render.", "The chat template of tiny must render."),
        ("[Errno 2] No such file: '/srv/my models/x.json'", "[Errno 2] No such file: 'x.json'"),
        ("C:\\Users\\ann\\x.json is damaged", "x.json is damaged"),
        ("Use /v1/chat/completions, /generate or http://127.0.0.1:8000/v1/models with text/plain.", None),
    ):
        assert error_body(500, text)["error"]["message"] == (shown or text)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"api_key": "a", "trainer_key": "a"}, "trainer_key"),
        ({"api_keys": {"a": "ann"}, "trainer_key": "a"}, "trainer_key"),
        ({"api_keys": {"\n": "ann"}}, "api_keys ann"),
        ({"hosts": ("a:80",)}, "hosts"),
        ({"origins": ("page.example",)}, "origins"),
        ({"origins": ("https://page.example/a",)}, "origins"),
        ({"tool_form": "xml"}, "tool_form"),
        ({"priorities": ("ann",)}, "priorities"),
        ({"priorities": ("trainer",)}, "priorities"),
    ],
    ids=str,
)
def test_options_that_open_what_they_should_not_are_refused(options, field):
    with pytest.raises(InputError) as caught:
        ServerOptions(**options)
    assert caught.value.field == field


def test_keys_are_read_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nann abc\n\nbob  def\n")
    assert read_keys(path) == {"abc": "ann", "def": "bob"}
    for text in ("", "ann", "ann abc\nann def", "ann abc\nbob abc", "a b c"):
        path.write_text(text)
        with pytest.raises(InputError, match="--key-file"):
            read_keys(path)
    with pytest.raises(InputError, match="--key-file"):
        read_keys(tmp_path / "none")
