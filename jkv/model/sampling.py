"""Sampling of the next token, with penalties, temperature, top-k, top-p and min-p as data of each row, and a random key for
each request.

The log-probability of a token is under the exact distribution that it was drawn from (at temperature 0, which is greedy, under
that of temperature 1); where a request asks for it, also under the model's own distribution (`own_log_prob`).
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray, UInt32

from jkv.checks import check_between, out_of_range, typed
from pallas_kernels import log_softmax

BITS_A_PASS = 4  # on an accelerator, where reading the values again costs more than comparing them with 15 numbers at once


def last_below(bits: UInt32[Array, "*N S"], weight: Num[Array, "*N #S"], limit: Num[Array, "*N"]) -> UInt32[Array, "*N"]:
    """The greatest number t such that the weights of all bits below t sum to less than the limit; 0 where no sum does.

    Where weights are positive, it is the bits of the first value, in ascending order, with which the sum reaches the limit;
    2**32 - 1 where all together do not. `bits` are numbers, weights are at least 0. t is found bit by bit.
    """
    find = partial(_find, bits, weight, limit)
    return jax.lax.platform_dependent(cpu=partial(find, 1), default=partial(find, BITS_A_PASS))


def _find(bits: UInt32[Array, "*N S"], weight: Num[Array, "*N #S"], limit: Num[Array, "*N"], width: int) -> UInt32[Array, "*N"]:
    """`last_below`, with `width` bits of t found in each pass over the values."""

    def narrow(low: UInt32[Array, "*N"], place: UInt32[Array, ""]) -> tuple[UInt32[Array, "*N"], None]:
        trials = [low + (jnp.uint32(digit) << place) for digit in range(1, 1 << width)]
        sums = sum_all([jnp.where(bits < trial[..., None], weight, 0) for trial in trials])
        digit = sum((total < limit).astype(jnp.uint32) for total in sums)
        return low + (digit << place), None

    places = jnp.arange(32 - width, -1, -width, dtype=jnp.uint32)
    unroll = width > 1  # a few passes of two kernels each; a loop would count its turns in kernels of its own
    if unroll:  # without the barrier XLA gives some passes copies of their own, as large as the values
        bits, weight = jax.lax.optimization_barrier((bits, weight))
    return jax.lax.scan(narrow, jnp.zeros(bits.shape[:-1], jnp.uint32), places, unroll=unroll)[0]


def sum_all(arrays: list[Num[Array, "*N S"]]) -> Any:
    """The sums of several arrays over their last axis, as one reduction, which reads what they are made of once."""
    add: Callable[..., Any] = lambda x, y: tuple(a + b for a, b in zip(x, y, strict=True))  # noqa: E731
    zeros = [jnp.zeros((), array.dtype) for array in arrays]
    return jax.lax.reduce(tuple(arrays), tuple(zeros), add, (arrays[0].ndim - 1,))


LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e30  # float32, with room for what logits are divided by and into
LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0  # of any use, and logits stay in the range of float32
MOST_PENALTY = 2.0  # OpenAI's and vLLM's limit
MOST_TOP = 64  # most likely tokens of a place that are returned
DRAWS = ("greedy", "sampled", "truncated")  # the most likely token; a draw from all; a draw of what is not cut


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 is greedy, others lie in [1e-6, 1e30].
      top_p: keeps the smallest set of most likely tokens whose probabilities reach this sum, and ties with the last one; 1
        keeps all.
      top_k: keeps this many most likely tokens, and ties with the last one; 0 and -1 keep all.
      min_p: keeps the tokens whose probability is at least this share of the most likely one's; 0 keeps all.
      seed: the seed of the draws; None takes fresh entropy, which the result reports in `stats.seed` (None for greedy draws).
      repetition_penalty: divides the positive logits of tokens of the prompt or the completion, and multiplies the negative
        ones; 1 changes nothing, more makes repetition less likely. It lies in [0.01, 100].
      presence_penalty: is subtracted from the logits of tokens that the completion holds; 0 changes nothing. It lies in
        [-2, 2].
      frequency_penalty: is subtracted from the logit of a token as often as the completion holds it; 0 changes nothing. It lies
        in [-2, 2].

    Penalties come first, for greedy draws too, then temperature, top-k, top-p and min-p.

    Raises:
      ValueError: a field is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = typed(field.name, getattr(self, field.name), field.type)
            object.__setattr__(self, field.name, value)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE:
            limits = f"0 (greedy) or at least {LEAST_TEMPERATURE}"
            if self.temperature > MOST_TEMPERATURE:
                limits = f"at most {MOST_TEMPERATURE}"
            raise out_of_range("temperature", f"be {limits}", self.temperature)
        if not 0 < self.top_p <= 1:
            raise out_of_range("top_p", "lie in (0, 1], 1 keeps all tokens", self.top_p)
        check_between(0, 1, ", 0 keeps all tokens", min_p=self.min_p)
        if not 0 <= self.top_k < 2**31:
            raise out_of_range("top_k", "be 0 or -1 (all tokens) or a number of tokens below 2**31", self.top_k)
        check_between(LEAST_REPETITION, MOST_REPETITION, ", 1 changes nothing", repetition_penalty=self.repetition_penalty)
        penalties = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        check_between(-MOST_PENALTY, MOST_PENALTY, ", 0 changes nothing", **penalties)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise out_of_range("seed", "lie in [0, 2**32) or be None for fresh entropy", self.seed)

    @property
    def draws(self) -> str:
        """The kind of draw, one of DRAWS."""
        if self.temperature == 0:
            return "greedy"
        return "truncated" if self.top_p < 1 or self.top_k > 0 or self.min_p > 0 else "sampled"

    @property
    def penalises(self) -> bool:
        """Whether a penalty changes any logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))


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


class SamplingRows(NamedTuple):
    """The settings that make each row's distribution, as data."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    min_p: Float[Array, " B"]
    penalties: PenaltyRows | None = None  # None where no row has any


def rows_of(samplings: Sequence[Sampling], penalises: bool | None = None) -> SamplingRows:
    """The settings of several rows, NumPy arrays; with penalties if any row has some, or as `penalises` says."""

    def column(name: str, kind: Any = np.float32) -> Any:
        return np.array([getattr(each, name) for each in samplings], kind)

    penalties = None
    if any(each.penalises for each in samplings) if penalises is None else penalises:
        penalties = PenaltyRows(*(column(f"{name}_penalty") for name in PenaltyRows._fields))
    return SamplingRows(column("temperature"), column("top_p"), column("top_k", np.int32), column("min_p"), penalties)


def request_id(prompt: np.ndarray) -> int:
    """A 32-bit hash of the prompt's token ids, which enters the random keys."""
    return int.from_bytes(hashlib.blake2s(np.asarray(prompt, np.int32).tobytes(), digest_size=4).digest(), "little")


def draw(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    key: UInt32[Array, "B 2"],
    position: Int[Array, " B"],
    draws: str,
    forced: Int[Array, " B"] | None = None,
    counts: TokenCounts | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"] | None]:
    """Each row's next token, its log-probability in nats, and its log-probability before penalties, top-k, top-p and min-p.

    The last is None where it is the same: unless `draws` is "truncated" or there are penalties, which read `counts`. `key` is
    each sample's; the position is folded in, so that a draw depends only on seed, request, sample and position.
    `forced` holds tokens that are taken in place of a draw, -1 where there is none.
    `draws`, one of DRAWS, must cover every row: "sampled" hashes every logit, and "truncated" also reads them again and
    again, to find the last ones that stay.
    """
    log_probs_BV = log_distribution(logits, rows, draws == "truncated", counts)

    def noise(key_data: UInt32[Array, " 2"], when: Int[Array, ""]) -> Float[Array, " V"]:
        own: PRNGKeyArray = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(own, when), logits.shape[-1:], jnp.float32)

    noisy_BV = log_probs_BV
    if draws != "greedy":
        noisy_BV = log_probs_BV + jnp.where(rows.temperature[:, None] > 0, jax.vmap(noise)(key, position), 0.0)
    token = jnp.argmax(noisy_BV, axis=-1).astype(jnp.int32)
    token = token if forced is None else jnp.where(forced >= 0, forced, token)
    log_prob = jnp.take_along_axis(log_probs_BV, token[:, None], axis=-1)[:, 0]
    if draws != "truncated" and rows.penalties is None:
        return token, log_prob, None
    full_BV = log_distribution(logits, rows._replace(penalties=None), truncates=False)
    return token, log_prob, jnp.take_along_axis(full_BV, token[:, None], axis=-1)[:, 0]


def own_log_prob(logits: Float[Array, "*B V"], token: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Each token's log-probability in nats under the model's own distribution: at temperature 1, without penalties and cuts."""
    below_BV = logits.astype(jnp.float32) - logits.max(axis=-1, keepdims=True).astype(jnp.float32)
    return jnp.take_along_axis(log_softmax(below_BV), token[..., None], axis=-1)[..., 0]


def top_log_probs(
    logits: Float[Array, "*B V"], is_asked: Bool[Array, ""]
) -> tuple[Int[Array, "*B top"], Float[Array, "*B top"]]:
    """The MOST_TOP most likely tokens under the model's own distribution, best first, and their log-probabilities in nats.

    Zeros, without the work, where they are not asked for.
    """
    count = min(MOST_TOP, logits.shape[-1])

    def find(logits: Float[Array, "*B V"]) -> tuple[Int[Array, "*B top"], Float[Array, "*B top"]]:
        below = logits.astype(jnp.float32) - logits.max(axis=-1, keepdims=True).astype(jnp.float32)
        best, token = jax.lax.top_k(log_softmax(below), count)
        return token.astype(jnp.int32), best

    def leave_out(logits: Float[Array, "*B V"]) -> tuple[Int[Array, "*B top"], Float[Array, "*B top"]]:
        shape = *logits.shape[:-1], count
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return jax.lax.cond(is_asked, find, leave_out, logits)


def any_cuts(rows: SamplingRows) -> Bool[Array, ""]:
    """Whether top-k, top-p or min-p cuts the distribution of any row, as data: no program depends on it."""
    return ((rows.top_p < 1) | (rows.top_k > 0) | (rows.min_p > 0)).any()


def log_distribution(
    logits: Float[Array, "*B V"], rows: SamplingRows, truncates: bool | Bool[Array, ""], counts: TokenCounts | None = None
) -> Float[Array, "*B V"]:
    """The log-probabilities that tokens are drawn from, float32; `-inf` for tokens that are cut.

    Penalties come first, then the temperature and the cuts (`is_kept`), as in Hugging Face's transformers. At temperature 0
    they are computed as at temperature 1, uncut. `truncates=False` cuts nothing, and saves its work, in the program if it is a
    bool and while it runs if it is an array; `counts` are what penalties read. NaN where a logit is NaN or positive infinity,
    or all are negative infinity, and nowhere else.
    """
    if rows.penalties is not None:
        assert counts is not None
        logits = penalise(logits, rows.penalties, counts)
    is_greedy = rows.temperature == 0
    # The largest logit is subtracted before the division, which may overflow: to -inf then, the logarithm of 0.
    below = logits.astype(jnp.float32) - logits.max(axis=-1, keepdims=True).astype(jnp.float32)
    scaled = below / jnp.where(is_greedy, 1.0, rows.temperature)[..., None]
    if truncates is not False:
        kept = is_kept(scaled, rows) if truncates is True else kept_if(truncates, scaled, rows)
        scaled = jnp.where(kept | is_greedy[..., None], scaled, -jnp.inf)
    return log_softmax(scaled)


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


def kept_if(truncates: Bool[Array, ""], scaled: Float[Array, "*B V"], rows: SamplingRows) -> Bool[Array, "*B V"]:
    """`is_kept`, or all tokens without its work where `truncates` is False.

    Row after row, because a program has the memory for both: that of one row is small.
    """

    def by_row(scaled: Float[Array, "*B V"]) -> Bool[Array, "*B V"]:
        return jax.lax.map(lambda row: is_kept(*row), (scaled, rows._replace(penalties=None)))

    return jax.lax.cond(truncates, by_row, partial(jnp.ones_like, dtype=bool), jax.lax.stop_gradient(scaled))


def whole_masses(probability: Float[Array, "*B V"]) -> UInt32[Array, "*B V"]:
    """Probabilities times a power of two of each row, rounded to whole numbers, whose sum has at most 32 bits.

    The largest probability of a row is 1. The power follows from a rough sum, of probabilities rounded up to multiples of
    2**-14 for up to 131,072 tokens. A token's mass is then right to 2**-27 of the sum of all.
    """
    spare = 31 - (probability.shape[-1] - 1).bit_length()  # bits for which the sum of as many ones has room
    rough = jnp.ceil(probability * 2.0**spare).astype(jnp.uint32).sum(axis=-1, dtype=jnp.uint32)
    power = spare - 1 + jax.lax.clz(rough).astype(jnp.int32)
    return jnp.round(probability * jnp.ldexp(jnp.float32(1), power)[..., None]).astype(jnp.uint32)


COUNTED = 5  # bytes of `TokenCounts` for each row and token of the vocabulary


ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # bits, of the rounds in turn
PARITY = 0x1BD11BDA
MASK = 0xFFFFFFFF


def sample_key(seed: int, request: int, sample: int) -> UInt32[np.ndarray, " 2"]:
    """The key data of one sample of one request: its number, folded into the request's, folded into the seed's key.

    >>> sample_key(1, 2, 3)
    array([2563710487,  186860909], dtype=uint32)
    """
    key = 0, int(seed) & MASK
    for number in (int(request), int(sample)):
        key = threefry(key, (0, number & MASK))
    return np.array(key, np.uint32)


def threefry(key: tuple[int, int], count: tuple[int, int]) -> tuple[int, int]:
    """Two pseudo-random 32-bit numbers: `count`, encrypted by `key` in 20 rounds."""
    keys = *key, key[0] ^ key[1] ^ PARITY
    one, other = (count[0] + key[0]) & MASK, (count[1] + key[1]) & MASK
    for i in range(5):
        for bits in ROTATIONS[i % 2]:
            one = (one + other) & MASK
            other = ((other << bits | other >> 32 - bits) & MASK) ^ one
        one = (one + keys[(i + 1) % 3]) & MASK
        other = (other + keys[(i + 2) % 3] + i + 1) & MASK
    return one, other
