"""What the engine counts and times."""

import pytest

import jkv
from jkv.testing import tiny_model


@pytest.mark.parametrize("is_asked", [False, True])
def test_compactions_are_timed_where_someone_asks_alone(is_asked):
    """Timing one drains the device before and after."""
    engine = jkv.Engine(tiny_model(), max_running=1, max_slots=64, page_size=4)
    engine.runner.meter.times_compactions = is_asked
    engine.submit([5, 6, 7, 8], jkv.r_kv(16, 8, window=4), max_new_tokens=40, stop_ids=())
    engine.run()
    assert engine.stats.compactions > 1
    assert engine.stats.compaction.counts.sum() == is_asked
