"""A server that sleeps: what it frees, what it refuses meanwhile, and that requests go on or end as the trainer asked."""

import concurrent.futures
import dataclasses
import gc

import jax
import jax.numpy as jnp
import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.engine.clocks import COMPILING
from tests.serving.conftest import SETTINGS, trainers_server
from tests.serving.test_trainer import GREEDY, changed, generated, get, post, until_running

httpx = pytest.importorskip("httpx")

PIECE = 128  # tokens that the prefix cache keeps at least


def own_copy(model):
    """The model with weights that nobody else has."""
    return dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params))


@pytest.fixture(scope="module")
def root(tmp_path_factory, chat_model):
    folder = tmp_path_factory.mktemp("weights")
    for name, scale in (("same", 1), ("half", 0.5)):
        checkpoint.export(changed(chat_model, scale).params, None, folder / name, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def server(chat_model, root):
    sizes = {"max_running": 4, "max_slots": 1024, "page_size": 16, "chunk": 8, "prefix_cache": True}
    engine = jkv.Engine(own_copy(chat_model), policies=[jkv.r_kv(**SETTINGS)], max_stop_ids=8, **sizes)
    with trainers_server(engine, root) as one:
        yield one


@pytest.fixture
def slept(server):
    """The server, awake again and idle at the end of the test."""
    yield server
    if server.engine.is_asleep:
        post(server, "/update_weights", {"model_path": "same"})
    post(server, "/wake_up")
    server.service.resume().result()
    post(server, "/reset_prefix_cache")
    server.wait_until_idle()


def live_bytes():
    """On the device; arrays may share a buffer."""
    gc.collect()
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}.values())


def is_sleeping(server):
    return get(server, "/is_sleeping")["is_sleeping"]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort", None])
def test_unfinished_requests_go_on_or_end_as_asked_and_new_ones_are_refused(slept, prompt, pool, mode):
    body = {"token_ids": prompt, "max_tokens": 400, **GREEDY}
    (want,) = generated(slept, body)["choices"]
    running = pool.submit(generated, slept, body)
    until_running(slept)
    answer = post(slept, "/sleep", params={} if mode is None else {"mode": mode})
    assert (answer.status_code, answer.json()) == (200, {"is_sleeping": True})
    if mode == "keep":
        assert not running.done()
    else:
        running.result(30)
    message = {"max_tokens": 1, "messages": [{"role": "user", "content": "b=3;?b"}]}
    for path, given in (("/generate", body), ("/v1/completions", {"prompt": prompt}), ("/v1/messages", message)):
        refused = post(slept, path, given)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "The server is asleep" in refused.json()["error"]["message"]
    for path in ("/health", "/metrics", "/v1/models", "/load", "/weights_version"):
        assert httpx.get(slept.url + path).status_code == 200
    assert post(slept, "/tokenize", {"prompt": "b=3"}).status_code == 200
    assert post(slept, "/wake_up").json() == {"is_sleeping": False}
    (choice,) = running.result(60)["choices"]
    assert choice["finish_reason"] == ("length" if mode in ("keep", "wait") else "abort")
    assert choice["token_ids"] == want["token_ids"][: len(choice["token_ids"])]
    assert generated(slept, body)["choices"] == [want]


def test_the_pool_is_freed_and_made_again_and_nothing_compiles(slept, prompt):
    body = {"token_ids": prompt, "max_tokens": 24, **GREEDY}
    want, compiled = generated(slept, body)["choices"], COMPILING.count
    before, pool = live_bytes(), slept.engine.num_pages * slept.engine.page_bytes
    post(slept, "/sleep?level=1")
    assert before - live_bytes() >= pool
    assert post(slept, "/sleep?level=1").json() == {"is_sleeping": True}  # once more
    post(slept, "/wake_up")
    assert live_bytes() - before < pool / 2  # servers of other tests may have ended meanwhile
    assert generated(slept, body)["choices"] == want
    assert COMPILING.count == compiled


@pytest.mark.parametrize("calls", ["update, wake", "wake, update", "by tags"])
def test_weights_are_freed_at_level_2_and_replaced_by_an_update(slept, chat_model, prompt, calls):
    body = {"token_ids": prompt, "max_tokens": 24, **GREEDY}
    before, version = live_bytes(), get(slept, "/weights_version")["weights_version"]
    post(slept, "/sleep?level=2&mode=wait")
    freed = slept.engine.num_pages * slept.engine.page_bytes + sum(x.nbytes for x in jax.tree.leaves(chat_model.params))
    assert before - live_bytes() >= freed
    update = {"update": lambda: post(slept, "/update_weights", {"model_path": "half"})}
    steps = {
        "update, wake": [update["update"], lambda: post(slept, "/wake_up")],
        "wake, update": [lambda: post(slept, "/wake_up"), update["update"]],
        "by tags": [
            lambda: post(slept, "/wake_up?tags=weights"),
            update["update"],
            lambda: post(slept, "/wake_up?tags=kv_cache"),
        ],
    }[calls]
    for step in steps:
        assert is_sleeping(slept)
        assert post(slept, "/generate", body).status_code == 503
        assert step().status_code == 200
    assert not is_sleeping(slept)
    (choice,) = generated(slept, body)["choices"]
    want = jkv.generate(
        changed(chat_model, 0.5), [prompt], jkv.r_kv(**SETTINGS), max_new_tokens=24, stop_ids=(), progress=False
    )
    assert choice["token_ids"] == want.tokens[0].tolist()
    assert set(choice["weights_versions"]) == {version + 1}
    post(slept, "/update_weights", {"model_path": "same"})


def test_a_pause_from_before_stays_one(slept, prompt, pool):
    post(slept, "/pause?mode=keep")
    later = pool.submit(generated, slept, {"token_ids": prompt, "max_tokens": 4, **GREEDY})
    while not slept.app.state.server.num_open:
        pass
    post(slept, "/sleep")
    post(slept, "/wake_up")
    assert get(slept, "/is_paused") == {"is_paused": True}
    with pytest.raises(concurrent.futures.TimeoutError):
        later.result(0.3)
    post(slept, "/resume")
    assert len(later.result(60)["choices"][0]["token_ids"]) == 4


@pytest.mark.parametrize("path", ["/sleep?level=3", "/sleep?level=deep", "/sleep?mode=drop", "/wake_up?tags=kvcache"])
def test_other_words_are_refused_and_nothing_sleeps(slept, path):
    answer = post(slept, path)
    assert answer.status_code == 400
    assert "must be one of" in answer.json()["error"]["message"]
    assert not is_sleeping(slept)


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache", "GET /flush_cache"])
def test_the_prefix_cache_is_cleared_while_requests_run(slept, prompt, pool, path):
    body = {"prompt": (prompt * 20)[: PIECE + 20], "max_tokens": 4, "ignore_eos": True, "policy": "full"}

    def cached():
        usage = post(slept, "/v1/completions", body).json()["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    assert (cached(), cached()) == (0, PIECE)
    running = pool.submit(generated, slept, {"token_ids": body["prompt"], "max_tokens": 400, "policy": "full", **GREEDY})
    until_running(slept)
    answer = httpx.get(slept.url + path[4:]) if path.startswith("GET") else post(slept, path)
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert (cached(), cached()) == (0, PIECE)
    assert len(running.result(60)["choices"][0]["token_ids"]) == 400
