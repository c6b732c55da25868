"""`JkvRollout`, tunix's rollout engine: its tokens, log-probabilities, settings, and configurations that change."""

import contextlib
import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

pytest.importorskip("tunix")

from flax import nnx
from tunix.rl.rollout.base_rollout import RolloutConfig

from jkv.integrations.tunix import JkvRollout
from jkv.integrations.tunix.weights import leaves_of, make_params
from tests.rollout.test_sessions import in_threads
from tests.support.devices import environment
from tests.support.interrupted import interrupted_at
from tests.support.tunix_models import (
    EOS,
    LIMIT,
    PAD,
    TINY_CACHE,
    WIDTH,
    EndPads,
    dense_of,
    make_model,
    make_rollout,
    padded,
    randomised,
    rollout_config,
    tunix_rules,
)

__all__ = ["tunix_rules"]  # a fixture

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_of_full_caches_are_tunix_s_dense_ones(temperature):
    model = make_model()
    config = dataclasses.replace(rollout_config(), temperature=temperature)
    rollout = make_rollout(model, config=config)
    out = rollout.generate(["abc"] * 3 + ["defgh"] * 3, config)
    tokens, log_probs = padded(out.tokens), padded(out.logprobs, fill=0)
    assert out.left_padded_prompt_tokens.shape == (6, WIDTH)
    assert all(row.dtype == np.float32 and len(row) == len(ids) for row, ids in zip(out.logprobs, out.tokens, strict=True))
    mask = np.arange(LIMIT) < np.array([len(row) for row in out.tokens])[:, None]
    dense = np.where(mask, dense_of(model, out.left_padded_prompt_tokens, tokens, temperature), 0)
    np.testing.assert_allclose(log_probs, dense, atol=2e-5)
    own = rollout.get_per_token_logps(jnp.asarray(out.left_padded_prompt_tokens), jnp.asarray(tokens))
    np.testing.assert_allclose(np.where(tokens != PAD, own, 0), np.where(tokens != PAD, dense, 0), atol=2e-5)


def test_a_group_is_prefilled_once_and_its_samples_differ():
    rollout = make_rollout(make_model(), policy=TINY_CACHE)
    out = rollout.generate(["abcdef"] * 4 + ["bcd"] * 3, rollout_config(seed=0))
    assert rollout.last.stats.prefills == 2
    assert rollout.last.sample_index.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert len({tuple(row.tolist()) for row in out.tokens}) == 7


def test_end_tokens_stay_in_the_tokens_and_out_of_the_text():
    rollout = make_rollout(make_model())
    out = rollout.generate(["abc"] * 16, rollout_config(seed=1))
    ended = [i for i, row in enumerate(out.tokens) if len(row) < LIMIT]
    assert ended
    assert all(out.tokens[i][-1] in (EOS, PAD) for i in ended)
    assert any(out.tokens[i][-1] == EOS for i in ended)
    assert all(len(out.text[i]) == len(out.tokens[i]) - 1 for i in ended)
    assert not any((row[:-1] <= EOS).any() for row in out.tokens)  # nothing follows an end, or padding


def test_calls_without_a_seed_differ_and_a_seed_repeats_them():
    rollout = make_rollout(make_model())

    def call(seed):
        out = rollout.generate(["abc"] * 2 + ["bcd"] + ["abc"] * 2, rollout_config(seed=seed))
        return [tuple(row.tolist()) for row in out.tokens]

    assert call(None) != call(None)
    assert call(jax.random.PRNGKey(5)) == call(jax.random.key(5)) == call(5) != call(6)
    assert len(set(call(5))) == 5  # equal prompts apart are further samples


def test_settings_mean_what_tunix_means_by_them():
    model = make_model()
    rollout = make_rollout(model)
    greedy = rollout.generate(["abc"], rollout_config(top_p=None))
    dense = dense_of(model, greedy.left_padded_prompt_tokens, padded(greedy.tokens))
    np.testing.assert_allclose(greedy.logprobs[0], dense[0, : len(greedy.tokens[0])], atol=2e-5)
    zero = dataclasses.replace(rollout_config(), temperature=0.0)
    assert rollout.generate(["abc"], zero).tokens[0].tolist() == greedy.tokens[0].tolist()
    with pytest.warns(UserWarning, match="cut the distribution"):
        cut = rollout.generate(["abc"] * 8, rollout_config(top_k=2, top_p=0.9, seed=0))
    whole = np.asarray(dense_of(model, cut.left_padded_prompt_tokens, padded(cut.tokens)))
    for renormalised, of_all in zip(cut.logprobs, whole, strict=True):
        raised = renormalised - of_all[: len(renormalised)]  # by the share of the two tokens, or of the one that is left
        assert (raised >= -2e-5).all()
        assert raised.max() > 0.02
    assert max(np.exp(np.concatenate(cut.logprobs))) == pytest.approx(1.0)
    assert rollout.generate(["abc"], rollout_config(top_k=1)).tokens[0].tolist() == greedy.tokens[0].tolist()
    assert rollout.generate(["abc"], rollout_config(top_k=-1, seed=4)).tokens[0].tolist() == (
        rollout.generate(["abc"], rollout_config(seed=4)).tokens[0].tolist()
    )


def test_a_larger_configuration_is_served_and_a_wide_prompt_refused():
    rollout = make_rollout(make_model())
    with pytest.raises(
        ValueError, match=r"1 to 12 tokens, RolloutConfig.max_prompt_length; got 13 tokens, beginning with \[2, 3"
    ):
        rollout.generate(["abc", "abcdefghijklm"], rollout_config())
    assert len(rollout.generate(["abc"], rollout_config()).tokens) == 1  # usable afterwards
    wide = RolloutConfig(max_tokens_to_generate=40, max_prompt_length=20, temperature=1.0)
    out = rollout.generate(["abcdefghijklm"], wide)
    assert out.left_padded_prompt_tokens.shape == (1, 20)
    assert rollout.generate(["abc"], rollout_config()).left_padded_prompt_tokens.shape == (1, WIDTH)


def test_padding_that_ends_texts_is_warned_of():
    with pytest.warns(UserWarning, match=r"padding token 1 is also an end token.*the policy never learns to stop"):
        rollout = make_rollout(make_model(), EndPads())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        rollout.generate(["abc"], rollout_config())  # once is enough
        make_rollout(make_model())


def test_threads_have_the_tokens_of_their_calls_by_themselves_and_the_last_one_frees_the_pool():
    rollout = make_rollout(make_model(), policy=TINY_CACHE)
    calls = [lambda seed=seed: rollout.generate(["abc"] * 2 + ["bcd"], rollout_config(seed=seed)).tokens for seed in range(4)]
    larger = dataclasses.replace(rollout_config(seed=9), max_tokens_to_generate=LIMIT + 5)
    calls.append(lambda: rollout.generate(["abc"], larger).tokens)  # the engine is built anew, when the others are done
    alone = [call() for call in calls]
    rollout = make_rollout(make_model(), policy=TINY_CACHE)
    for one, other in zip(in_threads(*calls), alone, strict=True):
        assert [row.tolist() for row in one] == [row.tolist() for row in other]
    assert rollout._rollout.is_asleep
    assert rollout._rollout.num_pending == 0


def test_the_pool_is_freed_between_calls():
    rollout = make_rollout(make_model())
    assert rollout._rollout.is_asleep
    rollout.generate(["abc"], rollout_config())
    assert rollout._rollout.is_asleep
    kept = make_rollout(make_model(), sleeps=False)
    kept.generate(["abc"], rollout_config())
    assert not kept._rollout.is_asleep


# Configurations that change

LARGER = RolloutConfig(max_tokens_to_generate=LIMIT, max_prompt_length=WIDTH + 4, temperature=1.0, seed=3)


@pytest.mark.parametrize("eos_tokens", [[EOS, *range(2, 10)], list(range(2, 20))], ids=["9", "18"])
def test_as_many_end_tokens_as_tunix_asks_for_are_served(eos_tokens):
    rollout = make_rollout(make_model())
    out = rollout.generate(["abc"] * 16, rollout_config(seed=1, eos_tokens=eos_tokens))
    stops = {PAD, *eos_tokens}
    assert all(row[-1] in stops or len(row) == LIMIT for row in out.tokens)
    assert not any(stops & set(row[:-1].tolist()) for row in out.tokens)
    assert any(row[-1] in eos_tokens[7:] for row in out.tokens)  # those beyond what eight ids hold
    built = rollout._rollout
    rollout.generate(["abc"], rollout_config(seed=1))
    assert rollout._rollout is built  # room stays


def test_dense_log_probabilities_are_at_the_temperature_of_the_last_call():
    model = make_model()
    rollout = make_rollout(model, config=dataclasses.replace(rollout_config(), temperature=0.5))
    prompts, tokens = np.array([[PAD, 2, 3]]), np.array([[4, 5, 6]])

    def check(temperature):
        expected = dense_of(model, prompts, tokens, temperature)
        np.testing.assert_allclose(rollout.get_per_token_logps(prompts, tokens), expected, atol=2e-5)

    check(0.5)
    for temperature in (1.0, 0.7):
        rollout.generate(["abc"], dataclasses.replace(rollout_config(), temperature=temperature))
        check(temperature)


@pytest.mark.parametrize("live", [True, False], ids=["live", "synchronised"])
def test_versions_count_changes_of_weights_through_larger_engines_too(live):
    model = make_model()
    rollout = make_rollout(model, live=live)

    def versions(config):
        rollout.generate(["abc"], config)
        return set(rollout.last.policy_version.ravel().tolist()) - {-1}

    assert versions(rollout_config(seed=3)) == versions(rollout_config(seed=3)) == {0}
    rollout.update_params(nnx.state(make_model(seed=50), nnx.Param))
    assert versions(rollout_config(seed=3)) == {1}
    assert versions(LARGER) == versions(LARGER) == {1}
    rollout.update_params(nnx.state(make_model(seed=60), nnx.Param))
    even_larger = dataclasses.replace(LARGER, max_prompt_length=WIDTH + 8)
    assert versions(even_larger) == {2}
    if live:
        randomised(model, seed=70)
        assert versions(even_larger) == {3}


def test_the_old_pool_is_freed_before_a_larger_engine_is_built(monkeypatch):
    rollout = make_rollout(make_model(), sleeps=False)
    expected = make_rollout(make_model()).generate(["abc"], LARGER)
    old, were_asleep = rollout._rollout, []
    build = jkv.integrations.tunix.rollout.Rollout

    def heard(*args, **kwargs):
        were_asleep.append(old.is_asleep)
        return build(*args, **kwargs)

    monkeypatch.setattr(jkv.integrations.tunix.rollout, "Rollout", heard)
    out = rollout.generate(["abc"], LARGER)
    assert were_asleep == [True]
    assert out.logprobs[0].tolist() == expected.logprobs[0].tolist()
    assert not rollout._rollout.is_asleep


def test_an_engine_that_cannot_be_built_larger_leaves_the_old_one_usable():
    rollout = make_rollout(make_model(), sleeps=False)
    before = rollout.generate(["abc"], rollout_config(seed=3))
    with pytest.raises(ValueError, match="positions"):
        rollout.generate(["abc"], dataclasses.replace(LARGER, max_prompt_length=1_000_000))
    after = rollout.generate(["abc"], rollout_config(seed=3))
    assert after.logprobs[0].tolist() == before.logprobs[0].tolist()
    assert rollout.last.policy_version.max() == 0


def failing(rollout):
    """Lets the second sample of each call fail."""
    sample = rollout._sample

    def sampled(*args):
        out = sample(*args)
        return dataclasses.replace(out, finish_reason=[*out.finish_reason[:1], "error", *out.finish_reason[2:]])

    rollout._sample = sampled


def test_a_call_with_a_sample_that_failed_raises_unless_the_engine_returns_them():
    for options, raises in (({}, True), ({"failed": "return"}, False)):
        rollout = make_rollout(make_model(), **options)
        failing(rollout)
        with pytest.raises(RuntimeError, match="1 sample of 3 failed") if raises else contextlib.nullcontext():
            assert len(rollout.generate(["abc"] * 3, rollout_config(seed=3)).tokens) == 3
    with pytest.raises(ValueError, match="failed must be one of raise, return"):
        make_rollout(make_model(), failed="keep")


def test_an_update_that_is_interrupted_leaves_the_weights_that_a_call_then_says():
    """Synchronised weights: a call draws from those that the rollout has, and a second update brings the new ones."""
    model, config = make_model(), rollout_config(seed=3)
    rollout = make_rollout(model, live=False, sleeps=False)
    line, is_interrupted = 0, True
    while is_interrupted:
        new = jax.tree.map(lambda x, line=line: x * (1 + line / 64), nnx.state(model, nnx.Param))
        functions = [JkvRollout.update_params, JkvRollout._use]
        is_interrupted = interrupted_at(line, functions, lambda new=new: rollout.update_params(new))
        for _ in range(2):
            held = make_params(rollout.shape, rollout._current(), rollout.scales)
            rollout.generate(["abc"], config)
            used = rollout._rollout.model.params
            assert all((a == b).all() for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(used), strict=True))
            assert rollout.last.policy_version.max() == rollout._versions[-1]
            rollout.update_params(new)
        assert (rollout._current()["final_norm.w"] == leaves_of(new)["final_norm.w"]).all()
        line += 1
    assert line > 8


# Several devices


def test_meshes_of_several_devices():
    command = [sys.executable, "-m", "pytest", "tests/integrations/tunix_mesh.py", "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run(command, cwd=ROOT, env=environment(4), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
