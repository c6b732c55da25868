"""Penalties on tokens that a text already holds, and the counts that they read: on the device, row by row.

The repetition penalty is CTRL's (arXiv 1909.05858, section 4.1), the presence and frequency penalties are OpenAI's; all three
are computed as by vLLM. The engine counts in its decode loop, a replay from the tokens alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

COUNTED = 5  # bytes of `TokenCounts` for each row and token of the vocabulary


class PenaltyRows(NamedTuple):
    """The penalties of each row, as data."""

    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]


class TokenCounts(NamedTuple):
    """Which tokens each row's prompt holds, and how often each token is in its completion so far."""

    is_prompted: Bool[Array, "*B V"]
    generated: Int[Array, "*B V"]


def penalise(logits: Float[Array, "*B V"], rows: PenaltyRows, counts: TokenCounts) -> Float[Array, "*B V"]:
    """The logits after the penalties, float32; unchanged, bit for bit, where all of a row's penalties are neutral.

    `repetition` divides positive logits of the tokens of prompt and completion, and multiplies negative ones. Then each token
    of the completion loses `frequency` times its count, and `presence` once.
    """
    repetition, presence, frequency = (x[..., None] for x in rows)
    logits, is_generated = logits.astype(jnp.float32), counts.generated > 0
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts.is_prompted | is_generated, repeated, logits)
    return logits - frequency * counts.generated.astype(jnp.float32) - jnp.where(is_generated, presence, 0.0)


def count_tokens(texts: Sequence[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> TokenCounts:
    """The counts of pairs of prompt and completion so far, NumPy arrays."""
    is_prompted: Any = np.zeros((len(texts), vocab_size), bool)
    generated: Any = np.zeros((len(texts), vocab_size), np.int32)
    for i, (prompt, completion) in enumerate(texts):
        is_prompted[i, np.asarray(prompt, np.int32)] = True
        np.add.at(generated[i], np.asarray(completion, np.int32), 1)
    return TokenCounts(is_prompted, generated)


def count_next(generated: Int[Array, "B V"], token: Int[Array, " B"], is_new: Bool[Array, " B"]) -> Int[Array, "B V"]:
    """`TokenCounts.generated` after one more token in the rows that have one."""
    return generated.at[jnp.arange(len(token), dtype=jnp.int32), token].add(is_new.astype(jnp.int32))


def counts_in_block(
    token: Int[Array, "n T"], start: Int[Array, " n"], position: Int[Array, "n I"], vocab_size: int
) -> TokenCounts:
    """The counts after the token at each of a block of consecutive positions: [n, I, V].

    `token` holds prompts and completions, which begin at `start`. They are counted again for each block, in O(T), so that no
    counts are kept from block to block: memory is a block's.
    """
    at, row = jnp.arange(token.shape[1], dtype=jnp.int32), jnp.arange(len(token), dtype=jnp.int32)[:, None]
    is_generated, nothing = at >= start[:, None], jnp.zeros((len(token), vocab_size), jnp.int32)
    prompted = nothing.at[row, token].add((~is_generated).astype(jnp.int32))
    before = nothing.at[row, token].add((is_generated & (at < position[:, :1])).astype(jnp.int32))
    here = jnp.where(position >= start[:, None], jnp.take_along_axis(token, position, axis=1), vocab_size)
    within = jnp.cumsum(jax.nn.one_hot(here, vocab_size, dtype=jnp.int32), axis=1)
    return TokenCounts(prompted[:, None] > 0, before[:, None] + within)
