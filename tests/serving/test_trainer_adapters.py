"""Adapters that a trainer loads into a running server: the tokens are those of the adapter, and refused ones change nothing."""

import json
import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

import jkv
from jkv.engine.clocks import COMPILING
from tests.serving.conftest import SETTINGS, Running, trainers_server
from tests.serving.test_trainer import GREEDY, generated, get, post, until_running

pytest.importorskip("uvicorn")

from jkv.serving.trainer import TrainerOptions, add_routes

httpx = pytest.importorskip("httpx")

MODULES = ("self_attn.q_proj", "mlp.down_proj")


def write_adapter(model, folder, seed=0, rank=2, change=lambda tensors: None, **fields):
    """A folder as peft writes it, with random matrices for the first layer."""
    draw, layer, tensors = np.random.default_rng(seed), model.params.layers[0], {}
    shapes = {"self_attn.q_proj": (layer.query.shape[0], np.prod(layer.query.shape[1:])), "mlp.down_proj": layer.down.shape}
    for module, (num_in, num_out) in shapes.items():
        name = f"base_model.model.model.layers.0.{module}"
        tensors[f"{name}.lora_A.weight"] = draw.normal(size=(rank, num_in)).astype(np.float32) * 0.3
        tensors[f"{name}.lora_B.weight"] = draw.normal(size=(num_out, rank)).astype(np.float32) * 0.3
    change(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory, chat_model):
    folder = tmp_path_factory.mktemp("adapters")
    for seed in range(3):
        write_adapter(chat_model, folder / f"step-{seed}", seed)
    return folder


@pytest.fixture(scope="module")
def server(chat_model, root):
    sizes = {"max_running": 4, "max_slots": 1024, "page_size": 16, "chunk": 8, "max_adapters": 2, "adapter_rank": 4}
    engine = jkv.Engine(chat_model, policies=[jkv.r_kv(**SETTINGS)], max_stop_ids=8, **sizes)
    with trainers_server(engine, root) as one:
        yield one


@pytest.fixture
def trained(server):
    """The server; without adapters at the end of the test."""
    yield server
    post(server, "/wake_up")
    server.wait_until_idle()
    for name in server.engine.adapters:
        assert post(server, "/unload_lora_adapter", {"lora_name": name}).status_code == 200


def load(server, name, path, start="/v1", **fields):
    return post(server, f"{start}/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **fields})


def tokens_of(server, prompt, model, count=24):
    (choice,) = generated(server, {"token_ids": prompt, "max_tokens": count, "model": model, **GREEDY})["choices"]
    return choice["token_ids"]


def expected(model, folder, prompt, count=24):
    own = model if folder is None else jkv.load_adapter(model, folder)
    out = jkv.generate(own, [prompt], jkv.r_kv(**SETTINGS), max_new_tokens=count, stop_ids=(), progress=False)
    return out.tokens[0].tolist()


@pytest.mark.parametrize("start", ["/v1", ""])
def test_a_trainer_loads_replaces_and_unloads_adapters(trained, chat_model, root, prompt, start):
    tokens_of(trained, prompt, None)
    version = get(trained, "/weights_version")["weights_version"]
    wanted = [expected(chat_model, root / f"step-{i}", prompt) for i in range(2)]
    assert len({*map(tuple, [*wanted, expected(chat_model, None, prompt)])}) == 3
    answer = load(trained, "mine", "step-0", start)
    assert answer.status_code == 200
    if start:
        assert answer.text == "Success: LoRA adapter 'mine' added successfully."
    else:
        assert answer.json() == {"success": True, "loaded_adapters": ["mine"], "weights_version": version + 1}
    listed = httpx.get(f"{trained.url}/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [("tiny", None), ("mine", "tiny")]
    assert tokens_of(trained, prompt, "mine") == wanted[0]
    compiled = COMPILING.count
    assert tokens_of(trained, prompt, None) == expected(chat_model, None, prompt)
    answer = load(trained, "mine", root / "step-1", start, load_inplace=True, pinned=True)  # an absolute path below the root
    assert (answer.status_code, answer.headers["x-jkv-ignored"]) == (200, "pinned")
    (choice,) = generated(trained, {"input_ids": prompt, "max_new_tokens": 24, "lora_path": "mine", **GREEDY})["choices"]
    assert choice["token_ids"] == wanted[1]
    assert set(choice["weights_versions"]) == {version + 2}
    assert COMPILING.count == compiled
    answer = post(trained, f"{start}/unload_lora_adapter", {"lora_name": "mine"})
    assert (answer.status_code, trained.engine.adapters) == (200, ())
    assert post(trained, "/generate", {"token_ids": prompt, "model": "mine"}).status_code == 404


def test_an_adapter_in_use_stays_and_its_replacement_takes_over_in_the_middle(trained, root, prompt, pool):
    load(trained, "mine", "step-0")
    before = get(trained, "/weights_version")["weights_version"]
    body = {"token_ids": prompt, "max_tokens": 500, "model": "mine", **GREEDY}
    running = pool.submit(generated, trained, body)
    until_running(trained)
    answer = post(trained, "/unload_lora_adapter", {"lora_name": "mine"})
    assert answer.status_code == 409
    assert "1 sample use 'mine'" in answer.json()["error"]["message"]
    assert load(trained, "mine", "step-1", load_inplace=True).status_code == 200
    (choice,) = running.result(60)["choices"]
    assert len(choice["token_ids"]) == 500
    versions = choice["weights_versions"]
    assert versions == sorted(versions)
    assert set(versions) == {before, before + 1}


def test_an_adapter_is_loaded_while_the_server_sleeps(trained, chat_model, root, prompt, pool):
    running = pool.submit(generated, trained, {"token_ids": prompt, "max_tokens": 300, **GREEDY})
    until_running(trained)
    post(trained, "/sleep?mode=keep")
    assert load(trained, "late", "step-2").status_code == 200
    post(trained, "/wake_up")
    assert tokens_of(trained, prompt, "late") == expected(chat_model, root / "step-2", prompt)
    assert running.result(60)["choices"][0]["token_ids"] == expected(chat_model, None, prompt, 300)


def bad_adapters(model, root, outside):
    """Adapters that must be refused: the path that is sent, the status and words of the answer."""
    write_adapter(model, outside / "copy")
    (root / "link").symlink_to(outside / "copy")
    inner = write_adapter(model, root / "inner")
    (inner / "adapter_model.safetensors").unlink()
    (inner / "adapter_model.safetensors").symlink_to(outside / "copy" / "adapter_model.safetensors")
    (root / "pickle").mkdir()
    (root / "pickle" / "adapter_model.bin").write_bytes(pickle.dumps({}))
    (root / "pickle" / "adapter_config.json").write_text((outside / "copy" / "adapter_config.json").read_text())
    hidden = write_adapter(model, root / "hidden")
    (hidden / "adapter_model.safetensors").write_bytes(pickle.dumps({"a": np.zeros(100)}))
    write_adapter(model, root / "nan", change=lambda tensors: next(iter(tensors.values())).fill(np.nan))
    wide = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((2, 5), np.float32)}
    write_adapter(model, root / "wide", change=lambda tensors: tensors.update(wide))
    write_adapter(model, root / "high", rank=5)
    (root / "empty").mkdir()
    return [
        (f"../{outside.name}/copy", 403, "must lie in --weights-root"),
        (str(outside / "copy"), 403, "must lie in --weights-root"),
        ("link", 403, "must lie in --weights-root"),
        ("no-such", 404, "must be a folder of --weights-root"),
        ("inner", 400, "got a link to"),
        ("pickle", 400, "must be a safetensors file; there is none"),
        ("hidden", 400, "must be a safetensors file"),
        ("nan", 400, "must have finite numbers"),
        ("wide", 400, "must have shapes"),
        ("high", 400, "at most rank 4, the engine's adapter_rank; got 5"),
        ("empty", 400, "adapter_config.json"),
        ("a\0b", 400, "null"),
    ]


def test_refused_adapters_change_nothing(trained, chat_model, root, tmp_path, prompt, pool):
    load(trained, "mine", "step-0")
    before, body = get(trained, "/weights_version"), {"token_ids": prompt, "max_tokens": 400, "model": "mine", **GREEDY}
    want = generated(trained, body)["choices"]
    running = pool.submit(generated, trained, body)
    for path, status, words in bad_adapters(chat_model, root, tmp_path):
        for name, fields in (("new", {}), ("mine", {"load_inplace": True})):
            answer = load(trained, name, path, **fields)
            assert answer.status_code == status, (path, answer.text)
            assert words in answer.json()["error"]["message"], (path, answer.text)
            assert str(tmp_path) not in answer.text
    cases = [
        ({"lora_name": "mine", "lora_path": "step-1"}, 400, "load_inplace replaces it"),
        ({"lora_name": "tiny", "lora_path": "step-1"}, 400, "lora_name must be a new name; got 'tiny', the model's"),
        ({"lora_name": "tiny", "lora_path": "step-1", "load_inplace": True}, 400, "the model's"),
        ({"lora_name": "a\nb", "lora_path": "step-1"}, 400, "must be printable"),
        ({"lora_name": "new"}, 400, "lora_path must be a text"),
        ({"lora_path": "step-1"}, 400, "lora_name must be a text"),
        ({"lora_name": "new", "lora_path": "step-1", "load_inplace": "yes"}, 400, "load_inplace must be"),
    ]
    for given, status, words in cases:
        answer = post(trained, "/v1/load_lora_adapter", given)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text
    assert post(trained, "/v1/unload_lora_adapter", {"lora_name": "yours"}).status_code == 404
    load(trained, "other", "step-1")
    assert "all places are taken" in load(trained, "third", "step-1").text
    post(trained, "/unload_lora_adapter", {"lora_name": "other"})
    assert trained.engine.adapters == ("mine",)
    assert (
        get(trained, "/weights_version")["weights_version"] == before["weights_version"] + 2
    )  # the other one, which came and went
    assert running.result(60)["choices"][0]["token_ids"] == want[0]["token_ids"]
    assert tokens_of(trained, prompt, "mine", 400) == want[0]["token_ids"]


def test_a_server_without_places_or_a_folder_refuses_adapters_by_the_option(chat_model, root):
    for places, trainer, status, words in (
        (0, TrainerOptions(root), 400, "--max-adapters"),
        (1, TrainerOptions(), 403, "--weights-root"),
    ):
        plain = Running(jkv.Engine(chat_model, max_running=1, max_slots=64, max_adapters=places))
        try:
            add_routes(plain.app, trainer)
            answer = load(plain, "mine", "step-0")
            assert (answer.status_code, words in answer.text) == (status, True)
        finally:
            plain.close()
