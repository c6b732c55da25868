"""Attention over columns that are visible to spans of queries: replay of a compressed cache, dense scoring, chunked prefill."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.replay_attention import cpu, gpu, reference, tpu

IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.replay_attention, "tpu", tpu.why_not),
    "gpu": Implementation(gpu.replay_attention, "cuda", gpu.why_not),
    "cpu": Implementation(cpu.replay_attention, "cpu", cpu.why_not),
    "reference": Implementation(reference.replay_attention),
}


def replay_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    position: Int[Array, "B T"],
    begin: Int[Array, "B K C"],
    end: Int[Array, "B K C"],
    source: Int[Array, "B K C"] | None = None,
    sink: Float[Array, " N"] | None = None,
    *,
    sorts: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """The attention output of every query over the columns it may read; differentiable, with O(T + C) extra memory.

    Column c holds the key and value at index `source[b, k, c]` (None: c itself), and the query at `position` q reads it when
    `begin <= q < end`. A column with an empty span (`begin >= end`) may hold anything. A query that reads nothing gives zeros.
    `sink` is a logit of each query head that adds `exp(sink)` to the softmax's denominator (gpt-oss, arXiv 2508.10925), as a
    column with the value 0 would; gradients reach it too. With `sorts`, a kernel may put columns in the order of their spans
    first, to skip more of what nobody reads, for columns that end early; it changes rounding alone.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    args = query, key, value, position, begin, end, source, *(() if sink is None else (sink,))
    return call("replay_attention", IMPLEMENTATIONS, implementation, *args, **({"sorts": True} if sorts else {}))
