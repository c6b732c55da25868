"""Clients as they are published, in their own words: chats, streams, tools, structured output, conversations and retries.

The server's model writes a given `text`, as a trained one would. Where it is None, the answer has a form (a schema, or a call
that is required), and the model writes what its random weights draw in this form.
"""

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jkv.serving.errors import RefusalError
from tests.serving.conftest import ARGUMENTS, ASK, CALL, TOOL, scripted  # noqa: F401

pydantic = pytest.importorskip("pydantic")
pytest.importorskip("uvicorn")

CITY = {"city": "Zürich", "days": 3}
FUNCTION = TOOL["function"]
SPOKEN = "So:\n\nIt rains in Zürich."
NUM_TOKENS = len(SPOKEN.encode()) + 1  # and the end


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str = pydantic.Field(max_length=12)
    days: int = pydantic.Field(ge=1, le=9)


STRICT = {"name": "weather", "description": "The weather of a city.", "parameters": Weather.model_json_schema()}


@pytest.fixture(scope="module", autouse=True)
def offline():
    """Clients ask no other host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("LANGSMITH_TRACING", "false")
        yield


@pytest.fixture
def server(scripted):  # noqa: F811
    scripted.text = SPOKEN
    return scripted


def package(name):
    """A client's package; the test is skipped where it is missing."""
    return pytest.importorskip(name, reason=f'{name} takes no part: pip install "jkv-cache[clients]"')


def calls_then_speaks(server):
    """A tool after a call of which the model speaks."""
    server.text = CALL

    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        asked.append({"city": city, "days": days})
        server.text = SPOKEN
        return "Rain."

    asked = []
    return weather, asked


def test_openai_python(server):
    openai = package("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    chats = client.chat.completions
    given = {"model": "tiny", "messages": ASK, "max_tokens": 300}
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert chats.create(**given).choices[0].message.content == SPOKEN
    chunks = [*chats.create(**given, stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SPOKEN
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS

    server.text = CALL
    message = chats.create(**given, tools=[TOOL], tool_choice="auto").choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == CITY
    with chats.stream(**given, tools=[TOOL]) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    server.text = SPOKEN
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    out = chats.create(**given | {"messages": [*ASK, message, result]}, tools=[TOOL])
    assert out.choices[0].message.content == SPOKEN

    server.text = None
    out = chats.parse(**given, response_format=Weather).choices[0].message
    assert isinstance(out.parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)
    (call,) = (
        chats.parse(**given, tools=[tool], tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    )
    assert isinstance(call.function.parsed_arguments, Weather)
    with chats.stream(**given, response_format=Weather) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


def test_openai_python_responses(server):
    client = package("openai").OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    given = {"model": "tiny", "max_output_tokens": 300}
    first = client.responses.create(input="Weather?", **given)
    assert first.output_text == SPOKEN
    with client.responses.stream(input="And then?", previous_response_id=first.id, **given) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == SPOKEN
        later = stream.get_final_response()
    assert later.status == "completed"
    assert later.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(later.id).output_text == SPOKEN

    server.text = CALL
    tools = [{"type": "function", **FUNCTION, "strict": False}]
    out = client.responses.create(input=[*ASK], tools=tools, **given)
    (call,) = (item for item in out.output if item.type == "function_call")
    assert json.loads(call.arguments) == CITY
    server.text = SPOKEN
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    assert client.responses.create(input=[*ASK, *out.output, result], tools=tools, **given).output_text == SPOKEN

    server.text = None
    assert isinstance(client.responses.parse(input="Weather?", text_format=Weather, **given).output_parsed, Weather)


def test_anthropic(server):
    client = package("anthropic").Anthropic(base_url=server.url, api_key="none", max_retries=0)
    given = {"model": "tiny", "max_tokens": 300, "system": "Be brief.", "messages": ASK}
    message = client.messages.create(**given)
    assert message.content[0].text == SPOKEN
    tokens = client.messages.count_tokens(**{name: given[name] for name in ("model", "system", "messages")}).input_tokens
    assert tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    with client.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == SPOKEN
        assert stream.get_final_message().stop_reason == "end_turn"

    tools = [{"name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}]
    server.text = f"I look.{CALL}"
    with client.messages.stream(**given, tools=tools) as stream:
        message = stream.get_final_message()
    text, use = message.content
    assert (text.text, use.name, use.input, message.stop_reason) == ("I look.", "weather", CITY, "tool_use")
    server.text = SPOKEN
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}
    turns = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**given | {"messages": turns}, tools=tools).content[0].text == SPOKEN

    server.text = None
    tools = [{"name": "weather", "input_schema": STRICT["parameters"]}]
    message = client.messages.create(**given, tools=tools, tool_choice={"type": "any"})
    assert all(isinstance(Weather.model_validate(use.input), Weather) for use in message.content if use.type == "tool_use")
    assert message.stop_reason == "tool_use"


def test_anthropic_runs_tools_and_parses(server):
    anthropic = package("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    given = {"model": "tiny", "max_tokens": 300, "messages": ASK}
    weather, asked = calls_then_speaks(server)
    runner = client.beta.messages.tool_runner(**given, tools=[anthropic.beta_tool(weather)])
    assert runner.until_done().content[0].text == SPOKEN
    assert asked == [CITY]
    server.text = ARGUMENTS  # its schema has no bounds: the client leaves them out
    assert isinstance(client.messages.parse(**given, output_format=Weather).parsed_output, Weather)
    server.text = None
    bounded = {"format": {"type": "json_schema", "schema": STRICT["parameters"]}}
    Weather.model_validate_json(client.messages.create(**given, output_config=bounded).content[0].text)


def test_litellm(server):
    litellm = package("litellm")
    place = {"api_base": f"{server.url}/v1", "api_key": "none", "max_tokens": 300}
    given = place | {"model": "openai/tiny", "messages": ASK}
    assert litellm.completion(**given).choices[0].message.content == SPOKEN
    chunks = [*litellm.completion(**given, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SPOKEN
    claude = litellm.completion(**given | {"model": "anthropic/tiny", "api_base": server.url})
    assert claude.choices[0].message.content == SPOKEN
    out = litellm.responses(input="Weather?", model="openai/tiny", api_base=place["api_base"], api_key="none")
    assert out.output[0].content[0].text == SPOKEN

    server.text = CALL
    for asked in (given, given | {"model": "anthropic/tiny", "api_base": server.url}):
        message = litellm.completion(**asked, tools=[TOOL]).choices[0].message
        streamed = litellm.stream_chunk_builder([*litellm.completion(**asked, tools=[TOOL], stream=True)]).choices[0].message
        for (call,) in (message.tool_calls, streamed.tool_calls):
            assert json.loads(call.function.arguments) == CITY
    server.text = SPOKEN
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}
    for asked in (given, given | {"model": "anthropic/tiny", "api_base": server.url}):
        out = litellm.completion(**asked | {"messages": [*ASK, message, result]}, tools=[TOOL])
        assert out.choices[0].message.content == SPOKEN

    server.text = None
    Weather.model_validate_json(litellm.completion(**given, response_format=Weather).choices[0].message.content)
    tool = {"type": "function", "function": STRICT}
    (call, *_) = litellm.completion(**given, tools=[tool], tool_choice="required").choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("responses", [False, True], ids=["chats", "responses"])
def test_langchain_openai(server, responses):
    langchain, messages = package("langchain_openai"), package("langchain_core.messages")
    model = langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", max_tokens=300, max_retries=0, use_responses_api=responses
    )
    answer = model.invoke("Weather?")
    assert answer.text == SPOKEN
    assert answer.usage_metadata["output_tokens"] == NUM_TOKENS
    assert "".join(chunk.text for chunk in model.stream("Weather?")) == SPOKEN

    weather, asked = calls_then_speaks(server)
    tool = package("langchain_core.tools").tool(weather)
    bound, turns = model.bind_tools([tool]), [messages.HumanMessage("Weather?")]
    turns.append(bound.invoke(turns))
    pieces = [*bound.stream(turns[:1])]
    assert [call["args"] for call in sum(pieces[1:], pieces[0]).tool_calls] == [CITY]
    turns += [tool.invoke(call) for call in turns[-1].tool_calls]
    assert bound.invoke(turns).text == SPOKEN
    assert asked == [CITY]

    server.text = None
    for method in ("json_schema", "function_calling"):
        out = model.with_structured_output(Weather, method=method).invoke("Weather?")
        assert isinstance(out, Weather)
    (call, *_) = model.bind_tools([Weather], tool_choice="any").invoke("Weather?").tool_calls
    Weather.model_validate(call["args"])


def test_llama_index(server):
    like, llms = package("llama_index.llms.openai_like"), package("llama_index.core.llms")
    place = {"api_base": f"{server.url}/v1", "api_key": "none", "max_tokens": 300, "max_retries": 0, "context_window": 1000}
    llm = like.OpenAILike(model="tiny", is_chat_model=True, is_function_calling_model=True, **place)
    turns = [llms.ChatMessage(role="user", content="Weather?")]
    assert llm.chat(turns).message.content == SPOKEN
    assert "".join(chunk.delta or "" for chunk in llm.stream_chat(turns)) == SPOKEN
    assert llm.complete("Weather?").text == SPOKEN

    weather, asked = calls_then_speaks(server)
    tool = package("llama_index.core.tools").FunctionTool.from_defaults(weather)
    out = llm.predict_and_call([tool], "Weather?")
    assert (str(out), asked) == ("Rain.", [CITY])
    weather, asked = calls_then_speaks(server)
    agent = package("llama_index.core.agent.workflow").FunctionAgent(tools=[weather], llm=llm)

    async def ask():
        return await agent.run("Weather?")

    assert (str(asyncio.run(ask())), asked) == (SPOKEN, [CITY])

    server.text = None
    assert isinstance(llm.as_structured_llm(Weather).complete("Weather?").raw, Weather)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(server, kind):
    ai, models = package("pydantic_ai"), package("pydantic_ai.models.openai")
    provider = package("pydantic_ai.providers.openai").OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = getattr(models, kind)("tiny", provider=provider, settings={"max_tokens": 300})
    agent = ai.Agent(model, instructions="Be brief.")
    assert agent.run_sync("Weather?").output == SPOKEN
    assert "".join(agent.run_stream_sync("Weather?").stream_text(delta=True)) == SPOKEN
    weather, asked = calls_then_speaks(server)
    assert ai.Agent(model, tools=[weather]).run_sync("Weather?").output == SPOKEN
    assert asked == [CITY]
    server.text = None
    for output in (Weather, ai.NativeOutput(Weather)):
        assert isinstance(ai.Agent(model, output_type=output).run_sync("Weather?").output, Weather)
    server.text = ARGUMENTS
    assert isinstance(ai.Agent(model, output_type=ai.PromptedOutput(Weather)).run_sync("Weather?").output, Weather)


class Refusing:
    """Refuses the first requests as a server does that is full, or that warms up."""

    def __init__(self, status, number):
        self.status, self.left = status, number

    def check(self):
        if self.left:
            self.left -= 1
            raise RefusalError(self.status, "Try again later.", headers={"retry-after": "1"})


def ask_llama_index(url):
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(model="tiny", is_chat_model=True, api_base=f"{url}/v1", **KEY).acomplete("Weather?")


def ask_pydantic_ai(url):
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = AsyncOpenAI(base_url=f"{url}/v1", **KEY)  # the default one may have connections of another event loop
    return Agent(OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=client))).run("Weather?")


GIVEN = {"model": "tiny", "max_tokens": 99, "messages": ASK}
KEY = {"api_key": "none"}
RETRIES = {  # how each client asks, by its package
    "openai": lambda of, url: of.AsyncOpenAI(base_url=f"{url}/v1", **KEY).chat.completions.create(**GIVEN),
    "anthropic": lambda of, url: of.AsyncAnthropic(base_url=url, **KEY).messages.create(**GIVEN),
    "litellm": lambda of, url: of.acompletion(**GIVEN | {"model": "openai/tiny"}, api_base=f"{url}/v1", **KEY),
    "langchain_openai": lambda of, url: of.ChatOpenAI(model="tiny", base_url=f"{url}/v1", **KEY).ainvoke("Weather?"),
    "llama_index": lambda _, url: ask_llama_index(url),
    "pydantic_ai": lambda _, url: ask_pydantic_ai(url),
}


def test_clients_try_again_when_the_server_says_so(server, monkeypatch):
    clients = [name for name in RETRIES if importlib.util.find_spec(name)]

    async def ask(status):
        refusing = Refusing(status, len(clients))
        monkeypatch.setattr(server.app.state.server, "warm_up", refusing)
        for answer in await asyncio.gather(*(RETRIES[name](importlib.import_module(name), server.url) for name in clients)):
            assert "It rains in Z" in repr(answer)
        assert refusing.left == 0

    async def ask_twice():  # in one event loop, as clients keep their connections
        for status in (503, 429):
            await ask(status)

    asyncio.run(ask_twice())


def test_clients_of_node(server, tmp_path, monkeypatch):
    """openai-node and Vercel's AI SDK: `clients.mjs`."""
    folder = os.environ.get("JKV_NODE_CLIENTS", "")
    if not folder or shutil.which("node") is None:
        packages = "openai ai @ai-sdk/openai-compatible zod"
        pytest.skip(f"node takes no part: npm install --prefix FOLDER {packages}; JKV_NODE_CLIENTS=FOLDER")
    (tmp_path / "node_modules").symlink_to(Path(folder) / "node_modules")
    script = shutil.copy(Path(__file__).parent / "clients.mjs", tmp_path)
    texts = {"speaks": SPOKEN, "calls": CALL, "draws": None}
    process = subprocess.Popen(
        ["node", script, server.url, SPOKEN, ARGUMENTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:  # it says what the model does next, and waits until it does
        for line in process.stdout:
            if (does := line.strip()) == "refuses":
                monkeypatch.setattr(server.app.state.server, "warm_up", Refusing(503, 1))
            else:
                server.text = texts[does]
            print(file=process.stdin, flush=True)
    assert process.returncode == 0
