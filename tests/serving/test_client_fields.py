"""What clients send and are sent, field by field: OpenAI's rules, and errors in the client's own words."""

import dataclasses
import json
import logging
import time

import httpx
import pytest

import jkv
from jkv.engine.prompts import LONGEST_TOKEN
from jkv.serving.requests import ChatFields, CompletionFields, read_fields
from tests.serving.conftest import SETTINGS, Running, make_engine
from tests.serving.test_hostile_requests import CHAT, LONG, PROMPT, TEXT, connection, post

CHATS = "/v1/chat/completions"
GREEDY = {"temperature": 0}
PARAMS = [  # what is wrong, and the field that the error names
    ({"n": 0}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stop": [""]}, "stop"),
    ({"stop": "a" * 2000}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(20))}, "stop_token_ids"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"temprature": 1}, "temprature"),
    ({"budgt": 64}, "budgt"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"guided_grammar": "a"}, "guided_grammar"),
    ({"policy": "r_kv", "budget": 0}, "budget"),
    ({"policy": "r_kv"}, "budget"),
    ({"policy": "rkv"}, "policy"),
    ({"interval": "often"}, "interval"),
    ({"store": True}, "store"),
    ({"best_of": 2}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"modalities": ["audio"]}, "modalities"),
]
CHAT_PARAMS = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": -2}, "max_completion_tokens"),
    ({"think": "maybe"}, "think"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    *(({"chat_template_kwargs": {name: []}}, "chat_template_kwargs") for name in ("messages", "self", "tools", "conversation")),
    *(({"chat_template_kwargs": {name: 1}}, "chat_template_kwargs") for name in ("chat_template", "continue_final_message")),
]
ENGINES = (
    "max_new_tokens",
    "stop_strings",
    "stop_ids",
    "max_slots",
    "max_stop_ids",
    "kv_memory",
)  # names that clients have not


def logged(caplog, count):
    """The log's records of the requests that were served, once there are so many: a line may come after the answer."""
    end = time.monotonic() + 60
    while len(found := [one for one in caplog.messages if '"finish"' in one]) < count:
        assert time.monotonic() < end, "a request is not logged"
        time.sleep(0.01)
    return [json.loads(one.partition(" ")[2]) for one in found]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_clients_field(tiny, stream):
    for path, whole, cases in (("/v1/completions", TEXT, PARAMS), (CHATS, CHAT, CHAT_PARAMS)):
        for fields, param in cases:
            answer = post(tiny, whole | {"stream": stream and "stream_options" not in fields} | fields, path)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (fields, error)
            assert param in error["message"] or param in ("stop", "budget")
            assert not any(name in error["message"].replace("stop_token_ids", "") for name in ENGINES), error


def test_a_text_that_does_not_fit_is_refused_in_the_clients_words(tiny):
    for fields in ({"prompt": [5] * 1020, "max_tokens": 500, "policy": "full"}, {"prompt": [5] * 2000, "max_tokens": 500}):
        message = post(tiny, fields).json()["error"]["message"]
        assert "max_tokens" in message
        assert not any(name in message for name in ENGINES), message
    message = post(tiny, CHAT | {"max_completion_tokens": 9999}, CHATS).json()["error"]["message"]
    assert "max_completion_tokens" in message


def test_values_that_change_nothing_are_taken(tiny):
    plain = post(tiny, TEXT).json()["choices"]
    neutral = {"best_of": 1, "n": 1, "skip_special_tokens": True, "include_stop_str_in_output": False, "store": False}
    answer = post(tiny, TEXT | neutral | {"spaces_between_special_tokens": False, "modalities": ["text"]})
    assert answer.json()["choices"] == plain
    assert answer.headers["x-jkv-ignored"] == "spaces_between_special_tokens"
    assert post(tiny, TEXT | {"best_of": 2, "n": 2}).status_code == 200


def test_numbers_are_read_as_other_servers_read_them(tiny):
    plain = TEXT | {"max_tokens": 8, "top_p": 0.5, "temperature": 1.0, "seed": 3}
    written = plain | {"max_tokens": "8", "top_p": "0.5", "seed": 3.0, "n": "1", "stop": "", "ignore_eos": 0}
    expected = post(tiny, plain).json()["choices"]
    assert post(tiny, written).json()["choices"] == expected
    for kind, own in ((CompletionFields, {"prompt": "a"}), (ChatFields, {"messages": ["a"], "max_completion_tokens": -1})):
        assert read_fields(kind, own | {"max_tokens": -1}).limit is None
    for seed in (2**40, -(2**63), -5):
        first, again = (post(tiny, plain | {"seed": seed}).json()["choices"] for _ in range(2))
        assert first == again
    assert post(tiny, plain | {"seed": -1}).status_code == 200


def test_fields_of_other_servers_mean_here_what_they_mean_there(tiny):
    def tokens(fields, status=200):
        answer = post(tiny, {"messages": CHAT["messages"]} | fields, "/tokenize")
        assert answer.status_code == status
        return answer.json().get("tokens")

    plain = tokens({})
    off = tokens({"chat_template_kwargs": {"enable_thinking": False}})
    assert off != plain
    for fields in (
        {"enable_thinking": False},
        {"think": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
    ):
        assert tokens(fields) == off, fields
        assert tokens(fields | {"chat_template_kwargs": {"enable_thinking": True}}) == plain
    for fields in ({"think": True}, {"think": "low"}, {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"reasoning": {}}):
        assert tokens(fields) == plain, fields
    tokens({"reasoning": 3}, 400)
    penalised = {"repetition_penalty": 9, "max_tokens": 24}
    expected = post(tiny, TEXT | penalised).json()["choices"]
    assert expected != post(tiny, TEXT | {"max_tokens": 24}).json()["choices"]
    other = {"repeat_penalty": 9, "n_predict": 24}
    answer = post(tiny, {name: value for name, value in TEXT.items() if name != "max_tokens"} | other)
    assert answer.json()["choices"] == expected
    assert "x-jkv-ignored" not in answer.headers


def test_what_means_nothing_here_is_ignored_and_named(tiny):
    fields = {
        "cache_prompt": True,
        "keep_alive": "5m",
        "options": {"num_ctx": 9},
        "provider": {},
        "typical_p": 0.9,
        "user": "me",
    }
    answer = post(tiny, TEXT | fields | {"return_tokens_as_token_ids": True})
    assert answer.json()["choices"] == post(tiny, TEXT).json()["choices"]
    assert answer.headers["x-jkv-ignored"] == ", ".join(sorted([*fields, "return_tokens_as_token_ids"]))
    assert (
        post(tiny, TEXT | {"policy": "streaming_llm", "budget": 40, "importance": 0.5}).status_code == 400
    )  # our own are strict


def test_a_text_that_is_too_long_has_openais_code(tiny):
    for path, fields, words in (
        (
            "/v1/completions",
            {"prompt": [5] * 1900, "max_tokens": 500},
            "2400 tokens (1900 in the prompt, 500 in the completion",
        ),
        ("/v1/completions", {"prompt": [5] * 3000}, "your prompt has 3000 tokens"),
        ("/v1/completions", {"prompt": "b" * 10**6}, "1,000,000 characters"),
        (CHATS, CHAT | {"messages": [{"role": "user", "content": "b=3;" * 2000}]}, "your prompt has"),
        ("/v1/completions", {"prompt": [5] * 1020, "max_tokens": 500, "policy": "full"}, "1024 slots"),
    ):
        error = post(tiny, fields, path).json()["error"]
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error"), error
        assert error["message"].startswith("This model's maximum context length is ")
        assert words in error["message"], error


def test_the_most_likely_token_can_be_asked_for_where_the_default_is_greedy(tiny):
    (one,) = post(tiny, TEXT | {"logprobs": 1, "max_tokens": 1}).json()["choices"]
    assert list(one["logprobs"]["top_logprobs"][0].values()) == one["logprobs"]["token_logprobs"]
    (one,) = post(tiny, CHAT | {"logprobs": True, "top_logprobs": 1}, CHATS).json()["choices"]
    assert [len(token["top_logprobs"]) for token in one["logprobs"]["content"]] == [1] * CHAT["max_tokens"]


def test_the_template_reads_the_effort(chat_model, monkeypatch):
    monkeypatch.setattr(chat_model.tokenizer, "chat_template", "{{ messages[0].content }}{{ reasoning_effort | default('') }}")
    server = Running(make_engine(chat_model))
    try:
        for path, more in ((CHATS, {"return_token_ids": True}), ("/tokenize", {})):
            body = {name: value for name, value in CHAT.items() if more or name == "messages"} | more
            none, low = (post(server, body | effort, path).json() for effort in ({}, {"reasoning_effort": "b=3"}))
            none, low = (one.get("prompt_token_ids") or one["tokens"] for one in (none, low))
            assert chat_model.tokenizer.decode(low) == chat_model.tokenizer.decode(none) + "b=3"
    finally:
        server.close()


def test_an_echo_alone_is_streamed_to_its_end(tiny, caplog):
    with caplog.at_level(logging.INFO, "jkv.serving"):
        lines = post(tiny, TEXT | {"max_tokens": 0, "echo": True, "stream": True}).text.split("\n\n")
        (record,) = logged(caplog, 1)
    (choice,) = json.loads(lines[0].removeprefix("data: "))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert record["finish"] == ["length"]


def test_a_model_is_found_by_its_name(tiny):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve("tiny") == client.models.list().data[0]
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("org/other")
    assert caught.value.body["param"] == "model"


def test_a_conversation_is_counted_as_the_chat_endpoint_reads_it(tiny):
    for options in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        chat = post(tiny, CHAT | {"return_token_ids": True} | options, CHATS).json()
        counted = post(tiny, {"messages": CHAT["messages"], "model": "tiny"} | options, "/tokenize").json()
        assert counted["tokens"] == chat["prompt_token_ids"]
    assert post(tiny, {"prompt": PROMPT, "foo": 1}, "/tokenize").headers["x-jkv-ignored"] == "foo"
    assert post(tiny, {"prompt": PROMPT, "budget": 1}, "/tokenize").status_code == 400
    assert post(tiny, {"tokens": [1], "token": 1}, "/detokenize").json()["error"]["param"] == "token"
    assert post(tiny, {"prompt": PROMPT, "model": "other"}, "/tokenize").status_code == 404
    assert post(tiny, {}, "/tokenize").status_code == 400


def test_a_text_that_is_longer_than_the_positions_is_counted(tiny):
    one = post(tiny, {"prompt": PROMPT}, "/tokenize").json()
    beyond = 1 + LONGEST_TOKEN * one["max_model_len"] // len(PROMPT)  # a prompt of so many characters is not even encoded
    for times in (200, beyond):
        many = post(tiny, {"prompt": PROMPT * times}, "/tokenize").json()
        assert many["count"] == times * one["count"] > one["max_model_len"]


def test_a_path_with_a_slash_at_its_end_is_none(tiny):
    answer = post(tiny, TEXT, "/v1/completions/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "location" not in answer.headers


def test_an_error_has_the_headers_of_an_answer(tiny):
    answer = httpx.get(tiny.url + "/v1/completions", headers={"x-request-id": "abc"})
    assert (answer.status_code, answer.headers["allow"], answer.headers["x-request-id"]) == (405, "POST", "abc")
    answer = post(tiny, TEXT | {"user": "me", "n": 0}, headers={"x-request-id": "abc"})
    assert (answer.headers["x-request-id"], answer.headers["x-jkv-ignored"]) == ("abc", "user")
    assert post(tiny, TEXT | {"request_id": "of the body", "n": 0}).headers["x-request-id"] == "of the body"
    assert post(tiny, TEXT | {"user": "me", "a\nb\u00fc": 1}).headers["x-jkv-ignored"] == "a\\nb\\xfc, user"
    assert len(post(tiny, b"{").headers["x-request-id"]) == 32


def test_the_log_has_no_text_of_a_refused_request(tiny, caplog):
    with caplog.at_level(logging.INFO, "jkv.serving"):
        for fields in ({"temperature": "my secret"}, {"seed": "my secret"}, {"stop": [["my secret"]]}):
            assert "my secret" in post(tiny, TEXT | fields, headers={"x-request-id": "abc"}).json()["error"]["message"]
        httpx.get(tiny.url + "/v1/models/a%0Ab")
    assert "secret" not in caplog.text
    assert json.loads(caplog.messages[0].partition(" ")[2]) == {"id": "abc", "status": 400, "field": "temperature"}
    assert not any("\n" in message for message in caplog.messages)


def test_a_client_that_left_is_logged_and_counted_with_what_was_drawn_and_no_error(tiny, caplog):
    server = tiny.app.state.server
    aborted = server.metrics.success.labels(*server.metrics.labels, "abort")._value.get()
    with caplog.at_level(logging.INFO):
        for stream in (True, False):
            with connection(tiny, LONG | {"stream": stream}) as client:
                if stream:
                    seen = b""
                    while b"data:" not in seen:
                        seen += client.recv(1 << 16)
                else:
                    drawn = tiny.engine.stats.tokens
                    while tiny.engine.stats.tokens < drawn + 8:
                        time.sleep(0.01)
            tiny.wait_until_idle()
        records = logged(caplog, 2)
    assert [one["finish"] for one in records] == [["abort"]] * 2
    assert all(one["tokens"] > 0 for one in records)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "an exception that nobody retrieved"
    page = httpx.get(tiny.url + "/metrics").text
    assert server.metrics.success.labels(*server.metrics.labels, "abort")._value.get() == aborted + 2
    assert 'finished_reason="cancelled"' not in page


def test_samples_that_the_engine_has_not_taken_count_as_waiting(tiny):
    def waiting():
        lines = httpx.get(tiny.url + "/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_waiting"))

    assert waiting() == 0
    tiny.service.pause().result()
    try:
        with connection(tiny, TEXT | {"n": 3, "stream": True}) as client:
            client.recv(1)
            assert waiting() == 3
            assert httpx.get(tiny.url + "/load").json() == {"server_load": 3}
            tiny.service.resume().result()
            while b"[DONE]" not in client.recv(1 << 16):
                pass
    finally:
        tiny.service.resume().result()
    tiny.wait_until_idle()
    assert waiting() == 0


def test_a_salt_is_the_conversations(tiny):
    stored = CHAT | {"store": True, "stop_token_ids": [], "ignore_eos": True}
    first = post(tiny, stored | {"cache_salt": "mine"}, CHATS).json()["id"]
    answer = post(tiny, CHAT | {"previous_response_id": first, "cache_salt": "yours"}, CHATS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
    assert "mine" not in answer.text
    assert post(tiny, CHAT | {"previous_response_id": first, "cache_salt": "mine"}, CHATS).status_code == 200


SHORT = 256  # slots of a row


@pytest.fixture(scope="module")
def short(chat_model):
    """A server whose rows are shorter than the model's positions."""
    engine = jkv.Engine(chat_model, max_running=2, max_slots=SHORT, page_size=16, policies=[jkv.r_kv(**SETTINGS)], chunk=8)
    one = Running(engine)
    yield one
    one.close()


def test_the_length_that_is_announced_is_served(short, chat_model, monkeypatch):
    server, about = short.app.state.server, short.app.state.about
    assert about.max_model_len == chat_model.config.max_positions, "prompts enter in pieces"
    for policy, settings in (("full", {}), ("r_kv", SETTINGS | {"budget": 100_000})):
        monkeypatch.setattr(server, "options", dataclasses.replace(server.options, policy=policy, settings=settings))
        about.__dict__.pop("max_model_len")
        assert httpx.get(short.url + "/v1/models").json()["data"][0]["max_model_len"] == SHORT
        for new in (1, 9):
            assert post(short, {"prompt": [5] * (SHORT - new), "max_tokens": new}).status_code == 200
            assert post(short, {"prompt": [5] * (SHORT - new + 1), "max_tokens": new}).status_code == 400
    about.__dict__.pop("max_model_len")


def test_a_prompt_of_any_length_is_served_in_pieces(short, chat_model):
    prompt = [4 + i * i % 50 for i in range(600)]
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    answer, piece = post(short, body), SETTINGS["budget"] + SETTINGS["interval"]
    (one,) = answer.json()["choices"]
    assert answer.headers["x-jkv-prompt-piece"] == str(piece)
    settings = {"max_new_tokens": 24, "stop_ids": (), "page_size": 16, "progress": False}
    alone = jkv.generate(chat_model, [prompt], jkv.r_kv(**SETTINGS), prompt_piece=piece, **settings)
    assert one["token_ids"] == alone.tokens[0].tolist()
    assert post(short, body | {"prompt_piece": 128}).headers["x-jkv-prompt-piece"] == "128"
    assert "x-jkv-prompt-piece" not in post(short, body | {"prompt": prompt[:100]}).headers
    error = post(short, body | {"prompt_piece": 500}).json()["error"]
    assert error["param"] == "prompt_piece"
    assert f"such as {piece}" in error["message"]
    assert post(short, body | {"policy": "full"}).status_code == 400
