"""Students that live in their budget: a second start goes on, the report, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest

from jkv.testing import TINY, tiny_model
from research.tasks import distill
from research.tasks.vocabulary import make_tokenizer

SMALL = {"prompts": 2, "definitions": [3, 3], "top": 4, "max_new_tokens": 24, "checkpoint_every": 1, "problems": 2, "unseen": 2}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A lesson of two steps for a model of random weights."""
    model = tiny_model(config=dataclasses.replace(TINY, vocab_size=96, max_positions=160), tokenizer=make_tokenizer())
    monkeypatch.setattr(distill, "load", lambda name, joined: model)
    path = tmp_path / "lesson.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in (SMALL | {"steps": 2, "learning_rate": 1e-3}).items()]
    path.write_text("\n".join(['policy = "streaming_llm"', "settings = { interval = 4 }", "budgets = [12, 16]", *lines]))
    return path


def test_a_student_learns_and_a_second_start_goes_on(config, tmp_path, capsys):
    def run(*words):
        folders = ["--checkpoints", str(tmp_path / "checkpoints"), "--out", str(tmp_path / "out")]
        assert distill.main([str(config), *folders, *words]) == 0
        return json.loads((tmp_path / "out" / "lesson.json").read_text())["runs"][0]

    first = run("--steps", "1")
    both = run()
    assert both["steps"][:1] == first["steps"]
    assert [step["budget"] for step in both["steps"]] == [12, 16]
    assert all(step["kl"] > 0 for step in both["steps"])
    before, after = both["evaluations"][0], both["evaluations"][-1]
    assert (before["step"], after["step"]) == (0, 2)
    assert before["12"]["divergence"] != after["12"]["divergence"]
    assert 0 <= after["full"]["right"] <= 1
    assert "taught by its own full cache (forward, 4 tokens), under streaming_llm at 12 and 16 slots" in capsys.readouterr().out
    config.write_text(config.read_text() + '\nkind = "reverse"\n')
    assert distill.main([str(config), "--checkpoints", str(tmp_path / "checkpoints")]) != 0
    assert "another run, by kind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('kind = "backward"', "kind must be one of forward, reverse, sampled"),
        ("seeds = []", "seeds must be at least one"),
        ("steps = 0", "steps must be at least 1"),
        ("budget = 8", "A lesson has .*has budget"),
        ("budgets = [0]", "budget must"),
    ],
)
def test_what_makes_no_lesson_is_refused(tmp_path, line, words):
    text = 'policy = "r_kv"\nsettings = {}\n' + ("" if line.startswith("budgets") else "budgets = [32]\n")
    (tmp_path / "lesson.toml").write_text(text + line)
    with pytest.raises(ValueError, match=words):
        distill.read_lesson(tmp_path / "lesson.toml")


def test_the_table_compares_first_and_last_seed_by_seed():
    runs = [
        {"evaluations": [{"step": 0, "full": {"right": 1.0}, "32": {"divergence": 2.0 + seed, "right": 0.0}},
                         {"step": 9, "full": {"right": 0.9}, "32": {"divergence": 1.0 + seed, "right": 0.5}}]}
        for seed in range(3)
    ]  # fmt: skip
    whole, small = distill.rows_of(runs)
    assert whole == ["full", "", "", "", "1.000", "0.900 ± 0.000", "-0.100 ± 0.000"]
    assert small[:1] == ["32"]
    assert small[3:] == ["-1.000 ± 0.000", "0.000", "0.500 ± 0.000", "+0.500 ± 0.000"]
    assert np.isclose(float(small[1]), 3.0)
