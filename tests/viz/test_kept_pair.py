"""Two results on one page: each panel is what it would be alone, under the names and limits of its policy."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv.viz import moments
from tests.viz.pages import counts_of, data_of, records_of, recount


def test_each_panel_is_what_its_own_trace_says(evicting, sliding):
    page = jkv.viz.kept([evicting, sliding], sample=None)
    assert len(data_of(page)["panels"]) == 2
    for panel, out in enumerate((evicting, sliding)):
        for sample, record in enumerate(records_of(page, panel)):
            assert record["ids"] == [*out.prompts[sample].tolist(), *out.tokens[sample, : out.lengths[sample]].tolist()]
            for position in range(record["prompt"] - 1, len(record["ids"])):
                assert (counts_of(record, position) == recount(out, position, sample)).all()


def test_a_panel_is_the_same_alone(evicting, sliding):
    both = data_of(jkv.viz.kept([evicting, sliding], 1))["panels"]
    assert both == [data_of(jkv.viz.kept(out, 1))["panels"][0] for out in (evicting, sliding)]


def test_panels_have_the_names_and_limits_of_their_policies(evicting, sliding, choosing, keeping):
    def heads(outs):
        return [(record["name"], record["limit"]) for (record,) in data_of(jkv.viz.kept(outs))["panels"]]

    assert heads(evicting) == [("r_kv", "budget 16")]
    assert heads([evicting, sliding]) == [("r_kv", "budget 16"), ("streaming_llm", "budget 12")]
    assert heads([choosing, keeping]) == [("quest", "reads up to 12"), ("full", "no budget")]
    assert heads({"a\x1b": evicting, "x" * 100: evicting}) == [("a␛", "budget 16"), ("x" * 59 + "…", "budget 16")]
    assert heads([evicting, evicting]) == [("r_kv", "budget 16")] * 2


@pytest.mark.parametrize("sample", [0, 1])
def test_a_page_opens_at_the_first_eviction(evicting, sliding, keeping, sample):
    for out in (evicting, sliding):
        (record,) = records_of(jkv.viz.kept(out, sample))
        last = len(record["ids"]) - 1
        lost = [p for p in range(record["prompt"] - 1, last + 1) if recount(out, p, sample).sum() < 4 * (p + 1)]
        assert record["first"] == lost[0]
        assert record["prompt"] - 1 < record["first"] < last
    assert records_of(jkv.viz.kept(keeping))[0]["first"] is None


def test_a_prompt_beyond_the_budget_is_evicted_right_after_it(reasoner):
    prompt = np.arange(1, 25, dtype=np.int32).tolist()
    policy = jkv.streaming_llm(budget=12, interval=4)
    out = jkv.generate(reasoner, prompt, policy=policy, max_new_tokens=6, return_trace=True, page_size=4, progress=False)
    (record,) = records_of(jkv.viz.kept(out))
    assert record["first"] == record["prompt"] == 24


def test_what_is_first_shared_or_not_read_is_a_loss(sharing, choosing):
    assert records_of(jkv.viz.kept(sharing))[0]["first"] == 11
    (record,) = records_of(jkv.viz.kept(choosing))
    lost = [p for p in range(record["prompt"] - 1, len(record["ids"])) if not recount(choosing, p)[:, : p + 1].all()]
    assert record["first"] == lost[0]


def test_panels_keep_heads_apart_together(evicting, sliding, monkeypatch):
    cells = [4 * (len(out.prompts[0]) + int(out.lengths[0])) for out in (evicting, sliding)]
    assert cells[1] < cells[0]
    monkeypatch.setattr(moments, "MAX_CELLS", cells[1])
    assert [record["group_size"] for (record,) in data_of(jkv.viz.kept([evicting, sliding]))["panels"]] == [2, 2]
    assert records_of(jkv.viz.kept(sliding))[0]["group_size"] == 1


def narrowed(out):
    """The same result with one KV head a layer."""
    return dataclasses.replace(
        out, trace=out.trace.replace(**{field: getattr(out.trace, field)[:, :, :1] for field in ("source", "begin", "end")})
    )


@pytest.mark.parametrize(
    ("change", "sample", "words"),
    [
        (lambda out: dataclasses.replace(out, trace=None), 0, "Call generate with return_trace=True"),
        (lambda out: dataclasses.replace(out, prompts=out.prompts[::-1]), 1, "the prompts of sample 1 differ"),
        (lambda out: dataclasses.replace(out, lengths=out.lengths[:1]), None, "same number of samples; got 2 and 1"),
        (narrowed, 0, r"same layers and KV heads; got \(2, 2\) and \(2, 1\)"),
    ],
    ids=["no trace", "other prompts", "fewer samples", "other heads"],
)
def test_results_that_cannot_be_compared_are_refused(evicting, change, sample, words):
    with pytest.raises(ValueError, match=words):
        jkv.viz.kept([evicting, change(evicting)], sample)


@pytest.mark.parametrize("count", [0, 3])
def test_a_page_has_one_panel_or_two(evicting, count):
    with pytest.raises(ValueError, match=f"one result, or 2 side by side; got {count}"):
        jkv.viz.kept([evicting] * count)


def test_two_results_that_are_not_a_list_are_refused(evicting):
    with pytest.raises(ValueError, match=r"Write jkv.viz.kept\(\[one, other\]\)"):
        jkv.viz.kept(evicting, evicting)
