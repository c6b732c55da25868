"""GGUF files of every family and type of quantisation: the same model as the Hugging Face folder that they were made of."""

import dataclasses
import json
import math
import sys
import tracemalloc

import gguf
import numpy as np
import pytest

import jkv
from jkv.checkpoints import gguf_files
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.gguf_header import read_header
from jkv.checkpoints.model_shapes import find_shape
from jkv.model.params import RopeScaling
from tests.support.checkpoints import CASES, GOLDEN, SMALL, assert_equal, dense_logits, random_params
from tests.support.gguf_models import KINDS, SCALES, Kind, write_gguf, write_twin

GOLDEN_CONFIG = "llama_scaled"


def without_ends(params):
    return params.replace(config=dataclasses.replace(params.config, end_ids=()))


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model_of_its_folder(case, tmp_path):
    kind = Kind.BF16 if case == "qwen3" else Kind.F32  # as the folder
    write_gguf(tmp_path / "model.gguf", GOLDEN / case, kind)
    params = jkv.load(tmp_path / "model.gguf").params
    assert_equal(params, without_ends(checkpoint.load(GOLDEN / case).params))
    reference = np.load(GOLDEN / case / "reference.npz")  # of transformers
    logits = dense_logits(params, np.concatenate([reference["prompt"], reference["greedy"]]))
    np.testing.assert_array_equal(logits[len(reference["prompt"]) - 1 : -1].argmax(-1), reference["greedy"])


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

    for family in FAMILIES:
        file = tmp_path / f"{family}.gguf"
        twin = write_twin(tmp_path / family, folders / family, write_gguf(file, folders / family, Kind.Q8_0))
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


def config_of(file, case=GOLDEN_CONFIG, **fields):
    """The configuration of a golden case with fields of the metadata changed; None removes one."""

    def change(own, stored):
        for name, value in fields.items():
            key = name.replace("__", ".")
            own.pop(key, None)
            if value is not None:
                own[key] = value

    write_gguf(file, GOLDEN / case, change=change)
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
    "qwen3-moe": ({"general__architecture": "qwen3_moe"}, "must be one of llama, qwen2, qwen3, phi3, got 'qwen3_moe'"),
    "no-layers": ({"llama__block_count": None}, r"llama: block_count must be an integer in \[1, 1024\], got none"),
    "layers": ({"llama__block_count": 2000}, "block_count must be .* got 2000"),
    "layers-as-text": ({"llama__block_count": "2"}, "block_count must be .* got '2'"),
    "heads-per-layer": ({"llama__attention__head_count": [4, 4]}, r"attention.head_count must be .* got \[4, 4\]"),
    "no-epsilon": ({"llama__attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon must be .* got none"),
    "nan-epsilon": ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon must be .* got nan"),
    "theta": ({"llama__rope__freq_base": 0.5}, "rope.freq_base must be .* got 0.5"),
    "experts": ({"llama__expert_count": 8}, r"llama.expert_count must be 0 \(no mixture of experts\), got 8"),
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


def test_other_scalings_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"rope\.scaling\.type must be none, linear or yarn, got 'longrope'"):
        config_of(tmp_path / "model.gguf", "qwen2", qwen2__rope__scaling__type="longrope")
    yarn = {"qwen2__rope__scaling__type": "yarn", "qwen2__rope__scaling__factor": 4.0}
    with pytest.raises(ValueError, match=r"YaRN must have no rope\.scaling\.attn_factor, got 0\.5"):
        config_of(tmp_path / "model.gguf", "qwen2", **yarn, qwen2__rope__scaling__attn_factor=0.5)


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
