"""A mixture of experts: each way to compute it against plain NumPy, and the whole library on a model that has one.

Parity with transformers is in `test_decoder.py` (the golden checkpoint `qwen3_moe`).
"""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.model import experts
from jkv.model.params import Experts, LowRank
from jkv.model.weight_shapes import init_params, weight_shapes
from jkv.testing import TINY, adapted
from tests.model.test_decoder import GOLDEN

SETTING = {"family": "qwen3_moe", "qkv_bias": False, "qk_norm": True, "tie_embeddings": False, "mlp_width": 16}
MIXED = dataclasses.replace(TINY, **SETTING, num_experts=8, num_active_experts=3, normalises_experts=True)
BOUNDED = dataclasses.replace(MIXED, expert_bias=True, swiglu_limit=0.7, swiglu_alpha=1.702)
WAYS = {"by_token": experts.by_token, "by_all": experts.by_all, "in_blocks": experts.in_blocks, "by_expert": experts.by_expert}


def expected_of(config, weights, token, with_biases=False):
    """Token by token and expert by expert, in float64; `with_biases` adds those of the last products."""
    router, gate, up, down = (np.asarray(x, np.float64) for x in (weights.router, weights.gate, weights.up, weights.down))
    biases = [np.asarray(0 if x is None else x, np.float64) for x in (weights.router_bias, weights.gate_bias, weights.up_bias)]
    of_router, of_gate, of_up = (
        np.broadcast_to(x, shape) for x, shape in zip(biases, (len(gate), gate.shape[:2], gate.shape[:2]), strict=True)
    )
    out = np.zeros(token.shape, np.float64)
    for i, x in enumerate(np.asarray(token, np.float64)):
        logits = x @ router + of_router
        prob = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chosen = np.argsort(-prob, kind="stable")[: config.num_active_experts]
        total = prob[chosen].sum() if config.normalises_experts else 1.0
        for e in chosen:
            a, b = gate[e] @ x + of_gate[e], up[e] @ x + of_up[e]
            if config.swiglu_limit:
                a, b = np.minimum(a, config.swiglu_limit), np.clip(b, -config.swiglu_limit, config.swiglu_limit) + 1
            out[i] += prob[e] / total * ((a / (1 + np.exp(-config.swiglu_alpha * a)) * b) @ down[e])
            if with_biases and weights.down_bias is not None:
                out[i] += prob[e] / total * np.asarray(weights.down_bias[e], np.float64)
    return out


def drawn(config, num_tokens, seed=0):
    shapes = weight_shapes(config).layers[0].experts
    leaves = jax.tree.leaves(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves) + 1)
    weights = Experts(*(jax.random.normal(key, x.shape) * 0.3 for key, x in zip(keys[:-1], leaves, strict=True)))
    return weights, jax.random.normal(keys[-1], (num_tokens, config.width))


def way_of(name, config):
    return functools.partial(WAYS[name], gating=experts.Gating(config.swiglu_limit, config.swiglu_alpha))


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("base", [MIXED, BOUNDED], ids=["plain", "bounded"])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_the_weighted_sum_of_the_chosen_experts(way, base, normalises, monkeypatch):
    monkeypatch.setattr(experts, "BLOCK", 8)
    config = dataclasses.replace(base, normalises_experts=normalises)
    weights, token = drawn(config, 21)
    out = way_of(way, config)(token, *experts.route(config, weights, token), weights)
    np.testing.assert_allclose(out, expected_of(config, weights, token), atol=1e-5)


@pytest.mark.parametrize("config", [MIXED, BOUNDED], ids=["plain", "bounded"])
@pytest.mark.parametrize("num_tokens", [1, 5, 600])
def test_the_number_of_tokens_chooses_the_way_and_not_the_result(num_tokens, config):
    weights, token = drawn(config, num_tokens, seed=1)
    out, of_biases, _ = experts.mixture(config, weights, token[None])
    assert (of_biases is None) == (config == MIXED)
    whole = out if of_biases is None else out + of_biases
    np.testing.assert_allclose(whole[0], expected_of(config, weights, token, with_biases=True), atol=1e-5)


def test_a_limit_of_gates_and_ups_is_reached():
    weights, token = drawn(BOUNDED, 5)
    wide = dataclasses.replace(BOUNDED, swiglu_limit=1e6)
    outs = [np.asarray(experts.mixture(config, weights, token[None])[0]) for config in (BOUNDED, wide)]
    assert np.abs(outs[0] - outs[1]).max() > 0.1


def test_an_expert_that_no_token_chooses_and_one_that_all_choose():
    weights, token = drawn(MIXED, 9, seed=2)
    router = weights.router.at[:, 0].set(0).at[:, 1].set(0)
    token = jnp.abs(token)
    weights = weights.replace(router=router.at[:, 2:].set(-1.0).at[:, 7].set(1.0))
    expert = experts.route(MIXED, weights, token)[1]
    assert {7, 0, 1} == set(np.unique(expert).tolist())
    expected = expected_of(MIXED, weights, token)
    for way in WAYS.values():
        np.testing.assert_allclose(way(token, *experts.route(MIXED, weights, token), weights), expected, atol=1e-5)


@pytest.mark.parametrize("config", [MIXED, BOUNDED], ids=["plain", "bounded"])
def test_gradients_are_those_of_every_way(config):
    weights, token = drawn(config, 6)

    def loss(way, weights):
        return jnp.sum(jnp.sin(way_of(way, config)(token, *experts.route(config, weights, token), weights)))

    of_all, *others = (jax.grad(lambda weights, way=way: loss(way, weights))(weights) for way in WAYS)
    for other in others:
        for x, y in zip(jax.tree.leaves(of_all), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.fixture(scope="module")
def mixed():
    return jkv.Model(init_params(MIXED, jax.random.key(0), scale=0.3))


def test_attention_takes_adapters_and_experts_take_none(mixed):
    settings = {"max_new_tokens": 4, "progress": False, "page_size": 4, "stop_ids": ()}
    both = adapted(mixed.params)
    out = jkv.generate(both, [[5, 1, 9]], **settings)
    np.testing.assert_allclose(jkv.score(both, out).logprobs, out.logprobs, atol=1e-4)
    layer = mixed.params.layers[0]
    gate = LowRank(layer.experts.gate, layer.experts.gate[..., :2], layer.experts.gate[:, :2])
    layers = (layer.replace(experts=layer.experts.replace(gate=gate)), *mixed.params.layers[1:])
    with pytest.raises(ValueError, match="Experts take no low-rank adapter; got one on gate"):
        jkv.generate(mixed.params.replace(layers=layers), [[5, 1, 9]], **settings)


def test_experts_are_saved_and_restored(mixed, tmp_path):
    jkv.save(mixed.params, tmp_path / "saved")
    restored = jkv.restore(tmp_path / "saved")
    assert restored.config == mixed.config
    jax.tree.map(np.testing.assert_array_equal, restored, mixed.params)


def changed(tmp_path, case="qwen3_moe", **fields):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / case, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_sparse_step": 2}, r"must contain model\.layers\.0\.mlp\.gate_proj\.weight"),
        ({"mlp_only_layers": [0]}, r"must contain model\.layers\.0\.mlp\.gate_proj\.weight"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts=8, got 9"),
        ({"num_local_experts": ...}, "num_experts must be an integer .*got none"),
        ({"num_local_experts": 7}, r"gate\.weight must have shape \(7, 32\), got \(8, 32\)"),
        ({"moe_intermediate_size": 8}, r"experts\.0\.gate_proj\.weight must have shape \(8, 32\), got \(16, 32\)"),
    ],
)
def test_a_mixture_that_the_decoder_cannot_compute_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        jkv.load(str(changed(tmp_path, **fields)))


def test_a_family_without_experts_ignores_what_is_said_of_them(tmp_path):
    folder = changed(tmp_path, "qwen3", num_experts=0, num_experts_per_tok=None, moe_intermediate_size="none")
    assert jkv.load(str(folder)).config.num_experts == 0


def test_a_checkpoint_is_written_as_it_was_read(tmp_path):
    from safetensors.numpy import load_file

    from jkv.checkpoints import loading as checkpoint

    model = jkv.load(str(GOLDEN / "qwen3_moe"))
    checkpoint.export(model.params, None, tmp_path, dtype=jnp.float32)
    one, other = (load_file(folder / "model.safetensors") for folder in (GOLDEN / "qwen3_moe", tmp_path))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    assert jkv.load(str(tmp_path)).config == model.config
