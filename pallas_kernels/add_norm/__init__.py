"""A residual and the norm after it: the hidden state plus a block's output, and its root-mean-square norm."""

from jaxtyping import Array, Float

from pallas_kernels.add_norm import gpu, reference
from pallas_kernels.dispatch import Implementation, call

IMPLEMENTATIONS = {
    "gpu": Implementation(gpu.add_norm, "cuda", gpu.why_not),
    "reference": Implementation(reference.add_norm),
}


def add_norm(
    hidden: Float[Array, "*B D"],
    added: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    *,
    epsilon: float = 1e-6,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """`hidden + added`, in their dtype, and its root-mean-square norm, computed in float32. Differentiable.

    A TPU and a CPU have no kernel of their own: there XLA fuses the reference well.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call("add_norm", IMPLEMENTATIONS, implementation, hidden, added, weight, epsilon=epsilon)
