"""Log-probabilities of logits."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.log_softmax import native, reference

IMPLEMENTATIONS = {
    "native": Implementation(native.log_softmax, "cpu", native.why_not),
    "reference": Implementation(reference.log_softmax),
}


def log_softmax(below: Float[Array, "*B V"], *, implementation: str | None = None) -> Float[Array, "*B V"]:
    """The log-probability of each token, of logits whose largest is 0; `-inf` where a logit is. Differentiable.

    On a CPU a row's bits do not depend on how many rows there are, up to 32. A TPU and a GPU leave softmaxes to XLA, and so
    does a process that has one.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call("log_softmax", IMPLEMENTATIONS, implementation, below)
