"""A trainer's endpoints: tokens and weights as `jkv.generate` has them, pauses, and refused weights that change nothing."""

import concurrent.futures
import dataclasses
import json
import os
import shutil
import time
import types

import jax
import numpy as np
import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from tests.serving.conftest import SETTINGS, Running, make_engine, trainers_server

pytest.importorskip("uvicorn")

from jkv.serving import trainer
from jkv.serving.trainer import TrainerOptions, add_routes

httpx = pytest.importorskip("httpx")

GREEDY = {"temperature": 0, "ignore_eos": True}
POSTS = ["/generate", "/pause", "/resume", "/update_weights", "/sleep", "/wake_up", "/reset_prefix_cache", "/flush_cache"]
POSTS += [f"{start}/{verb}_lora_adapter" for start in ("", "/v1") for verb in ("load", "unload")]
GETS = ["/is_paused", "/is_sleeping", "/weights_version", "/flush_cache"]
CALLS = [("POST", path) for path in POSTS] + [("GET", path) for path in GETS]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(chat_model, root):
    """A server with a trainer's endpoints; its weights change from test to test."""
    with trainers_server(make_engine(chat_model), root) as one:
        yield one


@pytest.fixture
def trained(server, pool):
    """The server, which is idle again at the end of the test and holds no page; a test that failed in a pause leaves none."""
    yield server
    server.service.resume().result()
    server.wait_until_idle()
    assert server.app.state.server.num_open == 0


def post(server, path, body=None, **others):
    given = {} if body is None else {"json": body}
    return httpx.post(server.url + path, timeout=120, **given, **others)


def get(server, path):
    return httpx.get(server.url + path, timeout=60).json()


def generated(server, body):
    answer = post(server, "/generate", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def version_of(server):
    return get(server, "/weights_version")["weights_version"]


def changed(model, scale):
    """The model with its last norm scaled, which changes its sampled tokens."""
    norm = model.params.final_norm * scale
    return dataclasses.replace(model, params=dataclasses.replace(model.params, final_norm=norm))


def save(model, folder):
    checkpoint.export(model.params, None, folder, dtype="float32")
    return folder


def expected(model, prompts, sampling, count, n=1, **settings):
    """What `jkv.generate` draws."""
    policy = jkv.r_kv(**SETTINGS | settings)
    return jkv.generate(model, prompts, policy, sampling, count, n=n, stop_ids=(), page_size=16, progress=False)


def until_running(server):
    """Waits until a request has drawn tokens."""
    end = time.monotonic() + 60
    while not server.service.call(lambda engine: any(s.completion.tokens for t in engine.tickets.values() for s in t)).result():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("name", ["token_ids", "input_ids"])
def test_tokens_and_log_probabilities_are_those_of_generate(trained, chat_model, prompt, name):
    other = prompt[::-1]
    params = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    out = generated(trained, {name: [prompt, other], "n": 2, "sampling_params": params, "budget": 40})
    want = expected(chat_model, [prompt, other], jkv.Sampling(temperature=1.0, seed=3), 40, n=2, budget=40)
    assert [choice["token_ids"] for choice in out["choices"]] == want.tokens.tolist()
    np.testing.assert_allclose([choice["logprobs"] for choice in out["choices"]], want.logprobs, atol=1e-5)
    assert [choice["prompt_index"] for choice in out["choices"]] == [0, 0, 1, 1]
    assert {choice["finish_reason"] for choice in out["choices"]} == {"length"}
    assert out["usage"] == {"prompt_tokens": 2 * len(prompt), "completion_tokens": 160, "total_tokens": 2 * len(prompt) + 160}


def test_new_weights_take_over_in_the_middle_of_a_request(trained, chat_model, prompt, root, pool):
    before = version_of(trained)
    save(changed(chat_model, 0.5), root / "half")
    running = pool.submit(generated, trained, {"token_ids": prompt, "max_tokens": 600, **GREEDY})
    until_running(trained)
    post(trained, "/pause?mode=keep")
    answer = post(trained, "/update_weights", {"model_path": "half"})
    post(trained, "/resume")
    assert answer.json() == {"weights_version": before + 1}
    versions = running.result()["choices"][0]["weights_versions"]
    assert versions == sorted(versions)
    assert set(versions) == {before, before + 1}
    assert version_of(trained) == before + 1
    body = {"token_ids": prompt, "max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    choice = generated(trained, body)["choices"][0]
    sampling = jkv.Sampling(temperature=1.0, seed=5)
    want = expected(changed(chat_model, 0.5), [prompt], sampling, 24)
    assert choice["token_ids"] == want.tokens[0].tolist()
    np.testing.assert_allclose(choice["logprobs"], want.logprobs[0], atol=1e-5)
    assert set(choice["weights_versions"]) == {before + 1}
    old = expected(chat_model, [prompt], sampling, 24).logprobs[0]
    assert np.abs(np.asarray(choice["logprobs"]) - old).max() > 0.01, "the weights differ too little for this test"


def bad_folders(model, root, outside):
    """Folders that must be refused: the path that is sent, the status and words of the answer."""
    save(model, outside / "copy")
    (root / "link").symlink_to(outside / "copy")
    shutil.copytree(outside / "copy", root / "inner")
    (root / "inner" / "model.safetensors").unlink()
    (root / "inner" / "model.safetensors").symlink_to(outside / "copy" / "model.safetensors")
    nan = jax.tree.map(lambda leaf: leaf * float("nan"), model.params)
    save(dataclasses.replace(model, params=nan), root / "nan")
    save(jkv.testing.tiny_model(), root / "other")
    save(model, root / "short")
    data = (root / "short" / "model.safetensors").read_bytes()
    (root / "short" / "model.safetensors").write_bytes(data[:-1000])
    (root / "circle").symlink_to(root / "circle")
    (root / "empty").mkdir()
    return [
        ("../" + outside.name + "/copy", 403, "must lie in --weights-root"),
        (str(outside / "copy"), 403, "must lie in --weights-root"),
        ("link", 403, "must lie in --weights-root"),
        ("inner", 400, "got a link to"),
        ("nan", 400, "must be finite"),
        ("other", 400, "must be of the same model"),
        ("short", 400, "model.safetensors"),
        ("circle", 400, "model_path must be a folder"),
        ("empty", 400, "config.json"),
        ("no-such", 404, "must be a folder of --weights-root"),
        ("tiny-reasoner", 404, "must be a folder of --weights-root"),
        ("a\0b", 400, "null"),
    ]


def test_refused_weights_change_nothing(trained, chat_model, prompt, root, tmp_path, pool):
    cases = bad_folders(chat_model, root, tmp_path)
    before, body = version_of(trained), {"token_ids": prompt, "max_tokens": 400, **GREEDY}
    want = generated(trained, body)["choices"]
    running = pool.submit(generated, trained, body)
    for path, status, words in cases:
        answer = post(trained, "/update_weights", {"model_path": path})
        assert answer.status_code == status, (path, answer.text)
        assert words in answer.json()["error"]["message"], (path, answer.text)
    for wrong in ({}, {"path": "half"}, {"model_path": 5}, {"model_path": "half", "flush_cache": True}, []):
        assert post(trained, "/update_weights", wrong).status_code == 400
    assert version_of(trained) == before
    assert running.result()["choices"] == want
    assert generated(trained, body)["choices"] == want


def test_a_pause_keeps_ends_or_waits_for_requests(trained, prompt, pool):
    body = {"token_ids": prompt, "max_tokens": 600, **GREEDY}
    want = generated(trained, body)["choices"]
    for mode, reason in (("keep", "length"), ("wait", "length"), ("abort", "abort"), (None, "abort")):
        running = pool.submit(generated, trained, body)
        until_running(trained)
        answer = post(trained, "/pause", params={} if mode is None else {"mode": mode})
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
        assert get(trained, "/is_paused") == {"is_paused": True}
        later = pool.submit(generated, trained, {"token_ids": prompt, "max_tokens": 4, **GREEDY})
        if mode == "keep":
            with pytest.raises(concurrent.futures.TimeoutError):
                running.result(0.5)
        else:
            running.result(30)
        with pytest.raises(concurrent.futures.TimeoutError):
            later.result(0.2)
        assert post(trained, "/resume").json() == {"status": "resumed"}
        (choice,) = running.result()["choices"]
        assert choice["finish_reason"] == reason
        length = len(choice["token_ids"])
        assert length == 600 if reason == "length" else 0 < length < 600
        assert choice["token_ids"] == want[0]["token_ids"][:length]
        assert later.result()["choices"][0]["token_ids"] == want[0]["token_ids"][:4]
    assert post(trained, "/pause?mode=sleep").status_code == 400
    assert get(trained, "/is_paused") == {"is_paused": False}


BAD = [
    ({}, "token_ids is needed"),
    ({"token_ids": "b=3"}, "token_ids must be a list"),
    ({"token_ids": ["b=3"]}, "must be a list of token ids"),
    ({"token_ids": [[5], "b"]}, "must be a list of token ids"),
    ({"token_ids": [5, True]}, "must be a list of token ids"),
    ({"token_ids": [99999]}, "Token ids must lie in"),
    ({"token_ids": [5], "input_ids": [5]}, "given once"),
    ({"token_ids": [5], "n": 2, "sampling_params": {"n": 3}}, "given once"),
    ({"token_ids": [5], "sampling_params": [5]}, "sampling_params must be"),
    ({"token_ids": [5], "stream": True}, "stream is not served at /generate"),
    ({"token_ids": [5], "temprature": 1}, "Did you mean temperature?"),
    ({"token_ids": [5], "policy": "r_kv", "budget": 0}, "budget"),
]


def test_bad_bodies_are_refused(trained):
    for body, words in BAD:
        answer = post(trained, "/generate", body)
        assert answer.status_code == 400, (body, answer.text)
        assert words in answer.json()["error"]["message"], (body, answer.text)


def test_pages_of_other_sites_are_refused(trained):
    """A GET, and a POST without a body, needs no leave of the server in a browser, which sends the page's site with it."""
    for method, path in CALLS:
        for header in ({"origin": "http://example.org"}, {"sec-fetch-site": "cross-site"}):
            assert httpx.request(method, trained.url + path, headers=header).status_code == 403
    assert get(trained, "/is_paused") == {"is_paused": False}
    assert get(trained, "/is_sleeping") == {"is_sleeping": False}


def test_the_endpoints_need_the_key_and_are_off_by_default(chat_model, tiny):
    for method, path in CALLS:
        assert httpx.request(method, tiny.url + path).status_code == 404
    closed = Running(make_engine(chat_model), trainer_key="secret", api_key="client")
    try:
        add_routes(closed.app, TrainerOptions())
        for method, path in CALLS:
            for headers in ({}, {"authorization": "Bearer client"}):
                assert httpx.request(method, closed.url + path, headers=headers).status_code == 401
        assert not closed.engine.is_asleep
        headers = {"authorization": "Bearer secret", "content-type": "application/json"}
        assert httpx.get(closed.url + "/is_paused", headers=headers).json() == {"is_paused": False}
        answer = httpx.post(closed.url + "/update_weights", headers=headers, content=json.dumps({"model_path": "half"}))
        assert answer.status_code == 403
        assert "needs a server with --weights-root" in answer.text
    finally:
        closed.close()


def test_a_trainer_has_a_key_of_its_own_where_clients_have_keys(tiny, monkeypatch):
    monkeypatch.setattr(tiny.app.state.server.access, "keys", {"abc": "ann"})
    with pytest.raises(jkv.InputError, match="need trainer_key"):
        add_routes(tiny.app, TrainerOptions())


@pytest.mark.parametrize("change", ["written", "replaced", "added"])
def test_a_folder_that_is_written_while_it_is_read_is_refused(tmp_path, monkeypatch, change):
    """Else the weights could be of two steps of the trainer, under one version."""
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"old")
    writes = []

    def read(folder, model):
        if writes:
            (folder / "model.tmp").write_bytes(b"new weights")
            if change != "added":
                (folder / "model.tmp").rename(folder / "model.safetensors")
            if change == "written":
                os.utime(folder / "model.safetensors", ns=(1, 1))
        return "params"

    monkeypatch.setattr(trainer, "read_weights", read)
    endpoints = trainer.Trainer(types.SimpleNamespace(service=None, model=None), TrainerOptions(tmp_path))
    assert endpoints.read("step") == "params"
    writes.append(True)
    with pytest.raises(trainer.RefusalError, match="must not change while it is read") as caught:
        endpoints.read("step")
    assert caught.value.status == 409
