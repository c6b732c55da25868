"""What the text names exists: dotted names, modules, commands and their options, wherever a reader may meet them."""

import json
import re
import tomllib

import pytest

from jkv import cli
from tests.repository.pages import (
    DOTTED,
    MODULE,
    PAGES,
    PLACEHOLDER,
    ROOT,
    commands,
    has_name,
    is_runnable,
    name_of,
    prose_of,
    unknown_options,
    unknown_words,
)

FILES = {
    "pages": PAGES,
    "notebooks": sorted(ROOT.glob("notebooks/*.ipynb")),
    "source": sorted(
        [
            *ROOT.glob("jkv/**/*.py"),
            *ROOT.glob("pallas_kernels/**/*.py"),
            *ROOT.glob("research/**/*.py"),
            *ROOT.glob("docs/hooks/*.py"),
        ]
    ),
    "configs": sorted([*ROOT.glob("configs/**/*.toml"), ROOT / "pyproject.toml", ROOT / "mkdocs.yml", ROOT / ".ci" / "run"]),
}
PATH = re.compile(r"(?<![\w./-])(?:jkv|tests|pallas_kernels|research|configs|docs|notebooks|results)/[\w*./-]*[\w*]")
each_kind = pytest.mark.parametrize("kind", FILES)


def wrong_in(files):
    """What these files name that does not exist, with the file."""
    wrong = set()
    for path in files:
        text = prose_of(path)
        wrong |= {(name_of(path), name) for name in DOTTED.findall(text) if not has_name(name)}
        wrong |= {(name_of(path), f"python -m {name}") for name in MODULE.findall(text) if not is_runnable(name)}
    return sorted(wrong)


def wrong_commands(text):
    """The commands of a text that no parser takes, with what is wrong."""
    wrong = []
    for words in commands(text):
        program = words[0].removeprefix(".venv/bin/")
        if program == "jkv":
            wrong += [(" ".join(words), word) for word in unknown_words(words[1:], cli.make_parser())]
        elif program.startswith("python") and words[1:2] == ["-m"] and not PLACEHOLDER.search(words[2]):
            wrong += [(" ".join(words), word) for word in unknown_options(words[2], words[3:])]
    return wrong


@each_kind
def test_every_dotted_name_and_module_exists(kind):
    assert FILES[kind]
    wrong = wrong_in(FILES[kind])
    assert not wrong, "\n".join(f"{path}: {name}" for path, name in wrong)


@each_kind
def test_every_path_of_the_repository_exists(kind):
    found = {(name_of(path), name) for path in FILES[kind] for name in PATH.findall(prose_of(path))}
    missing = sorted((path, name) for path, name in found if not any(ROOT.glob(name)))
    assert not missing, "\n".join(f"{path}: {name}" for path, name in missing)


@each_kind
def test_every_command_has_its_options(kind):
    found = {name_of(path): wrong_commands(prose_of(path)) for path in FILES[kind] if path.suffix != ".toml"}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_every_command_in_the_help_has_its_options():
    from jkv.cli.inputs import EXAMPLES

    shell = "```sh\n" + "\n".join(line.strip() for line in EXAMPLES.splitlines()[1:]) + "\n```\n"
    assert len(commands(shell)) > 10
    assert wrong_commands(shell) == []


PAGE = "Call `jkv.no_such_function(x)`, then `python -m jkv.no.module`, or `jkv.Engine.no_such_field`."
MODULE_TEXT = '''"""See `jkv.no_such_module.name`."""
raise ValueError(f"{x}: use jkv.rl.wrong_name")  # not jkv.wrong
'''
NOTEBOOK = json.dumps({"cells": [{"cell_type": "markdown", "source": ["`jkv.viz.no_such_picture`"]}]})


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("page.md", PAGE, ["jkv.Engine.no_such_field", "jkv.no.module", "jkv.no_such_function", "python -m jkv.no.module"]),
        ("module.py", MODULE_TEXT, ["jkv.no_such_module.name", "jkv.rl.wrong_name", "jkv.wrong"]),
        ("book.ipynb", NOTEBOOK, ["jkv.viz.no_such_picture"]),
    ],
    ids=["page", "source", "notebook"],
)
def test_a_planted_wrong_name_is_found(name, text, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.repository.pages.ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    assert [found for _, found in wrong_in([tmp_path / name])] == wrong


@pytest.mark.parametrize(
    ("dotted", "exists"),
    [
        ("jkv.generate", True),
        ("jkv.Engine.stats", True),  # assigned to self
        ("jkv.Result.logprobs", True),  # a field without a default
        ("jkv.Result.log_probs", False),
        ("jkv.policies", True),
        ("jkv.integrations.tunix", True),  # whose library may be missing
        ("jkv.integrations.tunix.JkvRollout", True),
        ("jkv.integrations.tunix.NoRollout", False),
        ("pallas_kernels.bench", True),
        ("pallas_kernels.no_kernel", False),
    ],
)
def test_a_dotted_name_resolves_as_python_would(dotted, exists):
    assert has_name(dotted) is exists


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`jkv generate x --policy r_kv --budgets 4`", ["--budgets"]),
        ("`python -m research.bench tables --readme README.md`", ["--readme"]),
        ("`jkv bench nothing`", ["nothing"]),
        ("```sh\n.venv/bin/jkv plan a \\\n  --devices b  # --not-an-option\n```\n", ["--devices"]),
        ("`jkv bench NAME --anything`", []),
        ("`python -m tests.support.soak --operation 3`", ["--operation"]),
        ("`python -m tests.support.soak --operations 3 --seed=1`", []),
    ],
)
def test_a_planted_wrong_option_is_found(text, wrong):
    assert [word for _, word in wrong_commands(text)] == wrong


def test_an_install_line_names_this_projects_distribution_and_an_extra_that_it_has():
    """`jkv` is another project on PyPI: a line that installs `jkv[eval]` would install a stranger's package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = "\n".join(path.read_text() for files in FILES.values() for path in files)
    found = re.findall(r"(?<![\w.])(jkv[\w-]*)\[([a-z][\w, -]*)\]", text) + re.findall(r"install\((?:')([\w-]+)'\)", text)
    asked = [one if isinstance(one, tuple) else (project["name"], one) for one in found]
    assert len(asked) > 10
    for name, extras in asked:
        assert name == project["name"], f"{name}[{extras}]"
        assert {extra.strip() for extra in extras.split(",")} <= set(project["optional-dependencies"]), extras
