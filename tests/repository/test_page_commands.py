"""The `jkv` commands of every page run, in order, with the files that the page shows; long ones on fewer problems."""

import json
import re
import shlex
import shutil

import pytest

from jkv import cli
from jkv.checkpoints import loading as checkpoint
from jkv.testing import random_gate
from tests.checkpoints.test_gguf_tokenizer import TINY
from tests.repository.pages import PAGES, ROOT, name_of, wrong_answers
from tests.support.gguf_models import write_gguf

BLOCK = re.compile(r"^```(sh|toml|python)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
FEWER = {  # what is added to commands that would take minutes; the last value of an option counts
    "analyze --policies": ["--problems", "2"],
    "choose": ["--policies", "streaming_llm", "--count", "2", "--length", "96", "--memory", "100kB"],
    "eval": ["--problems", "2", "--samples", "1", "--seeds", "1", "--max-new-tokens", "96"],
    "foresee": ["--passages", "4", "--steps", "20"],  # enough for a right answer
    "plan model.gguf": ["--prompt", "64"],
    "probe": ["--model", "tiny-reasoner", "--seeds", "1"],
    "recall": ["--passages", "1"],
    "steer": ["--problems", "20"],
}
LEFT_OUT = {"configs/experiments/all.toml": "every policy at every budget: the tests of each policy run it by itself"}
QUICK = ("docs/models.md", "docs/quickstart.md")  # `.ci/run` runs the others too
CHAIN = "b=3;c=7;d=b*c;?d"


def commands_of(page):
    """The `jkv` commands of a page's shell blocks, and before each its files: (name, content) of blocks with a name."""
    found = []
    for language, body in BLOCK.findall(page.read_text()):
        if language == "sh":
            lines = body.replace("\\\n", " ").splitlines()
            found += [shlex.split(line, comments=True) for line in lines if line.startswith("jkv ")]
        elif name := re.match(r"# ([\w-]+\.(?:toml|py))\n", body):
            found.append((name[1], body))
    return found


WITH_COMMANDS = [page for page in PAGES if any(isinstance(one, list) for one in commands_of(page))]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with what the commands name: the checkout's settings, and small files in the place of large ones."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    folder = shutil.copytree(checkpoint.find_folder("tiny-reasoner"), tmp_path / "FOLDER")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    random_gate(checkpoint.load("tiny-reasoner")).save(tmp_path / "gate.safetensors")
    write_gguf(tmp_path / "model.gguf", ROOT / "tests/support/golden/qwen2", tokenizer=TINY)
    (tmp_path / "problems.txt").write_text(f"{CHAIN}\n")
    (tmp_path / "notes.txt").write_text(CHAIN * 100)
    (tmp_path / "MATH-500").mkdir()
    problem = json.dumps({"problem": CHAIN, "answer": "1", "level": 1, "subject": "chains"})
    (tmp_path / "MATH-500" / "test.jsonl").write_text(f"{problem}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (name_of(page) not in QUICK)) for page in WITH_COMMANDS],
)
def test_the_commands_of_a_page_run_in_order(page, desk, capsys):
    for one in commands_of(page):
        if isinstance(one, tuple):
            (desk / one[0]).write_text(one[1])
            continue
        words, text = one[1:], " ".join(one[1:])
        if any(name in text for name in LEFT_OUT):
            continue
        more = [option for start, options in FEWER.items() if text.startswith(start) for option in options]
        shutil.rmtree(desk / "results", ignore_errors=True)  # each command is one of its own
        assert cli.main([*words, *more]) == 0, f"{text}\n{capsys.readouterr().err}"
        printed = capsys.readouterr().out
        assert wrong_answers(printed, words, [printed] * len(words)) == [], text


def test_most_pages_with_commands_are_found():
    assert {name_of(page) for page in WITH_COMMANDS} >= {"docs/evaluation.md", "docs/methods.md", *QUICK}
    names = [one[0] for one in commands_of(ROOT / "docs" / "evaluation.md") if isinstance(one, tuple)]
    assert names == ["compare.toml", "probe.toml"]
