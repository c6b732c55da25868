"""The loss against a loop over tokens, its three ways, its means, and how exact the replay's ratio is."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.rl import correct, log_probs, make_batch, policy_loss
from tests.support.checkpoints import dense_logits

ADVANTAGES = np.array([1, -0.5, 0.2, -0.7, 0.4, 0, -1, 0.9], np.float32)


@pytest.fixture(scope="module")
def batches(squeezed):
    """The same rollouts, dense and replayed."""
    return {is_replayed: make_batch(squeezed, ADVANTAGES, replay=is_replayed, rows=9) for is_replayed in (False, True)}


def loss_by_loops(batch, current, old, weights, clip, mean, reference=None, beta=0.0):
    """PPO's clipped objective, a token at a time."""
    rows = []
    for i, t in np.argwhere(np.asarray(batch.mask)):
        ratio, gain = np.exp(current[i, t] - old[i, t]), float(batch.advantage[i, t])
        value = -weights[i, t] * min(ratio * gain, min(max(ratio, 1 - clip[0]), 1 + clip[1]) * gain)
        if reference is not None:
            away = reference[i, t] - current[i, t]
            value += beta * (np.exp(away) - away - 1)
        rows.append((i, value))
    values = [value for _, value in rows]
    by_row = [np.mean([value for row, value in rows if row == i]) for i in sorted({row for row, _ in rows})]
    return np.mean(values) if mean == "tokens" else np.mean(by_row)


@pytest.mark.everyday(where=lambda mean, way: mean == "tokens" or way == "replayed")
@pytest.mark.parametrize("mean", ["tokens", "sequences"])
@pytest.mark.parametrize("way", ["corrected", "replayed", "bypass"])
def test_the_loss_is_that_of_a_loop_over_tokens(model, batches, way, mean):
    batch = batches[way == "replayed"]
    moved = jax.tree.map(lambda x: x * 1.02, model.params)  # as after an update
    current, dense = (np.asarray(log_probs(params, batch), np.float64) for params in (moved, model.params))
    sampled = np.asarray(batch.sampled, np.float64)
    old = dense if way == "corrected" else sampled
    mode = "none" if way == "replayed" else "tis+veto"
    weights = np.asarray(correct(old.astype(np.float32), batch.sampled, batch.mask, mode=mode).weights)
    options = {"old": jnp.asarray(old, jnp.float32)} if way != "replayed" else {}
    reference = jnp.asarray(dense, jnp.float32)
    told, metrics = jax.jit(
        lambda p, b: policy_loss(p, b, clip=(0.1, 0.3), mean=mean, reference=reference, beta=0.1, **options)
    )(moved, batch)
    expected = loss_by_loops(batch, current, old, weights, (0.1, 0.3), mean, dense, 0.1)
    assert float(told) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert float(metrics["clipped"]) > 0
    if way == "bypass":
        np.testing.assert_array_equal(weights, np.asarray(batch.mask, np.float32))


def test_a_mixed_replay_is_corrected_by_the_replay_of_now_over_what_was_sampled(model, batches):
    moved = jax.tree.map(lambda x: x * 1.1, model.params)
    exact = batches[True]
    batch = exact.replace(is_mixed=True)
    current = np.asarray(log_probs(moved, batch))
    weights = np.asarray(correct(current, batch.sampled, batch.mask, mode="tis+veto").weights)
    assert len(np.unique(weights[np.asarray(batch.mask)].round(3))) > 10  # ratios of every size, some of them capped
    told, _ = jax.jit(policy_loss)(moved, batch)
    assert float(told) == pytest.approx(loss_by_loops(batch, current, current, weights, (0.2, 0.2), "tokens"), rel=1e-4)
    assert float(told) != pytest.approx(float(policy_loss(moved, exact)[0]), rel=1e-2)


def test_before_an_update_the_replays_ratio_is_one_within_replays_tolerance(model, batches):
    _, metrics = policy_loss(model, batches[True])
    assert float(metrics["difference_p99"]) <= 1e-5
    assert float(metrics["difference_max"]) <= 1e-4
    _, dense = policy_loss(model, batches[False])
    assert float(dense["difference_max"]) > 0.1


def test_the_gradient_is_that_of_advantage_times_weight_times_log_probability(model, batches):
    """At the old policy the ratio is 1, so the surrogate's gradient is REINFORCE's with importance weights."""
    for batch in batches.values():
        gradient = jax.grad(lambda p, b=batch: policy_loss(p, b)[0])(model.params)
        old = log_probs(model, batch)
        weights = correct(old, batch.sampled, batch.mask, mode="none" if batch.is_replayed else "tis+veto").weights

        def plain(params, batch=batch, weights=weights):
            return -(weights * batch.advantage * log_probs(params, batch)).sum() / batch.mask.sum(dtype=jnp.float32)

        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(jax.grad(plain)(model.params)), strict=True):
            np.testing.assert_allclose(one, other, rtol=5e-3, atol=2e-6)


@pytest.mark.everyday(where=lambda mean, sizes: (mean == "tokens") == (sizes != (4, 5)))
@pytest.mark.parametrize("mean", ["tokens", "sequences"])
@pytest.mark.parametrize("sizes", [(9,), (4, 5), (1, 2, 6)], ids=str)
def test_microbatches_of_any_split_add_up_to_one_gradient(model, batches, mean, sizes):
    batch = batches[True]
    counts = batch.mask if mean == "tokens" else batch.mask.any(axis=1)
    grad = jax.value_and_grad(lambda p, b, n: policy_loss(p, b, mean=mean, denominator=n)[0])
    whole = jax.value_and_grad(lambda p: policy_loss(p, batch, mean=mean)[0])(model.params)
    starts = np.cumsum((0, *sizes))
    pieces = [jax.tree.map(lambda x, a=a, b=b: x[a:b], batch) for a, b in itertools.pairwise(starts)]
    parts = [grad(model.params, piece, counts.sum()) for piece in pieces]
    total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-6, rtol=1e-4)


def test_a_layer_computed_once_more_gives_the_same_gradient(model, batches):
    """What it keeps less is counted in `tests/aot/test_training_on_mesh.py`."""
    kept, again = (jax.grad(lambda p, r=r: policy_loss(p, batches[True], remat=r)[0])(model.params) for r in (False, True))
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6, rtol=1e-5)


def test_a_batch_of_padding_alone_has_no_loss_and_no_gradient(model, batches):
    empty = batches[True].replace(mask=jnp.zeros_like(batches[True].mask))
    value, gradient = jax.value_and_grad(lambda p: policy_loss(p, empty)[0])(model.params)
    assert float(value) == 0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


def test_metrics_are_a_flat_dictionary_of_scalars_and_log_probabilities_come_if_asked_for(model, batches):
    loss, metrics = policy_loss(model, batches[True])
    assert {np.shape(value) for value in metrics.values()} == {()}
    assert {"clipped", "cut", "entropy", "difference_p99", "difference_max", "correction_kept"} <= metrics.keys()
    json.dumps({name: float(value) for name, value in metrics.items()})
    same, (others, log_prob) = policy_loss(model, batches[True], return_log_probs=True)
    assert (float(same), others.keys()) == (float(loss), metrics.keys())
    np.testing.assert_array_equal(log_prob, log_probs(model, batches[True]))


def test_one_number_clips_as_a_pair_of_it_does(model, batches):
    moved = jax.tree.map(lambda x: x * 1.05, model.params)
    one, pair, wider = (policy_loss(moved, batches[True], clip=clip)[0] for clip in (0.1, (0.1, 0.1), (0.1, 0.3)))
    assert float(one) == float(pair) != float(wider)
    for pair, words in (((0.28, 0.2), "fall to 0.72 and rise to 1.2"), ((0.8, 1.2), "fall to 0.2 and rise to 2.2")):
        with pytest.warns(UserWarning, match=words):
            policy_loss(moved, batches[True], clip=pair)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_the_entropy_is_that_of_the_distribution_that_tokens_are_drawn_from(model, batches, top_p):
    batch = batches[False]
    batch = batch.replace(settings=batch.settings._replace(top_p=jnp.full_like(batch.settings.top_p, top_p)))
    logits = np.stack([dense_logits(model.params, row) for row in batch.token]).astype(np.float64) / 0.8  # the temperature
    entropy = np.zeros(batch.token.shape)
    for i, t in np.argwhere(np.asarray(batch.mask)):
        p = np.sort(np.exp(logits[i, t - 1] - logits[i, t - 1].max()))[::-1]
        kept = p[: 1 + np.searchsorted(np.cumsum(p / p.sum()), top_p)]
        kept = kept / kept.sum()
        entropy[i, t] = -(kept * np.log(kept)).sum()
    mean = entropy[np.asarray(batch.mask)].mean()
    (loss, metrics), gradient = jax.value_and_grad(policy_loss, has_aux=True)(model.params, batch)
    (bonus, _), pushed = jax.value_and_grad(policy_loss, has_aux=True)(model.params, batch, entropy_bonus=0.5)
    assert float(metrics["entropy"]) == pytest.approx(mean, rel=1e-4)
    assert float(bonus) == pytest.approx(float(loss) - 0.5 * mean, rel=1e-4)
    step = jax.tree.map(lambda p, g, b: p + 0.02 * (g - b), model.params, gradient, pushed)
    assert float(policy_loss(step, batch)[1]["entropy"]) > mean  # down the bonus's own gradient


def test_another_top_p_compiles_no_train_step_again(model):
    step = jax.jit(jax.value_and_grad(policy_loss, has_aux=True))
    rollout = jkv.Rollout(model, jkv.r_kv(budget=12, interval=4, window=4), max_prompt_tokens=4, max_new_tokens=24, page_size=4)
    for sampling in (jkv.Sampling(), jkv.Sampling(top_p=0.9), jkv.Sampling(top_p=0.8, top_k=9, temperature=0.7)):
        out = rollout([[5, 1, 9]], n=4, sampling=sampling, seed=1, stop_ids=(), return_trace=True, progress=False)
        (_, metrics), _ = step(model.params, make_batch(out, ADVANTAGES[:4], replay=True))
        assert float(metrics["difference_max"]) <= 1e-4
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip": (1.2, 0.2)}, r"clip must be.*got \(1.2, 0.2\)"),
        ({"clip": -0.2}, "clip must be.*got -0.2"),
        ({"clip": 1.2}, "clip must be.*got 1.2. Pass the distances from 1"),
        ({"clip": float("nan")}, "clip must be.*got nan"),
        ({"entropy_bonus": float("nan")}, "entropy_bonus must be finite.*got nan"),
        ({"beta": float("nan")}, "beta, at least 0"),
        ({"mean": "rows"}, "must be one of tokens, sequences; got 'rows'"),
        ({"beta": 0.1}, "no reference. Score it with"),
        ({"correction": "pop"}, "mode must be of"),
        ({"denominator": 0.0}, "denominator must be positive.*got 0"),
    ],
)
def test_settings_that_make_no_loss_are_refused(model, batches, options, words):
    with pytest.raises(ValueError, match=words):
        policy_loss(model, batches[False], **options)


def test_what_top_k_cuts_from_the_dense_policy_is_dropped_and_no_gradient_is_nan(model):
    """A compressed cache draws tokens that the dense policy's own top-k would have cut: their dense logarithm is -inf."""
    options = {"max_new_tokens": 40, "page_size": 4, "progress": False, "n": 4}
    policy, sampling = jkv.r_kv(budget=12, interval=4, window=4), jkv.Sampling(top_k=3, seed=1)
    out = jkv.generate(model, [[5, 1, 9]], policy=policy, sampling=sampling, stop_ids=(), **options)
    batch = make_batch(out, ADVANTAGES[:4])
    for correction in ("tis+veto", "none"):
        (loss, metrics), gradient = jax.value_and_grad(policy_loss, has_aux=True)(model.params, batch, correction=correction)
        assert 0 < float(metrics["cut"]) < 0.9
        assert np.isfinite(float(loss))
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
    assert any(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))
