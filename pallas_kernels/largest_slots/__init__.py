"""The slots that a compaction keeps: the slots with the highest scores."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.largest_slots import gpu, reference

IMPLEMENTATIONS = {
    "gpu": Implementation(gpu.largest_slots, "cuda", gpu.why_not),
    "reference": Implementation(reference.largest_slots),
}
ROUNDING = 2**-16  # relative: above what other orders of float32 sums change in a score, below what a method would miss


def largest_slots(
    score: Float[Array, "R S"], count: Int[Array, " R"], *, tolerance: float = 0.0, implementation: str | None = None
) -> tuple[Bool[Array, "R S"], Int[Array, "R S"]]:
    """Which `count` slots of each row score highest, and the list of them in ascending order, padded with -1.

    Ties go to the lower slot. With a `tolerance`, such as `ROUNDING`, scores that differ from the lowest one kept by at most
    `tolerance` times its magnitude tie with it, so that rounding does not decide between equal slots; the kernel then runs
    twice. A slot of `-inf` or NaN is never among them; 0 and -0 are equal. A count may be 0 or less, or more than there are
    slots. All implementations give the same result. A TPU and a CPU have no kernel of their own.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    is_largest, slots = call("largest_slots", IMPLEMENTATIONS, implementation, score, count)
    if not tolerance:
        return is_largest, slots
    lowest = jnp.where(is_largest, score, jnp.inf).min(axis=-1, keepdims=True)
    return call("largest_slots", IMPLEMENTATIONS, implementation, levelled(score, lowest, tolerance), count)


def levelled(score: Float[Array, "*N S"], lowest: Float[Array, "*#N 1"], tolerance: float) -> Float[Array, "*N S"]:
    """The scores, with `lowest` for each that differs from it by at most `tolerance` times its magnitude, if that is finite."""
    is_level = jnp.isfinite(lowest) & (jnp.abs(score - lowest) <= tolerance * jnp.abs(lowest))
    return jnp.where(is_level, lowest, score)
