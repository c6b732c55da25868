"""The examples of docs/server.md run as they are written: the model that the page serves answers the clients that it shows."""

import io
import re
import shlex
import shutil

import pytest

import jkv
from jkv import cli
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.cards import Card, card_of
from jkv.policies import make
from tests.repository.pages import ROOT
from tests.serving.conftest import TEMPLATE, Running

openai = pytest.importorskip("openai")
PAGE = (ROOT / "docs" / "server.md").read_text()
URL = "http://127.0.0.1:8000"  # of the page
BLOCKS = re.findall(r"^```text\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server of the page's own command. tiny-reasoner with a template takes the place of a chat model of `jkv models`; a name
    of a model in the package is that model.
    """
    (line,) = [
        line for block in BLOCKS for line in block.splitlines() if line.startswith("jkv serve ") and "--port 8000" in line
    ]
    options = cli.make_parser().parse_args(shlex.split(line)[1:])
    assert card_of(options.model) is None or card_of(options.model).package, "a model that needs the hub is no example"
    folder = shutil.copytree(checkpoint.find_folder("tiny-reasoner"), tmp_path / "hub")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(Card, "installed", None)
    monkeypatch.setattr(checkpoint, "fetch", lambda name, patterns: folder)
    settings = {"budget": options.budget}
    policies = [make(options.policy, settings), jkv.r_kv(budget=512)]
    engine = jkv.Engine(jkv.load(options.model), max_running=2, max_slots=1024, policies=policies, chunk=8)
    one = Running(engine, name=options.name, policy=options.policy, settings=settings)
    yield one
    one.close()


@pytest.mark.filterwarnings("ignore:.*has no tokens")  # the questions are for a chat model
def test_the_clients_of_the_page_are_answered(served, capsys, monkeypatch):
    clients = [block for block in BLOCKS if "client." in block]
    assert len(clients) == 3
    assert URL in clients[0]
    scope = {}
    for block in clients:
        exec(compile(block.replace(URL, served.url), "docs/server.md", "exec"), scope)
    assert "'held_tokens'" in capsys.readouterr().out
    assert scope["second"].usage.prompt_tokens_details.cached_tokens > 0
    assert scope["later"].usage.input_tokens_details.cached_tokens > 0
    assert f"`jkv chat --url {URL}`" in PAGE
    monkeypatch.setattr("sys.stdin", io.StringIO("b=1;c=2;d=b+c;?d\n"))
    assert cli.main(["chat", "--url", served.url]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "tokens held" in err


@pytest.mark.filterwarnings("ignore:.*has no tokens")
def test_the_client_of_anthropic_is_answered(served, capsys):
    pytest.importorskip("anthropic")
    (block,) = [block for block in BLOCKS if "import anthropic" in block]
    exec(compile(block.replace(URL, served.url), "docs/server.md", "exec"), {})
    assert "'held_tokens'" in capsys.readouterr().out
