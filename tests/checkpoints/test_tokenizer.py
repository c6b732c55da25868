"""A folder's tokenizer is its tokenizer.json: equal ids and texts whatever class and model family its other files name."""

import copy
import itertools
import json
import pickle
import random

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.families import FAMILIES
from jkv.checkpoints.tokenizer import CheckpointTokenizer, make_tokenizer
from jkv.checkpoints.tokenizer_files import read_tokenizer
from jkv.reasoning.marks import completion_decoder

CORPUS = [
    "The answer is 12345, isn't it? WE'LL SEE: x = 10**6 + 1/3; § © ® ½½ § © ® ½\n\n\treturn naïve café  …\r\n" * 3,
    "Ünïcödé 漢字かな 한국어 мир \u0301e\u0301 ½ ٣٤ 😀😀 it's they're I'VE ' 'tis   end. camelCaseWords HTTPServer/v2//\n",
    "def f(a_b):\n    return [a_b] * 2024  # comment's\n\n\n   \n hello world how are you? let x be a + b . end , so",
]
TEXTS = [
    "",
    " ",
    "\n",
    "hello world how\n\n are you? \u2115 😀",
    "  two spaces, and   three at the end   ",
    "\n\n\n\tdef f(x):\r\n\t\treturn  x ** 2\r\n",
    "12345 1 23 456 7890123 3.14159 1,000,000 ١٢٣٤٥ ½ ⅔ Ⅷ ²",
    "cafe\u0301 nai\u0308ve A\u030a \u1112\u1161\u11ab\u1100\u116e\u11a8",  # decomposed accents and Hangul
    "\ufb01 \ufb02 \uff26\uff55\uff4c\uff4c \uff57ide \u2460 \u338f \u212b",  # what NFKC changes
    "\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 e\u0301\u0301\u0301 \ufffd \ufeff \u200b \u00a0 \u2028 \u3000",
    "\x00\x01\x7f\x85 \U0010ffff",
    "I 'm sure that it 's n't so . Really ? Yes ! No , don't .",  # what a clean-up would change
    "THE They'RE we'Ll it'S ' '' ''' \"x\" ~`!@#$%^&*()_+-={}[]|\\:;<>,./",
    "漢字とかなと한국어와мир и שלום و سلام ไทย",
    "<s> a<s>b </s> <|im_end|>\n<|im_start|>user <think>2 + 2 </think><unk> <|never|>",
    "▁▁ under ▁score Ġ Ċ <0x0A> ##s </w>",
    "a" * 200 + " " * 40 + "\n" * 20,
]
CONTROLS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{value:02X}>" for value in range(256)]
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPACE = normalizers.Replace(" ", "▁")


def byte_level(pattern, normalizer=None):
    """As of Qwen and Llama 3: bytes, after a split by a pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=LETTERS, special_tokens=CONTROLS, show_progress=False)
    )
    return tokenizer


def gpt2():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=LETTERS, special_tokens=CONTROLS, show_progress=False)
    )
    return tokenizer


def sentencepiece(normalizer, decoder, pre_tokenizer=None):
    """As of Llama 2, Mistral and Gemma: a space is U+2581, and unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoders.Sequence(decoder)
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=[*CONTROLS, *BYTES], show_progress=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = fields["added_tokens"][: len(CONTROLS)]  # the bytes are tokens of the vocabulary alone
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    frame = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = frame
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=CONTROLS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words():
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=CONTROLS, show_progress=False))
    return tokenizer


FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
STRIPPED = [*FALLBACK, decoders.Strip(" ", 1, 0)]
PIPELINES = {
    "qwen2": lambda: byte_level(QWEN2, normalizers.NFC()),
    "qwen2-not-composed": lambda: byte_level(QWEN2),
    "digits-1-to-3": lambda: byte_level(QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")),
    "gpt2": gpt2,
    "prepend": lambda: sentencepiece(normalizers.Sequence([normalizers.Prepend("▁"), SPACE]), STRIPPED),
    "no-prepend": lambda: sentencepiece(SPACE, FALLBACK),
    "metaspace-first": lambda: sentencepiece(None, STRIPPED, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "unigram": unigram,
    "words": words,
}
LABELS = [
    None,
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "CodeLlamaTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "GemmaTokenizerFast",
    "GPT2Tokenizer",
    "GPTNeoXTokenizerFast",
    "CohereTokenizerFast",
    "T5Tokenizer",
    "MistralCommonBackend",
    "TokenizerOfTheFuture",
]
MODELS = [None, *FAMILIES, "deepseek_v3", "gemma", "no-such-family"]
FLAGS = [
    {},
    {"legacy": True, "add_prefix_space": True, "clean_up_tokenization_spaces": True},
    {"legacy": False, "add_prefix_space": False, "use_default_system_prompt": False, "from_slow": True},
    {"model_max_length": 10**30, "fix_mistral_regex": True, "sp_model_kwargs": {}},
]


@pytest.fixture(autouse=True)
def _transformers_chooses_no_class(monkeypatch):
    """What AutoTokenizer does differs from version to version."""
    for owner in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        monkeypatch.setattr(owner, "from_pretrained", None)


def write(folder, tokenizer, settings=None, model=None, **others):
    """A folder with a tokenizer and its configuration."""
    folder.mkdir(exist_ok=True)
    definition = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
    (folder / "tokenizer.json").write_text(definition)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    (folder / "config.json").write_text(json.dumps({"model_type": model} if model else {}))
    for name, fields in others.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder


def assert_equal(found, original, texts=TEXTS):
    """Both directions, with and without special tokens."""
    for text in texts:
        for special in (False, True):
            ids = original.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special) == ids, text
            for skip in (False, True):
                assert found.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_ids_and_texts_are_those_of_tokenizer_json_whatever_the_class_and_the_family(pipeline, tmp_path):
    tokenizer = PIPELINES[pipeline]()
    definition, draw = tokenizer.to_str(), random.Random(0)
    original = Tokenizer.from_str(definition)
    size = original.get_vocab_size()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": {"content": "<unk>", "lstrip": False}}
    drawn = [[draw.randrange(size) for _ in range(40)] for _ in range(20)] + [[token] for token in range(size)]
    texts = [original.decode(ids, skip_special_tokens=False) for ids in drawn]
    for number, (label, flags) in enumerate(itertools.product(LABELS, FLAGS)):
        model = MODELS[number % len(MODELS)]
        settings = special | flags | ({} if label is None else {"tokenizer_class": label})
        found = read_tokenizer(write(tmp_path, definition, settings, model))
        assert_equal(found, original)
        assert (found.eos_token_id, found.bos_token, found.unk_token_id) == (2, "<s>", 0)
        assert len(found) == size
    assert [found.decode(ids) for ids in drawn] == texts
    assert_equal(found, original, texts[:20])


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True, False])
@pytest.mark.parametrize("frame", ["none", "bytes", "bos", "bos-eos", "other"])
def test_tokens_at_both_ends_are_those_that_the_settings_ask_for(frame, eos, bos, tmp_path):
    tokenizer = gpt2()
    made = {
        "bos": {"single": "<s> $A", "special_tokens": [("<s>", 1)]},
        "bos-eos": {"single": "<s> $A </s>", "special_tokens": [("<s>", 1), ("</s>", 2)]},
        "other": {"single": "<|im_start|> $A <|im_end|>", "special_tokens": [("<|im_start|>", 3), ("<|im_end|>", 4)]},
    }
    if frame in made:
        tokenizer.post_processor = processors.TemplateProcessing(**made[frame])
    elif frame == "bytes":
        tokenizer.post_processor = processors.ByteLevel()
    flags = {name: value for name, value in {"add_bos_token": bos, "add_eos_token": eos}.items() if value is not None}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizerFast"} | flags
    found = read_tokenizer(write(tmp_path, tokenizer, settings))
    ids = tokenizer.encode("a b", add_special_tokens=False).ids
    first = [1] if bos or (bos is None and frame.startswith("bos")) else []
    last = [2] if eos or (eos is None and frame == "bos-eos") else []
    between = [3, *ids, 4] if frame == "other" else ids
    assert found.encode("a b") == [*first, *between, *last]
    assert found.encode("a b", add_special_tokens=False) == ids
    assert found.encode("") == [*first, *([3, 4] if frame == "other" else []), *last]
    found.save_pretrained(tmp_path / "saved")  # which writes no flags
    assert read_tokenizer(tmp_path / "saved").encode("a b") == found.encode("a b")


def test_one_token_may_be_at_both_ends(tmp_path):
    settings = {"bos_token": "<s>", "eos_token": "<s>", "add_bos_token": False, "add_eos_token": True}
    tokenizer = gpt2()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert read_tokenizer(write(tmp_path, tokenizer, settings)).encode("a")[-1:] == [1]
    assert read_tokenizer(write(tmp_path, tokenizer, settings)).encode("a")[0] != 1


def test_a_word_that_pads_is_text_all_the_same():
    """`"pad_token": "!"` is in the configurations of many a fine-tune."""
    vocabulary = {text: i for i, text in enumerate(("!", "a", "b", "!!", "<eos>"))}
    definition = Tokenizer(models.BPE(vocab=vocabulary, merges=[("!", "!")]))
    found = make_tokenizer(json.loads(definition.to_str()), {"pad_token": "!", "eos_token": "<eos>"}, "here")
    assert (found.pad_token, found.pad_token_id, found.eos_token_id) == ("!", 0, 4)
    assert found.encode("a!!b!") == definition.encode("a!!b!").ids == [1, 3, 2, 0]
    assert found.decode([0, 1, 4], skip_special_tokens=True).split() == ["!", "a"]
    assert completion_decoder(found)([0, 1, 4]).split() == ["!", "a"]


def test_a_definition_that_truncates_or_pads_does_not(tmp_path):
    tokenizer = gpt2()
    expected = tokenizer.encode("a b c d e f").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=40)
    assert read_tokenizer(write(tmp_path, tokenizer, {"model_max_length": 3})).encode("a b c d e f") == expected


def test_special_tokens_and_templates_come_from_the_configuration(tmp_path):
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("<|fin|>", normalized=False), AddedToken("<tool>", normalized=False)])
    settings = {
        "eos_token": "<|fin|>",
        "pad_token": {"content": "<unk>", "__type": "AddedToken"},
        "image_token": "<tool>",
        "additional_special_tokens": ["<|im_start|>", {"content": "<|im_end|>"}],
        "chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}],
        "padding_side": "left",
    }
    found = read_tokenizer(write(tmp_path, tokenizer, settings))
    end = tokenizer.token_to_id("<|fin|>")
    assert (found.eos_token, found.eos_token_id, found.pad_token_id, found.padding_side) == ("<|fin|>", end, 0, "left")
    assert set(found.all_special_ids) >= {end, 0, 3, 4}
    assert found.decode([*found.encode("a b"), end], skip_special_tokens=True) == "a b"  # the file has it as an ordinary token
    assert found.chat_template == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert read_tokenizer(tmp_path).chat_template == "from a file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert read_tokenizer(tmp_path).chat_template == {"default": "from a file", "rag": "r"}


@pytest.mark.parametrize(
    "settings",
    [
        {"extra_special_tokens": ["<|im_start|>", {"content": "<new>"}]},
        {"extra_special_tokens": {"image_token": "<|im_start|>", "boi_token": {"content": "<new>"}}},
        {"model_specific_special_tokens": {"image_token": "<|im_start|>", "boi_token": "<new>"}},
        {"model_specific_special_tokens": {"image_token": "<|im_start|>"}, "extra_special_tokens": ["<new>"]},
        {"extra_special_tokens": ["<|im_start|>"], "additional_special_tokens": ["<new>", "<|im_start|>"]},
    ],
    ids=["list", "object", "by newer versions", "object and list", "two lists"],
)
def test_special_tokens_may_be_in_lists_and_in_objects(settings, tmp_path):
    tokenizer = gpt2()
    size, ids = tokenizer.get_vocab_size(), tokenizer.encode("a").ids
    found = read_tokenizer(write(tmp_path, tokenizer, settings))
    assert found.encode("a<new>") == [*ids, size]
    assert found.decode([*ids, size], skip_special_tokens=True) == "a"
    assert set(found.all_special_ids) == {3, size}
    assert getattr(found, "image_token", "<|im_start|>") == "<|im_start|>"
    found.save_pretrained(tmp_path / "saved")
    assert set(read_tokenizer(tmp_path / "saved").all_special_ids) == {3, size}


def test_a_token_that_is_named_by_one_file_alone_is_not_lost(tmp_path):
    token = {"content": "<|im_end|>", "special": True}
    folder = write(tmp_path, gpt2(), {"bos_token": None, "added_tokens_decoder": {"4": token}})
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    found = read_tokenizer(folder)
    assert (found.eos_token_id, found.bos_token) == (2, None)


def test_an_empty_token_is_at_no_end_of_a_text(tmp_path):
    tokenizer = gpt2()
    settings = {"bos_token": "", "add_bos_token": True, "eos_token": "</s>", "add_eos_token": True}
    assert read_tokenizer(write(tmp_path, tokenizer, settings)).encode("a b") == [*tokenizer.encode("a b").ids, 2]


def test_a_definition_whose_added_tokens_have_other_ids_than_the_library_is_refused(tmp_path):
    tokenizer = gpt2()
    fields, size = json.loads(tokenizer.to_str()), tokenizer.get_vocab_size()
    token = {"content": "<new>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    for index in (size + 1, 4):
        definition = json.dumps(fields | {"added_tokens": [*fields["added_tokens"], token | {"id": index}]})
        with pytest.raises(ValueError, match=rf"added token .<new>. must have the id .* {size}, got {index}"):
            read_tokenizer(write(tmp_path, definition))


def test_older_files_name_special_and_added_tokens(tmp_path):
    tokenizer = gpt2()
    size = tokenizer.get_vocab_size()
    write(tmp_path, tokenizer, {"eos_token": "</s>"})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>", "lstrip": False}}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": size, "<newer>": size + 1}))
    found = read_tokenizer(tmp_path)
    assert (found.eos_token_id, found.encode("<newer><new>")) == (4, [size + 1, size])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "added_tokens_decoder": {}}))
    found = read_tokenizer(tmp_path)
    assert (found.eos_token_id, len(found)) == (2, size)


def test_added_tokens_of_the_configuration_have_their_ids_or_are_refused(tmp_path):
    tokenizer = gpt2()
    size, ids = tokenizer.get_vocab_size(), tokenizer.encode("a").ids
    token = {"content": "<new>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    found = read_tokenizer(write(tmp_path, tokenizer, {"added_tokens_decoder": {str(size): token}}))
    assert found.encode("a  <new>") == [*ids, size]
    assert found.decode([*ids, size], skip_special_tokens=True) == "a"
    own = token | {"content": "<|im_end|>", "lstrip": True}  # how the file's own tokens are found is for the file to say
    found = read_tokenizer(write(tmp_path, tokenizer, {"added_tokens_decoder": {"4": own}}))
    assert_equal(found, tokenizer)
    for index, wrong in ((size + 7, token), (5, own)):
        with pytest.raises(
            ValueError, match=rf"added token .* must have the id .* got {index}: the files belong to two models"
        ):
            read_tokenizer(write(tmp_path, tokenizer, {"added_tokens_decoder": {str(index): wrong}}))


@pytest.mark.parametrize("code", [{"AutoTokenizer": ["own.OwnTokenizer", None]}, ["own.OwnTokenizer", "own.OwnTokenizerFast"]])
def test_a_class_that_the_checkpoint_brings_the_code_of_is_refused(code, tmp_path):
    for name in ({}, {"tokenizer_class": "OwnTokenizer"}, {"tokenizer_class": "OwnTokenizerFast"}):
        with pytest.raises(ValueError, match=r"must load without custom code, got the class .own\.OwnTokenizer"):
            read_tokenizer(write(tmp_path, gpt2(), {"auto_map": code} | name))
    tokenizer = gpt2()
    found = read_tokenizer(write(tmp_path, tokenizer, {"auto_map": code, "tokenizer_class": "PreTrainedTokenizerFast"}))
    assert_equal(found, tokenizer, TEXTS[3:5])


def test_shipped_models_have_the_ids_of_their_files():
    for name, folder in checkpoint.shipped_folders().items():
        assert_equal(checkpoint.load_tokenizer(name), Tokenizer.from_file(str(folder / "tokenizer.json")))


def test_it_becomes_a_tokenizer_of_transformers_and_answers_the_same(tmp_path):
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    settings |= {"extra_special_tokens": ["<|im_start|>"], "image_token": "<unk>"}
    found = read_tokenizer(write(tmp_path, gpt2(), settings))
    asked = ("special_tokens_map", "all_special_ids", "all_special_tokens", "added_tokens_decoder", "chat_template")
    asked += ("eos_token", "eos_token_id", "bos_token_id", "pad_token_id", "unk_token", "unk_token_id", "name_or_path")
    decode, ids = found.decode, found.encode(TEXTS[3])

    def answers():
        own = {name: getattr(found, name) for name in asked}
        names = [found.convert_ids_to_tokens(token) for token in ids]
        rest = names, found.convert_tokens_to_ids([*names, "no such"]), found.get_vocab(), len(found), found.get_chat_template()
        return own, rest, found.encode(TEXTS[3]), decode(ids), found.decode(ids[0]), found.decode(np.array(ids))

    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert copied.encode(TEXTS[3]) == ids
    before = answers()
    assert type(found) is CheckpointTokenizer
    assert isinstance(found, transformers.PreTrainedTokenizerBase)
    assert found([TEXTS[3]])["input_ids"] == [ids]
    assert type(found) is transformers.PreTrainedTokenizerFast
    assert answers() == before


def test_a_change_reaches_a_tokenizer_of_transformers(tmp_path):
    found = read_tokenizer(write(tmp_path, gpt2(), {"eos_token": "</s>"}))
    found.chat_template = "{{ 1 }}"
    assert type(found) is CheckpointTokenizer
    found.pad_token = found.eos_token
    assert (found.pad_token_id, found.chat_template) == (2, "{{ 1 }}")
    assert found.add_tokens("<new>") == 1
    assert found.encode("<new>") == [len(found) - 1]
