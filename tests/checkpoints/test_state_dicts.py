"""Weights from another library's memory: Hugging Face state dicts and MaxText's trees; the refused are named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jkv
from jkv.checkpoints import loading
from jkv.checkpoints.state_dicts import MAXTEXT, params_from
from jkv.model.decoder import rotate
from jkv.model.rotary import rotary_angle
from tests.support.checkpoints import GOLDEN, SMALL, assert_equal, random_params

TREES = ("llama_scaled", "llama_tied", "qwen2", "qwen3")


def held(case):
    """A golden checkpoint: its model, and its tensors as a state dict."""
    files = sorted((GOLDEN / case).glob("*.safetensors"))
    return loading.load(GOLDEN / case).params, {name: x for file in files for name, x in load_file(file).items()}


class Torch:
    """What is used of a tensor of torch, which refuses bfloat16 in NumPy."""

    def __init__(self, values, dtype="bfloat16"):
        self.values, self.dtype, self.shape = jnp.asarray(values, dtype), f"torch.{dtype}", values.shape

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return Torch(self.values, "float32")

    def numpy(self):
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.asarray(self.values)


def real_torch(values, dtype="bfloat16"):
    torch = pytest.importorskip("torch")
    return torch.nn.Parameter(torch.from_numpy(values.astype(np.float32)).to(getattr(torch, dtype)))


def maxtext_tree(state, config, scan_axis=1):
    """MaxText's tree of a state dict, written out; `scan_axis=None` does not stack the layers."""
    heads, size = {"q": config.num_query_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}, config.head_size

    def kernel(layer, name):
        weight = state[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
        if config.family == "llama" and name != "v":  # channel i of either half becomes channel 2i or 2i + 1
            weight = weight.reshape(heads[name], 2, size // 2, -1).transpose(3, 0, 2, 1)
            return weight.reshape(-1, heads[name], size) / (np.float32(size**0.5) if name == "q" else np.float32(1))
        return weight.T.reshape(-1, heads[name], size)

    def of_layer(i):
        get = lambda name: state[f"model.layers.{i}.{name}"]  # noqa: E731
        attention = {long: {"kernel": kernel(i, long[0])} for long in ("query", "key", "value")}
        attention["out"] = {"kernel": get("self_attn.o_proj.weight").T.reshape(heads["q"], size, -1)}
        if config.qkv_bias:
            for long in ("query", "key", "value"):
                attention[long]["bias"] = get(f"self_attn.{long[0]}_proj.bias").reshape(-1, size)
        if config.qk_norm:
            attention |= {f"{long}_norm": {"scale": get(f"self_attn.{long[0]}_norm.weight")} for long in ("query", "key")}
        names = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
        return {
            "pre_self_attention_layer_norm": {"scale": get("input_layernorm.weight")},
            "post_self_attention_layer_norm": {"scale": get("post_attention_layernorm.weight")},
            "self_attention": attention,
            "mlp": {name: {"kernel": get(f"mlp.{own}_proj.weight").T} for name, own in names.items()},
        }

    layers = [of_layer(i) for i in range(config.num_layers)]
    decoder = {"decoder_norm": {"scale": state["model.norm.weight"]}}
    if scan_axis is None:
        decoder |= {f"layers_{i}": layer for i, layer in enumerate(layers)}
    else:
        decoder["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves, scan_axis), *layers)
    if not config.tie_embeddings:
        decoder["logits_dense"] = {"kernel": state["lm_head.weight"].T}
    return {"token_embedder": {"embedding": state["model.embed_tokens.weight"]}, "decoder": decoder}


def test_a_state_dict_gives_the_weights_of_its_checkpoint():
    for case in sorted(folder.name for folder in GOLDEN.iterdir()):
        if case != "gpt_oss":  # whose checkpoint is in MXFP4
            params, state = held(case)
            assert_equal(params_from(state, params), params)


@pytest.mark.parametrize("make", [Torch, real_torch], ids=["stand-in", "torch"])
def test_tensors_of_torch_in_bfloat16_are_read(make):
    params, state = held("qwen2")
    rounded = {name: np.asarray(jnp.asarray(tensor, jnp.bfloat16), np.float32) for name, tensor in state.items()}
    found = params_from({name: make(tensor) for name, tensor in state.items()}, params.config)
    assert_equal(found, params_from(rounded, params.config))


@pytest.mark.parametrize("case", TREES)
def test_a_maxtext_tree_gives_the_same_weights_as_the_state_dict(case):
    params, state = held(case)
    forms = [(maxtext_tree(state, params.config, axis), axis) for axis in (None, 0, 1)]
    for tree, axis in [*forms, ({"params": {"params": forms[2][0]}}, 1), ({"base": jax.tree.map(jnp.asarray, forms[2][0])}, 1)]:
        found = params_from(tree, params, scan_axis=1 if axis is None else axis)
        for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=2e-7, atol=0)  # the root of the head size is undone


@pytest.mark.parametrize("case", TREES)
def test_weights_go_to_a_maxtext_tree_and_come_back(case):
    params, state = held(case)
    for axis in (None, 0, 1):
        tree, wanted = jkv.to_maxtext(params, scan_axis=axis), maxtext_tree(state, params.config, axis)
        assert jax.tree.structure(tree) == jax.tree.structure(wanted)
        for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=2e-7, atol=0)
        found = params_from(tree, params, scan_axis=axis or 0)
        for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=2e-7, atol=0)  # the root of 8 is not exact


def test_bits_go_to_a_maxtext_tree_and_come_back_where_the_root_is_exact():
    config = dataclasses.replace(SMALL, head_size=16)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(config))
    tree = jkv.to_maxtext(params)
    assert tree["decoder"]["layers"]["self_attention"]["query"]["kernel"].dtype == jnp.bfloat16
    assert_equal(params_from(tree, params), params)


def test_any_form_of_weights_goes_to_a_maxtext_tree():
    params, _ = held("qwen3")
    assert_equal(params_from(jkv.to_maxtext(jkv.join_weights(params)), params), params)
    in_bytes = jkv.quantise_weights(params, "int8")
    query = jkv.to_maxtext(in_bytes, scan_axis=None)["decoder"]["layers_0"]["self_attention"]["query"]["kernel"]
    np.testing.assert_array_equal(query.reshape(params.layers[0].query.shape), in_bytes.layers[0].query.dequantised)


def test_what_has_no_place_in_a_maxtext_tree_is_refused():
    with pytest.raises(ValueError, match="weights are read of llama, qwen2, qwen3 without experts; got gemma3_text"):
        jkv.to_maxtext(held("gemma3")[0])
    with pytest.raises(ValueError, match="scan_axis must be 0, 1 or None; got 2"):
        jkv.to_maxtext(held("qwen3")[0], scan_axis=2)


def test_heads_of_llama_attend_as_maxtexts_arithmetic_does():
    """MaxText rotates neighbouring channels as complex numbers, and does not divide the products by the root of H."""
    config, tokens = SMALL, 6
    rng = np.random.default_rng(0)
    params = random_params(config)
    hidden = rng.standard_normal((tokens, config.width)).astype(np.float32)
    kernels = {name: rng.standard_normal((config.width, n, config.head_size)) for name, n in (("query", 4), ("key", 2))}
    angle = np.asarray(rotary_angle(config, jnp.arange(tokens)))

    def turned(name):
        pairs = np.einsum("td,dnh->tnh", hidden, kernels[name]).reshape(tokens, -1, config.head_size // 2, 2)
        return (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[:, None]

    theirs = np.einsum("tnh,snh->nts", turned("query"), np.repeat(turned("key"), 2, axis=1).conj()).real
    tree = maxtext_tree(state_of(params), config, None)
    for name, kernel in kernels.items():
        tree["decoder"]["layers_0"]["self_attention"][name]["kernel"] = kernel.astype(np.float32)
    layer = params_from(tree, params).layers[0]
    cos, sin = jnp.cos(angle)[None], jnp.sin(angle)[None]
    query, key = (
        rotate((hidden @ weight).reshape(1, tokens, -1, config.head_size), cos, sin)[0] for weight in (layer.query, layer.key)
    )
    ours = np.einsum("tnh,snh->nts", query, np.repeat(key, 2, axis=1)) / config.head_size**0.5
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def state_of(params):
    """A state dict of separate matrices, whose names are those of Llama."""
    from jkv.checkpoints.family import TENSORS, field_of
    from jkv.model.weight_shapes import named_leaves

    def stored(name, leaf):
        values, field = np.asarray(leaf), field_of(name)
        prefix = f"model.layers.{name.split('.')[1]}." if name.startswith("layers.") else ""
        return prefix + TENSORS[field], values.T if values.ndim == 2 and field != "embedding" else values

    return dict(stored(name, leaf) for name, leaf in named_leaves(params).items())


def without(name):
    return lambda state: state.pop(name)


def replaced(name, change):
    return lambda state: state.update({name: change(state[name])})


Q = "model.layers.1.self_attn.q_proj.weight"
REFUSED = {  # what happens to a state dict, and the error: its field, code and words
    "missing": (without(Q), Q, "missing", f"must have {Q}; missing"),
    "transposed": (replaced("model.layers.0.mlp.up_proj.weight", np.transpose), "model.layers.0.mlp.up_proj.weight",
                   "does_not_fit", r"shape \(48, 32\).*got \(32, 48\). It is transposed"),
    "of another model": (replaced("model.norm.weight", lambda x: x[:-1]), "model.norm.weight", "does_not_fit", "same model"),
    "int8": (replaced(Q, lambda x: x.astype(np.int8)), Q, "wrong_type", "must be one of float32, .*got int8. Cast it"),
    "float64": (replaced(Q, lambda x: x.astype(np.float64)), Q, "wrong_type", "got float64. Cast it"),
    "a list": (replaced(Q, lambda x: x.tolist()), Q, "wrong_type", "must be a tensor of torch or an array; got list"),
    "not finite": (replaced(Q, lambda x: x * np.float32(np.nan)), Q, "out_of_range", "must be finite.*trainer's last step"),
    "an adapter": (lambda state: state.update({"lora_A": state[Q]}), "lora_A", "unknown_name", "must not have lora_A.*merged"),
    "empty": (lambda state: state.clear(), "model.embed_tokens.weight", "missing", "it is empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_dict_that_does_not_fit_is_refused_by_name(case):
    params, state = held("llama_scaled")
    change, field, code, words = REFUSED[case]
    change(state)
    with pytest.raises(jkv.InputError, match=words) as error:
        params_from(state, params)
    assert (error.value.field, error.value.code) == (field, code)


def test_a_tree_that_does_not_fit_is_refused_by_name():
    params, state = held("llama_scaled")
    tree = maxtext_tree(state, params.config)
    with pytest.raises(jkv.InputError, match=r"model's 2 layers along axis 0; got shape .*Pass scan_axis="):
        params_from(tree, params, scan_axis=0)
    del tree["decoder"]["layers"]["mlp"]["wo"]
    with pytest.raises(
        jkv.InputError, match=r"must have decoder\.layers_0\.mlp\.wo\.kernel, decoder\.layers_1.*missing"
    ) as error:
        params_from(tree, params)
    assert error.value.code == "missing"
    experts = dataclasses.replace(SMALL, family="qwen3_moe", qk_norm=True, num_experts=4, num_active_experts=2)
    with pytest.raises(jkv.InputError, match=r"read of llama, qwen2, qwen3 without experts; got qwen3_moe with experts\."):
        params_from(tree, experts)


def test_a_tied_unembedding_may_be_there_if_it_is_equal():
    params, state = held("llama_tied")
    assert_equal(params_from(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, params), params)
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal model\.embed_tokens\.weight"):
        params_from(state | {"lm_head.weight": 2 * state["model.embed_tokens.weight"]}, params)


def test_new_weights_take_the_form_of_those_in_use():
    params, state = held("qwen3")
    for change in (lambda p: jkv.quantise_weights(p, "int8"), jkv.join_weights, lambda p: jax.tree.map(jnp.bfloat16, p)):
        assert_equal(params_from(state, change(params)), change(params))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (None, "got NoneType. Pass model.state_dict"),
        ([1, 2], "got list"),
        (random_params(SMALL), "differs in"),
        ({"params": {"model": {"x": np.ones(3)}}}, "token_embedder and decoder; got 'model' with others inside"),
        ({1: np.ones(3)}, "names that are no strings"),
    ],
    ids=["none", "list", "params of another model", "another tree", "numbers"],
)
def test_what_is_no_weights_is_refused(weights, words):
    params, _ = held("qwen3")
    with pytest.raises(ValueError, match=words):
        params_from(weights, params)


def test_every_field_of_a_maxtext_tree_has_one_path():
    assert len(set(MAXTEXT.values())) == len(MAXTEXT)
