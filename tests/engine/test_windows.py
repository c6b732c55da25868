"""Layers with a sliding window beside layers with full attention: through every part of the engine, and in replay.

Parity with transformers is in `tests/model/test_decoder.py` (the golden checkpoint `qwen3_window`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache import windows
from jkv.engine.chunk_inputs import PrefillPrograms
from jkv.engine.memory import window_bytes
from jkv.engine.state import empty_state
from jkv.eviction import Needs
from jkv.model import decoder
from jkv.replay.other_groups import with_other_groups
from jkv.testing import TINY, TinyTokenizer, find_copies, tiny_model
from research.tasks.train import packed_attention
from tests.support import programs

WINDOW = 6  # not a multiple of the page
CONFIG = dataclasses.replace(TINY, num_layers=4, window=WINDOW, window_layers=(0, 2))
FULL = dataclasses.replace(CONFIG, window=0, window_layers=())
PROMPTS = [list(range(1, 22)), [4, 4, 9], [7]]
KNOBS = {"max_new_tokens": 40, "page_size": 4, "chunk": 8, "stop_ids": (), "progress": False, "poison": True}
MODEL = tiny_model(1, CONFIG, TinyTokenizer())


def run(prompts=PROMPTS, model=MODEL, **settings):
    return jkv.generate(model, prompts, **{"sampling": jkv.Sampling(seed=1)} | KNOBS | settings)


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_replay_with_another_window_differs(window):
    out = run(return_trace=True)
    config = dataclasses.replace(CONFIG, window=window)
    other = dataclasses.replace(MODEL, params=MODEL.params.replace(config=config))
    apart = np.abs(np.asarray(jkv.score(other, out, trace=out.trace).logprobs) - out.logprobs)
    assert apart.max() > 1e-2


def test_a_window_of_all_tokens_is_full_attention():
    params = MODEL.params
    wide, full = (params.replace(config=c) for c in (dataclasses.replace(CONFIG, window=64), FULL))
    tokens, other = (run(model=one, max_new_tokens=30) for one in (wide, full))
    np.testing.assert_array_equal(tokens.tokens, other.tokens)
    np.testing.assert_allclose(tokens.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("window", [6, 40, 300])
def test_a_long_prompt_enters_in_pieces(window, monkeypatch):
    """Of pieces that are longer and shorter than the window, and with a window that is longer than the prompt."""
    model = tiny_model(2, dataclasses.replace(CONFIG, window=window), TinyTokenizer())
    prompt = np.random.default_rng(0).integers(4, 30, 170).tolist()
    out = run(prompts=[prompt], model=model, return_trace=True)
    monkeypatch.setattr("jkv.engine.chunk_inputs.OF_CPU", PrefillPrograms((16, 64), 8))
    in_pieces = run(prompts=[prompt], model=model)
    np.testing.assert_array_equal(in_pieces.tokens, out.tokens)
    np.testing.assert_allclose(in_pieces.logprobs, out.logprobs, atol=1e-5)
    np.testing.assert_allclose(jkv.score(model, out).logprobs, out.logprobs, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_pages_may_be_quantised_and_windows_are_not(kv_dtype):
    quantised = {"kv_format": jkv.EngineOptions(kv_dtype=kv_dtype).kv_format, "page_size": 4}
    state = empty_state(CONFIG, Needs(), num_rows=2, num_pages=8, max_pages=4, **quantised)
    assert state.cache.windows.kv.dtype == jnp.float32


def test_layers_with_a_window_may_rotate_otherwise():
    config = dataclasses.replace(CONFIG, window_theta=50.0, layers_without_rope=(1, 2), family="smollm3", qkv_bias=False)
    model = tiny_model(3, config)
    out = run(model=model, return_trace=True)
    replayed = np.asarray(jkv.score(model, out, trace=out.trace).logprobs)
    assert np.abs(replayed - out.logprobs).max() <= 1e-4
    for change in ({"window_theta": None}, {"layers_without_rope": (1,)}, {"layers_without_rope": (2,)}):
        other = model.params.replace(config=dataclasses.replace(config, **change))
        assert np.abs(np.asarray(jkv.score(other, out, trace=out.trace).logprobs) - out.logprobs).max() > 1e-3, change


# The ring.


def test_a_ring_holds_the_last_tokens_where_their_positions_say():
    rings = windows.create(
        num_layers=1, num_rows=1, num_kv_heads=1, head_size=2, window=6, page_size=4, dtype=jnp.float32, poison=False
    )
    assert windows.old_positions(rings, jnp.int32(0)).tolist() == [-1] * 8
    assert windows.old_positions(rings, jnp.int32(4)).tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    assert windows.old_positions(rings, jnp.int32(8)).tolist() == [6, 7, 2, 3, 4, 5, -1, -1]
    assert rings.tables(1).tolist() == [[[[1, 2]]]]


@pytest.mark.parametrize("name", ["decode", "prefill", "release", "fork", "detach"])
def test_no_program_copies_the_rings(name):
    config = dataclasses.replace(CONFIG, window=1024, head_size=64)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = programs.shapes_of(config, dtype=jnp.float32, page_size=16, sharding=sharding)
    trace = getattr(programs, name, None) or programs.PROGRAMS[name].trace
    compiled = trace(shapes).lower().compile()
    rings = shapes.state.cache.windows.kv
    assert not find_copies(compiled.as_text(), rings.shape)
    assert compiled.memory_analysis().alias_size_in_bytes >= rings.size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < rings.size * 4 / 3


# What is counted, and what is refused.


def test_windows_count_in_statistics_budgets_and_plans():
    engine = jkv.Engine(MODEL, max_running=3, max_slots=64, page_size=4)
    of_windows = window_bytes(MODEL.params, 3, 4)
    assert of_windows == 2 * 3 * 2 * 8 * 2 * 8 * 4  # layers, rows, heads, slots, key and value, channels, bytes
    rings = engine.runner.state.cache.windows.kv
    assert engine.runner.meter.row_bytes - of_windows < 2 * rings[0].nbytes + engine.runner.state.cache.query_ring.nbytes
    assert engine.runner.meter.row_bytes >= of_windows
    engine = jkv.Engine(MODEL, max_running=3, max_slots=64, page_size=4, kv_memory=of_windows + 10 * engine.page_bytes)
    assert engine.num_pages == 10
    with pytest.raises(ValueError, match=r"kv_memory must hold the windows of 2 layers, .* lower max_running"):
        jkv.Engine(MODEL, max_running=3, max_slots=64, page_size=4, kv_memory=of_windows)
    plan = jkv.plan(CONFIG, jkv.DEVICES["h200"], length=1024, prompt=8, batch=4, page_size=4)
    plain = jkv.plan(dataclasses.replace(FULL, num_layers=2), jkv.DEVICES["h200"], length=1024, prompt=8, batch=4, page_size=4)
    assert plan.bytes_per_token == plain.bytes_per_token
    assert plan.own.row_bytes - plain.own.row_bytes == 2 * 2 * 8 * 2 * 8 * 2  # in bfloat16
    assert plan.own.phases["attention"] > plain.own.phases["attention"]
    assert "2 of 4 layers read a window of 6 tokens" in repr(plan)


def test_a_full_cache_has_no_more_than_the_window_in_these_layers():
    out = run(prompts=[PROMPTS[0]], page_size=1, max_new_tokens=20)
    assert out.stats.dense_kv_bytes == (2 * 41 + 2 * WINDOW) * 2 * 2 * 8 * 4


def test_the_prefix_cache_is_refused():
    with pytest.raises(ValueError, match=r"prefix_cache .* layers \[0, 2\] keep their window of 6 tokens"):
        jkv.Engine(MODEL, prefix_cache=True)


def test_a_computation_that_does_not_know_windows_is_refused():
    token = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"full attention in every layer; layers \[0, 2\] have a sliding window of 6"):
        decoder.forward(MODEL.params, token, token, packed_attention, jnp.ones((1, 4, 4), bool))
    assert with_other_groups(FULL, packed_attention, token) is packed_attention
