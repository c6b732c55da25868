"""Tools: what the chat template receives, and calls in responses, whole and streamed, as clients of OpenAI read them.

The model's text is forced, so that it writes what a trained one would.
"""

import json

import pytest

from tests.serving.conftest import ARGUMENTS, ASK, CALL, TOOL
from tests.serving.test_hostile_requests import post

openai = pytest.importorskip("openai")

CHATS = "/v1/chat/completions"
BODY = {"messages": ASK, "tools": [TOOL], "max_tokens": 300}


def chunks_of(answer):
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [choice for event in events[:-1] for choice in json.loads(event)["choices"]]


def joined(choices):
    """The message to which a stream's deltas add up."""
    message, calls = {"content": "", "reasoning": ""}, {}
    for delta in (choice["delta"] for choice in choices):
        for name in message:
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            one = calls.setdefault(call["index"], {"arguments": ""})
            one |= {name: call[name] for name in ("id", "type") if name in call}
            one |= {"name": call["function"]["name"]} if "name" in call["function"] else {}
            one["arguments"] += call["function"]["arguments"]
    return message, list(calls.values())


def test_a_call_is_apart_from_content_and_reasoning(scripted):
    scripted.text = f"<think>It is {CALL}.</think>I look.\n{CALL}\n{CALL}"
    answer = post(scripted, BODY, CHATS).json()["choices"][0]
    message = answer["message"]
    assert (message["content"], message["reasoning"]) == ("I look.", f"It is {CALL}.")
    assert answer["finish_reason"] == "tool_calls"
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "weather", "arguments": ARGUMENTS}] * 2
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    one = post(scripted, BODY | {"parallel_tool_calls": False}, CHATS).json()["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    scripted.text = CALL
    assert post(scripted, BODY, CHATS).json()["choices"][0]["message"]["content"] is None


def test_a_stream_of_calls_adds_up_to_the_whole_response(scripted):
    for text in (
        f"So:\n{CALL} \n{CALL}",
        CALL,
        f"<think>hm</think>\n\n{CALL}",
        f"{CALL} Done.",
        CALL[:-30],
        "No <tool_call>{call}",
    ):
        scripted.text = text
        whole = post(scripted, BODY | {"n": 2}, CHATS).json()["choices"][1]
        choices = [one for one in chunks_of(post(scripted, BODY | {"n": 2, "stream": True}, CHATS)) if one["index"] == 1]
        message, calls = joined(choices)
        expected = [call["function"] for call in whole["message"].get("tool_calls", ())]
        assert [{"name": call["name"], "arguments": call["arguments"]} for call in calls] == expected
        assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
        assert message == {name: whole["message"].get(name) or "" for name in message}
        assert choices[-1]["finish_reason"] == whole["finish_reason"] == ("tool_calls" if calls else "stop")
    scripted.text = CALL
    deltas = [choice["delta"] for choice in chunks_of(post(scripted, BODY | {"stream": True}, CHATS))]
    assert sum("tool_calls" in delta for delta in deltas) > 2  # arguments grow


def test_a_call_that_is_cut_at_the_limit_ends_with_length(scripted):
    scripted.text = CALL
    answer = post(scripted, BODY | {"max_tokens": CALL.encode().index(b"days")}, CHATS).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich", "'


def test_the_openai_client_goes_through_a_whole_round(scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        scripted.text = CALL
        create = client.chat.completions.create
        first = create(model="tiny", messages=ASK, tools=[TOOL], tool_choice="auto", max_tokens=300).choices[0].message
        (call,) = first.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Zürich", "days": 3}
        result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "Rain."}]}
        scripted.text = "It rains."
        body = {"return_token_ids": True}
        out = create(model="tiny", messages=[*ASK, first, result], tools=[TOOL], max_tokens=300, extra_body=body)
        assert (out.choices[0].message.content, out.choices[0].finish_reason) == ("It rains.", "stop")
        prompt = bytes(token for token in out.prompt_token_ids).decode()
        assert prompt.startswith(f"[TOOLS]{json.dumps([TOOL])}[/TOOLS]")
        call = json.dumps({"name": "weather", "arguments": json.loads(ARGUMENTS)}, ensure_ascii=False)
        assert prompt.endswith(f"<user>Weather in Zürich?<assistant><tool_call>{call}</tool_call><tool>Rain.<assistant>")
        scripted.text = CALL
        with client.chat.completions.stream(model="tiny", messages=ASK, tools=[TOOL], max_tokens=300) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert [(event.name, event.arguments) for event in done] == [("weather", ARGUMENTS)]


def test_without_tools_a_call_is_text(scripted):
    scripted.text = CALL
    for body in (BODY | {"tool_choice": "none"}, BODY | {"tools": []}, BODY | {"tools": None, "tool_choice": "auto"}):
        answer = post(scripted, body | {"return_token_ids": True}, CHATS).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}
        assert "TOOLS" not in bytes(answer["prompt_token_ids"]).decode()


def test_what_is_no_tool_is_refused_by_name(scripted):
    named = {"type": "function", "function": {"name": "other"}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for fields, param, words in [
        ({"tool_choice": "must"}, "tool_choice", "'must'"),
        ({"tool_choice": named}, "tool_choice", "weather"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools", "JSON schema"),
        ({"tools": [TOOL] * 2000}, "tools", "1,024"),
        ({"tools": {"a": 1}}, "tools", "list"),
        ({"functions": [{"name": "f"}]}, "functions", "Send tools"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [call]}]}, "tool_calls", "assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "tool_calls", "function"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages", "content"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages", "'boss'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "messages",
            "image_url",
        ),
    ]:
        error = post(scripted, BODY | fields, CHATS).json()["error"]
        assert error["param"] == param, error
        assert words in error["message"], error
    assert "only chats" in post(scripted, {"prompt": "a", "tools": [TOOL]}).json()["error"]["message"]


def test_messages_are_read_as_the_template_has_them(scripted):
    scripted.text = "ok"
    cut = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "annotations": [1]},
        {"role": "assistant", "content": None, "tool_calls": [cut], "audio": None, "refusal": None, "annotations": []},
    ]
    answer = post(scripted, {"messages": messages, "max_tokens": 9, "return_token_ids": True}, CHATS)
    prompt = bytes(answer.json()["prompt_token_ids"]).decode()
    call = json.dumps({"name": "f", "arguments": {"invalid_json": '{"x": '}})
    assert prompt == f"<system>Be short.<user>ab<assistant><tool_call>{call}</tool_call><assistant>"
    assert answer.headers["x-jkv-ignored"] == "messages.annotations"


def test_a_template_without_tools_or_without_a_known_form_is_refused(scripted, monkeypatch):
    encoder = scripted.app.state.server.encoder
    for template, words in (("{{ messages }} tools", "no place"), ("{{ tools }}", "--tool-form")):
        monkeypatch.setattr(encoder.renderer, "template_for", lambda tools, template=template: template)
        error = post(scripted, BODY, CHATS).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported")
        assert words in error["message"]
    monkeypatch.setattr(encoder, "tool_form", "llama3")
    scripted.text = '{"name": "weather", "parameters": {}}'
    assert post(scripted, BODY, CHATS).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_tokenize_counts_the_tools(scripted):
    with_tools = post(scripted, {"messages": ASK, "tools": [TOOL]}, "/tokenize").json()
    assert bytes(with_tools["tokens"]).decode().startswith("[TOOLS]")
