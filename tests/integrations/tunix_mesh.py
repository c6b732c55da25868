"""`JkvRollout` and the replayed loss over several devices: `test_tunix_rollout.py` runs this file with four simulated ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix")

from flax import nnx
from tunix.rl.grpo.grpo_learner import GRPOConfig

from jkv.integrations.tunix import JkvRollout
from jkv.integrations.tunix.replayed import make_loss, renamed, settings_of
from jkv.integrations.tunix.weights import config_of, leaves_of
from tests.support.tunix_learners import learn, make_mesh
from tests.support.tunix_models import (
    LIMIT,
    SETTINGS,
    TINY_CACHE,
    WIDTH,
    Letters,
    TokenizerAdapter,
    make_model,
    rollout_config,
    tunix_rules,
)

__all__ = ["tunix_rules"]  # a fixture
CONFIG = rollout_config(seed=3)


def make(model, mesh, **settings):
    return JkvRollout(model, TokenizerAdapter(Letters()), mesh, CONFIG, **SETTINGS | settings)


def placed(model, mesh):
    """The model with its weights on all devices of a mesh, as tunix places an actor without a split."""
    state = jax.device_put(nnx.state(model), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    nnx.update(model, state)
    return model


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_two_devices_roll_out_what_one_does(lora):
    expected = make(make_model(lora=lora), None).generate(["abc"] * 2 + ["cdefg"] * 2, CONFIG)
    actor = placed(make_model(lora=lora), make_mesh(1, 2))
    rollout = make(actor, make_mesh(1, 2))
    assert rollout.model() is actor
    out = rollout.generate(["abc"] * 2 + ["cdefg"] * 2, CONFIG)
    assert [row.tolist() for row in out.tokens] == [row.tolist() for row in expected.tokens]
    for one, other in zip(out.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    key = rollout._rollout.model.params.layers[0].key
    assert key.sharding.shard_shape(key.shape) == (32, 1, 8)  # one of two KV heads
    tokens = np.zeros((4, 24), np.int32)
    for row, values in zip(tokens, out.tokens, strict=True):
        row[: len(values)] = values
    dense = rollout.get_per_token_logps(out.left_padded_prompt_tokens, tokens)
    for i, row in enumerate(out.logprobs):
        is_real = tokens[i, : len(row)] != 0
        np.testing.assert_allclose(np.asarray(dense)[i, : len(row)][is_real], row[is_real], atol=1e-4)


def test_weights_of_an_actor_elsewhere_are_synchronised_across():
    actor = make_model()
    others = jax.sharding.Mesh(np.array(jax.devices()[2:]).reshape(1, 2), ("fsdp", "tp"))
    rollout = make(actor, others)
    assert rollout.model() is None
    before = rollout.generate(["abc"], CONFIG)
    assert {device.id for device in rollout._rollout.model.params.embedding.devices()} == {2, 3}
    rollout.update_params(nnx.state(make_model(seed=70), nnx.Param))
    after = rollout.generate(["abc"], CONFIG)
    assert before.logprobs[0].tolist() != after.logprobs[0].tolist()
    with pytest.raises(ValueError, match="must be on the devices of the role ROLLOUT; the actor's are on others"):
        make(actor, make_mesh(1, 2), live=True)


def test_more_devices_than_kv_heads_hold_copies_of_them():
    expected = make(make_model(), None).generate(["abc"] * 2, CONFIG)
    out = make(placed(make_model(), make_mesh(1, 4)), make_mesh(1, 4)).generate(["abc"] * 2, CONFIG)
    assert [row.tolist() for row in out.tokens] == [row.tolist() for row in expected.tokens]


@pytest.mark.parametrize(("shape", "live"), [((2, 2), True), ((4, 1), False)], ids=["two, live", "four, synchronised"])
def test_an_axis_that_splits_no_heads_makes_replicas(shape, live):
    prompts, mesh = ["abc"] * 3 + ["cdefg"] * 2, make_mesh(*shape)

    def draws(model, mesh, live):
        """What rollouts draw before and after an update, and with longer prompts, which rebuild the engines."""
        rollout, found = make(model, mesh, policy=TINY_CACHE, live=live), []
        rollout.return_trace = True
        for config in (CONFIG, CONFIG, dataclasses.replace(CONFIG, max_prompt_length=WIDTH + 4)):
            if len(found) == 1:
                rollout.update_params(nnx.state(make_model(seed=70), nnx.Param))
            found.append((rollout.generate(prompts, config), rollout.last))
        return rollout, found

    _, expected = draws(make_model(), None, live)
    rollout, found = draws(placed(make_model(), mesh), mesh, live)
    assert len(rollout._rollout.engine.loads) == shape[0]
    for (one, one_last), (other, last) in zip(expected, found, strict=True):
        assert [row.tolist() for row in one.tokens] == [row.tolist() for row in other.tokens]
        for x, y in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)
        np.testing.assert_array_equal(one_last.policy_version, last.policy_version)
        np.testing.assert_array_equal(one_last.trace.end, last.trace.end)
    assert [set(last.policy_version.ravel().tolist()) - {-1} for _, last in found] == [{0}, {1}, {1}]
    tokens = np.zeros((5, LIMIT), np.int32)
    for row, values in zip(tokens, found[-1][0].tokens, strict=True):
        row[: len(values)] = values
    arrays = [x[0][0].left_padded_prompt_tokens for x in (expected[-1:], found[-1:])]
    np.testing.assert_array_equal(*arrays)
    dense = np.asarray(rollout.get_per_token_logps(arrays[0], tokens))
    alone = make(make_model(seed=70), None).get_per_token_logps(arrays[0], tokens)
    np.testing.assert_allclose(dense, np.asarray(alone), atol=1e-4)


def test_a_mesh_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"num_kv_heads=2 must be a multiple of the 3 devices"):
        make(make_model(), make_mesh(1, 3))


def test_live_weights_over_a_mesh_are_those_of_the_moment():
    actor = placed(make_model(), make_mesh(1, 2))
    rollout = make(actor, make_mesh(1, 2))
    before = rollout.generate(["abc"], CONFIG)
    placed_again = placed(make_model(seed=70), make_mesh(1, 2))
    nnx.update(actor, nnx.state(placed_again))
    after = rollout.generate(["abc"], dataclasses.replace(CONFIG))
    assert before.logprobs[0].tolist() != after.logprobs[0].tolist()


def train(mesh, lora):
    """What a learner logged and drew, its weights before and after."""
    model = make_model(lora=lora)
    before = {path: np.array(leaf) for path, leaf in leaves_of(model).items()}
    learned = learn(model, policy=TINY_CACHE, loss="replay", mesh=mesh, config=rollout_config(seed=2))
    return learned, before, leaves_of(learned.grpo.rl_cluster.actor_trainer.model)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "lora"])
def alone(request):
    return request.param, train(None, request.param)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 2)], ids=str)
def test_a_replay_on_a_mesh_trains_as_on_one_device(alone, shape):
    """Samples are split over "fsdp", which splits weights at rest too, and heads over "tp"."""
    lora, (expected, before, same) = alone
    learned, _, leaves = train(make_mesh(*shape), lora)
    assert (learned.logged("actor/replay_p99") < 1e-5).all()
    for one, other in zip(expected.outputs, learned.outputs, strict=True):
        assert [row.tolist() for row in one.tokens] == [row.tolist() for row in other.tokens]
    np.testing.assert_allclose(learned.logged("actor/loss"), expected.logged("actor/loss"), atol=1e-5)
    for path, leaf in same.items():
        np.testing.assert_allclose(np.asarray(leaves[path]), np.asarray(leaf), atol=1e-5, err_msg=path)
    assert max(np.abs(np.asarray(leaf) - before[path]).max() for path, leaf in same.items()) > 1e-4
    embedding = next(leaf for path, leaf in leaves.items() if "embed" in path)
    assert embedding.sharding.shard_shape(embedding.shape) != embedding.shape


@pytest.mark.parametrize("mean", ["token-mean", "sequence-mean-token-mean"])
def test_samples_that_do_not_divide_among_the_devices_are_filled_up(mean):
    model = make_model()
    example = learn(model, policy=TINY_CACHE, loss="replay", steps=1, config=rollout_config(seed=2)).examples[0]
    uneven = example.batch.replace(advantage=jnp.arange(12.0)[:, None] * jnp.ones_like(example.batch.advantage))
    reference = -jnp.ones(example.completion_ids.shape)
    three = dataclasses.replace(example, batch=jax.tree.map(lambda x: x[:3], uneven), ref_per_token_logps=reference[:3])
    settings = settings_of(GRPOConfig(num_generations=4, beta=0.5, kl_loss_mode="low_var_kl", loss_agg_mode=mean))
    found = []
    for mesh in (None, renamed(make_mesh(2, 2))):
        loss = make_loss(config_of(model), {}, settings, mesh)
        (value, aux), gradient = nnx.value_and_grad(functools.partial(loss, algo_config=None), has_aux=True)(model, three)
        found.append([value, *aux.values(), *leaves_of(gradient).values()])
    for one, other in zip(*found, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1, np.abs(one).max()))
