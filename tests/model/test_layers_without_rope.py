"""Layers whose queries and keys are not rotated (NoPE), wherever the library rotates something.

Parity with transformers is in `test_decoder.py` (the golden checkpoint `smollm3`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
import pallas_kernels as kernels
from jkv.engine import programs
from jkv.model.rotary import rope_of, rotary_frequency, unrotate
from jkv.model.weight_shapes import init_params
from jkv.testing import TINY, random_statistics

HALF = dataclasses.replace(TINY, family="smollm3", qkv_bias=False, layers_without_rope=(1,))
NONE = dataclasses.replace(HALF, layers_without_rope=tuple(range(TINY.num_layers)))
KNOBS = {"max_new_tokens": 48, "page_size": 8, "chunk": 8, "stop_ids": (), "progress": False}
PROMPTS = [list(range(1, 22)), [4, 4, 9]]


def model_of(config):
    return jkv.Model(init_params(config, jax.random.key(1), scale=0.3))


def test_a_replay_with_rope_in_all_layers_differs():
    model = model_of(HALF)
    sampling = jkv.Sampling(seed=1)
    out = jkv.generate(model, PROMPTS, return_trace=True, sampling=sampling, **KNOBS)
    rotated = dataclasses.replace(model, params=model.params.replace(config=dataclasses.replace(HALF, layers_without_rope=())))
    assert np.abs(np.asarray(jkv.score(rotated, out, trace=out.trace).logprobs) - out.logprobs).max() > 1e-3


def test_where_no_layer_has_rope_nothing_changes_when_sinks_move():
    model = model_of(NONE)
    moved, true = (
        jkv.generate(model, PROMPTS, policy=jkv.streaming_llm(budget=20, sinks=4, interval=8, positions=positions), **KNOBS)
        for positions in ("cache", "true")
    )
    np.testing.assert_array_equal(moved.tokens, true.tokens)
    np.testing.assert_allclose(moved.logprobs, true.logprobs, atol=1e-5)


def test_scores_learn_which_layers_have_rope():
    rope = rope_of(HALF)
    np.testing.assert_array_equal(rope.frequency, [rotary_frequency(HALF), np.zeros(HALF.head_size // 2)])
    key = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 2, HALF.head_size)), jnp.float32)
    position = jnp.full((2, 3), 7, jnp.int32)
    np.testing.assert_array_equal(unrotate(rope, key, position)[1], key[1])


def test_raw_keys_of_layers_without_rope_are_compared_as_they_are():
    model = model_of(HALF)
    engine = jkv.Engine(model, max_running=1, max_slots=64, page_size=8)
    engine.submit([i % 31 for i in range(1, 40)], max_new_tokens=20, stop_ids=())
    engine.step()
    state, one = engine.runner.state, np.ones(1, np.int32)
    pair = 0 * one, one, 2 * one, 8 * one
    angle = np.asarray(rotary_frequency(HALF))[None] * 8
    found = programs.measure_pages(state, *pair, angle, unrotated=HALF.layers_without_rope)
    pool = state.cache.pool
    pages = [pool.page_table[:, 0, :, entry][None] for entry in (1, 2)]
    turned, plain = (kernels.block_distance(pool.kv, *pages, jnp.asarray(8 * one), x) for x in (jnp.asarray(angle), None))
    np.testing.assert_array_equal(found[:, 0], turned[:, 0])
    np.testing.assert_array_equal(found[:, 1], plain[:, 1])
    assert np.abs(turned - plain)[:, 1].max() > 1e-3


def test_a_calibration_of_other_layers_is_refused():
    statistics = random_statistics(model_of(HALF))
    with pytest.raises(ValueError, match=r"none in layers \[0, 1\]"):
        jkv.generate(model_of(NONE), [1, 2], policy=jkv.tri_attention(24, statistics=statistics), max_new_tokens=2)
