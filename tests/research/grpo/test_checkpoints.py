"""Checkpoints of a run that was killed, that met a full disk, or whose files were damaged: the last whole one remains."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from research.grpo.checkpoints import Checkpoints, History, Progress, number_of

ROOT = Path(__file__).parents[3]
ABOUT = {"arm": "full", "seed": 0}


def progress_at(step, is_evaluated=False):
    """What a made-up run is after so many steps: different arrays and records for each."""
    rng = np.random.default_rng((step, is_evaluated))
    params = {"a": jax.numpy.asarray(rng.standard_normal((40, 30)), jax.numpy.float32), "b": jax.numpy.arange(step, step + 7)}
    history = History([{"reward": i / 3, "loss": float("nan")} for i in range(step)], [{"step": step}] if is_evaluated else [])
    return Progress(params, {"moments": params["a"] * 2}, history)


@contextlib.contextmanager
def opened(folder, about=ABOUT):
    with contextlib.closing(Checkpoints(folder, about)) as checkpoints:
        yield checkpoints


def restored(folder):
    with opened(folder) as checkpoints:
        return checkpoints.restore(progress_at(0), 1000)


def assert_same(one, other):
    assert json.dumps([one.history.steps, one.history.evaluations]) == json.dumps(
        [other.history.steps, other.history.evaluations]
    )
    for x, y in zip(jax.tree.leaves(one[:2]), jax.tree.leaves(other[:2]), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints, after steps 3 and 5; not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoints") / "full-0"
    with opened(folder) as checkpoints:
        for step in (3, 5):
            checkpoints.save(progress_at(step))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def files_of(folder, step):
    return sorted(path for path in (folder / str(2 * step)).rglob("*") if path.is_file())


def damage(path, offset):
    content = bytearray(path.read_bytes())
    content[offset % len(content)] ^= 4
    path.write_bytes(content)


def test_an_evaluation_of_the_last_step_never_takes_the_place_of_that_step(tmp_path, monkeypatch):
    """A process that dies as it saves the evaluation goes on from the step."""
    with opened(tmp_path) as checkpoints:
        checkpoints.save(progress_at(3))
    with opened(tmp_path) as checkpoints:
        assert_same(checkpoints.restore(progress_at(0), 5), progress_at(3))
        monkeypatch.setattr(checkpoints.manager, "save", lambda *args, **settings: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(progress_at(3, is_evaluated=True))
    assert_same(restored(tmp_path), progress_at(3))
    with opened(tmp_path) as checkpoints:
        checkpoints.save(progress_at(3, is_evaluated=True))
    assert_same(restored(tmp_path), progress_at(3, is_evaluated=True))


def test_a_later_state_has_a_higher_number():
    states = [(0, True), (1, False), (1, True), (2, False), (3, False)]
    numbers = [number_of(progress_at(*state).history) for state in states]
    assert numbers == sorted(set(numbers))


def flips_go_on_from_a_whole_checkpoint(saved, folder, offsets_of):
    """Restores after single damages of the last checkpoint; how many were tried, and how many went on from the one before."""
    tried, before = 0, 0
    for path in files_of(saved, 5):
        for offset in offsets_of(path.stat().st_size):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(saved, folder)
            damage(folder / path.relative_to(saved), offset)
            found = restored(folder)
            is_before = len(found.history.steps) == 3
            assert_same(found, progress_at(3 if is_before else 5))  # bytes that mean nothing may differ
            tried, before = tried + 1, before + is_before
    return tried, before


@pytest.mark.parametrize("flips", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_dropped_for_the_one_before_and_never_restored_as_another(saved, tmp_path, capfd, flips):
    rng = random.Random(0)
    tried, before = flips_go_on_from_a_whole_checkpoint(
        saved, tmp_path / "copy", lambda size: [size // 2, *rng.sample(range(size), min(size, flips - 1))]
    )
    assert tried > 8
    assert before >= 3  # arrays, history, and the files that lead to them
    assert "checkpoint 10 is damaged, and the one before is used" in capfd.readouterr().err


def test_a_run_goes_on_after_a_damaged_checkpoint_was_dropped(copy):
    for path in files_of(copy, 5):
        damage(path, path.stat().st_size // 2)
    with opened(copy) as checkpoints:
        now = checkpoints.restore(progress_at(0), 1000)
        assert_same(now, progress_at(3))
        checkpoints.save(progress_at(5))  # of the same number as the damaged one
    assert_same(restored(copy), progress_at(5))


def test_damaged_checkpoints_alone_are_an_error(copy):
    for step in (3, 5):
        for path in files_of(copy, step):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"must hold a checkpoint that is whole; all are damaged\. Remove the folder"):
        restored(copy)


def test_another_run_s_checkpoints_are_refused_and_kept(copy):
    with opened(copy, ABOUT | {"seed": 1}) as checkpoints, pytest.raises(ValueError, match="another run, by seed"):
        checkpoints.restore(progress_at(0), 1000)
    with opened(copy) as checkpoints, pytest.raises(ValueError, match="holds 5 steps, and 4 are asked for"):
        checkpoints.restore(progress_at(0), 4)
    assert_same(restored(copy), progress_at(5))


def test_a_folder_has_one_run_at_a_time(copy):
    with opened(copy), pytest.raises(ValueError, match=f"must have one writer; process {os.getpid()} writes there"):
        Checkpoints(copy, ABOUT)
    assert_same(restored(copy), progress_at(5))


SAVES = """
import resource, sys
from tests.research.grpo.test_checkpoints import *

with opened(Path(sys.argv[1])) as checkpoints:
    now = checkpoints.restore(progress_at(0), 10**6)
    for step in range(len(now.history.steps), 10**6):
        state = progress_at(step)
        if step == len(now.history.steps):
            assert_same(state, now)  # what was restored is what was saved
        checkpoints.save(state)
        checkpoints.manager.wait_until_finished()
        print(step, flush=True)
        if len(sys.argv) > 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
"""


def start(*words):
    settings = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SAVES, *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | settings)


def kill_at_moments(folder, moments):
    """Kills a process that saves one step after the other, so many seconds after its first, and starts it again."""
    for moment in moments:
        process = start(folder)
        first = process.stdout.readline()
        assert first, process.stderr.read().decode()
        time.sleep(moment)
        process.kill()
        told = [int(line) for line in [first, *process.stdout.read().split()]]
        process.communicate()
        found = restored(folder)
        assert_same(found, progress_at(len(found.history.steps)))
        assert len(found.history.steps) >= told[-1]  # what was told to be saved is not lost


@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_a_process_killed_as_it_saves_goes_on_from_the_last_whole_checkpoint(tmp_path, kills):
    rng = random.Random(0)
    kill_at_moments(tmp_path / "run", [0.05, *(rng.uniform(0, 0.5) for _ in range(kills - 1))])


def test_a_full_disk_is_an_error_and_leaves_the_last_whole_checkpoint(tmp_path):
    process = start(tmp_path / "run", 200)
    told, errors = process.communicate()
    assert process.returncode == 1
    assert told.split() == [b"0", b"1"][: len(told.split())]
    assert b"File too large" in errors
    found = restored(tmp_path / "run")
    assert_same(found, progress_at(len(found.history.steps)))
    assert len(found.history.steps) >= int(told.split()[-1])
    kill_at_moments(tmp_path / "run", [0.05])


GRPO = [sys.executable, "-m", "research.grpo"]


@pytest.mark.parametrize("steps", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_the_command_killed_at_any_moment_comes_to_the_same_run(steps, tmp_path):
    config = tmp_path / "small.toml"
    config.write_text(
        f'task = "counting"\nsteps = {steps}\ncheckpoint_every = 1\nevaluate_every = 3\nprompts = 4\nsamples = 8\n'
        'max_new_tokens = 48\nevaluations = 32\n[arms."r_kv, replayed"]\npolicy = "r_kv"\nloss = "replay"\n'
        "settings = { budget = 16, interval = 8, window = 4 }\n"
    )
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    def start(name):
        words = [*GRPO, config, "--out", tmp_path / name, "--checkpoints", tmp_path / name / "kept", "--no-progress"]
        return subprocess.Popen(list(map(str, words)), cwd=tmp_path, env=os.environ | cache)

    def last():
        return max((int(path.name) for path in (tmp_path / "broken" / "kept").glob("*/*") if path.name.isdigit()), default=-1)

    assert start("steady").wait() == 0
    rng, kills = random.Random(0), 0
    while True:
        before, process = last(), start("broken")
        while process.poll() is None and last() <= before:  # until it has kept something new
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 1))
        process.kill()
        if process.wait() == 0:
            break
        kills += 1
    assert kills >= steps // 2

    def told(name):
        (record,) = json.loads((tmp_path / name / "small.json").read_text())["runs"]
        record["moments"] = [{**moment, "seconds": 0} for moment in record["moments"]]
        return record | {"tokens_per_second": 0}

    assert told("broken") == told("steady")
