"""What is shown of results, statistics, policies, engines, models and plans: one screen, and no markup of a text."""

import dataclasses
import pickle
import re

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
