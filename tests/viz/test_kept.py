"""The page of kept tokens: what is in it is what the trace says, and no text of it is markup."""

import dataclasses
import html
import re

import numpy as np
import pytest

import jkv
from jkv.replay.score import Trace
from jkv.viz import moments
from tests.viz.pages import counts_of, records_of, recount

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'`;alert(1)//",
    "\u2028\u2029",
    "<!--data--><!--script--><!-- <script>",
    "${alert(1)} {{7*7}} %(x)s \\u003c \\1",
    "&lt;b&gt;",
    "\n\n",
]


class HostileTokenizer:
    """Each token says something that a page could stumble over."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(HOSTILE[int(token) % len(HOSTILE)] for token in tokens)


@pytest.mark.parametrize("sample", [0, 1])
def test_every_moment_is_what_the_trace_says(evicting, sample):
    (record,) = records_of(jkv.viz.kept(evicting, sample))
    assert (record["group_size"], record["stops"], record["comes_back"]) == (1, None, False)
    total = len(record["ids"])
    for position in range(record["prompt"] - 1, total):
        assert (counts_of(record, position) == recount(evicting, position, sample)).all()


def test_pages_that_come_and_go_are_what_the_trace_says(choosing):
    (record,) = records_of(jkv.viz.kept(choosing))
    assert record["comes_back"]
    assert record["again"] == record["replaced"] == []
    for position in range(record["prompt"] - 1, len(record["ids"])):
        assert (counts_of(record, position) == recount(choosing, position)).all()


def test_large_traces_are_exact_by_layer_at_fewer_moments(evicting, monkeypatch):
    for name, value in {"MAX_CELLS": 0, "MAX_TICKS": 3}.items():
        monkeypatch.setattr(moments, name, value)
    (record,) = records_of(jkv.viz.kept(evicting))
    assert record["group_size"] == 2
    assert len(record["stops"]) == len(record["ticks"]) == 3
    assert (record["stops"][0], record["stops"][-1]) == (record["prompt"] - 1, len(record["ids"]) - 1)
    for stop in record["stops"]:
        by_layer = recount(evicting, stop).reshape(2, 2, -1).sum(axis=1)
        assert (counts_of(record, stop) == by_layer).all()


def test_changes_that_are_too_many_are_fewer_where_moments_are(choosing, monkeypatch):
    for name, value in {"MAX_CHANGES": 150, "MIN_TICKS": 4, "MAX_TICKS": 16}.items():
        monkeypatch.setattr(moments, name, value)
    (record,) = records_of(jkv.viz.kept(choosing))
    assert 4 <= len(record["stops"]) < 16
    for stop in record["stops"]:
        assert (counts_of(record, stop) == recount(choosing, stop)).all()


def test_the_end_is_what_the_engine_counted(evicting):
    left = 0.0
    for sample, record in enumerate(records_of(jkv.viz.kept(evicting, sample=None))):
        assert record["sample"] == sample
        assert record["ids"] == [*evicting.prompts[sample].tolist(), *evicting.tokens[sample].tolist()]
        left += len(record["ids"]) - counts_of(record, len(record["ids"]) - 1).sum() / 4
        assert record["slot_bytes"] == 2 * 8 * 4  # keys and values of eight float32 channels
    assert left == evicting.stats.evicted


def test_shared_pages_show_with_what_stands_for_them(sharing):
    (record,) = records_of(jkv.viz.kept(sharing))
    for position in range(4, 17):
        assert (counts_of(record, position) == recount(sharing, position)).all()
    assert record["replaced"] == [8, 9, 12, 13]
    assert sorted(record["again"]) == [[6, 11, 17], [6, 15, 17], [7, 11, 17], [7, 15, 17]]  # kept in some head to the end
    assert not record["comes_back"]


def test_texts_are_never_markup(evicting):
    out = dataclasses.replace(evicting, tokenizer=HostileTokenizer())
    page = jkv.viz.kept(out, title="</title><script>alert(1)</script>")
    scripts = re.findall(r"<script([^>]*)>", page.html)
    assert scripts == [' type="application/json" id="data"', ""]  # the data, then the page's own
    assert "<img" not in page.html
    assert page.html.count("<title>&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;</title>") == 1
    assert not set("<>&\u2028") & set(re.findall(r'id="data">(.*)</script>', page.html)[0])
    (record,) = records_of(page)
    assert set(record["pieces"]) <= {text.replace("\u2028\u2029", "<U+2028><U+2029>") for text in HOSTILE}
    assert record["pieces"][0] == HOSTILE[int(out.prompts[0][0]) % len(HOSTILE)]
    frame = page._repr_html_()
    assert frame.count("<") == frame.count(">") == 2  # of the frame: all of its document is one attribute
    assert html.unescape(re.findall(r'srcdoc="([^"]*)"', frame)[0]) == page.html


def test_a_page_needs_nothing_else(evicting, tmp_path):
    path = tmp_path / "kept.html"
    jkv.viz.kept(evicting).save(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|fetch\(|import\(|https?:""", text)
    assert "default-src 'none'" in text
    assert "<!--" not in text  # nothing left to fill in


def test_without_a_tokenizer_tokens_are_ids(evicting):
    (record,) = records_of(jkv.viz.kept(dataclasses.replace(evicting, tokenizer=None)))
    assert record["pieces"] == [str(token) for token in record["ids"]]
    assert not record["is_text"]


@pytest.mark.parametrize(("policy", "most"), [("compacting", 1.5e6), ("each step", 3e6)])
def test_ten_thousand_tokens_of_a_large_model_fit_into_a_few_megabytes(evicting, policy, most):
    rng, total, prompt = np.random.default_rng(0), 10_000, 100
    own = np.broadcast_to(np.arange(total, dtype=np.int32), (1, 16, 8, total))
    end = own + rng.geometric(1 / 512, own.shape)
    if policy == "compacting":  # ends where a compaction is due
        end = prompt + 128 * np.maximum(1, -(-(end - prompt) // 128))
    end = np.where(end < total, np.maximum(end, prompt), 2**31 - 1).astype(np.int32)
    tokens = rng.integers(0, 32, (1, total), dtype=np.int32)
    out = dataclasses.replace(
        evicting,
        trace=Trace.of(own, own, end),
        prompts=[tokens[0, :prompt]],
        tokens=tokens[:, prompt:],
        lengths=np.array([total - prompt]),
    )
    page = jkv.viz.kept(out)
    (record,) = records_of(page)
    assert record["group_size"] == 8
    assert len(page.html) < most  # of half the layers of a model of 32


@pytest.mark.parametrize(
    ("change", "sample", "words"),
    [
        ({"trace": None}, 0, "Call generate with return_trace=True"),
        ({}, 2, r"sample must lie in \[0, 2\).*got 2"),
        ({}, -1, "got -1"),
        ({}, [], "at least one sample"),
    ],
)
def test_what_cannot_be_drawn_is_refused(evicting, change, sample, words):
    with pytest.raises(ValueError, match=words):
        jkv.viz.kept(dataclasses.replace(evicting, **change), sample)
