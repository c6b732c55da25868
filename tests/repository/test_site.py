"""The documentation site: its pages are complete, its links lead somewhere, and it is built without a warning."""

import doctest
import importlib.util
import inspect
import json
import re
import sys

import pytest
import yaml

import jkv
import pallas_kernels
from jkv.eviction.recipe import entry_of
from jkv.policies import POLICIES
from tests.repository.pages import ROOT, links, run

sys.path.insert(0, str(ROOT / "docs" / "hooks"))  # as mkdocs finds them
import site_links
import site_navigation
import site_notebooks
import site_policies
import site_reference

REPOSITORY = "https://github.com/jkv-project/jkv"
TOOLS = ("mkdocs", "material", "mkdocstrings", "griffe")
MISSING = [name for name in TOOLS if importlib.util.find_spec(name) is None]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
each_policy = pytest.mark.parametrize("name", POLICIES)


def flat(nav):
    """The pages of a navigation, in order."""
    for item in nav:
        if isinstance(item, dict):
            for inner in item.values():
                yield from flat([inner] if isinstance(inner, str) else inner)
        else:
            yield item


@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} of the extra `docs` is not installed; CI builds the site")
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    run(
        sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)
    )  # --quiet would hide warnings from --strict
    built = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}
    places = list(flat(site_navigation.with_folders(CONFIG["nav"])))
    assert {place.replace("README", "index").replace(".md", ".html") for place in places} <= built.keys()
    for name, text in built.items():
        fetched = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\" >]*)", text)
        fetched += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preconnect|preload)\"?[^>]*(https?:[^\" >]*)", text)
        assert not fetched, f"{name} fetches {fetched}"
    every = "".join(text for name, text in built.items() if name.startswith("reference/"))
    headings = set(re.findall(r"doc-symbol-heading[^>]*></code>\s*([\w.]+)", every))
    assert set(public_names()) - headings == set()
    fields = re.search(
        r'id="jkv.engine.stats.Stats.amsr".*?average memory saving ratio', built["reference/generate.html"], re.DOTALL
    )
    assert fields, "a field's comment is its description"
    assert all((tmp_path / "notebooks" / name).read_bytes() == picture for name, picture in pictures().items())


def pictures():
    """The pictures of all notebooks' pages."""
    pages = [site_notebooks.page_of(notebook, REPOSITORY) for notebook in site_notebooks.NOTEBOOKS]
    return {name: picture for _, every in pages for name, picture in every.items()}


def public_names():
    """What a user may call: the names of `jkv`, of its public modules, and the kernels."""
    modules = {"forms", "rl", "testing", "viz"}
    others = {"POLICIES", "DEVICES"}  # tables, which the text of a page explains
    names = [f"jkv.{name}" for name in jkv.__all__ if name not in {*modules, *others, *POLICIES}]
    names += [f"jkv.forms.{name}" for name in jkv.forms.__all__]
    names += [f"jkv.rl.{name}" for name in jkv.rl.__all__] + [f"jkv.viz.{name}" for name in jkv.viz.__all__]
    own = [(name, value) for name, value in vars(jkv.testing).items() if getattr(value, "__module__", "") == "jkv.testing"]
    names += [f"jkv.testing.{name}" for name, value in own if callable(value) and not name.startswith("_")]
    return names + [f"pallas_kernels.{name}" for name in pallas_kernels.KERNELS]


def test_each_public_name_is_in_the_reference_once():
    listed = [name for group in site_reference.GROUPS.values() for name in group.names]
    assert len(listed) == len(set(listed))
    assert set(public_names()) - set(listed) == set(), "add it to a group of docs/hooks/site_reference.py"
    about = " ".join(group.about for group in site_reference.GROUPS.values())
    assert all(f"`jkv.{name}`" in about for name in ("POLICIES", "DEVICES", "testing"))


def test_each_name_of_the_reference_has_a_docstring():
    every = [name for group in site_reference.GROUPS.values() for name in group.names]
    assert [name for name in every if not inspect.getdoc(site_reference.value_of(name))] == []
    assert "::: jkv.generate.generate\n" in site_reference.page_of("generate")


def test_the_command_line_has_each_command():
    page = site_reference.command_line_page()
    assert all(f"## jkv {name}\n" in page for name in ("generate", "chat", "eval", "plan", "bench", "models"))
    blocks = re.findall(r"^```text\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert max(len(line) for block in blocks for line in block.splitlines()) < 140  # examples are not wrapped


@each_policy
def test_a_policy_says_its_rule_and_where_it_departs_from_its_paper(name):
    recipe = POLICIES[name]
    said = site_policies.description_of(recipe)
    assert said.text
    assert said.rule
    assert entry_of(recipe).arxiv is None or said.departures
    doc = inspect.getdoc(recipe)
    assert all(line.strip() in doc for line in "\n".join([said.text, said.rule, said.departures]).splitlines())


@each_policy
def test_the_page_of_a_policy_has_its_settings_and_links_that_lead_somewhere(name):
    page = site_policies.page_of(name)
    assert all(f"| `{field}` | " in page for field in inspect.signature(POLICIES[name]).parameters)
    assert links(page)
    for target in links(site_links.with_site_links(page, f"policies/{name}.md", REPOSITORY)):
        if not target.startswith("https:"):
            place = (ROOT / "docs" / "policies" / target.partition("#")[0]).resolve()
            assert place.exists() or (ROOT / "results" / place.name).exists(), target


@pytest.mark.parametrize(
    "file", ["all-tiny-reasoner", "ablate-r_kv-tiny-reasoner", "share-tiny-reasoner", "throughput", "papers"]
)
def test_each_recorded_row_is_on_the_page_of_its_policy(file):
    """Rows of the full cache are on the pages of others too, as what their change is from; the oracle has no page."""
    tables = (ROOT / "results" / f"{file}.md").read_text().partition("| contrast |")[0]  # which are of two policies each
    lines = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| oracle ")][1:]
    rows = [frozenset(site_policies.cells_of(line)) - {""} for line in lines]
    shown = {
        name: [
            frozenset(site_policies.cells_of(line))
            for line in site_policies.page_of(name).splitlines()
            if line.startswith("| ")
        ]
        for name in POLICIES
    }
    for row, line in zip(rows, lines, strict=True):
        owners = [name for name, every in shown.items() if any(row <= cells for cells in every)]
        is_full = "full" in site_policies.cells_of(line)
        assert len(owners) == 1 or (is_full and "full" in owners), (line, owners)


def test_a_policy_that_was_never_measured_says_so(monkeypatch):
    monkeypatch.setattr(site_policies, "RESULTS", ROOT / "tests")
    assert "No recorded run has this policy." in site_policies.page_of("r_kv")


def test_types_of_settings_are_short():
    page = site_policies.page_of("seal")
    assert "| `vector` | `SteeringVector | Path | str` | must be given |" in page
    assert "| `encoder` | `str | Callable[..., Any]` | `'tokens'` |" in site_policies.page_of("reason_cache")


def test_the_page_of_a_notebook_has_its_text_code_and_pictures():
    for notebook in site_notebooks.NOTEBOOKS:
        page, found = site_notebooks.page_of(notebook, REPOSITORY)
        cells = json.loads(notebook.read_text())["cells"]
        for cell in cells[2:]:
            assert "".join(cell["source"]) in page or "colab" in "".join(cell["source"])
        assert len(found) == sum(len(cell.get("outputs", [])) for cell in cells)
        assert all(f"]({name})" in page for name in found)
        assert "![Open" not in page
    assert len(pictures()) >= 5


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("[a](engine.md#memory)", "replay.md", "[a](engine.md#memory)"),
        ("[a](../results/papers.md)", "results.md", "[a](results/papers.md)"),
        ("![a](../results/kept.png)", "README.md", "![a](results/kept.png)"),
        ("[a](../../results/papers.md)", "policies/r_kv.md", "[a](../results/papers.md)"),
        ("[a](../notebooks/6_rollouts.ipynb)", "replay.md", "[a](notebooks/6_rollouts.md)"),
        ("[a](docs/engine.md)", "CONTRIBUTING.md", "[a](engine.md)"),
        ("[a](../jkv/generate.py)", "engine.md", f"[a]({REPOSITORY}/blob/main/jkv/generate.py)"),
        ("[a](../jkv)", "engine.md", f"[a]({REPOSITORY}/tree/main/jkv)"),
        ("[a](../README.md#in-python)", "engine.md", f"[a]({REPOSITORY}/blob/main/README.md#in-python)"),
        ("[a](https://x.org) [b](#memory)", "engine.md", "[a](https://x.org) [b](#memory)"),
        ("`x[0](../y)`\n```\nx[0](../y)\n```\n[`c`](../jkv)", "engine.md", f"[`c`]({REPOSITORY}/tree/main/jkv)"),
    ],
)
def test_a_link_of_the_repository_becomes_one_of_the_site(text, place, expected):
    assert site_links.with_site_links(text, place, REPOSITORY).endswith(expected)


def test_a_link_to_a_file_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="which does not exist"):
        site_links.with_site_links("[a](../no/file.py)", "engine.md", REPOSITORY)


def test_the_list_of_pages_has_the_order_of_the_navigation():
    listed = [target.partition("#")[0] for target in links((ROOT / "docs" / "README.md").read_text())]
    pages = [target for target in listed if (ROOT / "docs" / target).parent == ROOT / "docs"]
    ordered = [place for place in flat(CONFIG["nav"]) if (ROOT / "docs" / place).exists() and place != "README.md"]
    assert pages == ordered
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == {*ordered, "README.md"}
    assert {item for item in flat(CONFIG["nav"]) if item.endswith("*")} == site_navigation.folders().keys()


def test_the_site_names_the_repository_of_the_project():
    assert CONFIG["extra"]["repository"] == REPOSITORY
    assert f'Repository = "{REPOSITORY}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "module", [site_links, site_notebooks, site_policies, site_reference], ids=lambda module: module.__name__
)
def test_the_examples_of_the_hooks_run(module):
    assert doctest.testmod(module).failed == 0
