"""Generations on disk: every sample a line, and an interrupted run that goes on to the same figures."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jkv import cli, full, generate, mem_share, quest, r_kv, reason_cache
from jkv.checkpoints import loading as checkpoint
from jkv.engine.engine import Engine
from jkv.engine.runner import Runner
from jkv.evaluation import generations
from jkv.evaluation.generations import read_records, run
from jkv.evaluation.held_out import held_out
from jkv.evaluation.problems import Problem
from jkv.model.sampling import Sampling

ROOT = Path(__file__).parents[2]
KNOBS = {
    "samples": 3,
    "sampling": Sampling(temperature=1.0, seed=5),
    "max_new_tokens": 40,
    "max_running": 4,
    "page_size": 4,
    "progress": False,
}
POLICY = r_kv(budget=40, interval=16, window=4)


@pytest.fixture(scope="module")
def reasoner():
    return checkpoint.load("tiny-reasoner")


@pytest.fixture(scope="module")
def problems():
    drawn = [Problem(problem.prompt, problem.answer) for problem in held_out(4, seed=3)]
    return [*drawn, drawn[0]]  # the same question twice


@pytest.fixture(scope="module")
def whole(reasoner, problems, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "r_kv-40.jsonl"
    return run(reasoner, problems, POLICY, path=path, **KNOBS), path


def same(this, other):
    """Whether the figures of samples agree exactly."""
    each = [(one.is_right.tolist(), one.lengths.tolist(), one.finish_reason) for one in (this, other)]
    names = "evicted", "compactions", "final_amsr", "affected_ratio"
    return each[0] == each[1] and all(getattr(this.stats, name) == getattr(other.stats, name) for name in names)


def texts(path):
    return {(record["problem"], record["sample"]): record["text"] for record in read_records(path)}


def test_a_line_tells_all_of_a_sample(whole, problems):
    judged, path = whole
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(record["problem"], record["sample"]) for record in records} == {(i, j) for i in range(5) for j in range(3)}
    for record in records:
        assert (record["policy"], record["budget"]) == ("r_kv", 40)
        assert (record["prompt"], record["gold"]) == (problems[record["problem"]].prompt, problems[record["problem"]].answer)
        index = 3 * record["problem"] + record["sample"]
        assert record["tokens"] == judged.lengths[index] <= 40
        assert record["finish_reason"] == judged.finish_reason[index]
        assert record["right"] == judged.is_right[index] == (record["answer"] == record["gold"])
    assert len({record["text"] for record in records if record["problem"] in (0, 4)}) > 3  # equal prompts draw on


def test_samples_are_those_of_generate(reasoner, problems, whole):
    judged, path = whole
    options = {name: KNOBS[name] for name in ("sampling", "max_new_tokens", "max_running", "page_size", "progress")}
    out = generate(reasoner, [problem.prompt for problem in problems], policy=POLICY, n=3, **options)
    written = texts(path)
    assert [written[i, j] for i in range(5) for j in range(3)] == out.text
    assert judged.stats.evicted == out.stats.evicted / 15 > 0
    assert judged.stats.final_amsr == pytest.approx(out.stats.final_amsr)
    assert judged.stats.affected_ratio == pytest.approx(out.stats.affected_ratio)
    assert judged.stats.kv_bytes_per_sample == pytest.approx(out.stats.kv_bytes_per_sample)
    assert judged.stats.amsr == pytest.approx(out.stats.amsr)
    assert judged.stats.occupancy == out.stats.occupancy
    assert judged.stats.peak_kv_bytes == out.stats.peak_kv_bytes


@pytest.mark.parametrize(
    ("policy", "is_touched", "count"),
    [
        (r_kv(budget=128, interval=16, window=4), lambda record: record["prompt_tokens"] + 96 > 128, 2),  # the last compaction
        (quest(budget=132, dense_layers=1), lambda record: record["prompt_tokens"] + 100 > 132, 2),
        (quest(budget=132, dense_layers=4), lambda record: False, 0),
        (mem_share(similarity=0.3, percentile=100, warm_up=8), lambda record: record["shared"] > 0, 5),
        (full(), lambda record: False, 0),
    ],
    ids=["eviction", "selection", "selection in no layer", "sharing", "full"],
)
def test_a_sample_is_touched_when_a_token_or_a_page_is_left_out(policy, is_touched, count, reasoner, problems, tmp_path):
    path, knobs = tmp_path / "x", KNOBS | {"samples": 1, "sampling": None, "max_new_tokens": 100}
    judged = run(reasoner, problems, policy, path=path, **knobs)
    records = {record["problem"]: record for record in read_records(path)}
    assert judged.touched[:, 0].tolist() == [is_touched(records[i]) for i in range(5)]
    assert judged.touched.sum() == count


@pytest.mark.parametrize("kept", [0, 1, 7, 14])
def test_what_is_left_comes_out_as_it_would_have(kept, reasoner, problems, whole, tmp_path):
    judged, written = whole
    lines = written.read_text().splitlines(keepends=True)
    path = tmp_path / "r_kv-40.jsonl"
    path.write_text("".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])  # killed while it wrote
    resumed = run(reasoner, problems, POLICY, path=path, **KNOBS)
    assert same(resumed, judged)
    assert texts(path) == texts(written)
    assert path.read_text().splitlines(keepends=True)[:kept] == lines[:kept]
    assert {record["run"]["part"] for record in read_records(path)[kept:]} == {1 if kept else 0}
    assert resumed.stats.kv_bytes_per_sample == pytest.approx(judged.stats.kv_bytes_per_sample, rel=0.15)


def test_a_complete_run_generates_nothing(reasoner, problems, whole, monkeypatch):
    judged, path = whole
    monkeypatch.setattr(generations, "engine_for", None)
    before = path.read_bytes()
    again = run(reasoner, problems, POLICY, path=path, **KNOBS)
    assert same(again, judged)
    assert again.stats == judged.stats
    assert path.read_bytes() == before


def test_figures_of_a_run_in_parts_are_weighted_by_what_each_did(whole):
    judged, path = whole
    records = read_records(path)
    last = max(records, key=lambda record: record["run"]["tokens"])["run"]
    other = last | {"part": 1, "kv_bytes_per_sample": 3 * last["kv_bytes_per_sample"], "peak_kv_bytes": 1}
    parts = [record | {"run": other if i == 14 else last} for i, record in enumerate(records)]
    stats = generations.sum_up(POLICY, parts, 3).stats
    assert stats.kv_bytes_per_sample == pytest.approx(2 * last["kv_bytes_per_sample"])
    assert stats.tokens_per_second == pytest.approx(last["tokens"] / last["seconds"])
    assert stats.peak_kv_bytes == last["peak_kv_bytes"]
    assert judged.stats.occupancy == last["tokens"] / last["row_steps"]


def test_lines_of_another_policy_or_problem_are_refused(reasoner, problems, whole, tmp_path):
    path = tmp_path / "r_kv-40.jsonl"
    path.write_bytes(whole[1].read_bytes())
    for others, policy in ((problems[1:], POLICY), (problems, r_kv(budget=44, interval=16, window=4))):
        with pytest.raises(ValueError, match="must hold samples of the same problems and policy; line 1 is of others"):
            run(reasoner, others, policy, path=path, **KNOBS)
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1 is not"):
        run(reasoner, problems, POLICY, path=path, **KNOBS)


def test_draws_that_could_not_be_repeated_are_refused(reasoner, problems, tmp_path):
    with pytest.raises(ValueError, match="needs a seed; got None"):
        run(reasoner, problems, full(), path=tmp_path / "x", **KNOBS | {"sampling": Sampling(temperature=1.0)})
    with pytest.raises(ValueError, match="Greedy samples are all the same; got 3 of them"):
        run(reasoner, problems, full(), **KNOBS | {"sampling": None})


def test_a_run_that_shares_pages_starts_anew(reasoner, problems, tmp_path):
    policy, path = reason_cache(warm_up=8), tmp_path / "reason_cache.jsonl"
    few = problems[:2]
    judged = run(reasoner, few, policy, path=path, **KNOBS)
    assert judged.stats.sharing is not None
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    again = run(reasoner, few, policy, path=path, **KNOBS)
    assert same(again, judged)
    assert {record["run"]["part"] for record in read_records(path)} == {0}
    assert again.stats.sharing["candidates"] == judged.stats.sharing["candidates"]


@pytest.mark.parametrize("place", ["Runner.read", "record_of"], ids=["while it decodes", "while it grades"])
def test_ctrl_c_keeps_what_is_finished(place, reasoner, problems, whole, tmp_path, monkeypatch):
    path, calls = tmp_path / "r_kv-40.jsonl", []
    owner = Runner if place.startswith("Runner") else generations
    name = place.rpartition(".")[2]
    real = getattr(owner, name)

    def press(*arguments):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(owner, name, press)
    with pytest.raises(KeyboardInterrupt):
        run(reasoner, problems, POLICY, path=path, **KNOBS)
    monkeypatch.undo()
    records = read_records(path)
    assert 0 < len(records) < 15
    assert {record["finish_reason"] for record in records} <= {"stop", "length"}
    assert same(run(reasoner, problems, POLICY, path=path, **KNOBS), whole[0])


def test_an_encoder_that_raises_ends_the_run_and_is_not_graded(reasoner, problems, monkeypatch):
    real = Engine.result

    def result(self, ticket):
        out = real(self, ticket)
        return dataclasses.replace(out, samples=[dataclasses.replace(out.samples[0], error=OSError("encoder"))])

    monkeypatch.setattr(Engine, "result", result)
    with pytest.raises(OSError, match="encoder"):
        run(reasoner, problems, POLICY, **KNOBS)


KILLED = """
import os, signal, sys
from jkv import cli
from jkv.evaluation import generations

json_lines, written = generations.json_lines, []

def write(records):
    written.extend(records)
    if len(written) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return json_lines(records)

generations.json_lines = write
cli.main(sys.argv[1:])
"""


def test_a_process_that_is_killed_goes_on_to_the_same_table(tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": p.prompt, "answer": p.answer}) + "\n" for p in held_out(4, seed=4)))
    few = ["--dataset", file, "--samples", "2", "--temperature", "1", "--policies", "full"]
    few = ["eval", *map(str, few), "--max-new-tokens", "200", "--max-running", "1", "--page-size", "4"]
    broken, steady = tmp_path / "broken", tmp_path / "steady"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *few, "--out", str(broken)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir},
    )
    lines = broken / "tiny-reasoner-generations" / "full.jsonl"
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert lines.read_text().count("\n") == 2
    assert cli.main([*few, "--out", str(broken)]) == 2  # nothing is overwritten by forgetting --resume
    assert "holds completions. Go on with --resume" in capsys.readouterr().err
    assert cli.main([*few, "--out", str(broken), "--resume"]) == 0
    assert cli.main([*few, "--out", str(steady)]) == 0
    tables = [json.loads((folder / "tiny-reasoner.json").read_text())["outcomes"] for folder in (broken, steady)]
    of_the_run = {"kv_bytes", "kv_share", "occupancy", "tokens_per_second", "amsr", "peak_kv_bytes"}
    for one, other in zip(*tables, strict=True):
        assert {k: v for k, v in one.items() if k not in of_the_run} == {k: v for k, v in other.items() if k not in of_the_run}
        assert one["kv_bytes"] == pytest.approx(other["kv_bytes"], rel=0.1)
        assert one["samples"] == 2
        assert set(one["pass_at"]) == {"1", "2"}
    assert np.isfinite(tables[0][0]["pass_at"]["2"]).all()
    both = [texts(folder / "tiny-reasoner-generations" / "full.jsonl") for folder in (broken, steady)]
    assert both[0] == both[1]
