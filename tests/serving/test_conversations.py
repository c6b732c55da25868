"""`store` and `previous_response_id`: a conversation goes on in its row, with the tokens of the engine's own turns."""

import json
import re
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.engine.requests import spread_policies
from tests.serving.conftest import SETTINGS, Running, make_engine

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}b={{ message.content }};{% else %}c={{ message.content }}{{ eos_token }};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}?{% endif %}"
)
ASK = [{"role": "user", "content": "3"}]
MORE = [{"role": "user", "content": "4"}, {"role": "user", "content": "5"}]
BODY = {"model": "tiny", "max_tokens": 24, "temperature": 1.0, "seed": 3, "return_token_ids": True, "ignore_eos": True}


def load(tmp_path_factory, template):
    folder = shutil.copytree(checkpoint.find_folder("tiny-reasoner"), tmp_path_factory.mktemp("models") / "tiny")
    (Path(folder) / "chat_template.jinja").write_text(template)
    return jkv.load(str(folder))


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    return load(tmp_path_factory, TEMPLATE)


@pytest.fixture(scope="module")
def served(talking):
    one = Running(make_engine(talking), max_waiting=12, max_conversations=3)
    yield one
    one.close()


@pytest.fixture
def server(served):
    """The server, which keeps nothing at the end of the test."""
    yield served
    served.app.state.server.conversations.close()
    served.wait_until_idle()
    assert served.service.call(lambda engine: len(engine.scheduler.kept_rows)).result() == 0


def post(server, status=200, path="/v1/chat/completions", **fields):
    body = json.dumps(fields).encode()
    request = urllib.request.Request(server.url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            assert response.status == status
            text = response.read().decode()
            return text if fields.get("stream") else json.loads(text)
    except urllib.error.HTTPError as error:
        got, text = error.code, error.read()
    assert got == status, text
    return json.loads(text)["error"]


def chunks_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_three_turns_have_the_tokens_of_the_engines_turns(server, talking):
    first = post(server, messages=ASK, store=True, **BODY)
    second = post(server, messages=MORE, store=True, previous_response_id=first["id"], **BODY)
    third = post(server, messages=ASK, previous_response_id=second["id"], **BODY)

    encode = talking.tokenizer.encode
    engine = make_engine(talking)
    settings = {"max_new_tokens": 24, "stop_ids": ()}
    end = talking.tokenizer.eos_token
    ticket = engine.submit(
        encode("b=3;?", add_special_tokens=False),
        policy=jkv.r_kv(**SETTINGS),
        sampling=jkv.Sampling(temperature=1.0, seed=3),
        keep=True,
        **settings,
    )
    outs = []
    for new in (f"{end};b=4;b=5;?", f"{end};b=3;?", None):
        engine.run()
        outs.append(engine.result(ticket))
        if new is not None:
            ids = encode(new, add_special_tokens=False)
            if outs[-1].tokens[0, -1] == ids[0]:
                ids = ids[1:]
            ticket = engine.extend(ticket, ids, **settings)
    for response, out in zip((first, second, third), outs, strict=True):
        assert response["choices"][0]["token_ids"] == out.tokens[0].tolist()
        assert response["prompt_token_ids"] == out.prompts[0].tolist()
        usage = response["usage"]
        assert usage["prompt_tokens"] == len(out.prompts[0])
        assert usage["prompt_tokens_details"]["cached_tokens"] == out.samples[0].cached_tokens
    assert second["prompt_token_ids"][: len(first["prompt_token_ids"]) + 24] == (
        first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    )
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["total_tokens"]
    assert third["usage"]["kv"]["evicted_tokens"] > 0
    assert third["usage"]["kv"]["held_tokens"] <= SETTINGS["budget"] + SETTINGS["interval"]


def test_the_mark_that_ends_a_reply_is_not_repeated(server, talking):
    stop = {**BODY, "ignore_eos": False, "max_tokens": 400, "temperature": 0.0}
    first = post(server, messages=[{"role": "user", "content": "3;c=7;d=b*c;?d"}], store=True, **stop)
    assert first["choices"][0]["finish_reason"] == "stop"
    second = post(server, messages=ASK, previous_response_id=first["id"], **BODY)
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    new = second["prompt_token_ids"][len(before) :]
    assert second["prompt_token_ids"][: len(before)] == before
    text = talking.tokenizer.decode(new)
    assert text == (";b=3;?" if before[-1] == talking.tokenizer.eos_token_id else f"{talking.tokenizer.eos_token};b=3;?")


def test_a_streamed_turn_is_stored_too(server):
    whole = post(server, messages=ASK, store=True, **BODY)
    expected = post(server, messages=MORE, previous_response_id=whole["id"], **BODY)
    streamed = chunks_of(post(server, messages=ASK, store=True, stream=True, **BODY))
    second = chunks_of(
        post(
            server,
            messages=MORE,
            previous_response_id=streamed[0]["id"],
            stream=True,
            stream_options={"include_usage": True},
            **BODY,
        )
    )
    tokens = [token for chunk in second for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    assert tokens == expected["choices"][0]["token_ids"]
    assert second[-1]["usage"] == expected["usage"]


def test_an_unknown_id_is_answered_404_and_a_continued_one_409(server):
    error = post(server, 404, messages=ASK, previous_response_id="chatcmpl-none", **BODY)
    assert error["type"] == "not_found_error"
    assert error["param"] == "previous_response_id"
    assert "Send the whole conversation without it" in error["message"]
    plain = post(server, messages=ASK, **BODY)
    post(server, 404, messages=ASK, previous_response_id=plain["id"], **BODY)
    first = post(server, messages=ASK, store=True, **BODY)
    second = post(server, messages=ASK, previous_response_id=first["id"], **BODY)
    error = post(server, 409, messages=ASK, previous_response_id=first["id"], **BODY)
    assert second["id"] in error["message"]


def test_a_response_that_still_runs_is_answered_409(server):
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        json.dumps({**BODY, "messages": ASK, "store": True, "stream": True, "max_tokens": 900}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        first = json.loads(response.readline()[6:])
        error = post(server, 409, messages=ASK, previous_response_id=first["id"], **BODY)
        assert "still runs. Wait" in error["message"]
    # The client has gone: the request is cancelled, and the response forgotten.
    end = time.monotonic() + 60
    while "still runs" in (error := post_any(server, messages=ASK, previous_response_id=first["id"], **BODY))["message"]:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert error["code"] == "previous_response_not_found"


def post_any(server, **fields):
    body = json.dumps(fields).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=60)
    return json.loads(raised.value.read())["error"]


def test_the_oldest_are_forgotten_beyond_the_limit(server):
    ids = [post(server, messages=ASK, store=True, **BODY)["id"] for _ in range(4)]
    post(server, 404, messages=ASK, previous_response_id=ids[0], **BODY)
    assert server.service.call(lambda engine: len(engine.scheduler.kept_rows)).result() == 3
    for one in ids[1:]:
        post(server, messages=ASK, previous_response_id=one, **BODY)


def values(server):
    """What `/metrics` has between two turns, by name and label."""
    server.service.call(lambda engine: None).result()
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        name, _, rest = line.partition("{")
        label = re.search(r'(?:place|reason)="(\w+)"', rest)
        found[name, label and label[1]] = float(line.rpartition(" ")[2])
    return found


def swap_out(engine):
    engine.scheduler.kept_rows.swap_out()
    engine.runner.release([])


def test_metrics_count_kept_rows_where_they_are(server):
    start = values(server)

    def since(name, label=None):
        return now[name, label] - start.get((name, label), 0)

    first = post(server, messages=ASK, store=True, **BODY)
    now = values(server)
    kept = server.service.call(lambda engine: engine.scheduler.kept_rows.num_pages).result()
    assert (now["jkv:kept_rows", "device"], now["jkv:kept_rows", "host"]) == (1, 0)
    assert now["jkv:kept_pages", None] == kept > 0
    assert now["jkv:kv_bytes", None] == kept * server.service.engine.page_bytes
    server.service.call(swap_out).result()
    now = values(server)
    assert (now["jkv:kept_rows", "device"], now["jkv:kept_rows", "host"]) == (0, 1)
    assert now["jkv:kept_pages", None] == now["jkv:kv_bytes", None] == 0
    assert now["jkv:kept_host_bytes", None] > 0
    second = post(server, messages=MORE, store=True, previous_response_id=first["id"], **BODY)
    now = values(server)
    assert (now["jkv:kept_rows", "device"], now["jkv:kept_rows", "host"], now["jkv:kept_host_bytes", None]) == (1, 0, 0)
    assert since("jkv:turns_total") == 1
    others = [post(server, messages=ASK, store=True, **BODY)["id"] for _ in range(3)]
    now = values(server)
    assert since("jkv:responses_forgotten_total", "displaced") == since("jkv:kept_rows_dropped_total", "closed") == 1
    post(server, 404, messages=ASK, previous_response_id=second["id"], **BODY)
    for one in others:
        post(server, messages=ASK, previous_response_id=one, **BODY)
    now = values(server)
    assert since("jkv:turns_total") == 4
    assert since("jkv:kept_rows_dropped_total", "closed") == 1, "those that went on were not dropped"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"store": True, "n": 2}, "n must be 1"),
        ({"store": True, "stop": "x"}, "stop cannot end a response with store=true"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"previous_response_id": "LAST", "policy": "streaming_llm", "budget": 48}, "A conversation keeps its policy"),
        ({"previous_response_id": "LAST", "messages": []}, "at least one message"),
        ({"previous_response_id": "LAST", "continue_final_message": True}, "continue_final_message needs"),
        ({"previous_response_id": "LAST", "max_tokens": 10**6}, "A conversation must fit"),
        ({"previous_response_id": "LAST", "n": 3}, "n must be 1"),
        ({"store": True, "policy": "streaming_llm", "budget": 48, "positions": "cache"}, "engine was built|store needs"),
    ],
)
def test_what_a_turn_cannot_do_is_refused_and_the_row_stays(server, fields, words):
    last = post(server, messages=ASK, store=True, **BODY)["id"]
    fields = {name: last if value == "LAST" else value for name, value in fields.items()}
    error = post(server, 400, **{"messages": ASK, **BODY, **fields})
    assert re.search(words, error["message"])
    assert post(server, messages=ASK, previous_response_id=last, **BODY)["choices"]


def test_a_budget_in_bytes_may_be_given_again(server, talking):
    given = {"policy": "streaming_llm", "budget": "32kB"}
    slots = spread_policies(jkv.streaming_llm(budget="32kB"), 1, talking.params)[0].budget
    assert isinstance(slots, int)
    last = post(server, messages=ASK, store=True, **BODY, **given)["id"]
    for same in (given, given | {"budget": slots}, given | {"budget": "32 kB"}, {}):
        last = post(server, messages=MORE, store=True, previous_response_id=last, **BODY, **same)["id"]
    for other in ({"budget": "24kB"}, {"budget": slots - 1}, {"policy": "r_kv"} | SETTINGS):
        error = post(server, 400, messages=MORE, previous_response_id=last, **BODY, **given | other)
        assert "A conversation keeps its policy" in error["message"]
    post(server, messages=ASK, previous_response_id=last, **BODY)


def test_a_response_expires(talking):
    server = Running(make_engine(talking), conversation_seconds=0.3)
    try:
        first = post(server, messages=ASK, store=True, **BODY)["id"]
        time.sleep(1.0)
        post(server, 404, messages=ASK, previous_response_id=first, **BODY)
        assert values(server)["jkv:responses_forgotten_total", "expired"] == 1
        server.wait_until_idle()
    finally:
        server.close()


def test_a_server_that_keeps_none_says_so(talking):
    server = Running(make_engine(talking), max_conversations=0)
    try:
        assert "--max-conversations is 0" in post(server, 400, messages=ASK, store=True, **BODY)["message"]
    finally:
        server.close()


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}?",
        "{% for message in messages %}{{ message.content }}{{ message.content }}{% endfor %}?",
        "{% for message in messages %}{{ message.content | length }}{% endfor %}?",
    ],
)
def test_a_template_that_changes_replies_is_refused(tmp_path_factory, template):
    server = Running(make_engine(load(tmp_path_factory, template)))
    try:
        first = post(server, messages=ASK, store=True, **BODY)
        error = post(server, 400, messages=ASK, previous_response_id=first["id"], **BODY)
        assert "a chat template that writes each reply once, as it is" in error["message"]
    finally:
        server.close()


def test_a_template_that_strips_the_thoughts_of_earlier_turns_keeps_the_row(tmp_path_factory):
    """Qwen3's does so: its text of the whole conversation does not begin with the tokens that were there."""
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}b={{ message.content }};{% else %}"
        "{{ '<think></think>' if loop.last else '' }}{{ message.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}?<think>{% endif %}"
    )
    model = load(tmp_path_factory, template)
    server = Running(make_engine(model))
    try:
        first = post(server, messages=ASK, store=True, **BODY)
        second = post(server, messages=ASK, previous_response_id=first["id"], **BODY)
        before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        assert second["prompt_token_ids"][: len(before)] == before
        assert model.tokenizer.decode(second["prompt_token_ids"][len(before) :]).endswith("b=3;?<think>")
    finally:
        server.close()
