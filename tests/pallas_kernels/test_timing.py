"""The timer of kernels: what it counts as one call, and that calls on one buffer work."""

import jax.numpy as jnp
import pytest

from pallas_kernels import timing


def test_a_call_s_seconds_are_the_median_of_warm_measurements_of_sufficient_length(monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(timing, "SECONDS", 1.0)
    made, seconds = [], iter([9.0, 0.5, 4.0, 1.2, 1.0])  # a cold call, a trial of two, and three measurements

    def queue(calls):
        made.append(calls)
        return next(seconds)

    assert timing.median_seconds(queue) == pytest.approx(1.2 / 4)
    assert made == [1, 2, 4, 4, 4]


@pytest.mark.parametrize("is_updated", [False, True], ids=["kept", "updated"])
def test_calls_run_on_the_arguments_and_leave_the_caller_s_arrays_alone(monkeypatch, is_updated):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "SECONDS", 1e-4)
    x = jnp.zeros(8)
    seconds, clock = timing.seconds_of(lambda x, y: x + y, (x, jnp.ones(8)), is_updated=is_updated)
    assert seconds > 0
    assert clock == "queue"
    assert (x == 0).all()  # not donated
