"""The distance between pages, by which ReasonCache decides whether a page can replace another one."""

from jaxtyping import Array, Float, Int

from pallas_kernels.block_distance import gpu, reference, tpu
from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.quantised import Numbers

IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.block_distance, "tpu", tpu.why_not, reads_codes=True, reads_groups=True),
    "gpu": Implementation(gpu.block_distance, "cuda", gpu.why_not, reads_codes=True, reads_groups=True),
    "reference": Implementation(reference.block_distance),
}


def block_distance(
    kv: Numbers,
    first: Int[Array, "I L K"],
    second: Int[Array, "I L K"],
    num_tokens: Int[Array, " I"],
    angle: Float[Array, "I half"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "I L 2 3"]:
    """Squared norms of both pages of each pair and of their difference, by layer, for keys and for values, float32.

    The pool is `[P, 2, page, H]`: floats, or codes with scales. A page is one long vector over its first `num_tokens` slots
    and all KV heads; `first` and `second` hold the page of each head. The last axis holds `|a|^2`, `|b|^2` and `|a - b|^2`.
    `angle` (radians for each rotating pair of channels, in the half-split convention) turns the keys of the second page first,
    so that two pages are compared at the same position. The difference is summed directly: computed from norms and a product,
    it would lose half of its float32 digits for similar pages and read as much.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call("block_distance", IMPLEMENTATIONS, implementation, kv, first, second, num_tokens, angle)
