"""The tokenizer of tiny-reasoner-2: that of tiny-reasoner, with words, names of passes, and `x+` and `x>` as single tokens.

A text begins with a token of its own, to which heads that have nothing to read can attend.
"""

import re
from typing import Any

from jkv.checkpoints.huggingface import transformers
from research.tasks import trails, vocabulary

BEGIN = "<|begin|>"
WORDS = tuple(dict.fromkeys((*trails.TALK, *trails.MORE_TALK, "check", "ok", "so", "since", "and", "then", "no", "use")))
NEXT = tuple(f"{name}>" for name in (*vocabulary.LETTERS, *trails.PASSES))
PLUS = tuple(f"{name}+" for name in vocabulary.LETTERS)
SIGNS = (">", "@", "#", ".", "!", "finally")
SIZE = 240


def tokens() -> dict[str, int]:
    """Every token and its id; those of tiny-reasoner keep theirs."""
    old = (*vocabulary.SPECIAL, *vocabulary.WORDS, *vocabulary.PAIRS)
    ids = {
        token: i for i, token in enumerate((*old, BEGIN, *SIGNS, *trails.PASSES, *NEXT, *PLUS, *(f" {word}" for word in WORDS)))
    }
    return ids | {f"<|spare_{i}|>": i for i in range(len(ids), SIZE)}


def is_own(tokenizer: Any) -> bool:
    """Whether a tokenizer has the tokens of this one, so that a model with it was trained on trails."""
    return tokenizer is not None and len(tokenizer) == SIZE and tokenizer.get_vocab() == tokens()


def make_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` of 240 tokens that puts `BEGIN` before a text; unknown characters become `<|unknown|>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    ids = tokens()
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=vocabulary.UNKNOWN))
    words = "|".join(re.escape(f" {word}") for word in sorted(WORDS, key=len, reverse=True))
    pieces = rf"\n\n|Wait|Alternatively|again|finally|\\boxed\{{|[a-z][=+]|[a-zA-L]>|(?:{words})(?![a-z])|[\s\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([vocabulary.END, vocabulary.UNKNOWN, BEGIN])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, ids[BEGIN])])
    return transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=vocabulary.END,
        pad_token=vocabulary.END,
        unk_token=vocabulary.UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
