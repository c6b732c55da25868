"""Samples that wait outside of the queue, while a failing step is searched, count as waiting."""

import types

import pytest

from jkv.integrations.sampler import load_of


def fake_engine():
    one = types.SimpleNamespace(is_finished=False)
    scheduler = types.SimpleNamespace(running=[one], waiting=[(0, one)], held=[one, one], reserved=1)
    return types.SimpleNamespace(scheduler=scheduler, num_pages=2)


def test_a_sampler_counts_samples_that_a_search_holds():
    assert load_of(fake_engine()).num_requests_waiting == 3


def test_a_page_of_metrics_counts_samples_that_a_search_holds(tiny):
    pytest.importorskip("prometheus_client")
    from jkv.serving.metrics import EngineCollector

    held = tiny.engine.scheduler.held
    held.extend([None, None])
    try:
        families = EngineCollector(tiny.engine, ("tiny", "0")).collect()
        waiting = next(one for one in families if one.name == "vllm:num_requests_waiting")
    finally:
        held.clear()
    assert waiting.samples[0].value == 2
