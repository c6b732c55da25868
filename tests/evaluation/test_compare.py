"""`jkv eval`: the figures, counted by hand on a model and problems small enough; files that open; and bad input."""

import csv
import dataclasses
import importlib.machinery
import importlib.util
import json
import types
from pathlib import Path

import numpy as np
import pytest

from jkv import cli
from jkv.cli import evaluate as command
from jkv.evaluation import compare as bench
from jkv.evaluation import generations
from jkv.evaluation.held_out import held_out
from jkv.model.sampling import Sampling
from jkv.policies import full, r_kv, streaming_llm
from jkv.policies import h2o as h2o_policy
from jkv.policies import random as random_policy
from jkv.policies import rpc as rpc_policy
from jkv.statistics import paired_change, pass_figures
from jkv.testing import random_gate


@pytest.fixture(scope="module")
def outcomes(reasoner, problems):
    settings = {"streaming_llm": {"interval": 16}, "rpc": {"interval": 32, "window": 4}}
    knobs = {"max_new_tokens": 96, "max_running": 4, "page_size": 4, "progress": False}
    return bench.compare(reasoner, problems, ["full", "streaming_llm", "rpc"], ["50%", 32], settings, **knobs)


def test_every_policy_runs_at_every_budget_beside_the_full_cache(outcomes):
    assert [outcome.policy for outcome in outcomes] == ["full", "streaming_llm", "streaming_llm", "rpc"]
    base, half, small, growing = outcomes
    assert (base.budget, half.share, small.share, small.budget) == (None, 0.5, None, 32)
    assert base.change == base.evicted == 0
    assert base.inflation == base.kv_share == 1
    assert small.kv_share < half.kv_share < 1
    assert small.evicted > half.evicted > 0
    assert (growing.budget, growing.share) == (None, None)  # it has none, and runs once
    assert 0 < growing.kv_share < 1


@pytest.fixture(scope="module")
def judged(reasoner, problems):
    """One graded run."""
    return bench.run(reasoner, problems, full(), max_new_tokens=96, max_running=4, page_size=4, progress=False)


@pytest.fixture
def ready_runs(judged, monkeypatch):
    """Every comparison takes the graded run's first problems as its own; the policies that it asked for."""
    asked = []

    def run(model, problems, policies, **options):
        asked.append(policies[0])
        count = len(problems)
        fields = {name: getattr(judged, name)[:count] for name in ("is_right", "is_touched", "lengths", "finish_reason")}
        return dataclasses.replace(judged, policy=policies[0], **fields)

    monkeypatch.setattr(bench, "run", run)
    return asked


def test_shares_count_from_the_measured_length(reasoner, problems, outcomes, judged):
    lengths = [len(reasoner.tokenizer.encode(p.prompt)) + n for p, n in zip(problems, judged.lengths, strict=True)]
    assert outcomes[1].budget == round(np.mean(lengths) / 2)
    assert outcomes[0].truncated == np.mean([reason == "length" for reason in judged.finish_reason])


def test_table_json_and_picture_are_written(outcomes, tmp_path):
    bench.write(outcomes, tmp_path, "tiny", {"problems": 6})
    table, figures, picture = (tmp_path / f"tiny{ending}" for ending in (".md", ".json", ".png"))
    lines = table.read_text().splitlines()
    assert len(lines) == 2 + len(outcomes)
    assert len({line.count("|") for line in lines}) == 1
    records = list(csv.DictReader((tmp_path / "tiny.csv").open()))
    assert [(record["policy"], float(record["accuracy"])) for record in records] == [
        (one.policy, one.accuracy) for one in outcomes
    ]
    recorded = json.loads(figures.read_text())
    assert [outcome["accuracy"] for outcome in recorded["outcomes"]] == [outcome.accuracy for outcome in outcomes]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_share_that_a_policy_cannot_hold_is_refused_before_the_others_run(reasoner, problems, ready_runs):
    seen = []
    knobs = {"max_new_tokens": 16, "progress": False, "report": lambda outcomes: seen.append(len(outcomes))}
    with pytest.raises(ValueError, match="r_kv's budget must hold its sinks and recent slots"):
        bench.compare(reasoner, problems[:2], ["full", "streaming_llm", "r_kv"], ["50%", "4%"], **knobs)
    assert seen == [1]
    assert ready_runs == [full()]


def test_what_is_known_is_written_when_the_next_is_interrupted(ready_runs, monkeypatch, tmp_path, capsys):
    runs, ready = ready_runs, bench.run

    def run(model, problems, policy, **options):
        if len(runs) == 2:
            runs.append(policy)
            raise KeyboardInterrupt
        return ready(model, problems, policy, **options)

    monkeypatch.setattr(bench, "run", run)
    few = ["--problems", "2", "--policies", "streaming_llm", "--budgets", "32,48", "--max-new-tokens", "16"]
    assert cli.main(["eval", *few, "--out", str(tmp_path / "out")]) != 0
    file = tmp_path / "out" / "tiny-reasoner.json"
    before = json.loads(file.read_text())["outcomes"]
    assert [outcome["budget"] for outcome in before] == [None, 32]
    runs.clear()
    assert cli.main(["eval", *few, "--out", str(tmp_path / "out"), "--resume"]) == 0
    assert [policy.budget for policy in runs] == [48]
    after = json.loads(file.read_text())["outcomes"]
    assert after[:2] == before
    assert [outcome["budget"] for outcome in after] == [None, 32, 48]
    runs.clear()
    more = [*few[:2], "--policies", "streaming_llm,h2o", "--budgets", "32,48", *few[-2:]]  # a finished one with another policy
    assert cli.main(["eval", *more, "--out", str(tmp_path / "out"), "--resume"]) == 0
    assert [(policy.name, policy.budget) for policy in runs] == [("h2o", 32), ("h2o", 48)]
    assert json.loads(file.read_text())["outcomes"][:3] == after
    runs[:] = [None]  # interrupted in the second that is new, which comes first: what was known is not lost
    more[3] = "tova,streaming_llm"
    assert cli.main(["eval", *more, "--out", str(tmp_path / "out"), "--resume"]) != 0
    written = json.loads(file.read_text())["outcomes"]
    assert {(one["policy"], one["budget"]) for one in written} >= {("tova", 32), ("streaming_llm", 32), ("streaming_llm", 48)}
    assert cli.main(["eval", *few[2:], "--problems", "3", "--out", str(tmp_path / "out"), "--resume"]) == 2
    assert "holds another comparison" in capsys.readouterr().err


def test_without_matplotlib_everything_but_the_picture_is_written(ready_runs, monkeypatch, tmp_path, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name, *rest))
    few = ["--problems", "2", "--policies", "streaming_llm", "--budgets", "32", "--max-new-tokens", "16"]
    assert cli.main(["eval", *few, "--out", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir() if not file.name.startswith(".")} == {
        "tiny-reasoner.md",
        "tiny-reasoner.json",
        "tiny-reasoner.csv",
    }
    assert 'no picture is drawn, as matplotlib is not installed. For one, run: pip install "jkv-cache[eval]"' in (
        capsys.readouterr().err
    )


OWN = "import jkv\n\n\ndef mine(budget, interval=16, sinks=0):\n    return jkv.streaming_llm(budget, sinks=sinks + 1)\n"


def test_a_policy_of_ones_own_runs_by_its_name_and_again_when_its_file_changes(ready_runs, tmp_path):
    file, config = tmp_path / "own.py", tmp_path / "some.toml"
    file.write_text(OWN)
    config.write_text(
        f'policies = ["{file}:mine", "other"]\nbudgets = [48]\n[settings.other]\npolicy = "{file}:mine"\nsinks = 1\n'
    )
    few = ["--problems", "2", "--max-new-tokens", "16", "--config", str(config), "--out", str(tmp_path / "out")]
    assert cli.main(["eval", *few, "--protection", "sinks=3"]) == 0
    assert [(policy.name, policy.evict.sinks) for policy in ready_runs[1:]] == [(f"{file}:mine", 4), ("other", 2)]
    ready_runs.clear()
    assert cli.main(["eval", *few, "--protection", "sinks=3", "--resume"]) == 0
    assert ready_runs == []
    file.write_text(OWN + "# changed\n")
    assert cli.main(["eval", *few, "--protection", "sinks=3", "--resume"]) == 0
    assert [policy.name for policy in ready_runs] == [f"{file}:mine", "other"]


def test_policies_and_functions_run_as_they_are(reasoner, problems, ready_runs):
    own = dataclasses.replace(streaming_llm(32), name="own")
    settings = {"varied": {"policy": streaming_llm, "sinks": 2}}
    knobs = {"max_new_tokens": 16, "progress": False}
    outcomes = bench.compare(reasoner, problems[:2], [own, r_kv, "varied"], [24, 48], settings, **knobs)
    expected = [("full", None), ("own", 32), ("r_kv", 24), ("r_kv", 48), ("varied", 24), ("varied", 48)]
    assert [(one.policy, one.budget) for one in outcomes] == expected
    assert ready_runs[1] == own
    assert ready_runs[2] == r_kv(24)
    assert ready_runs[5].evict.sinks == 2
    with pytest.raises(ValueError, match="own is taken"):
        bench.compare(reasoner, problems[:2], [own, own], [24], **knobs)


def test_a_setting_on_the_command_line_goes_to_every_policy_that_has_it(ready_runs, tmp_path):
    file = tmp_path / "some.toml"
    file.write_text(
        'policies = ["r_kv", "often", "h2o", "rpc"]\nbudgets = [48]\n[settings.often]\npolicy = "r_kv"\nwindow = 4\n'
    )
    few = ["--problems", "2", "--max-new-tokens", "16", "--config", str(file), "--interval", "8", "--set", "window=2"]
    assert cli.main(["eval", *few]) == 0
    _, plain, varied, h2o, rpc = ready_runs
    assert (plain, h2o) == (r_kv(48, interval=8, window=2), h2o_policy(48, interval=8))
    assert dataclasses.replace(varied, name="r_kv") == plain
    assert rpc == rpc_policy(interval=8, window=2)


def test_where_the_full_cache_answers_nothing_an_example_is_shown(reasoner, problems):
    words = r"none of 1 sample right. The first ends in '.*'; no answer is found in it, and the gold answer is 's=1'"
    with pytest.warns(UserWarning, match=words):
        bench.run(reasoner, problems[:1], full(), max_new_tokens=16, max_running=4, page_size=4, progress=False)


def test_answers_need_text(reasoner, problems):
    with pytest.raises(ValueError, match="read from text, and this model has no tokenizer"):
        bench.compare(dataclasses.replace(reasoner, tokenizer=None), problems, ["full"], [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policies", "nope"], "policy must be one of"),
        (["--budgets", "x"], "a number of slots, bytes of a row"),
        (["--policies", "r_kv", "--budgets", "4"], "must hold its sinks and recent slots"),
        (["--problems", "0"], "problems must be at least 1"),
        (["--file", "missing.jsonl"], "missing.jsonl"),
        (["--dataset", "some/set"], "jkv downloads no data sets. Download it, for example with: hf download some/set"),
        (["--dataset", "x", "--file", "y"], "file and dataset are the same setting; got both, y and x"),
        (["--preset", "aime"], "preset selects from a data set; got none"),
        (["--grader", "judge"], "grader must be one of boxed, math, choice"),
        (["--template", "Solve it."], "template must say where the question goes"),
        (["--chat-template"], "chat_template needs a tokenizer that has one"),
        (["--samples", "4"], "Greedy samples are all the same; got 4"),
        (["--samples", "4", "--temperature", "1", "--pass-at", "5"], "pass_at must lie in [1, samples], which is 4; got 5"),
        (["--samples", "0"], "samples must be at least 1; got 0"),
        (["--temperature", "-1"], "temperature must be 0 (greedy)"),
        (["--frequency-penalty", "9"], "frequency_penalty must lie in [-2, 2]"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_bad_input_is_told_before_anything_runs(arguments, words, capsys):
    assert cli.main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_config_file_may_set_only_what_there_is(tmp_path, capsys):
    config = tmp_path / "mine.toml"
    config.write_text("budget = 3\n")
    assert cli.main(["eval", "--config", str(config)]) == 2
    assert (
        "may set answer, budgets, chat_template, contrasts, dataset, dtype, file, frequency_penalty, "
        in capsys.readouterr().err
    )
    config.write_text('[settings.mine]\npolicy = "no_kv"\n')
    assert cli.main(["eval", "--config", str(config)]) == 2
    assert "settings are for policies" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends = 3", "extends names another file"),
        ('extends = "mine.toml"', "extends names another file"),
        ("settings = 5", "settings are tables"),
        ("settings.r_kv = 5", "settings are tables"),
        ("[settings.x]\npolicy = 3", "is a name; got 3"),
    ],
)
def test_a_config_of_the_wrong_shape_is_one_line_of_error(text, words, tmp_path, capsys):
    config = tmp_path / "mine.toml"
    config.write_text(text)
    assert cli.main(["eval", "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_variant_has_its_policys_settings_and_its_own_on_top():
    settings = {"r_kv": {"interval": 16, "window": 4}, "mean": {"policy": "r_kv", "over_group": "mean", "window": 6}}
    made = bench.build("mean", 64, settings)
    assert made.name == "mean"
    assert made == dataclasses.replace(r_kv(64, 16, window=6, over_group="mean"), name="mean")
    assert bench.build("r_kv", 64, settings) == r_kv(64, 16, window=4)


def test_a_variant_may_quantise_its_pages(reasoner, problems):
    """A slot of tiny-reasoner has 2 x 64 floats or codes, a position and, beside codes, two scales."""
    settings = {"int8": {"policy": "full", "kv_dtype": "int8"}}
    knobs = {"max_new_tokens": 32, "max_running": 4, "page_size": 4, "progress": False}
    plain, coded = bench.compare(reasoner, problems[:2], ["int8"], [], settings, **knobs)
    assert (plain.kv_dtype, coded.kv_dtype, coded.policy) == (None, "int8", "int8")
    assert coded.kv_bytes / plain.kv_bytes == pytest.approx((128 + 4 + 8) / (512 + 4), rel=0.01)


def test_the_command_takes_problems_of_ones_own(tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": p.prompt, "answer": p.answer}) + "\n" for p in held_out(2, seed=4)))
    arguments = ["--file", str(file), "--policies", "full,streaming_llm", "--budgets", "32", "--max-new-tokens", "48"]
    assert cli.main(["eval", *arguments, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("\n") == 4
    names = {f"tiny-reasoner{ending}" for ending in (".md", ".json", ".csv", ".png", "-generations")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert streaming_llm(budget=32).name in (tmp_path / "out" / "tiny-reasoner.md").read_text()


def test_several_samples_give_pass_at_k_and_paired_differences(reasoner, problems):
    knobs = {"max_new_tokens": 96, "max_running": 4, "page_size": 4, "progress": False}
    draws = Sampling(temperature=1.0, seed=0)
    options = {"samples": 3, "pass_at": [2, 3], "sampling": draws, **knobs}
    base, small = bench.compare(reasoner, problems, ["streaming_llm"], [32], **options)
    right = [np.array([mark == "1" for mark in one.right]).reshape(6, 3) for one in (base, small)]
    assert base.pass_at == pass_figures(right[0], [1, 2, 3])
    assert (base.accuracy, [base.low, base.high]) == (pytest.approx(right[0].mean()), base.pass_at["1"][1:])
    assert (small.change, small.change_low, small.change_high) == paired_change(right[1], right[0])
    head, line, *rows = bench.table([base, small]).splitlines()
    assert bench.table([], [1, 2, 3]).splitlines() == [head, line]
    assert "| pass@1 (95 %) | pass@2 (95 %) | pass@3 (95 %) |" in head
    assert {row.count("|") for row in (head, line, *rows)} == {head.count("|")}


def test_a_set_that_the_grader_cannot_grade_is_refused_or_cut(ready_runs, tmp_path, capsys):
    file, out = tmp_path / "mine.jsonl", tmp_path / "out"
    rows = [("b=3;c=7;d=b*c;?d", "d=1"), ("x=1;y=2;z=x+y;?z", "\\frac{1}{2}"), ("x=1;y=2;z=x+y;?z", "z=3")]
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    arguments = ["--dataset", str(file), "--question", "question", "--policies", "full", "--max-new-tokens", "16"]
    assert cli.main(["eval", *arguments]) == 2
    assert "this one fails 1 of 3: 1 '\\\\frac{1}{2}'" in capsys.readouterr().err
    assert cli.main(["eval", *arguments, "--skip-ungradable", "--out", str(out)]) == 0
    assert "left out 1 of 3 problems" in capsys.readouterr().err
    record = json.loads((out / "tiny-reasoner.json").read_text())
    assert record["outcomes"][0]["problems"] == 2
    assert (record["about"]["problems"], record["about"]["grader"], record["about"]["chat_template"]) == (3, "boxed", False)


def test_the_math_grader_takes_what_the_boxed_one_refuses(reasoner):
    pytest.importorskip("math_verify")
    problems = [bench.Problem("x=1;?x", r"\frac{1}{2}")]
    few = {"max_new_tokens": 4, "progress": False}
    with pytest.raises(ValueError, match="fails 1 of 1"):
        bench.compare(reasoner, problems, ["full"], [], **few)
    assert bench.compare(reasoner, problems, ["full"], [], grader="math", **few)[0].accuracy == 0


def test_a_model_with_chats_has_to_be_told_whether_this_is_one():
    chosen = command.DEFAULTS | {"dataset": "x"}
    tokenizer = types.SimpleNamespace(chat_template="yes")
    with pytest.raises(ValueError, match="chat_template must be set where the model has one"):
        command.settle_chat(chosen, tokenizer)
    for said in (True, False):
        chosen["chat_template"] = said
        command.settle_chat(chosen, tokenizer)
        assert chosen["chat_template"] is said


ROOT = Path(__file__).parents[2]
FIGURES = sorted(ROOT.glob("results/*-tiny-reasoner.json"))
RECORDED = [path for path in FIGURES if "outcomes" in json.loads(path.read_text())]  # analyses have none


def rows_of(page):
    """The rows of the first table of a page, by column."""
    lines = page.partition("| contrast |")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_comparisons_recorded_before_go_on(path):
    about = command.UNSAID | json.loads(path.read_text())["about"]
    outcomes = bench.read(path, about, command.UNSAID)
    assert outcomes[0].policy == "full"
    written, now = (rows_of(page) for page in (path.with_suffix(".md").read_text(), bench.table(outcomes)))
    same = {"policy", "budget", "accuracy (95 %)", "tokens", "truncated", "KV kB", "of full", "evicted"}  # others are blank
    assert [{name: row[name] for name in same} for row in now] == [{name: row[name] for name in same} for row in written]
    assert {row["touched"] for row in now} <= {""} or "touched" in written[0]
    with pytest.raises(ValueError, match="holds another comparison, by samples"):
        bench.read(path, about | {"samples": 2}, command.UNSAID)


def test_every_column_is_explained():
    page = (ROOT / "docs" / "evaluation.md").read_text()
    assert [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][
        1 : 1 + len(bench.COLUMNS)
    ] == list(bench.COLUMNS)


def as_run(right, touched, samples=1, seeds=1):
    """A run of which only what is right and touched matters."""
    count = len(right)
    stats = generations.Totals(0.0, 0.0, 0.0, 0.0, 1.0, 1, 0, 1.0, 1.0, 0.25, None)
    fields = {"lengths": np.full(count, 9), "finish_reason": ["stop"] * count, "stats": stats, "seeds": seeds}
    return generations.Run(full(), samples, np.array(right, bool), np.array(touched, bool), **fields)


@pytest.mark.parametrize("samples", [1, 2])
def test_touched_problems_have_an_accuracy_and_a_change_of_their_own(samples):
    rng = np.random.default_rng(0)
    right, before, touched = (rng.random(40 * samples) < share for share in (0.5, 0.9, 0.3))
    base = bench.summarise(as_run(before, np.zeros_like(touched), samples), None, None)
    one = dataclasses.replace(bench.summarise(as_run(right, touched, samples), base, None), policy="r_kv")
    of_touched, changes = [], []
    for problem in range(40):
        own = range(problem * samples, (problem + 1) * samples)
        if any(touched[i] for i in own):
            of_touched += [int(right[i]) for i in own]
            changes += [int(right[i]) - int(before[i]) for i in own]
    assert 0 < len(of_touched) < 40 * samples
    assert one.touched_each == "".join("01"[int(x)] for x in touched)
    assert one.touched_accuracy[0] == pytest.approx(np.mean(of_touched))
    assert one.touched_change[0] == pytest.approx(np.mean(changes))
    for value, low, high in (one.touched_accuracy, one.touched_change):
        assert low < value < high
    (row,) = rows_of(bench.table([one]))
    assert row["touched"] == f"{touched.mean():.1%}"
    assert row["accuracy, touched"].startswith(f"{np.mean(of_touched):.1%} (")
    assert row["change, touched"].startswith(f"{100 * np.mean(changes):+.1f} (")
    assert row["pages read"] == "75.0%"


def test_a_policy_that_touches_nothing_has_a_row_that_says_so():
    right = [1, 0, 1, 1]
    base = bench.summarise(as_run(right, [0] * 4), None, None)
    same = dataclasses.replace(bench.summarise(as_run(right, [0] * 4), base, None), policy="snap_kv")
    steered = dataclasses.replace(bench.summarise(as_run([0, 0, 1, 1], [0] * 4), base, None), policy="seal")
    rows = rows_of(bench.table([base, same, steered]))
    assert [row["touched"] for row in rows] == ["", "nothing evicted", "nothing evicted"]
    assert [row["change"][:5] for row in rows] == ["", "", "-25.0"]
    assert {row["accuracy, touched"] + row["change, touched"] + row["seeds"] for row in rows} == {""}


def test_an_unlucky_policy_that_changes_no_answer_still_has_an_interval():
    right = [1, 0, 1, 1]
    base = bench.summarise(as_run(right, [0] * 4), None, None)
    one = bench.summarise(as_run(right, [1] * 4), base, None)
    assert one.change_low < 0 < one.change_high
    assert one.touched_change[1] < 0 < one.touched_change[2]


def test_seeds_are_runs_of_their_own_whose_means_are_one_row(reasoner, problems, tmp_path, monkeypatch):
    knobs = {"max_new_tokens": 200, "max_running": 4, "page_size": 4, "progress": False, "generations": tmp_path}
    settings = {"random": {"interval": 16}, "later": {"policy": "random", "seed": 1}}
    arguments = (reasoner, problems, ["random", "later", "streaming_llm"], [48], settings)
    _, random, _, fixed = bench.compare(*arguments, seeds=3, **knobs)
    runs = {}
    for name, seeds in (("random", (0, 1, 2)), ("later", (1, 2, 3))):
        for seed in seeds:
            records = generations.read_records(tmp_path / f"{name}-48-seed{seed}.jsonl")
            assert {f"Uniform(seed={seed}" in record["settings"] for record in records} == {True}
            runs[name, seed] = {record["problem"]: record for record in records}
    texts = [[runs["random", seed][i]["text"] for i in range(6)] for seed in range(3)]
    assert texts[0] != texts[1] != texts[2]
    assert [runs["later", 1][i]["text"] for i in range(6)] == texts[1]
    by_problem = [[runs["random", seed][i] for seed in range(3)] for i in range(6)]
    assert random.right == "".join("01"[record["right"]] for records in by_problem for record in records)
    assert random.lengths == [record["tokens"] for records in by_problem for record in records]
    assert random.seed_accuracy == [np.mean([runs["random", seed][i]["right"] for i in range(6)]) for seed in range(3)]
    assert random.accuracy == pytest.approx(np.mean(random.seed_accuracy))
    assert random.evicted == pytest.approx(np.mean([record["evicted"] for records in by_problem for record in records]))
    assert fixed.seed_accuracy == []
    assert [row["seeds"][:6] for row in rows_of(bench.table([random, fixed]))] == ["3, SD ", ""]
    monkeypatch.setattr(generations, "engine_for", None)
    (tmp_path / "later-48-seed2.jsonl").unlink()
    with pytest.raises(TypeError):  # only this seed is left to run, which needs an engine
        bench.compare(*arguments, seeds=3, **knobs)
    assert bench.compare(*arguments[:2], ["random"], *arguments[3:], seeds=3, **knobs)[1] == random


def test_the_spread_of_seeds_is_their_standard_deviation():
    right = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]  # by seed
    one = bench.summarise(generations.joined([as_run(each, [1] * 4) for each in right]), None, None)
    assert one.seed_accuracy == [0.5, 0.25, 1.0]
    assert one.right == "111" + "101" + "001" + "001"
    (row,) = rows_of(bench.table([one]))
    assert row["seeds"] == f"3, SD {100 * np.std([0.5, 0.25, 1.0], ddof=1):.1f}"


def test_pass_at_k_of_several_seeds_is_a_mean_over_seeds():
    right = np.random.default_rng(1).random((2, 5, 3)) < 0.5  # seeds, problems, samples
    one = bench.summarise(
        generations.joined([as_run(each.reshape(-1), [1] * 15, samples=3) for each in right]), None, None, [1, 3]
    )
    assert one.pass_at["3"][0] == pytest.approx(np.mean([each.any(axis=1).mean() for each in right]))
    assert one.accuracy == pytest.approx(right.mean())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("protection = {window = 4}", "protection has sinks and recent, in slots; got window = 4"),
        ('protection = {sinks = "4"}', "protection has sinks and recent, in slots; got sinks = '4'"),
        ('policies = ["quest"]\nprotection = {sinks = 4}', "No policy of this comparison has the setting sinks"),
        ("protection = 4", "protection must be of type dict"),
        ('contrasts = [["r_kv"]]', "A contrast is a pair of different policies"),
        ('contrasts = [["r_kv", "nobody"]]', "A contrast is between policies that run"),
        ("seeds = 0", "seeds must be at least 1"),
    ],
)
def test_wrong_protection_contrasts_and_seeds_are_told(text, words, tmp_path, capsys):
    config = tmp_path / "mine.toml"
    config.write_text(text)
    assert cli.main(["eval", "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_protection_goes_to_every_policy_that_has_it_below_its_own_settings(ready_runs, tmp_path, capsys):
    few = ["--problems", "2", "--max-new-tokens", "16", "--budgets", "64", "--seeds", "2"]
    file = tmp_path / "mine.toml"
    names = ["r_kv", "free", "h2o", "streaming_llm", "quest", "rpc", "random"]
    file.write_text(f'policies = {names}\n[settings.free]\npolicy = "r_kv"\nsinks = 0\n[settings.h2o]\nrecent = 24\n')
    assert cli.main(["eval", *few, "--config", str(file), "--protection", "sinks=4,recent=16", "--interval", "8"]) == 0
    plain, free, h2o, window, _, rpc, *random = ready_runs[1:]
    assert plain == r_kv(64, interval=8, sinks=4, recent=16)
    assert dataclasses.replace(free, name="r_kv") == r_kv(64, interval=8, sinks=0, recent=16)
    assert h2o == h2o_policy(64, interval=8, sinks=4, recent=24)
    assert window == streaming_llm(64, interval=8, sinks=4)
    assert rpc == rpc_policy(interval=8)
    assert random == [random_policy(64, interval=8, sinks=4, recent=16, seed=seed) for seed in (0, 1)]
    said = (
        "Every policy that evicts protects 4 sinks and 16 recent slots. By rules of their own: free, h2o, streaming_llm, rpc."
    )
    assert said in capsys.readouterr().out


def test_only_policies_whose_settings_leave_a_budget_open_are_given_one(reasoner):
    gate = {"policy": "learned_gate", "weights": random_gate(reasoner)}
    settings = {"fixed": {"policy": "r_kv", "budget": 48}, "gate": gate, "by-threshold": gate | {"threshold": 0.0}}
    names = ("r_kv", "gate", "nobody", "rpc", "fixed", "by-threshold")
    assert [bench.takes_budget(name, settings) for name in names] == [True, True, True, False, False, False]
    assert bench.build("gate", 64, settings).budget == 64
    assert bench.build("fixed", 64, settings).budget == 48
    assert bench.build("by-threshold", 64, settings).budget is None
