"""The slots that a compaction keeps: those of the highest scores."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.largest_slots import gpu, reference

IMPLEMENTATIONS = {
    "gpu": Implementation(gpu.largest_slots, "cuda", gpu.why_not),
    "reference": Implementation(reference.largest_slots),
}


def largest_slots(
    score: Float[Array, "R S"], count: Int[Array, " R"], *, implementation: str | None = None
) -> tuple[Bool[Array, "R S"], Int[Array, "R S"]]:
    """Which `count` slots of each row score highest, and the list of them in ascending order, padded with -1.

    Ties go to the lower slot. A slot of `-inf` or NaN is never among them; 0 and -0 are equal. A count may be 0 or less, or
    more than there are slots. All implementations give the same result. A TPU and a CPU have no kernel of their own.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call("largest_slots", IMPLEMENTATIONS, implementation, score, count)
