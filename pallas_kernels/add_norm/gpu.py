"""Pallas for NVIDIA GPUs: one program per token, which reads both arrays once.

XLA takes two kernels, because the sum is used again after the norm. The gradient is that of the reference.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.add_norm import reference
from pallas_kernels.launch import launch, load, store

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
MOST_WIDTH = 16_384  # channels, which a program holds in registers
WARP_ELEMENTS = 512


def why_not(hidden: Any, added: Any, weight: Any, epsilon: float = 0.0) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if hidden.dtype not in FLOATS or not hidden.dtype == added.dtype == weight.dtype:
        return (
            "hidden state, block output and weight must have one dtype, float32, bfloat16 or float16; "
            f"got {hidden.dtype}, {added.dtype} and {weight.dtype}"
        )
    if hidden.shape[-1] > MOST_WIDTH:
        return f"a hidden state must have at most {MOST_WIDTH} channels; got {hidden.shape[-1]}"
    return None


@functools.partial(jax.jit, static_argnames=("epsilon", "interpret"))
def add_norm(
    hidden: Float[Array, "*B D"],
    added: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    epsilon: float,
    interpret: Any = False,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """See `pallas_kernels.add_norm`."""
    return launched(hidden, added, weight, epsilon, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def launched(hidden: Array, added: Array, weight: Array, epsilon: float, interpret: Any) -> tuple[Array, Array]:
    """The kernel, with a gradient."""
    width = hidden.shape[-1]
    rows = [x.reshape(-1, width) for x in (hidden, added)]
    total, normed = launch(
        functools.partial(add_norm_row, epsilon),
        *(*rows, weight),
        name="add_norm",
        grid=(rows[0].shape[0],),
        out_shape=[jax.ShapeDtypeStruct(rows[0].shape, hidden.dtype)] * 2,
        num_warps=max(1, min(16, pl.next_power_of_2(width) // WARP_ELEMENTS)),
        interpret=interpret,
    )
    return total.reshape(hidden.shape), normed.reshape(hidden.shape)


def forward(hidden: Array, added: Array, weight: Array, epsilon: float, interpret: Any) -> tuple[Any, tuple[Array, ...]]:
    """The result, and what its gradient needs."""
    total, normed = launched(hidden, added, weight, epsilon, interpret)
    return (total, normed), (total, weight)


def backward(epsilon: float, interpret: Any, kept: tuple[Array, Array], grads: tuple[Array, Array]) -> tuple[Array, ...]:
    """Gradients of hidden state, block output and weight."""
    _, pull = jax.vjp(functools.partial(reference.rms_norm, epsilon=epsilon), *kept)
    grad, of_weight = pull(grads[1])
    return grads[0] + grad, grads[0] + grad, of_weight


launched.defvjp(forward, backward)


def add_norm_row(epsilon: float, hidden_ref: Any, added_ref: Any, weight_ref: Any, total_ref: Any, normed_ref: Any) -> None:
    """Handles one token."""
    row, width, dtype = pl.program_id(0), hidden_ref.shape[1], total_ref.dtype
    channel = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    is_channel = channel < width
    hidden, added = (load(ref.at[row, channel], mask=is_channel, other=0.0) for ref in (hidden_ref, added_ref))
    total = hidden + added
    store(total_ref.at[row, channel], total, mask=is_channel)
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / width + epsilon)
    weight = load(weight_ref.at[channel], mask=is_channel, other=0.0)
    store(normed_ref.at[row, channel], weight * (wide * scale).astype(dtype), mask=is_channel)
