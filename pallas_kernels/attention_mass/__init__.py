"""The attention mass of each slot from the last queries: the importance score of R-KV, SnapKV and their relatives."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_mass import gpu, reference, tpu
from pallas_kernels.dispatch import Implementation, call

IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.attention_mass, "tpu", tpu.why_not),
    "gpu": Implementation(gpu.attention_mass, "cuda", gpu.why_not),
    "reference": Implementation(reference.attention_mass),
}


def attention_mass(
    query: Float[Array, "R G W H"],
    key: Float[Array, "R S H"],
    is_candidate: Bool[Array, "R S"],
    is_query: Bool[Array, "R W"],
    age: Int[Array, "R S"] | None = None,
    log_weight: Float[Array, "R S"] | None = None,
    sink: Float[Array, "R G"] | None = None,
    *,
    over_group: str = "max",
    implementation: str | None = None,
) -> Float[Array, "R S"]:
    """The softmax mass of each candidate slot, averaged over the remembered queries: 0 to 1, float32.

    The softmax runs over the candidates alone. `over_group="max"` takes the largest logit of the group's query heads before
    one softmax (the released rule of R-KV); `"mean"` averages the softmaxes of the heads. Queries whose `is_query` is False
    (the sequence is shorter than the window) do not count. A row without queries or candidates gives zeros. `age` is the number
    of tokens after a slot's token: query w, with W - 1 - w tokens after it, sees only slots that are at least as old.
    `log_weight` is added to a slot's logits, as in `paged_attention`; `-inf` is a vacant slot, which is no candidate and may
    hold anything. `sink` is a logit of each query head that adds `exp(sink)` to the denominator of its softmax, as one more
    candidate would that gets no mass; with "max", the largest of the group counts, as of any candidate.

    Raises:
      ValueError: an unknown `over_group` or implementation.
    """
    if over_group not in ("max", "mean"):
        raise ValueError(f"over_group must be 'max' or 'mean'; got {over_group!r}.")
    args = query, key, is_candidate, is_query, age, log_weight, *(() if sink is None else (sink,))
    return call("attention_mass", IMPLEMENTATIONS, implementation, *args, over_group=over_group)
