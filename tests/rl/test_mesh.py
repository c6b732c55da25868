"""Scoring and training on a mesh: `tests/support/eight_devices_rl.py`, which needs a process of its own."""

import pytest

from tests.engine.test_mesh import run_on_eight_devices


@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_meshes_of_eight_devices_score_and_train_as_one(marks):
    run_on_eight_devices("eight_devices_rl.py", marks)
