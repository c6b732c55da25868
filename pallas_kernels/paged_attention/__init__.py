"""Decode attention of one query position over the pages of each row."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.paged_attention import cpu, gpu, native, reference, tpu

IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.paged_attention, "tpu", tpu.why_not),
    "gpu": Implementation(gpu.paged_attention, "cuda", gpu.why_not),
    "native": Implementation(native.paged_attention, "cpu", native.why_not),
    "cpu": Implementation(cpu.paged_attention, "cpu"),
    "reference": Implementation(reference.paged_attention),
}


def paged_attention(
    query: Float[Array, "R G H"],
    kv: Float[Array, "P 2 page H"],
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"],
    log_weight: Float[Array, "R S"] | None = None,
    *,
    with_logits: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"], Float[Array, "R G S"] | None]:
    """The attention output of each row's query group over its filled slots, and the log of the softmax's denominator.

    Slot s of a row is in page `page_table[r, s // page]` at offset `s % page`. The first `length[r]` slots are filled; later
    ones are not used and may hold anything. `log_weight` (S = MP * page) is added to a slot's logit: `ln m` for a slot with
    multiplicity m, `-inf` for a vacant slot, which may hold anything. A row without a slot to read gives zeros and `-inf`.
    Logits are scaled by H ** -0.5. `with_logits` also returns them, float32, with the log-weight, `-inf` where no slot is
    filled, for policies that evict by attention at each step.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    args = query, kv, page_table, length, log_weight
    return call("paged_attention", IMPLEMENTATIONS, implementation, *args, with_logits=with_logits)
