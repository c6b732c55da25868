"""Matrices in other forms than one array, and the weights of experts; `jkv.model.params` has the records that hold them."""

from typing import Annotated, Any

import jax.numpy as jnp

from jkv.pytrees import PyTree, static


class Codes(PyTree):
    """A matrix in 8 bits, `code * scale`: see `jkv.model.eight_bits`.

    It may replace any matrix that `LowRank` may, with a scale for each output. It may also replace the matrices of `Experts`,
    [X, F, D], with a scale for each of an expert's F values: an output of `gate` and `up`, an input of `down`.
    """

    code: Any  # [in, out] or [X, F, D], int8 or float8_e4m3fn
    scale: Any  # [out] or [X, F] float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return tuple(self.code.shape)

    @property
    def size(self) -> int:
        """Numbers of the matrix."""
        return int(self.code.size)

    @property
    def dequantised(self) -> Any:
        """The matrix in float32."""
        return self.code.astype(jnp.float32) * (self.scale if self.code.ndim == 2 else self.scale[..., None])


class LowRank(PyTree):
    """A matrix and its low-rank adapter (LoRA, arXiv 2106.09685). The sum `base + down @ up * scale` is never materialised.

    It may replace `Params.unembedding` and any matrix of `LayerParams`, except the matrices of `Experts`. Base and adapter are
    separate leaves, so an update of the adapter does not copy the base.
    """

    base: Any  # [in, out]
    down: Any  # [in, rank]
    up: Any  # [rank, out]
    scale: float = static(default=1.0)


class AdapterStack(PyTree):
    """The low-rank adapters of one matrix in A places. An adapter of a lower rank is padded with zeros, and so is none."""

    down: Any  # [A, in, rank]
    up: Any  # [A, rank, out]
    scale: Any  # [A] float32


class ByRow(PyTree):
    """A matrix and, for each row of what it multiplies, the adapter in one of the places of a stack.

    A matrix that others are joined in (`jkv.model.joined`) has the stack of each, in the order of their columns. It exists
    inside programs alone: an engine's weights and its adapters are separate, and replaced each by itself.
    """

    base: Any  # a matrix of any other form
    stacks: tuple[AdapterStack, ...]
    place: Any  # [B] int32


class Experts(PyTree):
    """The feed-forward blocks of a layer among which a router chooses some for each token (a mixture of experts)."""

    router: Annotated[Any, "D choices"]
    gate: Annotated[Any, "X F D"]  # so that one product of a token with all experts reads it as it lies
    up: Annotated[Any, "X F D"]
    down: Annotated[Any, "X F D"]
    router_bias: Annotated[Any, "choices"] = None
    gate_bias: Annotated[Any, "X F"] = None
    up_bias: Annotated[Any, "X F"] = None
    down_bias: Annotated[Any, "X D"] = None
    router_scale: Annotated[Any, "D"] = None  # multiplies the normalised hidden state that the router then reads
    expert_scale: Annotated[Any, "choices"] = None  # multiplies the weight of each expert
    choice_bias: Annotated[Any, "choices"] = None  # added to the scores that choose, not to the weights; float32 in every model
