"""`/v1/responses` with the unmodified `openai` package: the prompts and texts of a chat, and typed events in their order."""

import dataclasses
import json

import pytest

from jkv.serving import responses_api
from jkv.serving.requests import ChatFields, read_fields
from tests.serving.conftest import ARGUMENTS, ASK, CALL, TOOL
from tests.serving.test_hostile_requests import post

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

PATH = "/v1/responses"
FUNCTION = {"type": "function", **TOOL["function"], "strict": False}
TEXT = f"<think>Hm, so.</think>I look.\n{CALL}\nDone."
ASKED = {"model": "tiny", "input": "Weather in Zürich?", "tools": [FUNCTION], "max_output_tokens": 300}
NEW = ("id", "call_id", "created_at", "completed_at")  # fields of which no two responses have the same


@pytest.fixture
def client(scripted):
    scripted.text = TEXT
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def plain(value):
    """JSON without the fields that are new in each response."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in NEW}
    return value


def squeezed(names):
    """Names without repetitions of the last one."""
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


ITEM = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
GOLDEN = [
    *("created", "in_progress"),
    *(name.format("reasoning_text") for name in ITEM),
    *(name.format("output_text") for name in ITEM),
    *CALLED,
    *(name.format("output_text") for name in ITEM),
    "completed",
]


def test_events_come_in_order_and_add_up_to_the_whole_response(client):
    whole = client.responses.create(**ASKED)
    with client.responses.stream(**ASKED) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert squeezed([event.type.removeprefix("response.") for event in events]) == GOLDEN
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 2  # arguments grow
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "message"]
    reasoning, first, call, last = whole.output
    assert (reasoning.content[0].text, first.content[0].text, last.content[0].text) == ("Hm, so.", "I look.", "Done.")
    assert (call.name, call.arguments) == ("weather", ARGUMENTS)
    assert (whole.status, whole.output_text, whole.store) == ("completed", "I look.Done.", True)
    assert [item.id.partition("_")[0] for item in final.output] == ["rs", "msg", "fc", "msg"]
    for item in final.output:
        ids = {
            event.item_id
            for event in events
            if getattr(event, "output_index", None) == final.output.index(item) and "item_id" in vars(event)
        }
        assert ids == {item.id}
    streamed = events_of(client, ASKED)[-1]["response"]
    assert plain(streamed) == plain(httpx.post(f"{client.base_url}responses", json=ASKED, timeout=60).json())


def events_of(client, body):
    """The data of a stream, each with its event's name before it."""
    text = httpx.post(f"{client.base_url}responses", json={**body, "stream": True}, timeout=60).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {one['type']}" for one in found]
    return found


def test_the_functions_of_a_group_are_called_by_its_name_and_their_own(client, jobs, scripted):
    scripted.text = TEXT.replace('"name": "weather"', '"name": "sky__weather"')
    tools = [{"type": "namespace", "name": "sky", "description": "Of the sky.", "tools": [FUNCTION]}, {"type": "web_search"}]
    reply = client.responses.with_raw_response.create(**ASKED | {"tools": tools})
    assert reply.headers["x-jkv-ignored"] == "tools.web_search"
    call = next(one for one in reply.parse().output if one.type == "function_call")
    assert (call.namespace, call.name, call.arguments) == ("sky", "weather", ARGUMENTS)
    events = events_of(client, ASKED | {"tools": tools})
    begun, done = (events[i]["item"] for i in places(events, "function_call"))
    assert begun["namespace"] == done["namespace"] == "sky"
    assert plain(done) == plain(call.model_dump(exclude_none=True))
    outcome = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    client.responses.create(**ASKED | {"tools": tools, "input": [call.model_dump(exclude_none=True), outcome]})
    prompt = scripted.engine.model.tokenizer.decode(jobs[-1].prompts[0])
    assert prompt.count('"name": "sky__weather"') == 2  # among the tools, and called
    with pytest.raises(openai.BadRequestError, match="sea__weather"):
        client.responses.create(**ASKED, tool_choice={"type": "function", "namespace": "sea", "name": "weather"})


def test_a_custom_tool_is_called_with_a_text(client, jobs, scripted):
    patch = '*** Begin\n+ "a"\n'
    call = json.dumps({"name": "patch", "arguments": {"input": patch}})
    scripted.text = TEXT.replace(CALL, f"<tool_call>\n{call}\n</tool_call>")
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    asked = ASKED | {"tools": [{"type": "custom", "name": "patch", "description": "Edits.", "format": form}]}
    reply = client.responses.with_raw_response.create(**asked)
    assert reply.headers["x-jkv-ignored"] == "tools.format"
    call = next(one for one in reply.parse().output if one.type == "custom_tool_call")
    assert (call.name, call.input) == ("patch", patch)
    events = events_of(client, asked)
    first, last = places(events, "custom_tool_call")
    kinds = [event["type"].removeprefix("response.") for event in events[first : last + 1]]
    assert kinds == ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
    assert (events[first]["item"]["input"], events[first + 1]["delta"], events[last]["item"]["input"]) == ("", patch, patch)
    outcome = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done"}
    client.responses.create(**asked | {"input": [call.model_dump(exclude_none=True), outcome]})
    prompt = scripted.engine.model.tokenizer.decode(jobs[-1].prompts[0])
    assert json.dumps({"input": patch}) in prompt
    assert "start: /.+/" in prompt


def places(events, kind):
    """Where an item of a kind begins and ends among events."""
    return [i for i, event in enumerate(events) if event.get("item", {}).get("type") == kind]


def test_a_response_that_is_cut_is_incomplete(client, scripted):
    scripted.text = "<think>Hm.</think>" + "word " * 20
    out = client.responses.create(**ASKED | {"max_output_tokens": 40})
    assert (out.status, out.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in out.output] == ["completed", "incomplete"]
    assert events_of(client, ASKED | {"max_output_tokens": 40})[-1]["type"] == "response.incomplete"
    scripted.text = ""
    assert client.responses.create(**ASKED).output[0].content[0].text == ""


def test_the_prompt_is_that_of_the_chat_that_it_means(client, jobs, scripted):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Thanks."},
    ]
    called = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather in "}, {"type": "input_text", "text": "Zürich?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        called,
        called,
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Rain."}]},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Thanks."},
    ]
    fields = {"temperature": 0.7, "seed": 5, "parallel_tool_calls": False}
    scripted.text = f"{CALL} {CALL}"
    out = client.responses.create(
        model="tiny", instructions="Be brief.", input=items, tools=[FUNCTION], max_output_tokens=200, store=False,
        temperature=0.7, parallel_tool_calls=False, reasoning={"effort": "low"}, extra_body={"seed": 5},
    )  # fmt: skip
    chat = {"messages": messages, "tools": [TOOL], "max_completion_tokens": 200, "reasoning_effort": "low", **fields}
    answer = post(scripted, chat, "/v1/chat/completions").json()
    assert jobs[0].prompts[0].tolist() == jobs[1].prompts[0].tolist()
    assert dataclasses.replace(jobs[0].fields, model=None) == jobs[1].fields
    assert jobs[0].groups[0][0].sampling == jobs[1].groups[0][0].sampling
    assert [item.arguments for item in out.output] == [
        one["function"]["arguments"] for one in answer["choices"][0]["message"]["tool_calls"]
    ]
    assert out.usage.total_tokens == answer["usage"]["total_tokens"]


def test_a_sampled_text_is_that_of_the_chat(tiny):
    draw = {"seed": 3, "temperature": 1.0}
    chat = {"messages": [{"role": "user", "content": "b=3;c=7;d=b*c;?d"}], "max_tokens": 64, **draw}
    choice = post(tiny, chat, "/v1/chat/completions").json()["choices"][0]
    body = {"input": "b=3;c=7;d=b*c;?d", "max_output_tokens": 64, "store": False, **draw}
    out = post(tiny, body, PATH).json()
    texts = {item["type"]: item["content"][0] for item in out["output"]}
    assert texts["reasoning"]["text"] == choice["message"]["reasoning"]
    assert texts.get("message", {}).get("text", "") == choice["message"]["content"]
    assert out["usage"]["kv"]["evicted_tokens"] > 0


def test_log_probabilities_are_those_of_the_answer(client, scripted):
    scripted.text = "<think>Hm.</think>So it is."
    body = ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    part = client.responses.create(**body).output[-1].content[0]
    assert bytes(byte for one in part.logprobs[:-1] for byte in one.bytes) == b"So it is."  # the last one ended it
    assert all(len(one.top_logprobs) == 1 for one in part.logprobs)
    events = events_of(client, body)
    deltas = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    (done,) = [event["logprobs"] for event in events if event["type"] == "response.output_text.done"]
    assert [one["logprob"] for one in done] == pytest.approx([one.logprob for one in part.logprobs], abs=1e-4)
    assert deltas == done[: len(deltas)]
    assert len(done) - len(deltas) <= 1  # the token that ended it


def test_a_conversation_goes_on_as_if_all_of_it_had_been_sent(client, jobs, scripted):
    scripted.text = "Fine."
    likely = {"model": "tiny", "max_output_tokens": 5, "include": ["message.output_text.logprobs"], "instructions": "Be kind."}
    first = client.responses.create(input="How are you?", **likely)
    second = client.responses.create(input="And now?", previous_response_id=first.id, **likely)
    said = {"role": "assistant", "content": "Fine."}
    conversation = [{"role": "user", "content": "How are you?"}, said, {"role": "user", "content": "And now?"}]
    whole = client.responses.create(input=conversation, store=False, **likely)
    assert jobs[1].prompts[0].tolist() == jobs[2].prompts[0].tolist()
    assert jobs[1].row is not None
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
    log_probs = [[one.logprob for one in out.output[0].content[0].logprobs] for out in (second, whole)]
    assert log_probs[0] == pytest.approx(log_probs[1], abs=1e-4)
    with pytest.raises(openai.ConflictError, match=second.id):
        client.responses.create(input="And then?", previous_response_id=first.id, **likely)
    with pytest.raises(openai.BadRequestError, match="instructions are the conversation's own"):
        client.responses.create(input="a", previous_response_id=second.id, **likely | {"instructions": "Be short."})
    assert client.responses.retrieve(second.id).output_text == "Fine."
    client.responses.delete(second.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{second.id}' not found"):
            ask(second.id)
    for gone in (second.id, whole.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match=f"Previous response with id '{gone}' not found") as raised:
            client.responses.create(input="a", previous_response_id=gone, **likely)
        assert raised.value.code == "previous_response_not_found"
    scripted.app.state.server.conversations.close()
    scripted.wait_until_idle()


def test_what_cannot_be_kept_is_stored_only_if_it_is_asked_for(client, jobs):
    body = {"input": "a", "stop": "x", "max_output_tokens": 4}
    assert httpx.post(f"{client.base_url}responses", json=body).json()["store"] is False
    answer = httpx.post(f"{client.base_url}responses", json=body | {"store": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")
    assert not jobs[0].fields.store


def test_stored_responses_are_bounded(scripted, monkeypatch):
    answers = scripted.app.state.server.answers
    monkeypatch.setattr(answers, "options", dataclasses.replace(answers.options, max_conversations=2, conversation_seconds=1e3))
    for i in range(5):
        answers.add({"id": str(i), "store": True})
    answers.add({"id": "unstored", "store": False})
    assert sorted(answers._found) == ["3", "4"]
    monkeypatch.setattr(answers, "options", dataclasses.replace(answers.options, conversation_seconds=1e-9))
    with pytest.raises(Exception, match="'4' not found"):
        answers.find("4")
    answers.forget("3")


def test_a_stream_that_breaks_ends_with_a_failed_response(client, monkeypatch):
    async def fail(parts, tickets):
        raise RuntimeError("planted")
        yield

    monkeypatch.setattr(responses_api, "changes_of", fail)
    event = events_of(client, ASKED)[-1]
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": "server_error", "message": "planted"}


def test_the_format_of_a_text_is_that_of_a_chat():
    schema = {"type": "json_schema", "name": "city", "schema": {"type": "object"}, "strict": True}
    asked = responses_api.read({"input": "a", "text": {"format": schema}, "tool_choice": {"type": "function", "name": "f"}})
    inner = {"name": "city", "schema": {"type": "object"}, "strict": True}
    assert asked.chat["response_format"] == {"type": "json_schema", "json_schema": inner}
    assert asked.chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    plain_text = responses_api.read({"input": "a", "text": {"format": {"type": "text"}, "verbosity": "low"}})
    assert read_fields(ChatFields, plain_text.chat) == read_fields(ChatFields, responses_api.read({"input": "a"}).chat)


OF_USER = {"role": "user"}
BAD = [
    ({}, "input is needed"),
    ({"input": None}, "input is needed"),
    ({"input": 7}, "input must be a list"),
    ({"input": {}}, "input must be a list"),
    ({"input": []}, "at least one message"),
    ({"input": [7]}, "got 7"),
    ({"input": [None]}, "got None"),
    ({"input": [{"type": 3}]}, "got 3"),
    ({"input": [{"type": ["message"]}]}, "message"),
    ({"input": [{}]}, "role"),
    ({"input": [OF_USER]}, "content"),
    ({"input": [OF_USER | {"content": 5}]}, "input.content must be a list"),
    ({"input": [OF_USER | {"content": [5]}]}, "must be texts"),
    ({"input": [OF_USER | {"content": [{"type": "input_text"}]}]}, "must be texts"),
    ({"input": [OF_USER | {"content": [{"type": "input_image", "image_url": "a"}]}]}, "'input_image'"),
    ({"input": [OF_USER | {"content": [{"type": "input_file", "file_id": "a"}]}]}, "'input_file'"),
    ({"input": [{"role": "boss", "content": "a"}]}, "'boss'"),
    ({"input": [{"role": ["user"], "content": "a"}]}, "role"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "'item_reference'"),
    ({"input": [{"type": "web_search_call"}]}, "'web_search_call'"),
    ({"input": [{"type": "function_call"}]}, "calls"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": [1]}]}, "must be an object"),
    ({"input": [{"type": "function_call_output", "output": 5}]}, "input.output must be a list"),
    ({"input": [{"type": "function_call_output"}]}, "content"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input.content must be a list"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": None}]}]}, "must be texts"),
    ({"input": "\ud800"}, "Unicode"),
    ({"instructions": 5}, "instructions must be"),
    ({"instructions": [OF_USER]}, "instructions must be"),
    ({"tools": [{"type": "web_search"}]}, "'web_search'"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "'file_search'"),
    ({"tools": [{"type": "custom"}]}, "tools.name must be a text"),
    ({"tools": [{"type": "custom", "name": "a", "format": 7}]}, "tools.format must be"),
    ({"tools": [{"type": "namespace", "tools": [FUNCTION]}]}, "tools.name must be a text"),
    ({"tools": [{"type": "namespace", "name": "sky"}]}, "tools.tools must be a list"),
    ({"tools": [{"type": "namespace", "name": "sky", "tools": [{"type": "web_search"}]}]}, "'web_search'"),
    ({"tools": [{"type": "namespace", "name": "sky", "tools": [7]}]}, "got 7"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "namespace": 7, "arguments": "{}"}]}, "input.namespace"),
    ({"tools": [7]}, "got 7"),
    ({"tools": 7}, "tools must be a list"),
    ({"tools": [{"type": "function"}]}, "must be functions"),
    ({"tools": [FUNCTION | {"parameters": [1]}]}, "JSON schema"),
    ({"tool_choice": 5}, "tool_choice must be"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "allowed_tools"),
    ({"max_output_tokens": 0}, "max_output_tokens must be at least 1"),
    ({"max_output_tokens": "many"}, "max_completion_tokens|max_output_tokens"),
    ({"max_output_tokens": 10**9}, "maximum context length"),
    ({"max_tokens": 5}, "the limit is max_output_tokens"),
    ({"messages": [OF_USER | {"content": "a"}]}, "this endpoint reads input"),
    ({"n": 2}, "a response is one sample"),
    ({"include": "all"}, "include must be"),
    ({"include": ["file_search_call.results"]}, "file_search_call.results"),
    ({"include": [["a"]]}, "include has"),
    ({"top_logprobs": 3}, "include=|top_logprobs needs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "must lie in"),
    ({"metadata": {"a": 1}}, "pairs of texts"),
    ({"metadata": dict.fromkeys(map(str, range(17)), "a")}, "up to 16 pairs"),
    ({"metadata": [1]}, "metadata must be"),
    ({"store": "yes"}, "store must be"),
    ({"reasoning": 5}, "reasoning"),
    ({"reasoning": {"effort": 5}}, "reasoning"),
    ({"text": "json"}, "text must be"),
    ({"text": {"format": "json"}}, "text.format must be"),
    ({"previous_response_id": 5}, "previous_response_id must be"),
    ({"previous_response_id": ["a"]}, "previous_response_id must be"),
    ({"background": True}, "waits"),
    ({"conversation": "conv_1"}, "previous_response_id"),
    ({"prompt": {"id": "p"}}, "not stored"),
    ({"truncation": "auto"}, "dropped"),
    ({"stream": "maybe"}, "stream must be"),
    ({"stream_options": {"include_obfuscation": 5}, "stream": True}, "stream_options"),
    ({"temperature": 9e99}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"temprature": 1}, "Did you mean temperature"),
    ({"policy": "none"}, "policy"),
]


def test_malformed_requests_are_refused_and_none_breaks_the_server(scripted):
    for fields, words in BAD:
        body = {"input": "a", "max_output_tokens": 4} | fields if fields else {}
        answer = post(scripted, body, PATH)
        error = answer.json()["error"]
        assert answer.status_code == 400, (fields, answer.text)
        assert any(word in error["message"] for word in words.split("|")), (fields, error["message"])
    scripted.text = "ok"
    assert post(scripted, {"input": "a", "max_output_tokens": 4}, PATH).json()["output"]


def test_fields_that_change_nothing_are_named_in_a_header(client, scripted):
    scripted.text = "ok"
    raw = client.responses.with_raw_response.create(
        model="tiny", input="a", max_output_tokens=4, user="me", prompt_cache_key="k", metadata={"a": "b"},
        truncation="disabled", extra_body={"sparkle": 1}, store=False,
    )  # fmt: skip
    assert raw.headers["x-jkv-ignored"] == "sparkle, user"
    assert raw.parse().metadata == {"a": "b"}
