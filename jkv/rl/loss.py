"""The policy's loss: PPO's clipped ratio on GRPO's advantages, corrected for, or trained under, the cache that sampled.

Three ways to learn from compressed rollouts, by what is called the old policy:

    dense, corrected     old = the dense policy before the update; weights w of `jkv.rl.correct` carry dense over sampled
    replayed             old = what was sampled from, and so is the policy that is trained: its ratio is 1 before an update
    replayed, mixed      as replayed, of samples that several weights drew: old = the replay before the update, weighted
    bypass               old = what was sampled from, the policy trained is dense (`old=batch.sampled`): weights are 1, and
                         the mismatch is in the ratio, which is clipped for it

The first is decoupled PPO (2110.00641) as Sparse-RL (2601.10079) uses it; the second trains the policy that acts, as a
learner under the same eviction mask does (2605.06850).
"""

import math
import numbers
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.checks import typed
from jkv.errors import refused
from jkv.model.params import Model, Params
from jkv.replay.on_mesh import AnyMesh
from jkv.rl.batch import Batch, scores_of
from jkv.rl.correction import Correction, correct
from jkv.rl.ratios import bounded, check_mean, log_ratio, mean_loss, share


def policy_loss(
    params: Model | Params,
    batch: Batch,
    *,
    old: Float[Array, "N T"] | None = None,
    correction: str | Correction | None = None,
    clip: float | tuple[float, float] = 0.2,
    mean: str = "tokens",
    reference: Float[Array, "N T"] | None = None,
    beta: float = 0.0,
    entropy_bonus: Array | float = 0.0,
    denominator: Array | float | None = None,
    mesh: AnyMesh | None = None,
    remat: bool = True,
    return_log_probs: bool = False,
) -> tuple[Float[Array, ""], Any]:
    """The loss to minimise and its metrics, a flat dictionary of scalars; differentiable, under jit too (`has_aux=True`).

    With r = exp(log p - old), A the advantage and w the weight: the mean of -w min(r A, clip(r, 1 - clip[0], 1 + clip[1]) A),
    plus `beta` times the k3 estimate of KL(policy || reference), less `entropy_bonus` times the entropy. Dropped tokens count
    as 0: a sum over few is no large step.

    Args:
      params: the weights that are trained.
      batch: of `make_batch`; replayed where it has columns.
      old: log-probabilities before the first update on this batch (`log_probs`); None takes the policy's own, without gradient,
        for a dense batch (one update a batch) or a mixed one, and the sampled ones for one that is replayed exactly.
      correction: a mode of `jkv.rl.correct`, applied to `old` and the sampled ones, or what that function returned; None is
        "none" for a batch that is replayed exactly, and "tis+veto" for others.
      clip: how far r may fall and rise: one number for both, or a pair (fall, rise), as (0.2, 0.28) of DAPO.
      mean: over all "tokens" alike (DAPO, 2503.14476), or over "sequences", each the mean of its tokens (GRPO, 2402.03300).
      reference: log-probabilities of a policy to stay near to.
      beta: how near.
      entropy_bonus: the weight of the entropy, in nats, of the distribution that each token is drawn from, cuts included; a
        positive one keeps the policy from collapsing.
      denominator: what the sum over tokens, or over the sequences' means, is divided by; None is their number in this batch.
        With the number of the whole batch for each of its microbatches, their gradients add up to that of the whole batch,
        however it is split.
      mesh, remat: see `log_probs`.
      return_log_probs: whether the second value is `(metrics, log_probs)`, with the `[N, T]` log-probabilities that the loss
        was computed from (`old` of later updates on this batch).

    The metrics, each a scalar:
      `clipped`: the share of tokens whose r is beyond the clip on the side that counts.
      `cut`: the share of tokens that top-k, top-p or min-p cuts from the policy or the old one, which are dropped.
      `entropy`: the mean entropy of the policy in nats.
      `difference_p99`, `difference_max`: the 99th percentile and the maximum of |log p - sampled|, in nats.
      `kl`: the mean k3 estimate of the divergence from the reference, in nats; only with a reference.
      `correction_mean_weight` and so on: the metrics of `jkv.rl.correct`.

    Raises:
      ValueError: an unknown mean or mode, a clip or an entropy bonus out of its range, a beta without a reference, a
        denominator that is not positive, or a mesh that `log_probs` refuses.
    """
    fall, rise = parse_clip(clip)
    check_settings(reference, beta, entropy_bonus)
    check_mean(mean, denominator)
    scores = scores_of(params, batch, mesh=mesh, remat=remat, with_entropy=True)
    current, entropy = scores.log_prob, scores.entropy
    assert entropy is not None
    fixed = jax.lax.stop_gradient(current)
    is_exact = batch.is_replayed and not batch.is_mixed
    if correction is None:
        correction = "none" if is_exact else "tis+veto"
    anchor = (batch.sampled if is_exact else fixed) if old is None else old
    if isinstance(correction, str):
        correction = correct(anchor, batch.sampled, batch.mask, mode=correction)
    # What top-k, top-p or min-p cuts from the policy has no gradient, and no logarithm: such a token is dropped.
    is_there = batch.mask & jnp.isfinite(fixed) & jnp.isfinite(anchor)
    weights = jnp.where(is_there, correction.weights, 0.0)
    ratio = bounded(log_ratio(current, anchor, is_there))
    gain, clipped = ratio * batch.advantage, jnp.clip(ratio, 1 - fall, 1 + rise) * batch.advantage
    loss_NT = -weights * jnp.minimum(gain, clipped)
    if isinstance(entropy_bonus, jax.Array) or entropy_bonus != 0:  # with 0, its gradient is not computed
        loss_NT = loss_NT - jnp.asarray(entropy_bonus, jnp.float32) * entropy
    metrics: dict[str, Float[Array, ""]] = {
        "clipped": share(clipped < gain, batch.mask),
        "cut": share(~is_there, batch.mask),
        "entropy": share(jax.lax.stop_gradient(entropy), batch.mask),
        **spread(jnp.abs(log_ratio(fixed, batch.sampled, is_there)), is_there),
    }
    if reference is not None:
        away = log_ratio(reference, current, is_there & jnp.isfinite(reference))
        kl_NT = bounded(away) - 1 - away
        loss_NT = loss_NT + beta * kl_NT
        metrics["kl"] = share(kl_NT, batch.mask)
    metrics |= {f"correction_{name}": value for name, value in correction.metrics.items()}
    value = mean_loss(loss_NT, batch.mask, mean, denominator)
    return value, (metrics, fixed) if return_log_probs else metrics


def spread(value: Float[Array, "N T"], mask: Array) -> dict[str, Float[Array, ""]]:
    """The 99th percentile and the maximum where the mask is True, as metrics."""
    masked = jnp.where(mask, value, jnp.nan)
    p99 = jnp.nanpercentile(masked, 99.0)
    return {"difference_p99": jnp.where(mask.any(), p99, 0.0), "difference_max": jnp.where(mask, value, 0.0).max()}


def parse_clip(clip: float | tuple[float, float]) -> tuple[float, float]:
    """How far the ratio may fall and rise.

    Warns where it may fall further than rise, or very far, which is more often a pair in the wrong order, or of bounds.

    >>> parse_clip(0.2)
    (0.2, 0.2)
    """
    pair: Any = (clip, clip) if isinstance(clip, numbers.Real) else clip
    is_pair = isinstance(pair, list | tuple) and len(pair) == 2
    if not is_pair or not all(isinstance(one, numbers.Real) and not isinstance(one, bool) for one in pair):
        rule = "clip must be a number, as 0.2, or a pair of how far the ratio may fall and rise, as (0.2, 0.28)"
        raise refused(f"{rule}; got {clip!r}.", clip="wrong_type")
    fall, rise = (float(one) for one in pair)
    if not (0 < fall < 1 and 0 < rise < math.inf):
        raise refused(
            f"clip must be how far the ratio may fall, in (0, 1), and rise, above 0, as 0.2 or (0.2, 0.28); got {clip}. Pass "
            "the distances from 1, not the bounds.",
            clip="out_of_range",
        )
    if fall > rise or (fall > 0.5 and rise > 1):
        warnings.warn(
            f"clip={clip} lets the ratio fall to {1 - fall:.3g} and rise to {1 + rise:.3g}. Its two numbers are the distances "
            "from 1, (fall, rise): DAPO's are (0.2, 0.28).",
            stacklevel=3,
        )
    return fall, rise


def check_settings(reference: Any, beta: float, entropy_bonus: Any) -> None:
    """Refuses settings that make no loss."""
    if not isinstance(entropy_bonus, jax.Array) and not math.isfinite(typed("entropy_bonus", entropy_bonus, float)):
        rule = f"entropy_bonus must be finite, the weight of the entropy, as 0.001; got {entropy_bonus}."
        raise refused(rule, entropy_bonus="out_of_range")
    if (beta != 0) != (reference is not None) or not beta >= 0:
        raise refused(
            f"beta, at least 0, holds the policy near to a reference, so both or none are given; got {beta=} and "
            f"{'no reference' if reference is None else 'a reference'}. Score it with log_probs(reference_params, batch).",
            beta="conflict",
        )
