"""Files of gates: the layouts of their authors, our own, and everything that is neither."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jkv
from jkv.eviction.gate import DmsGate, FastKVzipGate, KVzapLinearGate, KVzapMlpGate
from jkv.testing import TINY, random_gate, tiny_model

L, K, G, D, E, INNER, SINKS = TINY.num_layers, TINY.num_kv_heads, TINY.group_size, TINY.width, 4, 5, 3


def published(name, prefix="layers."):
    """The tensors that authors publish, random."""
    shapes = {
        "dms": {
            "self_attn.dms_proj_alpha.weight": (K, D),
            "self_attn.dms_proj_alpha.bias": (K,),
            "self_attn.dms_proj_alpha_norm.weight": (D,),
        },
        "linear": {"weight": (K, D), "bias": (K,)},
        "mlp": {"0.weight": (INNER, D), "0.bias": (INNER,), "2.weight": (K, INNER), "2.bias": (K,)},
        "fast": {
            "q_proj.weight": (K * G * E, D),
            "q_proj.bias": (K * G * E,),
            "k_proj.weight": (K * E, D),
            "q_norm.weight": (E,),
            "k_norm.weight": (E,),
            "k_base": (K, 1, SINKS, E),
            "b": (K, 1, G),
        },
    }[name]
    rng = np.random.default_rng(0)
    return {
        f"{prefix}{layer}.{field}": rng.standard_normal(shape).astype(np.float32)
        for layer in range(L)
        for field, shape in shapes.items()
    }


def written(tmp_path, tensors, name="gate.safetensors", **metadata):
    save_file(tensors, tmp_path / name, metadata=metadata or None)
    return tmp_path / name


@pytest.mark.parametrize(("name", "kind"), [("linear", KVzapLinearGate), ("mlp", KVzapMlpGate)])
@pytest.mark.parametrize("prefix", ["layers.", "module_list."])
def test_kvzap_files_are_read(tmp_path, name, kind, prefix):
    tensors = published(name, prefix)
    gate = jkv.Gate.load(written(tmp_path, tensors, format="pt"))
    assert isinstance(gate.arrays, kind)
    fields = ("weight", "bias") if name == "linear" else ("0.weight", "0.bias", "2.weight", "2.bias")
    for array, field in zip(gate.arrays, fields, strict=True):
        for layer in range(L):
            np.testing.assert_array_equal(array[layer], tensors[f"{prefix}{layer}.{field}"])


@pytest.mark.parametrize("has_bias", [True, False])
def test_dms_tensors_are_read_with_a_bias_or_without(tmp_path, has_bias):
    tensors = published("dms", "model.layers.")
    if not has_bias:
        tensors = {name: x for name, x in tensors.items() if not name.endswith("bias")}
    gate = jkv.Gate.load(written(tmp_path, tensors))
    assert isinstance(gate.arrays, DmsGate)
    assert gate.arrays.bias.any() == has_bias
    np.testing.assert_array_equal(gate.arrays.norm[1], tensors["model.layers.1.self_attn.dms_proj_alpha_norm.weight"])
    np.testing.assert_array_equal(gate.arrays.weight[1], tensors["model.layers.1.self_attn.dms_proj_alpha.weight"])


def test_fast_kvzip_projections_are_split_into_heads_groups_and_channels(tmp_path):
    tensors = published("fast")
    gate = jkv.Gate.load(written(tmp_path, tensors))
    assert isinstance(gate.arrays, FastKVzipGate)
    layer, k, g, e = 1, 1, 1, 2
    row = (k * G + g) * E + e  # of a projection whose rows are head by head, in each group by group
    np.testing.assert_array_equal(gate.arrays.query[layer, k, g, e], tensors["layers.1.q_proj.weight"][row])
    assert gate.arrays.query_bias[layer, k, g, e] == tensors["layers.1.q_proj.bias"][row]
    np.testing.assert_array_equal(gate.arrays.key[layer, k, e], tensors["layers.1.k_proj.weight"][k * E + e])
    np.testing.assert_array_equal(gate.arrays.sinks[layer, k], tensors["layers.1.k_base"][k, 0])
    assert gate.arrays.bias[layer, k, g] == tensors["layers.1.b"][k, 0, g]
    np.testing.assert_array_equal(gate.arrays.key_norm[layer], tensors["layers.1.k_norm.weight"])
    np.testing.assert_array_equal(gate.arrays.query_norm[layer], tensors["layers.1.q_norm.weight"])


def test_layers_beyond_the_ninth_are_in_the_order_of_their_numbers(tmp_path):
    tensors = {
        f"layers.{i}.{field}": np.full((K, D)[: 1 + (field == "weight")], i, np.float32)
        for i in range(12)
        for field in ("weight", "bias")
    }
    gate = jkv.Gate.load(written(tmp_path, tensors))
    assert gate.arrays.bias[:, 0].tolist() == list(range(12))


def test_bfloat16_files_are_read(tmp_path):
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in published("linear").items()}
    gate = jkv.Gate.load(written(tmp_path, tensors))
    assert gate.arrays.weight.dtype == np.float32
    np.testing.assert_array_equal(gate.arrays.weight[0], tensors["layers.0.weight"].astype(np.float32))


@pytest.mark.parametrize("name", ["dms", "linear", "mlp", "fast"])
def test_a_saved_gate_is_the_same_again(tmp_path, name):
    gate = random_gate(tiny_model(), name)
    gate.save(tmp_path / "gate.safetensors")
    again = jkv.Gate.load(tmp_path / "gate.safetensors")
    assert (again, again.about) == (gate, gate.about)
    assert jkv.learned_gate(tmp_path / "gate.safetensors", 64) == jkv.learned_gate(gate, 64)


class Trap:
    """Opening it as a pickle would raise another error."""

    def __reduce__(self):
        return exec, ("raise RuntimeError('the pickle ran')",)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".pkl", ".PT"])
def test_a_pickle_is_refused_by_its_name(tmp_path, suffix):
    path = tmp_path / f"gate{suffix}"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"may be a pickle, which can run any code.*Convert it with safetensors"):
        jkv.learned_gate(path, 64)


def test_a_pickle_by_another_name_is_not_run(tmp_path):
    path = tmp_path / "gate.safetensors"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="weights of a gate must be a safetensors file"):
        jkv.learned_gate(path, 64)


def without(tensors, name):
    return {key: x for key, x in tensors.items() if key != name}


def reshaped(tensors, name, shape):
    return tensors | {name: np.ones(shape, np.float32)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (lambda: without(published("mlp"), "layers.1.2.bias"), "lacks 2.bias of layer 1"),
        (lambda: {k: x for k, x in published("linear").items() if "layers.0" not in k}, r"all layers from 0 on; .*has \[1\]"),
        (
            lambda: published("linear") | {"lm_head.weight": np.ones(3, np.float32)},
            "has the tensor 'lm_head.weight'. Leave out",
        ),
        (lambda: {"layers.0.gate_proj.weight": np.ones((2, 2), np.float32)}, "DMS, KVzap or Fast KVzip.*gate_proj"),
        (lambda: {"into": np.ones(3, np.float32)}, "has the tensor 'into'"),
        (lambda: reshaped(published("linear"), "layers.1.weight", (K, D + 1)), "shapes in `jkv.Gate.load`.*same shape"),
        (lambda: reshaped(published("fast"), "layers.0.q_norm.weight", (3,)), "shapes in `jkv.Gate.load`.*reshape"),
        (lambda: {k: x[:1] if k.endswith("bias") else x for k, x in published("linear").items()}, r"bias must be \[L, K\]"),
        (lambda: {k: x * np.nan for k, x in published("linear").items()}, "must be finite"),
        (lambda: {k: x.astype(np.int32) for k, x in published("linear").items()}, "F32, F16, BF16; got I32"),
        (lambda: {}, r"has \[\]"),
    ],
    ids=["tensor", "layer", "foreign", "unknown", "half of ours", "width", "channels", "heads", "nan", "integers", "empty"],
)
def test_a_file_that_is_no_whole_gate_is_refused(tmp_path, tensors, words):
    path = written(tmp_path, tensors())
    with pytest.raises(ValueError, match=words):
        jkv.learned_gate(path, 64)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = written(tmp_path, published("linear"))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="weights of a gate must be a safetensors file"):
        jkv.learned_gate(path, 64)


def test_no_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(ValueError, match="weights of a gate must be a safetensors file"):
            jkv.learned_gate(path, 64)


def test_a_file_that_is_missing_is_named_in_plain_words(tmp_path):
    with pytest.raises(ValueError, match=r"none.safetensors': No such file or directory\.$"):
        jkv.Gate.load(tmp_path / "none.safetensors")
