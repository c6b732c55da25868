"""tunix's models: their weights read in place, followed while they are trained, and synchronised."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

pytest.importorskip("tunix")

import qwix
from flax import nnx

from jkv.integrations.tunix import params_of
from jkv.verify import num_compiled
from research.bench.rollouts import tunix_model
from tests.support.tunix_models import (
    KINDS,
    dense_of,
    make_model,
    make_rollout,
    randomised,
    rollout_config,
    tunix_rules,
)

__all__ = ["tunix_rules"]  # a fixture


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
    jkv.checkpoints.loading.export(params_of(model), None, tmp_path / "exported", dtype=jnp.float32)
    again = jkv.load(str(tmp_path / "exported"))
    rng = np.random.default_rng(0)
    prompts, tokens = rng.integers(2, 32, (2, 6)), rng.integers(2, 32, (2, 10))
    found = jkv.score(again, tokens, prompts=list(prompts)).logprobs
    np.testing.assert_allclose(found, dense_of(model, prompts, tokens), atol=1e-4)


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
    compiled = num_compiled()  # tunix takes all listeners to compilation away at the end of a learner
    with jax.transfer_guard_host_to_device("disallow_explicit"), jax.transfer_guard_device_to_host("disallow_explicit"):
        rollout.update_params(nnx.state(model, (kind,)), (kind,))
    after = rollout.generate(["abc"], rollout_config(seed=3))
    assert 0 < compiled == num_compiled()
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


def test_the_benchmark_s_tunix_model_holds_jkv_s_own_weights():
    params = jkv.load("tiny-reasoner", joined=False).params
    leaves = zip(jax.tree.leaves(params_of(tunix_model(params))), jax.tree.leaves(params), strict=True)
    assert all((one.reshape(other.shape) == other).all() for one, other in leaves)
