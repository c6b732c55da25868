"""Names and titles from files: figures draw them as text, short and visible; tables keep their columns."""

import dataclasses
import io

import pytest

import jkv
from jkv.reports import cell, markdown
from jkv.viz.look import plain
from tests.support.hostile import TEXTS
from tests.viz.pages import records_of

pytest.importorskip("matplotlib")
NAMES = {
    "a formula that does not parse": "$x^{$",
    "three dollars": "a$b$c$\\frac",
    "a tag": "<script>alert(1)</script>",
    "pipes and lines": "a|b\n| c |\r\n|---|",
    "backslashes and a pipe": "a\\\\|b",
    "hidden": "_name",
    "null": "a\0b",
    "surrogate": "\ud800",
    "turned": "\u202eabc",
    "long": "x" * 100_000,
    "many lines": "\n" * 1_000,
    "nothing": "",
    "tags of Unicode": "a\U000e0041\u00ad\u2063b",
}


def png_of(figure):
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=30)
    return stream.getvalue()


def outcome(policy, share):
    return {"policy": policy, "problems": 2, "accuracy": 0.5, "low": 0.4, "high": 0.6, "kv_share": share}


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout", "ignore:.*layout")
@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_drawn(name):
    text = NAMES[name]
    runs = [{"step": [0, 1], "reward": [0.0, 1.0]}]
    pools = [{"policy": text, "pool_bytes": size, "tokens_per_second": 3.0, "concurrency": 2} for size in (10, 20)]
    figures = [
        jkv.viz.learning({text: runs, "full": runs}, title=text),
        jkv.viz.frontier([outcome("full", 1.0), outcome(text, 0.3)], title=text),
        jkv.viz.throughput(pools, title=text),
        jkv.viz.redundancy({text: jkv.analyze(["a b c\n\na b c"])}),
    ]
    for figure in figures:
        assert png_of(figure).startswith(b"\x89PNG")
        assert max(figure.get_size_inches()) < 20
    drawn = {found.get_text() for found in figures[0].findobj(lambda artist: hasattr(artist, "get_text"))}
    assert max(map(len, drawn)) < 130


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_one_cell(name):
    lines = markdown(["policy", "figure"], [[NAMES[name], 1]]).split("\n")
    assert len(lines) == 3
    assert lines[2].isprintable()
    assert lines[2].replace("\\|", "").count("|") == 3
    assert "\\\\|" not in lines[2]  # two backslashes are one, and the pipe would divide
    assert "<s" not in lines[2]
    assert len(lines[2]) < 10_000


def test_a_cell_shows_what_it_hides():
    assert cell("a\u202e\U000e0041\u00ad") == "a&lt;U+202E><U+E0041><U+00AD>".replace("><", ">&lt;")
    assert cell("1 < 2 > 1 <= 3") == "1 < 2 > 1 <= 3"
    assert plain("$5") == "\\$5"


class Tokenizer:
    """Every token is one text."""

    def __init__(self, text):
        self.text = text

    def decode(self, tokens, skip_special_tokens=False):
        return self.text * len(tokens)


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if len(text) < 20_000])
def test_a_page_of_any_text_is_text(evicting, name, tmp_path):
    page = jkv.viz.kept(dataclasses.replace(evicting, tokenizer=Tokenizer(TEXTS[name])), title=TEXTS[name])
    page.save(tmp_path / "kept.html")
    assert page.html.count("<script") == 2
    assert "<img" not in page.html
    assert len(records_of(page)[0]["pieces"]) == len(evicting.prompts[0]) + evicting.lengths[0]
