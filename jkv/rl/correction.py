"""Weights and masks that bring gradients of compressed rollouts towards the dense policy's: which to weight, which to drop.

With rho = exp(d - s), the dense over the sampled probability of a token, log rho cut at +-20:

    none    weight 1: the mismatch is ignored
    tis     weight min(rho, cap): truncated importance sampling
    clip    weight rho, clipped into the band from both sides
    mask    weight rho inside the band; tokens outside are dropped (IcePop)
    veto    a sequence with any rho below `veto` is dropped whole (Sparse-RL, 2601.10079)
    geo     a sequence whose geometric mean of rho is outside the band is dropped whole

"+" joins them: one that weighs (none, tis, clip; `mask` weighs where none of these is named) and any that drop. What others
call these: verl's token level with `truncate` is tis, with `mask` is mask, its geometric level with `mask` is geo, its veto
is veto; OpenRLHF's tis, icepop and seq-mask-tis are tis, mask and "tis+geo" with `cap=inf`. Both cut logarithms likewise,
verl at 20 and OpenRLHF at 30.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jkv.errors import refused
from jkv.rl.ratios import bounded, check_pair, log_ratio, row_means, share

WEIGHS, DROPS = ("none", "tis", "clip"), ("mask", "veto", "geo")


class Correction(NamedTuple):
    """What a loss multiplies by; no gradient flows through it.

    `weights` are 0 wherever `mask` is False. A sum over tokens divided by the tokens of the mask given is Sparse-RL's and
    OpenRLHF's loss; divided by the tokens of this mask, verl's.
    """

    weights: Float[Array, "N T"]
    mask: Bool[Array, "N T"]
    metrics: dict[str, Float[Array, ""]]


def correct(
    dense: Any,
    sampled: Any,
    mask: Any,
    mode: str = "tis+veto",
    cap: float = 2.0,
    band: tuple[float, float] = (0.5, 1.5),
    veto: float = 1e-4,
    normalize: bool = False,
) -> Correction:
    """Weights of each token and the mask of those that stay; usable under jit (`mode` and the bounds are static).

    Args:
      dense: `[N, T]` log-probabilities in nats under the policy that is trained, before the update.
      sampled: `[N, T]` those that the tokens were drawn with.
      mask: `[N, T]` which tokens are of completions; the rest may hold anything.
      mode: of the module's table, joined by "+".
      cap: the largest weight of `tis`.
      band: bounds of `clip`, `mask` and `geo`, both included. For different ones, correct twice, the second time with the
        first one's mask.
      veto: the smallest rho that `veto` bears.
      normalize: whether to divide weights by their mean over the tokens that stay.

    The metrics: `mean_weight` and `ess` of the tokens that stay, `max_weight`; as shares, `capped` (tokens whose rho `tis` or
    `clip` changed), `masked` (tokens that `mask` drops), `vetoed` and `filtered` (sequences that `veto` and `geo` drop), and
    `kept` (tokens that stay).

    Raises:
      ValueError: an unknown mode or bounds that are none; arrays of different shapes, or, outside of jit, no log-probabilities.

    >>> import numpy as np
    >>> found = correct(np.log([[0.4, 0.1]]), np.log([[0.1, 0.1]]), np.ones((1, 2), bool), mode="tis")
    >>> found.weights.tolist()
    [[2.0, 1.0]]
    """
    parts = parse_mode(mode)
    check_bounds(cap, band, veto)
    check_pair(dense, sampled, mask)
    dense, sampled, mask = (jnp.asarray(x) for x in (dense, sampled, mask))
    difference = jax.lax.stop_gradient(log_ratio(dense, sampled, mask))
    rho = bounded(difference)
    low, high = band
    weigh: Any = next((part for part in parts if part in WEIGHS), "mask" if "mask" in parts else "none")
    weights = {"none": jnp.ones_like(rho), "tis": jnp.minimum(rho, cap), "clip": jnp.clip(rho, low, high), "mask": rho}[weigh]

    is_row = mask.any(axis=1)
    mean = bounded(row_means(difference, mask))
    dropped = {
        "mask": mask & ((rho < low) | (rho > high)),
        "veto": (mask & (difference < math.log(veto))).any(axis=1),
        "geo": is_row & ((mean < low) | (mean > high)),
    }
    kept = mask
    for part in (part for part in DROPS if part in parts):
        is_dropped = dropped[part]
        kept = kept & ~(is_dropped if is_dropped.ndim == 2 else is_dropped[:, None])
    weights = jnp.where(kept, weights, 0.0)
    if normalize:
        mean_weight = share(weights, kept)
        weights = weights / jnp.where(mean_weight > 0, mean_weight, 1.0)
    squares = jnp.square(weights).sum()
    metrics = {
        "mean_weight": share(weights, kept),
        "max_weight": weights.max(initial=0.0),
        "ess": jnp.square(weights.sum()) / jnp.maximum(kept.sum(dtype=jnp.float32) * squares, jnp.finfo(jnp.float32).tiny),
        "capped": share((rho > cap) if weigh == "tis" else ((rho < low) | (rho > high)) & (weigh == "clip"), mask),
        "masked": share(dropped["mask"] & ("mask" in parts), mask),
        "vetoed": share(dropped["veto"] & ("veto" in parts), is_row),
        "filtered": share(dropped["geo"] & ("geo" in parts), is_row),
        "kept": share(kept, mask),
    }
    return Correction(weights, kept, metrics)


def parse_mode(mode: str) -> tuple[str, ...]:
    """The parts of a mode.

    >>> parse_mode("tis+veto")
    ('tis', 'veto')
    """
    parts = tuple(mode.split("+")) if isinstance(mode, str) else ()
    known = f'{", ".join(WEIGHS)}, {", ".join(DROPS)}, joined by "+" as in "tis+veto"'
    if not parts or len(set(parts)) < len(parts) or not set(parts) <= {*WEIGHS, *DROPS}:
        raise refused(f"mode must be of {known}; got {mode!r}.", mode="unknown_name")
    if sum(part in WEIGHS for part in parts) > 1:
        rule = f"A token has one weight, so mode may name one of {', '.join(WEIGHS)}; got {mode!r}. Choose one."
        raise refused(rule, mode="conflict")
    return parts


def check_bounds(cap: float, band: tuple[float, float], veto: float) -> None:
    """Refuses bounds that bound nothing."""
    if not cap > 0:
        raise refused(f"cap must be above 0, the largest weight of tis; got {cap}.", cap="out_of_range")
    if len(band) != 2 or not 0 <= band[0] < band[1]:
        raise refused(f"band must be two ratios, 0 <= low < high, such as (0.5, 1.5); got {band}.", band="out_of_range")
    if not 0 < veto < 1:
        raise refused(f"veto must lie in (0, 1), the smallest ratio that a sequence may hold; got {veto}.", veto="out_of_range")
