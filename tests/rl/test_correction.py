"""Corrections: an independent reference, the rules of verl and OpenRLHF as published, hand-made vectors, gradients, jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.rl import correct

MODES = ("none", "tis", "clip", "mask", "veto", "geo", "tis+veto", "tis+geo", "mask+veto", "clip+geo+veto", "tis+mask")


def reference(dense, sampled, mask, mode, cap, band, veto, normalize):
    """The module's table, a token at a time, in float64."""
    parts, rows = mode.split("+"), mask.shape[0]
    weights, kept = np.zeros(mask.shape), mask.copy()
    for i in range(rows):
        logs = {t: float(dense[i, t]) - float(sampled[i, t]) for t in range(mask.shape[1]) if mask[i, t]}
        if not logs:
            continue
        mean = np.exp(np.clip(sum(logs.values()) / len(logs), -20, 20))
        for t, log in logs.items():
            rho = np.exp(np.clip(log, -20, 20))
            if "tis" in parts:
                weights[i, t] = min(rho, cap)
            elif "clip" in parts:
                weights[i, t] = max(band[0], min(rho, band[1]))
            elif "mask" in parts:
                weights[i, t] = rho
            else:
                weights[i, t] = 1.0
            if "mask" in parts and not band[0] <= rho <= band[1]:
                kept[i, t] = False
        if "veto" in parts and min(logs.values()) < np.log(veto):
            kept[i] = False
        if "geo" in parts and not band[0] <= mean <= band[1]:
            kept[i] = False
    weights = np.where(kept, weights, 0)
    return (weights / weights[kept].mean() if normalize and kept.any() else weights), kept


def example():
    """Six rows: mild, far, with a vetoed token, far off in the mean, empty, of one token; padding is NaN and infinity."""
    rng = np.random.default_rng(0)
    sampled = np.log(rng.uniform(0.05, 1, (6, 12))).astype(np.float32)
    dense = sampled + np.float32(0.2) * rng.standard_normal((6, 12)).astype(np.float32)
    dense[1] = sampled[1] + rng.choice([-1, 1], 12).astype(np.float32)
    dense[2, 3], dense[2, 4] = sampled[2, 3] - 9.5, sampled[2, 4] - 25
    dense[3] = sampled[3] - 1
    dense = np.minimum(dense, 0)
    mask = np.arange(12) < np.array([12, 9, 7, 5, 0, 1])[:, None]
    return np.where(mask, dense, np.nan), np.where(mask, sampled, -np.inf), mask


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_and_mask_are_the_references(mode, normalize):
    settings = {"cap": 1.8, "band": (0.6, 1.4), "veto": 1e-4, "normalize": normalize}
    told = correct(*example(), mode=mode, **settings)
    weights, kept = reference(*example(), mode, *settings.values())
    np.testing.assert_allclose(told.weights, weights, rtol=2e-5)
    np.testing.assert_array_equal(told.mask, kept)
    assert not np.asarray(told.weights)[~kept].any()
    assert float(told.metrics["kept"]) == pytest.approx(kept.sum() / example()[2].sum())


def test_fixed_vectors_give_the_weights_worked_out_by_hand():
    rho = np.array([[1.0, 3.0, 0.25, 1.25], [1.0, 5e-5, 1.0, 1.0]])
    sampled = np.full((2, 4), np.log(0.2))
    args = sampled + np.log(rho), sampled, np.ones((2, 4), bool)
    by_hand = {
        "tis": [[1, 2, 0.25, 1.25], [1, 5e-5, 1, 1]],
        "clip": [[1, 1.5, 0.5, 1.25], [1, 0.5, 1, 1]],
        "mask": [[1, 0, 0, 1.25], [1, 0, 1, 1]],
        "veto": [[1, 1, 1, 1], [0, 0, 0, 0]],
        "geo": [[1, 1, 1, 1], [0, 0, 0, 0]],  # (1 * 3 * 0.25 * 1.25)^(1/4) = 0.984, (5e-5)^(1/4) = 0.084
        "tis+veto": [[1, 2, 0.25, 1.25], [0, 0, 0, 0]],
    }
    for mode, weights in by_hand.items():
        np.testing.assert_allclose(correct(*args, mode=mode).weights, weights, rtol=1e-5, err_msg=mode)
    metrics = correct(*args).metrics
    assert {name: float(metrics[name]) for name in ("capped", "vetoed", "kept", "max_weight")} == pytest.approx(
        {"capped": 1 / 8, "vetoed": 1 / 2, "kept": 1 / 2, "max_weight": 2}
    )


def test_the_rules_of_verl_are_these_modes():
    """`rollout_is` token with truncate or mask, `rollout_rs` geometric, the veto: in log space, cut at 20 (verl 0.6's helper).

    Its weights stay true ratios where tokens are rejected by the mask, so they are compared where the mask is True.
    """
    dense, sampled, mask = example()
    log = np.where(mask, dense, 0) - np.where(mask, sampled, 0)
    rho = np.exp(np.clip(log, -20, 20))
    lower, upper = 0.5, 2.0
    is_catastrophic = ((log < np.log(1e-4)) & mask).any(axis=1, keepdims=True)
    mean = np.exp(np.clip(log.sum(axis=1) / np.maximum(mask.sum(axis=1), 1), -20, 20))[:, None]
    published = {
        "tis": (np.minimum(rho, upper), mask),
        "tis+veto": (np.minimum(rho, upper), mask & ~is_catastrophic),
        "mask": (rho, mask & (rho >= lower) & (rho <= upper)),
        "mask+veto": (rho, mask & (rho >= lower) & (rho <= upper) & ~is_catastrophic),
        "geo+veto": (np.ones_like(rho), mask & (mean >= lower) & (mean <= upper) & ~is_catastrophic),
    }
    for mode, (weights, kept) in published.items():
        told = correct(dense, sampled, mask, mode=mode, cap=upper, band=(lower, upper))
        np.testing.assert_array_equal(told.mask, kept, err_msg=mode)
        np.testing.assert_allclose(np.asarray(told.weights)[kept], weights[kept], rtol=2e-5, err_msg=mode)


def test_the_rules_of_openrlhf_are_these_modes():
    """Factors of the loss: tis cuts from above alone, icepop zeroes outside, seq-mask-tis filters by means and keeps ratios."""
    dense, sampled, mask = example()
    log = np.where(mask, dense, 0) - np.where(mask, sampled, 0)
    low, high = 0.5, 5.0
    rho = np.exp(np.clip(log, -30, 30))
    mean = np.exp((log * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1))[:, None]
    published = {
        "tis": np.minimum(rho, high),
        "mask": np.where((rho >= low) & (rho <= high), rho, 0),
        "tis+geo": np.where((mean >= low) & (mean <= high), rho, 0),
    }
    for mode, factor in published.items():
        told = correct(dense, sampled, mask, mode=mode, cap=high if mode == "tis" else np.inf, band=(low, high))
        np.testing.assert_allclose(told.weights, np.where(mask, factor, 0), rtol=2e-5, atol=1e-8, err_msg=mode)


@pytest.mark.parametrize("mode", MODES)
def test_equal_log_probabilities_weigh_one_and_drop_nothing(mode):
    _, sampled, mask = example()
    told = correct(sampled, sampled, mask, mode=mode)
    np.testing.assert_array_equal(told.weights, mask.astype(np.float32))
    np.testing.assert_array_equal(told.mask, mask)
    assert float(told.metrics["ess"]) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_flows_through_a_correction_and_padding_makes_no_nan(mode):
    dense, sampled, mask = example()

    def total(d, s):
        told = correct(d, s, jnp.asarray(mask), mode=mode, normalize=True)
        return (told.weights * jnp.where(mask, d, 0.0)).sum()

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(jnp.asarray(dense), jnp.asarray(sampled))
    weights = correct(dense, sampled, mask, mode=mode, normalize=True).weights
    np.testing.assert_allclose(gradients[0], np.where(mask, weights, 0), rtol=1e-5)
    assert not np.asarray(gradients[1]).any()


def test_under_jit_it_is_the_same_and_compiles_once():
    count = []

    @jax.jit
    def run(dense, sampled, mask):
        count.append(1)
        return correct(dense, sampled, mask, mode="clip+geo+veto")

    args = [jnp.asarray(x) for x in example()]
    for told in (run(*args), run(*args)):
        np.testing.assert_allclose(told.weights, correct(*example(), mode="clip+geo+veto").weights, rtol=1e-6)
    assert len(count) == 1


@pytest.mark.parametrize("normalize", [False, True])
def test_a_batch_without_a_token_has_weights_of_zero(normalize):
    nothing = np.full((3, 4), np.nan)
    told = correct(nothing, nothing, np.zeros((3, 4), bool), normalize=normalize)
    assert not np.asarray(told.weights).any()
    assert all(np.isfinite(value) for value in told.metrics.values())


def test_log_ratios_are_cut_at_twenty():
    told = correct(np.zeros((1, 2)), np.array([[-50.0, -1.0]]), np.ones((1, 2), bool), mode="tis", cap=np.inf)
    np.testing.assert_allclose(told.weights, [[np.exp(20), np.exp(1)]], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "ice"}, r"mode must be of none, tis.*got \'ice\'"),
        ({"mode": ""}, "got ''"),
        ({"mode": "tis+tis"}, "mode must be of"),
        ({"mode": "tis+clip"}, "one weight.*Choose one"),
        ({"cap": 0.0}, "cap must be above 0"),
        ({"cap": float("nan")}, "cap must be above 0"),
        ({"band": (1.5, 0.5)}, "0 <= low < high"),
        ({"veto": 0.0}, r"veto must lie in \(0, 1\)"),
    ],
)
def test_modes_and_bounds_that_are_none_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        correct(*example(), **settings)


def test_arrays_that_do_not_belong_together_are_refused():
    dense, sampled, mask = example()
    with pytest.raises(ValueError, match="one shape"):
        correct(dense[:3], sampled, mask)
    with pytest.raises(ValueError, match="booleans"):
        correct(dense, sampled, mask.astype(np.float32))
    with pytest.raises(ValueError, match="take logarithms"):
        correct(np.exp(dense), sampled, mask)
