"""Small tokenizers of the kinds that models have: byte-level BPE, and SentencePiece with byte fallback."""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jkv.reasoning.token_bytes import byte_characters

END = "<|end|>"


@functools.cache
def byte_level(*pieces: bytes) -> PreTrainedTokenizerFast:
    """A token for each byte, then one for each of the pieces, then the special token END."""
    characters = {byte: character for character, byte in byte_characters().items()}
    texts = ["".join(characters[byte] for byte in piece) for piece in (*(bytes([i]) for i in range(256)), *pieces)]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return with_end(tokenizer)


@functools.cache
def sentence_piece(*pieces: str) -> PreTrainedTokenizerFast:
    """A token for each byte, then one for each of the pieces, then the special token END."""
    texts = [*(f"<0x{i:02X}>" for i in range(256)), *pieces]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return with_end(tokenizer)


def with_end(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer of transformers, with the special token END."""
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def with_special(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with these special tokens; any other byte is a token."""
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": texts})
    return fast
