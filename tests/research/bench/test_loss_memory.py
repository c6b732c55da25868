"""The step whose memory is measured replays a window, and says what it planned."""

import numpy as np

from jkv.checkpoints.model_shapes import find_shape
from research.bench import loss_memory


def test_each_token_reads_the_budget_and_up_to_an_interval_more():
    _, config = find_shape("tiny-reasoner")
    batch = loss_memory.windowed(config, tokens=96, budget=16)
    begin, end, source = batch.columns.of_layer(config.num_layers - 1)
    assert source is None
    place = np.arange(96)
    reads = ((np.asarray(begin)[0, 0] <= place[:, None]) & (place[:, None] < np.asarray(end)[0, 0])).sum(axis=1)
    assert reads[:16].tolist() == [*range(1, 17)]
    assert set(reads[20:].tolist()) == {17, 18, 19, 20}


def test_a_step_of_an_adapter_says_what_it_planned_and_used():
    found = loss_memory.memory_of_a_step("tiny-reasoner", tokens=64, budget=16, rank=2, remat=True)
    assert found["planned_mb"] > 0
    assert found["weights_mb"] == 10
    assert {"used_mb", "seconds"} < found.keys()
