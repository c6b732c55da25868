"""Weights as other libraries hold them, and low-rank adapters beside them: the same model, and nothing copied."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.engine.clocks import COMPILING
from jkv.model import decoder
from jkv.model.params import LowRank, fold
from jkv.model.weight_shapes import init_params, named_leaves, weight_shapes
from jkv.testing import TINY, adapted, unfolded

UNTIED = dataclasses.replace(TINY, tie_embeddings=False, qk_norm=True)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
SETTINGS = {"max_new_tokens": 20, "sampling": jkv.Sampling(seed=1), "progress": False, "page_size": 4}
FORMS = {
    "plain": lambda params: params,
    "unfolded": unfolded,
    "adapted": adapted,
    "both": lambda params: adapted(unfolded(params)),
}


@pytest.fixture(scope="module", params=FORMS)
def pair(request):
    """Weights in a form, and the plain ones that they stand for, added up by NumPy."""
    given = FORMS[request.param](init_params(UNTIED, jax.random.key(0), scale=0.3))

    def whole(weight, shape):
        if not isinstance(weight, LowRank):
            return jnp.asarray(np.asarray(weight).reshape(shape.shape))
        base, down, up = (np.asarray(x, np.float64) for x in (weight.base, weight.down, weight.up))
        added = down.reshape(-1, down.shape[-1]) @ up.reshape(up.shape[0], -1)
        return jnp.asarray((base.reshape(shape.shape) + weight.scale * added.reshape(shape.shape)).astype(np.float32))

    plain = jax.tree.map(whole, given, weight_shapes(UNTIED), is_leaf=lambda x: isinstance(x, LowRank))
    return given, plain


POLICIES = {"full": jkv.full(), "r_kv": jkv.r_kv(budget=12, interval=8, window=4)}
# A policy knows nothing of the form: the full cache is run with the forms that differ most.
WITH_POLICIES = [
    *((form, "r_kv") for form in FORMS),
    *(pytest.param(form, "full", marks=() if form == "both" else pytest.mark.slow) for form in FORMS),
]


@pytest.mark.everyday(where=lambda pair, policy: pair == "both")
@pytest.mark.parametrize(("pair", "policy"), WITH_POLICIES, indirect=["pair"])
def test_every_form_gives_the_tokens_and_log_probabilities_of_the_plain_weights(pair, policy):
    given, plain = pair
    out = jkv.generate(given, PROMPTS, policy=POLICIES[policy], **SETTINGS)
    expected = jkv.generate(plain, PROMPTS, policy=POLICIES[policy], **SETTINGS)
    assert out.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_allclose(jkv.score(given, out).logprobs, jkv.score(plain, out).logprobs, atol=1e-4)


def test_every_form_is_saved_as_the_plain_weights(pair, tmp_path):
    given, plain = pair
    jkv.save(given, tmp_path / "saved")
    restored = jkv.restore(tmp_path / "saved")
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_an_adapter_is_never_added_to_its_base_and_keeps_its_own_gradient():
    params = adapted(unfolded(init_params(UNTIED, jax.random.key(0), scale=0.3)))
    tokens = np.asarray([[7, 8, 9, 10]], np.int32)

    def loss(params):
        return jkv.score(params, tokens, prompts=[PROMPTS[0]]).logprobs.sum()

    gradient = jax.grad(loss)(params).layers[0].out
    assert gradient.base.shape == params.layers[0].out.base.shape == (4, 8, 32)
    step = 1e-2 * jax.random.normal(jax.random.key(5), gradient.up.shape)

    def moved(sign):
        layer = params.layers[0]
        layer = layer.replace(out=layer.out.replace(up=layer.out.up + sign * step))
        return loss(params.replace(layers=(layer, params.layers[1])))

    np.testing.assert_allclose(moved(1) - moved(-1), 2 * (gradient.up * step).sum(), rtol=2e-2)


def test_reading_unfolded_weights_copies_none():
    config = dataclasses.replace(UNTIED, width=128, num_query_heads=16, head_size=32)
    shapes = jax.eval_shape(unfolded, weight_shapes(config))

    def run(weights, x):
        return decoder.project(config, weights, x)

    compiled = jax.jit(run).lower(shapes.layers[0], jax.ShapeDtypeStruct((1, 1, 128), jnp.float32)).compile()
    assert not jkv.testing.find_copies(compiled.as_text(), shapes.layers[0].query.shape)
    assert compiled.memory_analysis().temp_size_in_bytes < shapes.layers[0].query.size  # a quarter of its bytes


def test_new_adapters_of_the_same_shape_compile_nothing():
    params = adapted(init_params(UNTIED, jax.random.key(0), scale=0.3))
    jkv.generate(params, PROMPTS, **SETTINGS)
    compiled = COMPILING.seconds
    first = jkv.generate(adapted(params_of(params), seed=1), PROMPTS, **SETTINGS)
    second = jkv.generate(adapted(params_of(params), seed=2), PROMPTS, **SETTINGS)
    assert COMPILING.seconds == compiled
    assert first.tokens.tolist() != second.tokens.tolist()


def params_of(adapters):
    return jax.tree.map(
        lambda weight: weight.base if isinstance(weight, LowRank) else weight,
        adapters,
        is_leaf=lambda weight: isinstance(weight, LowRank),
    )


def test_adapters_in_float32_leave_a_bfloat16_model_in_bfloat16():
    """Or every activation, and what a gradient keeps, would take twice the memory."""
    given = adapted(jax.tree.map(lambda x: x.astype(jnp.bfloat16), init_params(UNTIED, jax.random.key(0), scale=0.3)))
    weight = given.layers[0].query
    weight = weight.replace(down=weight.down.astype(jnp.float32), up=weight.up.astype(jnp.float32))
    x = jax.random.normal(jax.random.key(1), (2, 3, UNTIED.width), jnp.bfloat16)
    found = decoder.times(x, weight)
    assert found.dtype == jnp.bfloat16
    assert decoder.times(x, weight, jnp.float32).dtype == jnp.float32
    x, base, down, up = (np.asarray(one, np.float64) for one in (x, weight.base, weight.down, weight.up))
    size = np.abs(x) @ (np.abs(base) + weight.scale * np.abs(down) @ np.abs(up))
    assert (np.abs(np.asarray(found, np.float64) - x @ (base + weight.scale * down @ up)) < 2**-7 * size).all()


def test_a_weight_that_fits_no_shape_is_left_for_the_caller_to_refuse():
    weight = jnp.zeros((3, 5))
    assert fold(weight, (4, 4)) is weight
    assert fold(weight, (3, 5)) is weight
    params = init_params(UNTIED, jax.random.key(0))
    with pytest.raises(ValueError, match=r"final_norm must have shape \(32,\).*got \(16,\)"):
        named_leaves(params.replace(final_norm=params.final_norm[:16]))
