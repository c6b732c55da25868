"""The limit of a worker process is always kept: in any thread, in C code, where exceptions are swallowed, after Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jkv.evaluation.time_limit import TimeLimited

SCRIPT = """
import json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    task, value, seconds = json.loads(line)
    if task == "swallow":
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                pass
    if task == "hold":  # one call of C, which holds the interpreter's lock
        9 ** 9 ** 8
    if task == "memory":
        value = len(bytearray(1 << 42))
    if task == "die":
        os._exit(3)
    if task == "sleep":
        time.sleep(value)
    print(json.dumps([os.getpid(), value]), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    worker = TimeLimited(script, seconds=1.0)
    yield worker
    worker.close()


@pytest.mark.parametrize("task", ["swallow", "hold", "memory", "die"])
def test_what_ends_in_no_time_has_no_answer_and_the_next_question_has_its_own(worker, task):
    first = worker.ask("echo", 1)
    start = time.perf_counter()
    assert worker.ask(task, 2) is None
    assert time.perf_counter() - start < 3.0
    again = worker.ask("echo", 3)
    assert again[1] == 3
    assert again[0] != first[0]


def test_the_process_is_reused(worker):
    worker.ask("echo", 0)
    start = time.perf_counter()
    found = [worker.ask("echo", i) for i in range(200)]
    assert [value for _, value in found] == list(range(200))
    assert len({process for process, _ in found}) == 1
    assert (time.perf_counter() - start) / 200 < 0.02


def test_threads_share_a_process_and_get_their_own_answers(worker):
    found = {}

    def ask(name):
        found[name] = [worker.ask("echo", [name, i])[1] for i in range(20)]

    threads = [threading.Thread(target=ask, args=[name]) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [[name, i] for i in range(20)] for name in range(8)}


def test_an_answer_that_was_interrupted_is_not_taken_for_the_next(worker):
    worker.ask("echo", 0)
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worker.ask("sleep", 0.6)
    assert worker.ask("echo", 7)[1] == 7


def test_answers_near_the_limit_are_never_those_of_another_question(worker):
    for i in range(6):
        found = worker.ask("sleep", 0.97 + 0.01 * i)
        assert found is None or found[1] == 0.97 + 0.01 * i
        assert worker.ask("echo", i)[1] == i


def test_a_script_that_cannot_start_is_named(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no')")
    with pytest.raises(RuntimeError, match=r"broken\.py cannot start: run .* to see why"):
        TimeLimited(script, seconds=1.0).ask("echo", 1)


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="this system has no alarm")
def test_the_worker_ends_with_the_process_that_asked():
    pytest.importorskip("math_verify")
    code = """
import os, threading
from jkv.evaluation.graders import MATH_VERIFY, equal_math
equal_math("x", "y")
print(MATH_VERIFY._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    process = int(done.stdout)
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("the worker is left behind")
