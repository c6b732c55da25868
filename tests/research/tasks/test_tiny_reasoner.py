"""The shipped model reasons, and the figures written about it are those of its evaluation."""

import importlib.resources
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import jkv
from jkv.evaluation.chains import DOUBTS
from jkv.evaluation.held_out import held_out, solve
from jkv.model.params import count_weights
from jkv.statistics import wilson
from research.tasks import accuracy, problems
from research.tasks.accuracy import MARKS, PAGE, describe, evaluate
from research.tasks.problems import problems_of

ROOT = Path(__file__).parents[3]
SECOND = ROOT / "research" / "assets" / "tiny-reasoner-2"
ASSET = importlib.resources.files("jkv") / "assets" / "tiny-reasoner"


@pytest.fixture(scope="module")
def reasoner():
    return jkv.load("tiny-reasoner")


@pytest.fixture(scope="module")
def recorded():
    return json.loads((ASSET / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def solved(reasoner):
    """Greedy completions of unseen problems, and which are right."""
    return solve(reasoner, held_out(32), jkv.full(), progress=False)


def test_it_solves_as_many_unseen_problems_as_recorded(reasoner, recorded, solved, monkeypatch):
    monkeypatch.setattr(accuracy, "solve", lambda model, problems, policy, **options: solved)
    result = evaluate(reasoner, held_out(32))
    assert (result["right"], result["finished"]) == (sum(solved[1]), {"stop": 32})
    assert wilson(result["right"], 32, level=0.9973)[1] >= recorded["accuracy"]


def test_the_second_one_solves_as_many_unseen_trails_as_recorded():
    recorded = json.loads((SECOND / "evaluation.json").read_text())
    assert (recorded["problems"], recorded["right"]) == (500, 500)
    model = jkv.load(SECOND)
    result = evaluate(model, problems_of(model.tokenizer, 16), progress=False)
    assert (result["right"], result["finished"]) == (16, {"stop": 16})


def test_the_second_one_is_not_in_the_package_and_the_error_says_where_it_is():
    with pytest.raises(FileNotFoundError, match="give the folder research/assets/tiny-reasoner-2"):
        jkv.load("tiny-reasoner-2")


def test_its_problems_are_a_data_set(tmp_path, monkeypatch):
    file = tmp_path / "trails.jsonl"
    monkeypatch.setattr(sys, "argv", ["problems", "--model", str(SECOND), "--problems", "3", "--out", str(file)])
    problems.main()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    own = problems_of(jkv.load(SECOND).tokenizer, 3)
    assert rows == [{"prompt": one.prompt, "answer": one.answer} for one in own]
    assert len({row["prompt"] for row in rows}) == 3


def test_it_thinks_thought_by_thought_and_doubts_itself(solved):
    out, _ = solved
    for text in out.text:
        assert re.fullmatch(r"<think>\n\n.*\n\n</think>\n\n\\boxed\{[a-z]=\d\}", text, flags=re.DOTALL)
    assert any(doubt in text for text in out.text for doubt in DOUBTS)
    assert out.finish_reason == ["stop"] * 32


def test_the_page_of_results_holds_what_was_recorded(recorded):
    assert recorded["problems"] == 500
    assert recorded["accuracy"] >= 0.95
    page = (ROOT / PAGE).read_text()
    assert page.split(MARKS[0])[1].split(MARKS[1])[0].strip() == describe(recorded)


def test_it_is_small_and_grouped(reasoner):
    assert reasoner.config.group_size == 2
    assert sum(file.stat().st_size for file in ASSET.iterdir()) < 16e6
    page = (ROOT / "docs" / "models.md").read_text()
    assert f"{count_weights(reasoner.params) / 1e6:.1f} million weights" in page


def test_a_compressed_cache_replays_exactly_on_real_text(reasoner):
    prompts = [problem.prompt for problem in held_out(3, seed=6)]
    policy = jkv.r_kv(budget=128, interval=16, window=4)
    out = jkv.generate(reasoner, prompts, policy=policy, page_size=4, return_trace=True, progress=False)
    assert out.stats.evicted > 0
    difference = np.abs(np.asarray(jkv.score(reasoner, out, trace=out.trace).logprobs) - out.logprobs)
    assert np.percentile(difference, 99) <= 1e-5
    assert difference.max() <= 1e-4
