"""How much of the whole distribution a compressed cache keeps, token by token: exact, by replay beside the dense model."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.checks import typed
from jkv.engine.results import Result
from jkv.errors import refused
from jkv.model.params import Model, Params
from jkv.model.sampling import SamplingRows, rows_of
from jkv.replay.columns import Columns, dense_columns, trace_columns
from jkv.replay.score import check_trace, counter_of, hidden_states, join, log_distributions, over_blocks, positions_of
from jkv.rl.batch import need_trace


@dataclasses.dataclass(frozen=True)
class FullOverlap:
    """The sum over the vocabulary of the smaller of both probabilities: 1 where the distributions are equal, 0 where disjoint.

    Attributes:
      values: `[n, T]` float32, of each completion token's distribution; 0 in padding.
      mask: `[n, T]` which are tokens.
      rows: indices of the samples.
    """

    values: np.ndarray
    mask: np.ndarray
    rows: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Over tokens: 1 - the mean total variation distance."""
        return float(self.values[self.mask].mean())

    def percentile(self, percent: float) -> float:
        """Of the tokens' values; Sparrow (2606.08446) asks for a 5th percentile of at least 0.86."""
        return float(np.percentile(self.values[self.mask], percent))


def full_overlap(model: Model | Params, out: Result, rows: int | Sequence[int] = 8) -> FullOverlap:
    """What the compressed cache's distribution shares with the dense one at each token of a few completions.

    `mismatch(...).overlap` estimates its mean from the sampled tokens alone; this sums over the vocabulary, a block of tokens
    at a time: no `[n, T, V]` array exists. Temperature and cuts are the samples' own. Costs two forward passes.

    Args:
      model: with the weights that drew the tokens.
      out: what was drawn, with its trace.
      rows: indices of samples, or a number of them, from the first one on.

    Raises:
      ValueError: an `out` without a trace, one of another model, or rows that it does not have.
    """
    params = model.params if isinstance(model, Model) else model
    trace = need_trace(out, "full_overlap")
    num_samples = len(out.lengths)
    totals = [len(prompt) + int(length) for prompt, length in zip(out.prompts, out.lengths, strict=True)]
    check_trace(trace, params, totals, is_whole=True)
    chosen = list(range(min(typed("rows", rows, int), num_samples))) if isinstance(rows, int) else [int(row) for row in rows]
    if not chosen or not all(0 <= row < num_samples for row in chosen):
        raise refused(f"rows must be of the {num_samples} samples there are, at least one; got {rows}.", rows="out_of_range")
    tokens, lengths = out.tokens[chosen], out.lengths[chosen]
    sequence, starts = join(tokens, [out.prompts[row] for row in chosen], lengths.tolist())
    sampling = [out.sampling[row] for row in chosen]
    shared = sequence_overlap(
        params,
        jnp.asarray(sequence),
        trace_columns(trace.part(np.array(chosen)), sequence.shape[1]),
        rows_of(sampling),
        start=starts,
    )
    offset = np.arange(tokens.shape[1])
    before = np.minimum(starts[:, None] + offset, sequence.shape[1]) - 1  # a token's distribution is made by the one before it
    mask = np.asarray(getattr(out, "mask", np.arange(out.tokens.shape[1]) < np.asarray(out.lengths)[:, None]))[chosen]
    return FullOverlap(np.where(mask, np.take_along_axis(np.asarray(shared), before, axis=1), 0), mask, tuple(chosen))


@jax.jit
def sequence_overlap(
    params: Params,
    token: Int[Array, "n T"],
    columns: Columns,
    settings: SamplingRows,
    start: Int[Array, " n"] | None = None,
) -> Float[Array, "n T"]:
    """The overlap of the distributions that follow each token, over these columns and over all tokens.

    `start` is where completions begin, which penalties need.
    """
    count = counter_of(params, settings, token, start)
    replayed = hidden_states(params, token, columns)
    dense = hidden_states(params, token, dense_columns(params.config, *token.shape))

    def share(one: Float[Array, "n I D"], other: Float[Array, "n I D"], position_nI: Int[Array, "n I"]) -> Float[Array, "n I"]:
        counts = count(position_nI)
        p, q = (jnp.exp(log_distributions(params, x, settings, counts)) for x in (one, other))
        return jnp.minimum(p, q).sum(axis=-1)

    return over_blocks(share, replayed, dense, positions_of(token))
