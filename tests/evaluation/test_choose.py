"""`jkv choose`: losses are the probe's, ties and budgets follow from intervals, bad input is refused before it compiles."""

import dataclasses
import json

import numpy as np
import pytest

import jkv
from jkv import cli
from jkv.cache.slot_size import slot_size_of
from jkv.evaluation import choose as module
from jkv.evaluation.choose import BASELINE, Choice, Row, choose, ranked, ranked_names
from jkv.evaluation.probe import decode
from jkv.testing import tiny_model

LONG = "b=3;c=7;d=b*c;" * 400
ASKED = [("b=3;c=7;d=b*c;?d", "d=1"), ("x=4;y=9;z=x-y;?z", "z=5")]


def made(*losses, tolerance=0.05, slot=None):
    """A choice among policies with these losses: (name, budget, losses of the texts)."""
    rows = [Row(name, jkv.POLICIES[name](budget=budget), budget, np.array(loss)) for name, budget, loss in losses]
    return Choice("a model", slot, [64, 64, 64], 1.0, tolerance, ranked(rows), [])


@pytest.fixture
def fake_decode(monkeypatch):
    """Losses by policy and budget, without a model that runs: 0.01 nats for LagKV and a nat for any other, at 32 slots, and a
    half, a quarter ... of that with more. Each text has a little more than the text before.
    """
    seen = []

    def decode(model, probes, policy, options):
        each = policy if isinstance(policy, list) else [policy] * len(probes)
        seen.append((each[0].name, len(probes)))
        loss = {"full": 0.0, "lag_kv": 0.01}
        texts = len({tuple(one.prompt + one.rest) for one in probes})
        found = [
            -2 - loss.get(one.name, 1.0) * 32 / (one.budget or 32) * (1 + i % texts / 100) if one.name != "full" else -2.0
            for i, one in enumerate(each)
        ]
        return found, 0.0, 1.0

    monkeypatch.setattr(module, "decode", decode)
    return seen


def test_losses_are_those_of_the_probe_and_the_choice_answers_the_problems(reasoner):
    found = choose(reasoner, problems=ASKED, policies=["streaming_llm"], budgets=["50%", 48], max_new_tokens=200)
    texts = [one for one in found.rows if one.name == "streaming_llm"]
    assert [one.budget for one in texts] == [round(0.5 * np.mean(found.lengths)), 48]
    out = jkv.generate(reasoner, [prompt for prompt, _ in ASKED], max_new_tokens=200)
    probes = module.probes_of_answers(out)
    full = np.array(decode(reasoner, probes, jkv.full(), {})[0])
    small = np.array(decode(reasoner, probes, jkv.streaming_llm(budget=48, interval=16), {})[0])
    np.testing.assert_allclose(texts[1].loss, full - small, atol=1e-4)
    assert texts[1].mean > texts[0].mean > 0
    assert found.nats == pytest.approx(-full.mean(), abs=1e-4)
    kept = jkv.generate(reasoner, [prompt for prompt, _ in ASKED], found.policy, max_new_tokens=200)
    right = sum(text.endswith(f"\\boxed{{{answer}}}") for text, (_, answer) in zip(kept.text, ASKED, strict=True))
    assert (found.answers.problems, found.answers.full, found.answers.right) == (2, 2, right)
    assert found.answers.equal == sum(
        kept.tokens[i, : kept.lengths[i]].tolist() == out.tokens[i, : out.lengths[i]].tolist() for i in range(2)
    )


def test_the_smallest_budget_within_the_tolerance_is_chosen():
    found = made(
        ("r_kv", 64, [0.01, 0.02, 0.01]),
        ("lag_kv", 64, [0.02, 0.03, 0.02]),
        ("r_kv", 32, [0.02, 0.06, 0.01]),  # a mean within the tolerance, whose interval is not
        ("lag_kv", 32, [0.2, 0.3, 0.4]),
    )
    assert [(row.name, row.budget) for row in found.best] == [("r_kv", 64), ("r_kv", 32)]
    assert (found.policy, found.budget, found.is_within) == (jkv.r_kv(budget=64), 64, True)
    wider = dataclasses.replace(found, tolerance=0.07)
    assert (wider.budget, wider.is_within) == (32, True)
    strict = dataclasses.replace(found, tolerance=0.001)
    assert (strict.budget, strict.is_within) == (64, False)


def test_a_policy_is_tied_where_the_paired_interval_reaches_zero():
    found = made(
        ("r_kv", 64, [0.1, 0.5, 0.9]),
        ("lag_kv", 64, [0.11, 0.51, 0.91]),  # worse on each text, if only by a little
        ("cur", 64, [0.2, 0.4, 1.0]),
        ("random", 64, [0.3, 0.7, 1.1]),
    )
    assert {row.name: row.is_tied for row in found.rows} == {"r_kv": True, "lag_kv": False, "cur": True, "random": False}


@pytest.mark.parametrize(
    ("best", "said"),
    [
        ([0.1, 0.2, 0.3], None),
        ([0.1, 0.2, 1.5], "With 64 slots, r_kv, the best, is no better than random slots."),
        ([0.9, 1.9, 1.9], "With 64 slots, no policy loses less than random slots."),
    ],
)
def test_a_best_that_does_not_beat_random_slots_is_said(reasoner, best, said):
    found = made(("r_kv", 64, best), ("random", 64, [0.8, 0.8, 0.9]), slot=slot_size_of(reasoner.params))
    assert ("random slots" in str(found)) == (said is not None)
    assert said is None or said in " ".join(str(found).split())


def test_the_line_gives_the_chosen_policy(reasoner, fake_decode):
    found = choose(reasoner, LONG, policies=["lag_kv", "r_kv"], budgets=[96, 48], count=3, length=128)
    assert found.line == "jkv.generate(model, prompts, policy=jkv.lag_kv(budget=48, interval=16))"
    assert eval(found.line.partition("policy=")[2][:-1]) == found.policy
    assert f"    {found.line}" in str(found)
    assert found._repr_html_().startswith("<pre")


def test_a_policy_of_ones_own_is_ranked_and_its_line_names_it(reasoner, fake_decode, tmp_path):
    (tmp_path / "own.py").write_text(
        "import jkv\n\n\ndef mine(budget, interval=64):\n    return jkv.lag_kv(budget, interval)\n"
    )
    name = f"{tmp_path / 'own.py'}:mine"
    found = choose(reasoner, LONG, policies=[name, jkv.lag_kv], budgets=[48], count=3, length=128)
    assert {(row.name, repr(row.policy)) for row in found.rows} == {
        (name, "own.mine(budget=48, interval=16)"),
        ("lag_kv", "lag_kv(budget=48, interval=16)"),
        (BASELINE, "random(budget=48, interval=16)"),
    }
    line = dataclasses.replace(found, rows=[row for row in found.rows if row.name == name]).line
    assert line == "jkv.generate(model, prompts, policy=own.mine(budget=48, interval=16))"
    with pytest.raises(jkv.InputError, match="must free memory by a budget that choose sets; lag_kv does not"):
        choose(reasoner, LONG, policies=[jkv.lag_kv(48)], budgets=[48], count=3, length=128)


def test_each_policy_decodes_all_texts_at_all_budgets_once(reasoner, fake_decode):
    choose(reasoner, LONG, policies=["lag_kv", "r_kv"], budgets=[96, 48], count=3, length=128)
    assert fake_decode == [("full", 3), ("lag_kv", 6), ("r_kv", 6), (BASELINE, 6)]


def test_losses_stay_with_their_text_and_budget(reasoner, fake_decode):
    found = choose(reasoner, LONG, policies=["r_kv"], budgets=[32, 64], count=3, length=128)
    rows = {(row.name, row.budget): row.loss for row in found.rows}
    unique = len(
        {tuple(part) for part in module.passages_of(reasoner.tokenizer.encode(LONG, add_special_tokens=False), 3, 128)}
    )
    np.testing.assert_allclose(rows["r_kv", 32], 2 * rows["r_kv", 64])
    np.testing.assert_allclose(rows["r_kv", 32], [1 + i % unique / 100 for i in range(3)])


def test_memory_is_the_only_budget_in_slots(reasoner, fake_decode):
    whole = slot_size_of(reasoner.params).whole
    found = choose(reasoner, LONG, policies=["lag_kv"], memory=f"{40 * whole + 5}B", count=2, length=128)
    assert {row.budget for row in found.rows} == {40}
    smaller = slot_size_of(reasoner.params, jkv.EngineOptions(kv_dtype="int8").kv_format).whole
    coded = choose(reasoner, LONG, policies=["lag_kv"], memory=f"{20 * whole}B", count=2, length=128, kv_dtype="int8")
    assert coded.budget == 20 * whole // smaller > 40


def test_a_list_of_texts_is_one_observation_each(reasoner, fake_decode):
    found = choose(reasoner, [LONG[:300], LONG[:200], LONG], policies=["lag_kv"], budgets=[32], length=128)
    lengths = [len(reasoner.tokenizer.encode(text, add_special_tokens=False)) for text in (LONG[:300], LONG[:200])]
    assert found.lengths == [min(length, 128) for length in lengths] + [128]


@pytest.mark.parametrize(("field", "value", "reason"), [("sinks", 40, "40"), ("protect_prompt", True, "48 tokens")])
def test_a_policy_that_does_not_fit_a_budget_is_left_out_with_its_reason(reasoner, fake_decode, field, value, reason):
    settings = {"greedy": {"policy": "random", field: value}}
    knobs = {"settings": settings, "budgets": [64, 32], "count": 2, "length": 128, "prompt": 48}
    found = choose(reasoner, LONG, policies=["greedy"], **knobs)
    assert [(row.name, row.budget) for row in found.rows] == [("greedy", 64), (BASELINE, 64), (BASELINE, 32)]
    (said,) = found.left_out
    assert said.startswith("Without greedy at 32 slots: ")
    assert reason in said


def test_all_policies_that_need_no_file_are_ranked_and_those_that_settings_complete():
    names = ranked_names({"foresight": {"network": "tiny-reasoner"}, "short": {"policy": "r_kv", "window": 4}})
    assert {"lag_kv", "r_kv", "h2o", "random", "foresight", "short"} < set(names)
    assert not {"full", "quest", "rpc", "seal", "tri_attention"} & set(names)


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("texts", {"texts": None}, "takes texts or problems; got neither"),
        ("texts", {"problems": ASKED}, "takes texts or problems; got both"),
        ("texts", {"texts": "b=3;"}, "two passages of 512 tokens"),
        ("texts", {"texts": [LONG]}, "two or more"),
        ("texts", {"texts": [LONG, "b"]}, "longer than the prompt"),
        ("texts", {"texts": [LONG, 3]}, "must be"),
        ("problems", {"texts": None, "problems": []}, "two or more"),
        ("prompt", {"prompt": 512}, "below length"),
        ("tolerance", {"tolerance": 0}, "above 0"),
        ("tolerance", {"tolerance": float("nan")}, "above 0"),
        ("count", {"count": 0}, "at least 1"),
        ("policies", {"policies": ["rpc"]}, "free memory"),
        ("policies", {"policies": ["quest"]}, "free memory"),
        ("policy", {"policies": ["r_vk"]}, "Did you mean r_kv?"),
        ("memory", {"memory": "64"}, '"64MB"'),
        ("memory", {"memory": "3B"}, "must hold a slot"),
        ("memory", {"memory": "1GB"}, "nothing is evicted"),
        ("budgets", {"budgets": [4_000]}, "nothing is evicted"),
        ("budgets", {"budgets": []}, "at least one"),
        ("budgets", {"budgets": [20], "policies": [], "settings": {"random": {"sinks": 40}}}, "Without random at 20 slots"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value)),
)
def test_bad_input_is_refused_before_anything_runs(reasoner, monkeypatch, field, given, said):
    monkeypatch.setattr(module, "decode", None)
    monkeypatch.setattr(module, "generate", None)
    with pytest.raises(jkv.InputError, match=said) as caught:
        choose(reasoner, **{"texts": LONG} | given)
    assert caught.value.field == field


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(jkv.InputError, match="model needs a tokenizer"):
        choose(tiny_model(), LONG)


def test_the_command_prints_and_writes_the_choice(tmp_path, capsys, fake_decode):
    (tmp_path / "notes.txt").write_text(LONG)
    words = ["choose", "tiny-reasoner", "--texts", tmp_path / "notes.txt", "--policies", "lag_kv,r_kv", "--budgets", "64,25%"]
    words += ["--length", 128, "--interval", 8, "--out", tmp_path / "out"]
    assert cli.main(list(map(str, words))) == 0
    out = capsys.readouterr().out
    assert "policy=jkv.lag_kv(budget=32, interval=8))" in out
    assert (tmp_path / "out" / "choose-tiny-reasoner.md").read_text() == out
    record = json.loads((tmp_path / "out" / "choose-tiny-reasoner.json").read_text())
    assert record["budget"] == 32
    assert [(row["name"], row["budget"]) for row in record["rows"]][:2] == [("lag_kv", 64), ("r_kv", 64)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--texts", "no.txt"], "no.txt"),
        ([], "texts or problems; got neither"),
        (["--texts", "notes.txt", "--policies", "r_vk"], "Did you mean r_kv?"),
        (["--texts", "notes.txt", "--count", "0"], "count must be at least 1"),
        (["--problems", "notes.txt"], "notes.txt"),
    ],
)
def test_the_command_refuses_bad_input_in_a_line(tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "notes.txt").write_text(LONG)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["choose", "tiny-reasoner", *words]) == 2
    assert said in capsys.readouterr().err
