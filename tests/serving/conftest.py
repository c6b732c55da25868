"""A server on a real socket, for all tests of this folder."""

import concurrent.futures
import contextlib
import dataclasses
import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.testing import TINY, tiny_model
from tests.support.small_tokenizers import byte_level, with_end

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
SETTINGS = {"budget": 48, "interval": 16, "window": 4}
TOOL_TEMPLATE = """{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% for message in messages %}
<{{ message.role }}>{{ message.content }}{% if message.tool_calls %}{% for call in message.tool_calls %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endif %}{% endfor %}
<assistant>{% if thinks %}<think>{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ASK = [{"role": "user", "content": "Weather in Zürich?"}]
ARGUMENTS = '{"city": "Zürich", "days": 3}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """tiny-reasoner with a chat template."""
    folder = shutil.copytree(checkpoint.find_folder("tiny-reasoner"), tmp_path_factory.mktemp("models") / "tiny")
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    return jkv.load(str(folder))


class Running:
    """A server that runs in a thread."""

    def __init__(self, engine, drain=5, **options):
        pytest.importorskip("uvicorn")
        from jkv.serving.app import make_app
        from jkv.serving.options import ServerOptions
        from jkv.serving.run import listen, make_server

        self.engine, self.service = engine, jkv.Service(engine)
        options = {"name": "tiny", "policy": "r_kv", "settings": SETTINGS} | options
        self.app = make_app(self.service, ServerOptions(**options))
        place = listen("127.0.0.1", 0)
        self.address = place.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.server = make_server(self.app, drain)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [place]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self):
        """Ends the server, then the service."""
        self.server.should_exit = True
        self.thread.join()
        self.service.close().result()

    def wait_until_idle(self, seconds=60):
        """Waits until no request is unfinished, and checks that nothing is held."""
        end = time.monotonic() + seconds

        def held_when_idle(engine):  # in one call: a request may come between two
            return engine.runner.num_held_pages if engine.is_idle and not engine.tickets else None

        while (held := self.service.call(held_when_idle).result()) is None:
            assert time.monotonic() < end, "a request goes on"
            time.sleep(0.02)
        assert held == 0


@contextlib.contextmanager
def trainers_server(engine, root):
    """A server with a trainer's endpoints, which read folders of `root`."""
    from jkv.serving.trainer import TrainerOptions, add_routes

    one = Running(engine, max_waiting=12)
    add_routes(one.app, TrainerOptions(root))
    yield one
    one.close()


@pytest.fixture
def pool():
    """Four threads for requests at the same time."""
    with concurrent.futures.ThreadPoolExecutor(4) as one:
        yield one


@pytest.fixture(scope="session")
def prompt(chat_model):
    """Token ids of a problem of tiny-reasoner."""
    return chat_model.tokenizer.encode("b=3;c=7;d=b*c;e=d+b;?e")


def post_completion(server, body, seconds=60):
    """The status and the text of an answer of /v1/completions."""
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def make_engine(model):
    policies = [jkv.r_kv(**SETTINGS), jkv.streaming_llm(budget=48)]
    return jkv.Engine(model, max_running=4, max_slots=1024, page_size=16, policies=policies, max_stop_ids=8, chunk=8)


@pytest.fixture(scope="session")
def running(chat_model):
    """A server of `chat_model`."""
    one = Running(make_engine(chat_model), max_waiting=12)
    yield one
    one.close()


@pytest.fixture
def tiny(running):
    """The server, which is idle again at the end of the test and holds no page."""
    yield running
    running.wait_until_idle()
    end = time.monotonic() + 60
    while running.app.state.server.num_open:  # the server counts an answer after the client has all of it
        assert time.monotonic() < end, "an answer is still open"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def scripted():
    """A server whose model writes `scripted.text`."""
    backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = with_end(backend)
    tokenizer.chat_template = TOOL_TEMPLATE
    one = scripted_server(tokenizer, (256,), lambda text: [*text.encode()])
    yield one
    one.close()


def scripted_server(tokenizer, end_ids, encode):
    """A server whose model writes the tokens of its `text`, or what it draws, where that is None."""
    size = len(tokenizer)
    model = tiny_model(config=dataclasses.replace(TINY, vocab_size=size, end_ids=end_ids), tokenizer=tokenizer)
    engine = jkv.Engine(model, max_running=2, max_slots=1536, page_size=16, chunk=8, max_stop_ids=size)
    one = Running(engine, policy="full", settings={})
    server, make_job = one.app.state.server, one.app.state.server.make_job
    one.text = ""

    async def forced_job(*args):
        job = await make_job(*args)
        if one.text is None:
            return job
        tokens = np.array(encode(one.text), np.int32)
        changes = {"stop_ids": tuple(range(size)), "form": None}  # whatever is drawn after the text ends it
        groups = [
            [dataclasses.replace(each, forced=tokens[: each.max_new_tokens], **changes) for each in group]
            for group in job.groups
        ]
        return dataclasses.replace(job, groups=groups)

    server.make_job = forced_job
    return one


@pytest.fixture
def jobs(scripted, monkeypatch):
    """The jobs that the scripted server makes, in their order."""
    found, server, make_job = [], scripted.app.state.server, scripted.app.state.server.make_job

    async def noted(*args):
        found.append(await make_job(*args))
        return found[-1]

    monkeypatch.setattr(server, "make_job", noted)
    return found
