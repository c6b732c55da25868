"""Adapters of a server: listed as models, chosen by a request's model, and refused as unknown models are."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv.testing import TINY, adapted, tiny_model
from tests.serving.conftest import ASK, TOOL_TEMPLATE, Running
from tests.support.small_tokenizers import byte_level, with_end

httpx = pytest.importorskip("httpx")

BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server():
    tokenizer = with_end(byte_level().backend_tokenizer)
    tokenizer.chat_template = TOOL_TEMPLATE
    model = tiny_model(config=dataclasses.replace(TINY, vocab_size=257, end_ids=(256,)), tokenizer=tokenizer)
    engine = jkv.Engine(model, max_running=2, max_slots=512, page_size=16, max_adapters=2, adapter_rank=2)
    engine.add_adapter("mine", adapted(model.params))
    one = Running(engine, policy="full", settings={})
    yield one
    one.close()


def post(server, path="completions", **fields):
    answer = httpx.post(f"{server.url}/v1/{path}", json=fields, timeout=120)
    return answer.status_code, answer.json()


def test_adapters_are_listed_as_models_of_their_own(server):
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [("tiny", None), ("mine", "tiny")]
    assert httpx.get(f"{server.url}/v1/models/mine").json() == listed[1]
    assert httpx.get(f"{server.url}/v1/models/yours").status_code == 404


def test_a_request_names_an_adapter_as_its_model(server):
    model = server.engine.model
    own = dataclasses.replace(model, params=adapted(model.params))
    for name, of_name in (("mine", own), ("tiny", model), (None, model)):
        status, answer = post(server, **BODY, **({} if name is None else {"model": name}))
        assert (status, answer["model"]) == (200, name or "tiny")
        expected = jkv.generate(of_name, BODY["prompt"], max_new_tokens=8, stop_ids=(), temperature=0, progress=False)
        assert answer["choices"][0]["token_ids"] == expected.tokens[0].tolist()
    assert not np.array_equal(*(jkv.generate(x, [5, 6, 7], max_new_tokens=8, progress=False).tokens for x in (own, model)))


def test_another_name_is_refused_and_so_is_what_an_adapter_cannot_do(server):
    status, answer = post(server, **BODY, model="yours")
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "or an adapter (mine); got 'yours'" in answer["error"]["message"]
    status, answer = post(server, **BODY, model="mine", echo=True, logprobs=1)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "echo", "unsupported")


def test_a_conversation_keeps_its_adapter(server):
    chat = {"messages": ASK, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "store": True, "tool_choice": "none"}
    status, first = post(server, "chat/completions", **chat, model="mine")
    assert status == 200
    later = chat | {"previous_response_id": first["id"]}
    status, answer = post(server, "chat/completions", **later, model="tiny")
    assert (status, answer["error"]["param"]) == (400, "model")
    status, answer = post(server, "chat/completions", **later, model="mine")
    assert (status, answer["model"]) == (200, "mine")
    server.app.state.server.conversations.close()
    server.wait_until_idle()
