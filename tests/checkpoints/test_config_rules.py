"""Nonsense settings of config.json and generation_config.json: each is refused at once, with its field."""

import json

import pytest

from jkv.checkpoints import loading as checkpoint
from tests.support.checkpoints import LLAMA3, config_folder, golden_copy
from tests.support.hostile_folders import refused, with_text

NONSENSE = {
    "no-vocabulary": ({"vocab_size": 0}, "vocab_size must be an integer in"),
    "huge-vocabulary": ({"vocab_size": 2**31}, r"vocab_size must be .*got 2147483648"),
    "negative-width": ({"hidden_size": -32}, "hidden_size must be"),
    "no-width": ({"hidden_size": 0}, "hidden_size must be"),
    "huge-width": ({"hidden_size": 2**40}, "hidden_size must be"),
    "no-layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
    "layers-true": ({"num_hidden_layers": True}, "num_hidden_layers must be .*got True"),
    "layers-as-float": ({"num_hidden_layers": 2.0}, r"num_hidden_layers must be .*got 2\.0"),
    "huge-layers": ({"num_hidden_layers": 2**31}, "num_hidden_layers must be"),
    "endless-layers": ({"num_hidden_layers": 10**12}, "num_hidden_layers must be"),
    "no-heads": ({"num_attention_heads": 0}, "num_attention_heads must be"),
    "no-kv-heads": ({"num_key_value_heads": 0}, "num_key_value_heads must be"),
    "negative-kv-heads": ({"num_key_value_heads": -2}, "num_key_value_heads must be"),
    "more-kv-heads": ({"num_key_value_heads": 8}, "query heads must be a multiple of KV heads, got 4 and 8"),
    "no-head-size": ({"head_dim": 0}, "head_dim must be an even integer .*got 0"),
    "odd-head-size": ({"head_dim": 7}, "head_dim must be an even integer .*got 7"),
    "negative-head-size": ({"head_dim": -8}, "head_dim must be"),
    "width-of-no-head": ({"num_attention_heads": 6, "num_key_value_heads": 6}, "multiple.*attention heads|num_attention_heads"),
    "no-mlp": ({"intermediate_size": 0}, "intermediate_size must be"),
    "no-positions": ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
    "huge-positions": ({"max_position_embeddings": 2**40}, "max_position_embeddings must be"),
    "no-theta": ({"rope_theta": 0}, "rope_theta must be a number in"),
    "negative-theta": ({"rope_theta": -1e4}, "rope_theta must be"),
    "text-theta": ({"rope_theta": "10000"}, "rope_theta must be"),
    "huge-theta": ({"rope_theta": 1e300}, "rope_theta must be"),
    "null-theta": ({"rope_theta": None}, "rope_theta must be"),
    "no-epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps must be"),
    "negative-epsilon": ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be"),
    "large-epsilon": ({"rms_norm_eps": 1e6}, "rms_norm_eps must be"),
    "tied-as-text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false or null, got 'false'"),
    "tied-as-number": ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    "bias-as-text": ({"attention_bias": "no"}, "attention_bias must be true or false"),
    "activation-list": ({"hidden_act": ["silu"]}, "hidden_act must be a string"),
    "negative-window": ({"sliding_window": -1}, "sliding_window must be"),
    "no-window": ({"sliding_window": 0}, "sliding_window must be"),
    "window-true": ({"sliding_window": True}, "sliding_window must be"),
    "layer-types-of-others": ({"layer_types": ["full_attention"] * 3}, "layer_types must have an entry.*, got 3"),
    "layer-types-text": ({"layer_types": "full_attention"}, "layer_types must be a list"),
    "negative-end": ({"eos_token_id": -2}, "eos_token_id must be"),
    "end-as-text": ({"eos_token_id": "2"}, "eos_token_id must be"),
    "end-true": ({"eos_token_id": True}, "eos_token_id must be"),
    "huge-end": ({"eos_token_id": 2**21}, "eos_token_id must be"),
    "factor-zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor must be a number in .*got 0"),
    "factor-negative": ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor must be"),
    "factor-small": ({"rope_scaling": {"type": "linear", "factor": 0.25}}, "factor must be"),
    "factor-text": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be"),
    "no-factor": ({"rope_scaling": {"type": "linear"}}, "factor must be .*got none"),
    "factor-of-no-type": ({"rope_scaling": {"factor": 8.0}}, "factor must not be set, because RoPE of type 'default'"),
    "scaling-text": ({"rope_scaling": "linear"}, "rope_scaling must be an object or null"),
    "equal-bounds": (
        {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0}},
        r"low_freq_factor must be below high_freq_factor=1\.0",
    ),
    "no-original": ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 0}}, "original_max"),
    "two-types": ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "type and rope_type must be the same"),
    "two-scalings": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters and rope_scaling must be the same",
    ),
    "two-thetas": (
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "rope_theta must be what",
    ),
    "scaling-by-layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "the same for all layers"),
    "type-list": ({"rope_scaling": {"rope_type": ["linear"]}}, "RoPE type must be one of"),
    "no-share": ({"partial_rotary_factor": 0}, "partial_rotary_factor must be"),
    "large-share": ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
    "architectures-number": ({"architectures": 5}, "architectures must be"),
    "model-type-list": ({"model_type": ["llama"]}, "model_type must be"),
    "quantised-text": ({"quantization_config": "int4"}, "quantization_config must be"),
}


@pytest.mark.parametrize(("fields", "message"), NONSENSE.values(), ids=NONSENSE)
def test_a_nonsense_setting_is_refused_at_once(fields, message, tmp_path):
    refused(config_folder(tmp_path, **fields), f"(?s){tmp_path / 'config.json'}: .*{message}")


@pytest.mark.parametrize("fields", [{"partial_rotary_factor": 0.01}, {"hidden_size": 30}], ids=str)
def test_heads_that_cannot_rotate_are_refused(fields, tmp_path):
    refused(config_folder(tmp_path, "phi3", **fields), "rotary size must be positive|hidden_size must be a multiple")


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
def test_a_missing_size_is_not_that_of_another_model(name, tmp_path):
    file = config_folder(tmp_path) / "config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != name}))
    refused(tmp_path, f"{name} must be an integer.*got none")


def test_missing_kv_heads_are_those_of_no_other_model(tmp_path):
    file = config_folder(tmp_path, "qwen2") / "config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if "key_value" not in key}))
    refused(tmp_path, "num_key_value_heads must be .*got none")


def test_fields_that_transformers_expands_are_not_passed_on(tmp_path):
    fields = {"num_labels": 10**9, "id2label": {str(i): "x" for i in range(9)}, "use_return_dict": True, "to_dict": 1}
    assert checkpoint.read_config(config_folder(tmp_path, **fields)).width == 32


@pytest.mark.parametrize("value", ["-2", "true", '"2"', "[1, null]", "1.0", "{}"])
def test_a_bad_end_token_of_generation_config_is_refused(value, tmp_path):
    golden_copy(tmp_path)
    with_text(tmp_path, "generation_config.json", f'{{"eos_token_id": {value}}}')
    refused(tmp_path, r"generation_config\.json: eos_token_id must be")


@pytest.mark.parametrize(("value", "ends"), [([], (7,)), (-1, (7,)), ([-1, 5], (5,)), (None, (7,))], ids=str)
def test_no_end_token_in_a_file_leaves_those_of_the_next(value, ends, tmp_path):
    golden_copy(tmp_path, eos_token_id=7)
    with_text(tmp_path, "generation_config.json", json.dumps({"eos_token_id": value}))
    assert checkpoint.load(tmp_path).config.end_ids == ends


def test_an_end_token_beyond_the_vocabulary_is_named_and_left_out(tmp_path):
    golden_copy(tmp_path, eos_token_id=[2, 96])
    with_text(tmp_path, "generation_config.json", json.dumps({"eos_token_id": 100}))
    with pytest.warns(UserWarning, match=r"below vocab_size=96, got 100 \(generation_config.json\), 96 \(config.json\)"):
        assert checkpoint.load(tmp_path).config.end_ids == (2,)


def test_a_whole_top_k_may_be_written_with_a_point(tmp_path):
    golden_copy(tmp_path)
    with_text(tmp_path, "generation_config.json", json.dumps({"do_sample": True, "top_k": 50.0}))
    assert checkpoint.load(tmp_path).sampling.top_k == 50
    with_text(tmp_path, "generation_config.json", json.dumps({"do_sample": True, "top_k": 50.5}))
    refused(tmp_path, "top_k must be a whole number")


@pytest.mark.parametrize(("family", "is_tied"), [("llama", False), ("smollm3", True)])
def test_null_ties_embeddings_as_the_family_does(family, is_tied, tmp_path):
    assert checkpoint.read_config(config_folder(tmp_path, family, tie_word_embeddings=None)).tie_embeddings is is_tied
