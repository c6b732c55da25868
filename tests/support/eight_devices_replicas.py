"""Replicas on a mesh with the axes "data" and "tensor" draw what one engine on one device draws.

`tests/engine/test_mesh.py` runs this file.
"""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jkv
from jkv.engine.options import EngineOptions
from jkv.evaluation import generations
from jkv.evaluation.held_out import held_out
from jkv.evaluation.problems import Problem
from jkv.replicas.threads import at_place, places_of
from jkv.replicas.worker import digests_of
from jkv.testing import tiny_model
from tests.support.eight_devices import CONFIG, REQUESTS, STATISTICS, UNEVEN
from tests.support.mixes import BreakingTokenizer

PROMPTS = [[5, 1, 9], list(range(20)), list(range(31, 23, -1))]
R_KV = jkv.r_kv(16, 8, window=4)
SIZES = {"max_slots": 64, "page_size": 4}
DRAWN = {"n": 2, "sampling": jkv.Sampling(seed=7), "max_new_tokens": 24, "stop_ids": ()}
POLICIES = {name: request["policy"] for name, request in (REQUESTS | UNEVEN).items()}
POLICIES["tri_attention"] = jkv.tri_attention(28, STATISTICS, 8)  # it keeps all of a prompt
SHAPES = {(2, 2): ("full", "r_kv", "h2o", "rpc", "quest", "ada_kv"), (4, 2): tuple(POLICIES), (8, 1): tuple(POLICIES)}
SLOW = [pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES if shape != (2, 2)]


def mesh_of(shape):
    return Mesh(np.reshape(jax.devices()[: np.prod(shape)], shape), ("data", "tensor"))


@pytest.fixture(scope="module")
def model():
    return tiny_model(config=CONFIG, tokenizer=BreakingTokenizer())


def assert_equal(out, expected):
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4)
    assert out.finish_reason == expected.finish_reason
    for field in ("begin", "end"):
        np.testing.assert_array_equal(getattr(out.trace, field), getattr(expected.trace, field))


@pytest.mark.parametrize("shape", [(2, 2), *SLOW], ids=str)
def test_every_policy_keeps_on_replicas_what_it_keeps_on_one_device(model, shape):
    names = SHAPES[shape]
    given = {"policies": [POLICIES[name] for name in names], "return_trace": True, "poison": True} | SIZES
    given["max_slots"] *= 2  # aligned thoughts may take twice the slots
    one = jkv.Engine(model, max_running=6, **given)
    with jkv.Replicas(model, mesh=mesh_of(shape), max_running=2, **given) as replicas:
        for name in names:
            out = replicas.generate(PROMPTS, policy=POLICIES[name], **DRAWN)
            tickets = [one.submit(prompt, policy=POLICIES[name], **DRAWN) for prompt in PROMPTS]
            one.run()
            results = [one.result(ticket) for ticket in tickets]
            assert out.tokens.tolist() == [row for result in results for row in result.tokens.tolist()], name
            ends = [padded(result.trace.end, out.trace.end) for result in results]
            np.testing.assert_array_equal(out.trace.end, np.concatenate(ends), err_msg=name)


def padded(end, like):
    """Columns of a shorter batch as wide as those of a longer one, whose last columns are of no token."""
    return np.pad(end, [(0, 0)] * (end.ndim - 1) + [(0, like.shape[-1] - end.shape[-1])], constant_values=like.flat[-1])


def test_generate_runs_on_the_mesh_that_is_given_or_on_that_of_the_weights(model):
    settings = {"policy": R_KV, "return_trace": True, "max_running": 2, "page_size": 4} | DRAWN
    expected = jkv.generate(model, PROMPTS, **settings)
    on = mesh_of((2, 2))
    assert_equal(jkv.generate(model, PROMPTS, mesh=on, **settings), expected)
    placed = jkv.Model(jkv.shard(model.params, on), model.tokenizer)
    assert_equal(jkv.generate(placed, PROMPTS, **settings), expected)
    assert_equal(jkv.generate(model, PROMPTS, mesh=Mesh(jax.devices()[:3], ("data",)), **settings), expected)


def test_weights_that_lie_on_the_mesh_are_not_copied(model):
    on = mesh_of((2, 2))
    placed = jkv.Model(jkv.shard(model.params, on), model.tokenizer)
    for place in places_of(on, None):
        there, options = at_place(placed, EngineOptions(), place)
        assert options.mesh == place
        for mine, all_of_it in zip(jax.tree.leaves(there.params), jax.tree.leaves(placed.params), strict=True):
            at = {shard.device: shard.data.unsafe_buffer_pointer() for shard in all_of_it.addressable_shards}
            assert all(at[shard.device] == shard.data.unsafe_buffer_pointer() for shard in mine.addressable_shards)


def test_a_rollout_on_the_mesh_of_a_trainer_trains_and_goes_on(model):
    limits = {"max_prompt_tokens": 32, "max_new_tokens": 24, "n": 2, "max_running": 2, "page_size": 4}
    on = mesh_of((2, 2))
    params = jkv.shard(model.params, on)
    rollout = jkv.Rollout(jkv.Model(params, model.tokenizer), R_KV, **limits)
    one = jkv.Rollout(model, R_KV, **limits)
    call = {"seed": 3, "return_trace": True, "stop_ids": ()}
    out = rollout(PROMPTS, **call)
    assert_equal(out, one(PROMPTS, **call))
    batch = jkv.rl.make_batch(out, np.linspace(-1, 1, 6, dtype=np.float32), rows=6)
    (loss, _), gradient = jax.jit(jax.value_and_grad(lambda p: jkv.rl.policy_loss(p, batch, mesh=on), has_aux=True))(params)
    assert np.isfinite(loss)
    trained = jax.tree.map(lambda x, g: x - 0.1 * g, params, gradient)
    trained = jax.device_put(trained, jax.tree.map(lambda x: x.sharding, params))
    rollout.update(trained)
    one.update(jax.device_put(jax.device_get(trained), jax.tree.map(lambda x: x.sharding, one.model.params)))
    assert_equal(rollout(PROMPTS, **call), one(PROMPTS, **call))
    assert rollout.version == 1


def test_an_evaluation_on_replicas_is_resumed_and_counts_what_one_engine_counts(tmp_path):
    model = jkv.load("tiny-reasoner")
    problems = [Problem(problem.prompt, problem.answer) for problem in held_out(6, seed=3)]
    settings = {"max_new_tokens": 16, "samples": 2, "sampling": jkv.Sampling(seed=2), "progress": False}
    expected = generations.run(model, problems, jkv.r_kv(budget=24, interval=8), **settings)
    path, on = tmp_path / "r_kv.jsonl", mesh_of((2, 2))
    generations.run(model, problems, jkv.r_kv(budget=24, interval=8), path=path, mesh=on, **settings)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 12
    path.write_text("".join(lines[:5]) + lines[5][:40])
    out = generations.run(model, problems, jkv.r_kv(budget=24, interval=8), path=path, mesh=on, **settings)
    for name in ("is_right", "is_touched", "lengths"):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name))
    assert (out.stats.evicted, out.stats.compactions) == (expected.stats.evicted, expected.stats.compactions)


def test_a_mesh_that_does_not_fit_a_replica_is_refused(model):
    with pytest.raises(ValueError, match=r"mesh of \{.data.: 2, .expert.: 2\}. Rename its axes"):
        jkv.generate(model, PROMPTS, mesh=Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "expert")))
    odd = tiny_model(config=dataclasses.replace(CONFIG, vocab_size=33))
    with pytest.raises(ValueError, match=r"vocab_size=33 must be a multiple of the 2 devices"):
        jkv.generate(odd, PROMPTS, mesh=mesh_of((2, 2)))


def test_digests_of_weights_on_a_mesh_are_those_of_one_device_and_wait_for_no_other_sum():
    """Sums that were under way together waited for each other's threads for ever, after a few turns of this loop."""
    random = np.random.default_rng(0)
    leaves = [random.normal(size=(64, 64)).astype(np.float32) for _ in range(40)]
    split = [PartitionSpec("data", "tensor"), PartitionSpec("tensor", "data"), PartitionSpec("tensor"), PartitionSpec()]
    places = [NamedSharding(mesh_of((4, 2)), split[i % len(split)]) for i in range(len(leaves))]
    expected = digests_of([leaf + leaf for leaf in leaves])
    double = jax.jit(lambda leaves: [leaf + leaf for leaf in leaves], out_shardings=places)
    for _ in range(40):
        np.testing.assert_array_equal(digests_of(double(jax.device_put(leaves, places))), expected)
