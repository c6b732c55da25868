"""Batches: every number at its token's place, few shapes, replay as exact as `jkv.score`, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.rl import group_advantages, log_probs, make_batch, policy_loss
from jkv.rl.packed import row_count

ADVANTAGES = np.linspace(-1, 1, 8, dtype=np.float32)


def cut_out(array, out, batch):
    """A batch's numbers of completions, as rollouts have them: [n, T]."""
    told = np.zeros(out.tokens.shape, np.asarray(array).dtype)
    for i, (prompt, length) in enumerate(zip(out.prompts, out.lengths, strict=True)):
        told[i, :length] = np.asarray(array)[i, len(prompt) : len(prompt) + length]
    return told


def norm_of(tree):
    return float(np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(tree))))


def is_token(out):
    return np.arange(out.tokens.shape[1]) < out.lengths[:, None]


@pytest.mark.parametrize("replay", [False, True], ids=["dense", "replayed"])
def test_its_log_probabilities_are_those_of_scoring(model, squeezed, replay):
    assert len(set(squeezed.lengths.tolist())) > 2  # ragged, or the test says little
    batch = make_batch(squeezed, ADVANTAGES, replay=replay, rows=11, length=64)
    told = jax.jit(log_probs)(model.params, batch)
    scored = np.asarray(jkv.score(model, squeezed, trace=squeezed.trace if replay else "dense").logprobs)
    np.testing.assert_allclose(cut_out(told, squeezed, batch), np.where(is_token(squeezed), scored, 0), atol=2e-5)
    assert not np.asarray(told)[~np.asarray(batch.mask)].any()
    if replay:
        assert np.abs(cut_out(told, squeezed, batch) - squeezed.logprobs).max() <= 1e-4


def test_every_number_stands_at_its_tokens_place(squeezed):
    batch = make_batch(squeezed, ADVANTAGES)
    mask = is_token(squeezed)
    assert int(np.asarray(batch.mask).sum()) == squeezed.lengths.sum()
    for array, told in ((batch.token, squeezed.tokens), (batch.sampled, squeezed.logprobs)):
        np.testing.assert_array_equal(cut_out(array, squeezed, batch), np.where(mask, told, 0))
    np.testing.assert_array_equal(cut_out(batch.advantage, squeezed, batch), np.where(mask, ADVANTAGES[:, None], 0))
    for i, prompt in enumerate(squeezed.prompts):
        assert np.asarray(batch.token)[i, : len(prompt)].tolist() == prompt.tolist()
    of_tokens = np.random.default_rng(0).standard_normal(squeezed.tokens.shape).astype(np.float32)
    apart = make_batch(squeezed, of_tokens).advantage
    np.testing.assert_array_equal(cut_out(apart, squeezed, batch), np.where(mask, of_tokens, 0))


def test_rollouts_of_about_one_size_make_batches_of_one_shape(model):
    shapes, programs = set(), []

    @jax.jit
    def run(params, batch):
        programs.append(1)
        return log_probs(params, batch)

    for limit, prompt in ((29, [1, 2]), (32, [5] * 6), (35, [4, 4, 4])):
        out = jkv.generate(
            model, [prompt], max_new_tokens=limit, n=3, sampling=jkv.Sampling(seed=1), stop_ids=(), page_size=4,
            policy=jkv.streaming_llm(budget=8, sinks=1, interval=4), return_trace=True, progress=False,
        )  # fmt: skip
        batch = make_batch(out, np.zeros(3), replay=True, length=48)
        shapes.add(jax.tree.map(lambda x: x.shape, batch))
        run(model.params, batch)
    assert len(shapes) == len(programs) == 1
    assert len({row_count(n) for n in range(1, 1025)}) < 50
    assert all(n <= row_count(n) <= 1.25 * n for n in range(1, 1025))


def test_columns_that_name_their_tokens_replay_alike_however_many_there_are(model, squeezed):
    """As sharing's traces have them: here every column in two, one after the other, and all shuffled."""
    source, begin, end = squeezed.trace.source, squeezed.trace.begin, squeezed.trace.end
    middle = np.minimum(begin + 5, end)
    halves = ((source, source), (begin, middle), (middle, end))
    order = np.random.default_rng(0).permutation(2 * source.shape[-1])
    trace = jkv.Trace.of(*(np.concatenate(pair, axis=-1)[..., order] for pair in halves))
    batch = make_batch(dataclasses.replace(squeezed, trace=trace), ADVANTAGES, replay=True, rows=9)
    assert batch.columns.ended.shape[-1] > batch.token.shape[1]
    told = cut_out(log_probs(model, batch), squeezed, batch)
    assert np.abs(told - squeezed.logprobs).max() <= 1e-4


def test_the_gradient_of_a_replay_is_that_of_the_score(model, squeezed):
    batch = make_batch(squeezed, ADVANTAGES, replay=True, rows=10)
    mine = jax.jit(jax.grad(lambda params: log_probs(params, batch).sum()))(model.params)
    scored = jax.grad(lambda params: jkv.score(params, squeezed, trace=squeezed.trace).logprobs.sum())(model.params)
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(scored), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


def test_a_part_of_a_batch_is_a_batch(model, squeezed):
    batch = make_batch(squeezed, ADVANTAGES, replay=True)
    part = jax.tree.map(lambda x: x[2:5], batch)
    np.testing.assert_allclose(log_probs(model, part), log_probs(model, batch)[2:5], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"trace": None}, {"replay": True}, "has none. Sample with return_trace=True"),
        ({}, {"rows": 7}, "rows must hold what was sampled, at least 8; got 7"),
        ({}, {"length": 20}, r"length must hold what was sampled, at least \d+; got 20"),
        ({}, {"advantages": np.zeros(3)}, r"one a completion, \(8,\).*got \(3,\)"),
        ({}, {"advantages": np.full(8, np.nan)}, "advantages must be finite"),
        ({"logprobs": 0.5}, {}, "at most 0"),
        ({"logprobs": 0.0, "columns": 3}, {}, "one shape"),
    ],
)
def test_what_makes_no_batch_is_refused(squeezed, change, options, words):
    if "logprobs" in change:
        change = {"logprobs": np.full_like(squeezed.logprobs, change["logprobs"])[:, change.get("columns", 0) :]}
    bad = dataclasses.replace(squeezed, **change)
    with pytest.raises(ValueError, match=words):
        make_batch(bad, options.pop("advantages", ADVANTAGES), **options)


@pytest.mark.parametrize("reason", ["error", "nan"])
def test_completions_that_failed_never_enter_a_batch_unasked(model, squeezed, reason):
    log_prob = squeezed.logprobs.copy()
    log_prob[2, 0] = np.nan if reason == "nan" else log_prob[2, 0]
    samples = [dataclasses.replace(one, error=OSError("gone") if i == 2 else None) for i, one in enumerate(squeezed.samples)]
    reasons = [reason if i == 2 else one for i, one in enumerate(squeezed.finish_reason)]
    out = dataclasses.replace(squeezed, finish_reason=reasons, samples=samples, logprobs=log_prob)
    for replay in (False, True):
        with pytest.raises(
            ValueError, match=rf"1 completion of 8 failed, the first of them 2, .*'{reason}' .*gone.*failed='mask'"
        ):
            make_batch(out, ADVANTAGES, replay=replay)
    advantages = np.where(np.arange(8) == 2, np.nan, ADVANTAGES)
    masked = make_batch(out, advantages, failed="mask")
    whole = make_batch(squeezed, ADVANTAGES)
    assert not np.asarray(masked.mask)[2].any()
    others = np.arange(len(masked.mask)) != 2
    np.testing.assert_array_equal(np.asarray(masked.mask)[others], np.asarray(whole.mask)[others])
    loss, gradient = jax.value_and_grad(lambda params: policy_loss(params, masked)[0])(model.params)
    assert np.isfinite(loss)
    assert np.isfinite(norm_of(gradient))
    if reason == "error":
        np.testing.assert_array_equal(make_batch(out, ADVANTAGES, failed="train").mask, whole.mask)
    with pytest.raises(ValueError, match="failed must be one of refuse, mask, train"):
        make_batch(out, ADVANTAGES, failed="drop")


def test_a_conversation_whose_tool_failed_never_enters_a_batch_unasked(model):
    rollout = jkv.Rollout(model, max_prompt_tokens=8, max_new_tokens=12, max_running=2, page_size=4)
    reply = lambda turn: [5] if turn.sample_index else 3  # noqa: E731
    with pytest.warns(UserWarning, match="returned no reply"):
        out = rollout.converse([[5, 6]], reply, n=2, max_turns=2, max_turn_tokens=4, seed=1, stop_ids=())
    with pytest.raises(ValueError, match=r"1 completion of 2 failed, the first of them 0, .*A reply must be"):
        make_batch(out, [1.0, -1.0])
    assert np.asarray(make_batch(out, [1.0, -1.0], failed="mask").mask).sum(axis=1).tolist()[:2] == [0, 8]


def test_completions_padded_on_the_left_are_refused(squeezed):
    with pytest.raises(ValueError, match="padded on the right"):
        make_batch(jkv.Rollouts(**vars(squeezed), mask=is_token(squeezed)[:, ::-1]), ADVANTAGES)


def test_completions_of_several_weights_are_replayed_only_if_asked_for(squeezed):
    version = np.where(is_token(squeezed), 0, -1).astype(np.int32)
    whole = jkv.Rollouts(**vars(squeezed) | {"mask": is_token(squeezed), "policy_version": version})
    make_batch(whole, ADVANTAGES, replay=True)
    version = version.copy()
    version[3, 2:] = np.where(is_token(squeezed)[3, 2:], 1, -1)
    mixed = dataclasses.replace(whole, policy_version=version)
    with pytest.raises(ValueError, match="sample 3 has versions 0 to 1"):
        make_batch(mixed, ADVANTAGES, replay=True)
    assert not make_batch(mixed, ADVANTAGES).is_mixed
    assert make_batch(mixed, ADVANTAGES, replay=True, mixed=True).is_mixed
    with pytest.raises(ValueError, match="mixed=True is of a replay"):
        make_batch(mixed, ADVANTAGES, mixed=True)


def test_samples_that_were_pending_at_an_update_are_replayed_under_the_new_weights(model):
    moved = jax.tree.map(lambda x: x * 1.1, model.params)
    sizes = {"max_prompt_tokens": 16, "max_new_tokens": 24, "page_size": 4, "chunk": 8, "max_running": 4}
    rollout = jkv.Rollout(model, jkv.r_kv(budget=12, interval=8, window=4), **sizes)
    rollout.submit([[5, 1, 9], [7] * 8], n=2, seed=3, stop_ids=(), return_trace=True)
    assert len(rollout.run(max_steps=8).tokens) == 0
    rollout.update(moved)
    out = rollout.run()
    assert {tuple(np.unique(row)) for row in out.policy_version} == {(0, 1)}
    batch = make_batch(out, group_advantages([1, 0, 0, 1], 2), replay=True, mixed=True)
    loss_of = functools.partial(policy_loss, return_log_probs=True)
    (loss, (metrics, replayed)), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(moved, batch)
    apart = np.abs(cut_out(replayed, out, batch) - out.logprobs)
    assert apart[:, :8].max() > 1e-2  # the old weights drew these
    assert float(metrics["correction_kept"]) > 0
    assert np.isfinite(loss)
    assert 0 < norm_of(gradient) < np.inf


def test_columns_of_another_model_are_refused_before_a_compile(squeezed):
    wide = jkv.testing.tiny_model(config=dataclasses.replace(jkv.testing.TINY, num_layers=3))
    batch = make_batch(squeezed, ADVANTAGES, replay=True)
    with pytest.raises(ValueError, match=r"here \(8, 3, 2\); got \(8, 2, 2\)"):
        jax.jit(log_probs)(wide.params, batch)


def test_advantages_are_deviations_within_a_group():
    rewards = np.array([1, 0, 0, 0, 3, 1, 2, 2.0])
    told = group_advantages(rewards, 4)
    for group, advantages in zip(rewards.reshape(2, 4), told.reshape(2, 4), strict=True):
        np.testing.assert_allclose(advantages, (group - group.mean()) / (group.std(ddof=1) + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, 4, scale=False)[:4], [0.75, -0.25, -0.25, -0.25])
    assert not group_advantages(np.full(6, 0.3), 3).any()
    assert jnp.asarray(told).dtype == jnp.float32


@pytest.mark.parametrize(
    ("rewards", "n", "words"),
    [
        ([1, 2], 1, "at least 2 completions.*n=1.*Draw more"),
        ([1, 2, 3], 2, r"2 for each prompt in turn; got \(3,\)"),
        ([[1, 2]], 2, r"got \(1, 2\)"),
        ([], 2, r"got \(0,\)"),
        ([1, np.nan], 2, "finite; got nan at 1"),
    ],
)
def test_rewards_that_make_no_groups_are_refused(rewards, n, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(rewards, n)


@pytest.mark.parametrize(
    ("prompt_index", "words"),
    [
        ([0, 1], r"all 2 completions of each prompt.*prompt 0 has 1\. Run to the end"),
        ([0, 1, 0, 1], "prompts are not one after the other"),
        ([0, 0, 1], r"one number a reward, \(4,\); got \(3,\)"),
    ],
)
def test_groups_that_are_not_whole_are_refused(prompt_index, words):
    """As an interrupt leaves them: one completion of each prompt is no group."""
    with pytest.raises(ValueError, match=words):
        group_advantages(np.arange(max(len(prompt_index), 2) + len(prompt_index) % 2), 2, prompt_index=prompt_index)
    assert group_advantages([1, 0, 0, 1], 2, prompt_index=[3, 3, 7, 7]).tolist() == pytest.approx(
        [0.707, -0.707, -0.707, 0.707], abs=1e-3
    )


def test_completions_without_a_token_make_a_batch_of_none(model):
    rollout = jkv.Rollout(model, jkv.r_kv(budget=12, interval=4, window=4), max_prompt_tokens=8, max_new_tokens=8, n=2)
    rollout.submit([[5, 1, 9]], return_trace=True)
    batch = make_batch(rollout.cancel(), [0.0, 0.0], replay=True)
    assert not np.asarray(batch.mask).any()
