"""The page size of an engine that is not told one: one rule for all entrances, told in the statistics."""

import pytest

import jkv
from jkv.cache import default_page_size
from jkv.engine import memory
from jkv.planning.devices import DEVICES
from jkv.testing import tiny_model


@pytest.fixture(params=["cpu", "tpu"])
def platform(request, monkeypatch):
    """What the weights' device calls itself; the programs still run on the CPU."""
    monkeypatch.setattr(memory, "platform_of", lambda device: request.param)
    return request.param


def test_every_entrance_takes_the_platform_s_page_size_unless_told(platform):
    model, usual = tiny_model(), {"cpu": 16, "tpu": 128}[platform]
    assert jkv.Engine(model, max_slots=64).stats.page_size == usual
    assert jkv.Engine(model, max_slots=64, page_size=4).stats.page_size == 4
    assert jkv.generate(model, [1, 2, 3], max_new_tokens=4).stats.page_size == usual
    rollout = jkv.Rollout(model, jkv.full(), max_prompt_tokens=8, max_new_tokens=8)
    assert rollout.engine.stats.page_size == usual
    assert jkv.generate(model, [1, 2, 3], max_new_tokens=4, page_size=2).stats.page_size == 2


def test_a_plan_and_its_engine_agree():
    for device in DEVICES.values():
        plan = jkv.plan("r1-qwen-1.5b", device, jkv.r_kv(budget=256), length=2048, batch=1)
        assert plan.page_size == plan.engine["page_size"] == default_page_size(device.platform)
