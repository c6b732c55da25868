"""Decode attention of one query position over sealed pages (`pallas_kernels.sealed`), for a merge with the rest of each row."""

from jaxtyping import Array, Float, Int

from pallas_kernels import hadamard
from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.sealed import Records
from pallas_kernels.sealed_attention import cpu, gpu, native, reference, tpu

IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.sealed_attention, "tpu", tpu.why_not),
    "gpu": Implementation(gpu.sealed_attention, "cuda", gpu.why_not),
    "native": Implementation(native.sealed_attention, "cpu", native.why_not),
    "cpu": Implementation(cpu.sealed_attention, "cpu"),
    "reference": Implementation(reference.sealed_attention),
}


def sealed_attention(
    query: Float[Array, "R G H"],
    records: Records,
    page_table: Int[Array, "R MP"],
    num_pages: Int[Array, " R"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"]]:
    """The attention output of each row's query group over its first `num_pages` pages, and the log of its denominator.

    All slots of these pages are filled; the other entries of a table are not used. A row without a page gives zeros and `-inf`.
    Logits are scaled by H ** -0.5. The query is rotated here and the output turned back, once per query head: implementations
    take a rotated query.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    args = hadamard.rotate(query), records, page_table, num_pages
    out, log_total = call("sealed_attention", IMPLEMENTATIONS, implementation, *args)
    return hadamard.rotate(out), log_total
