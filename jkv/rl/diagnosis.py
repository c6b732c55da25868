"""Whose log-probabilities a trainer computes: those that its tokens were drawn with, or which others, and what mends it.

A trainer that reads a rollout has many ways to be wrong without an error: one token late, no temperature, a full cache where
the rollout had a compressed one, a loss in place of a log-probability, a mask that loses end tokens. Each gives numbers that we
can compute too. So the trainer's are compared with all of these, and the nearest is named.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jkv.checks import counted, shown
from jkv.engine.results import Result
from jkv.errors import refused
from jkv.model.params import Model, Params
from jkv.model.sampling import Sampling
from jkv.replay.score import score
from jkv.reports import markdown
from jkv.rl.mismatch import figures_of

EQUAL = 1e-5  # nats at the 99th percentile: as much as a replay in float32 differs
ROUNDED = 0.3  # nats at the 99th percentile: as much as lower precision changes
LEAST = -1e4  # nats, in place of a token that the cuts leave out
MOST = 1.0  # nats that a token counts for, so that a few cannot decide what is nearest
NEARER = 0.1  # the mean difference from what theirs are, over that from anything else

SAMPLED, REPLAYED, FULL = "what was sampled", "the replay of the compressed cache", "the full cache"
BARE_REPLAY, BARE_FULL = f"{REPLAYED}, at temperature 1", f"{FULL}, at temperature 1"
RIGHT = SAMPLED, REPLAYED

ADVICE = {
    FULL: "The trainer reads all tokens, and the rollout did not: replay its evictions (make_batch(..., replay=True)), or "
    "correct the difference (jkv.rl.correct).",
    BARE_REPLAY: "The trainer leaves out the temperature, cuts or penalties of the draws: take them from out.sampling.",
    BARE_FULL: "The trainer leaves out the temperature, cuts or penalties of the draws (out.sampling), and the evictions.",
}


def one_late(values: np.ndarray) -> np.ndarray:
    """Those of the token before, in each row."""
    return np.concatenate([np.full((len(values), 1), np.nan), values[:, :-1]], axis=1)


def one_early(values: np.ndarray) -> np.ndarray:
    """Those of the token after, in each row."""
    return np.concatenate([values[:, 1:], np.full((len(values), 1), np.nan)], axis=1)


CHANGES: Mapping[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "": (lambda values: values, ""),
    "negated": (lambda values: -values, "A log-probability is at most 0: the trainer's are losses, so return them negated."),
    "as probabilities": (np.exp, "Take the logarithm."),
    "one token late": (one_late, "The logits after token t are the distribution of token t + 1: shift theirs left."),
    "one token early": (one_early, "The logits after token t are the distribution of token t + 1: shift theirs right."),
}


class Distance(NamedTuple):
    """How far a trainer's log-probabilities are from others, over the drawn tokens; absolute differences, in nats.

    Attributes:
      mean: of the differences, each at most 1 nat.
      p99: their 99th percentile.
      largest: of them.
      overlap: the mean of min(1, ratio of both probabilities), 1 where they are equal (`jkv.rl.mismatch`).
    """

    mean: float
    p99: float
    largest: float
    overlap: float


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis:
    """What a trainer's log-probabilities are.

    Attributes:
      nearest: the log-probabilities that theirs are nearest to, a key of `distances`.
      change: what the trainer does to these: "", "negated", "as probabilities", "one token late" or "one token early".
      difference: the absolute difference from these, so changed, in nats: the 99th percentile.
      is_right: whether theirs equal the log-probabilities of the draws, to 1e-5 nats at the 99th percentile.
      distances: of theirs, unchanged, from each, over the tokens that theirs have and that are not certain in all of them.
      left_out: drawn tokens for which theirs have 0, NaN or an infinity, by index `[n, 2]` of row and token.
      rows: the rows that are within 1e-5 nats of the draws in all their tokens.
      text: the finding, and what mends it.
    """

    nearest: str
    change: str
    difference: float
    is_right: bool
    distances: dict[str, Distance]
    left_out: np.ndarray
    rows: tuple[int, ...]
    text: str

    def __repr__(self) -> str:
        head = "the trainer's against", "mean difference", "99th percentile", "largest", "overlap"
        rows = [
            (name, f"{one.mean:.1e}", f"{one.p99:.1e}", f"{one.largest:.1e}", f"{one.overlap:.4f}")
            for name, one in self.distances.items()
        ]
        return f"{self.text}\n\n{markdown(head, rows)}"


def diagnose(model: Model | Params, out: Result, theirs: Any) -> Diagnosis:
    """Whose log-probabilities a trainer computes for a rollout; print what it returns.

    Costs a forward pass for the full cache, one for the replay if there is a trace, and these again at temperature 1 if the
    rollout has another setting. `jkv diagnose` is the same for a function in a file.

    Args:
      model: with the weights that drew the tokens.
      out: the rollout.
      theirs: `[N, T]`, in nats, for the tokens of `out.tokens`; outside of the mask, anything.

    Raises:
      ValueError: another shape, what is no array of numbers, or no drawn token that has a number.

    >>> import jkv
    >>> model = jkv.load("tiny-reasoner")
    >>> out = jkv.generate(model, "b=3;c=7;d=b*c;?d", sampling=jkv.Sampling(seed=0), max_new_tokens=24)
    >>> print(jkv.rl.diagnose(model, out, -out.logprobs).text)  # doctest: +ELLIPSIS
    The trainer's log-probabilities match what was sampled, negated, within 0.0e+00 nats...
    """
    theirs, known = checked(theirs, out), candidates(model, out)
    is_token = np.arange(theirs.shape[1]) < np.asarray(out.lengths)[:, None]
    mask = np.asarray(getattr(out, "mask", is_token))
    values = [*known.values()]
    is_known = np.where(theirs == 0, np.max(values, axis=0) > -EQUAL, (theirs > LEAST) | (np.min(values, axis=0) <= LEAST))
    is_missing = mask & ~(is_known & (theirs < np.inf))
    mask = mask & ~is_missing
    if not mask.any():
        rule = f"theirs must have numbers for drawn tokens; got 0, NaN or infinities for all {int(is_missing.sum())}."
        raise refused(f"{rule} Return [N, T] of out.tokens, without the prompt.", theirs="missing")
    tells = mask & (np.min(values, axis=0) < -EQUAL)  # a token that is certain in all is the same in all
    tells = tells if tells.any() else mask
    distances = {name: distance((theirs - values)[tells]) for name, values in known.items()}
    found = {
        (name, change): np.abs(theirs - make(values))[tells]
        for name, values in known.items()
        for change, (make, _) in CHANGES.items()
    }
    means = {key: mean(one) for key, one in found.items()}
    name, change = min(means, key=lambda key: means[key])  # the first of equal ones
    difference = percentile(found[name, change], 99)
    others = [means[key] for key in means if not are_alike(key, (name, change), known)]
    is_clear = means[name, change] <= NEARER * min(others)
    own = np.where(mask, np.abs(theirs - known[SAMPLED]), 0)
    rows = tuple(np.flatnonzero((own <= EQUAL).all(axis=1)).tolist())
    is_right = not change and name in RIGHT and difference <= EQUAL
    text = verdict(name, change, difference, is_clear)
    if rows and len(rows) < len(own) and difference > ROUNDED and name in RIGHT and not change:
        odd = [row for row in range(len(own)) if row not in rows]
        text += f" {len(rows)} of {len(own)} rows agree to {EQUAL:.0e}, and rows {odd[:8]} do not:"
        text += " look at their padding and ends."
    if is_missing.any():
        text += f" {missing(is_missing, np.asarray(out.lengths))}"
    left_out = np.argwhere(is_missing)
    return Diagnosis(name, change, difference, is_right, distances, left_out, rows, text)


def checked(theirs: Any, out: Result) -> np.ndarray:
    """Log-probabilities of a trainer as float64.

    Raises:
      ValueError: not numbers of the shape of `out.tokens`, or an `out` that is no rollout.
    """
    if not isinstance(out, Result):
        raise refused(f"diagnose takes a model, a rollout, and a trainer's numbers; got {shown(out)}.", out="wrong_type")
    try:
        values = np.asarray(theirs, np.float64)
    except (TypeError, ValueError):
        rule = f"theirs must be an array of numbers; got {shown(theirs)}. Return log-probabilities of out.tokens."
        raise refused(rule, theirs="wrong_type") from None
    if values.shape != out.tokens.shape:
        rule = f"theirs must have the shape of out.tokens, {list(out.tokens.shape)}; got {list(values.shape)}."
        how = "Return a number for each token of a completion and none for the prompt, padded on the right."
        raise refused(f"{rule} {how}", theirs="wrong_type")
    return np.where(values == -np.inf, LEAST, values)


def candidates(model: Model | Params, out: Result) -> dict[str, np.ndarray]:
    """What a trainer may have computed, by name, each `[N, T]`; the more likely ones first."""
    found: dict[str, Any] = {SAMPLED: out.logprobs}
    if out.trace is not None:
        found[REPLAYED] = score(model, out, trace=out.trace).logprobs
    found[FULL] = score(model, out).logprobs
    if any(dataclasses.replace(one, seed=None) != Sampling() for one in out.sampling):
        if out.trace is not None:
            found[BARE_REPLAY] = score(model, out, trace=out.trace, sampling=Sampling()).logprobs
        found[BARE_FULL] = score(model, out, sampling=Sampling()).logprobs
    return {name: np.maximum(np.asarray(values, np.float64), LEAST) for name, values in found.items()}


def distance(difference: np.ndarray) -> Distance:
    """Of tokens with these differences."""
    size, overlap = np.abs(difference), figures_of(difference).overlap
    return Distance(mean(size), percentile(size, 99), float(size.max()), overlap)


def mean(difference: np.ndarray) -> float:
    """Of the differences that are known, each at most `MOST`; an infinity where none is."""
    is_known = ~np.isnan(difference)
    return float(np.minimum(difference[is_known], MOST).mean()) if is_known.any() else math.inf


def percentile(difference: np.ndarray, percent: float) -> float:
    """Of the differences that are known; an infinity where none is."""
    is_known = ~np.isnan(difference)
    return float(np.percentile(difference[is_known], percent)) if is_known.any() else math.inf


def are_alike(key: tuple[str, str], other: tuple[str, str], known: Mapping[str, np.ndarray]) -> bool:
    """Whether two candidates are the same but for rounding, as a full cache and a replay are where nothing was evicted."""
    return key[1] == other[1] and float(np.percentile(np.abs(known[key[0]] - known[other[0]]), 99)) <= 10 * EQUAL


def verdict(name: str, change: str, difference: float, is_clear: bool) -> str:
    """The finding in a sentence or two."""
    what = f"{name}, {change}" if change else name
    advice = " ".join(one for one in (CHANGES[change][1], ADVICE.get(name, "")) if one)
    if difference <= EQUAL:
        return f"The trainer's log-probabilities match {what}, within {difference:.1e} nats. {advice}".rstrip()
    if is_clear and difference <= ROUNDED:
        rounds = "as weights and sums in bfloat16 differ: compute in float32 to see less"
        return f"The trainer's log-probabilities match {what}, but for {difference:.1e} nats, {rounds}. {advice}".rstrip()
    return (
        f"The trainer's log-probabilities match none that we know. The nearest is {what}: one token of a hundred "
        f"differs by more than {difference:.1e} nats. Compare weights, chat template, prompts, positions and padding."
    )


def missing(is_missing: np.ndarray, lengths: np.ndarray) -> str:
    """What is said of drawn tokens that have no log-probability."""
    last = int(is_missing[np.arange(len(lengths)), np.maximum(lengths, 1) - 1].sum())
    text = f"No number (0, NaN or an infinity) for {counted(int(is_missing.sum()), 'drawn token')}"
    if last:
        text += f", {last} of them at the end of a completion: a mask of `tokens != pad_id` loses end tokens"
    return f"{text}. Take out.mask."
