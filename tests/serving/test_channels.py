"""Tools of models that write the harmony format, as clients read them; the model's text is forced, as in `test_tools`."""

import json

import pytest

from jkv.errors import InputError
from jkv.forms.tables import MAY_THINK, THINKS, table_of
from jkv.reasoning.tool_calls import FORMS
from jkv.serving.form_fields import form_of_calls
from jkv.serving.jobs import Calls
from jkv.serving.responses import num_thought
from tests.serving.conftest import ARGUMENTS, ASK, TOOL, scripted_server
from tests.serving.test_hostile_requests import post
from tests.serving.test_tools import chunks_of, joined
from tests.support.form_texts import written
from tests.support.small_tokenizers import with_special

openai = pytest.importorskip("openai")

CHATS = "/v1/chat/completions"
BODY = {"messages": ASK, "tools": [TOOL], "max_tokens": 400}
SPECIAL = ["<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"]
TEMPLATE = """{% set last = namespace(name=none) %}
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}{% set calls = message.tool_calls %}
{%- if calls %}{% if message.content and message.thinking %}{{ raise_exception("Both!") }}{% endif %}
{%- if message.content or message.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- message.content or message.thinking }}<|end|>{% endif %}<|start|>assistant to=functions.{{ calls[0].function.name }}
{{- "<|channel|>commentary json<|message|>" }}{{ calls[0].function.arguments | tojson }}<|call|>
{%- set last.name = calls[0].function.name %}
{%- elif message.role == "tool" %}{% if last.name is none %}{{ raise_exception("No call!") }}{% endif %}<|start|>functions.
{{- last.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- elif message.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
THOUGHT = "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Rain.<|return|>"


@pytest.fixture(scope="module")
def tokenizer():
    one = with_special(SPECIAL)
    one.chat_template = TEMPLATE
    return one


@pytest.fixture(scope="module")
def model(tokenizer):
    ends = tuple(tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"]))
    one = scripted_server(tokenizer, ends, lambda text: tokenizer.encode(text, add_special_tokens=False))
    yield one
    one.close()


def test_a_call_is_apart_from_thinking_and_preamble(model):
    model.text = THOUGHT + PREAMBLE + CALL
    answer = post(model, BODY, CHATS).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"], choice["finish_reason"]) == ("I look.", "They ask.", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "weather", "arguments": ARGUMENTS}]
    model.text = THOUGHT + CALL
    assert post(model, BODY, CHATS).json()["choices"][0]["message"]["content"] is None
    model.text = THOUGHT + FINAL
    (choice,) = post(model, BODY, CHATS).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Rain.", "They ask.")
    assert choice["finish_reason"] == "stop"


def test_a_stream_adds_up_to_the_whole_response(model):
    for text in (THOUGHT + PREAMBLE + CALL, THOUGHT + CALL, CALL, THOUGHT + PREAMBLE + FINAL, THOUGHT + CALL[:-30], FINAL):
        model.text = text
        whole = post(model, BODY, CHATS).json()["choices"][0]
        choices = chunks_of(post(model, BODY | {"stream": True}, CHATS))
        message, calls = joined(choices)
        expected = [call["function"] for call in whole["message"].get("tool_calls", ())]
        assert [{"name": call["name"], "arguments": call["arguments"]} for call in calls] == expected
        assert message == {name: whole["message"].get(name) or "" for name in message}
        assert choices[-1]["finish_reason"] == whole["finish_reason"]
        growing = sum("tool_calls" in choice["delta"] for choice in choices)
        assert growing > 1 or not calls


def test_the_openai_client_goes_through_a_whole_round(model, tokenizer):
    with openai.OpenAI(base_url=f"{model.url}/v1", api_key="none", max_retries=0) as client:
        model.text = THOUGHT + CALL
        create = client.chat.completions.create
        first = create(model="tiny", messages=ASK, tools=[TOOL], max_tokens=400).choices[0].message
        (call,) = first.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        model.text = FINAL
        body = {"return_token_ids": True}
        messages = [*ASK, first, result]
        out = create(model="tiny", messages=messages, tools=[TOOL], max_tokens=400, extra_body=body)
        assert (out.choices[0].message.content, out.choices[0].finish_reason) == ("Rain.", "stop")
        prompt = tokenizer.decode(out.prompt_token_ids)
        assert prompt.endswith(
            f"Zürich?<|end|>{THOUGHT.replace('<|channel|>', '<|start|>assistant<|channel|>', 1)} to=functions.weather"
            f"<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
            '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"Rain."<|end|><|start|>assistant'
        ), prompt
        spoken = first.model_dump() | {"content": "I look."}  # the template takes either beside a call
        out = create(model="tiny", messages=[*ASK, spoken, result], tools=[TOOL], max_tokens=400, extra_body=body)
        assert "analysis<|message|>I look.<|end|>" in tokenizer.decode(out.prompt_token_ids)


def test_the_other_apis_have_the_parts_in_their_order(model):
    second = THOUGHT.replace("They ask.", "Now.")
    model.text = THOUGHT + PREAMBLE + second + CALL
    body = {"model": "tiny", "input": "Weather?", "max_output_tokens": 400, "tools": [{"type": "function", **TOOL["function"]}]}
    output = post(model, body, "/v1/responses").json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "reasoning", "function_call"]
    assert [output[i]["content"][0]["text"] for i in range(3)] == ["They ask.", "I look.", "Now."]
    assert output[3]["arguments"] == ARGUMENTS
    tools = [{"name": "weather", "input_schema": TOOL["function"]["parameters"]}]
    answer = post(model, {"model": "tiny", "messages": ASK, "max_tokens": 400, "tools": tools}, "/v1/messages").json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "thinking", "tool_use"]
    assert answer["stop_reason"] == "tool_use"


def test_thinking_ends_where_the_call_begins(model, tokenizer):
    served = model.engine.model
    for text, thought in ((THOUGHT + CALL, THOUGHT), (CALL, ""), (THOUGHT + FINAL, THOUGHT)):
        count = num_thought(served, tokenizer.encode(text, add_special_tokens=False), False)
        rest = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[count:])
        mark = "<|channel|>commentary" if text.endswith(CALL) and thought else "<|channel|>final<|message|>" if thought else ""
        assert rest == text[len(thought) + len(mark) :]


def test_required_calls_are_read_as_they_are_written(tokenizer):
    functions = {"weather": {"properties": {"city": {"type": "string"}}}, "now": {}}
    form = form_of_calls(FORMS["harmony"], functions, True)
    assert form.matches("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}")
    table, seen = table_of(form, tokenizer, len(tokenizer)), set()
    for seed in range(30):
        for start in (MAY_THINK, THINKS):
            text = tokenizer.decode(written(table, seed, start=start))
            reader = Calls(FORMS["harmony"], functions).reader(start == THINKS)
            first, *rest = [one for one in reader.read(text, is_last=True) if hasattr(one, "arguments")]
            assert isinstance(json.loads(first.arguments + "".join(one.arguments for one in rest)), dict), text
            seen.add(first.name)
    assert seen == {"weather", "now"}

    def follows(text, start=MAY_THINK):
        state = table.starts[start]
        for token in tokenizer.encode(text, add_special_tokens=False):
            state = int(table.next[state, table.class_of[token]])
            if state < 0:
                return False
        return True

    assert follows(THOUGHT + PREAMBLE + CALL.removesuffix("<|call|>").replace(ARGUMENTS, '{"city": "a"}'))
    assert follows(f"on<|end|><|start|>assistant{CALL}"[:60], THINKS)
    assert not follows(THOUGHT + FINAL)  # an answer without a call
    assert not follows(CALL.replace("weather", "other"))
    with pytest.raises(InputError, match="names"):
        form_of_calls(FORMS["harmony"], {"a b": {}}, True)
