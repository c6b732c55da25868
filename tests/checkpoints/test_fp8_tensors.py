"""Checkpoints with weights in FP8: the numbers are those of codes times scales, in every layout of the scales."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jkv
from tests.support.checkpoints import GOLDEN, assert_equal, golden_copy

BLOCK = 32, 24  # rows and columns, which do not divide the matrices
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
LAYOUTS = {  # how many rows and columns have a scale together, its name, and config.json
    "blocks": (BLOCK, "weight_scale_inv", DEEPSEEK),
    "whole matrix": ((0, 0), "weight_scale_inv", {"quant_method": "fp8", "activation_scheme": "static"}),
    "rows": ((1, 0), "weight_scale", {"quant_method": "compressed-tensors", "config_groups": GROUPS}),
}
DTYPES = {"float32": "F32", "float8_e4m3fn": "F8_E4M3"}


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
    golden_copy(folder / "fp8", case, quantization_config=quantised)
    golden_copy(folder / "floats", case)
    stored, floats = {}, load_file(folder / "floats" / "model.safetensors")
    for name, weight in floats.items():
        if weight.ndim == 2 and "_proj" in name:
            codes, scale, floats[name] = quantise(weight.astype(np.float32), tile)
            stored |= {name: codes, name.removesuffix("weight") + ending: scale}
            stored[name.removesuffix("weight") + "input_scale"] = np.ones((), np.float32)
        else:
            stored[name] = weight
    write(folder / "fp8" / "model.safetensors", stored)
    save_file(floats, folder / "floats" / "model.safetensors")
    return folder / "fp8", folder / "floats"


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
    "no scale": (lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight_scale_inv"), "must have weight_scale"),
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


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}}},
        {"quant_method": "compressed-tensors", "config_groups": [3]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": "128"},
    ],
    ids=lambda value: str(value)[16:60],
)
def test_other_quantisation_is_refused(quantised, tmp_path):
    with pytest.raises(ValueError, match="must not be quantised but in FP8"):
        jkv.load(golden_copy(tmp_path, quantization_config=quantised))
