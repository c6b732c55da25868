"""Tokenizers in GGUF files: the same tokens as those that they were made of."""

import json

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.chat_template import render_chats
from jkv.checkpoints.gguf_tokenizer import PRE_TOKENIZERS
from tests.support.checkpoints import GOLDEN
from tests.support.gguf_models import CHAT, write_gguf

CORPUS = [
    "The answer is 12345, isn't it? WE'LL SEE: x = 10**6 + 1/3; § © ® ½½ § © ® ½\n\n\treturn naïve café  …\r\n" * 3,
    "Ünïcödé 漢字かな 한국어 мир \u0301e\u0301 ½ ٣٤ 😀😀 it's they're I'VE ' 'tis   end. camelCaseWords HTTPServer/v2//\n",
    "def f(a_b):\n    return [a_b] * 2024  # comment's\n\n\n   \n",
]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TINY = {  # fields of a tokenizer of single bytes, of the size of the golden models
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [*ALPHABET[:90], "ab", *CONTROLS],
    "tokenizer.ggml.token_type": [1] * 91 + [3] * 3,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 93,
    "tokenizer.ggml.bos_token_id": 91,
    "tokenizer.chat_template": CHAT,
}


def trained(steps, normalizer=None, **options):
    """A byte-level tokenizer with these steps of pre-tokenization, trained on the corpus."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=ALPHABET, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    fields = json.loads(tokenizer.to_str())
    del fields["model"]["merges"][-40:]  # so that some words are in the vocabulary alone
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROLS])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def fields_of(tokenizer, **others):
    """The metadata of a tokenizer, as llama.cpp's converter writes them."""
    vocab, merges = tokenizer.get_vocab(), json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = sorted(vocab, key=vocab.get)
    kinds = [3 if token in CONTROLS else 4 if token == "<think>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.chat_template": CHAT,
    } | {f"tokenizer.ggml.{name}": value for name, value in others.items()}


def read(fields, tmp_path, case="qwen2"):
    """The tokenizer of a file with these fields."""
    write_gguf(tmp_path / "model.gguf", GOLDEN / case, tokenizer=fields)
    return checkpoint.load_tokenizer(tmp_path / "model.gguf")


SPLITS = {  # what the models' own tokenizer.json has
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


@pytest.mark.parametrize("name", ["gpt-2", "smollm", *SPLITS])
def test_texts_have_the_tokens_of_the_original(name, tmp_path):
    if name in SPLITS:
        steps = [pre_tokenizers.Split(Regex(SPLITS[name]), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] * (name == "smollm") + [pre_tokenizers.ByteLevel(False)]
    whole = name in ("llama-bpe", "tekken")
    original = trained(steps, normalizers.NFC() if name in ("qwen2", "qwen35") else None, ignore_merges=whole)
    tokenizer = read(fields_of(original, pre=name), tmp_path)
    for text in [*CORPUS, "".join(CORPUS), "<|im_start|>user\nA<think>b</think> <|im_end|> c", ""]:
        ids = original.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == original.decode(ids, skip_special_tokens=False)
    assert len(tokenizer.encode(CORPUS[0], add_special_tokens=False)) < 0.7 * len(CORPUS[0])


def test_each_name_splits_in_its_own_way():
    ways = {name: str(steps) for name, steps in PRE_TOKENIZERS.items()}
    assert len(set(ways.values())) == 7


PIECES = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]


def sentencepiece_fields(**others):
    """The metadata of a BPE of SentencePiece with scores, and the merges that they stand for."""
    words = [
        "\u2581t",
        "he",
        "\u2581the",
        "in",
        "ing",
        "\u2581\u2581",
        "th",
        "\u2581th",
        "er",
        "her",
        "\u2581a",
        "an",
        "\u2581an",
    ]
    letters = [*"\u2581abcdefghijklmnopqrstuvwxyz.,", "\u2581\u2581\u2581"]
    tokens = [*PIECES, *words, *letters, "<|user|>", "<|end|>"]
    scores = [0.0] * len(PIECES) + [-float(rank) for rank in range(len(words))] + [-1e6] * (len(letters) + 2)
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters)) + [3, 3]
    own = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2}
    own |= {"unknown_token_id": 0} | others
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


SENTENCES = ["the other thing", " an  ant   in there", "Ünï the\nend.", "a", " ", "in<|end|> the <|user|>\nhere"]


def test_sentencepiece_is_that_of_transformers(tmp_path):
    gguf_mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    fields = sentencepiece_fields()
    tokenizer = read(fields, tmp_path)
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()} | {"tokenizer_type": "llama"}
    original = gguf_mapping.phi3_tokenizer(own)  # it puts a space before a text as older files of Llama do
    control = [AddedToken(token, normalized=False, special=True) for token in ("<|user|>", "<|end|>")]
    original.backend_tokenizer.add_special_tokens(control)
    for text in SENTENCES:
        ids = original.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == original.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.tokenize("the thing") == ["\u2581the", "\u2581th", "ing"]
    assert tokenizer.tokenize("Ü") == ["\u2581", "<0xC3>", "<0x9C>"]


def test_unknown_characters_without_tokens_of_bytes_are_one_token(tmp_path):
    fields = sentencepiece_fields()
    fields["tokenizer.ggml.tokens"] = [token.replace("<0x", "[0x") for token in fields["tokenizer.ggml.tokens"]]
    assert read(fields, tmp_path).tokenize("aÜÜa") == ["\u2581a", "<unk>", "a"]


def test_phi3_ignores_spaces_after_its_marks(tmp_path):
    text = "<|user|>\nhere<|end|> the"
    fields = sentencepiece_fields()
    write_gguf(tmp_path / "model.gguf", GOLDEN / "phi3", tokenizer=fields)
    phi3 = checkpoint.load_tokenizer(tmp_path / "model.gguf")
    assert phi3.encode(text) == phi3.encode("<|user|>here<|end|>the")
    assert read(fields, tmp_path).encode(text) != phi3.encode(text)


def test_the_space_before_a_text_and_the_ends_follow_their_switches(tmp_path):
    plain = read(sentencepiece_fields(add_space_prefix=False, add_bos_token=False), tmp_path)
    assert plain.tokenize("the") == ["t", "he"]
    assert 1 not in plain.encode("the")
    both = read(sentencepiece_fields(add_eos_token=True), tmp_path).encode("the")
    assert (both[0], both[-1]) == (1, 2)


def test_end_tokens_are_those_of_the_text_and_of_the_turn(tmp_path):
    for others, ends in (
        ({}, (93, 91)),
        ({"tokenizer.ggml.eot_token_id": 92}, (93, 92, 91)),
        ({"tokenizer.ggml.token_type": [1] * 94}, (93,)),
    ):
        write_gguf(tmp_path / "model.gguf", GOLDEN / "qwen2", tokenizer=TINY | others)
        assert jkv.load(tmp_path / "model.gguf").config.end_ids == ends


def test_a_chat_is_rendered_as_by_transformers(tmp_path):
    tokenizer = read(TINY, tmp_path)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert render_chats(tokenizer, [chat], add_generation_prompt=True) == [text]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text
    assert isinstance(tokenizer, PreTrainedTokenizerFast)


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "qwen2")
    model = jkv.load(tmp_path / "model.gguf")
    assert (model.tokenizer, model.config.end_ids) == (None, ())


REFUSED = {
    "kind": ({"model": "rwkv"}, "tokenizer.ggml.model must be one of gpt2, llama, got 'rwkv'"),
    "pre": ({"pre": "bloom"}, "tokenizer.ggml.pre must be one of gpt-2, .*got 'bloom'"),
    "no-merges": ({"merges": "a b"}, "merges must be a list of strings"),
    "merge": ({"merges": ["ab"]}, "merges must be pairs of tokens, got 'ab'"),
    "unknown-merge": ({"merges": ["ab ab"]}, "must load without custom code"),
    "twice": ({"tokens": ["a"] * 94}, "tokens must be distinct, got 93 twice"),
    "many": ({"tokens": [str(index) for index in range(97)], "token_type": [1] * 97}, "at most vocab_size=96 tokens, got 97"),
    "types": ({"token_type": [1, 2]}, "token_type must have 94 values, as tokens has; got 2"),
    "end": ({"eos_token_id": 94}, r"eos_token_id must be an integer in \[0, 93\], got 94"),
    "switch": ({"add_bos_token": 1}, "add_bos_token must be true or false, got 1"),
    "long": ({"tokens": ["x" * 3000, *TINY["tokenizer.ggml.tokens"][1:]]}, "tokens must have at most 2048 characters"),
    "no-scores": ({"model": "llama", "merges": None}, "scores must be an array of numbers, got none"),
    "nan": ({"model": "llama", "merges": None, "scores": [float("nan")] * 94}, "scores must be finite, got nan"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_tokenizers_are_refused(changes, message, tmp_path):
    fields = TINY | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    write_gguf(tmp_path / "model.gguf", GOLDEN / "qwen2", tokenizer={k: v for k, v in fields.items() if v is not None})
    with pytest.raises(ValueError, match=f"{tmp_path / 'model.gguf'}.*{message}"):
        jkv.load(tmp_path / "model.gguf")


def test_a_long_chat_template_is_refused(tmp_path):
    fields = TINY | {"tokenizer.chat_template": "x" * (1 << 21)}
    with pytest.raises(ValueError, match=f"{tmp_path / 'model.gguf'}.*chat_template must be a string of at most"):
        read(fields, tmp_path)
