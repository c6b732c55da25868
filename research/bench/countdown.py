"""A model that counts down, so that a benchmark knows when every text ends whoever samples it, and at any temperature.

Token t is followed by t - 1, and 1 ends: a prompt's last token is one more than the length of what follows. Everything is
computed as in any model of the shape; only embeddings differ, which are so large, and met by an unembedding so sharp, that what
the layers add changes no token.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jkv.model.params import ModelConfig, Params
from jkv.model.weight_shapes import init_params

PAD, END = 0, 1
LOUD, SHARP = 100.0, 60.0  # norm of an embedding, logit of the next token


def countdown(config: ModelConfig) -> Params:
    """Random weights of a shape, its embeddings untied, that count down from any token."""
    params = init_params(dataclasses.replace(config, tie_embeddings=False), jax.random.key(0))
    code = jax.random.normal(jax.random.key(1), (config.vocab_size, config.width), params.embedding.dtype)
    code = code / jnp.linalg.norm(code, axis=1, keepdims=True)
    unembedding = jnp.roll(code, -1, axis=0).T * (SHARP / math.sqrt(config.width))
    return params.replace(embedding=LOUD * code, unembedding=unembedding)


def prompts_for(lengths: Sequence[int], width: int, vocab_size: int) -> list[str]:
    """Texts of `width` tokens after which as many more follow as `lengths` says, the end token included.

    Raises:
      ValueError: a vocabulary that counts not so far.
    """
    if max(lengths) + 1 >= vocab_size:
        raise ValueError(
            f"A vocabulary of {vocab_size} counts from at most {vocab_size - 2}; got {max(lengths)}. Take a larger one."
        )
    rng = np.random.default_rng(0)
    heads = rng.integers(END + 1, vocab_size, (len(lengths), width - 1))
    return [" ".join(map(str, [*head, length + 1])) for head, length in zip(heads.tolist(), lengths, strict=True)]


def skewed(count: int, mean: int, longest: int) -> list[int]:
    """Lengths as if each token ended a text with probability 1 / mean: the quantiles, shuffled, the last one the limit.

    >>> sorted(skewed(5, mean=40, longest=200))
    [4, 14, 28, 48, 200]
    """
    middle = (np.arange(count) + 0.5) / count
    lengths = np.clip(np.round(-mean * np.log1p(-middle)), 1, longest).astype(int)
    lengths[-1] = longest
    return np.random.default_rng(0).permutation(lengths).tolist()


class Numbers:
    """The tokenizer: a text is token ids, with spaces between."""

    def __init__(self, pad: int = PAD, end: int = END) -> None:
        self.pad, self.end = pad, end

    def encode(self, text: str) -> list[int]:
        """The ids that a text names."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text that names them."""
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        """No text begins with a token of its own."""
        return

    def eos_id(self) -> int:
        """Ends a text."""
        return self.end

    def pad_id(self) -> int:
        """Fills up."""
        return self.pad
