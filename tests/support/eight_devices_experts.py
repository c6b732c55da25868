"""Experts on meshes of simulated devices: split by their width, or whole ones on each, they give the results of one device.

`tests/engine/test_mesh.py` runs this file.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jkv
from jkv.engine import mesh
from jkv.engine.parts.base import Carried
from jkv.model import experts
from jkv.model.eight_bits import quantise_weights
from jkv.model.sharding import COPIES, HEADS, P, local_config, specs_of, split_by_width
from jkv.testing import tiny_model
from tests.model.test_experts import BOUNDED, MIXED, WAYS
from tests.support import glm, learned_sinks
from tests.support.learned_sinks import with_random_vectors
from tests.support.mixes import BreakingTokenizer


def model_of(config, fill):
    return fill(tiny_model(1, dataclasses.replace(config, num_query_heads=16, num_kv_heads=8), BreakingTokenizer()))


MODELS = {
    "softmax": model_of(MIXED, lambda model: model),
    "biased": model_of(BOUNDED, with_random_vectors),
    "sinks-and-windows": model_of(learned_sinks.CONFIG, with_random_vectors),
    "shared-block": model_of(glm.CONFIG, glm.with_random_biases),
}
models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
splits = pytest.mark.parametrize("split", [lambda model: model, split_by_width], ids=["by-number", "by-width"])
BUDGETED = jkv.r_kv(16, 8, window=4)
REQUESTS = {
    "full": {"prompt": [5, 1, 9], "policy": jkv.full()},
    "forked": {"prompt": list(range(20)), "policy": jkv.full(), "n": 3},
    "r_kv": {"prompt": list(range(20)), "policy": BUDGETED},
    "h2o": {"prompt": [5, 1, 9], "policy": jkv.h2o(14)},
}


def devices_of(count):
    return Mesh(jax.devices()[:count], (HEADS,))


def experts_of(params):
    return next(layer.experts for layer in params.layers if layer.experts is not None)


def summed(model, token, compute, count=4):
    """What `compute(config, weights, token)` gives on each of some devices, summed."""
    config = local_config(model.config, count)

    def of_shard(weights, token):
        return jax.lax.psum(compute(config, weights, token), HEADS)

    specs = experts_of(specs_of(jkv.Params, model.params, "params")), P()
    devices = Mesh(np.array(jax.devices()[:count])[:, None], (HEADS, COPIES))
    run = jax.jit(jax.shard_map(of_shard, mesh=devices, in_specs=specs, out_specs=P(), check_vma=False))
    return run(experts_of(model.params), token)


def drawn(model, num_tokens):
    return jax.random.normal(jax.random.key(num_tokens), (num_tokens, model.config.width))


@splits
@models
@pytest.mark.everyday(where=lambda num_tokens, is_coded: (num_tokens, is_coded) in ((5, False), (600, True)))
@pytest.mark.parametrize("num_tokens", [1, 5, 600])
@pytest.mark.parametrize("is_coded", [False, True], ids=["floats", "int8"])
def test_the_parts_of_a_mixture_add_up(model, split, num_tokens, is_coded):
    if is_coded:
        model = dataclasses.replace(model, params=quantise_weights(model.params, "int8"))
    token = drawn(model, num_tokens)

    def part(config, weights, token, shards=4):
        mixed, whole, _ = experts.mixture(config, weights, token[None], axis=HEADS)
        return mixed[0] + (0 if whole is None else whole[0] / shards)

    out = summed(split(model), token, part)
    np.testing.assert_allclose(out, part(model.config, experts_of(model.params), token, shards=1), atol=1e-5)


@models
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_way_leaves_out_the_experts_of_other_devices(model, way):
    """That of a TPU too, for the bias of the last product is none of theirs."""
    token, gating = drawn(model, 21), experts.Gating(model.config.swiglu_limit, model.config.swiglu_alpha)

    def part(config, weights, token):
        share, expert = experts.route(config, weights, token)
        if (own := weights.gate.shape[0]) < config.num_experts:
            share, expert = experts.of_shard(share, expert, own, HEADS)
        return way(token, share, expert, weights, gating=gating)

    out = summed(model, token, part)
    np.testing.assert_allclose(out, part(model.config, experts_of(model.params), token), atol=1e-5)


def outcome(model, on):
    settings = {"max_running": 3, "max_slots": 64, "page_size": 4, "kv_memory": None, "mesh": on, "routed_experts": True}
    policies = [request["policy"] for request in REQUESTS.values()]
    engine = jkv.Engine(model, policies=policies, return_trace=True, poison=True, **settings)
    sampling = jkv.Sampling(seed=7)
    tickets = [engine.submit(**request, sampling=sampling, max_new_tokens=22, stop_ids=()) for request in REQUESTS.values()]
    engine.step()
    engine.sleep()
    engine.wake()
    engine.run()
    return [engine.result(ticket) for ticket in tickets]


@pytest.mark.everyday(where=lambda model, split: model is MODELS["shared-block" if split is split_by_width else "softmax"])
@splits
@models
def test_tokens_and_their_experts_are_those_of_one_device(model, split):
    on, other = devices_of(4), split(model)
    for one, many in zip(outcome(model, None), outcome(other, on), strict=True):
        assert one.tokens.tolist() == many.tokens.tolist()
        np.testing.assert_array_equal(one.routed_experts, many.routed_experts)
        np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-4)
        scored = jkv.score(jkv.shard(other.params, on), many, many.trace, routed_experts=many.routed_experts)
        np.testing.assert_allclose(scored.logprobs, many.logprobs, atol=1e-4)


def collectives(model, on):
    """How often a decode step calls each kind of collective, by the compiled program."""
    engine = jkv.Engine(model, max_running=2, max_slots=64, page_size=4, mesh=on)
    engine.submit([5, 1, 9], max_new_tokens=8, stop_ids=())
    engine.runner.execute(engine.scheduler.next())
    runner = engine.runner
    inputs = runner._chunk_inputs(engine.scheduler.running)
    traced = runner.programs.decode_chunk.trace(runner.params, runner.state, inputs, Carried(), 8, runner.draws)
    text = traced.lower().compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
    return {kind: len(re.findall(rf"= \S+ {kind}(?:-start)?\(", text)) for kind in kinds}


@pytest.mark.everyday(where=lambda model: model is MODELS["shared-block"])
@models
def test_both_splits_exchange_one_sum_in_attention_and_one_in_the_experts_of_each_layer(model):
    on = devices_of(4)
    by_number, by_width = collectives(model, on), collectives(split_by_width(model), on)
    assert by_width == by_number
    held_pages, embedding = 1, 1
    assert by_width["all-reduce"] == 2 * model.config.num_layers + embedding + held_pages
    assert by_width["all-gather"] == 1  # of the logits
    assert sum(by_width.values()) == by_width["all-reduce"] + 1


@splits
@models
def test_each_device_has_its_part_of_the_bytes(model, split):
    on, other = devices_of(4), split(model)
    params = jkv.shard(other.params, on)
    assert mesh.local_bytes(other.params, 4) == sum(x.addressable_shards[1].data.nbytes for x in jax.tree.leaves(params))
    # By width, each device has all biases of the last products.
    assert mesh.local_bytes(model.params, 4) <= mesh.local_bytes(split_by_width(model).params, 4)
    device = jkv.Device("small", "cpu", 10**9)
    plan = jkv.plan(other, device, BUDGETED, length=64, prompt=20, batch=3, page_size=4, num_devices=4)
    assert plan.weight_bytes == mesh.local_bytes(other.params, 4)


def test_counts_that_do_not_divide_are_refused_by_name():
    config = dataclasses.replace(MODELS["shared-block"].config, num_experts=12)
    settings = {"max_running": 1, "max_slots": 64}
    model = tiny_model(1, config)
    jkv.Engine(model, mesh=devices_of(4), **settings)
    with pytest.raises(ValueError, match=r"num_experts=12 must be a multiple of the 8 devices.*1\.50.*or jkv\.split_by_width"):
        jkv.Engine(model, mesh=devices_of(8), **settings)
    jkv.Engine(split_by_width(model), mesh=devices_of(8), **settings)
    narrow = tiny_model(1, dataclasses.replace(config, mlp_width=18))
    jkv.Engine(narrow, mesh=devices_of(4), **settings)
    with pytest.raises(ValueError, match="mlp_width=18 must be a multiple of the 4 devices"):
        jkv.Engine(split_by_width(narrow), mesh=devices_of(4), **settings)
    with pytest.raises(ValueError, match="shared_width=18 must be a multiple of the 4 devices"):
        jkv.Engine(tiny_model(1, dataclasses.replace(config, shared_width=18)), mesh=devices_of(4), **settings)
    with pytest.raises(ValueError, match="Only experts can be split in two ways"):
        split_by_width(tiny_model(1))
