"""Tokenizers that would abort the process, take gigabytes or read other files: refused before a library sees them."""

import json
import os

import pytest

from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.json_files import MAX_BYTES
from jkv.checkpoints.tokenizer_files import read_tokenizer
from research.tasks import vocabulary
from tests.support.checkpoints import golden_copy
from tests.support.hostile_folders import refused, with_text, with_tokenizer


def added(index):
    token = {"id": index, "content": "<x>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    return [token | {"normalized": False}]


def template(ids):
    text = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"x": {"id": "x", "ids": [ids], "tokens": ["x"]}}
    return {"type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": tokens}


def repeated(count):
    text = [{"Sequence": {"id": "A", "type_id": 0}}] * count
    return {"type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": {}}


def grown(count):
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}
    return {"type": "Sequence", "normalizers": [step] * count}


TOKENIZERS = {
    "abort": ({"added_tokens": added(2**31)}, r"added_tokens: '<x>' must have an id in \[0, 2097152\), got 2147483648"),
    "largest-id": ({"added_tokens": added(2**32 - 1)}, "must have an id in"),
    "negative-id": ({"added_tokens": added(-1)}, "must have an id in"),
    "id-true": ({"added_tokens": added(True)}, "must have an id in"),
    "id-of-another-model": ({"added_tokens": added(96)}, "at most vocab_size=96 tokens, got 97"),
    "no-id": ({"added_tokens": [{"content": "x"}]}, "must have an id in .*got None"),
    "no-content": ({"added_tokens": [{"id": 1}]}, "content must be a string, got none"),
    "no-model": ({"model": None}, "model must be an object"),
    "vocabulary-number": ({"model": {"type": "WordLevel", "vocab": 5}}, "model: vocab must be"),
    "id-in-the-vocabulary": ({"model": {"type": "WordLevel", "vocab": {"a": 2**31}}}, "model.vocab: 'a' must have an id"),
    "id-as-float": ({"model": {"type": "WordLevel", "vocab": {"a": 1.5}}}, "must have an id"),
    "long-token": ({"model": {"type": "WordLevel", "vocab": {"a" * 9999: 1}}}, "at most 2048 characters"),
    "sampling": ({"model": {"type": "BPE", "vocab": {"a": 1}, "merges": [], "dropout": 0.5}}, "dropout must be 0"),
    "unknown-model": ({"model": {"type": "Oracle", "vocab": {}}}, "must load without custom code"),
    "growth": ({"normalizer": grown(12)}, "normalizer must make at most 1024 characters of one, got .* 68719476736"),
    "growth-decoding": ({"decoder": {"type": "Sequence", "decoders": grown(12)["normalizers"]}}, "decoder must make at most"),
    "empty-pattern": (
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a"}},
        r"Replace\.pattern must not be empty",
    ),
    "table": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/////w=="}}, "precompiled_charsmap must be"),
    "no-table": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "precompiled_charsmap must be"),
    "table-no-base64": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "\u00e9"}},
        "precompiled_charsmap must be",
    ),
    "template-id": ({"post_processor": template(2**31)}, "special_tokens: ids must be"),
    "template-id-of-another-model": ({"post_processor": template(96)}, "special_tokens: ids must be"),
    "template-repeats": ({"post_processor": repeated(50)}, "each text once, got 50"),
    "no-step": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "length must be an integer in"),
    "padding": ({"padding": {"strategy": {"Fixed": 2**40}}}, r"padding\.strategy\.Fixed must be"),
    "truncation": ({"truncation": {"max_length": -1}}, r"truncation\.max_length must be"),
    "bad-pattern": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False}},
        "must load",
    ),
}


@pytest.mark.parametrize(("fields", "message"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_before_a_library_sees_it(fields, message, tmp_path):
    folder = with_tokenizer(tmp_path, **fields)
    with pytest.raises(ValueError, match=message) as error:
        checkpoint.load(folder)
    assert str(tmp_path) in str(error.value)


TOKEN_2_31 = {str(2**31): {"content": "<x>", "special": True}}
SETTINGS = {
    "added-id": ({"added_tokens_decoder": TOKEN_2_31}, "added_tokens_decoder must have ids in"),
    "added-name": ({"added_tokens_decoder": {"-5": {"content": "x"}}}, "added_tokens_decoder must have ids in"),
    "added-text": ({"added_tokens_decoder": {"5": "x"}}, "an object for each id"),
    "added-of-another-model": ({"added_tokens_decoder": {"96": {"content": "x"}}}, "at most vocab_size=96 tokens, got 97"),
    "length-text": ({"model_max_length": "x"}, "model_max_length must be"),
    "length-negative": ({"model_max_length": -1}, "model_max_length must be"),
    "class": ({"tokenizer_class": 5}, "tokenizer_class must be"),
    "end-list": ({"eos_token": ["a"]}, "eos_token must be"),
    "end-content": ({"eos_token": {"content": 5}}, "content must be a string"),
    "template": ({"chat_template": 5}, "chat_template must be"),
    "template-inside": ({"chat_template": [{"name": "default", "template": 5}]}, "chat_template must be a string"),
    "template-long": ({"chat_template": "x" * (1 << 20) + "y"}, "chat_template must be a string of at most 1,048,576"),
    "side": ({"padding_side": "up"}, "padding_side must be 'left' or 'right'"),
    "inputs": ({"init_inputs": ["/etc/passwd"]}, "init_inputs must be empty"),
    "vocabulary": ({"vocab": "/etc/passwd"}, "vocab must be empty"),
    "sentencepiece": ({"sp_model_kwargs": {"model_file": "/etc/passwd"}}, "sp_model_kwargs must be empty"),
    "versions": ({"fast_tokenizer_files": ["../tokenizer.4.0.json"]}, "fast_tokenizer_files must be empty"),
}


@pytest.mark.parametrize(("fields", "message"), SETTINGS.values(), ids=SETTINGS)
def test_hostile_settings_of_a_tokenizer_are_refused(fields, message, tmp_path):
    refused(with_tokenizer(tmp_path, "tokenizer_config.json", **fields), rf"{tmp_path}.*{message}")


@pytest.mark.parametrize("name", ["vocab_file", "merges_file", "tokenizer_file", "gguf_file", "spm_file"])
@pytest.mark.parametrize("kind", ["TokenizersBackend", "LlamaTokenizer", "Qwen2Tokenizer"])
def test_a_path_in_the_settings_is_not_opened(name, kind, tmp_path):
    os.mkfifo(tmp_path / "pipe.model")  # opening it would block for ever
    settings = {"tokenizer_class": kind, name: str(tmp_path / "pipe.model")}
    folder = with_tokenizer(tmp_path / "model", "tokenizer_config.json", **settings)
    expected = with_tokenizer(tmp_path / "other", "tokenizer_config.json", tokenizer_class=kind)
    text = "a=3;?a<think>"
    assert checkpoint.load_tokenizer(folder).encode(text) == checkpoint.load_tokenizer(expected).encode(text)


@pytest.mark.parametrize("name", ["vocab.json", "added_tokens.json", "special_tokens_map.json"])
def test_the_older_files_of_a_tokenizer_are_checked_too(name, tmp_path):
    text = '{"eos_token": 5}' if "map" in name else '{"a": 2147483648}'
    refused(with_text(with_tokenizer(tmp_path), name, text), rf"{name}: .*(eos_token must be|'a' must have an id in)")


@pytest.mark.parametrize("place", ["merges.txt", "chat_template.jinja", "tokenizer.model", "additional_chat_templates/x.jinja"])
def test_other_files_that_a_tokenizer_reads_must_lie_in_the_folder(place, tmp_path):
    with_tokenizer(tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "model" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "model" / place).symlink_to(tmp_path / "secret")
    refused(tmp_path / "model", rf"{place} must lie in its folder, got a link to .*secret")


def test_a_folder_of_templates_may_be_no_link_to_another(tmp_path):
    with_tokenizer(tmp_path / "model")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "x.jinja").write_text("x")
    (tmp_path / "model" / "additional_chat_templates").symlink_to(tmp_path / "templates")
    refused(tmp_path / "model", r"x\.jinja must lie in its folder")


def test_a_large_file_of_a_tokenizer_is_refused(tmp_path):
    with_tokenizer(tmp_path)
    with open(tmp_path / "merges.txt", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    refused(tmp_path, f"merges.txt must have at most {MAX_BYTES:,} bytes")


def test_the_tokenizer_alone_is_checked_as_well(tmp_path):
    with_tokenizer(tmp_path, added_tokens=added(2**31))
    with_text(tmp_path, "config.json", '{"model_type": "gemma2"}')
    with pytest.raises(ValueError, match="must have an id in"):
        checkpoint.load_tokenizer(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "no-such-family"])
def test_fields_of_the_model_are_not_expanded_to_choose_a_tokenizer(family, tmp_path):
    with_tokenizer(tmp_path, "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    with_text(tmp_path, "config.json", json.dumps({"model_type": family}))
    expected = checkpoint.load_tokenizer(tmp_path)
    with_text(tmp_path, "config.json", json.dumps({"model_type": family, "id2label": ["x"], "num_labels": -(10**12)}))
    found = checkpoint.load_tokenizer(tmp_path)  # a positive number of labels would have no end without the rule
    assert (type(found), found.encode("a=3")) == (type(expected), expected.encode("a=3"))


def test_one_padding_token_may_lie_beyond_the_embedding(tmp_path):
    """As trainers add it without a row of the embedding."""
    tokenizer = vocabulary.make_tokenizer()
    golden_copy(tmp_path, vocab_size=vocabulary.SIZE)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == vocabulary.SIZE
    tokenizer.save_pretrained(tmp_path)
    config = checkpoint.read_config(tmp_path)
    assert read_tokenizer(tmp_path, config).pad_token_id == vocabulary.SIZE
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"at most vocab_size={vocabulary.SIZE} tokens, got {vocabulary.SIZE + 2}"):
        read_tokenizer(tmp_path, config)
