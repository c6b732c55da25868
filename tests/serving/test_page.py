"""The files of the server's page: what they are sent with, what they name, and what the page is told of the server."""

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import jkv
from jkv.serving.options import ServerOptions
from tests.repository.pages import ROOT
from tests.serving.conftest import SETTINGS

pytest.importorskip("starlette")
from jkv.serving.about import About
from jkv.serving.page import FOLDER, files

OWN = sorted(name for name in files() if not name.startswith("vendor/"))
SVG = "http://www.w3.org/2000/svg"  # a name, which nothing loads


class Page(HTMLParser):
    """Collects the page's elements, each with its attributes and the labels around it."""

    def __init__(self):
        super().__init__()
        self.open, self.found, self.texts = [], [], []
        self.feed((FOLDER / "page.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag, pairs):
        self.found.append((tag, dict(pairs), [one for one in self.open if one == "label"]))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1:], data))


def test_the_page_is_whole_and_each_field_has_a_label():
    page = Page()
    assert page.open == []
    named = {given["for"] for tag, given, _ in page.found if tag == "label" and "for" in given}
    fields = [(given, labels) for tag, given, labels in page.found if tag in ("input", "select", "textarea")]
    assert len(fields) == 8
    assert [given for given, labels in fields if not labels and given.get("id") not in named] == []
    ids = [given["id"] for _, given, _ in page.found if "id" in given]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\bat\("([\w-]+)"\)', (FOLDER / "page.js").read_text(encoding="utf-8"))) <= set(ids)


def test_the_page_names_its_own_files_alone():
    """What it names is there, and what a browser would not run by the content policy is not there."""
    page = Page()
    named = [given[key] for _, given, _ in page.found for key in ("src", "href") if given.get(key, "data:,") != "data:,"]
    assert {name.removeprefix("static/") for name in named} <= set(files())
    assert not [given for _, given, _ in page.found if "style" in given or any(name.startswith("on") for name in given)]
    assert not [text for inside, text in page.texts if inside[:1] in (["script"], ["style"]) and text.strip()]
    for name in OWN:
        text = files()[name].content.decode()
        assert re.findall(r"https?://[\w.]+[^\"')\s]*", text.replace(SVG, "")) == [], name
        for imported in re.findall(r'from "\./([\w.]+)"', text):
            assert imported in OWN, name


def test_each_library_has_its_licence_and_the_wheel_has_all_files():
    libraries = {name.rsplit("-", 1)[0] for name in files() if name.startswith("vendor/") and name.endswith(".js")}
    assert {name.removesuffix("-LICENSE") for name in files() if name.endswith("-LICENSE")} == libraries
    assert sum(len(file.content) for file in files().values()) < 450_000
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = Path(jkv.__file__).parent
    patterns = settings["tool"]["setuptools"]["package-data"]["jkv"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {FOLDER / name for name in files()} <= packed
    licences = {path for pattern in settings["project"]["license-files"] for path in ROOT.glob(pattern)}
    assert {FOLDER / name for name in files() if name.endswith("-LICENSE")} <= licences


def test_files_are_sent_with_their_kind_a_content_policy_and_how_long_they_keep(tiny):
    for path, kind, kept in (
        ("/", "text/html; charset=utf-8", "no-cache"),
        ("/static/page.js", "text/javascript; charset=utf-8", "no-cache"),
        ("/static/page.css", "text/css; charset=utf-8", "no-cache"),
        ("/static/vendor/marked-18.2.1.js", "text/javascript; charset=utf-8", "public, max-age=31536000, immutable"),
    ):
        answer = httpx.get(tiny.url + path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind), path
        assert answer.headers["cache-control"] == kept
        policy = dict(one.strip().split(" ", 1) for one in answer.headers["content-security-policy"].split(";"))
        assert (policy["default-src"], policy["script-src"], policy["img-src"]) == ("'none'", "'self'", "data:")
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(tiny.url + path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/static/nothing.js", "/static/", "/static/..%2fapp.py", "/static/vendor"):
        answer = httpx.get(tiny.url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path


def test_the_card_names_what_the_page_offers(tiny):
    card = httpx.get(tiny.url + "/v1/models").json()["data"][0]
    offered = {one["name"]: one["has_budget"] for one in card["policies"]}
    assert (card["policy"], card["budget"], card["is_chat"]) == ("r_kv", SETTINGS["budget"], True)
    assert {"full": False, "streaming_llm": True}.items() <= offered.items()
    assert not offered.keys() & {"h2o", "foresight", "r_kv"}, "they need more than a budget, or than this engine keeps"
    server = tiny.app.state.server
    few = SimpleNamespace(service=server.service, options=ServerOptions(policy="r_kv", settings=SETTINGS, allowed=("full",)))
    assert [one["name"] for one in About(few).policies] == ["full"]


def test_the_card_has_the_bytes_of_a_token(tiny):
    card = httpx.get(tiny.url + "/v1/models").json()["data"][0]
    body = {"prompt": [5] * 40, "max_tokens": 8, "policy": "full", "ignore_eos": True}
    kv = httpx.post(tiny.url + "/v1/completions", json=body, timeout=60).json()["usage"]["kv"]
    assert kv["bytes"] == 48 * card["kv_bytes_per_token"], "40 and 8 tokens fill three pages of 16"
    assert card["kv_pool_bytes"] == server_pool(tiny)


def server_pool(tiny):
    engine = tiny.service.engine
    return engine.num_pages * engine.page_bytes
