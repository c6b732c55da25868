"""A new policy is its own file and one line in the table; everything else finds it there."""

import filecmp
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jkv
from jkv import cli, policies
from jkv.eviction.recipe import entry_of, markdown, page_with_table, recipes_in
from jkv.policies import make

ROOT = Path(__file__).parents[2]
FILE = '''"""Newest (arXiv 0000.00000): keeps the newest tokens."""

from jkv.eviction.evict import Evict
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import Recency


@recipe("Newest", idea="keeps the newest tokens", arxiv="0000.00000")
def newest(budget: int, interval: int = 128) -> Policy:
    """The newest tokens."""
    return Policy("newest", Evict(Recency()), Every(budget, interval))
'''
LINE = "from jkv.policies.newest import newest as newest\n"
LOOK = """
import contextlib, io, json, sys
import jkv
from jkv import cli
from jkv.policies import make
from tests.policies import test_conformance as suite

def printed(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(arguments) == 0
    return out.getvalue()

problem = ["b=3;c=7;d=b*c;?d", "--policy", "newest", "--budget", "24", "--max-new-tokens", "4"]
sys.path.insert(0, "docs/hooks")
import site_navigation, site_policies

print(json.dumps({
    "package": [repr(jkv.newest(budget=24)), "newest" in jkv.__all__, jkv.__file__],
    "list": printed("policies"),
    "docs": printed("policies", "--markdown"),
    "suite": ["newest" in suite.POLICIES, "newest" in suite.EVICTING],
    "generates": bool(printed("generate", *problem)),
    "make": repr(make("newest", {"budget": 24})),
    "site": ["policies/newest.md" in site_navigation.folders()["policies/*"], site_policies.page_of("newest")],
}))
"""


def differences(one, other):
    """The files that two trees do not have in common, or that differ."""
    files = [{str(path.relative_to(root)) for path in root.rglob("*.py")} for root in (one, other)]
    _, changed, odd = filecmp.cmpfiles(one, other, files[0] & files[1], shallow=False)
    return (files[0] ^ files[1]) | set(changed) | set(odd)


def plain_env(folder):
    """An environment in which only the copy in a folder can be found."""
    return {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}


def test_a_new_policy_touches_its_own_file_and_one_line(tmp_path):
    for folder in ("jkv", "pallas_kernels", "tests", "docs", "results"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "jkv/policies/newest.py").write_text(FILE)
    table = tmp_path / "jkv/policies/table.py"
    table.write_text(table.read_text() + LINE)
    run = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=tmp_path, env=plain_env(tmp_path))
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["package"] == [found["make"], True, str(tmp_path / "jkv/__init__.py")]
    assert "newest(budget, interval=128)\n    Newest, arXiv 0000.00000: keeps the newest tokens" in found["list"]
    row = "| `newest` | keeps the newest tokens | Newest, [0000.00000](https://arxiv.org/abs/0000.00000) | [newest.py]"
    assert row + "(jkv/policies/newest.py) |" in found["docs"]
    assert found["suite"] == [True, True]
    assert found["generates"]
    assert found["site"][0]
    assert found["site"][1].startswith("# newest\n\n**Newest**: keeps the newest tokens.")
    assert "| `interval` | `int` | `128` |" in found["site"][1]
    assert differences(ROOT / "jkv", tmp_path / "jkv") == {"policies/newest.py", "policies/table.py"}
    assert len(table.read_text().splitlines()) == len((ROOT / "jkv/policies/table.py").read_text().splitlines()) + 1


@pytest.mark.parametrize("package", [jkv, policies], ids=["jkv", "policies"])
def test_each_recipe_of_the_table_is_a_name_of_the_package(package):
    for name, recipe in policies.POLICIES.items():
        assert getattr(package, name) is recipe
        assert name in package.__all__
    assert len(package.__all__) == len(set(package.__all__))
    assert all(hasattr(package, name) for name in package.__all__)


def test_each_recipe_has_a_file_of_its_name_and_a_line_of_the_table():
    lines = markdown(policies.POLICIES, folder="../").splitlines()
    assert len(lines) == 2 + len(policies.POLICIES)
    for line, (name, recipe) in zip(lines[2:], policies.POLICIES.items(), strict=True):
        entry = entry_of(recipe)
        assert entry.module == f"jkv.policies.{name}"
        assert line.startswith(f"| `{name}` | {entry.idea} | ")
        assert line.endswith(f"| [{name}.py](../jkv/policies/{name}.py) |")
        assert line.count("|") == 5
        head = (inspect.getdoc(inspect.getmodule(recipe)) or "").splitlines()[0]
        assert entry.arxiv is None or f"arXiv {entry.arxiv}" in head  # the file names the same paper


def test_the_command_writes_the_table_between_the_marks_of_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("# Before\n<!-- policies -->\nold\n<!-- /policies -->\nafter\n")
    assert cli.main(["policies", "--page", "docs/page.md"]) == 0
    table = markdown(policies.POLICIES, folder="../")
    assert page.read_text() == f"# Before\n<!-- policies -->\n{table}\n<!-- /policies -->\nafter\n"


@pytest.mark.parametrize("page", ["no marks", "<!-- policies -->\n<!-- /policies -->\n" * 2], ids=["none", "two"])
def test_a_page_without_one_pair_of_marks_is_refused(page):
    with pytest.raises(ValueError, match="marks <!-- policies --> and"):
        page_with_table(page, policies.POLICIES)


def test_the_full_cache_comes_first_and_the_others_by_name():
    first, *others = policies.POLICIES
    assert first == "full"
    assert others == sorted(others)


def test_a_line_of_the_table_that_enters_no_recipe_is_refused():
    with pytest.raises(ValueError, match="must have recipes only; chain is not one"):
        recipes_in({"r_kv": jkv.r_kv, "chain": jkv.chain, "__name__": "table"})


DEPARTING = [name for name, recipe in jkv.POLICIES.items() if entry_of(recipe).published]


@pytest.mark.parametrize("name", DEPARTING)
def test_published_settings_are_none_of_the_defaults_and_go_after_a_users_own(name, capsys):
    own = entry_of(jkv.POLICIES[name]).published
    defaults = {field.name: field.default for field in inspect.signature(jkv.POLICIES[name]).parameters.values()}
    assert all(field in defaults and defaults[field] != value for field, value in own.items())
    policy = jkv.published(name, budget=512)
    assert policy == jkv.POLICIES[name](budget=512, **own) != jkv.POLICIES[name](budget=512)
    assert make(name, {"budget": 512, "published": False}) == jkv.POLICIES[name](budget=512)
    assert make(name, {"budget": 512, "published": True}) == policy
    first, kept = next(iter(own)), dict(list(own.items())[1:])
    back = jkv.published(name, budget=512, **{first: defaults[first]})
    assert back == jkv.POLICIES[name](budget=512, **kept)
    assert cli.main(["policies", name]) == 0
    shown = ", ".join(f"{field}={value!r}" for field, value in own.items())
    assert f"As published (`jkv.published`, or --set published=true): {shown}" in capsys.readouterr().out


def test_what_has_no_other_settings_is_published_as_it_is():
    assert len(DEPARTING) == 6
    assert jkv.published("tova", budget=64) == jkv.tova(budget=64)
    with pytest.raises(ValueError, match="tova has these settings"):
        jkv.published("tova", budget=64, window=4)
