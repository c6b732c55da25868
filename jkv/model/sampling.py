"""Sampling of the next token, with temperature, top-k and top-p as data of each row, and a random key for each request.

The log-probability of a token is under the exact distribution that it was drawn from. At temperature 0 decoding is greedy, and
the log-probability is that of temperature 1.
"""

import dataclasses
import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from jkv.checks import shown, typed

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e30  # float32, with room for what logits are divided by and into
DRAWS = ("greedy", "sampled", "truncated")  # the most likely token; a draw from all; a draw after top-k and top-p


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 is greedy, others lie in [1e-6, 1e30].
      top_p: keeps the smallest set of most likely tokens whose probabilities reach this sum; 1 keeps all.
      top_k: keeps this many most likely tokens, and ties with the last one; 0 keeps all.
      seed: the seed of the draws; None takes fresh entropy, which the result reports in `stats.seed` (None for greedy draws).

    Raises:
      ValueError: a field is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = typed(field.name, getattr(self, field.name), field.type)
            object.__setattr__(self, field.name, value)
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE:
            rule = f"0 (greedy) or at least {LEAST_TEMPERATURE}"
            if self.temperature > MOST_TEMPERATURE:
                rule = f"at most {MOST_TEMPERATURE}"
            raise ValueError(f"temperature must be {rule}; got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], 1 keeps all tokens; got {self.top_p}.")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (all tokens) or a number of tokens below 2**31; got {shown(self.top_k)}.")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2**32) or be None for fresh entropy; got {shown(self.seed)}.")

    @property
    def draws(self) -> str:
        """The kind of draw, one of DRAWS."""
        if self.temperature == 0:
            return "greedy"
        return "truncated" if self.top_p < 1 or self.top_k > 0 else "sampled"


class SamplingRows(NamedTuple):
    """The sampling settings of each batch row, as data."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    key: UInt32[Array, "B 2"]  # of the sample, before the position is folded in


def request_id(prompt: np.ndarray) -> int:
    """A 32-bit hash of the prompt's token ids, which enters the random keys."""
    return int.from_bytes(hashlib.blake2s(np.asarray(prompt, np.int32).tobytes(), digest_size=4).digest(), "little")


@jax.jit
def sample_key(seed: UInt32[Array, ""], request: UInt32[Array, ""], sample: UInt32[Array, ""]) -> UInt32[Array, " 2"]:
    """The key data of one sample of one request."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), request), sample)
    return jax.random.key_data(key)


def draw(
    logits: Float[Array, "B V"], rows: SamplingRows, position: Int[Array, " B"], draws: str
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"] | None]:
    """Each row's next token, its log-probability in nats, and its log-probability before top-k and top-p.

    The last is None unless `draws` is "truncated". The random key depends only on seed, request, sample and position.
    `draws`, one of DRAWS, must cover every row: "sampled" hashes every logit, and "truncated" also sorts them.
    """
    log_probs_BV = log_distribution(logits, rows.temperature, rows.top_p, rows.top_k, draws == "truncated")

    def noise(key_data: UInt32[Array, " 2"], when: Int[Array, ""]) -> Float[Array, " V"]:
        key: PRNGKeyArray = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, when), logits.shape[-1:], jnp.float32)

    noisy_BV = log_probs_BV
    if draws != "greedy":
        noisy_BV = log_probs_BV + jnp.where(rows.temperature[:, None] > 0, jax.vmap(noise)(rows.key, position), 0.0)
    token = jnp.argmax(noisy_BV, axis=-1).astype(jnp.int32)
    log_prob = jnp.take_along_axis(log_probs_BV, token[:, None], axis=-1)[:, 0]
    if draws != "truncated":
        return token, log_prob, None
    uncut_BV = log_distribution(logits, rows.temperature, rows.top_p, rows.top_k, truncates=False)
    return token, log_prob, jnp.take_along_axis(uncut_BV, token[:, None], axis=-1)[:, 0]


def log_distribution(
    logits: Float[Array, "*B V"],
    temperature: Float[Array, "*B"],
    top_p: Float[Array, "*B"],
    top_k: Int[Array, "*B"],
    truncates: bool,
) -> Float[Array, "*B V"]:
    """The log-probabilities that tokens are drawn from, float32; `-inf` for tokens outside top-k or top-p.

    Top-k is applied first, and top-p to the rest; the most likely token always stays. At temperature 0 they are those of
    temperature 1, without top-k and top-p. `truncates=False` skips top-k and top-p, which saves a sort. NaN where a logit is
    NaN or positive infinity, or all are negative infinity, and nowhere else.
    """
    is_greedy = temperature == 0
    # The largest logit is subtracted before the division, which may overflow: to -inf then, the logarithm of 0.
    below = logits.astype(jnp.float32) - logits.max(axis=-1, keepdims=True).astype(jnp.float32)
    scaled = below / jnp.where(is_greedy, 1.0, temperature)[..., None]
    if truncates:
        sorted_logits = jnp.flip(jnp.sort(scaled, axis=-1), axis=-1)
        vocab = logits.shape[-1]
        rank = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1
        kth = jnp.take_along_axis(sorted_logits, rank[..., None], axis=-1)
        kept = jnp.where(sorted_logits >= kth, sorted_logits, -jnp.inf)
        before = jnp.cumsum(jax.nn.softmax(kept, axis=-1), axis=-1) - jax.nn.softmax(kept, axis=-1)
        share = jnp.where(top_p < 1, top_p, jnp.inf)[..., None]  # a cumulative sum may round to 1 before its end
        is_nucleus = (before < share) & (kept > -jnp.inf)
        is_nucleus = is_nucleus.at[..., 0].set(True)  # also for a top-p that float32 rounds to 0
        floor = jnp.min(jnp.where(is_nucleus, sorted_logits, jnp.inf), axis=-1, keepdims=True)
        floor = jnp.where(is_greedy[..., None], -jnp.inf, floor)
        scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
    return jax.nn.log_softmax(scaled, axis=-1)
