"""tunix's GRPO with `JkvRollout`, and `JkvGRPOLearner`, which corrects for compression."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

pytest.importorskip("tunix")

from flax import nnx
from tunix.rl.function_registry import get_policy_loss_fn
from tunix.rl.grpo.dapo_learner import DAPOConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

from jkv.integrations.tunix import JkvGRPOLearner, JkvRollout
from jkv.integrations.tunix.replayed import make_loss, settings_of
from jkv.integrations.tunix.weights import config_of, leaves_of, scales_of
from tests.support.tunix_learners import learn, make_cluster, reward
from tests.support.tunix_models import (
    EOS,
    LIMIT,
    PAD,
    SETTINGS,
    TINY_CACHE,
    WIDTH,
    EndPads,
    dense_of,
    make_model,
    padded,
    rollout_config,
    tunix_rules,
)

__all__ = ["tunix_rules"]  # a fixture


def copy_of(model):
    return nnx.merge(*nnx.split(model))


def rho_of(model, example, output):
    """Dense over sampled probability of each token, by tunix and NumPy, and the mask of completions."""
    mask = np.arange(LIMIT) < np.array([len(row) for row in output.tokens])[:, None]
    dense = np.asarray(dense_of(model, example.prompt_ids, example.completion_ids), np.float64)
    return np.exp(np.where(mask, dense - padded(output.logprobs, fill=0), 0)), mask


def test_a_plain_learner_rolls_out_with_the_actor_s_live_weights():
    model = make_model()
    start = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    learned = learn(model, GRPOLearner)
    actor = learned.grpo.rl_cluster.actor_trainer.model
    assert not learned.synchronised
    assert len(learned.outputs) == 3
    moved = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).max(), start, nnx.state(actor, nnx.Param))
    assert max(jax.tree.leaves(moved)) > 1e-4
    rollout = learned.grpo.rl_cluster.rollout
    out = rollout.generate(["abc"], rollout_config())
    dense = dense_of(actor, out.left_padded_prompt_tokens, padded(out.tokens))
    np.testing.assert_allclose(out.logprobs[0], dense[0, : len(out.tokens[0])], atol=2e-5)
    assert set(rollout.last.policy_version.ravel().tolist()) <= {-1, 3}


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "lora"])
def test_synchronised_weights_are_brought_at_each_step(lora):
    model = make_model(lora=lora)
    learned = learn(model, live=False)
    assert [kinds for _, kinds in learned.synchronised] == [(nnx.LoRAParam if lora else nnx.Param,)] * 3
    rollout, actor = learned.grpo.rl_cluster.rollout, learned.grpo.rl_cluster.actor_trainer.model
    assert rollout.model() is None
    out = rollout.generate(["abc"], rollout_config())
    dense = dense_of(actor, out.left_padded_prompt_tokens, padded(out.tokens))
    np.testing.assert_allclose(out.logprobs[0], dense[0, : len(out.tokens[0])], atol=2e-5)
    assert all(example.old_per_token_logps is not None for example in learned.examples)
    np.testing.assert_allclose(learned.logged("sampler/max_difference"), 0, atol=3e-5)


def test_micro_batches_of_unequal_size_join():
    cluster = make_cluster(make_model(), functools.partial(JkvRollout, **SETTINGS))
    out = cluster.generate(["a"] * 2 + ["abcdefg"] * 2 + ["bc"] * 3, micro_batch_size=4)
    assert out.left_padded_prompt_tokens.shape == (7, WIDTH)
    assert (out.left_padded_prompt_tokens[3] == [PAD] * 5 + list(range(2, 9))).all()
    assert [len(row) for row in out.logprobs] == [len(row) for row in out.tokens]
    assert len(out.text) == 7


def test_weights_of_a_corrected_loss_are_those_of_numpy_and_its_metrics_are_logged():
    model = make_model()
    first = copy_of(model)
    config = rollout_config(seed=2)
    learned = learn(
        model, config=config, policy=jkv.streaming_llm(budget=8, interval=8), correction="tis+veto", cap=1.5, veto=0.2
    )
    example, output = learned.examples[0], learned.outputs[0]
    rho, mask = rho_of(first, example, output)
    is_vetoed = (mask & (rho < 0.2)).any(axis=1, keepdims=True)
    kept = mask & ~is_vetoed
    assert 0 < is_vetoed.sum() < len(mask), "the veto should tell sequences apart here"
    assert np.asarray(example.completion_mask).tolist() == kept.tolist()
    np.testing.assert_allclose(example.sampler_is_weights, np.where(kept, np.minimum(rho, 1.5), 0), atol=1e-3)
    assert example.old_per_token_logps is None
    assert len(learned.logged("sampler/overlap")) == 3
    assert learned.logged("sampler/overlap")[0] == pytest.approx(np.minimum(rho, 1)[mask].mean(), abs=1e-3)
    assert learned.logged("sampler/vetoed")[0] == pytest.approx(is_vetoed.mean())
    assert (learned.logged("rollout/peak_kv_bytes") > 0).all()
    assert (learned.logged("rollout/evicted") > 0).all()


def test_full_caches_need_no_correction_and_lose_what_a_plain_learner_does():
    config, model = rollout_config(seed=jax.random.PRNGKey(1)), make_model()
    (plain, *_), (corrected, *_) = (
        learn(copy_of(model), learner, config=config, steps=1, **options).examples
        for learner, options in ((GRPOLearner, {}), (JkvGRPOLearner, {"correction": "tis"}))
    )
    assert np.asarray(plain.completion_ids).tolist() == np.asarray(corrected.completion_ids).tolist()
    weights, mask = np.asarray(corrected.sampler_is_weights), np.asarray(corrected.completion_mask)
    np.testing.assert_allclose(weights[mask], 1, atol=1e-4)
    is_drawn_pad = mask & ~np.asarray(plain.completion_mask)  # which tunix takes for no token
    assert (np.asarray(plain.completion_ids)[is_drawn_pad] == PAD).all()
    same = dataclasses.replace(corrected, completion_mask=plain.completion_mask)
    losses = [loss_of(model, example) for example in (plain, same)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert abs(losses[0]) > 1e-3
    assert loss_of(model, dataclasses.replace(same, sampler_is_weights=2 * weights)) == pytest.approx(2 * losses[0], abs=1e-5)


def loss_of(model, example):
    settings = GRPOConfig(num_generations=4, beta=0.0)
    settings.temperature = 1.0
    uneven = dataclasses.replace(example, advantages=jnp.arange(12.0))  # a loss that is not zero by symmetry
    return float(get_policy_loss_fn("grpo")(model, uneven, algo_config=settings, pad_id=PAD, eos_id=EOS)[0])


def test_later_iterations_go_by_the_dense_log_probabilities_of_before():
    model = make_model()
    first = copy_of(model)
    learned = learn(model, policy=TINY_CACHE, num_iterations=2, steps=1, correction="none")
    example = learned.examples[0]
    dense = dense_of(first, example.prompt_ids, example.completion_ids)
    mask = np.asarray(example.completion_mask)
    np.testing.assert_allclose(np.asarray(example.old_per_token_logps)[mask], np.asarray(dense)[mask], atol=2e-5)


def test_an_end_token_that_pads_is_trained_all_the_same():
    with pytest.warns(UserWarning, match="also an end token"):
        learned = learn(make_model(), tokenizer=EndPads(), steps=1, correction="none", config=rollout_config(seed=2))
    example, output = learned.examples[0], learned.outputs[0]
    lengths = [len(row) for row in output.tokens]
    assert min(lengths) < LIMIT
    assert np.asarray(example.completion_mask).sum(axis=1).tolist() == lengths


class Corrupted(JkvRollout):
    """Every fifth log-probability is wrong."""

    def generate(self, *args, **kwargs):
        out = super().generate(*args, **kwargs)
        for row in out.logprobs:
            row[::5] -= 3.0
        return out


@pytest.mark.parametrize(
    ("engine", "policy"),
    [(Corrupted, jkv.full()), (JkvRollout, jkv.streaming_llm(budget=6, interval=8))],
    ids=["corrupted", "starved"],
)
def test_a_mismatch_is_warned_of(engine, policy):
    with pytest.warns(
        UserWarning, match=r"the (overlap|effective sample size) of sampled and dense distributions is 0\.\d+, below"
    ):
        learn(make_model(), engine=engine, policy=policy, steps=1, config=rollout_config(seed=2))


@pytest.mark.parametrize("loss", ["dense", "replay"])
def test_samples_that_failed_are_outside_of_the_mask(loss, monkeypatch):
    sample = JkvRollout._sample

    def sampled(*args):
        out = sample(*args)
        return dataclasses.replace(out, finish_reason=["error", *out.finish_reason[1:]])

    monkeypatch.setattr(JkvRollout, "_sample", sampled)
    learned = learn(make_model(), engine=functools.partial(JkvRollout, failed="return"), steps=1, loss=loss)
    masks = np.asarray(learned.examples[0].completion_mask)
    calls = len(masks) if loss == "replay" else 4  # the first sample of each call of the engine, of one group each
    assert not masks[::calls].any()
    assert np.delete(masks, np.arange(0, len(masks), calls), axis=0).any(axis=1).all()
    if loss == "replay":
        assert not np.asarray(learned.examples[0].batch.mask)[0].any()
    with pytest.raises(RuntimeError, match="failed='return'"):
        learn(make_model(), steps=1, loss=loss)


def test_settings_that_would_lose_the_correction_are_refused():
    engine = functools.partial(JkvRollout, **SETTINGS)
    settings = GRPOConfig(num_generations=2, beta=0.0)
    with pytest.raises(ValueError, match="mode must be of none, tis"):
        JkvGRPOLearner(make_cluster(make_model(), engine), settings, reward, correction="tiss")
    with pytest.raises(ValueError, match="max_seq_token_per_tpu must not be set"):
        JkvGRPOLearner(make_cluster(make_model(), engine, max_seq_token_per_tpu=64), settings, reward)


def replay_of(model, example):
    """The loss and its gradient of an example with uneven advantages, by the learner's own function."""
    shape, scales = config_of(model), scales_of(model, leaves_of(model))
    uneven = jnp.arange(12.0)[:, None] * jnp.ones_like(example.batch.advantage)
    example = dataclasses.replace(example, batch=example.batch.replace(advantage=uneven))
    loss = make_loss(shape, scales, settings_of(GRPOConfig(num_generations=4, beta=0.0)))
    (value, aux), gradient = nnx.value_and_grad(lambda model: loss(model, example, None), has_aux=True)(model)
    return float(value), aux, gradient


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "lora"])
def test_a_replayed_loss_reads_what_the_rollout_read_and_trains_the_actor(lora):
    model = make_model(lora=lora)
    first = copy_of(model)
    start = jax.tree.map(np.array, nnx.state(model, nnx.LoRAParam if lora else nnx.Param))
    learned = learn(model, policy=TINY_CACHE, loss="replay", config=rollout_config(seed=2))
    assert len(learned.logged("actor/replay_p99")) == 3
    assert (learned.logged("actor/replay_p99") < 1e-5).all()  # exact before every update, with the weights of that step
    assert (learned.logged("actor/replay_max") < 1e-4).all()
    assert (learned.logged("rollout/evicted") > 0).all()
    moved = nnx.state(learned.grpo.rl_cluster.actor_trainer.model, nnx.LoRAParam if lora else nnx.Param)
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).max(), start, moved))) > 1e-4

    example, output = learned.examples[0], learned.outputs[0]
    assert np.asarray(example.completion_mask).sum(axis=1).tolist() == [len(row) for row in output.tokens]
    rho, mask = rho_of(first, example, output)
    assert np.abs(np.log(rho[mask])).max() > 0.01, "the full cache computes other log-probabilities"
    sampled = np.concatenate(output.logprobs)
    np.testing.assert_array_equal(np.asarray(example.batch.sampled)[np.asarray(example.batch.mask)], sampled)
    _, aux, _ = replay_of(first, example)
    assert float(aux["replay_max"]) < 1e-4


def test_microbatches_have_the_rows_of_their_samples_and_later_iterations_go_by_what_was_sampled():
    learned = learn(
        make_model(),
        policy=TINY_CACHE,
        loss="replay",
        steps=2,
        num_iterations=2,
        config=rollout_config(seed=2),
        training={"train_micro_batch_size": 1, "rollout_micro_batch_size": 3, "compute_logps_micro_batch_size": 3},
        eval_ds=[{"prompts": np.array(["dcba"])}],
    )
    assert [len(part.batch.token) for part in learned.parts] == [4] * 7  # six of training, one of the evaluation
    for part in learned.parts:
        batch, shown = part.batch, np.asarray(part.completion_mask)
        mask = np.asarray(batch.mask)
        np.testing.assert_array_equal(np.asarray(batch.token)[mask], np.asarray(part.completion_ids)[shown])
        np.testing.assert_array_equal(mask.sum(axis=1), shown.sum(axis=1))
        spread = np.broadcast_to(np.asarray(part.advantages)[:, None], mask.shape)
        np.testing.assert_array_equal(np.asarray(batch.advantage)[mask], spread[mask])
        assert part.old_per_token_logps is None
    p99 = learned.logged("actor/replay_p99")
    assert (p99[::2] < 1e-5).all()
    assert (p99[1::2] > 1e-5).all()  # the first iteration has moved the weights


def test_a_full_cache_replays_to_the_loss_and_gradient_of_tunix():
    model = make_model()
    learned = learn(copy_of(model), loss="replay", steps=1, config=rollout_config(seed=2))
    example = learned.examples[0]
    value, _, gradient = replay_of(model, example)
    dense = dataclasses.replace(example, advantages=jnp.arange(12.0), old_per_token_logps=None)
    settings = GRPOConfig(num_generations=4, beta=0.0)
    settings.temperature = 1.0
    expected, same = nnx.value_and_grad(
        lambda model: get_policy_loss_fn("grpo")(model, dense, algo_config=settings, pad_id=PAD, eos_id=EOS)[0]
    )(model)
    assert value == pytest.approx(float(expected), rel=1e-4)
    for path, leaf in leaves_of(same).items():
        np.testing.assert_allclose(leaves_of(gradient)[path], leaf, atol=1e-4 * max(1, np.abs(leaf).max()), err_msg=path)


def test_a_reference_holds_a_replayed_policy_by_its_dense_log_probabilities():
    model = make_model()
    learned = learn(copy_of(model), policy=TINY_CACHE, loss="replay", steps=1, config=rollout_config(seed=2))
    example = learned.examples[0]
    dense = dense_of(make_model(seed=1), example.prompt_ids, example.completion_ids)
    example = dataclasses.replace(example, ref_per_token_logps=dense)
    settings = settings_of(GRPOConfig(num_generations=4, beta=0.5, kl_loss_mode="low_var_kl"))
    loss = make_loss(config_of(model), {}, settings)
    _, aux = loss(model, example, None)
    own = padded(learned.outputs[0].logprobs, fill=0.0)
    mask = np.asarray(example.completion_mask)
    away = np.where(mask, np.asarray(dense) - own, 0)
    assert float(aux["kl"]) == pytest.approx((np.exp(away) - away - 1)[mask].mean(), rel=1e-3)


def test_a_replay_that_means_something_else_is_refused():
    engine = functools.partial(JkvRollout, **SETTINGS)
    settings = GRPOConfig(num_generations=2, beta=0.0)

    def refused(words, config=settings, engine=engine, **options):
        with pytest.raises(ValueError, match=words):
            JkvGRPOLearner(make_cluster(make_model(), engine), config, reward, **{"loss": "replay"} | options)

    refused("loss must be one of dense, replay; got 'sparse'", loss="sparse")
    refused("A correction and its bounds are of a dense loss", correction="tis")
    refused("A correction and its bounds are of a dense loss", cap=5.0)
    refused("JkvRollout; got VanillaRollout", engine="vanilla")
    for name, change in (
        ("loss_algo", {"loss_algo": "gspo-token"}),
        ("loss_agg_mode", {"loss_agg_mode": "sequence-mean-token-scale"}),
        ("kl_loss_mode", {"beta": 0.1}),
        ("kl_clamp_value", {"beta": 0.1, "kl_loss_mode": "low_var_kl", "kl_clamp_value": 10.0}),
    ):
        refused(f'{name} must be .* with loss="replay"', config=dataclasses.replace(settings, **change))
    refused("clip must be how far the ratio may fall", config=dataclasses.replace(settings, epsilon=1.5))


def test_settings_of_dapo_are_taken():
    assert settings_of(DAPOConfig()) == {"clip": (0.2, 0.28), "mean": "tokens", "beta": 0.0}
