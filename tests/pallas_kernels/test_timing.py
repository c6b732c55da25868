"""The timer of kernels: what it counts as one call, and that calls on one buffer work."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import timing
from pallas_kernels.quantised import FORMATS, zeros


def test_a_call_s_seconds_are_the_median_of_warm_measurements_of_sufficient_length(monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(timing, "SECONDS", 1.0)
    made, seconds = [], iter([9.0, 0.5, 4.0, 1.2, 1.0])  # a cold call, a trial of two, and three measurements

    def queue(calls):
        made.append(calls)
        return next(seconds)

    assert timing.median_seconds(queue) == pytest.approx(1.2 / 4)
    assert made == [1, 2, 4, 4, 4]


@pytest.mark.parametrize(("platform", "clock"), [("cpu", "queue"), ("tpu", "loop")])
def test_a_quantised_pool_is_updated_by_every_call(monkeypatch, platform, clock):
    """It is several arrays, and the other results have other shapes."""
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "SECONDS", 1e-4)
    monkeypatch.setattr(timing, "own_platform", lambda: platform)
    pool, made = zeros((2, 2, 4, 8), jnp.float32, FORMATS["int8"]), []

    def add(pool, number):
        jax.debug.callback(made.append, pool.scale[0, 0, 0])
        return dataclasses.replace(pool, scale=pool.scale + number), pool.codes[0]

    assert timing.seconds_of(add, (pool, jnp.float32(1)), is_updated=True)[1] == clock
    jax.effects_barrier()
    assert len(made) >= (timing.IN_PROGRAM if clock == "loop" else 1)
    assert sorted(map(float, made)) == list(range(len(made)))  # each on the results of the one before


@pytest.mark.parametrize("is_updated", [False, True], ids=["kept", "updated"])
def test_calls_run_on_the_arguments_and_leave_the_caller_s_arrays_alone(monkeypatch, is_updated):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "SECONDS", 1e-4)
    x = jnp.zeros(8)
    seconds, clock = timing.seconds_of(lambda x, y: x + y, (x, jnp.ones(8)), is_updated=is_updated)
    assert seconds > 0
    assert clock == "queue"
    assert (x == 0).all()  # not donated
