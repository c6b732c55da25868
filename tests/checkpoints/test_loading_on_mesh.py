"""Loading onto a mesh: `tests/support/eight_devices_loading.py`, in a process with eight devices."""

import pytest

from tests.engine.test_mesh import run_on_eight_devices


@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_models_are_loaded_to_the_devices_of_a_mesh(marks):
    run_on_eight_devices("eight_devices_loading.py", marks)
