"""GGUF files of every family and type of quantisation: the same model as the Hugging Face folder that they were made of."""

import dataclasses
import json
import math
import sys
import tracemalloc

import gguf
import jax
import numpy as np
import pytest

import jkv
from jkv.checkpoints import gguf_files
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.gguf_families import FORMS, NEUTRAL
from jkv.checkpoints.gguf_header import read_header
from jkv.checkpoints.model_shapes import find_shape
from jkv.model.delta_weights import DeltaNet
from jkv.model.params import RopeScaling
from tests.support import recurrent
from tests.support.checkpoints import CASES, GOLDEN, SMALL, assert_equal, dense_logits, golden_copy, random_params
from tests.support.gguf_models import ARCHITECTURES, KINDS, SCALES, Kind, of_qwen3_5, write_gguf, write_twin

GOLDEN_CONFIG = "llama_scaled"


NEW = {  # golden checkpoints, with the fields of config.json that no file can say, as all files of the family have them
    "gemma3": {"query_pre_attn_scalar": 16},
    "glm4_moe": {},
    "glm4_moe_air": {},
    "gpt_oss": {"swiglu_limit": 7.0},
    "ministral3": {},
    "olmo3": {},
    "phi3_longrope": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_moe": {},
    "qwen3_yarn": {},
    "smollm3": {"no_rope_layers": [1, 1, 1]},
}


def without_ends(params):
    return params.replace(config=dataclasses.replace(params.config, end_ids=()))


@pytest.mark.tested("GGUF", shows="greedy tokens")
@pytest.mark.parametrize("golden", CASES)
def test_a_file_is_the_model_of_its_folder(golden, tmp_path):
    kind = Kind.BF16 if golden == "qwen3" else Kind.F32  # as the folder
    write_gguf(tmp_path / "model.gguf", GOLDEN / golden, kind)
    params = jkv.load(tmp_path / "model.gguf").params
    assert_equal(params, without_ends(checkpoint.load(GOLDEN / golden).params))
    reference = np.load(GOLDEN / golden / "reference.npz")  # of transformers
    logits = dense_logits(params, np.concatenate([reference["prompt"], reference["greedy"]]))
    np.testing.assert_array_equal(logits[len(reference["prompt"]) - 1 : -1].argmax(-1), reference["greedy"])


@pytest.mark.tested("GGUF", shows="weights")
@pytest.mark.parametrize("golden", NEW)
def test_a_file_of_each_family_is_the_model_of_its_folder(golden, tmp_path):
    folder = golden_copy(tmp_path / "folder", golden, **NEW[golden])
    write_gguf(tmp_path / "model.gguf", folder)
    params, expected = jkv.load(tmp_path / "model.gguf").params, without_ends(checkpoint.load(folder).params)
    close = pytest.approx(expected.config.rope_scaling.attention_factor, rel=1e-6)
    assert params.config.rope_scaling.attention_factor == close  # the file has float32
    scaling = dataclasses.replace(params.config.rope_scaling, attention_factor=expected.config.rope_scaling.attention_factor)
    assert dataclasses.replace(params.config, rope_scaling=scaling) == expected.config
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == other.dtype, path
        np.testing.assert_allclose(leaf, other, rtol=0, atol=5e-7, err_msg=str(path))  # norms, and the logarithm of decays
    if not NEW[golden]:
        reference = np.load(folder / "reference.npz")  # of transformers
        logits = dense_logits(params, reference["prompt"])
        np.testing.assert_allclose(logits, reference["prompt_logits"], atol=1e-4)


WIDE = dataclasses.replace(SMALL, width=256, head_size=64, mlp_width=256, num_layers=1)
FAMILIES = {
    "llama": WIDE,
    "qwen2": dataclasses.replace(WIDE, family="qwen2", qkv_bias=True, tie_embeddings=True),
    "qwen3": dataclasses.replace(WIDE, family="qwen3", qk_norm=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Hugging Face folder of each family, wide enough for K-quants."""
    root = tmp_path_factory.mktemp("folders")
    for name, config in FAMILIES.items():
        checkpoint.export(random_params(config), None, root / name, dtype=np.float32)
    return root


@pytest.mark.parametrize("kind", [*KINDS, *SCALES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_each_type_are_dequantised(family, kind, folders, tmp_path):
    tensors = write_gguf(tmp_path / "model.gguf", folders / family, kind)
    twin = write_twin(tmp_path / "twin", folders / family, tensors)
    params = jkv.load(tmp_path / "model.gguf").params
    assert_equal(params, checkpoint.load(twin).params)
    assert len(np.unique(params.embedding)) > 10


def test_transformers_computes_the_same_with_the_dequantised_weights(folders, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    files = {tmp_path / f"{case}.gguf": golden_copy(tmp_path / case, case, **fields) for case, fields in NEW.items()}
    for file, folder in files.items():
        write_gguf(file, folder)
    for family in FAMILIES:
        file = tmp_path / f"{family}.gguf"
        files[file] = write_twin(tmp_path / family, folders / family, write_gguf(file, folders / family, Kind.Q8_0))
    for file, twin in files.items():
        theirs = AutoModelForCausalLM.from_pretrained(twin, attn_implementation="eager", dtype=torch.float32)
        tokens = np.random.default_rng(0).integers(0, 96, 80)
        with torch.no_grad():
            expected = theirs(torch.tensor(tokens)[None]).logits[0].numpy()
        np.testing.assert_allclose(dense_logits(jkv.load(file).params, tokens), expected, rtol=1e-4, atol=1e-3)


def test_the_dtype_is_that_of_the_file_or_bfloat16(folders, tmp_path):
    for kind, dtype in ((Kind.F32, "F32"), (Kind.F16, "F16"), (Kind.BF16, "BF16"), (Kind.Q4_0, "BF16")):
        write_gguf(tmp_path / "model.gguf", folders / "llama", kind)
        assert gguf_files.stored_dtype(read_header(tmp_path / "model.gguf")) == dtype
    assert jkv.load(tmp_path / "model.gguf", dtype="float16").params.embedding.dtype == "float16"


def test_a_tensor_is_read_in_chunks(monkeypatch, folders, tmp_path):
    write_gguf(tmp_path / "model.gguf", folders / "llama", Kind.Q4_K)
    header = read_header(tmp_path / "model.gguf")
    name = "blk.0.ffn_up.weight"
    whole = gguf_files.read_tensor(header, name)
    monkeypatch.setattr(gguf_files, "CHUNK", 1000)  # 3 of 256 rows
    tracemalloc.start()
    again = gguf_files.read_tensor(header, name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(again, whole)
    assert whole.nbytes < peak < 1.5 * whole.nbytes


# Configuration


def test_only_the_header_is_read_for_a_shape(monkeypatch, tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "qwen2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert find_shape(tmp_path / "model.gguf") == ("model", checkpoint.read_config(GOLDEN / "qwen2"))


def test_the_missing_package_is_named(monkeypatch, tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "qwen2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r'gguf, which is not installed. Run: pip install "jkv-cache\[gguf\]"'):
        jkv.load(tmp_path / "model.gguf")


def config_of(file, case=GOLDEN_CONFIG, change=None, **fields):
    """The configuration of a golden case with fields of the metadata changed; None removes one. `change` is of the tensors."""

    def changed(own, stored):
        if change:
            change(stored)
        for name, value in fields.items():
            key = name.replace("__", ".")
            own.pop(key, None)
            if value is not None:
                own[key] = value

    write_gguf(file, GOLDEN / case, change=changed)
    return find_shape(file)[1]


def test_rope_is_read(tmp_path):
    file = tmp_path / "model.gguf"
    assert config_of(file).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    assert config_of(file, "qwen2").rope_scaling == RopeScaling()
    linear = {"qwen2__rope__scaling__type": "linear", "qwen2__rope__scaling__factor": 4.0, "qwen2__rope__freq_base": None}
    config = config_of(file, "qwen2", **linear)
    assert (config.rope_scaling, config.rope_theta) == (RopeScaling("linear", 4.0), 10_000.0)
    assert config_of(file, "phi3").rotary_size == 4


def test_the_table_of_llama_3_is_recognised_without_a_length(tmp_path):
    """As in files of Llama 3.1 (8 times) and 3.2 (32 times): heads of 128, a base of 500,000, 8192 positions."""
    config = dataclasses.replace(SMALL, head_size=128, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192))
    checkpoint.export(random_params(config), None, tmp_path / "folder", dtype=np.float32)

    def drop(own, stored):
        del own["llama.rope.scaling.original_context_length"]

    fields = json.loads((tmp_path / "folder" / "config.json").read_text())
    fields["rope_parameters"] = fields.pop("rope_scaling") | {"rope_theta": 5e5}
    (tmp_path / "folder" / "config.json").write_text(json.dumps(fields))
    write_gguf(tmp_path / "model.gguf", tmp_path / "folder", change=drop)
    assert find_shape(tmp_path / "model.gguf")[1] == config


REFUSED = {
    "architecture": ({"general__architecture": "gemma"}, "general.architecture must be one of llama, .* got 'gemma'"),
    "qwen3-moe": ({"general__architecture": "qwen3_moe"}, "must be one of llama, qwen2, .* qwen3moe, .*, got 'qwen3_moe'"),
    "no-layers": ({"llama__block_count": None}, r"llama: block_count must be an integer in \[1, 1024\], got none"),
    "layers": ({"llama__block_count": 2000}, "block_count must be .* got 2000"),
    "layers-as-text": ({"llama__block_count": "2"}, "block_count must be .* got '2'"),
    "heads-per-layer": ({"llama__attention__head_count": [4, 4]}, r"attention.head_count must be .* got \[4, 4\]"),
    "no-epsilon": ({"llama__attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon must be .* got none"),
    "nan-epsilon": ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon must be .* got nan"),
    "theta": ({"llama__rope__freq_base": 0.5}, "rope.freq_base must be .* got 0.5"),
    "experts": ({"llama__expert_count": 8}, "llama.expert_count must be 0 in llama, got 8"),
    "window": ({"llama__attention__sliding_window": 64}, "sliding_window must be 0 or at least context_length=256"),
    "values": ({"llama__attention__value_length": 16}, "value_length .* must be attention.key_length=8, got 16"),
    "rotary": ({"llama__rope__dimension_count": 4}, "rope.dimension_count must be the head size 8, got 4"),
    "scaled-twice": ({"llama__rope__scaling__type": "linear"}, "rope_freqs.weight must not be there .*'linear'"),
    "table": ({"llama__rope__scaling__original_context_length": 64}, "rope_freqs.weight must be the Llama 3 scaling of 64"),
    "table-of-another-base": ({"llama__rope__freq_base": None}, "rope_freqs.weight must be the Llama 3 scaling of 32"),
    "heads": ({"llama__attention__head_count_kv": 3}, "multiple of KV heads, got 4 and 3"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_decoder_cannot_do_is_refused(fields, message, tmp_path):
    with pytest.raises(ValueError, match=f"(?s){tmp_path / 'model.gguf'}.*{message}"):
        config_of(tmp_path / "model.gguf", **fields)


REFUSED_ELSEWHERE = {
    "softcap": ("gemma3", {"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping must be 0 in gemma3_text, got 50.0"),
    "scale": ("gemma3", {"attention__scale": 0.1}, "attention.scale must be 0 in gemma3_text, got 0.1"),
    "pattern": ("olmo3", {"attention__sliding_window_pattern": [True]}, "pattern must have an entry for each of the 3 layers"),
    "pattern-of-text": ("olmo3", {"attention__sliding_window_pattern": "no"}, "pattern must be .* got 'no'"),
    "window": ("olmo3", {"attention__sliding_window": "10"}, "attention.sliding_window must be .* got '10'"),
    "window-base": ("gpt_oss", {"rope__freq_base_swa": 50.0}, "freq_base_swa must be rope.freq_base=100, got 50"),
    "no-experts": ("qwen3_moe", {"expert_used_count": None}, "qwen3moe: expert_used_count must be .* got none"),
    "gating": ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func must be 2, that of glm4_moe, got 1"),
    "gating-of-gpt-oss": ("gpt_oss", {"expert_gating_func": 2}, "expert_gating_func must be 3, that of gpt_oss, got 2"),
    "predicted": ("glm4_moe", {"nextn_predict_layers": 4}, "nextn_predict_layers must be below block_count=4, got 4"),
    "shared": ("qwen3_moe", {"expert_shared_count": 1}, "expert_shared_count must be 0 in qwen3_moe, got 1"),
    "route-scale": ("qwen3_moe", {"expert_weights_scale": 2.5}, "expert_weights_scale must be 0 or 1 in qwen3_moe, got 2.5"),
    "states": ("qwen3_5", {"ssm__inner_size": 50}, "inner_size must be a multiple of ssm.time_step_rank=4, got 50"),
    "no-states": ("qwen3_5", {"ssm__state_size": None}, "ssm.state_size must be .* got none"),
    "temperature": ("qwen3_yarn", {"attention__temperature_scale": 0.1}, "temperature_scale must be 0 in qwen3, got 0.1"),
}


@pytest.mark.parametrize(("case", "fields", "message"), REFUSED_ELSEWHERE.values(), ids=REFUSED_ELSEWHERE)
def test_what_changes_the_arithmetic_of_a_family_is_refused(case, fields, message, tmp_path):
    with pytest.raises(ValueError, match=f"(?s){tmp_path / 'model.gguf'}.*{message}"):
        config_of(tmp_path / "model.gguf", case, **prefixed(case, fields))


HOSTILE = (None, True, False, -1, 0, 1, 3, 2**31, 2**64 - 1, 0.0, -0.5, 1e300, float("nan"), float("inf"), "", "x", "7")
HOSTILE_ARRAYS = ([], ["x"], np.array([2, 3]), np.array([True]), np.array([np.nan], np.float32))


@pytest.mark.filterwarnings("ignore:.*texts of at most")
@pytest.mark.parametrize("golden", NEW)
def test_each_field_of_the_metadata_may_be_anything(golden, tmp_path):
    """It is refused by name, or there is a model that a config.json may describe."""
    write_gguf(tmp_path / "model.gguf", GOLDEN / golden)
    header = read_header(tmp_path / "model.gguf")
    name = header.metadata["general.architecture"]
    own = {field for field in header.metadata if field.startswith(name)} | {f"{name}.{field}" for field in NEUTRAL}
    for field in sorted(
        own | {"general.architecture", f"{name}.rope.scaling.type", f"{name}.rope.scaling.yarn_log_multiplier"}
    ):
        for value in (*HOSTILE, *HOSTILE_ARRAYS):
            metadata = {**header.metadata, field: value}
            if value is None:
                del metadata[field]
            try:
                assert gguf_files.read_gguf_config(dataclasses.replace(header, metadata=metadata)).num_layers > 0
            except ValueError as error:
                assert "model.gguf" in str(error), (field, value)  # noqa: PT017


def test_what_no_file_of_a_family_says_is_known(tmp_path):
    file = tmp_path / "model.gguf"
    smollm3 = config_of(file, "smollm3", smollm3__block_count=8)
    assert smollm3.layers_without_rope == (3, 7)
    gemma3 = prefixed("gemma3", {"block_count": 8, "attention__sliding_window_pattern": None, "rope__freq_base_swa": None})
    config = config_of(file, "gemma3", **gemma3, gemma3__rope__freq_base=1e6)
    assert (config.window_layers, config.attention_scale) == ((0, 1, 2, 3, 4, 6, 7), 0.0)
    assert (config.rope_theta, config.window_theta) == (1e6, 10_000.0)
    largest = gemma3 | {"gemma3__block_count": 62, "gemma3__embedding_length": 96}
    assert config_of(file, "gemma3", change=widened, **largest).attention_scale == 24**-0.5  # 96 / 4, as in the 27B
    every = prefixed("gemma3", {"attention__sliding_window": None, "attention__sliding_window_pattern": None})
    assert config_of(file, "gemma3", **every).window_layers == ()
    olmo3 = config_of(file, "olmo3", **prefixed("olmo3", {"block_count": 8, "attention__sliding_window_pattern": 4}))
    assert olmo3.window_layers == (0, 1, 2, 4, 5, 6)
    yarn = config_of(file, "ministral3", mistral3__rope__scaling__yarn_log_multiplier=1.0).rope_scaling
    assert (yarn.attention_factor, yarn.beta_fast) == (1.0, 2.0)
    assert not config_of(file, "gpt_oss").rope_scaling.truncates
    with pytest.warns(UserWarning, match="at most 96 tokens in place of 768"):
        config_of(file, "ministral3")


def widened(stored):
    """The embedding of a wider model, which alone is read for a configuration."""
    stored["token_embd.weight"] = np.zeros((96, 96), np.float32), Kind.F32


def prefixed(case, fields):
    """Fields of the metadata with the architecture of a golden case before them."""
    family = json.loads((GOLDEN / case / "config.json").read_text())["model_type"]
    return {f"{ARCHITECTURES.get(family, family)}__{name}": value for name, value in fields.items()}


def test_value_heads_are_ordered_by_their_key_heads():
    """Three of each of two key heads: other than in the golden checkpoints, their order is not its own inverse."""
    fields = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 4, "linear_value_head_dim": 8}
    config = dataclasses.replace(recurrent.CONFIG, delta_net=DeltaNet(2, 6, 4, 8, 4))
    rng = np.random.default_rng(0)
    shapes = {
        "in_proj_qkv.weight": (64, 3),
        "in_proj_z.weight": (48, 3),
        "in_proj_b.weight": (6, 3),
        "A_log": (6,),
        "out_proj.weight": (3, 48),
    }
    own = ("attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_a", "ssm_out.weight")
    for (name, shape), tensor in zip(shapes.items(), own, strict=True):
        values = rng.normal(size=shape).astype(np.float32)
        (stored,) = of_qwen3_5(f"linear_attn.{name}", values, fields).values()
        assert not np.allclose(stored, values)
        np.testing.assert_allclose(FORMS["qwen35"].restored[tensor](stored, config), values, atol=1e-6)


def test_experts_in_mxfp4_and_gates_joined_with_ups_are_read(tmp_path):
    exact = {}

    def quantise(fields, stored):
        for name in [name for name in stored if "gate_exps.weight" in name or "up_exps.weight" in name]:
            raw = gguf.quantize(stored[name][0], Kind.MXFP4)
            exact[name] = gguf.dequantize(raw, Kind.MXFP4)
            stored[name] = raw, Kind.MXFP4

    def join(fields, stored):
        for layer in range(4):
            pair = [stored.pop(f"blk.{layer}.ffn_{part}_exps.weight")[0] for part in ("gate", "up")]
            stored[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(pair, 1), Kind.F32

    write_gguf(tmp_path / "mxfp4.gguf", GOLDEN / "gpt_oss", change=quantise)
    layers = jkv.load(tmp_path / "mxfp4.gguf").params.layers
    for i, layer in enumerate(layers):
        np.testing.assert_array_equal(layer.experts.gate, exact[f"blk.{i}.ffn_gate_exps.weight"])
        np.testing.assert_array_equal(layer.experts.up, exact[f"blk.{i}.ffn_up_exps.weight"])
    write_gguf(tmp_path / "separate.gguf", GOLDEN / "qwen3_5_moe")
    write_gguf(tmp_path / "joined.gguf", GOLDEN / "qwen3_5_moe", change=join)
    assert_equal(jkv.load(tmp_path / "joined.gguf").params, jkv.load(tmp_path / "separate.gguf").params)


def test_other_scalings_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"rope\.scaling\.type must be none, linear or yarn, got 'longrope'"):
        config_of(tmp_path / "model.gguf", "qwen2", qwen2__rope__scaling__type="longrope")
    yarn = {"qwen2__rope__scaling__type": "yarn", "qwen2__rope__scaling__factor": 4.0}
    with pytest.raises(ValueError, match=r"YaRN must have no rope\.scaling\.attn_factor, got 0\.5"):
        config_of(tmp_path / "model.gguf", "qwen2", **yarn, qwen2__rope__scaling__attn_factor=0.5)


def test_bad_factors_of_longrope_are_named(tmp_path):
    file = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r"must contain rope_factors_short\.weight for LongRoPE; missing"):
        config_of(file, "phi3_longrope", change=lambda stored: stored.pop("rope_factors_short.weight"))
    short = np.ones(3, np.float32), Kind.F32
    with pytest.raises(ValueError, match=r"short_factor must have a number for each of the 2 rotated pairs of channels, got 3"):
        config_of(file, "phi3_longrope", change=lambda stored: stored.update({"rope_factors_short.weight": short}))
    nan = np.full(2, np.nan, np.float32), Kind.F32
    with pytest.raises(ValueError, match=r"long_factor must be a list of .* got \[nan, nan\]"):
        config_of(file, "phi3_longrope", change=lambda stored: stored.update({"rope_factors_long.weight": nan}))
    with pytest.raises(ValueError, match=r"rope\.scaling\.type must be longrope with rope_factors_long\.weight, got 'yarn'"):
        config_of(file, "phi3_longrope", phi3__rope__scaling__type="yarn")


def test_yarn_is_read(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0, "attn_factor": 1.0}
    fields = {f"qwen2__rope__scaling__{name}": value for name, value in scaling.items()}
    config = config_of(tmp_path / "model.gguf", "qwen2", **fields)
    factor = 0.1 * math.log(4) + 1
    assert config.rope_scaling == RopeScaling("yarn", 4.0, original_max_position=64, beta_fast=16.0, attention_factor=factor)
    assert config.max_positions == 256


def test_the_size_of_values_may_be_missing_where_it_is_the_width_of_a_head(tmp_path):
    file = tmp_path / "model.gguf"
    assert config_of(file, llama__attention__value_length=None).head_size == 8
    with pytest.raises(ValueError, match=r"value_length \(or by default the width of a head, 8\) must be .*=16"):
        config_of(file, "qwen3", qwen3__attention__value_length=None)


# Tensors


def cut(tensor):
    return tensor[0][:-1], tensor[1]


CHANGES = {
    "missing": (lambda stored: stored.pop("blk.1.ffn_up.weight"), "must contain blk.1.ffn_up.weight; missing"),
    "no-embedding": (lambda stored: stored.pop("token_embd.weight"), "must contain token_embd.weight with two axes"),
    "surplus": (
        lambda stored: stored.update({"blk.0.attn_q.bias": (np.zeros(32, np.float32), Kind.F32)}),
        "must not contain blk.0.attn_q.bias, which its architecture does not use",
    ),
    "shape": (
        lambda stored: stored.update({"blk.0.ffn_up.weight": cut(stored["blk.0.ffn_up.weight"])}),
        r"blk.0.ffn_up.weight must have shape \(48, 32\), got \(47, 32\)",
    ),
    "integers": (
        lambda stored: stored.update({"output_norm.weight": (np.ones(32, np.int32), Kind.I32)}),
        r"output_norm.weight must be of a type that the package gguf dequantises.*got I32 \(26\)",
    ),
    "nan": (
        lambda stored: stored["blk.1.attn_k.weight"][0].__setitem__((0, 0), np.nan),
        "blk.1.attn_k.weight must be finite, got NaN or infinity as float32",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_bad_tensors_are_named(change, message, tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / GOLDEN_CONFIG, change=lambda fields, stored: change(stored))
    with pytest.raises(ValueError, match=f"{tmp_path / 'model.gguf'}.*{message}"):
        jkv.load(tmp_path / "model.gguf")


def test_the_header_is_what_the_package_gguf_reads(tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "phi3", Kind.F16, {"tokenizer.ggml.tokens": ["a", "b"], "x.numbers": [1, 2]})
    header, reader = read_header(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            own, theirs = header.metadata.pop(name), field.contents()
            np.testing.assert_array_equal(
                own, np.float32(theirs).astype(str).astype(float) if isinstance(theirs, float) else theirs
            )
    assert not header.metadata
    theirs = {t.name: (tuple(t.shape.tolist()[::-1]), int(t.tensor_type), t.data_offset) for t in reader.tensors}
    assert {name: tuple(tensor) for name, tensor in header.tensors.items()} == theirs
