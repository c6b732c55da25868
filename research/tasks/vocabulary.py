"""The tokenizer of tiny-reasoner, in Hugging Face's format: one token a character, but for words and `x=`.

A letter and the `=` after it are one token, so that looking a variable up is to find the same token again (one hop of
attention), and not a pair of tokens (two hops, which a small model learns many times slower).
"""

import string
from typing import Any

from jkv.checkpoints.huggingface import transformers

END = "<|end|>"
UNKNOWN = "<|unknown|>"
SPECIAL = (END, UNKNOWN, "<think>", "</think>")
LETTERS = string.ascii_lowercase
WORDS = ("\n\n", "Wait", "Alternatively", "again", "\\boxed{", "}", *"=;?+-* ", *string.digits, *LETTERS)
PAIRS = tuple(f"{letter}=" for letter in LETTERS)
SIZE = 96


def make_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` of 96 tokens; characters it does not know become `<|unknown|>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: i for i, token in enumerate((*SPECIAL, *WORDS, *PAIRS))}
    ids |= {f"<|spare_{i}|>": i for i in range(len(ids), SIZE)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    pieces = Regex(r"\n\n|Wait|Alternatively|again|\\boxed\{|[a-z]=|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, UNKNOWN])
    tokenizer.add_tokens(["<think>", "</think>"])
    return transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
