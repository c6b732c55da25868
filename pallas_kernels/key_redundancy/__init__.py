"""The similarity of each key to the other keys of its row: the redundancy score of R-KV."""

from jaxtyping import Array, Bool, Float

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.key_redundancy import cpu, gpu, native, reference, tpu

IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.key_redundancy, "tpu", tpu.why_not),
    "gpu": Implementation(gpu.key_redundancy, "cuda", gpu.why_not),
    "native": Implementation(native.key_redundancy, "cpu", native.why_not),
    "cpu": Implementation(cpu.key_redundancy, "cpu"),
    "reference": Implementation(reference.key_redundancy),
}


def key_redundancy(
    key: Float[Array, "R S H"],
    is_filled: Bool[Array, "R S"],
    *,
    threshold: float = 0.5,
    exempt: int = 1,
    exempt_first: bool = False,
    implementation: str | None = None,
) -> Float[Array, "R S"]:
    """The mean cosine similarity of every filled key to a slot's key, -1 to 1, float32; 0 where a slot is empty.

    C[i, j] is the cosine of keys i and j, 0 on the diagonal. In each row i, the last `exempt` entries above `threshold` are set
    to 0, so that the newest key of a similar group is not redundant (R-KV, arXiv 2505.24133, 3.3; slots are in the order of
    their tokens). The result is the mean of column s over the filled rows. `exempt_first=True` also sets slot 0 to 0 in rows
    without an entry above the threshold, as the authors' code does by accident (with `exempt` at least 1).
    Cost: S * S * H multiplications and additions `exempt` times; memory linear in S.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    settings = {"threshold": threshold, "exempt": exempt, "exempt_first": exempt_first}
    return call("key_redundancy", IMPLEMENTATIONS, implementation, key, is_filled, **settings)
