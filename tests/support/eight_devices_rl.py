"""Scores, losses and gradients on meshes of eight simulated devices are those of one device.

`tests/rl/test_mesh.py` runs this file.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jkv
from jkv.replay.on_mesh import mesh_of
from jkv.rl import distillation, log_probs, make_batch, policy_loss
from jkv.testing import TINY, tiny_model
from tests.support.mixes import LOOSE, BreakingTokenizer

CONFIG = dataclasses.replace(TINY, num_query_heads=8, num_kv_heads=4)
PROMPTS = [list(range(20)), [5, 1, 9], [7]]
POLICIES = {
    "full": jkv.full(),
    "r_kv": jkv.r_kv(16, 8, window=4),
    "moving-sinks": jkv.streaming_llm(12, interval=8, positions="cache"),
    "seal": jkv.seal(jkv.SteeringVector(np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)), strength=0.7),
    "shared": jkv.reason_cache(include_prompt=True, **LOOSE),
}
SHAPES = [(1, 4), (2, 2), (8, 1)]


def mesh_on(shape):
    return Mesh(np.reshape(jax.devices()[: np.prod(shape)], shape), ("data", "tensor"))


@pytest.fixture(scope="module")
def model():
    return tiny_model(config=CONFIG, tokenizer=BreakingTokenizer())


ALIKE = ("full", "moving-sinks", "shared", "seal", "int8")  # they are split as the others are


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in (*POLICIES, "int8")],
)
def out(request, model):
    kv_dtype = "int8" if request.param == "int8" else None
    policy = POLICIES["r_kv" if kv_dtype else request.param]
    sampling = jkv.Sampling(seed=3, top_k=9, presence_penalty=0.5)
    settings = {"policy": policy, "sampling": sampling, "max_new_tokens": 40, "page_size": 4, "stop_ids": (), "n": 2}
    return jkv.generate(model, PROMPTS, return_trace=True, kv_dtype=kv_dtype, progress=False, **settings)


@pytest.fixture(scope="module")
def batch(out):
    advantages = np.linspace(-1, 1, len(out.tokens)).astype(np.float32)
    return make_batch(out, advantages, replay=True, rows=8)


def test_scores_are_those_of_one_device(model, out):
    wanted = np.asarray(jkv.score(model, out, out.trace).logprobs)
    for shape in SHAPES:
        split = dataclasses.replace(model, params=jkv.shard(model.params, mesh_on(shape)))
        got = np.asarray(jkv.score(split, out, out.trace, max_tokens=1).logprobs)  # the mesh is that of the weights
        apart = np.abs(got - wanted)
        if out.trace.kv_format is None:
            assert apart.max() <= 2e-5
        else:  # partial sums are added in another order, and a number between two codes may get the other one
            assert np.percentile(apart, 90) <= 2e-5
            assert apart.max() <= 2e-2
    end = out.trace.end.copy()
    end[..., :3] = np.minimum(end[..., :3], 4)  # as if the first tokens had been evicted at once
    assert np.abs(np.asarray(jkv.score(split, out, out.trace.replace(end=end)).logprobs) - wanted).max() > 1e-3


def test_a_student_on_a_mesh_learns_as_on_one_device(model):
    settings = {"sampling": jkv.Sampling(seed=3), "max_new_tokens": 12, "page_size": 4, "stop_ids": (), "n": 2}
    out = jkv.generate(model, PROMPTS, policy=POLICIES["r_kv"], return_trace=True, progress=False, **settings)
    teacher = jkv.score(model, out, top=4)
    batch = make_batch(out, teacher=teacher, replay=True, rows=8)
    wanted, on = distillation(model.params, batch)[0], mesh_on((2, 2))
    split = jkv.shard(model.params, on)
    assert float(wanted) > 1e-3
    assert float(distillation(split, batch)[0]) == pytest.approx(float(wanted), abs=1e-5)
    for one, other in zip(jkv.score(split, out, top=4).top, teacher.top, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_packed_rows_are_split(model):
    settings = {"sampling": jkv.Sampling(seed=3), "max_new_tokens": 40, "page_size": 4, "stop_ids": [2], "n": 2}
    out = jkv.generate(model, PROMPTS, policy=POLICIES["r_kv"], return_trace=True, progress=False, **settings)
    batch = make_batch(out, np.ones(len(out.tokens)), replay=True, pack=(8, 80))
    wanted = np.asarray(log_probs(model.params, batch))
    np.testing.assert_allclose(wanted[np.asarray(batch.mask)], np.asarray(batch.sampled)[np.asarray(batch.mask)], atol=1e-4)
    for shape in SHAPES:
        got = log_probs(jkv.shard(model.params, mesh_on(shape)), batch)
        np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_the_loss_and_its_gradient_are_those_of_one_device(model, batch):
    grad = jax.jit(jax.value_and_grad(policy_loss, has_aux=True), static_argnames="mesh")
    (wanted, _), gradient = grad(model.params, batch)
    norm = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    assert norm > 1e-2
    for shape in SHAPES:
        on = mesh_on(shape)
        (got, metrics), sharded = grad(jkv.shard(model.params, on), batch, mesh=on)
        is_exact = batch.columns.kv_format is None
        assert float(got) == pytest.approx(float(wanted), abs=1e-5 if is_exact else 1e-3)
        assert float(metrics["difference_max"]) < (1e-4 if is_exact else 2e-2)
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(sharded), strict=True):
            np.testing.assert_allclose(other, one, atol=(2e-5 if is_exact else 1e-3) * max(1, norm))


def test_the_mesh_is_that_of_the_argument_of_the_weights_or_of_the_program(model):
    on, other = mesh_on((2, 2)), mesh_on((4, 2))
    split = jkv.shard(model.params, on)
    assert mesh_of(model.params) is None
    assert mesh_of(split) == on
    assert mesh_of(split, other) == other
    assert mesh_of(split, mesh_on((1, 1))) is None
    seen = []
    with jax.set_mesh(on):
        jax.jit(lambda params: seen.append(mesh_of(params)) or 0)(split)
    jax.jit(lambda params: seen.append(mesh_of(params)) or 0)(jax.tree.map(lambda x: x + 0, model.params))
    assert dict(seen[0].shape) == {"data": 2, "tensor": 2}
    assert seen[1] is None


def test_what_does_not_divide_is_refused(model, batch):
    with pytest.raises(ValueError, match="rows=8"):
        log_probs(model, jax.tree.map(lambda x: x[:7], batch), mesh=mesh_on((4, 2)))
    uneven = dataclasses.replace(model.params, config=dataclasses.replace(CONFIG, num_query_heads=4))
    with pytest.raises(ValueError, match="num_query_heads=4 must be a multiple of the 8 devices"):
        log_probs(uneven, batch, mesh=mesh_on((1, 8)))


def test_two_sums_a_layer_and_nothing_gathered_but_logits(model, batch):
    on = mesh_on((2, 2))
    text = jax.jit(lambda p, b: log_probs(p, b, mesh=on)).lower(jkv.shard(model.params, on), batch).compile().as_text()
    sums = text.count(" all-reduce(") + text.count(" all-reduce-start(")
    assert sums == 2 * CONFIG.num_layers + 1  # and the embedding's
    assert text.count(" all-gather(") + text.count(" all-gather-start(") == 1  # logits
