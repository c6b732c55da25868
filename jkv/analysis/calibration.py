"""Statistics of a model's queries before RoPE, measured over any text, for the policies that read them (TriAttention)."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkv.checkpoints.tokenizer import encode_whole
from jkv.checks import check_counts, need_tokenizer
from jkv.errors import refused
from jkv.eviction.calibration import QueryMoments, QueryStatistics, identity_of
from jkv.model import decoder
from jkv.model.params import Model, Params
from jkv.model.rotary import Rope, pair_norms, rope_of, unrotate
from jkv.replay.columns import dense_columns
from jkv.replay.other_groups import with_other_groups
from jkv.replay.score import ReplayAttention, check_tokens, round_up

MOST_TOKENS = 32_768  # of the text, by default
PIECE = 4_096  # tokens of one forward pass


def calibrate(model: Model, texts: str | Sequence[Any], tokens: int = MOST_TOKENS) -> QueryStatistics:
    """The mean query of each layer and head before RoPE, and the mean length of its pairs of channels, over a text.

    `texts` is one text or several, each a string or token ids. Of all of them the first `tokens` tokens are read, in pieces of
    at most 4,096 tokens (or the model's positions), each of which begins at position 0.

    Raises:
      ValueError: no tokens, or text for a model without a tokenizer.
    """
    check_counts(tokens=tokens)
    rope, sums, count = rope_of(model.config), None, 0
    for piece in pieces(model, [texts] if is_one(texts) else texts):
        piece = piece[: tokens - count]
        if not len(piece):
            break
        padded = np.zeros(round_up(len(piece)), np.int32)
        padded[: len(piece)] = piece
        found = query_sums(model.params, rope, jnp.asarray(padded), jnp.arange(len(padded)) < len(piece))
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
        sums, count = wide if sums is None else jax.tree.map(np.add, sums, wide), count + len(piece)
    if sums is None:
        raise refused("Calibration needs at least one token of text; got none. Pass a text.", texts="missing")
    moments = jax.tree.map(lambda x: (x / count).astype(np.float32), sums)
    return QueryStatistics(moments, identity_of(model) | {"tokens": str(count)})


def is_one(texts: Any) -> bool:
    """Whether it is one text, as a string or token ids, and not a sequence of texts."""
    return isinstance(texts, str) or (len(texts) > 0 and np.ndim(texts[0]) == 0 and not isinstance(texts[0], str))


def pieces(model: Model, texts: Sequence[Any]) -> Iterator[np.ndarray]:
    """The token ids of texts, in pieces that one forward pass takes."""
    size = min(PIECE, model.config.max_positions)
    for text in texts:
        if isinstance(text, str):
            need_tokenizer(model.tokenizer, "One of the texts is a string", "Pass token ids.")
            text = encode_whole(model.tokenizer, text)
        ids = np.asarray(text)
        if ids.size:
            check_tokens(model.params, ids, [])
        for start in range(0, len(ids), size):
            yield ids[start : start + size]


@jax.jit
def query_sums(params: Params, rope: Rope, token: Int[Array, " T"], is_real: Bool[Array, " T"]) -> QueryMoments:
    """Sums of each layer's queries before RoPE, and of the lengths of their pairs of channels, over the real tokens."""
    position, sums = jnp.arange(token.shape[0], dtype=jnp.int32)[None], []
    attention = ReplayAttention(position, dense_columns(params.config, 1, token.shape[0]), None)

    def attend(
        layer: int, query: Float[Array, "1 T N H"], key: Array, value: Array, cache: None, sink: Array | None = None
    ) -> tuple[Array, None]:
        of_layer = jax.tree.map(lambda x: x[layer : layer + 1], rope)
        plain = jnp.where(is_real[:, None, None], unrotate(of_layer, query, position)[0], 0.0)
        sums.append(QueryMoments(plain.sum(axis=0), pair_norms(plain, rope.frequency.shape[-1]).sum(axis=0)))
        return attention(layer, query, key, value, cache, sink)

    decoder.forward(params, token[None], position, with_other_groups(params.config, attend, position), None)
    return jax.tree.map(lambda *layers: jnp.stack(layers), *sums)
