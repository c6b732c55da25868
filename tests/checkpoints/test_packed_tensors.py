"""Checkpoints of GPTQ, AWQ and compressed-tensors: the numbers are (code - zero point) * scale, however they are packed."""

import json

import numpy as np
import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.checkpoint_tensors import list_tensors
from jkv.checkpoints.packed_tensors import packing_of, with_packed
from tests.support.checkpoints import (
    GOLDEN,
    OF_FAMILIES,
    assert_equal,
    change_tensors,
    golden_copy,
    golden_tensors,
    with_tensors,
)

GROUP = 16
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def of_groups(**weights):
    return INT4 | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | weights}}}


LAYOUTS = {  # name -> quantization_config
    "gptq": GPTQ,
    "gptq-8-bits": GPTQ | {"bits": 8},
    "gptq-in-the-order-of-activations": GPTQ | {"desc_act": True},
    "gptq-second-format": GPTQ | {"checkpoint_format": "gptq_v2"},
    "gptq-whole-columns": GPTQ | {"group_size": -1},
    "awq": AWQ,
    "int4": of_groups(),
    "int8": of_groups(num_bits=8),
    "int4-with-zero-points": of_groups(symmetric=False),
    "int4-of-channels": of_groups(strategy="channel", group_size=None),
    "int4-in-the-order-of-activations": of_groups(actorder="group"),
}


def words(codes, bits, axis, order=None):
    """int32 numbers with the codes along an axis one after the other from the lowest bits, or of each eight in an order."""
    codes = np.moveaxis(codes, axis, -1)
    count = 32 // bits
    missing = -codes.shape[-1] % count
    codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], missing), codes.dtype)], -1)
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // count), np.uint32)
    for word in range(out.shape[-1]):
        for place in range(count):
            source = word * count + (place if order is None else order[place])
            out[..., word] |= codes[..., source].astype(np.uint32) << np.uint32(bits * place)
    return np.moveaxis(out.view(np.int32), -1, axis)


def packed(name, weight, settings, rng):
    """The tensors of a matrix of random codes, and the numbers that they stand for."""
    outputs, inputs = weight.shape
    method, options = settings["quant_method"], settings
    if method == "compressed-tensors":
        options = settings["config_groups"]["group_0"]["weights"]
    bits, size = options.get("bits") or options["num_bits"], options["group_size"] or -1
    size = inputs if size == -1 else size
    is_ordered = options.get("desc_act") or options.get("actorder") == "group"
    groups = rng.permutation(inputs) // size if is_ordered else np.arange(inputs) // size
    codes = rng.integers(0, 1 << bits, (outputs, inputs))
    zeros = rng.integers(1, 1 << bits, (outputs, inputs // size))  # 0 would be -1 in GPTQ's first format
    if method == "compressed-tensors" and options["symmetric"]:
        zeros[:] = 1 << (bits - 1)
    scales = (rng.uniform(0.5, 1, zeros.shape) * 0.2 / (1 << bits)).astype(np.float16)
    numbers = np.empty(weight.shape, np.float32)
    for column, group in enumerate(groups):
        numbers[:, column] = (codes[:, column] - zeros[:, group]).astype(np.float32) * scales[:, group].astype(np.float32)
    if method == "compressed-tensors":
        own = {".weight_packed": words(codes, bits, 1), ".weight_scale": scales, ".weight_shape": np.array(weight.shape)}
        own |= {} if options["symmetric"] else {".weight_zero_point": words(zeros, bits, 0)}
        own |= {".weight_g_idx": groups.astype(np.int32)} if is_ordered else {}
    elif method == "gptq":
        stored = zeros - (options.get("checkpoint_format") != "gptq_v2")
        own = {".qweight": words(codes.T, bits, 0), ".qzeros": words(stored.T, bits, 1), ".scales": scales.T}
        own[".g_idx"] = groups.astype(np.int32)
    else:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        own = {".qweight": words(codes.T, 4, 1, order), ".qzeros": words(zeros.T, 4, 1, order), ".scales": scales.T}
    return {name + end: np.ascontiguousarray(tensor) for end, tensor in own.items()}, numbers


def in_integers(folder, settings, case="llama_tied"):
    """A golden checkpoint with its projections in packed integers, and the same in floats."""
    stored, floats, rng = {}, golden_tensors(case), np.random.default_rng(0)
    for name, weight in floats.items():
        if name.endswith("_proj.weight") and weight.shape[0] % 8 == weight.shape[1] % GROUP == 0:
            tensors, floats[name] = packed(name.removesuffix(".weight"), weight, settings, rng)
            stored |= tensors
        else:
            stored[name] = weight
    return (
        with_tensors(folder / "packed", case, stored, quantization_config=settings),
        with_tensors(folder / "floats", case, floats),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_codes_less_zero_points_times_scales(layout, tmp_path):
    settings = LAYOUTS[layout]
    folder, floats = in_integers(tmp_path, settings)
    with pytest.warns(UserWarning, match=rf"weights in [48] bits \({settings['quant_method']}\) are dequantised; weight_dtype"):
        params = jkv.load(folder).params
    assert_equal(params, checkpoint.load(floats).params)
    assert not np.array_equal(params.layers[0].query, jkv.load(GOLDEN / "llama_tied").params.layers[0].query)


@pytest.mark.tested("GPTQ", shows="weights")
@pytest.mark.tested("AWQ", shows="weights")
@pytest.mark.tested("int4", shows="weights")
@pytest.mark.parametrize("golden", OF_FAMILIES)
@pytest.mark.filterwarnings("ignore:.*(weights in 4 bits|texts of at most)")
def test_every_family_is_read(golden, tmp_path):
    for layout in ("gptq", "awq", "int4"):
        folder, floats = in_integers(tmp_path / layout, LAYOUTS[layout], golden)
        assert_equal(jkv.load(folder).params, jkv.load(floats).params)


def test_experts_are_read_and_may_be_kept_in_8_bits(tmp_path):
    folder, floats = in_integers(tmp_path, LAYOUTS["int4"], "qwen3_moe")
    with pytest.warns(UserWarning, match="requantised to int8"):
        params = jkv.load(folder, weight_dtype="int8").params
    assert_equal(params, jkv.load(floats, weight_dtype="int8").params)


SETTINGS = {
    "bits": (GPTQ | {"bits": 3}, "quantization_config of gptq: bits must be 4 or 8, got 3"),
    "bits-of-awq": (AWQ | {"bits": 8}, "quantization_config of awq: bits must be 4, got 8"),
    "no-bits": ({"quant_method": "gptq", "group_size": 16}, "bits must be 4 or 8, got none"),
    "method": ({"quant_method": "bitsandbytes", "bits": 4}, "packed by GPTQ, AWQ or compressed-tensors.*'bitsandbytes'"),
    "format": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be 'gptq' or 'gptq_v2', got 'marlin'"),
    "by-layer": (GPTQ | {"dynamic": {"lm_head": {"bits": 8}}}, "dynamic must be empty"),
    "version": (AWQ | {"version": "gemv"}, "version must be 'gemm' or 'GEMM', got 'gemv'"),
    "no-zero-points": (AWQ | {"zero_point": False}, "zero_point must be True, got False"),
    "group": (GPTQ | {"group_size": 20}, "group_size must divide the 48 inputs, got 20"),
    "no-group": (GPTQ | {"group_size": 0}, "group_size must divide the 48 inputs, got 0"),
    "group-of-text": (GPTQ | {"group_size": "16"}, "group_size must be an integer .* got '16'"),
    "sparse": (INT4 | {"format": "marlin-24", "config_groups": {}}, "format must be 'pack-quantized', got 'marlin-24'"),
    "bits-of-groups": (of_groups(num_bits=3), "group_0: weights: num_bits must be 4 or 8, got 3"),
    "floats": (of_groups(type="float"), "weights: type must be 'int', got 'float'"),
    "no-weights": (INT4 | {"config_groups": {"group_0": {}}}, "group_0: weights must be an object, got"),
    "no-groups": (INT4 | {"config_groups": {}}, "must have the same bits and group_size, got 0 kinds"),
    "two-kinds": (
        INT4 | {"config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": WEIGHTS | {"num_bits": 8}}}},
        "must have the same bits and group_size, got 2 kinds",
    ),
}


@pytest.fixture(scope="module")
def gptq(tmp_path_factory):
    return in_integers(tmp_path_factory.mktemp("gptq"), GPTQ)[0]


@pytest.mark.parametrize(("settings", "message"), SETTINGS.values(), ids=SETTINGS)
def test_other_settings_are_refused_by_name(settings, message, gptq, tmp_path):
    golden_copy(tmp_path, "llama_tied", quantization_config=settings)
    (tmp_path / "model.safetensors").write_bytes((gptq / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jkv.load(tmp_path)


HOSTILE = (
    None,
    True,
    -2,
    -1,
    0,
    4,
    2**31,
    1e300,
    "",
    "x",
    [],
    [1],
    {},
    {"a": 1},
    {"weights": 3},
    {"weights": {"num_bits": {}}},
)


@pytest.mark.parametrize("layout", ["gptq", "awq", "int4"])
def test_each_field_of_the_settings_may_be_anything(layout, gptq):
    """It is refused by name, or there is a packing for which tensors are looked for."""
    stored = list_tensors([gptq / "model.safetensors"])
    inner = WEIGHTS if layout == "int4" else {}
    for field in (*LAYOUTS[layout], *inner, "dynamic", "checkpoint_format", "config_groups", "group_0"):
        for value in HOSTILE:
            settings = of_groups(**{field: value}) if field in inner else LAYOUTS[layout] | {field: value}
            settings |= {"config_groups": {"group_0": value}} if field == "group_0" else {}
            try:
                packing = packing_of(settings, "config.json")
                if packing is not None:
                    with_packed(stored, packing)
            except ValueError as error:
                assert any(file in str(error) for file in ("config.json", "model.safetensors")), (field, value)  # noqa: PT017


NAME = "model.layers.0.mlp.up_proj"
TENSORS = {
    "no-scales": (lambda own: own.pop(f"{NAME}.scales"), r"up_proj\.scales must be there, beside \.qweight; missing"),
    "no-zeros": (lambda own: own.pop(f"{NAME}.qzeros"), r"up_proj\.qzeros must be there, beside \.qweight; missing"),
    "scales": (
        lambda own: own.update({f"{NAME}.scales": own[f"{NAME}.scales"][:1]}),
        r"up_proj\.scales must be .* of shape \(2, 48\), got F16 of shape \(1, 48\)",
    ),
    "codes": (
        lambda own: own.update({f"{NAME}.qweight": own[f"{NAME}.qweight"].astype(np.int64)}),
        r"up_proj\.qweight must be a matrix of I32, got I64",
    ),
    "groups": (
        lambda own: own[f"{NAME}.g_idx"].__setitem__(3, 2),
        r"up_proj\.g_idx must have groups from 0 to 1, got \[0, 2\]",
    ),
    "shape": (
        lambda own: (
            own.update({f"{NAME}.{part}": own[f"{NAME}.{part}"][..., :40] for part in ("qweight", "scales")})
            or own.update({f"{NAME}.qzeros": own[f"{NAME}.qzeros"][:, :5]})
        ),
        r"up_proj\.weight must have shape \(48, 32\), got \(40, 32\)",
    ),
    "no-codes": (lambda own: own.pop(f"{NAME}.qweight"), r"must contain model\.layers\.0\.mlp\.up_proj\.weight; missing"),
}


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS)
@pytest.mark.filterwarnings("ignore:.*weights in 4 bits")
def test_bad_tensors_are_named(change, message, gptq, tmp_path):
    golden_copy(
        tmp_path, "llama_tied", quantization_config=json.loads((gptq / "config.json").read_text())["quantization_config"]
    )
    (tmp_path / "model.safetensors").write_bytes((gptq / "model.safetensors").read_bytes())
    change_tensors(tmp_path / "model.safetensors", lambda own: compacted(own, change))
    with pytest.raises(ValueError, match=message):
        jkv.load(tmp_path)


def compacted(own, change):
    """Changes tensors in place; `save_file` ignores strides."""
    change(own)
    own.update({name: np.ascontiguousarray(tensor) for name, tensor in own.items()})
