"""tunix: its models' weights read in place, `JkvRollout` as its rollout engine, and GRPO corrected for compression."""

import dataclasses
import functools
import gc
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

pytest.importorskip("tunix")

import optax
import qwix
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, rl_cluster
from tunix.rl.function_registry import get_policy_loss_fn
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from jkv.engine.timing import COMPILING
from jkv.integrations.tunix import JkvGRPOLearner, JkvRollout, params_of

ROOT = Path(__file__).parent.parent.parent
SHAPE = {"num_layers": 2, "vocab_size": 32, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8}
SHAPE |= {"num_kv_heads": 2, "norm_eps": 1e-6}
KINDS = {
    "qwen2": lambda **settings: qwen2.Qwen2(qwen2.ModelConfig(**SHAPE | settings, use_tied_embedding=True), rngs=nnx.Rngs(0)),
    "qwen3": lambda **settings: qwen3.Qwen3(qwen3.ModelConfig(**SHAPE | settings), rngs=nnx.Rngs(0)),
    "llama3": lambda **settings: llama3.Llama3(llama3.ModelConfig(**SHAPE | settings), rngs=nnx.Rngs(0)),
}
PAD, EOS, LIMIT, WIDTH = 0, 1, 24, 12
TINY_CACHE = jkv.r_kv(budget=12, interval=8, window=4)
SETTINGS = {"page_size": 4, "max_running": 4}


class Letters:
    """A token is a letter; 0 pads and 1 ends."""

    def encode(self, text):
        return [ord(letter) - 95 for letter in text]

    def decode(self, ids):
        return "".join(chr(token + 95) for token in ids)

    def bos_id(self):
        return 0

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


class EndPads(Letters):
    """As many tokenizers come: the padding token ends texts."""

    def pad_id(self):
        return EOS


@pytest.fixture(autouse=True, scope="module")
def tunix_rules():
    """tunix mixes dtypes as JAX's own rules allow."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def randomised(model, seed=0):
    """The model with random weights, biases and adapters too."""
    state = nnx.state(model)
    for i, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        if isinstance(leaf, nnx.Param | nnx.LoRAParam):
            drawn = 0.3 * jax.random.normal(jax.random.key(seed + i), leaf.get_value().shape, leaf.get_value().dtype)
            leaf.set_value(drawn + 1 if "norm" in str(path) else drawn)
    nnx.update(model, state)
    return model


def make_model(kind="qwen2", lora=False, seed=0):
    theta = 10_000 if kind == "qwen2" else 1_000_000
    model = KINDS[kind](rope_theta=theta)
    if lora:
        provider = qwix.LoraProvider(module_path=".*(q_proj|v_proj|o_proj|gate_proj|down_proj|lm_head)", rank=3, alpha=4.5)
        model = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))
    return randomised(model, seed)


def dense_of(model, prompts, tokens, temperature=1.0):
    """tunix's own log-probabilities."""
    graphdef, state = nnx.split(model)
    arrays = {"prompt_tokens": jnp.asarray(prompts), "completion_tokens": jnp.asarray(tokens)}
    return common.compute_per_token_logps(graphdef, state, **arrays, pad_id=PAD, eos_id=EOS, temperature=temperature)


def padded(rows, width=LIMIT, fill=PAD):
    out = np.full((len(rows), width), fill, np.asarray(rows[0]).dtype)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def rollout_config(**changes):
    return RolloutConfig(max_tokens_to_generate=LIMIT, max_prompt_length=WIDTH, temperature=1.0, **changes)


def make_rollout(model, tokenizer=None, config=None, **settings):
    adapter = TokenizerAdapter(tokenizer or Letters())
    return JkvRollout(model, adapter, None, config or rollout_config(), **SETTINGS | settings)


# Weights


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_model_gives_tunix_s_own_log_probabilities(kind, lora):
    model = make_model(kind, lora)
    rng = np.random.default_rng(0)
    prompts, tokens = rng.integers(2, 32, (3, 6)), rng.integers(2, 32, (3, 20))
    expected = dense_of(model, prompts, tokens, temperature=0.7)
    sampling = jkv.Sampling(temperature=0.7)
    found = jkv.score(params_of(model), tokens, prompts=list(prompts), sampling=sampling).logprobs
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_weights_are_the_arrays_of_the_model_themselves():
    model = make_model("qwen3", lora=True)
    own = {leaf.get_value().unsafe_buffer_pointer() for _, leaf in nnx.to_flat_state(nnx.state(model)) if leaf.get_value().ndim}
    read = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params_of(model))}
    used = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(make_rollout(model, sleeps=False)._rollout.model.params)}
    assert read == used
    assert used <= own


def test_a_base_that_the_model_does_not_rotate_by_is_warned_of_and_not_used():
    with pytest.warns(UserWarning, match="base of 1,000,000, but its configuration has 10,000"):
        params = params_of(KINDS["llama3"](rope_theta=10_000))
    assert params.config.rope_theta == 1_000_000


def test_models_that_jkv_cannot_run_are_refused():
    with pytest.raises(ValueError, match="dense Qwen2, Qwen3 or Llama3 of tunix; got Linear"):
        params_of(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    model = make_model("qwen2")
    provider = qwix.LoraProvider(module_path=".*embedder", rank=3, alpha=4.5)
    model = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match=re.escape("got also embedder.input_embedding_lora_a")):
        params_of(model)
    quantised = qwix.quantize_model(
        make_model("qwen3"),
        qwix.PtqProvider([qwix.QuantizationRule(module_path=".*q_proj", weight_qtype=jnp.int8)]),
        **model.get_model_input(),
    )
    with pytest.raises(ValueError, match=r"must have layers.0.attn.q_proj.w of 1024 numbers; got none"):
        params_of(quantised)


def test_a_saved_model_is_what_was_trained(tmp_path):
    model = make_model("qwen2", lora=True)
    jkv.model.checkpoint.export(params_of(model), None, tmp_path / "exported", dtype=jnp.float32)
    again = jkv.load(str(tmp_path / "exported"))
    rng = np.random.default_rng(0)
    prompts, tokens = rng.integers(2, 32, (2, 6)), rng.integers(2, 32, (2, 10))
    found = jkv.score(again, tokens, prompts=list(prompts)).logprobs
    np.testing.assert_allclose(found, dense_of(model, prompts, tokens), atol=1e-4)


# Rollouts


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


# Live and synchronised weights


def live_bytes():
    """Of all arrays on the device; those that share a buffer count once."""
    gc.collect()
    return sum({leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.live_arrays() if leaf.size}.values())


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_weights_that_training_replaced_are_freed(lora):
    model = make_model(lora=lora)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params_of(model)))
    rollout = make_rollout(model)

    def grown_by_training(seed):
        before = live_bytes()
        randomised(model, seed)
        return live_bytes() - before

    assert grown_by_training(seed=90) < size / 10  # before the first call
    rollout.generate(["abc"], rollout_config(seed=3))
    assert grown_by_training(seed=91) < size / 10
    rollout.update_params(nnx.state(make_model(lora=lora, seed=92)))
    assert grown_by_training(seed=93) < size / 10
    after = rollout.generate(["abc"], rollout_config(seed=3))
    fresh = make_rollout(model).generate(["abc"], rollout_config(seed=3))
    assert after.logprobs[0].tolist() == fresh.logprobs[0].tolist()


def test_weights_that_are_refused_leave_a_live_actor_as_it_was():
    model = make_model()
    rollout = make_rollout(model)
    before = rollout.generate(["abc"], rollout_config(seed=3))
    bad = jax.tree.map(lambda x: x * jnp.nan, nnx.state(model, nnx.Param))
    with pytest.raises(ValueError, match="Weights must be finite"):
        rollout.update_params(bad)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert rollout.generate(["abc"], rollout_config(seed=3)).logprobs[0].tolist() == before.logprobs[0].tolist()
    rollout.update_params(nnx.state(make_model(seed=50), nnx.Param))
    good = make_rollout(make_model(seed=50)).generate(["abc"], rollout_config(seed=3))
    assert rollout.generate(["abc"], rollout_config(seed=3)).logprobs[0].tolist() == good.logprobs[0].tolist()


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_live_weights_are_the_actor_s_of_the_moment(lora):
    model = make_model(lora=lora)
    rollout = make_rollout(model)
    assert rollout.model() is model
    before = rollout.generate(["abc"], rollout_config(seed=3))
    assert rollout.generate(["abc"], rollout_config(seed=3)).logprobs[0].tolist() == before.logprobs[0].tolist()
    randomised(model, seed=90)
    after = rollout.generate(["abc"], rollout_config(seed=3))
    fresh = make_rollout(model).generate(["abc"], rollout_config(seed=3))
    assert before.logprobs[0].tolist() != after.logprobs[0].tolist() == fresh.logprobs[0].tolist()


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_synchronised_weights_change_by_update_params_alone_and_move_nothing_through_the_host(lora):
    model = make_model(lora=lora)
    rollout = make_rollout(model, live=False)
    assert rollout.model() is None
    before = rollout.generate(["abc"], rollout_config(seed=3))
    kind = nnx.LoRAParam if lora else nnx.Param
    state = nnx.state(model, kind)
    for _, leaf in nnx.to_flat_state(state):
        leaf.set_value(leaf.get_value() * 1.5)
    nnx.update(model, state)
    assert rollout.generate(["abc"], rollout_config(seed=3)).logprobs[0].tolist() == before.logprobs[0].tolist()
    compiled = COMPILING.seconds
    with jax.transfer_guard_host_to_device("disallow_explicit"), jax.transfer_guard_device_to_host("disallow_explicit"):
        rollout.update_params(nnx.state(model, (kind,)), (kind,))
    after = rollout.generate(["abc"], rollout_config(seed=3))
    assert compiled == COMPILING.seconds
    fresh = make_rollout(model).generate(["abc"], rollout_config(seed=3))
    assert before.logprobs[0].tolist() != after.logprobs[0].tolist() == fresh.logprobs[0].tolist()


def test_weights_of_another_kind_are_refused_and_the_old_ones_stay():
    model = make_model(lora=True)
    rollout = make_rollout(model, live=False)
    before = rollout.generate(["abc"], rollout_config(seed=3))
    for state, match in (
        (nnx.state(make_model("qwen3"), nnx.Param), r"it has no layers.0.attn.k_norm.w"),
        (nnx.state(nnx.Dropout(0.5)), "must have at least one array; got none"),
        (
            jax.tree.map(lambda x: x[..., :1], nnx.state(model, nnx.LoRAParam)),
            r"must be float32\[4, 8, 3\], as before; got float32\[4, 8, 1\]",
        ),
        (jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.LoRAParam)), "as before; got bfloat16"),
        (jax.tree.map(lambda x: x * jnp.nan, nnx.state(model, nnx.LoRAParam)), "Weights must be finite"),
    ):
        with pytest.raises(ValueError, match=match):
            rollout.update_params(state)
    assert rollout.generate(["abc"], rollout_config(seed=3)).logprobs[0].tolist() == before.logprobs[0].tolist()


def test_synchronised_weights_may_be_of_another_dtype_and_live_ones_not():
    config = rollout_config(data_type=jnp.bfloat16)
    rollout = make_rollout(make_model(), config=config, live=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(rollout._rollout.model.params)} == {jnp.dtype(jnp.bfloat16)}
    rollout.update_params(nnx.state(make_model(seed=50), nnx.Param))
    assert rollout.generate(["abc"], config).logprobs[0].dtype == np.float32
    with pytest.raises(ValueError, match="Live weights must be used in their dtype, float32; got data_type bfloat16"):
        make_rollout(make_model(), config=config)


def test_meshes_of_several_devices():
    """The number of devices is settled when JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    command = [sys.executable, "-m", "pytest", "tests/integrations/tunix_mesh.py", "-p", "no:cacheprovider", "-o", "addopts="]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Learners


def reward(prompts, completions, **kwargs):
    """The share of a's: any signal that a few steps can follow."""
    return [sum(letter == "a" for letter in text) / LIMIT for text in completions]


def make_cluster(model, engine, tokenizer=None, config=None, **training):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    settings = {"actor_optimizer": optax.sgd(0.1), "eval_every_n_steps": 1000, "max_steps": 3, "mini_batch_size": 3}
    settings |= {"train_micro_batch_size": 3, "rollout_micro_batch_size": 1, "compute_logps_micro_batch_size": 1}
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=engine,
        training_config=rl_cluster.RLTrainingConfig(**settings | training),
        rollout_config=config or rollout_config(),
    )
    return rl_cluster.RLCluster(actor=model, tokenizer=tokenizer or Letters(), cluster_config=config)


def learn(model, learner=JkvGRPOLearner, engine=JkvRollout, tokenizer=None, config=None, steps=3, num_iterations=1, **options):
    """A learner after some steps, the examples that its loss was given, and how often weights were synchronised."""
    settings = {key: options.pop(key) for key in ("live", "policy") if key in options}
    engine = functools.partial(engine, **SETTINGS, **settings)
    cluster = make_cluster(model, engine, tokenizer, config, max_steps=steps * num_iterations)
    synchronised, examples, outputs = [], [], []
    cluster.rollout.update_params = hear(cluster.rollout.update_params, lambda args, _: synchronised.append(args))
    cluster.generate = hear(cluster.generate, lambda _, out: outputs.append(out))
    settings = GRPOConfig(num_generations=4, beta=0.0, num_iterations=num_iterations)
    grpo = learner(cluster, settings, reward, **options)
    compute = grpo._generate_and_compute_advantage
    grpo._generate_and_compute_advantage = hear(compute, lambda _, example: examples.append(example))
    grpo.train([{"prompts": np.array(["abc", "bcdefgh", "cd"])} for _ in range(steps)])
    return Learned(grpo, examples, outputs, synchronised)


class Learned(NamedTuple):
    grpo: object
    examples: list
    outputs: list
    synchronised: list

    def logged(self, name):
        return self.grpo.rl_cluster._rl_metrics_logger.get_metric_history(*name.split("/"), "train")


def hear(function, listener):
    def heard(*args, **kwargs):
        out = function(*args, **kwargs)
        listener(args, out)
        return out

    return heard


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


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
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
    np.testing.assert_allclose(learned.logged("sampler/max_difference"), 0, atol=2e-5)


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


def test_settings_that_would_lose_the_correction_are_refused():
    engine = functools.partial(JkvRollout, **SETTINGS)
    settings = GRPOConfig(num_generations=2, beta=0.0)
    with pytest.raises(ValueError, match="mode must be of none, tis"):
        JkvGRPOLearner(make_cluster(make_model(), engine), settings, reward, correction="tiss")
    with pytest.raises(ValueError, match="max_seq_token_per_tpu must not be set"):
        JkvGRPOLearner(make_cluster(make_model(), engine, max_seq_token_per_tpu=64), settings, reward)
