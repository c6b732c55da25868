"""How long tokens take, in a histogram of fixed size."""

import numpy as np
import pytest

import jkv
from jkv.engine.clocks import Latency


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.99, 1.0])
def test_a_quantile_is_right_to_the_width_of_a_bucket(share):
    seconds = np.exp(np.random.default_rng(0).normal(-5, 2, 10_000))
    latency = Latency()
    for one in seconds:
        latency.add(float(one))
    exact = np.quantile(seconds, share, method="inverted_cdf")
    assert latency.quantile(share) == pytest.approx(exact, rel=0.05)


def test_what_is_beyond_the_scale_and_what_is_counted_several_times():
    latency, size = Latency(), Latency().counts.nbytes
    assert latency.quantile(0.5) == 0
    for seconds in (0.0, -1.0, 1e-9, 1e9):
        latency.add(seconds)
    latency.add(1.0, 96)
    assert latency.quantile(0.5) == pytest.approx(1.0, rel=0.05)
    assert latency.counts.sum() == 100
    assert latency.counts.nbytes == size


def test_every_token_but_those_of_the_first_chunk_is_between_two(model):
    engine = jkv.Engine(model, max_running=2, max_slots=64, page_size=4, chunk=4)
    tickets = [engine.submit([1, 2, 3], max_new_tokens=14, stop_ids=()) for _ in range(5)]
    engine.run()
    samples = engine.take(tickets)
    stats = engine.stats
    assert stats.first_token.counts.sum() == 5
    assert stats.between_tokens.counts.sum() == 5 * (14 - 4)
    for sample in samples:
        completion = sample.completion
        assert 0 < completion.first_seconds < completion.last_seconds <= completion.seconds
    # The last requests wait for a row before their first token.
    assert samples[-1].completion.first_seconds > samples[0].completion.first_seconds
    engine.reset_stats()
    assert engine.stats.first_token.counts.sum() == 0


def test_a_result_tells_them(model):
    stats = jkv.generate(model, [1, 2, 3], n=3, max_new_tokens=40, stop_ids=(), progress=False).stats
    assert 0 < stats.first_token_p50 <= stats.first_token_p99
    assert 0 < stats.token_p50 <= stats.token_p99 < stats.first_token_p99 + stats.seconds
    assert "token_p99" in repr(stats)
