"""Learning by compressed rollouts, end to end in seconds: it learns, replay is exact, runs resume, and reports say what was."""

import dataclasses
import json
import math
import re
import signal
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

import jkv
from research.grpo import __main__ as grpo
from research.grpo import learner
from research.grpo.course import TASKS, Arm, Course, read_course
from research.grpo.learner import learn
from research.grpo.outcome import by_arm, contrast_rows, final, interval, remarks
from research.tasks import counting

ROOT = Path(__file__).parents[3]
SQUEEZED = jkv.r_kv(budget=16, interval=8, window=4)
SIZES = {"prompts": 4, "samples": 8, "max_new_tokens": 48, "evaluations": 32, "learning_rate": 1e-3}
REPLAY = Arm("r_kv, replayed", SQUEEZED, loss="replay")
COURSE = Course("counting", (REPLAY,), steps=24, evaluate_every=12, checkpoint_every=8, **SIZES)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A short replayed run, unbroken."""
    return learn(COURSE, REPLAY, 0, tmp_path_factory.mktemp("unbroken"))


def test_a_short_run_learns_and_its_ratio_is_exact_before_every_update(learnt):
    _, history = learnt
    first, last = history.evaluations[0]["dense"], history.evaluations[-1]["dense"]
    assert last > 1.5 * first
    assert [at["step"] for at in history.evaluations] == [0, 12, 24]
    assert max(step["ratio_p99"] for step in history.steps) <= 1e-5
    assert max(step["ratio_max"] for step in history.steps) <= 1e-4
    assert max(step["max_difference"] for step in history.steps) > 1e-3  # the dense policy is another
    assert all(step["peak_kv_bytes"] < 0.7 * step["dense_kv_bytes"] for step in history.steps)


def assert_same(one, other):
    """Two runs came to the same, but for how long they took."""
    told = [[{**step, "seconds": 0} for step in history.steps] for _, history in (one, other)]
    assert told[0] == told[1]
    assert one[1].evaluations == other[1].evaluations
    for left, right in zip(jax.tree.leaves(one[0]), jax.tree.leaves(other[0]), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_killed_run_goes_on_from_its_checkpoint_as_an_unbroken_one(learnt, tmp_path, monkeypatch):
    def stop(record):
        seen.append(record)
        if len(seen) == 13:
            raise InterruptedError

    seen = []
    with pytest.raises(InterruptedError):
        learn(COURSE, REPLAY, 0, tmp_path, stop)
    assert len(seen) == 13
    assert_same(learn(COURSE, REPLAY, 0, tmp_path, seen.append), learnt)
    assert len(seen) == 13 + 24 - 8  # from the checkpoint after step 8
    with pytest.raises(ValueError, match="checkpoints of another run, by seed"):
        learn(COURSE, REPLAY, 1, tmp_path)
    with pytest.raises(ValueError, match="holds 24 steps, and 8 are asked for"):
        learn(dataclasses.replace(COURSE, steps=8), REPLAY, 0, tmp_path)
    monkeypatch.setitem(TASKS, COURSE.task, TASKS[COURSE.task]._replace(start=lambda seed: counting.start(seed + 1)))
    with pytest.raises(ValueError, match=r"checkpoints of another run, by start \(start then \{.*'weights'"):
        learn(COURSE, REPLAY, 0, tmp_path)


def test_ctrl_c_loses_no_whole_step(learnt, tmp_path, monkeypatch):
    seen, looks, evaluate = [], [], learner.evaluate

    def hear(record):
        seen.append(record)
        if len(seen) == 5:
            signal.raise_signal(signal.SIGINT)

    def look(*what):
        looks.append(len(seen))
        if looks.count(len(seen)) == 1 and len(seen) in (12, 24):
            signal.raise_signal(signal.SIGINT)
        return evaluate(*what)

    monkeypatch.setattr(learner, "evaluate", look)
    for done in (5, 12, 24):  # after a step, in an evaluation, and in the last one
        with pytest.raises(KeyboardInterrupt):
            learn(COURSE, REPLAY, 0, tmp_path, hear)
        assert len(seen) == done
    assert_same(learn(COURSE, REPLAY, 0, tmp_path, hear), learnt)
    assert (len(seen), [looks.count(step) for step in (0, 12, 24)]) == (24, [2, 3, 3])  # full and own cache; no step again
    assert_same(learn(COURSE, REPLAY, 0, tmp_path, hear), learnt)
    assert len(looks) == 8  # the last evaluation is kept too


def test_fewer_steps_than_were_planned_end_with_an_evaluation(tmp_path):
    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(COURSE, REPLAY, 0, tmp_path, stop)
    _, history = learn(dataclasses.replace(COURSE, steps=1), REPLAY, 0, tmp_path)
    assert [at["step"] for at in history.evaluations] == [0, 1]


@pytest.mark.parametrize(
    ("p99", "most", "said"),
    [
        (9e-6, 9e-5, ""),
        (2e-5, 9e-5, "p99 is 2e-05 nats, above 1e-05"),
        (9e-6, 2e-4, "max is 2e-04 nats, above 1e-04"),
        (2e-5, math.nan, "p99 is 2e-05 nats, above 1e-05; max is nan nats, above 1e-04"),
    ],
)
def test_a_replay_beyond_either_tolerance_is_told_by_name(p99, most, said):
    assert learner.beyond({"difference_p99": p99, "difference_max": most}) == said


def test_a_step_warns_of_a_replay_that_is_off(monkeypatch):
    monkeypatch.setattr(learner, "TOLERANCES", {"p99": 1.0, "max": -1.0})
    with pytest.warns(UserWarning, match="step 0: replay is not exact: max is .* nats, above -1e"):
        learn(dataclasses.replace(COURSE, steps=1), REPLAY, 0)


@pytest.mark.parametrize("loss", ["dense", "bypass"])
def test_other_losses_run_and_say_how_far_they_are_off(loss):
    course = dataclasses.replace(COURSE, steps=3)
    _, history = learn(course, Arm("r_kv", SQUEEZED, loss=loss), 0)
    assert all(math.isfinite(value) for step in history.steps for value in step.values())
    assert min(step["ratio_max"] for step in history.steps) > 1e-3


def test_the_command_reports_what_its_arms_came_to(tmp_path, capsys):
    config = tmp_path / "small.toml"
    config.write_text(
        'task = "counting"\nsteps = 2\nprompts = 4\nsamples = 8\nmax_new_tokens = 48\nevaluations = 32\n'
        'judged_by = "own"\ncontrasts = [["r_kv, replayed", "full"]]\n'
        '[arms.full]\n[arms."r_kv, replayed"]\npolicy = "r_kv"\nloss = "replay"\n'
        "settings = { budget = 16, interval = 8, window = 4 }\n"
    )
    words = [str(config), "--out", str(tmp_path / "out"), "--checkpoints", str(tmp_path / "kept"), "--seeds", "0,1"]
    assert grpo.main(words) == 0
    said = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in said.splitlines() if line.startswith("| ")}
    assert set(rows) == {"arm", "full", "r_kv, replayed", "contrast", "r_kv, replayed - full"}
    assert "2 seeds, 2 updates of 4 prompts times 8 samples" in said
    written = json.loads((tmp_path / "out" / "small.json").read_text())
    assert [(run["arm"], run["seed"]) for run in written["runs"]] == [
        (arm, seed) for seed in (0, 1) for arm in ("full", "r_kv, replayed")
    ]
    replayed = [run for run in written["runs"] if run["loss"] == "replay"]
    assert f"{max(run['ratio_max'] for run in replayed):.1e}" in rows["r_kv, replayed"]
    assert (tmp_path / "out" / "small.md").read_text().strip() == said.strip()
    assert (tmp_path / "out" / "small.png").stat().st_size > 10_000
    before = written["runs"]
    assert grpo.main(words) == 0  # nothing left to do
    assert json.loads((tmp_path / "out" / "small.json").read_text())["runs"] == before


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("task = 'juggling'\n[arms.full]", [], "task must be one of counting, stepping, chains; got 'juggling'"),
        ("task = 'counting'", [], "at least one"),
        ("task = 'counting'\nstep = 3\n[arms.full]", [], "has step. Correct the file"),
        ("task = 'counting'\nsamples = 1\n[arms.full]", [], "at least 2, since a group"),
        ("task = 'counting'\nsteps = 0\n[arms.full]", [], "steps must be at least 1"),
        ("task = 'counting'\n[arms.x]\npolicy = 'x_kv'", [], "policy must be one of"),
        ("task = 'counting'\n[arms.x]\nloss = 'x'", [], "must be one of dense, replay, bypass; x has 'x'"),
        ("task = 'counting'\n[arms.x]\ncorrection = 'x'", [], "mode must be of none"),
        ("task = 'counting'\n[arms.x]\nbudget = 3", [], "x has budget"),
        ("task = 'counting'\n[arms.full]", ["--arms", "y"], "The arms are full; got y"),
        ("task = 'counting'\n[arms.full]", ["--seeds", "a"], "whole numbers"),
        ("task = 'counting'\n[arms.full]", ["--seeds", "0,1,00"], "seeds must differ; got 0 more than once"),
        ("task = 'counting'\n[arms.full]", ["--seeds", "4294967296"], "seeds must lie in [0, 2**32)"),
        ("task = 'counting'\n[arms.full]", ["--arms", "full; full"], "arms must differ; got full more than once"),
        ("task = 'counting'\n[arms.full]", ["--steps", "0"], "steps must be at least 1; got 0"),
        ("task = 'counting'\nseeds = [2, 2]\n[arms.full]", [], "seeds must differ; got 2 more than once"),
        ("task = 'counting'\nseeds = []\n[arms.full]", [], "seeds must be at least one; got none"),
        ("task = 'counting'\nseeds = 3\n[arms.full]", [], "seeds must be a list; got 3"),
        ("task = 'counting'\nseeds = ['a']\n[arms.full]", [], "each of seeds must be a whole number; got 'a'"),
        ("task = 'counting'\nseeds = [-1]\n[arms.full]", [], "seeds must lie in [0, 2**32); got -1"),
        ("task = 'counting'\nsteps = 'x'\n[arms.full]", [], "steps must be a whole number; got 'x'"),
        ("task = 'counting'\nsteps = 1.5\n[arms.full]", [], "steps must be a whole number; got 1.5"),
        ("task = 'counting'\narms = 3", [], "arms must be a table of names and values; got 3"),
        ("task = 'counting'\narms.x = 3", [], "arms.x must be a table of names and values; got 3"),
        ("task = 'counting'\narms.x.settings = 3", [], "arms.x.settings must be a table of names and values; got 3"),
        ("task = 'counting'\narms.x.policy = 3", [], "arms.x.policy must be a text; got 3"),
        ("task = 'counting'\narms.x.loss = []", [], "arms.x.loss must be a text; got []"),
        ("task = 'counting'\nlearning_rate = 'x'\n[arms.full]", [], "learning_rate must be a number; got 'x'"),
        ("task = 'counting'\nlearning_rate = -1.0\n[arms.full]", [], "learning_rate must be above 0 and finite; got -1.0"),
        ("task = 'counting'\nlearning_rate = nan\n[arms.full]", [], "learning_rate must be above 0 and finite; got nan"),
        ("task = 'counting'\ntemperature = 0\n[arms.full]", [], "temperature must be above 0 and finite; got 0"),
        ("task = []\n[arms.full]", [], "task must be a text; got ()"),
        ("task = ", [], "must be a TOML file of a course"),
        ("task = 'counting'\ncontrasts = [['full', 'x']]\n[arms.full]", [], "two of full; got ['full', 'x']"),
        ("task = 'counting'\ncontrasts = [['full', 'full']]\n[arms.full]", [], "a pair of different arms"),
        ("task = 'counting'\ncontrasts = [[['full'], 'x']]\n[arms.full]", [], "a pair of different arms"),
        ("task = 'counting'\ncontrasts = ['full']\n[arms.full]", [], "a pair of different arms"),
        ("task = 'counting'\ncontrasts = 'full'\n[arms.full]", [], "contrasts must be a list; got 'full'"),
        ("task = 'counting'\njudged_by = 'x'\n[arms.full]", [], "judged_by must be one of full, own; got 'x'"),
    ],
)
def test_a_bad_course_is_one_line_and_no_run(text, more, words, tmp_path, capsys):
    config = tmp_path / "bad.toml"
    config.write_text(text)
    assert grpo.main([str(config), "--checkpoints", str(tmp_path / "kept"), *more]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("grpo: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "kept").exists()


def test_a_file_that_is_not_there_is_one_line(tmp_path, capsys):
    assert grpo.main([str(tmp_path / "none.toml")]) == 2
    assert "must be a TOML file of a course" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "experiments").glob("grpo-*.toml")), ids=lambda path: path.stem)
def test_every_shipped_course_is_one(path):
    course = read_course(path)
    assert len({arm.name for arm in course.arms}) == len(tomllib.loads(path.read_text())["arms"])
    longest = course.max_new_tokens + (counting.PROMPT_TOKENS if course.task == "counting" else 0)
    for arm in course.arms:
        assert arm.policy.budget is None or arm.policy.budget < longest / 2, "a budget that never evicts"


@pytest.fixture(scope="module")
def result():
    """Something that was generated, to be given other tokens and texts."""
    return jkv.generate(counting.start(0), [[1]], max_new_tokens=1, progress=False)


def test_counting_pays_for_each_digit_that_is_one_more_than_the_last(result):
    def rewarded(*completions):
        lengths = np.array([len(tokens) for tokens in completions], np.int32)
        tokens = np.zeros((len(completions), lengths.max()), np.int32)
        for i, completion in enumerate(completions):
            tokens[i, : len(completion)] = completion
        return counting.reward(dataclasses.replace(result, tokens=tokens, lengths=lengths)).tolist()

    told = rewarded([1, 2, 3, 5, 6], [9, 10, 11, 12, 13], [8, 9, 0, 1, 2], [4], [15, 0], [0, 1])
    assert told == [0.75, 0, 0.75, 0, 0, 1]


def test_stepping_pays_for_each_digit_that_is_a_step_after_the_last(result):
    prompts, steps = TASKS["stepping"].draw(np.random.default_rng(0), 50)
    assert {prompt[0] - 9 for prompt in prompts} == {1, 2, 3}
    assert steps == [prompt[0] - 9 for prompt in prompts]
    assert max(map(len, prompts)) == TASKS["stepping"].prompt_tokens

    tokens = np.array([[7, 9, 1, 3], [5, 8, 1, 4], [6, 11, 1, 0], [8, 0, 0, 0]], np.int32)
    prompts = [np.array([11, 5]), np.array([12, 5]), np.array([10, 5]), np.array([12, 5])]
    out = dataclasses.replace(result, tokens=tokens, lengths=np.array([4, 4, 3, 1]), prompts=prompts)
    assert TASKS["stepping"].reward(out, [2, 3, 1, 3]).tolist() == [1, 0.75, 1 / 3, 1]


def test_practice_makes_a_model_that_reads_the_step_in_the_prompt():
    course = Course("stepping", (REPLAY,), max_new_tokens=48, evaluations=64)
    model = TASKS["stepping"].start(0)
    assert learner.evaluate(course, model, jkv.full()) > 0.95
    assert learner.evaluate(course, model, jkv.streaming_llm(budget=8, interval=4, sinks=0)) < 0.6  # one of three, at best
    assert learner.evaluate(course, model, jkv.r_kv(budget=8, interval=4, window=4)) > 0.95  # its score finds the step


def test_chains_pay_for_the_right_answer_alone(result):
    prompts, answers = TASKS["chains"].draw(np.random.default_rng(0), 3)
    assert [answer[0] for answer in answers] == [prompt[-1] for prompt in prompts]  # the variable that is asked for
    out = dataclasses.replace(result, text=[f"<think>\n\n</think>\n\n\\boxed{{{answer}}}" for answer in answers])
    assert TASKS["chains"].reward(out, answers).tolist() == [1, 1, 1]
    assert TASKS["chains"].reward(out, [*answers[:2], "z=0"]).tolist() == [1, 1, 0]


def made_up(arm, seed, first, last):
    return {"arm": arm, "seed": seed, "evaluations": [{"dense": first, "own": first}, {"dense": last, "own": last}]}


def test_remarks_say_who_learnt_and_who_is_outside_of_the_interval():
    runs = [made_up("full", seed, 0.1, 0.5 + 0.01 * seed) for seed in range(5)]
    runs += [made_up("r_kv", seed, 0.1, 0.51) for seed in range(5)] + [made_up("h2o", seed, 0.1, 0.19) for seed in range(5)]
    learnt, where = remarks(runs)
    assert learnt == "The final reward with the full cache is above twice the first in every arm but `h2o`."
    assert where.endswith("full cache: r_kv (-0.010); outside of it: h2o (-0.330).")
    assert list(by_arm(runs)) == ["full", "r_kv", "h2o"]
    assert interval([0.50, 0.51, 0.52, 0.53, 0.54]).half == pytest.approx(2.776 * 0.0158 / 5**0.5, rel=1e-2)
    assert math.isnan(interval([0.5]).half)
    assert remarks([made_up("r_kv", 0, 0.9, 0.95)]) == []  # nobody doubles that


def test_contrasts_compare_final_rewards_seed_by_seed():
    runs = [made_up("a", seed, 0.1, last) for seed, last in enumerate((0.5, 0.7, 0.9))]
    runs += [made_up("b", seed, 0.1, last) for seed, last in enumerate((0.4, 0.6, 0.8, 0.0))]  # a has no seed 3 yet
    for run in runs:
        run["evaluations"][-1]["dense"] = 0.5
    rows = contrast_rows(runs, [("a", "b"), ("b", "a"), ("a", "c")])
    assert rows == [
        ["a - b", "+0.100 ± 0.000", "+0.000 ± 0.000", "3 of 3"],
        ["b - a", "-0.100 ± 0.000", "+0.000 ± 0.000", "0 of 3"],
    ]
    assert contrast_rows(runs[:1] + runs[3:4], [("a", "b")]) == [["a - b", "+0.100", "+0.000", "1 of 1"]]


@pytest.mark.parametrize(("judged_by", "last"), [("full", 0.5), ("own", 0.9)])
def test_the_picture_is_of_the_cache_that_judges(judged_by, last, tmp_path, monkeypatch):
    run, drawn = made_up("a", 0, 0.1, 0.9), []
    run["evaluations"] = [dict(at, step=step, dense=0.5) for step, at in enumerate(run["evaluations"])]
    monkeypatch.setattr(grpo.viz, "learning", lambda curves, title: drawn.append((curves, title)))
    monkeypatch.setattr(grpo.record, "write_figure", lambda *_: None)
    monkeypatch.setattr(grpo, "report", lambda *_: "")
    grpo.write(dataclasses.replace(COURSE, judged_by=judged_by), [run], {}, tmp_path, "small")
    ((curves, title),) = drawn
    assert curves["a"][0]["reward"][-1] == last
    assert title.endswith({"full": "with the full cache", "own": "with each arm's own cache"}[judged_by])


def test_a_part_of_a_course_has_the_contrasts_of_its_arms():
    other = dataclasses.replace(REPLAY, name="other")
    course = dataclasses.replace(COURSE, arms=(REPLAY, other), contrasts=(["r_kv, replayed", "other"],))
    assert course.contrasts == (("r_kv, replayed", "other"),)
    assert grpo.narrow(course, "other", None, None).contrasts == ()
    assert course.about(other, 0) == dataclasses.replace(course, contrasts=()).about(other, 0)  # what ran goes on


def assert_policies_teach(folder):
    """What is claimed of learning from compressed rollouts, by what grpo-policies wrote into a folder."""
    written = json.loads((folder / "grpo-policies.json").read_text())
    arms = by_arm(written["runs"])
    assert list(arms) == ["full", "r_kv", "r_kv, replayed", "h2o", "streaming_llm"]
    for runs in arms.values():
        assert [run["seed"] for run in runs] == [0, 1, 2, 3, 4]
        for run in runs:
            evaluations = run["evaluations"]
            assert (run["steps"], evaluations[0]["step"], evaluations[-1]["step"]) == (300, 0, 300)
            assert evaluations[-1]["dense"] > 2 * evaluations[0]["dense"], (
                f"{run['arm']} learnt nothing from seed {run['seed']}"
            )
    for run in arms["r_kv, replayed"]:
        assert run["loss"] == "replay"
        assert 0 < run["ratio_p99"] <= 1e-5
        assert run["ratio_max"] <= 1e-4
    finals = {name: np.array([run["evaluations"][-1]["dense"] for run in runs]) for name, runs in arms.items()}
    half = 2.7764 * finals["full"].std(ddof=1) / 5**0.5  # Student's t of four degrees of freedom, 97.5th percentile
    is_inside = abs(finals["r_kv"].mean() - finals["full"].mean()) <= half
    found = re.search("with the full cache: (.*); outside of it: (.*)", (folder / "grpo-policies.md").read_text())
    told = ["r_kv" in re.split(r" \([-+.\d]+\)[,.]? ?", part) for part in found.groups()]
    assert told == [is_inside, not is_inside]


def test_the_committed_figures_show_that_compressed_rollouts_teach():
    assert_policies_teach(ROOT / "results")


@pytest.mark.parametrize("size", ["one step", pytest.param("full", marks=pytest.mark.slow)])
def test_the_course_of_the_committed_figures_runs_and_teaches_at_full_size(size, tmp_path):
    """`python -m research.grpo configs/experiments/grpo-policies.toml --out results`, into another folder."""
    config = ROOT / "configs" / "experiments" / "grpo-policies.toml"
    words = ["--out", str(tmp_path), "--checkpoints", str(tmp_path / "kept")]
    if size == "full":
        assert grpo.main([str(config), *words]) == 0
        assert_policies_teach(tmp_path)
        return
    small = tmp_path / config.name
    small.write_text(config.read_text().replace("evaluations = 256", "evaluations = 8"))
    assert grpo.main([str(small), *words, "--seeds", "0", "--steps", "1"]) == 0
    runs = json.loads((tmp_path / "grpo-policies.json").read_text())["runs"]
    assert [(run["arm"], run["steps"]) for run in runs] == [(arm.name, 1) for arm in read_course(small).arms]
    (replayed,) = (run for run in runs if run["loss"] == "replay")
    assert 0 < replayed["ratio_p99"] <= 1e-5


def test_the_committed_figures_show_that_only_the_replay_learns_where_evictions_cost_what_is_needed():
    arms = by_arm(json.loads((ROOT / "results" / "grpo-stepping.json").read_text())["runs"])
    assert list(arms) == ["ignored", "corrected", "bypass", "replayed"]
    assert all([run["seed"] for run in runs] == [0, 1, 2, 3, 4] for runs in arms.values())
    own = {name: np.array([run["evaluations"][-1]["own"] for run in runs]) for name, runs in arms.items()}
    for name in ("ignored", "corrected", "bypass"):
        gap = own["replayed"] - own[name]
        assert gap.mean() > 2.7764 * gap.std(ddof=1) / 5**0.5  # Student's t of four degrees of freedom, 97.5th percentile
    for run in arms["replayed"]:
        assert run["ratio_p99"] <= 1e-5
        assert run["evaluations"][-1]["dense"] > run["evaluations"][0]["dense"] - 0.02
    page = (ROOT / "docs" / "findings.md").read_text()
    for runs in arms.values():
        cells = (f"{final(runs, cache, 0).mean:.3f}, {final(runs, cache)}" for cache in ("own", "dense"))
        assert f"| {' | '.join(cells)} |" in page
    every = [run for runs in arms.values() for run in runs]
    for _, gap, *_ in contrast_rows(every, [("replayed", name) for name in ("ignored", "corrected", "bypass")]):
        assert f"| {gap}, 5" in page
