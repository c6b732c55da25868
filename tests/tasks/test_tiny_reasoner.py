"""The shipped model reasons, and the figures written about it are those of its evaluation."""

import importlib.resources
import json
import re
from pathlib import Path

import numpy as np
import pytest

import jkv
from jkv.model.params import count_weights
from jkv.statistics import wilson
from jkv.tasks import evaluate as tasks
from jkv.tasks.chains import DOUBTS
from jkv.tasks.evaluate import MARKS, PAGE, describe, evaluate, held_out

ROOT = Path(__file__).parents[2]
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
    return tasks.solve(reasoner, held_out(32), jkv.full(), progress=False)


def test_it_solves_as_many_unseen_problems_as_recorded(reasoner, recorded, solved, monkeypatch):
    monkeypatch.setattr(tasks, "solve", lambda model, problems, policy, **options: solved)
    result = evaluate(reasoner, held_out(32))
    assert (result["right"], result["finished"]) == (sum(solved[1]), {"stop": 32})
    assert wilson(result["right"], 32, level=0.9973)[1] >= recorded["accuracy"]


def test_the_second_one_solves_as_many_unseen_trails_as_recorded():
    recorded = json.loads((ASSET.parent / "tiny-reasoner-2" / "evaluation.json").read_text())
    assert (recorded["problems"], recorded["right"]) == (500, 500)
    model = jkv.load("tiny-reasoner-2")
    result = evaluate(model, held_out(16, tokenizer=model.tokenizer), progress=False)
    assert (result["right"], result["finished"]) == (16, {"stop": 16})


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
