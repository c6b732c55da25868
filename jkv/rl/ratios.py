"""What mismatch and correction share: dense over sampled probability of each token, and the checks of their arguments."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jkv.checks import check_known
from jkv.errors import refused

MEANS = ("tokens", "sequences")
LARGEST = 20.0  # nats that a token's two log-probabilities may differ by; beyond, the ratio stays e^20 or e^-20


def log_ratio(dense: Float[Array, "N T"], sampled: Float[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, "N T"]:
    """`dense - sampled` in nats where the mask is True, and 0 elsewhere, whatever padding holds."""
    return jnp.where(mask, dense.astype(jnp.float32), 0.0) - jnp.where(mask, sampled.astype(jnp.float32), 0.0)


def bounded(difference: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """The ratio whose logarithm this is, between e^-20 and e^20."""
    return jnp.exp(jnp.clip(difference, -LARGEST, LARGEST))


def row_means(value: Float[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, " N"]:
    """The mean of each row's masked tokens, 0 where a row has none."""
    return jnp.where(mask, value, 0.0).sum(axis=1) / jnp.maximum(mask.sum(axis=1, dtype=jnp.float32), 1.0)


def share(value: Array, mask: Bool[Array, "*N"]) -> Float[Array, ""]:
    """The mean where the mask is True; 0 where it never is."""
    return jnp.where(mask, value.astype(jnp.float32), 0.0).sum() / jnp.maximum(mask.sum(dtype=jnp.float32), 1.0)


def mean_loss(loss: Float[Array, "N T"], mask: Bool[Array, "N T"], mean: str, denominator: Any = None) -> Float[Array, ""]:
    """The mean over all "tokens" of the mask alike, or over "sequences", each the mean of its tokens.

    The sum is divided by `denominator`; None is the number of tokens, or of sequences that have any.
    """
    counts = mask
    if mean == "sequences":
        loss, counts = row_means(loss, mask), mask.any(axis=1)
    if denominator is None:
        return share(loss, counts)
    return jnp.where(counts, loss, 0.0).sum() / jnp.asarray(denominator, jnp.float32)


def check_mean(mean: str, denominator: Any) -> None:
    """Refuses what `mean_loss` does not know.

    Raises:
      ValueError: another mean, or a denominator that is not positive.
    """
    check_known(MEANS, mean=mean)
    if isinstance(denominator, int | float) and not denominator > 0:
        raise refused(
            f"denominator must be positive, the number of tokens (or sequences) of the whole batch; got {denominator}. "
            "Take batch.mask.sum(), or batch.mask.any(axis=1).sum().",
            denominator="out_of_range",
        )


def check_pair(dense: Any, sampled: Any, mask: Any) -> None:
    """Refuses arrays that do not belong together; their values too, where they are known (not under jit).

    Raises:
      ValueError: not three arrays `[N, T]`, a mask that is no mask, or what no log-probability is.
    """
    shapes = [tuple(np.shape(x)) for x in (dense, sampled, mask)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2:
        raise refused(
            "dense, sampled and mask must be of one shape [N, T], a row for each completion; got "
            f"{', '.join(map(str, shapes))}. Take them of one call: jkv.score(model, out).logprobs, out.logprobs, out.mask.",
            mask="wrong_type",
        )
    if getattr(mask, "dtype", None) != np.bool_:
        raise refused(
            "mask must be an array of booleans, True for each token of a completion; got "
            f"{getattr(mask, 'dtype', type(mask))}. Convert it with mask.astype(bool).",
            mask="wrong_type",
        )
    if not any(isinstance(x, jax.core.Tracer) for x in (dense, sampled, mask)):
        check_values("dense", np.asarray(dense), np.asarray(mask), may_be_cut=True)
        check_values("sampled", np.asarray(sampled), np.asarray(mask), may_be_cut=False)


def check_values(name: str, value: np.ndarray, mask: np.ndarray, may_be_cut: bool) -> None:
    """Refuses what is no log-probability; `-inf` is one of a token that was cut, which cannot have been drawn."""
    shown = np.where(mask, value, 0.0)
    is_bad = np.isnan(shown) | (shown > 1e-3)
    if not may_be_cut:
        is_bad |= np.isneginf(shown)
    if is_bad.any():
        place = tuple(int(index) for index in np.argwhere(is_bad)[0])
        raise refused(
            f"{name} must hold log-probabilities, finite and at most 0, where mask is True; got {shown[place]} at "
            f"{list(place)}. Leave rows that ended with the reason nan out of the mask, and take logarithms of probabilities.",
            **{name: "out_of_range"},
        )
