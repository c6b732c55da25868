"""Sampling of the next token, with temperature, top-k, top-p and min-p as data of each row, and a random key for each request.

The log-probability of a token is under the exact distribution that it was drawn from. At temperature 0 decoding is greedy, and
the log-probability is that of temperature 1.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from jkv.checks import shown, typed
from jkv.thresholds import last_below

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e30  # float32, with room for what logits are divided by and into
DRAWS = ("greedy", "sampled", "truncated")  # the most likely token; a draw from all; a draw of what is not cut


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 is greedy, others lie in [1e-6, 1e30].
      top_p: keeps the smallest set of most likely tokens whose probabilities reach this sum, and ties with the last one; 1
        keeps all.
      top_k: keeps this many most likely tokens, and ties with the last one; 0 keeps all.
      min_p: keeps the tokens whose probability is at least this share of the most likely one's; 0 keeps all.
      seed: the seed of the draws; None takes fresh entropy, which the result reports in `stats.seed` (None for greedy draws).

    Raises:
      ValueError: a field is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
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
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], 0 keeps all tokens; got {self.min_p}.")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (all tokens) or a number of tokens below 2**31; got {shown(self.top_k)}.")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2**32) or be None for fresh entropy; got {shown(self.seed)}.")

    @property
    def draws(self) -> str:
        """The kind of draw, one of DRAWS."""
        if self.temperature == 0:
            return "greedy"
        return "truncated" if self.top_p < 1 or self.top_k > 0 or self.min_p > 0 else "sampled"


class SamplingRows(NamedTuple):
    """The settings that make each row's distribution, as data."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    min_p: Float[Array, " B"]


def rows_of(samplings: Sequence[Sampling]) -> SamplingRows:
    """The settings of several rows, NumPy arrays."""
    kinds = {name: np.int32 if name == "top_k" else np.float32 for name in SamplingRows._fields}
    columns: Any = {name: np.array([getattr(each, name) for each in samplings], kind) for name, kind in kinds.items()}
    return SamplingRows(**columns)


def request_id(prompt: np.ndarray) -> int:
    """A 32-bit hash of the prompt's token ids, which enters the random keys."""
    return int.from_bytes(hashlib.blake2s(np.asarray(prompt, np.int32).tobytes(), digest_size=4).digest(), "little")


@jax.jit
def sample_key(seed: UInt32[Array, ""], request: UInt32[Array, ""], sample: UInt32[Array, ""]) -> UInt32[Array, " 2"]:
    """The key data of one sample of one request."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), request), sample)
    return jax.random.key_data(key)


def draw(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    key: UInt32[Array, "B 2"],
    position: Int[Array, " B"],
    draws: str,
    forced: Int[Array, " B"] | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"] | None]:
    """Each row's next token, its log-probability in nats, and its log-probability before top-k, top-p and min-p.

    The last is None unless `draws` is "truncated". `key` is each sample's; the position is folded in, so that a draw depends
    only on seed, request, sample and position.
    `forced` holds tokens that are taken in place of a draw, -1 where there is none.
    `draws`, one of DRAWS, must cover every row: "sampled" hashes every logit, and "truncated" also reads them again and
    again, to find the last ones that stay.
    """
    log_probs_BV = log_distribution(logits, rows, draws == "truncated")

    def noise(key_data: UInt32[Array, " 2"], when: Int[Array, ""]) -> Float[Array, " V"]:
        own: PRNGKeyArray = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(own, when), logits.shape[-1:], jnp.float32)

    noisy_BV = log_probs_BV
    if draws != "greedy":
        noisy_BV = log_probs_BV + jnp.where(rows.temperature[:, None] > 0, jax.vmap(noise)(key, position), 0.0)
    token = jnp.argmax(noisy_BV, axis=-1).astype(jnp.int32)
    token = token if forced is None else jnp.where(forced >= 0, forced, token)
    log_prob = jnp.take_along_axis(log_probs_BV, token[:, None], axis=-1)[:, 0]
    if draws != "truncated":
        return token, log_prob, None
    uncut_BV = log_distribution(logits, rows, truncates=False)
    return token, log_prob, jnp.take_along_axis(uncut_BV, token[:, None], axis=-1)[:, 0]


def log_distribution(logits: Float[Array, "*B V"], rows: SamplingRows, truncates: bool) -> Float[Array, "*B V"]:
    """The log-probabilities that tokens are drawn from, float32; `-inf` for tokens that are cut.

    Top-k is applied first, and top-p to the rest; of both, min-p keeps its own. The most likely token always stays. At
    temperature 0 they are those of temperature 1, uncut. `truncates=False` cuts nothing, and saves its work. NaN where a logit
    is NaN or positive infinity, or all are negative infinity, and nowhere else.
    """
    is_greedy = rows.temperature == 0
    # The largest logit is subtracted before the division, which may overflow: to -inf then, the logarithm of 0.
    below = logits.astype(jnp.float32) - logits.max(axis=-1, keepdims=True).astype(jnp.float32)
    scaled = below / jnp.where(is_greedy, 1.0, rows.temperature)[..., None]
    if truncates:
        scaled = jnp.where(is_kept(scaled, rows) | is_greedy[..., None], scaled, -jnp.inf)
    return jax.nn.log_softmax(scaled, axis=-1)


def is_kept(scaled: Float[Array, "*B V"], rows: SamplingRows) -> Bool[Array, "*B V"]:
    """Which tokens stay, of logits whose largest is 0, which always stays.

    Top-k keeps the k most likely tokens and ties with the last. Of these, top-p keeps the fewest most likely ones whose masses
    (`whole_masses`) sum to at least `top_p` times the sum of all, and ties with the last. Of these, min-p keeps those at
    least `min_p` times as likely as the most likely one. All sums are of whole numbers, so what stays does not depend on the
    order of summation, on other rows, or on how many there are.

    Nothing is sorted: the last token of top-k, and of top-p, is found by the bits of its distance from the most likely one.
    """
    distance = jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.uint32)  # 0 for the most likely token
    most = jnp.where(rows.top_k > 0, rows.top_k, jnp.iinfo(jnp.int32).max)
    last = last_below(distance, jnp.ones_like(distance, jnp.int32), most)
    mass = whole_masses(jnp.where(distance <= last[..., None], jnp.exp(scaled), 0.0))
    total = mass.sum(axis=-1, dtype=jnp.uint32)
    share = jnp.ceil(rows.top_p * total.astype(jnp.float32)).astype(jnp.uint32)  # exact to 24 bits
    share = jnp.where(rows.top_p < 1, jnp.clip(share, 1, total), jnp.uint32(2**32 - 1))
    last = jnp.minimum(last, last_below(distance, mass, share))
    return (distance <= last[..., None]) & (scaled >= jnp.log(rows.min_p)[..., None])


def whole_masses(probability: Float[Array, "*B V"]) -> UInt32[Array, "*B V"]:
    """Probabilities times a power of two of each row, rounded to whole numbers, whose sum has at most 32 bits.

    The largest probability of a row is 1. The power follows from a rough sum, of probabilities rounded up to multiples of
    2**-14 for up to 131,072 tokens. A token's mass is then right to 2**-27 of the sum of all.
    """
    spare = 31 - (probability.shape[-1] - 1).bit_length()  # bits for which the sum of as many ones has room
    rough = jnp.ceil(probability * 2.0**spare).astype(jnp.uint32).sum(axis=-1, dtype=jnp.uint32)
    power = spare - 1 + jax.lax.clz(rough).astype(jnp.int32)
    return jnp.round(probability * jnp.ldexp(jnp.float32(1), power)[..., None]).astype(jnp.uint32)
