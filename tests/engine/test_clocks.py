"""The clock of an idle device, on a clock of the test's own."""

import pytest

import jkv
from jkv.engine import clocks


@pytest.fixture
def now(monkeypatch):
    """The time, a list of one number."""
    seconds = [0.0]
    monkeypatch.setattr(clocks, "running_seconds", lambda: seconds[0])
    return seconds


def test_time_counts_from_when_the_device_was_last_seen_busy(now):
    clock = clocks.IdleClock()
    clock.begin(True)
    now[0] = 1.0
    with clock.dispatching(True):  # nothing ran for a second, nor while this was dispatched
        now[0] = 1.5
    assert clock.seconds == 1.5
    now[0] = 3.0
    with clock.dispatching(False):  # the last program still ran
        now[0] = 3.25
    states = iter([False, True])
    with clock.waiting(lambda: next(states)):
        now[0] = 10.0
    assert clock.seconds == 1.5
    now[0] = 10.5
    clock.end(is_unfinished=True)
    now[0] = 12.5
    clock.begin(True)
    assert (clock.seconds, clock.between) == (2.0, 2.0)
    clock.look(False)
    now[0] = 14.0
    clock.look(False)  # seen busy
    now[0] = 15.0
    clock.look(True)
    with clock.dispatching(True):
        now[0] = 16.0
    assert (clock.seconds, clock.between) == (4.0, 2.0)


def test_time_without_requests_does_not_count(now):
    clock = clocks.IdleClock()
    clock.begin(True)
    clock.end(is_unfinished=False)
    now[0] = 100.0
    clock.look(False)
    clock.begin(True)
    with clock.dispatching(True):
        now[0] = 101.0
    assert (clock.seconds, clock.between) == (1.0, 0.0)


def test_waiting_for_what_is_done_is_no_sign_of_a_busy_device(now):
    clock = clocks.IdleClock()
    clock.begin(True)
    with clock.waiting(lambda: True):
        now[0] = 1.0
    with clock.dispatching(True):
        now[0] = 2.0
    assert clock.seconds == 2.0


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engines_idle_time_is_part_of_its_turns(model, ahead):
    engine = jkv.Engine(model, max_running=2, max_slots=64, ahead=ahead)
    for _ in range(3):
        engine.submit([1, 2, 3], max_new_tokens=32, stop_ids=())
    engine.run()
    clock, stats = engine.stats.idle, engine.stats
    assert 0 < clock.seconds <= stats.seconds
    seconds = clock.seconds, clock.between
    engine.submit([1, 2, 3], max_new_tokens=4, stop_ids=())
    engine.sleep()
    engine.wake()
    assert (clock.seconds, clock.between) == seconds
    engine.run()
    engine.reset_stats()
    assert engine.stats.idle.seconds == engine.stats.idle.between == 0
