"""`kv_dtype`: quantised pages under every policy, with sharing, preemption and exact replay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache import pool as pages
from jkv.cache.attention import Cache
from jkv.engine import programs
from jkv.engine.row_views import facts_for
from jkv.engine.state import empty_state
from jkv.evaluation.held_out import held_out
from jkv.eviction import Needs
from jkv.testing import random_statistics
from pallas_kernels.quantised import FORMATS, dequantise, vector_bytes
from tests.support.sweeps import in_turn

PROMPTS = [[5, 1, 9], [3, 7] * 16 + [1]]
KNOBS = {"max_new_tokens": 64, "page_size": 4, "stop_ids": (), "progress": False, "return_trace": True, "poison": True}
POLICIES = {
    "full": jkv.full(),
    "r_kv": jkv.r_kv(budget=24, interval=16, window=4),
    "cur": jkv.cur(budget=24, interval=16),
    "h2o": jkv.h2o(budget=24),
    "streaming_llm": jkv.streaming_llm(budget=24, positions="cache"),
    "quest": jkv.quest(budget=16),
}
BY_CHANNEL = {  # whose scores read channels one by one, not norms and products alone
    "vase": lambda model: jkv.vase(budget=24, interval=16),
    "tri_attention": lambda model: jkv.tri_attention(24, random_statistics(model), 16, protect_prompt=False),
}
EVERYDAY = {("r_kv", "int8"), ("quest", "int4"), ("streaming_llm", "fp8")}
COMPACTED = ("r_kv", "cur", "h2o", "vase", "tri_attention")
EACH_FORMAT = pytest.mark.parametrize("kv_dtype", FORMATS)


@pytest.fixture(scope="module")
def model():
    """Random, with heads that every format takes."""
    return jkv.testing.tiny_model(config=dataclasses.replace(jkv.testing.TINY, head_size=32))


def gap(model, out, trace):
    """How far each token's log-probability is from the engine's."""
    scores = np.asarray(jkv.score(model, out, trace=trace).logprobs)
    return np.abs(scores - out.logprobs)[np.arange(out.tokens.shape[1]) < out.lengths[:, None]]


@pytest.mark.rounding
@pytest.mark.everyday(where=lambda name, kv_dtype: (name, kv_dtype) in EVERYDAY)
@pytest.mark.parametrize("name", POLICIES)
@EACH_FORMAT
def test_replay_reads_what_the_pool_read(model, name, kv_dtype):
    """A number at the border of two codes may get the other one in the replay: from there on the row's gap is a code's."""
    sampling = jkv.Sampling(temperature=0.8, seed=1)
    out = jkv.generate(model, PROMPTS, policy=POLICIES[name], sampling=sampling, kv_dtype=kv_dtype, **KNOBS)
    replayed, in_floats = gap(model, out, out.trace), gap(model, out, out.trace.replace(kv_format=None))
    assert np.percentile(replayed, 50) <= 1e-5
    assert np.percentile(replayed, 90) <= 1e-3
    assert np.percentile(in_floats, 50) > 20 * np.percentile(replayed, 50)
    assert replayed.max() < in_floats.max()


@pytest.mark.everyday(where=lambda kv_dtype: kv_dtype == "int8")
@EACH_FORMAT
def test_replay_with_a_wrong_scale_is_far_off(model, kv_dtype):
    out = jkv.generate(model, PROMPTS, sampling=jkv.Sampling(seed=1), kv_dtype=kv_dtype, **KNOBS)
    right = FORMATS[kv_dtype]
    wrong = dataclasses.replace(right, most={"int8": 126.0, "fp8": 416.0, "int4": 6.5}[kv_dtype])
    assert np.percentile(gap(model, out, out.trace), 50) <= 1e-5
    assert np.percentile(gap(model, out, out.trace.replace(kv_format=wrong)), 50) > 1e-4


@pytest.mark.everyday(where=lambda kv_dtype: kv_dtype == "int4")
@EACH_FORMAT
def test_a_run_costs_the_bytes_of_codes_and_scales(model, kv_dtype):
    plain, out = (jkv.generate(model, PROMPTS, kv_dtype=given, **KNOBS).stats for given in (None, kv_dtype))
    size = model.config.head_size
    slot, coded = (2 * vector_bytes(size, jnp.float32, FORMATS.get(given)) + 4 for given in (None, kv_dtype))
    assert coded == 2 * (size // 2 + 2 * size // 32 if kv_dtype == "int4" else size + 4) + 4
    assert out.peak_kv_bytes / plain.peak_kv_bytes == pytest.approx(coded / slot, rel=1e-3)


@pytest.mark.everyday(where=lambda name, kv_dtype: in_turn(COMPACTED, name, ("int8", "int4"), kv_dtype))
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", COMPACTED)
def test_compaction_keeps_what_it_keeps_of_a_pool_with_the_same_numbers(model, name, kv_dtype):
    """Quantised pages, and a pool of floats that holds what the codes stand for, after the same compaction."""
    policy = BY_CHANNEL[name](model) if name in BY_CHANNEL else POLICIES[name]
    evict, config, rng = policy.evict, model.config, np.random.default_rng(0)
    needs, facts = Needs.of([policy]), facts_for(policy, model)
    sizes = {"num_rows": 1, "num_pages": 200, "max_pages": 12, "page_size": 4}
    state = empty_state(config, needs, **sizes, kv_format=FORMATS[kv_dtype])
    row, count = jnp.zeros(1, jnp.int32), jnp.asarray([40], jnp.int32)
    pool, address = pages.reserve(state.cache.pool, row, count, 40)
    for layer in range(config.num_layers):
        key, value = jnp.asarray(rng.standard_normal((2, 1, 40, config.num_kv_heads, config.head_size)), jnp.float32)
        pool = pages.append(pool, address[layer], key, value)
    pool = pages.advance(pool, row, count)
    ring = state.cache.query_ring
    if ring is not None:
        ring = jnp.asarray(rng.standard_normal(ring.shape), jnp.float32)
    if "mass" in pool.slot_data:
        mass = jnp.asarray(rng.random(pool.slot_data["mass"].shape), jnp.float32)
        pool = pool.replace(slot_data=pool.slot_data | {"mass": mass})
    after = []
    for kv in (pool.kv, dequantise(pool.kv)):
        before = jax.tree.map(jnp.copy, state._replace(cache=Cache(pool.replace(kv=kv), ring)))
        budget = jnp.full((config.num_layers, 1, config.num_kv_heads), 24, jnp.int32)
        done, *_ = programs.compact(before, row, budget, row, jnp.zeros((2, 1), jnp.int32), evict, False, facts=facts)
        after.append([np.asarray(x[0]) for x in pages.gather(done.cache.pool, 0, row)])
    assert (after[0][2] >= 0).sum() == 24 * config.num_kv_heads
    np.testing.assert_array_equal(after[0][2], after[1][2])  # the same positions
    is_kept = after[0][2] >= 0
    np.testing.assert_array_equal(after[0][0][is_kept], after[1][0][is_kept])  # with the same numbers: scales moved along


@pytest.mark.everyday(where=lambda kv_dtype: kv_dtype == "int8")
@EACH_FORMAT
def test_forks_and_swaps_keep_every_bit(model, kv_dtype):
    """Samples of one prompt share its pages; with too few pages, rows are preempted and come back."""
    options = {**KNOBS, "kv_dtype": kv_dtype, "sampling": jkv.Sampling(seed=3), "max_running": 4}
    ample = jkv.generate(model, PROMPTS, n=3, **options)
    tight = jkv.generate(model, PROMPTS, n=3, num_pages=150, **options)
    assert tight.stats.preemptions > 0
    np.testing.assert_array_equal(ample.tokens, tight.tokens)
    np.testing.assert_array_equal(ample.logprobs, tight.logprobs)


@pytest.mark.everyday(where=lambda kv_dtype: kv_dtype == "int4")
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_rollouts_and_training_read_quantised_pages(model, kv_dtype):
    settings = {"max_prompt_tokens": 40, "max_new_tokens": 32, "n": 2, "page_size": 4}
    out = jkv.Rollout(model, POLICIES["r_kv"], kv_dtype=kv_dtype, **settings)(PROMPTS, return_trace=True)
    assert out.trace.kv_format == FORMATS[kv_dtype]
    batch = jkv.rl.make_batch(out, np.ones(4, np.float32), replay=True)
    assert batch.columns.kv_format == FORMATS[kv_dtype]
    gradient = jax.grad(lambda params: jkv.rl.log_probs(params, batch).sum())(model.params)
    leaves = jax.tree.leaves(gradient)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert any((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(gradient.layers[0].key))


@pytest.mark.everyday(where=lambda policy, kv_dtype: policy.name == "reason_cache" and kv_dtype == "int8")
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize(
    "policy", [jkv.reason_cache(warm_up=8, percentile=100), jkv.random_share(percentile=100)], ids=lambda one: one.name
)
def test_shared_pages_are_quantised_pages(policy, kv_dtype):
    model, problems = jkv.load("tiny-reasoner"), [one.prompt for one in held_out(4)]
    sampling = jkv.Sampling(temperature=0.0)
    settings = {"policy": policy, "sampling": sampling, "page_size": 2, "return_trace": True, "poison": True}
    out = jkv.generate(model, problems, kv_dtype=kv_dtype, **settings)
    assert out.stats.shared > 0
    assert np.percentile(gap(model, out, out.trace), 90) <= 1e-5


@pytest.mark.parametrize("wrong", ["int2", "bfloat16", "INT8", 8])
def test_an_unknown_format_is_refused_by_name(model, wrong):
    with pytest.raises((ValueError, TypeError), match="kv_dtype"):
        jkv.generate(model, PROMPTS, kv_dtype=wrong)


@pytest.mark.parametrize("head_size", [8, 48, 96])
def test_heads_that_int4_cannot_take_are_refused_before_anything_runs(head_size):
    model = jkv.testing.tiny_model(config=dataclasses.replace(jkv.testing.TINY, head_size=head_size))
    why = f'kv_dtype="int4" .*head size must be 32, 64, 128, 256 and so on; got {head_size}'
    for call in (
        lambda: jkv.generate(model, PROMPTS, kv_dtype="int4"),
        lambda: jkv.Engine(model, kv_dtype="int4"),
        lambda: jkv.Rollout(model, kv_dtype="int4", max_prompt_tokens=8, max_new_tokens=8),
        lambda: jkv.plan(model.config, "h100", kv_dtype="int4"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
