"""The mesh form: `tests/support/eight_devices.py`, in a process of its own, for the number of devices is settled when JAX
starts.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.devices import environment

ROOT = Path(__file__).parents[2]


def run_on_eight_devices(name, marks="not slow"):
    """Runs a file of `tests/support` where JAX has eight devices."""
    report = f"--junitxml=.cache/seconds/{Path(name).stem}.xml"  # as `.ci/run` does of the other tests
    command = [sys.executable, "-m", "pytest", f"tests/support/{name}", "-p", "no:cacheprovider", "-m", marks, report]
    done = subprocess.run(command, cwd=ROOT, env=environment(8), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


each_part = pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])


@pytest.mark.everyday  # the tests of the other process choose by themselves
@each_part
def test_eight_devices_do_what_one_does(marks):
    run_on_eight_devices("eight_devices.py", marks)


@pytest.mark.everyday
@each_part
def test_copies_of_kv_heads_do_what_one_device_does(marks):
    run_on_eight_devices("eight_devices_copies.py", marks)


@pytest.mark.everyday
@each_part
def test_replicas_on_a_mesh_do_what_one_engine_does(marks):
    run_on_eight_devices("eight_devices_replicas.py", marks)


@each_part
def test_experts_on_eight_devices_do_what_they_do_on_one(marks):
    run_on_eight_devices("eight_devices_experts.py", marks)


@each_part
def test_every_golden_checkpoint_on_two_devices_does_what_it_does_on_one(marks):
    run_on_eight_devices("eight_devices_golden.py", marks)
