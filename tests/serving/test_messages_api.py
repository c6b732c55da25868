"""`/v1/messages` with the unmodified `anthropic` package: the prompts and texts of a chat, and typed events in their order."""

import dataclasses
import json

import pytest

from jkv.serving import messages_api
from tests.serving.conftest import ARGUMENTS, ASK, CALL, TOOL, Running, make_engine
from tests.serving.test_hostile_requests import post

anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx")

PATH = "/v1/messages"
WEATHER = {name: value for name, value in TOOL["function"].items() if name != "parameters"} | {
    "input_schema": TOOL["function"]["parameters"]
}
TEXT = f"<think>Hm, so.</think>I look.\n{CALL}\nDone."
ASKED = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "max_tokens": 300}


@pytest.fixture
def client(scripted):
    scripted.text = TEXT
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        yield client


def events_of(server, body):
    """The data of a stream, each of which has its event's name."""
    text = post(server, {**body, "stream": True}, PATH).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {one['type']}" for one in found]
    return found


def block_events(index, kind, *deltas):
    return [(index, "start", kind), *((index, "delta", delta) for delta in deltas), (index, "stop", None)]


GOLDEN = [
    *block_events(0, "thinking", "thinking_delta", "signature_delta"),
    *block_events(1, "text", "text_delta"),
    *block_events(2, "tool_use", "input_json_delta"),
    *block_events(3, "text", "text_delta"),
]


def test_events_come_in_order_and_add_up_to_the_whole_message(client, scripted):
    whole = client.messages.create(**ASKED)
    events = events_of(scripted, ASKED)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    seen = []
    for event in events[2:-2]:
        what = event["type"].removeprefix("content_block_")
        kind = {"start": event.get("content_block"), "delta": event.get("delta")}.get(what)
        one = event["index"], what, kind and kind["type"]
        if one not in seen[-1:]:
            seen.append(one)
    assert seen == GOLDEN
    assert sum(event.get("delta", {}).get("type") == "input_json_delta" for event in events) > 2  # they grow
    with client.messages.stream(**ASKED) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        thinking, first, use, last = message.content
        assert (thinking.type, thinking.thinking, bool(thinking.signature)) == ("thinking", "Hm, so.", True)
        assert (first.text, last.text) == ("I look.", "Done.")
        assert (use.name, use.input, use.id.startswith("call_")) == ("weather", json.loads(ARGUMENTS), True)
        assert (message.stop_reason, message.stop_sequence, message.role) == ("tool_use", None, "assistant")
    assert whole.content[0].signature == final.content[0].signature
    assert whole.usage.output_tokens == final.usage.output_tokens == len(TEXT.encode()) + 1
    assert whole.usage.output_tokens_details.thinking_tokens == len("<think>Hm, so.</think>")
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_the_prompt_is_that_of_the_chat_that_it_means(client, jobs, scripted):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.loads(ARGUMENTS)}}
    messages = [
        {"role": "system", "content": "Be brief. Be kind."},
        *ASK,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "user", "content": "Thanks."},
    ]
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": json.loads(ARGUMENTS)}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    mark = {"cache_control": {"type": "ephemeral"}}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Zürich?", **mark}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Rain."}], **mark},
                {"type": "tool_result", "tool_use_id": "c1", "is_error": False},
                {"type": "text", "text": "Thanks."},
            ],
        },
    ]  # fmt: skip
    system = [{"type": "text", "text": "Be brief. "}, {"type": "text", "text": "Be kind.", **mark}]
    draw = {"temperature": 0.7, "top_k": 257}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    asked = {"model": "tiny", "system": system, "messages": said, "tools": [WEATHER | mark], "tool_choice": choice}
    scripted.text = CALL
    out = client.messages.create(**asked, max_tokens=200, stop_sequences=["x!"], extra_body=draw)
    chat = {"messages": messages, "tools": [TOOL], "max_tokens": 200, "stop": ["x!"], "parallel_tool_calls": False, **draw}
    answer = post(scripted, chat | {"tool_choice": "auto"}, "/v1/chat/completions").json()
    assert jobs[0].prompts[0].tolist() == jobs[1].prompts[0].tolist()
    assert dataclasses.replace(jobs[0].fields, model=None) == jobs[1].fields
    assert jobs[0].groups[0][0].sampling == jobs[1].groups[0][0].sampling
    assert out.content[0].input == json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    assert out.usage.input_tokens + out.usage.cache_read_input_tokens == answer["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == answer["usage"]["prompt_tokens"]


def test_a_sampled_text_is_that_of_the_chat(tiny):
    asked = {"messages": [{"role": "user", "content": "b=3;c=7;d=b*c;?d"}], "max_tokens": 64, "temperature": 1.0, "seed": 3}
    message = post(tiny, asked, "/v1/chat/completions").json()["choices"][0]["message"]
    out = post(tiny, asked, PATH).json()
    texts = {block["type"]: block for block in out["content"]}
    assert texts["thinking"]["thinking"] == message["reasoning"]
    assert texts.get("text", {}).get("text", "") == message["content"]
    assert (out["stop_reason"], out["usage"]["kv"]["evicted_tokens"] > 0) == ("max_tokens", True)


def test_a_message_ends_for_the_reason_that_it_names(client, scripted):
    scripted.text = "One. Two."
    out = client.messages.create(**ASKED | {"stop_sequences": ["Four"]})
    assert (out.stop_reason, out.stop_sequence, out.content[0].text) == ("end_turn", None, "One. Two.")
    out = client.messages.create(**ASKED | {"max_tokens": 4})
    assert (out.stop_reason, out.content[0].text) == ("max_tokens", "One.")
    scripted.text = ""
    out = client.messages.create(**ASKED)
    assert [block.text for block in out.content] == [""]


def test_a_stop_sequence_is_named(tiny):
    said = [{"role": "user", "content": "b=3;c=7;d=b*c;e=d+b;?e"}]
    asked = {"messages": said, "max_tokens": 48, "temperature": 0, "stop_sequences": ["x!", "\n\nc="]}
    out = post(tiny, asked, PATH).json()
    end = {"stop_reason": "stop_sequence", "stop_sequence": "\n\nc="}
    assert out["content"][0]["thinking"] == "b=3"
    assert {name: out[name] for name in end} == events_of(tiny, asked)[-2]["delta"] == end


def test_a_limit_beyond_the_context_ends_with_the_context(client, scripted):
    scripted.text = "word " * 1000
    out = post(scripted, {"max_tokens": 10**6, "messages": ASK}, PATH).json()
    assert out["stop_reason"] == "model_context_window_exceeded"
    assert 0 < out["usage"]["output_tokens"] < 5000
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(model="tiny", max_tokens=100, messages=[{"role": "user", "content": "word " * 4000}])


def test_the_model_goes_on_with_a_reply_that_the_client_has_begun(client, jobs, scripted):
    scripted.text = " rains."
    begun = [*ASK, {"role": "assistant", "content": "It"}]
    assert client.messages.create(model="tiny", max_tokens=50, messages=begun).content[0].text.strip() == "rains."
    assert bytes(jobs[0].prompts[0].tolist()).decode().endswith("<assistant>It")


def test_thinking_is_switched_as_the_template_has_it():
    def kwargs(thinking, **fields):
        return messages_api.chat_body({"messages": ASK, "max_tokens": 5, "thinking": thinking, **fields})

    assert kwargs({"type": "disabled"})["thinking"] == {"type": "disabled"}
    assert kwargs({"type": "enabled", "budget_tokens": 2000})["thinking"] == {"type": "enabled"}
    assert messages_api.unread({"thinking": {"type": "enabled", "budget_tokens": 2000}}) == ["thinking.budget_tokens"]
    assert kwargs(None, output_config={"effort": "low"})["reasoning_effort"] == "low"
    form = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}}
    assert kwargs(None, output_config={"format": form})["response_format"] == expected
    assert kwargs(None, tool_choice={"type": "any"})["tool_choice"] == "required"


def test_a_stream_that_breaks_ends_with_an_error(scripted, monkeypatch):
    async def fail(parts, tickets):
        raise RuntimeError("planted")
        yield

    monkeypatch.setattr(messages_api, "changes_of", fail)
    assert events_of(scripted, ASKED)[-1] == {"type": "error", "error": {"type": "api_error", "message": "planted"}}


def test_a_key_may_come_as_clients_of_anthropic_send_it(chat_model):
    server = Running(make_engine(chat_model), api_key="secret", max_body=500)
    try:
        asked = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "b=3;?b"}]}
        for key, raises in (("secret", None), ("wrong", anthropic.AuthenticationError)):
            with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
                if raises is None:
                    assert client.messages.create(**asked).usage.output_tokens == 4
                    with pytest.raises(anthropic.NotFoundError, match="model must be tiny"):
                        client.messages.create(**asked | {"model": "claude"})
                    with pytest.raises(anthropic.APIStatusError) as raised:
                        client.messages.create(**asked | {"system": "a" * 500})
                    assert (raised.value.status_code, raised.value.body["error"]["type"]) == (413, "request_too_large")
                else:
                    with pytest.raises(raises) as raised:
                        client.messages.create(**asked)
                    assert raised.value.body["error"]["type"] == "authentication_error"
        answer = httpx.get(server.url + PATH)
        assert (answer.status_code, answer.json()["type"]) == (405, "error")
    finally:
        server.close()


OF_USER = {"role": "user"}


def said(*blocks):
    return {"messages": [OF_USER | {"content": list(blocks)}]}


def replied(*blocks):
    return {"messages": [{"role": "assistant", "content": list(blocks)}, OF_USER | {"content": "a"}]}


BAD = [
    ({"messages": None}, "at least one message"),
    ({"messages": []}, "at least one message"),
    ({"messages": 5}, "messages must be a list"),
    ({"messages": {}}, "messages must be a list"),
    ({"messages": [5]}, "got 5"),
    ({"messages": [{}]}, "got None"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "'tool'"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "role"),
    ({"messages": [OF_USER]}, "messages.content must be a list"),
    ({"messages": [OF_USER | {"content": 5}]}, "messages.content must be a list"),
    ({"messages": [OF_USER | {"content": "\ud800"}]}, "Unicode"),
    (said(5), "got 5"),
    (said({"type": "text"}), "messages.text must be"),
    (said({"type": "text", "text": 5}), "messages.text must be"),
    (said({"type": "image", "source": {}}), "'image'"),
    (said({"type": "document", "source": {}}), "'document'"),
    (said({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "'tool_use'"),
    (said({"type": ["text"]}), "blocks"),
    (said({"type": "tool_result", "tool_use_id": "a", "content": 5}), "must be a list"),
    (said({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}), "'image'"),
    (replied({"type": "tool_use"}), "must be calls"),
    (replied({"type": "tool_use", "name": "f", "input": [1]}), "must be an object"),
    (replied({"type": "thinking"}), "thinking must be"),
    (replied({"type": "redacted_thinking", "data": "a"}), "'redacted_thinking'"),
    (replied({"type": "server_tool_use"}), "'server_tool_use'"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]}, "tool_result"),
    ({"max_tokens": None}, "max_tokens is needed"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": "many"}, "max_tokens must be"),
    ({"max_tokens": -5}, "max_"),
    ({"system": 5}, "system must be a list"),
    ({"system": [{"type": "image"}]}, "'image'"),
    ({"system": [{"type": "text", "text": None}]}, "system.text must be"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{"input_schema": {}}]}, "must be functions"),
    ({"tools": [5]}, "got 5"),
    ({"tools": "f"}, "tools must be a list"),
    ({"tool_choice": "auto"}, "tool_choice must be"),
    ({"tool_choice": {"type": "most"}}, "'most'"),
    ({"tool_choice": {"type": ["auto"]}}, "tool_choice must have"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}}, "disable_parallel_tool_use must be"),
    ({"stop_sequences": "x"}, "stop_sequences must be"),
    ({"stop_sequences": [""]}, "not empty"),
    ({"stop_sequences": [5]}, "stop_sequences"),
    ({"stop": "x"}, "stop_sequences"),
    ({"thinking": True}, "thinking must be"),
    ({"thinking": {"type": "often"}}, "'often'"),
    ({"thinking": {"type": "enabled", "budget_tokens": "all"}}, "budget_tokens must be"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "at least 1"),
    ({"output_config": 5}, "output_config must be"),
    ({"output_config": {"effort": 5}}, "effort must be"),
    ({"output_config": {"format": "json"}}, "output_config.format must be"),
    ({"mcp_servers": [{"type": "url"}]}, "no server of tools"),
    ({"container": "c"}, "nothing is executed"),
    ({"n": 2}, "one sample"),
    ({"stream": "maybe"}, "stream must be"),
    ({"temperature": "hot"}, "temperature must be"),
    ({"top_p": 5}, "top_p must"),
    ({"top_k": 0.5}, "top_k must be"),
    ({"temprature": 1}, "Did you mean temperature"),
    ({"policy": "none"}, "policy"),
]


def test_malformed_requests_are_refused_and_none_breaks_the_server(scripted):
    for fields, words in BAD:
        answer = post(scripted, {"messages": ASK, "max_tokens": 4} | fields, PATH)
        body = answer.json()
        assert answer.status_code == 400, (fields, answer.text)
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert words in body["error"]["message"], (fields, body)
    assert post(scripted, b"{", PATH).json()["error"]["type"] == "invalid_request_error"
    scripted.text = "ok"
    assert post(scripted, {"messages": ASK, "max_tokens": 4}, PATH).json()["content"]
