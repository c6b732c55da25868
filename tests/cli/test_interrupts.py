"""Ctrl-C ends every command with status 130, however often it is pressed, and loses nothing that was finished."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

STEPS = """
from jkv.engine.engine import Engine
step = Engine.step
Engine.step = lambda engine: (print(1, flush=True), step(engine))[1]
"""


def start(arguments, setup="", **others):
    """A command in a process of its own; a shell's background jobs ignore Ctrl-C, which this undoes."""
    begin, run = (
        "import signal, sys; signal.signal(2, signal.default_int_handler)\n",
        "from jkv.cli import main; sys.exit(main())",
    )
    command = [sys.executable, "-c", begin + setup + run, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ, **others)


def wait_for(is_ready, process):
    """Waits until a condition holds or the process has ended."""
    while not is_ready() and process.poll() is None:
        time.sleep(0.02)


def press(process, presses):
    """Presses Ctrl-C some times; returns the status and standard error."""
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def lines_of(folder):
    """The lines of all completions so far."""
    return [line for file in sorted(folder.glob("*-generations/*.jsonl")) for line in file.read_text().splitlines()]


def figures(folder):
    """The outcomes, without what depends on speed or on how rows were batched."""
    record = json.loads((folder / "tiny-reasoner.json").read_text())
    names = ("policy", "budget", "right", "mean_tokens", "evicted", "compactions", "truncated")
    return [{name: outcome[name] for name in names} for outcome in record["outcomes"]]


@pytest.mark.parametrize(
    ("size", "all_presses"),
    [
        pytest.param("--problems 3 --policies full --max-running 2", (3, 0), id="once"),
        pytest.param(
            "--problems 8 --policies r_kv,h2o --budgets 25%,50% --max-running 3",
            (1, 2, 5, 1, 3, 0),
            id="again_and_again",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_evaluation_that_is_interrupted_resumes_to_the_same_table(tmp_path, size, all_presses):
    whole, folder = tmp_path / "whole", tmp_path / "parts"
    unbroken = start(["eval", *size.split(), "--out", str(whole)])
    errors = unbroken.communicate(timeout=300)[1]
    assert unbroken.returncode == 0, errors
    statuses = []
    for presses in all_presses:
        process = start(["eval", *size.split(), "--out", str(folder), *(["--resume"] if statuses else [])])
        if not presses:
            _, errors = process.communicate(timeout=300)
            statuses.append((process.returncode, errors))
            break
        before = len(lines_of(folder))
        wait_for(lambda before=before: len(lines_of(folder)) > before, process)
        statuses.append(press(process, presses))
    *interrupted, last = statuses
    for status, errors in interrupted:
        assert status == 130, errors
        assert f"jkv: interrupted; --resume --out {folder} goes on" in errors
        assert "Traceback" not in errors
    assert last[0] == 0
    records = [json.loads(line) for line in lines_of(folder)]
    keys = [(record["settings"], record["problem"], record["sample"]) for record in records]
    assert len(keys) == len(set(keys)) == len(lines_of(whole))
    assert figures(folder) == figures(whole)


@pytest.mark.parametrize("presses", [1, 4])
def test_generate_prints_what_there_is(presses):
    process = start(["generate", "b=3;c=7;d=b*c;?d", "-n", "400", "--temperature", "1", "--max-running", "2"], STEPS)
    assert process.stdout.readline() == "1\n"  # the first turn
    status, errors = press(process, presses)
    assert status == 130, errors
    assert "Traceback" not in errors
    assert "cancelled" in errors
