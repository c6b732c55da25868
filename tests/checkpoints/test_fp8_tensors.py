"""Checkpoints with weights in FP8: the numbers are those of codes times scales, in every layout of the scales."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jkv
from tests.support.checkpoints import GOLDEN, OF_FAMILIES, assert_equal, golden_copy, golden_tensors, with_tensors

BLOCK = 32, 24  # rows and columns, which do not divide the matrices
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
LAYOUTS = {  # how many rows and columns have a scale together, its name, and config.json
    "blocks": (BLOCK, "weight_scale_inv", DEEPSEEK),
    "whole matrix": ((0, 0), "weight_scale_inv", {"quant_method": "fp8", "activation_scheme": "static"}),
    "rows": ((1, 0), "weight_scale", {"quant_method": "compressed-tensors", "config_groups": GROUPS}),
}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}


def write(file, tensors):
    """A safetensors file with tensors of any dtype; the library writes none in FP8 from NumPy."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        span = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": span}
        data += np.ascontiguousarray(tensor).tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def quantise(weight, tile):
    """Codes, scales and the numbers that they stand for."""
    rows, columns = (size or full for size, full in zip(tile, weight.shape, strict=True))
    counts = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scale = np.random.default_rng(0).uniform(0.01, 0.05, counts).astype(np.float32)
    spread = np.repeat(np.repeat(scale, rows, 0), columns, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).astype(jnp.float8_e4m3fn)
    return codes, scale if scale.size > 1 else scale.reshape(()), codes.astype(np.float32) * spread


def in_fp8(folder, layout, case="qwen3_moe"):
    """A golden checkpoint with its matrices in FP8, and the same in floats."""
    tile, ending, quantised = LAYOUTS[layout]
    stored, floats = {}, golden_tensors(case)
    for name, weight in floats.items():
        if name.endswith("_proj.weight"):
            codes, scale, floats[name] = quantise(weight.astype(np.float32), tile)
            stored |= {name: codes, name.removesuffix("weight") + ending: scale}
            stored[name.removesuffix("weight") + "input_scale"] = np.ones((), np.float32)
        else:
            stored[name] = weight
    with_tensors(folder / "fp8", case, {}, quantization_config=quantised)
    write(folder / "fp8" / "model.safetensors", stored)
    return folder / "fp8", with_tensors(folder / "floats", case, floats)


@pytest.mark.tested("FP8", shows="weights")
@pytest.mark.parametrize("golden", OF_FAMILIES)
@pytest.mark.filterwarnings("ignore:.*(weights in FP8|texts of at most)")
def test_every_family_is_read(golden, tmp_path):
    fp8, floats = in_fp8(tmp_path, "rows", golden)
    assert_equal(jkv.load(fp8, dtype="float32").params, jkv.load(floats, dtype="float32").params)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_codes_times_scales(layout, tmp_path):
    fp8, floats = in_fp8(tmp_path, layout)
    with pytest.warns(UserWarning, match=r"weights in FP8 are dequantised; weight_dtype=.fp8. keeps 8 bits"):
        model = jkv.load(fp8)
    assert_equal(model.params, jkv.load(floats).params)
    assert not np.array_equal(model.params.layers[0].query, jkv.load(GOLDEN / "qwen3_moe").params.layers[0].query)


@pytest.mark.parametrize("weight_dtype", ["fp8", "int8"])
def test_weights_may_be_kept_in_8_bits(weight_dtype, tmp_path):
    fp8, floats = in_fp8(tmp_path, "blocks")
    with pytest.warns(UserWarning, match=f"requantised to {weight_dtype}"):
        model = jkv.load(fp8, weight_dtype=weight_dtype)
    assert_equal(model.params, jkv.load(floats, weight_dtype=weight_dtype).params)


BAD = {
    "no scale": (lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight_scale_inv"), "must have .*weight_scale"),
    "shape": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.weight_scale_inv": np.ones((5, 5), np.float32)}),
        "one for the matrix, for each row, or for each block",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_scales_are_named(change, message, tmp_path):
    fp8, _ = in_fp8(tmp_path, "blocks")
    file = fp8 / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, one in header.items():
        dtype = {"F32": np.float32, "F8_E4M3": jnp.float8_e4m3fn}[one["dtype"]]
        begin, end = one["data_offsets"]
        tensors[name] = np.frombuffer(data[8 + length + begin : 8 + length + end], dtype).reshape(one["shape"])
    change(tensors)
    write(file, tensors)
    with pytest.raises(ValueError, match=f"q_proj.*{message}"):
        jkv.load(fp8)


OTHERS = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "group_size must be an integer"),
    "no-format": ({"quant_method": "compressed-tensors"}, "format must be 'pack-quantized', got none"),
    "integers": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}}}},
        "format must be 'pack-quantized', got none",
    ),
    "no-groups": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": [3]},
        "must be unquantised, in FP8, or packed",
    ),
    "empty-block": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "must be unquantised, in FP8, or packed"),
    "block-of-text": ({"quant_method": "fp8", "weight_block_size": "128"}, "must be unquantised, in FP8, or packed"),
}


@pytest.mark.parametrize(("quantised", "message"), OTHERS.values(), ids=OTHERS)
def test_other_quantisation_is_refused(quantised, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        jkv.load(golden_copy(tmp_path, quantization_config=quantised))


STACKED = {  # of the experts of a layer: the shape of the scales of 8 matrices of 32 rows and 32 or 16 columns
    "blocks": lambda rows, columns: (8, -(-rows // 24), -(-columns // 12)),
    "rows": lambda rows, columns: (8, rows, 1),
    "matrices": lambda rows, columns: (8, 1, 1),
    "experts": lambda rows, columns: (8,),
}


def stacked_in_fp8(folder, shape_of, drop=""):
    """A checkpoint with one tensor for all experts of a layer in FP8, as transformers has it, and the same in floats."""
    quantised = {"quant_method": "fp8", "weight_block_size": [24, 12]}
    golden_copy(folder / "fp8", "qwen3_5_moe", quantization_config=quantised)
    golden_copy(folder / "floats", "qwen3_5_moe")
    floats, rng = load_file(folder / "floats" / "model.safetensors"), np.random.default_rng(0)
    stored = {name: weight for name, weight in floats.items() if ".experts." not in name}
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts."
        parts = {part: [floats[f"{stem}{i}.{part}_proj.weight"] for i in range(8)] for part in ("gate", "up", "down")}
        both = {"gate_up_proj": np.concatenate([parts["gate"], parts["up"]], 1), "down_proj": np.stack(parts["down"])}
        for name, weight in both.items():
            scale = rng.uniform(0.01, 0.05, shape_of(*weight.shape[1:])).astype(np.float32)
            whole = scale.reshape(*scale.shape, *(1,) * (3 - scale.ndim))
            for axis, size in ((1, 24), (2, 12)):
                whole = whole if whole.shape[axis] in (1, weight.shape[axis]) else np.repeat(whole, size, axis)
            whole = np.broadcast_to(whole[:, : weight.shape[1], : weight.shape[2]], weight.shape)
            codes = (weight / whole).astype(jnp.float8_e4m3fn)
            stored |= {stem + name: codes, f"{stem}{name}_scale_inv": scale}
            for i, numbers in enumerate(codes.astype(np.float32) * whole):
                pair = np.split(numbers, 2) if name == "gate_up_proj" else [numbers]
                for part, own in zip(("gate", "up") if len(pair) == 2 else ("down",), pair, strict=True):
                    floats[f"{stem}{i}.{part}_proj.weight"] = np.ascontiguousarray(own)
    write(folder / "fp8" / "model.safetensors", {name: tensor for name, tensor in stored.items() if name != drop})
    save_file(floats, folder / "floats" / "model.safetensors")
    return folder / "fp8", folder / "floats"


@pytest.mark.parametrize("layout", STACKED)
@pytest.mark.filterwarnings("ignore:.*weights in FP8")
def test_one_tensor_may_have_all_experts(layout, tmp_path):
    fp8, floats = stacked_in_fp8(tmp_path, STACKED[layout])
    assert_equal(jkv.load(fp8).params, jkv.load(floats).params)


def test_bad_scales_of_experts_are_named(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    fp8, _ = stacked_in_fp8(tmp_path / "missing", STACKED["blocks"], drop=f"{name}_scale_inv")
    with pytest.raises(ValueError, match=f"{name} in FP8 must have {name}_scale_inv or .*; missing"):
        jkv.load(fp8)
    fp8, _ = stacked_in_fp8(tmp_path / "wrong", lambda rows, columns: (8, 3, 1))
    with pytest.raises(ValueError, match=r"gate_up_proj_scale_inv must be floats.* got F32 of shape \(8, 3, 1\)"):
        jkv.load(fp8)
