"""Adapters that peft saves: the model with one has the logits of `W + scale * B @ A`, whatever its family and weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jkv
from tests.support.checkpoints import GOLDEN, dense_logits, golden_tensors, with_tensors

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")
FUSED = ("self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.o_proj")
TOKENS = jnp.asarray([3, 1, 4, 1, 5, 9], jnp.int32)
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "init_lora_weights": True, "lora_dropout": 0.1}


def write_adapter(folder, case="llama_scaled", modules=MODULES, change=lambda tensors: None, ranks=None, **fields):
    """A folder as peft writes it, with random matrices; returns the sums `B @ A` by the name of the weight."""
    folder.mkdir(exist_ok=True)
    draw, tensors, sums = np.random.default_rng(0), {}, {}
    for name, weight in golden_tensors(case).items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(modules)):
            continue
        rank = (ranks or {}).get(module.rsplit(".", 1)[-1], 3)
        down, up = (
            0.2 * draw.normal(size=shape).astype(np.float32) for shape in ((rank, weight.shape[1]), (len(weight), rank))
        )
        tensors |= {f"base_model.model.{module}.lora_{x}.weight": y for x, y in (("A", down), ("B", up))}
        sums[name] = up @ down
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": list(modules)} | fields))
    return sums


FORMS = {
    "plain": ("llama_scaled", MODULES, {}, lambda name: 2.0, {}),
    "rsLoRA": ("llama_scaled", MODULES, {"use_rslora": True}, lambda name: 6 / 3**0.5, {}),
    "patterns": (
        *("llama_scaled", MODULES, {"rank_pattern": {"mlp.up_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 12}}),
        lambda name: 3.0 if "up_proj" in name else 4.0 if "0.self_attn.q_proj" in name else 2.0,
        {"up_proj": 2},
    ),
    "fused": ("phi3", FUSED, {"target_modules": "all-linear"}, lambda name: 2.0, {}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("joined", [False, True], ids=["separate", "joined"])
def test_an_adapter_gives_the_logits_of_the_merged_weights(tmp_path, form, joined):
    case, modules, fields, scale, ranks = FORMS[form]
    sums = write_adapter(tmp_path / "adapter", case, modules, ranks=ranks, **fields)
    merged = {name: w + scale(name) * sums[name] if name in sums else w for name, w in golden_tensors(case).items()}
    expected = jkv.load(with_tensors(tmp_path / "merged", case, merged)).params
    base = jkv.load(GOLDEN / case, joined=joined)
    given = jkv.load_adapter(base, tmp_path / "adapter").params
    wanted, got, plain = (np.asarray(dense_logits(x, TOKENS)) for x in (expected, given, base.params))
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.abs(plain - wanted).max() > 1e-2


def test_the_base_in_8_bits_is_not_changed(tmp_path):
    write_adapter(tmp_path)
    base = jkv.load(GOLDEN / "llama_scaled", weight_dtype="int8")
    layer = jkv.load_adapter(base, tmp_path).params.layers[0]
    assert layer.query.base is base.params.layers[0].query
    out = jkv.generate(jkv.load_adapter(base, tmp_path), [[3, 1, 4]], max_new_tokens=4, stop_ids=(), progress=False)
    score = jkv.score(jkv.load_adapter(base, tmp_path), out).logprobs
    np.testing.assert_allclose(score, out.logprobs, atol=1e-4)


@pytest.mark.parametrize("form", ["folder", "weights"])
@pytest.mark.parametrize("joined", [False, True], ids=["separate", "joined"])
def test_generate_and_score_take_an_adapter(tmp_path, form, joined):
    write_adapter(tmp_path)
    base = jkv.load(GOLDEN / "llama_scaled", joined=joined)
    own = jkv.load_adapter(base, tmp_path)
    adapter = tmp_path if form == "folder" else own.params
    settings = {"max_new_tokens": 4, "stop_ids": (), "progress": False}
    out, expected = jkv.generate(base, [[3, 1, 4]], adapter=adapter, **settings), jkv.generate(own, [[3, 1, 4]], **settings)
    plain = jkv.generate(base, [[3, 1, 4]], **settings)
    assert out.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_array_equal(out.logprobs, expected.logprobs)
    for model in (base, base.params):
        np.testing.assert_array_equal(jkv.score(model, out, adapter=adapter).logprobs, jkv.score(own, out).logprobs)
    assert np.abs(jkv.score(base, out).logprobs - out.logprobs).max() > 1e-3
    assert np.abs(plain.logprobs - out.logprobs).max() > 1e-3


def test_a_loss_is_differentiable_with_respect_to_the_adapter_alone(tmp_path):
    write_adapter(tmp_path)
    base = jkv.load(GOLDEN / "llama_scaled")
    own = jkv.load_adapter(base, tmp_path).params
    out = jkv.generate(base, [[3, 1, 4]], adapter=own, max_new_tokens=4, stop_ids=(), progress=False)

    def query(params):
        return params.layers[0].query

    def loss(up, by_adapter):
        layer = own.layers[0].replace(query=query(own).replace(up=up))
        params = own.replace(layers=(layer, *own.layers[1:]))
        return (jkv.score(base, out, adapter=params) if by_adapter else jkv.score(params, out)).logprobs.sum()

    got, wanted = (jax.grad(loss)(query(own).up, by_adapter) for by_adapter in (True, False))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(wanted).max() > 1e-3


def test_what_is_no_adapter_is_refused_by_generate_and_score(tmp_path):
    write_adapter(tmp_path)
    base = jkv.load(GOLDEN / "llama_scaled")
    other = jkv.load_adapter(base, tmp_path).params
    layer = other.layers[0]
    bad = other.replace(
        layers=(layer.replace(query=layer.query.replace(up=layer.query.up.at[0, 0].set(np.nan))), *other.layers[1:])
    )
    cases = {
        "folder of peft, or jkv.Params": 3,
        "adapter_config.json": "no/such/folder",
        "finite numbers": bad,
        "got none": base.params,
    }
    out = jkv.generate(base, [[3, 1, 4]], max_new_tokens=2, progress=False)
    for message, given in cases.items():
        with pytest.raises(ValueError, match=message):
            jkv.generate(base, [[3, 1, 4]], adapter=given)
        with pytest.raises(ValueError, match=message):
            jkv.score(base, out, adapter=given)


def first(tensors):
    return min(name for name in tensors if "lora_A" in name)


HOSTILE = {
    "use_dora must be": {"use_dora": True},
    "bias must be 'none'": {"bias": "all"},
    "modules_to_save must be": {"modules_to_save": ["lm_head"]},
    "init_lora_weights must be": {"init_lora_weights": "pissa"},
    "peft_type must be 'LORA'": {"peft_type": "IA3"},
    "a_new_switch must be": {"a_new_switch": 1},
    "r must be an integer": {"r": 0},
    "keys, got 'q.*'": {"alpha_pattern": {"q.*": 2}},
    "rank 3, not 4": {"r": 4},
    "no target": {"target_modules": ["k_proj"]},
    r"no target\.": {"layers_to_transform": [0]},
    "finite": {"change": lambda tensors: tensors[first(tensors)].fill(np.nan)},
    "one is missing": {"change": lambda tensors: tensors.pop(first(tensors))},
    "must have shapes": {"change": lambda tensors: tensors.update({first(tensors): np.zeros((3, 5), np.float32)})},
    "no tensors": {"change": lambda tensors: tensors.clear()},
    "got 'other'": {"change": lambda tensors: tensors.update(other=np.zeros(1, np.float32))},
}


@pytest.mark.parametrize("message", HOSTILE)
def test_what_cannot_be_applied_is_refused_by_name(tmp_path, message):
    write_adapter(tmp_path, **HOSTILE[message])
    with pytest.raises(ValueError, match=message.replace("*'", r"\*'")):
        jkv.load_adapter(jkv.load(GOLDEN / "llama_scaled"), tmp_path)


def test_pickles_experts_and_a_second_adapter_are_refused(tmp_path):
    model = jkv.load(GOLDEN / "llama_scaled")
    write_adapter(tmp_path)
    adapted = jkv.load_adapter(model, tmp_path)
    assert len(jax.tree.leaves(adapted.params)) > len(jax.tree.leaves(model.params))
    with pytest.raises(ValueError, match="without an adapter"):
        jkv.load_adapter(adapted, tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors must be a safetensors file; there is none"):
        jkv.load_adapter(model, tmp_path)
    write_adapter(tmp_path / "experts", "qwen3_moe", ("experts.0.up_proj",))
    with pytest.raises(ValueError, match="not of experts"):
        jkv.load_adapter(jkv.load(GOLDEN / "qwen3_moe"), tmp_path / "experts")
