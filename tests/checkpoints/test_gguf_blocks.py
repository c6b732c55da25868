"""GGUF files whose matrices stay in their blocks: the same model as with the floats that they mean, in every use."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest

import jkv
from jkv.checkpoints import loading
from jkv.checkpoints.state_dicts import params_from
from jkv.model.params import LowRank, is_blocks
from jkv.model.weight_shapes import named_leaves
from pallas_kernels.block_product import native
from pallas_kernels.blocks import Blocks
from tests.support.checkpoints import GOLDEN, SMALL, random_params
from tests.support.gguf_models import Kind, quantised, write_gguf

WIDE = dataclasses.replace(SMALL, width=256, head_size=64, mlp_width=256, num_layers=2)
KINDS = {"attn_q": Kind.Q5_0, "attn_k": Kind.Q4_1, "attn_v": Kind.Q8_0, "ffn_down": Kind.Q6_K, "token_embd": Kind.Q8_0}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
SETTINGS = {"max_new_tokens": 24, "progress": False, "page_size": 4, "stop_ids": ()}


@pytest.fixture(autouse=True, scope="module")
def has_library():
    if reason := native.why_no_library():
        pytest.skip(reason)


def mixed(fields, stored):
    """Files of llama.cpp have several types."""
    for seed, (name, (raw, kind)) in enumerate(stored.items()):
        own = next((own for part, own in KINDS.items() if part in name), kind)
        if own != kind:
            stored[name] = quantised(gguf.dequantize(raw, kind), own, seed), own


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A Llama with matrices in Q4_K, but for those of `KINDS`."""
    root = tmp_path_factory.mktemp("blocks")
    loading.export(random_params(dataclasses.replace(WIDE, tie_embeddings=True)), None, root / "folder", dtype=np.float32)
    write_gguf(root / "model.gguf", root / "folder", Kind.Q4_K, change=mixed)
    return root / "model.gguf"


@pytest.fixture(scope="module")
def models(file):
    return jkv.load(file, weight_dtype="blocks"), jkv.load(file)


def test_blocks_mean_the_floats_and_are_as_large_as_the_file(file, models):
    blocks, floats = models
    layer = blocks.params.layers[0]
    found = {name: getattr(layer, name).kind for name in ("query", "key", "value", "out", "gate", "up", "down")}
    expected = {"query": "Q5_0", "key": "Q4_1", "value": "Q8_0", "down": "Q6_K"}
    assert found == dict.fromkeys(("out", "gate", "up"), "Q4_K") | expected
    for (name, own), other in zip(named_leaves(blocks.params).items(), named_leaves(floats.params).values(), strict=True):
        np.testing.assert_array_equal(own, other, err_msg=name)
    assert (blocks.digest, blocks.digests) == (floats.digest, floats.digests)
    assert repr(blocks) == repr(floats)
    assert "Q4_1, Q4_K, Q5_0, Q6_K, Q8_0, float32" in repr(blocks.params)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(blocks.params))
    assert num_bytes <= file.stat().st_size
    for plan in (jkv.plan(model, "cpu", length=64, prompt=8, weight_dtype="blocks") for model in (blocks, file)):
        assert plan.weight_bytes == num_bytes
        assert plan.kernels["block_product"] == "native"


def test_tokens_and_scores_are_those_of_the_floats(models):
    blocks, floats = models
    found, expected = (
        jkv.generate(model, PROMPTS, policy=jkv.r_kv(budget=12, interval=8, window=4), return_trace=True, **SETTINGS)
        for model in models
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
    replayed = jkv.score(blocks, found, trace=found.trace).logprobs
    np.testing.assert_allclose(replayed, found.logprobs, atol=1e-4)
    np.testing.assert_allclose(replayed, jkv.score(floats, found, trace=found.trace).logprobs, atol=1e-4)


def test_matrices_of_one_type_can_be_joined(file, models):
    joined = jkv.load(file, weight_dtype="blocks", joined=True).params
    layer = joined.layers[1]
    assert layer.query_key_value is None
    assert layer.gate_up.shape == (256, 512)
    apart = jkv.separate_weights(joined)
    assert jax.tree.structure(apart) == jax.tree.structure(models[0].params)
    jax.tree.map(np.testing.assert_array_equal, apart, models[0].params)
    found, expected = (jkv.generate(one, PROMPTS, **SETTINGS).logprobs for one in (joined, models[0]))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_saved_and_exported_weights_are_the_floats(models, tmp_path):
    blocks, floats = models
    jkv.save(blocks, tmp_path / "saved")
    loading.export(blocks.params, None, tmp_path / "exported", dtype=np.float32)
    for params in (jkv.restore(tmp_path / "saved"), jkv.load(tmp_path / "exported").params):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(params), jax.tree.leaves(floats.params))


def test_fused_tensors_and_other_orders_of_rows_stay_in_blocks(tmp_path):
    """Phi-3 has query, key and value in one tensor, and gate and up; Llama's query and key have rows in another order."""
    config = dataclasses.replace(WIDE, family="phi3", num_layers=1)
    loading.export(random_params(config), None, tmp_path / "folder", dtype=np.float32)
    write_gguf(tmp_path / "model.gguf", tmp_path / "folder", Kind.Q8_0)
    blocks, floats = (jkv.load(tmp_path / "model.gguf", weight_dtype=one).params for one in ("blocks", None))
    assert all(is_blocks(getattr(blocks.layers[0], name)) for name in ("query", "key", "value", "gate", "up", "down"))
    assert is_blocks(blocks.unembedding)
    for own, other in zip(named_leaves(blocks).values(), named_leaves(floats).values(), strict=True):
        np.testing.assert_array_equal(own, other)


def test_other_types_and_experts_become_floats_and_are_named(file, tmp_path):
    def change(fields, stored):
        mixed(fields, stored)
        stored["blk.0.ffn_up.weight"] = quantised(np.zeros((256, 256), np.float32), Kind.Q2_K), Kind.Q2_K

    write_gguf(tmp_path / "model.gguf", file.parent / "folder", Kind.Q4_K, change=change)
    with pytest.warns(UserWarning, match=r"blk\.0\.ffn_up\.weight cannot be kept in blocks and become floats .* is in Q2_K"):
        layer = jkv.load(tmp_path / "model.gguf", weight_dtype="blocks").params.layers[0]
    assert layer.up.dtype == np.float32
    assert is_blocks(layer.gate)

    def quantise(fields, stored):
        for name in [name for name in stored if "gate_exps" in name]:
            stored[name] = gguf.quantize(stored[name][0], Kind.Q8_0), Kind.Q8_0

    write_gguf(tmp_path / "experts.gguf", GOLDEN / "qwen3_moe", change=quantise)
    with pytest.warns(UserWarning, match="is of experts"):
        jkv.load(tmp_path / "experts.gguf", weight_dtype="blocks")


def test_a_scale_that_is_not_finite_names_its_tensor(file, tmp_path):
    def change(fields, stored):
        mixed(fields, stored)
        raw, kind = stored["blk.1.attn_k.weight"]
        raw[3, 2:4] = np.float16([np.inf]).view(np.uint8)  # the offset of a block
        stored["blk.1.attn_k.weight"] = raw, kind

    write_gguf(tmp_path / "model.gguf", file.parent / "folder", Kind.Q4_K, change=change)
    with pytest.raises(ValueError, match=r"blk\.1\.attn_k\.weight must be finite, got a scale"):
        jkv.load(tmp_path / "model.gguf", weight_dtype="blocks")


def test_a_file_that_is_cut_is_refused(file, tmp_path):
    cut = tmp_path / "model.gguf"
    cut.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        jkv.load(cut, weight_dtype="blocks")


def test_where_blocks_cannot_be_they_are_refused_by_name(file, models, monkeypatch):
    blocks, floats = models
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    calls = {
        "must be a GGUF file to stay in its blocks": lambda: jkv.load("tiny-reasoner", weight_dtype="blocks"),
        'must not be "blocks" with a mesh': lambda: jkv.load(file, weight_dtype="blocks", mesh=mesh),
        "A mesh splits matrices of floats": lambda: jkv.shard(blocks.params, mesh),
        "Only a GGUF file has blocks": lambda: jkv.quantise_weights(floats.params, "blocks"),
        "made of matrices of floats, .* got Blocks": lambda: jkv.quantise_weights(blocks.params, "int8"),
        "got 'tiny-reasoner'": lambda: jkv.plan("tiny-reasoner", "cpu", length=64, prompt=8, weight_dtype="blocks"),
        "on a CPU; got h200": lambda: jkv.plan(file, "h200", length=64, prompt=8, weight_dtype="blocks"),
        "A state dict replaces": lambda: params_from({"x": np.zeros(1)}, blocks),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    rollout = jkv.Rollout(blocks.params, jkv.full(), max_prompt_tokens=8, max_new_tokens=4, n=1, page_size=4, max_running=2)
    with pytest.raises(ValueError, match="New weights must be in the blocks of a GGUF file"):
        rollout.update(floats.params)
    monkeypatch.setattr(loading, "why_no_library", lambda: "it needs a C++ compiler")
    with pytest.raises(ValueError, match="needs the kernel of a CPU that reads them: it needs a C"):
        jkv.load(file, weight_dtype="blocks")


def test_an_adapter_may_lie_over_blocks(models):
    """Its gradient and its sum are those over the floats."""
    blocks, floats = models
    down, up = (jax.random.normal(jax.random.key(i), shape) * 0.1 for i, shape in enumerate([(256, 2), (2, 256)]))

    def gradient(params):
        def loss(down):
            layer = params.layers[0]
            layer = layer.replace(out=LowRank(layer.out, down, up))
            changed = params.replace(layers=(layer, *params.layers[1:]))
            return jkv.score(changed, np.asarray([[7, 8, 9]], np.int32), prompts=[PROMPTS[0]]).logprobs.sum()

        return jax.grad(loss)(down)

    assert isinstance(blocks.params.layers[0].out, Blocks)
    np.testing.assert_allclose(gradient(blocks.params), gradient(floats.params), rtol=1e-3, atol=1e-4)
