"""Reading config.json, end tokens and tokenizers of checkpoints, and refusing what the decoder cannot do."""

import dataclasses
import json
import math
import shutil
import warnings

import numpy as np
import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.model.params import ModelConfig, RopeScaling
from jkv.model.rotary import rotary_frequency
from research.tasks import vocabulary
from tests.support.checkpoints import LLAMA3, config_folder, golden_copy, random_params

# Configuration


def test_fields_of_a_config_reach_the_model_config(tmp_path):
    folder = config_folder(tmp_path, "phi3", partial_rotary_factor=0.75, rope_theta=250_000.0, rms_norm_eps=1e-3, head_dim=None)
    assert checkpoint.read_config(folder) == ModelConfig(
        family="phi3",
        vocab_size=96,
        width=32,
        num_layers=2,
        num_query_heads=4,
        num_kv_heads=2,
        head_size=8,
        mlp_width=48,
        max_positions=256,
        rope_theta=250_000.0,
        rotary_size=6,
        norm_epsilon=1e-3,
    )


YARN = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
LONGROPE = {
    "rope_scaling": {
        "type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": [1, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    }
}


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10_000.0, RopeScaling()),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, RopeScaling()),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, RopeScaling("linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, 5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 32)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0} | LLAMA3},
            7.0,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 32),
        ),
        (YARN, 1e6, RopeScaling("yarn", 4.0, original_max_position=64, attention_factor=0.1 * math.log(4) + 1)),
        (
            {
                "rope_parameters": YARN["rope_scaling"]
                | {"rope_theta": 7.0, "beta_fast": 9, "beta_slow": 2, "attention_factor": 2}
            },
            7.0,
            RopeScaling("yarn", 4.0, original_max_position=64, beta_fast=9.0, beta_slow=2.0, attention_factor=2.0),
        ),
        (
            {"rope_scaling": YARN["rope_scaling"] | {"mscale": 0.5, "mscale_all_dim": 1.0, "truncate": False}},
            10_000.0,
            RopeScaling(
                "yarn",
                4.0,
                original_max_position=64,
                attention_factor=(0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
                truncates=False,
            ),
        ),
    ],
    ids=["absent", "old-plain", "oldest-linear", "old-llama3", "new-llama3", "yarn", "yarn-of-all", "yarn-of-mscales"],
)
def test_rope_of_old_and_new_files_is_read(fields, theta, scaling, tmp_path):
    config = checkpoint.read_config(config_folder(tmp_path, **fields))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_yarn_extends_the_positions_of_a_model_that_says_how_many_it_had(tmp_path):
    """As Qwen asks its users to write config.json: max_position_embeddings stays that of training."""
    assert checkpoint.read_config(config_folder(tmp_path, **YARN, max_position_embeddings=64)).max_positions == 4 * 64


def test_longrope_takes_the_long_factors_where_a_model_has_more_positions_than_it_had(tmp_path):
    """Phi's files give the original context outside of rope_scaling. Factors of 88 positions: `phi3_longrope` in the parity."""
    config = checkpoint.read_config(config_folder(tmp_path / "a", "phi3", **LONGROPE))
    factor = math.sqrt(1 + math.log(256 / 32) / math.log(32))
    short, long = (1.0, 1.5, 2.0, 3.0), (2.0, 3.0, 4.0, 5.0)
    scaling = RopeScaling("longrope", original_max_position=32, attention_factor=factor, short_factor=short, long_factor=long)
    assert config.rope_scaling == scaling
    plain = 1e4 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(rotary_frequency(config), plain / np.array(long), rtol=1e-6)
    outside = {name: value for name, value in LONGROPE["rope_scaling"].items() if not name.startswith("original")}
    fields = {"rope_scaling": outside, "original_max_position_embeddings": 256}
    config = checkpoint.read_config(config_folder(tmp_path / "b", "phi3", **fields))
    assert config.rope_scaling.attention_factor == 1
    np.testing.assert_allclose(rotary_frequency(config), plain / np.array(short), rtol=1e-6)


def test_smollm3_has_no_rope_in_every_fourth_layer_unless_it_says_which(tmp_path):
    assert checkpoint.read_config(config_folder(tmp_path, "smollm3", num_hidden_layers=8)).layers_without_rope == (3, 7)
    config = checkpoint.read_config(config_folder(tmp_path, "smollm3", no_rope_layer_interval=2, no_rope_layers=[0, 1]))
    assert config.layers_without_rope == (0,)


REFUSED = {
    "another-architecture": (
        "llama",
        {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
        "Gemma.*LlamaForCausalLM",
    ),
    "another-head": ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "unknown-model-type": ("llama", {"architectures": [], "model_type": "mamba9"}, "mamba9"),
    "no-model-type": ("llama", {"model_type": None}, "model_type None"),
    "quantised": ("qwen2", {"quantization_config": {"quant_method": "bitsandbytes"}}, "unquantised.*'bitsandbytes'"),
    "window-llama": (
        "llama",
        {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
        "sliding_attention.*sliding_window=64",
    ),
    "chunked": ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    "mlp-bias": ("llama", {"mlp_bias": True}, "mlp_bias must be false"),
    "activation": ("llama", {"hidden_act": "gelu"}, "silu.*gelu"),
    "odd-rotary": ("phi3", {"partial_rotary_factor": 0.625}, "even, got 5"),
    "heads": ("llama", {"num_key_value_heads": 3}, "multiple of KV heads, got 4 and 3"),
    "half-a-yarn": ("qwen2", {"rope_scaling": {"rope_type": "yarn", "beta_fast": 2.0}}, "factor must be .*got none"),
    "inverted-yarn": ("qwen2", YARN | {"rope_scaling": YARN["rope_scaling"] | {"beta_fast": 0.5}}, "beta_slow must be below"),
    "yarn-of-llama3": (
        "qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "low_freq_factor": 2.0}},
        "low_freq_factor must not",
    ),
    "half-a-longrope": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
        "long_factor must.*got none",
    ),
    "longrope-of-one-position": (
        "phi3",
        {"rope_scaling": LONGROPE["rope_scaling"] | {"original_max_position_embeddings": 1}},
        "original_max_position_embeddings must be at least 2 with LongRoPE, got 1",
    ),
    "short-longrope": ("phi3", LONGROPE | {"partial_rotary_factor": 0.5}, "short_factor.*2 rotated pairs.*got 4"),
    "longrope-by-zero": (
        "phi3",
        {"rope_scaling": LONGROPE["rope_scaling"] | {"long_factor": [1.0, 1.0, 1.0, 0.0]}},
        "long_factor must be a list",
    ),
    "two-originals": ("phi3", LONGROPE | {"original_max_position_embeddings": 64}, "original_max_position_embeddings must be"),
    "long-longrope": ("llama", LONGROPE | {"head_dim": 4}, "short_factor.*2 rotated pairs.*got 4"),
    "rope-of-fewer-layers": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must have an entry for each of the 2.*got 1"),
    "half-rotated": ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers must be"),
    "unknown-rope": (
        "llama",
        {"rope_scaling": {"rope_type": "banana"}},
        "RoPE.*default, dynamic, linear, llama3, longrope, yarn.*banana",
    ),
    "half-a-rope": ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "wrong-type": ("llama", {"vocab_size": "96"}, "vocab_size.*int"),
}


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_decoder_cannot_do_is_refused_before_weights_are_looked_for(family, fields, message, tmp_path):
    folder = config_folder(tmp_path, family, **fields)
    with pytest.raises(ValueError, match=f"(?s){folder / 'config.json'}.*{message}"):
        checkpoint.load(folder)


HARMLESS = {
    "window-off-qwen2": ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}),
    "window-in-no-layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    "window-wide-qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 0}),
    "window-wide-phi3": ("phi3", {"sliding_window": 256}),
    "window-none-phi3": ("phi3", {"sliding_window": None}),
    "no-architectures": ("llama", {"architectures": None}),
    "no-quantisation": ("llama", {"quantization_config": None}),
    "biases-off": ("llama", {"attention_bias": False, "mlp_bias": False}),
}


@pytest.mark.parametrize(("family", "fields"), HARMLESS.values(), ids=HARMLESS)
def test_fields_that_change_nothing_are_not_refused(family, fields, tmp_path):
    assert checkpoint.read_config(config_folder(tmp_path, family, **fields)).family == family


def test_a_partial_rotary_factor_counts_only_where_transformers_heeds_it(tmp_path):
    assert checkpoint.read_config(config_folder(tmp_path, "llama", partial_rotary_factor=0.5)).rotary_size == 0


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "lla'], ids=["empty", "list", "cut"])
def test_a_damaged_config_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json must.*JSON.*again"):
        checkpoint.load(tmp_path)


def test_code_beside_a_checkpoint_is_never_run(tmp_path):
    folder = golden_copy(tmp_path / "model", "phi3", auto_map={"AutoConfig": "evil.Config"})
    vocabulary.make_tokenizer().save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Tokenizer: pass\n")
    assert checkpoint.load(folder).tokenizer is not None
    with pytest.raises(ValueError, match=r"architecture.*evil"):
        checkpoint.load(golden_copy(folder, "phi3", model_type="evil", auto_map={"AutoConfig": "evil.Config"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"tokenizer_class": "Tokenizer"}))
    golden_copy(folder, "phi3")
    with pytest.raises(ValueError, match=r"tokenizer must load without custom code, got the class 'evil.Tokenizer'"):
        checkpoint.load(folder)
    assert not (tmp_path / "ran").exists()


# End tokens and tokenizer


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, True, (5, 6)),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, True, (0,)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, True, (7,)),
        (None, {"eos_token_id": [7, 8]}, True, (7, 8)),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 7}}, True, (7,)),
        (None, {}, True, (0,)),
        (None, {}, False, ()),
    ],
    ids=["generation-list", "generation-zero", "generation-null", "config", "inner-config", "tokenizer", "nowhere"],
)
def test_end_tokens_come_from_the_first_file_that_has_them(generation, config, tokenizer, expected, tmp_path):
    folder = config_folder(tmp_path, **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert checkpoint.read_end_ids(folder, vocabulary.make_tokenizer() if tokenizer else None) == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6, 7, 0)),
        ({"eos_token_id": [0, 5]}, {"eos_token_id": 5}, (0, 5)),
        ({"eos_token_id": 5}, {"eos_token_id": 100_000}, (5, 0)),
        (None, {"eos_token_id": 7}, (7, 0)),
        (None, {}, (0,)),
    ],
    ids=["all differ", "within the first", "beyond the vocabulary", "config and tokenizer", "tokenizer"],
)
def test_a_chat_ends_at_every_end_token_that_a_file_names(generation, config, expected, tmp_path):
    folder = config_folder(tmp_path, **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = vocabulary.make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    model_config = dataclasses.replace(checkpoint.read_config(folder), vocab_size=95)
    assert checkpoint.read_end_ids(folder, tokenizer, model_config) == expected


def test_end_tokens_that_files_disagree_on_are_reported_with_their_files(tmp_path):
    folder = shutil.copytree(checkpoint.find_folder("tiny-reasoner"), tmp_path / "copy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jkv.load(folder).ends == {0: ("generation_config.json", "config.json", "the tokenizer")}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert jkv.load(folder).ends == {5: ("generation_config.json",)}  # no chat model: the first file that names one
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.warns(
        UserWarning, match=r"different end tokens: .* \(5: generation_config.json\), .* \(0: config.json and the "
    ):
        model = jkv.load(folder)
    assert model.config.end_ids == (5, 0)
    assert model.ends == {5: ("generation_config.json",), 0: ("config.json", "the tokenizer")}


def test_the_tokenizer_of_another_model_is_refused_with_numbers(tmp_path):
    folder = config_folder(tmp_path, vocab_size=63)
    vocabulary.make_tokenizer().save_pretrained(folder)
    with pytest.raises(ValueError, match=f"vocab_size=63 tokens, got {vocabulary.SIZE}"):
        checkpoint.load(folder)


def test_a_generic_tokenizer_splits_as_its_file_says_whatever_the_models_family(tmp_path):
    tokenizer = vocabulary.make_tokenizer()
    config = ModelConfig("qwen2", vocabulary.SIZE, 16, 1, 2, 1, 8, 16, 256, qkv_bias=True, tie_embeddings=True)
    params = random_params(config)
    checkpoint.export(params, tokenizer, tmp_path / "model")
    loaded = checkpoint.load(tmp_path / "model").tokenizer
    text = "b=3;c=7;?c<think>\n\nWait again"
    assert loaded.encode(text) == tokenizer.encode(text)


def test_a_tokenizer_whose_ids_have_gaps_is_measured_by_its_largest_id(tmp_path):
    size = vocabulary.SIZE
    folder = config_folder(tmp_path, vocab_size=size)
    tokenizer = vocabulary.make_tokenizer()
    tokenizer.save_pretrained(folder)
    text, entry = (folder / "tokenizer.json").read_text(), f'"z": {tokenizer.convert_tokens_to_ids("z")},'
    assert entry in text
    (folder / "tokenizer.json").write_text(text.replace(entry, f'"z": {size},'))
    with pytest.raises(ValueError, match=f"vocab_size={size} tokens, got {size + 1}"):
        checkpoint.load(folder)


def test_a_damaged_tokenizer_is_named(tmp_path):
    folder = golden_copy(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{folder}/tokenizer\.json must be JSON.*again"):
        checkpoint.load(folder)
