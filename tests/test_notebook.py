"""What is shown of results, statistics, policies, engines, models and plans: one screen, and no markup of a text."""

import dataclasses
import pickle
import re

import jax
import pytest

import jkv

HOSTILE = "</pre><script>alert(1)</script>"


@pytest.fixture(scope="module")
def out(model):
    return jkv.generate(model, [[1, 2, 3]] * 7, max_new_tokens=2, stop_ids=(), progress=False)


@pytest.fixture(scope="module")
def engine(model):
    return jkv.Engine(dataclasses.replace(model, name=HOSTILE), max_running=2, max_slots=64, page_size=4)


def test_each_fits_a_screen_and_is_text(out, engine):
    shown = [
        dataclasses.replace(out, text=[HOSTILE] * 7),
        out.stats,
        jkv.r_kv(64),
        engine,
        engine.model,
        jkv.plan("r1-llama-8b", "h200"),
    ]
    for one in shown:
        assert len(repr(one).splitlines()) <= 45, one
        page = one._repr_html_()
        assert "<script" not in page
        assert len(re.findall(r"<(table|pre)\b", page)) == 1, page
    assert "&lt;script" in shown[0]._repr_html_()
    assert repr(shown[0]).splitlines()[-1] == "  ..."  # seven samples


def test_arrays_are_shown_by_their_shapes(model):
    out = jkv.generate(model, [1, 2, 3], max_new_tokens=4, stop_ids=(), return_trace=True, progress=False)
    assert repr(out.trace) == "Trace(1 sample, 2 layers, 2 KV heads, 7 columns)"
    assert repr(jkv.score(model, out)) == "Scores(logprobs: float32 [1, 4])"
    assert re.fullmatch(r"Params\(2 layers, [\d,]+ weights in \d+ leaves, float32\)", repr(model.params))
    assert repr(jax.tree.map(lambda leaf: "model", model.params)).endswith("leaves, str)")


def test_a_line_of_statistics_says_only_what_there_is(out, model):
    assert "seed" not in out.stats.summary  # greedy
    assert "in whole pages, of which a full cache's tokens fill" in out.stats.summary
    sampling = jkv.Sampling(seed=5)
    drawn = jkv.generate(model, [[1] * 90], jkv.streaming_llm(16), sampling, max_new_tokens=2, stop_ids=(), progress=False)
    assert "in 1 compaction;" in drawn.stats.summary
    assert drawn.stats.summary.endswith("; seed 5")
    less = dataclasses.replace(drawn.stats, peak_kv_bytes=600, dense_kv_bytes=1000)
    assert less.summary.startswith("peak KV 600 B of a full cache's 1 kB (40% saved); ")
    assert repr(drawn).startswith("Result of 1 sample; ")


def test_an_engine_says_what_it_holds_and_waits_for(engine):
    assert "pages of 4 slots" in repr(engine)
    engine.submit([1, 2], max_new_tokens=2)
    assert "requests: 1; samples: 0 running, 1 waiting" in repr(engine)
    engine.sleep()
    assert "asleep" in repr(engine)
    engine.wake()
    engine.run()
    assert "so far: 2 tokens" in repr(engine)


def test_a_policy_is_shown_as_it_was_typed_and_compared_by_what_it_does():
    typed = jkv.r_kv(64, interval=8)
    assert repr(typed) == "r_kv(budget=64, interval=8)"
    assert repr(jkv.chain(jkv.reason_cache(), typed)) == f"chain(reason_cache(), {typed})"

    def key_norm(view):
        return view.key[..., 0]

    mine = jkv.evict_by(key_norm, 48, sinks=4)
    assert repr(mine) == "evict_by(key_norm, budget=48, interval=128, sinks=4)"
    longer = jkv.r_kv(budget=64, interval=8, window=8)
    assert (typed, hash(typed), typed.definition) == (longer, hash(longer), longer.definition)
    assert repr(pickle.loads(pickle.dumps(typed))) == repr(typed)
    changed = dataclasses.replace(typed, name="other")
    assert repr(changed) == changed.definition  # nobody typed this one
    assert "Every(budget=64, interval=8)" in changed.definition
