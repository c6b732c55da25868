"""Weights in 8 bits: the rounding of a NumPy reference, and the same model as their dequantised matrices in every use."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jkv
from jkv.engine.clocks import COMPILING
from jkv.model import decoder, experts
from jkv.model.eight_bits import coded, format_of
from jkv.model.params import Codes, LowRank, fold
from jkv.model.weight_shapes import init_params, named_leaves, weight_shapes
from jkv.testing import TINY, adapted

EXPERTS = dataclasses.replace(TINY, num_experts=8, num_active_experts=2, family="qwen3_moe", qk_norm=True, qkv_bias=False)
UNTIED = dataclasses.replace(TINY, tie_embeddings=False, qkv_bias=True)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
SETTINGS = {"max_new_tokens": 20, "sampling": jkv.Sampling(seed=1), "progress": False, "page_size": 4}
R_KV = jkv.r_kv(budget=12, interval=8, window=4)
KINDS = {"int8": (np.int8, 127), "fp8": (ml_dtypes.float8_e4m3fn, 448)}


def params_of(seed=0, dtype=jnp.float32, config=UNTIED):
    return init_params(config, jax.random.key(seed), scale=0.3, dtype=dtype)


def dequantised(params):
    """The floats that codes stand for, by NumPy."""

    def whole(weight):
        if not isinstance(weight, Codes):
            return weight
        code, scale = np.asarray(weight.code, np.float32), np.asarray(weight.scale)
        return jnp.asarray(code * (scale[None] if code.ndim == 2 else scale[:, :, None]))

    return jax.tree.map(whole, params, is_leaf=lambda x: isinstance(x, Codes))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_with_the_largest_of_a_column_at_the_end(kind):
    matrix = np.random.default_rng(0).normal(size=(96, 33)).astype(np.float32) * np.exp(
        np.linspace(-9, 9, 33, dtype=np.float32)
    )
    matrix[:, 5] = 0
    found = coded(jnp.asarray(matrix), kind)
    dtype, largest = KINDS[kind]
    scale = np.abs(matrix).max(axis=0) / np.float32(largest)
    scale[5] = 1
    np.testing.assert_allclose(found.scale, scale, rtol=1e-6)
    exact = matrix / np.asarray(found.scale)
    np.testing.assert_array_equal(
        np.asarray(found.code, np.float32), (np.rint(exact) if kind == "int8" else exact).astype(dtype)
    )
    away = np.abs(np.asarray(found.dequantised) - matrix) / np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    assert away.max() <= {"int8": 0.5 / 127 + 1e-6, "fp8": 2**-4}[kind]  # fp8 has three bits after the leading one


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_exact_matrix_rounded_once(kind, dtype):
    rng = np.random.default_rng(1)
    weight = coded(jnp.asarray(rng.normal(size=(64, 24)), dtype), kind)
    x = jnp.asarray(rng.normal(size=(2, 3, 64)), dtype)
    exact = np.asarray(x, np.float64) @ (np.asarray(weight.code, np.float64) * np.asarray(weight.scale, np.float64))
    found = decoder.times(x, weight)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol={4: 1e-5, 2: 2**-8}[dtype.dtype.itemsize], atol=1e-4)
    assert decoder.times(x, weight, jnp.float32).dtype == jnp.float32
    np.testing.assert_allclose(decoder.times(x, weight, jnp.float32), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("way", [experts.by_token, experts.by_all, experts.by_expert])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_multiply_by_experts_reads_their_codes(kind, way):
    codes = jkv.quantise_weights(params_of(config=EXPERTS), kind).layers[1].experts
    whole = dequantised(codes)
    for name in ("gate", "up", "down"):
        found, exact = getattr(codes, name), np.asarray(getattr(params_of(config=EXPERTS).layers[1].experts, name))
        np.testing.assert_allclose(found.scale, np.abs(exact).max(axis=-1) / KINDS[kind][1], rtol=1e-6)
        assert found.code.dtype == KINDS[kind][0]
    token = jnp.asarray(np.random.default_rng(3).normal(size=(24, TINY.width)), jnp.float32)
    share, expert = experts.route(EXPERTS, codes, token)
    found, expected = (way(token, share, expert, weights) for weights in (codes, whole))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [UNTIED, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "policy", [jkv.full(), R_KV, jkv.caote(budget=12, interval=8, window=4)], ids=lambda policy: policy.name
)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_replay_are_those_of_the_dequantised_weights(kind, policy, config):
    params = jkv.quantise_weights(params_of(config=config), kind)
    out = jkv.generate(params, PROMPTS, policy=policy, return_trace=True, **SETTINGS)
    expected = jkv.generate(dequantised(params), PROMPTS, policy=policy, **SETTINGS)
    assert out.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4)
    replayed = np.asarray(jkv.score(params, out, trace=out.trace).logprobs)
    assert np.percentile(np.abs(replayed - np.asarray(out.logprobs)), 99) <= 1e-5
    floats = np.asarray(jkv.score(params_of(config=config), out, trace=out.trace).logprobs)
    assert np.abs(floats - out.logprobs).max() > 1e-4  # it is not the float model that is asked


def test_a_gradient_reaches_an_adapter_through_codes():
    """What is trained beside quantised weights (QLoRA, arXiv 2305.14314) has the gradient of its sum with the floats."""
    codes = jkv.quantise_weights(params_of(), "int8")
    given, plain = adapted(dequantised(codes)), adapted(dequantised(codes))
    layers = tuple(
        layer.replace(**{name: getattr(layer, name).replace(base=getattr(of_codes, name)) for name in ("query", "out", "down")})
        for layer, of_codes in zip(given.layers, codes.layers, strict=True)
    )
    given = given.replace(layers=layers)

    def gradient(params):
        def loss(down):
            layer = params.layers[0]
            layer = layer.replace(query=layer.query.replace(down=down))
            changed = params.replace(layers=(layer, *params.layers[1:]))
            return jkv.score(changed, np.asarray([[7, 8, 9]], np.int32), prompts=[PROMPTS[0]]).logprobs.sum()

        return jax.grad(loss)(params.layers[0].query.down)

    assert isinstance(given.layers[0].query, LowRank)
    np.testing.assert_allclose(gradient(given), gradient(plain), rtol=1e-3, atol=1e-4)
    wanted = named_leaves(plain)
    for name, weight in named_leaves(given).items():
        np.testing.assert_allclose(weight, wanted[name], atol=1e-5)


@pytest.mark.parametrize("config", [UNTIED, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_loads_tensor_by_tensor_as_its_floats_would_be_quantised(kind, config, tmp_path):
    from jkv.checkpoints.loading import export

    export(params_of(config=config), None, tmp_path / "model", dtype=jnp.float32)
    expected = jkv.quantise_weights(jkv.load(tmp_path / "model").params, kind)
    loaded = jkv.load(tmp_path / "model", weight_dtype=kind).params
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    assert repr(jkv.Model(loaded)) == repr(jkv.Model(params_of(config=config)))  # as many weights
    jkv.save(loaded, tmp_path / "saved")  # floats
    for one, other in zip(jax.tree.leaves(jkv.restore(tmp_path / "saved")), jax.tree.leaves(dequantised(loaded)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_new_weights_are_quantised_first_and_compile_nothing():
    first, second = (jkv.quantise_weights(params_of(seed), "int8") for seed in (0, 1))
    rollout = jkv.Rollout(first, R_KV, max_prompt_tokens=8, max_new_tokens=12, n=2, page_size=4, max_running=4)
    before = rollout(PROMPTS, seed=3, stop_ids=())
    with pytest.raises(ValueError, match=r"structure of the old ones; missing: .*query\.code"):
        rollout.update(params_of(1))
    compiled = COMPILING.seconds
    rollout.update(second)
    assert rollout(PROMPTS, seed=3, stop_ids=()).tokens.tolist() != before.tokens.tolist()
    rollout.update(first)
    np.testing.assert_array_equal(rollout(PROMPTS, seed=3, stop_ids=()).tokens, before.tokens)
    assert COMPILING.seconds == compiled


def test_shapes_alone_are_quantised_for_programs_that_are_compiled_ahead():
    shapes = jkv.quantise_weights(weight_shapes(UNTIED, jnp.bfloat16), "int8")
    arrays = jkv.quantise_weights(params_of(dtype=jnp.bfloat16), "int8")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), arrays)


def test_a_model_says_which_format_it_has():
    assert [format_of(jkv.quantise_weights(params_of(), kind)) for kind in KINDS] == list(KINDS)
    assert format_of(params_of()) is None


@pytest.mark.parametrize("name", ["int4", "bf16", 8, ("int8",)])
def test_other_formats_are_refused_by_name(name):
    for call in (lambda: jkv.load("tiny-reasoner", weight_dtype=name), lambda: jkv.quantise_weights(params_of(), name)):
        with pytest.raises(ValueError, match="weight_dtype must be one of int8, fp8"):
            call()


def test_what_is_no_matrix_of_floats_is_refused():
    codes = jkv.quantise_weights(params_of(), "int8")
    for params, got in ((codes, "Codes"), (adapted(params_of()), "LowRank")):
        with pytest.raises(ValueError, match=f"made of matrices of floats, .* got {got}"):
            jkv.quantise_weights(params, "int8")
    with pytest.raises(ValueError, match=r"got float32\[2, 3, 4\]"):
        coded(jnp.zeros((2, 3, 4)), "int8")
    assert fold(codes.layers[0].query, (32, 32)).dtype == jnp.float32
