"""Evaluations whose files were cut off, on a full disk, killed, or started twice: what is whole is kept, and told."""

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jkv import cli, full, reports
from jkv.checkpoints import loading as checkpoint
from jkv.evaluation import compare
from jkv.evaluation.generations import read_records, run
from jkv.evaluation.held_out import held_out
from jkv.evaluation.problems import Problem
from jkv.model.sampling import Sampling

ROOT = Path(__file__).parents[2]
KNOBS = {"samples": 2, "sampling": Sampling(temperature=1.0, seed=5), "max_new_tokens": 24, "max_running": 2, "page_size": 4}


@pytest.fixture(scope="module")
def reasoner():
    return checkpoint.load("tiny-reasoner")


@pytest.fixture(scope="module")
def problems():
    return [Problem(problem.prompt, problem.answer) for problem in held_out(3, seed=3)]


@pytest.fixture(scope="module")
def whole(reasoner, problems, tmp_path_factory):
    """A complete run's file."""
    path = tmp_path_factory.mktemp("whole") / "full.jsonl"
    run(reasoner, problems, full(), path=path, progress=False, **KNOBS)
    return path


def texts(path):
    return {(record["problem"], record["sample"]): record["text"] for record in read_records(path)}


CUTS = {
    "in the middle": lambda line: line[: len(line) // 2],
    "before its end": lambda line: line.rstrip(b"\n"),
    "with an end": lambda line: line[: len(line) // 2] + b"\n",
    "with blank lines": lambda line: line[:10] + b"\n\n\n",
    "by null bytes": lambda line: line[:10] + bytes(300),
    "in a character": lambda line: line[:10] + "é".encode()[:1],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_last_line_that_was_cut_is_dropped_and_told(cut, reasoner, problems, whole, tmp_path, capsys):
    lines = whole.read_bytes().splitlines(keepends=True)
    path = tmp_path / "full.jsonl"
    path.write_bytes(b"".join(lines[:3]) + cut(lines[3]))
    run(reasoner, problems, full(), path=path, progress=False, **KNOBS)
    assert f"jkv: {path}: dropped line 4, the last, which was cut off" in capsys.readouterr().err
    assert texts(path) == texts(whole)
    assert path.read_bytes().splitlines(keepends=True)[:3] == lines[:3]


def test_whole_lines_are_told_nothing_of(whole, capsys):
    assert len(read_records(whole)) == 6
    assert capsys.readouterr().err == ""


def test_a_line_that_is_cut_before_others_is_an_error(reasoner, problems, whole, tmp_path):
    lines = whole.read_bytes().splitlines(keepends=True)
    path = tmp_path / "full.jsonl"
    path.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
    with pytest.raises(ValueError, match="line 2 is not"):
        run(reasoner, problems, full(), path=path, progress=False, **KNOBS)
    path.write_bytes(lines[0] + b"\xff\n" + lines[2])
    with pytest.raises(ValueError, match="must be UTF-8"):
        run(reasoner, problems, full(), path=path, progress=False, **KNOBS)


@pytest.mark.parametrize("index", [-1, 3, "0", True, None])
def test_a_line_of_a_problem_that_is_not_there_is_refused(index, reasoner, problems, whole, tmp_path):
    record = json.loads(whole.read_text().splitlines()[0]) | {"problem": index, "prompt": problems[-1].prompt}
    path = tmp_path / "full.jsonl"
    path.write_text(json.dumps(record | {"gold": problems[-1].answer}) + "\n")
    with pytest.raises(ValueError, match="same problems and policy; line 1 is of others"):
        run(reasoner, problems, full(), path=path, progress=False, **KNOBS)


def other_model(model, at):
    """The model with one number of a weight changed, its tokenizer grown, or its configuration changed."""
    if at == "tokenizer":
        tokenizer = checkpoint.load("tiny-reasoner").tokenizer
        tokenizer.add_tokens(["another"])
        return dataclasses.replace(model, tokenizer=tokenizer)
    params = model.params.replace(config=dataclasses.replace(model.config, rope_theta=9_999.0))
    if at == "weights":
        params = model.params.replace(final_norm=model.params.final_norm.at[-1].add(1e-3))
    return dataclasses.replace(model, params=params)


@pytest.mark.parametrize("at", ["weights", "tokenizer", "config"])
def test_completions_of_another_model_are_refused_by_what_differs(at, reasoner, problems, whole, tmp_path):
    path = Path(shutil.copy(whole, tmp_path / "full.jsonl"))
    with pytest.raises(ValueError, match=rf"Line 1 of .* is of another run, by {at} \({at} then '\w+', now '\w+'\)\. Give"):
        run(other_model(reasoner, at), problems, full(), path=path, progress=False, **KNOBS)
    assert path.read_bytes() == whole.read_bytes()


OTHERS = {
    "temperature": {"sampling": Sampling(temperature=0.5, seed=5)},
    "seed": {"sampling": Sampling(temperature=1.0, seed=6)},
    "max_new_tokens": {"max_new_tokens": 20},
    "grader": {"grader": "math"},
    "kv_dtype": {"kv_dtype": "int8"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_completions_of_other_draws_or_options_are_refused_by_name(name, reasoner, problems, whole):
    with pytest.raises(ValueError, match=rf"is of another run, by {name} \("):
        run(reasoner, problems, full(), path=whole, progress=False, **KNOBS | OTHERS[name])


def test_completions_among_other_problems_are_refused_even_where_their_own_are_the_same(reasoner, problems, whole):
    with pytest.raises(ValueError, match=r"is of another run, by data \("):
        run(reasoner, [*problems, problems[0]], full(), path=whole, progress=False, **KNOBS)


def test_completions_without_digests_are_of_a_version_that_cannot_show_what_they_are_of(reasoner, problems, whole, tmp_path):
    path = tmp_path / "full.jsonl"
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "made_of"}) + "\n" for line in lines))
    with pytest.raises(
        ValueError, match=r"an older version of jkv wrote it without weights, config, tokenizer, data, .* nobody"
    ):
        run(reasoner, problems, full(), path=path, progress=False, **KNOBS)
    assert len(read_records(path)) == 6  # and they can be read


def test_samples_beyond_the_number_that_is_asked_for_are_refused(reasoner, problems, whole):
    with pytest.raises(ValueError, match=r"must hold samples below 1 of each problem; line .* has 1"):
        run(reasoner, problems, full(), path=whole, progress=False, **KNOBS | {"samples": 1})


def test_a_line_that_is_there_twice_is_refused(reasoner, problems, whole, tmp_path):
    path = tmp_path / "full.jsonl"
    path.write_text(whole.read_text() + whole.read_text().splitlines(keepends=True)[2])
    with pytest.raises(ValueError, match="must hold each sample once; line 7 repeats one"):
        run(reasoner, problems, full(), path=path, progress=False, **KNOBS)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The words of a small comparison, but for --out."""
    file = tmp_path_factory.mktemp("data") / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": p.prompt, "answer": p.answer}) + "\n" for p in held_out(3, seed=4)))
    words = ["--dataset", file, "--policies", "full,r_kv", "--budgets", "48", "--max-new-tokens", "24", "--max-running", "2"]
    return ["eval", *map(str, words), "--page-size", "4", "--samples", "2", "--temperature", "1"]


@pytest.fixture(scope="module")
def steady(command, tmp_path_factory):
    """What an unbroken comparison wrote."""
    out = tmp_path_factory.mktemp("steady") / "out"
    assert cli.main([*command, "--out", str(out)]) == 0
    return out


OF_THE_RUN = {"kv_bytes", "kv_share", "occupancy", "tokens_per_second", "amsr", "peak_kv_bytes"}


def figures(out):
    """What every run of the same comparison comes to."""
    outcomes = json.loads((out / "tiny-reasoner.json").read_text())["outcomes"]
    return json.dumps([{name: value for name, value in one.items() if name not in OF_THE_RUN} for one in outcomes])


def assert_same_run(out, steady):
    """All figures and completions, each once, and nothing half written."""
    assert figures(out) == figures(steady)
    for name in ("full.jsonl", "r_kv-48.jsonl"):
        mine, other = (folder / "tiny-reasoner-generations" / name for folder in (out, steady))
        assert mine.read_bytes().count(b"\n") == 6
        assert texts(mine) == texts(other)
    assert not list(out.rglob(f"*{reports.PART}"))


def fill_disk(monkeypatch, at):
    """Lets the file system be full from some write on; how many writes there were."""
    writes, real = [], reports.write_all

    def write_all(descriptor, content):
        writes.append(content)
        if len(writes) >= at:
            real(descriptor, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, content)

    monkeypatch.setattr(reports, "write_all", write_all)
    return writes


# Of the first of two policies: 1 the settings, 2 an empty file of completions, 3 to 8 a line each, 9 to 11 the reports.
@pytest.mark.parametrize("at", [5, *(pytest.param(at, marks=pytest.mark.slow) for at in range(1, 21) if at != 5)])
def test_a_disk_that_is_full_at_any_write_is_told_and_the_run_goes_on_later(at, command, steady, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        writes = fill_disk(patched, at)
        assert cli.main([*command, "--out", str(out)]) == 2
    assert len(writes) >= at
    errors = capsys.readouterr().err
    assert f"jkv: error: {out}" in errors
    assert ": No space left on device" in errors
    assert cli.main([*command, "--out", str(out), "--resume"]) == 0
    assert_same_run(out, steady)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999], ids=["empty", "half", "all but the end"])
def test_figures_that_were_cut_off_come_from_the_completions_again(share, command, steady, tmp_path, capsys):
    out = Path(shutil.copytree(steady, tmp_path / "out"))
    file = out / "tiny-reasoner.json"
    text = file.read_text().rstrip()
    file.write_text(text[: int(share * len(text))])
    assert cli.main([*command, "--out", str(out), "--resume"]) == 0
    assert f"jkv: {file} is damaged; its figures are computed from the completions again" in capsys.readouterr().err
    assert_same_run(out, steady)


def swap_weights(folder):
    """Another fine-tune in the place of a model."""
    model = checkpoint.load("tiny-reasoner")
    params = model.params.replace(final_norm=model.params.final_norm * 1.01)
    checkpoint.export(params, model.tokenizer, folder, dtype=np.float32)


@pytest.mark.parametrize("main_file", ["whole", "damaged", "gone"])
@pytest.mark.parametrize("at", ["weights", "data"])
def test_a_command_does_not_go_on_with_what_was_replaced(at, main_file, steady, command, tmp_path, capsys):
    model, data, out = tmp_path / "tiny-reasoner", tmp_path / "mine.jsonl", tmp_path / "out"
    shutil.copytree(checkpoint.shipped_folders()["tiny-reasoner"], model)
    shutil.copy(command[2], data)
    words = [*command[:2], str(data), *command[3:], "--model", str(model), "--out", str(out)]
    assert cli.main(words) == 0
    if at == "weights":
        swap_weights(model)
    else:
        data.write_text(data.read_text().replace("=3", "=4", 1).replace("=2", "=3", 1))
    file = out / "tiny-reasoner.json"
    if main_file == "damaged":
        file.write_text(file.read_text()[:100])
    elif main_file == "gone":
        file.unlink()
    before = {path: path.read_bytes() for path in out.rglob("*.json*")}
    capsys.readouterr()
    assert cli.main([*words, "--resume"]) == 2
    error = capsys.readouterr().err
    assert f", by {at} ({at} then '" in error
    assert "Give another --out to start anew" in error
    assert {path: path.read_bytes() for path in out.rglob("*.json*")} == before


def test_nothing_is_generated_where_any_file_is_of_another_run(command, steady, tmp_path, capsys):
    """The full cache's completions are gone, and would be generated first."""
    out = Path(shutil.copytree(steady, tmp_path / "out"))
    (out / "tiny-reasoner.json").unlink()
    (out / "tiny-reasoner-generations" / "full.jsonl").unlink()
    lines = out / "tiny-reasoner-generations" / "r_kv-48.jsonl"
    lines.write_text(re.sub(r'"weights": "\w+"', '"weights": "0f"', lines.read_text()))
    assert cli.main([*command, "--out", str(out), "--resume"]) == 2
    assert f"Line 1 of {lines} is of another run, by weights (weights then '0f', now" in capsys.readouterr().err
    assert not (out / "tiny-reasoner-generations" / "full.jsonl").exists()


def test_a_comparison_of_an_older_version_is_readable_and_not_gone_on_with(tmp_path):
    path = ROOT / "results" / "tiny-2-tiny-reasoner-2.json"
    about = json.loads(path.read_text())["about"]
    assert compare.read(path, about)
    with pytest.raises(ValueError, match="or the same: an older version of jkv wrote it without weights, data, so that nobody"):
        compare.read(path, about | {"weights": "0f", "data": "1a"})


@pytest.mark.parametrize("text", ["[]", "{}", '{"about": {}, "outcomes": [3]}', '{"about": {}, "outcomes": [{"x": 1}]}', "3"])
def test_figures_of_something_else_are_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="must hold outcomes that `jkv eval` wrote"):
        compare.read(tmp_path / "x.json", {})


def test_a_second_evaluation_of_a_folder_is_refused_and_a_killed_one_holds_no_lock(command, steady, tmp_path, capsys):
    out = tmp_path / "out"
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    words = [sys.executable, "-m", "jkv", *command, "--out", str(out)]
    first = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = out / "tiny-reasoner-generations" / "full.jsonl"
    end = time.monotonic() + 120
    while not (lines.exists() and lines.read_bytes().count(b"\n")) and time.monotonic() < end:
        time.sleep(0.01)
    for more in ([], ["--resume"]):
        assert cli.main([*command, "--out", str(out), *more]) == 2
        assert f"{out} must have one writer; process {first.pid} writes there. Wait until" in capsys.readouterr().err
    first.kill()
    first.wait()
    assert cli.main([*command, "--out", str(out), "--resume"]) == 0
    assert_same_run(out, steady)


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_an_evaluation_killed_at_any_moment_goes_on_to_the_same_figures(kills, command, steady, tmp_path):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}

    def start(out, *more):
        words = [sys.executable, "-m", "jkv", *command, "--out", str(out), *more]
        return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    began = time.monotonic()
    assert start(tmp_path / "timed").wait() == 0
    seconds = time.monotonic() - began
    for i in range(kills):
        out = tmp_path / str(i)
        process = start(out)
        time.sleep(seconds * (0.4 + 0.6 * (i + 0.5) / kills))
        process.kill()
        process.wait()
        assert start(out, "--resume").wait() == 0
        assert_same_run(out, steady)
