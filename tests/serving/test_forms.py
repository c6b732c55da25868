"""Structured output of the server: the fields of OpenAI's clients and of vLLM's, from a model of random weights."""

import dataclasses
import json

import jsonschema
import pytest

import jkv
from jkv.errors import InputError
from jkv.forms.tables import table_of
from jkv.reasoning.tool_calls import FORMS, CallSplitter
from jkv.serving.form_fields import form_of_calls
from jkv.testing import TINY, tiny_model
from tests.serving.conftest import TOOL, TOOL_TEMPLATE, Running
from tests.serving.test_hostile_requests import post
from tests.support.form_texts import END_ID, SIZE, THINK_ID, TOKENIZER, written

openai = pytest.importorskip("openai")

CHATS = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA, "strict": True}}
LIST = {"properties": {"a": {"const": 1}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
ASK = [{"role": "user", "content": "Which?"}]
ANSWERS = {"logit_bias": {str(THINK_ID): -100}}  # without thinking
BODY = ANSWERS | {"messages": ASK, "max_tokens": 300, "temperature": 1.0, "seed": 1, "n": 2}
EMPTY = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def server():
    tokenizer = TOKENIZER
    tokenizer.chat_template = TOOL_TEMPLATE
    config = dataclasses.replace(TINY, vocab_size=SIZE, end_ids=(END_ID,))
    engine = jkv.Engine(tiny_model(config=config, tokenizer=tokenizer), max_running=4, max_slots=1536, page_size=16, chunk=8)
    one = Running(engine, policy="full", settings={})
    yield one
    one.close()


def is_valid(text, schema=SCHEMA):
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_each_field_gives_its_form(server):
    fields = [
        ({"response_format": FORMAT}, is_valid),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_valid),
        ({"guided_json": SCHEMA}, is_valid),
        ({"guided_json": json.dumps(SCHEMA)}, is_valid),
        ({"json_schema": SCHEMA}, is_valid),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, is_valid),
        ({"guided_regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= set("ab")),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, lambda text: len(text) == 3 and set(text) <= set("ab")),
        ({"guided_choice": ["yes", "no"]}, ("yes", "no").__contains__),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
        ({"guided_grammar": 'start: "yes" "!"* | "no"'}, lambda text: text.rstrip("!") in ("yes", "no")),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, ("yes", "no").__contains__),
        ({"response_format": FORMAT | {"json_schema": {"name": "list", "schema": LIST}}}, lambda text: is_valid(text, LIST)),
    ]
    for path, base in ((CHATS, BODY), ("/v1/completions", {"prompt": "A</think>", "max_tokens": 90, "temperature": 1.0})):
        for asked, holds in fields:
            answer = post(server, base | asked, path)
            assert answer.status_code == 200, answer.text
            for choice in answer.json()["choices"]:
                text = choice["message"]["content"] if path == CHATS else choice["text"]
                assert choice["finish_reason"] == "stop"
                assert holds(text), (asked, text)


def test_a_client_of_openai_gets_json_whole_and_streamed(client):
    given = ANSWERS | {
        "model": "tiny",
        "messages": ASK,
        "response_format": FORMAT,
        "seed": 4,
        "temperature": 1.0,
        "max_tokens": 90,
    }
    whole = client.chat.completions.create(**given).choices[0].message.content
    assert is_valid(whole)
    chunks = client.chat.completions.create(**given, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    anything = client.chat.completions.create(**given | {"response_format": {"type": "json_object"}, "max_tokens": 600})
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content), dict)
    plain = client.chat.completions.create(**given | {"response_format": {"type": "text"}})
    assert plain.choices[0].message.content != whole


def test_a_required_call_is_made(client):
    schema = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9, "minimum": 1}}, "required": ["days"]}
    tool = TOOL | {"function": TOOL["function"] | {"parameters": schema}}
    given = ANSWERS | {"model": "tiny", "messages": ASK, "tools": [tool, EMPTY], "temperature": 1.0, "max_tokens": 300}
    named = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        out = client.chat.completions.create(**given, tool_choice=named, seed=seed, parallel_tool_calls=False).choices[0]
        (call,) = out.message.tool_calls
        assert (out.finish_reason, call.function.name, out.message.content) == ("tool_calls", "weather", None)
        assert is_valid(call.function.arguments, schema)
        out = client.chat.completions.create(**given, tool_choice="required", seed=seed).choices[0]
        for call in out.message.tool_calls:
            assert is_valid(call.function.arguments, schema if call.function.name == "weather" else {"const": {}})


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_required_calls_are_read_in_the_form_in_which_they_are_written(name):
    functions = {"weather": {"properties": {"city": {"type": "string"}}}, "now": {}}
    for has_many in (False, True):
        form = form_of_calls(FORMS[name], functions, has_many)
        table = table_of(form, TOKENIZER, SIZE)
        for seed in range(20):
            text = TOKENIZER.decode(written(table, seed))
            splitter = CallSplitter(FORMS[name], functions, has_many)
            steps = splitter.push(text), splitter.finish()
            assert "".join(step[0] for step in steps).strip() == "", text
            calls = {}
            for piece in (piece for step in steps for piece in step[1]):
                calls[piece.index] = calls.get(piece.index, "") + piece.arguments
            assert len(calls) >= 1
            assert has_many or len(calls) == 1
            assert all(isinstance(json.loads(arguments), dict) for arguments in calls.values())


def test_what_is_no_form_is_refused_by_the_clients_name_of_it(server):
    named = {"type": "function", "function": {"name": "other"}}
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    for fields, param, words in [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": bad}}}, "response_format", "$.properties.a"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "response_format", "guided_regex"),
        ({"response_format": FORMAT, "stop": "a"}, "stop", "break the form"),
        ({"response_format": FORMAT, "ignore_eos": True}, "stop_token_ids", "ends"),
        ({"guided_json": "{"}, "guided_json", "must be JSON"),
        ({"guided_regex": "("}, "guided_regex", "regular expression"),
        ({"guided_choice": []}, "guided_choice", "to choose from"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "Rule 'x' not found"),
        ({"guided_grammar": 'start: "a" other'}, "guided_grammar", 'unknown name: "other"'),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs", "llguidance"),
        ({"structural_tag": "x"}, "structural_tag", "guided_grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of"),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
        ({"tools": [TOOL], "tool_choice": named}, "tool_choice", "weather"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "required"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": FORMAT}, "tool_choice", "response_format"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": bad}}], "tool_choice": "required"},
            "tools",
            "'not'",
        ),
    ]:
        answer = post(server, BODY | fields, CHATS)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert words in error["message"], error


PARAMETERS = {
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"anyOf": [{"type": "string", "pattern": "^[a-c]*$"}, {"type": "null"}]},
        "at": {"$ref": "#/$defs/place"},
        "day": {"type": ["string", "null"], "format": "date"},
        "code": {"type": "string"},
    },
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}, "name": {"type": "string"}}}},
    "required": ["city", "unit", "code", "any"],
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_required_calls_between_tags_satisfy_their_schemas(name):
    """Also where the model writes tags into its strings: a value ends at the first end of its tag."""
    functions, seen = {"weather": PARAMETERS, "now": {}}, set()
    validator = jsonschema.Draft202012Validator(PARAMETERS, format_checker=jsonschema.FormatChecker())
    tables = {many: table_of(form_of_calls(FORMS[name], functions, many), TOKENIZER, SIZE) for many in (False, True)}
    for seed in range(40):
        text = TOKENIZER.decode(written(tables[seed % 2 > 0], seed, length=200))
        splitter = CallSplitter(FORMS[name], functions)
        parts = [splitter.push(piece) for piece in (text[:50], text[50:])] + [splitter.finish()]
        assert "".join(part[0] for part in parts).strip() == "", text
        calls = {}
        for piece in (piece for part in parts for piece in part[1]):
            found = calls.setdefault(piece.index, [piece.name, ""])
            found[1] += piece.arguments
        assert seed % 2 or len(calls) == 1
        for function, arguments in calls.values():
            seen.add(function)
            assert validator.is_valid(json.loads(arguments)) if function == "weather" else arguments == "{}", text
    assert seen == {"weather", "now"}
    form = form_of_calls(FORMS[name], {"f": {"properties": {"code": {"type": "string"}}, "required": ["code"]}}, False)
    begin, end = (
        ("<function=f><parameter=code>\n", "</parameter></function>")
        if name != "glm"
        else ("f<arg_key>code</arg_key>\n<arg_value>", "</arg_value>")
    )
    line = "\n" if name != "glm" else ""
    for code, matches in (
        ('if a < b: "é"\n\n', True),
        ("", True),
        ("</param </arg_", True),
        (f"x{FORMS[name].tags.value_end}", False),
    ):
        assert form.matches(f"<tool_call>{begin}{code}{line}{end}</tool_call>") == matches, code


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"a b<": {}}, "names"),
        ({"f": {"properties": {"a>": {}}}}, "names"),
        ({"f": {"properties": {"k": {"type": "string", "not": {}}}}}, "'not'"),
        ({"f": {"type": "array"}}, "objects as arguments"),
        ({"f": {"properties": {"k": {"type": "string", "allOf": [{"maxLength": 3}]}}}}, "allOf"),
        ({"f": {"properties": {"k": {"$ref": "#"}}}}, "refer to itself"),
    ],
    ids=str,
)
def test_calls_that_tags_cannot_hold_are_refused(functions, message):
    for name in ("qwen3_coder", "glm"):
        with pytest.raises(InputError, match=message):
            form_of_calls(FORMS[name], functions, True)


def test_the_other_apis_give_the_same_forms(server):
    form = {"format": {"type": "json_schema", "name": "one", "schema": SCHEMA, "strict": True}}
    body = ANSWERS | {"model": "tiny", "input": "Which?", "text": form, "temperature": 1.0, "max_output_tokens": 300}
    answer = post(server, body, "/v1/responses").json()
    assert answer["status"] == "completed", answer
    (message,) = (item for item in answer["output"] if item["type"] == "message")
    assert is_valid(message["content"][0]["text"])
    tools = [{"name": "now", "input_schema": {"type": "object", "properties": {}}}]
    body = ANSWERS | {"model": "tiny", "messages": ASK, "max_tokens": 300, "tools": tools, "tool_choice": {"type": "any"}}
    answer = post(server, body, "/v1/messages").json()
    assert answer["stop_reason"] == "tool_use", answer
    assert {block["name"] for block in answer["content"] if block["type"] == "tool_use"} == {"now"}
