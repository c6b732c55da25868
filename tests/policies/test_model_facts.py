"""CriticalKV against plain NumPy, and what the engine gives the scores that read the model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.engine import programs
from jkv.engine.row_views import facts_for, projected_norms, view_of_rows
from jkv.engine.state import empty_state
from jkv.eviction.calibration import QueryMoments, QueryStatistics
from jkv.eviction.scores import AttentionMass
from jkv.model.params import fold
from jkv.model.weight_shapes import weight_shapes
from jkv.testing import TINY, adapted, assert_no_pool_copy, random_statistics, random_view, tiny_model, unfolded
from tests.support.programs import shapes_of

WINDOW = 4


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_half_of_the_budget_goes_by_attention_and_the_rest_by_the_projected_values_too(share):
    view = random_view(np.random.default_rng(5), slots=80)._replace(budget=jnp.asarray([[20, 30], [40, 24]]))
    slots = np.asarray(jax.jit(jkv.critical_kv(64, window=WINDOW, pool=1, share=share).select)(view))
    mass = np.asarray(AttentionMass(WINDOW, 1)(view), np.float64)
    for b, k in np.ndindex(view.position.shape[:2]):
        budget, age = int(view.budget[b, k]), np.asarray(view.age[b, k])
        old = [s for s in range(80) if view.position[b, k, s] >= 0 and age[s] >= WINDOW]
        first = sorted(old, key=lambda s: -mass[b, k, s])[: max(0, int(share * budget) - WINDOW)]
        weighted = {s: (mass[b, k, s] + 1e-4) * float(view.projected_norm[b, k, s]) for s in old if s not in first}
        second = sorted(weighted, key=lambda s: -weighted[s])[: budget - WINDOW - len(first)]
        window = [s for s in range(80) if view.position[b, k, s] >= 0 and age[s] < WINDOW]
        assert {*slots[b, k][slots[b, k] >= 0]} == {*first, *second, *window}


@pytest.mark.parametrize("form", [lambda x: x, unfolded, adapted], ids=["plain", "unfolded", "adapted"])
def test_projected_norms_are_those_of_the_output_projection(form):
    params = form(tiny_model().params)
    config, rng = params.config, np.random.default_rng(0)
    shape = (config.num_layers, 1, config.num_kv_heads, 7, config.head_size)
    value = rng.standard_normal(shape).astype(np.float32)
    got = np.asarray(projected_norms(jnp.asarray(value), tuple(layer.out for layer in params.layers)))
    group = config.num_query_heads // config.num_kv_heads
    wanted = weight_shapes(config).layers[0].out.shape
    for layer, weights in enumerate(params.layers):
        matrix = np.asarray(fold(weights.out, wanted), np.float64)
        for k, s in np.ndindex(config.num_kv_heads, 7):
            norms = []
            for head in range(k * group, (k + 1) * group):
                mixed = np.zeros(matrix.shape[0])
                mixed[head * config.head_size : (head + 1) * config.head_size] = value[layer, 0, k, s]
                norms.append(np.abs(mixed @ matrix).sum())
            np.testing.assert_allclose(got[layer, 0, k, s], np.mean(norms), rtol=1e-5)


def test_a_view_of_the_engine_has_the_facts_of_each_layer_and_only_those_declared():
    model = tiny_model()
    config, statistics = model.config, random_statistics(model)
    state = empty_state(config, jkv.Needs(window=4), num_rows=3, num_pages=64, max_pages=8, page_size=4)
    token = np.arange(16, dtype=np.int32)[None]
    state, *_ = programs.prefill_chunk(model.params, state, np.asarray([1], np.int32), token, np.asarray([16], np.int32))
    row, budget = jnp.asarray([1]), jnp.full((2, 1, config.num_kv_heads), 8)

    def view_for(policy):
        view_of = functools.partial(view_of_rows, state.cache, row, policy.evict.static, budget, row)
        return jax.jit(lambda facts: view_of(facts=facts))(facts_for(policy, model))

    view = view_for(jkv.tri_attention(8, statistics))
    for name, of_layers in statistics.arrays._asdict().items():
        np.testing.assert_array_equal(getattr(view.calibration, name), of_layers)  # one row: batch row l is layer l
    frequency = [config.rope_theta ** (-2 * f / config.head_size) for f in range(config.head_size // 2)]
    np.testing.assert_allclose(view.rope.frequency, [frequency] * 2, rtol=1e-6)
    np.testing.assert_array_equal(view.rope.factor, [1, 1])
    assert view.projected_norm is None

    view = view_for(jkv.critical_kv(8, window=4))
    for layer, weights in enumerate(model.params.layers):
        matrix = np.asarray(weights.out, np.float64).reshape(config.num_kv_heads, -1, config.head_size, config.width)
        value = np.asarray(view.value[layer, :, :16], np.float64)
        norms = np.abs(np.einsum("ksh,kghd->kgsd", value, matrix)).sum(axis=-1).mean(axis=1)
        np.testing.assert_allclose(view.projected_norm[layer, :, :16], norms, rtol=1e-5)
    assert view.rope is view.calibration is None
    assert facts_for(jkv.snap_kv(8), model) is None


def test_new_weights_give_new_norms_and_compile_nothing():
    model = tiny_model()
    engine = jkv.Engine(model, max_running=1, max_slots=64, page_size=4, policies=[jkv.critical_kv(16, 8, window=4)])

    def compacted():
        ticket = engine.submit(list(range(12)), jkv.critical_kv(16, 8, window=4), max_new_tokens=24, stop_ids=())
        engine.run()
        return engine.take([ticket])

    compacted()
    before = programs.compact.num_compiled()
    engine.update(tiny_model(seed=1).params)
    compacted()
    assert programs.compact.num_compiled() == before


MOMENTS = QueryMoments(np.zeros((2, 4, 64), np.float32), np.zeros((2, 4, 32), np.float32))


@pytest.mark.parametrize(
    "policy",
    [jkv.critical_kv(64), jkv.expected_attention(64), jkv.tri_attention(64, QueryStatistics(MOMENTS))],
    ids=lambda policy: policy.name,
)
def test_no_compaction_that_reads_the_model_copies_the_pool(policy):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    config = dataclasses.replace(TINY, head_size=64)
    needs = jkv.Needs(window=policy.needs.window)
    shapes = shapes_of(config, dtype=jnp.float32, page_size=16, sharding=sharding, needs=needs)
    row, facts = shapes.leaf(1), facts_for(policy, jkv.Model(shapes.params))
    options = {"evict": policy.evict.static, "is_traced": False, "facts": facts}
    traced = programs.compact.trace(
        shapes.state, row, shapes.leaf(2, 1, config.num_kv_heads), row, shapes.leaf(2, 1), **options
    )
    assert_no_pool_copy(traced.lower().compile(), shapes.state.cache.pool)


def test_a_share_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"share must lie in \[0, 1\] of the budget; got 1.5"):
        jkv.critical_kv(64, share=1.5)
