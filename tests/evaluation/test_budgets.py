"""Budgets as users write them, and what they come to for each problem."""

import numpy as np
import pytest

from jkv import r_kv
from jkv.checkpoints import loading as checkpoint
from jkv.engine.clocks import COMPILING
from jkv.evaluation import compare as bench
from jkv.evaluation.budgets import Budget, least_policy, parse_budget
from jkv.evaluation.generations import read_records, run
from jkv.evaluation.held_out import held_out
from jkv.evaluation.problems import Problem

KNOBS = {"max_new_tokens": 96, "max_running": 4, "page_size": 4, "progress": False}


@pytest.fixture(scope="module")
def reasoner():
    return checkpoint.load("tiny-reasoner")


@pytest.fixture(scope="module")
def problems():
    return [Problem(problem.prompt, problem.answer) for problem in held_out(6, seed=3)]


@pytest.mark.parametrize("budget", ["0%", "101%", "abc", "-3", "0", "1.5", "25% all", "25 each", "each", "nan%"])
def test_a_budget_is_a_number_of_slots_or_a_share(budget):
    with pytest.raises(ValueError, match="a number of slots, bytes of a row such as"):
        parse_budget(budget)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (64, Budget(slots=64)),
        (" 64 ", Budget(slots=64)),
        ("25%", Budget(share=0.25)),
        ("12.5 % each", Budget(share=0.125, is_each=True)),
        ("25%each", Budget(share=0.25, is_each=True)),
        (" 64 MB ", Budget(num_bytes="64 MB")),
    ],
)
def test_a_budget_is_read_as_it_is_written(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize("prompt", [0, 30, 100])
@pytest.mark.parametrize("slots", [0, 1, 7, 8, 40, 200])
def test_the_least_policy_is_the_first_that_is_accepted(slots, prompt):
    def make(budget):
        return r_kv(budget, window=8, protect_prompt=True)

    budgets = range(max(1, slots), 300)
    first = next(budget for budget in budgets if budget >= 8 + prompt)  # the window, and the prompt that is never dropped
    assert least_policy(make, slots, prompt) == make(first)


@pytest.fixture(scope="module")
def outcomes(reasoner, problems, tmp_path_factory):
    folder = tmp_path_factory.mktemp("each")
    settings = {"r_kv": {"interval": 16, "window": 40}}
    return bench.compare(reasoner, problems, ["r_kv", "quest"], ["50% each"], settings, generations=folder, **KNOBS), folder


def test_each_problem_has_a_share_of_its_own_length(reasoner, problems, outcomes):
    (base, evicting, reading), folder = outcomes
    lengths = [len(reasoner.tokenizer.encode(problem.prompt)) for problem in problems]
    lengths = [prompt + new for prompt, new in zip(lengths, base.lengths, strict=True)]
    wanted = [round(0.5 * length) for length in lengths]
    assert len(set(wanted)) > 1
    for one in (evicting, reading):
        file = folder / f"{one.policy}-50%-each.jsonl"
        written = {record["problem"]: record["budget"] for record in read_records(file)}
        assert [written[i] for i in range(6)] == wanted
        assert (one.is_each, one.share, one.num_raised) == (True, 0.5, 0)
        assert one.budget == round(np.mean(wanted))
        assert bench.budget_cell(one) == f"{one.budget} (50% each)"
        assert set(one.touched_each) == {"1"}


def test_a_share_below_the_least_budget_is_raised_and_counted(reasoner, problems, outcomes):
    base = outcomes[0][0]
    settings = {"r_kv": {"interval": 16, "window": 40}}
    lengths = [len(reasoner.tokenizer.encode(p.prompt)) + new for p, new in zip(problems, base.lengths, strict=True)]
    below = sum(round(0.3 * length) < 40 for length in lengths)
    assert 0 < below < 6
    _, one = bench.compare(reasoner, problems, ["r_kv"], ["30% each"], settings, known=[base], **KNOBS)
    assert one.num_raised == below
    assert one.budget == round(np.mean([max(40, round(0.3 * length)) for length in lengths]))
    assert bench.budget_cell(one) == f"{one.budget} (30% each, the least for {below})"
    assert f"| {one.budget} (30% each, the least for {below}) |" in bench.table([one])


def test_other_budgets_compile_nothing(reasoner, problems):
    sizes = KNOBS | {"max_slots": 256, "num_pages": 4096}
    for first in (40, 61):
        before = COMPILING.count
        run(reasoner, problems, [r_kv(first + 3 * i, interval=16) for i in range(6)], **sizes)
    assert COMPILING.count == before


def test_an_interrupted_run_of_many_budgets_goes_on(reasoner, problems, tmp_path):
    policies = [r_kv(40 + i, interval=16) for i in range(6)]
    whole = run(reasoner, problems, policies, path=tmp_path / "whole", **KNOBS)
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    (tmp_path / "part").write_text("".join(lines[:2]))
    assert run(reasoner, problems, policies, path=tmp_path / "part", **KNOBS).lengths.tolist() == whole.lengths.tolist()
    with pytest.raises(ValueError, match="same problems and policy; line 1 is of others"):
        run(reasoner, problems, policies[::-1], path=tmp_path / "part", **KNOBS)
