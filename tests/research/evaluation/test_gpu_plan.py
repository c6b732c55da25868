"""The plan for half an hour of a GPU: stages end, are cut off or are skipped; and all of it at sizes of a test."""

import json
import os
import shutil
import tomllib

import pytest

from jkv.checkpoints import loading as checkpoint
from research.evaluation import gpu_plan
from research.evaluation.gpu_plan import CONFIG, Stage, run_plan
from tests.research.bench.conftest import MODEL

QUICK = ["timeit", "-n", "1", "-r", "1"]
COMPARISON = """
budgets = ["34% each"]
policies = ["random"]
temperature = 0.6
samples = 2
max_new_tokens = 16
protection = {sinks = 1, recent = 2}
"""


def test_a_stage_out_of_time_or_failed_does_not_stop_the_others_and_is_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_plan, "GRACE", 10.0)
    slow = Stage("slow", 0.02, [*QUICK, "__import__('time').sleep(60)"])
    plan = [slow, Stage("wrong", 1, [*QUICK, "1 / 0"]), Stage("quick", 1, [*QUICK, "pass"])]
    record = run_plan(plan, tmp_path / "plan.json", os.environ)
    assert {name: stage["ended"] for name, stage in record.items()} == {
        "slow": "out of time",
        "wrong": "failed (1)",
        "quick": "done",
    }
    assert record["slow"]["seconds"] < 20
    assert json.loads((tmp_path / "plan.json").read_text())["stages"] == record
    again = run_plan([slow._replace(words=[*QUICK, "pass"]), *plan[1:]], tmp_path / "plan.json", os.environ)
    assert again["slow"]["ended"] == "done"
    assert again["quick"] == record["quick"]


def test_stages_that_ended_with_something_else_are_refused(tmp_path):
    stage, file = Stage("quick", 1, [*QUICK, "pass"]), tmp_path / "plan.json"
    run_plan([stage], file, os.environ, {"model": "0f"})
    assert (
        run_plan([stage._replace(words=[*stage.words, "--resume"])], file, os.environ, {"model": "0f"})["quick"]["ended"]
        == "done"
    )
    with pytest.raises(
        ValueError, match=r"quick ended with something else, by model \(model then '0f', now '1a'\)\. Give another"
    ):
        run_plan([stage], file, os.environ, {"model": "1a"})
    with pytest.raises(ValueError, match="ended with something else, by command"):
        run_plan([stage._replace(words=[*QUICK, "1"])], file, os.environ, {"model": "0f"})
    run_plan([stage], file, os.environ)
    with pytest.raises(ValueError, match="wrote it without config"):
        run_plan([stage], file, os.environ, {"model": "0f", "config": "2b"})


def test_what_a_stage_made_may_not_change_before_a_later_one_reads_it(tmp_path):
    folder, file = tmp_path / "model", tmp_path / "plan.json"
    folder.mkdir()
    (folder / "weights").write_text("tuned")
    stage = Stage("quick", 1, [*QUICK, "pass"], folder)
    record = run_plan([stage], file, os.environ)
    assert run_plan([stage], file, os.environ) == record
    (folder / "weights").write_text("others")
    with pytest.raises(ValueError, match="quick ended with something else, by made"):
        run_plan([stage], file, os.environ)


def test_the_files_of_a_configuration_are_its_own_and_those_that_it_extends(tmp_path):
    texts = {"a": 'extends = "b.toml"', "b": f'extends = "../{tmp_path.name}/c.toml"', "c": "budgets = [1]"}
    for name, text in texts.items():
        (tmp_path / f"{name}.toml").write_text(text)
    assert [file.stem for file in gpu_plan.config_files(tmp_path / "a.toml")] == ["a", "b", "c"]
    (tmp_path / "c.toml").write_text('extends = "a.toml"')
    assert len(gpu_plan.config_files(tmp_path / "a.toml")) == 3


def test_a_model_s_files_have_one_digest_wherever_they_are(tmp_path):
    shutil.copytree(checkpoint.shipped_folders()["tiny-reasoner"], tmp_path / "copy")
    before = gpu_plan.model_digest("tiny-reasoner")
    assert gpu_plan.model_digest(str(tmp_path / "copy")) == before
    file = tmp_path / "copy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert gpu_plan.model_digest(str(tmp_path / "copy")) != before


def test_the_comparison_has_ten_policies_and_contrasts_among_them():
    config = tomllib.loads(CONFIG.read_text())
    assert len(config["policies"]) == 10
    assert {name for pair in config["contrasts"] for name in pair} <= {*config["policies"]}


def test_the_whole_plan_runs_on_a_cpu(tmp_path):
    shape, config, out = tmp_path / "shape.toml", tmp_path / "small.toml", tmp_path / "out"
    shape.write_text(MODEL)
    config.write_text(COMPARISON)
    words = ["--model", "tiny-reasoner", "--task", "chains", "--problems", "2", "--tune-minutes", "0.01"]
    words += ["--tune-options", "--rows 1 --length 64", "--config", str(config), "--small-shape", str(shape)]
    words += ["--shape", str(shape), "--stress-minutes", "3", "--out", str(out)]
    words += ["--bench-options", "--batches 2 --budget 32 --interval 16 --new-tokens 64 --most-rows 2"]
    assert gpu_plan.main(words) == 0
    (table,) = (out / "accuracy").glob("*.md")
    assert "| random |" in table.read_text()
    (stress,) = (out / "stress").glob("*.json")
    assert any(row["part"] == "stress" and row.get("tokens_per_second") for row in json.loads(stress.read_text())["rows"])
    assert {stage["ended"] for stage in json.loads((out / "plan.json").read_text())["stages"].values()} == {"done"}
