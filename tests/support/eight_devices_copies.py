"""Where devices outnumber the KV heads, several hold each of them, and the results are those of one device.

`tests/engine/test_mesh.py` runs this file.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jkv
from jkv.engine import mesh
from jkv.model.eight_bits import quantise_weights
from jkv.model.sharding import check_divides, num_copies
from jkv.model.weight_shapes import init_params
from jkv.rl import log_probs, make_batch, policy_loss
from jkv.testing import TINY, adapted, random_gate, random_statistics, tiny_model
from tests.support import gemma
from tests.support.eight_devices import LONG, MAX_SLOTS, PAGE_SIZE, REQUESTS, UNEVEN, play
from tests.support.eight_devices_experts import collectives
from tests.support.eight_devices_loading import GOLDEN, assert_loads
from tests.support.mixes import BreakingTokenizer

CONFIG = dataclasses.replace(TINY, num_query_heads=16, num_kv_heads=2)
ROW = CONFIG.num_layers * CONFIG.num_kv_heads * MAX_SLOTS // PAGE_SIZE  # pages of a full row
STATISTICS, GATE = random_statistics(tiny_model(config=CONFIG)), random_gate(tiny_model(config=CONFIG), "mlp")
OWN = {
    "tri_attention": jkv.tri_attention(16, STATISTICS, 8),
    "learned_gate": jkv.learned_gate(GATE, 16, interval=8),
    "below_threshold": jkv.learned_gate(GATE, threshold=0.0, window=4, interval=8),
}
CASES = {
    name: request | {"policy": OWN.get(name, request["policy"])}
    for name, request in (REQUESTS | UNEVEN).items()
    if name not in ("reason_cache", "aligned")  # which read no queries
}
EVERYDAY = ("r_kv", "h2o", "tova", "quest", "critical_kv", "tri_attention", "ada_kv")
COUNTS = {4: 2, 8: 4}  # devices -> copies


def devices_of(count):
    return Mesh(jax.devices()[:count], ("tensor",))


@pytest.fixture(scope="module")
def model():
    return tiny_model(config=CONFIG, tokenizer=BreakingTokenizer())


@pytest.fixture(scope="module")
def on_devices(model):
    """Devices, requests -> the result of `play`."""
    return functools.cache(lambda count, names: play(model, count and devices_of(count), names, CASES, ROW))


def groups_of(name):
    """The requests that run together: those whose heads hold unequal numbers of slots by themselves."""
    if name in UNEVEN:
        return (name,)
    return EVERYDAY[:-1] if name in EVERYDAY else tuple(one for one in CASES if one not in (*EVERYDAY, *UNEVEN))


def is_slow(count, name):
    return count != 4 or name not in EVERYDAY


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("count", "name"),
    [pytest.param(count, name, marks=[pytest.mark.slow] if is_slow(count, name) else []) for count in COUNTS for name in CASES],
)
def test_copies_change_no_token(on_devices, count, name):
    """Nor which slots any head evicts: all copies choose by the queries of all."""
    one, many = (on_devices(devices, groups_of(name))[0][name] for devices in (None, count))
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_allclose(many.logprobs, one.logprobs, atol=1e-4)
    for field in ("source", "begin", "end"):
        np.testing.assert_array_equal(getattr(many.trace, field), getattr(one.trace, field))
    assert many.samples[0].evicted == one.samples[0].evicted
    assert (many.samples[0].evicted > 0) == (name not in ("full", "forked", "quest", "seal"))


@pytest.mark.everyday
@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_copies_hold_the_same_pages_and_a_part_of_the_queries(model, count):
    copies, policy = COUNTS[count], jkv.r_kv(16, 8, window=4)
    engine = jkv.Engine(model, max_running=2, max_slots=MAX_SLOTS, page_size=PAGE_SIZE, mesh=devices_of(count), chunk=4)
    engine.submit(LONG, policy=policy, max_new_tokens=22, stop_ids=())
    while engine.stats.steps < 12:  # and a compaction has been
        engine.step()
    assert dict(engine.mesh.shape) == {"tensor": 2, "copies": copies}
    state, weights = engine.runner.state, engine.model.params.layers[0]
    assert np.asarray(state.cache.pool.length).max() > 12
    for array in jax.tree.leaves((state.cache.pool, weights.key, weights.value)):
        parts = [np.asarray(shard.data) for shard in array.addressable_shards]
        for first in range(0, count, copies):
            for other in parts[first + 1 : first + copies]:
                np.testing.assert_array_equal(parts[first], other)
    assert state.cache.query_ring.addressable_shards[0].data.shape[3] == CONFIG.num_query_heads // count
    for whole, axis in ((weights.query, 1), (weights.out, 0), (weights.down, 0), (engine.model.params.embedding, 0)):
        assert whole.addressable_shards[0].data.shape[axis] * count == whole.shape[axis]
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(engine.model.params))
    assert mesh.local_bytes(engine.model.params, count, copies) == held
    device = jkv.Device("small", "cpu", 10**9)
    plan = jkv.plan(model, device, policy, length=42, prompt=20, batch=2, page_size=PAGE_SIZE, num_devices=count)
    assert plan.weight_bytes == held
    fewer = jkv.plan(model, device, policy, length=42, prompt=20, batch=2, page_size=PAGE_SIZE, num_devices=2)
    assert plan.own.num_pages == fewer.own.num_pages


def test_rows_sleep_and_go_on():
    """With the prefix cache and kept rows, and with sealed pages, each as on one device."""
    model = tiny_model(config=dataclasses.replace(CONFIG, head_size=32))

    def outcome(on, **settings):
        engine = jkv.Engine(model, max_running=2, max_slots=96, page_size=16, mesh=on, **settings)
        keep = "prefix_cache" in settings
        tickets = [engine.submit(LONG, max_new_tokens=30, stop_ids=(), keep=keep) for _ in range(2)]
        engine.step()
        engine.sleep()
        engine.wake()
        engine.run()
        if keep:
            tickets = [engine.extend(ticket, [3, 7, 5], max_new_tokens=8, stop_ids=()) for ticket in tickets]
            engine.run()
        return [engine.result(ticket).tokens.tolist() for ticket in tickets]

    for settings in ({"prefix_cache": True}, {"kv_dtype": "kvarn"}):
        assert outcome(devices_of(4), **settings) == outcome(None, **settings)


def test_a_step_exchanges_no_more_than_without_copies(model):
    """Two sums of the residual stream a layer; what is evicted by queries gathers them at compactions alone."""
    without = dataclasses.replace(CONFIG, num_kv_heads=4)
    assert num_copies(without, 4) == 1
    assert collectives(model, devices_of(4)) == collectives(tiny_model(config=without), devices_of(4))


@pytest.mark.parametrize("kind", ["adapters", "int8", "kv int8", "kv int4"])
def test_other_forms_of_weights_and_pages_are_split_too(kind):
    config = dataclasses.replace(CONFIG, tie_embeddings=False, qk_norm=True)
    config = dataclasses.replace(config, head_size=32) if kind == "kv int4" else config
    params = init_params(config, jax.random.key(2), scale=0.3)
    params = adapted(params) if kind == "adapters" else quantise_weights(params, "int8") if kind == "int8" else params
    settings = {"max_running": 2, "max_slots": MAX_SLOTS, "page_size": PAGE_SIZE}
    settings |= {"kv_dtype": kind[3:]} if kind.startswith("kv") else {}

    def run(on):
        engine = jkv.Engine(params, mesh=on, **settings)
        ticket = engine.submit(LONG, policy=jkv.r_kv(16, 8, window=4), max_new_tokens=24, stop_ids=())
        engine.run()
        return engine.result(ticket)

    one, many = run(None), run(devices_of(8))
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_allclose(many.logprobs, one.logprobs, atol=1e-4 if not kind.startswith("kv") else 1e-2)


def test_scores_and_gradients_are_those_of_one_device(model):
    """Replay under a trace of evictions; rows, heads and copies on an axis each."""
    settings = {"max_new_tokens": 24, "page_size": PAGE_SIZE, "stop_ids": (), "n": 2, "return_trace": True, "progress": False}
    out = jkv.generate(model, [LONG, LONG[:7]], jkv.r_kv(16, 8, window=4), sampling=jkv.Sampling(seed=3), **settings)
    batch = make_batch(out, np.linspace(-1, 1, 4).astype(np.float32), replay=True, rows=4)
    params = jkv.shard(model.params, Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "tensor")))
    grid = params.embedding.sharding.mesh
    assert dict(grid.shape) == {"data": 2, "tensor": 2, "copies": 2}

    def loss(params, on):
        return policy_loss(params, batch, mesh=on)[0]

    np.testing.assert_allclose(log_probs(params, batch), log_probs(model.params, batch), atol=1e-5)
    expected, found = (jax.grad(loss)(*args) for args in ((model.params, None), (params, grid)))
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4 * float(jnp.abs(other).max()) + 1e-7)


def test_rollouts_update_weights_that_are_split(model):
    settings = {"max_prompt_tokens": 8, "max_new_tokens": 16, "page_size": 4, "n": 2}
    rollouts = [jkv.Rollout(model.params, jkv.h2o(budget=14), mesh=on, **settings) for on in (None, devices_of(4))]
    other = init_params(CONFIG, jax.random.key(9), scale=0.3)
    for params in (model.params, other):
        one, many = rollouts
        one.update(params)
        many.update(jkv.shard(params, devices_of(4)))
        expected, found = (rollout([[5, 1, 9]], seed=0, stop_ids=()) for rollout in (one, many))
        np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize(
    ("name", "count", "weight_dtype"), [("phi3", 4, None), ("qwen3_moe", 4, "int8"), ("llama_tied", 2, None)]
)
def test_a_checkpoint_is_read_to_copies(name, count, weight_dtype):
    assert_loads(str(GOLDEN / name), devices_of(count), weight_dtype)
    assert jkv.load(str(GOLDEN / name), mesh=devices_of(count)).params.embedding.sharding.mesh.shape["copies"] == 2


def test_what_neither_divides_is_refused_with_the_arithmetic():
    odd = dataclasses.replace(CONFIG, num_query_heads=12, num_kv_heads=6, mlp_width=96, vocab_size=96)
    with pytest.raises(ValueError, match=r"num_kv_heads=6 must be a multiple of the 4 devices .*, or divide their number"):
        check_divides(odd, 4)
    assert [num_copies(CONFIG, count) for count in (1, 2, 3, 4, 8)] == [1, 1, 1, 2, 4]
    with pytest.raises(ValueError, match="num_query_heads=16 must be a multiple of the 32 devices"):
        check_divides(CONFIG, 32)
    windows = dataclasses.replace(gemma.GEMMA4, num_query_heads=8)  # 1 KV head, and 2 in windows
    assert num_copies(windows, 4) == 1
    with pytest.raises(ValueError, match="num_kv_heads=1 must be a multiple of the 4 devices"):
        check_divides(windows, 4)
    for sizes, message in (((2, 2), "must have 1 devices for 4 KV heads on 4 devices"), ((1, 4), "must have 1 devices")):
        split = Mesh(np.reshape(jax.devices()[:4], sizes), ("tensor", "copies"))
        with pytest.raises(ValueError, match=message):
            jkv.Engine(tiny_model(config=dataclasses.replace(CONFIG, num_kv_heads=4)), mesh=split)
    with jax.set_mesh(devices_of(4)), pytest.raises(ValueError, match=r'set_mesh must have an axis "copies" for 2 KV heads'):
        jkv.Engine(tiny_model(config=CONFIG), mesh=devices_of(4))


def test_a_mesh_that_is_split_already_may_name_its_axes_in_any_order(model):
    turned = Mesh(np.reshape(jax.devices()[:4], (2, 2)).T, ("copies", "tensor"))
    assert [device.id for device in mesh.arrange(turned, CONFIG).devices.flat] == [0, 1, 2, 3]
    grid = jkv.shard(model.params, Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "tensor"))).embedding.sharding.mesh
    with jkv.Replicas(model, mesh=grid, max_running=2, max_slots=64, page_size=4) as replicas:
        out = replicas.generate([LONG, LONG[:5]], max_new_tokens=8, stop_ids=())
    one = jkv.generate(model, [LONG, LONG[:5]], max_new_tokens=8, stop_ids=(), progress=False)
    np.testing.assert_array_equal(out.tokens, one.tokens)
