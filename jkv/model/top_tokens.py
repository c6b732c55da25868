"""The most likely tokens of a distribution and their log-probabilities, with all other tokens as one class, the rest.

Teachers pass on their distributions so (`jkv.score(..., top=k)`, `jkv.Rollout(..., top_logprobs=k)`), and students are
compared at the same tokens (`jkv.rl.log_probs_at`).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

NO_TOKEN = -1  # in place of a token, where there is none: in padding, and beyond the vocabulary
LEAST_REST = 2.0**-24  # of 1 less a sum of float32 probabilities, which knows no smaller one


class TopTokens(NamedTuple):
    """The k most likely tokens of each place, best first. Where there is no token, it is -1 and its log-probability `-inf`."""

    tokens: Any  # [n, T, k] int32
    logprobs: Any  # [n, T, k] float32, nats
    rest: Any  # [n, T] float32, nats: the log-probability of all other tokens together; 0 in padding

    @property
    def classes(self) -> Any:
        """`[n, T, k + 1]` log-probabilities in nats: of the tokens, and last of the rest."""
        return join_rest(self.logprobs, self.rest)


def join_rest(logprobs: Any, rest: Any) -> Any:
    """Log-probabilities of tokens, and of the rest in one more column."""
    concatenate = np.concatenate if isinstance(logprobs, np.ndarray) else jnp.concatenate
    return concatenate([logprobs, rest[..., None]], axis=-1)


def find_top(log_probs: Float[Array, "*n V"], count: int) -> TopTokens:
    """The `count` most likely tokens of normalised distributions."""
    missing = max(0, count - log_probs.shape[-1])
    best, token = jax.lax.top_k(log_probs, count - missing)
    spare = [(0, 0)] * (best.ndim - 1) + [(0, missing)]
    token = jnp.pad(token.astype(jnp.int32), spare, constant_values=NO_TOKEN)
    return TopTokens(token, jnp.pad(best, spare, constant_values=-jnp.inf), rest_of(log_probs, token))


def log_probs_at(log_probs: Float[Array, "*n V"], tokens: Int[Array, "*n k"]) -> Float[Array, "*n classes"]:
    """The log-probabilities of these tokens, `-inf` where there is none, and last of the rest."""
    found = jnp.take_along_axis(log_probs, jnp.maximum(tokens, 0), axis=-1)
    return join_rest(jnp.where(tokens == NO_TOKEN, -jnp.inf, found), rest_of(log_probs, tokens))


def rest_of(log_probs: Float[Array, "*n V"], tokens: Int[Array, "*n k"]) -> Float[Array, "*n"]:
    """The log-probability of all but these tokens: `-inf` where they are all that may be drawn.

    It is summed over the other tokens, so that a rest of any size is as exact as a token's.
    """
    flat, size = tokens.reshape(-1, tokens.shape[-1]), log_probs.shape[-1]
    row = jnp.arange(len(flat), dtype=jnp.int32)[:, None]
    column = jnp.where(flat == NO_TOKEN, size, flat)
    others = log_probs.reshape(-1, size).at[row, column].set(-jnp.inf, mode="drop").reshape(log_probs.shape)
    most = jax.lax.stop_gradient(others.max(axis=-1))
    is_there = most > -jnp.inf
    most = jnp.where(is_there, most, 0.0)
    total = jnp.exp(others - most[..., None]).sum(axis=-1)
    return jnp.where(is_there, most + jnp.log(jnp.where(is_there, total, 1.0)), -jnp.inf)


def log1mexp(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """`log(1 - exp(x))` of x at most 0, without cancellation (Maechler 2012, "Accurately computing log(1 - exp(-|a|))").

    `-inf` at 0, where the gradient is 0.
    """
    is_one, is_near = x >= 0, x > -math.log(2)
    near = jnp.where(is_near & ~is_one, x, -1.0)
    far = jnp.where(is_near, -1.0, x)
    inside = jnp.where(is_near, jnp.log(-jnp.expm1(near)), jnp.log1p(-jnp.exp(far)))
    return jnp.where(is_one, -jnp.inf, inside)
