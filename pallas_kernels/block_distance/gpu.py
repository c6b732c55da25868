"""Pallas for NVIDIA GPUs: a program per layer of each pair sums the pages of its heads, a few slots at a time, in fixed order.

There are thousands of short programs, and many of them on each multiprocessor keep the memory busy, so tiles are small. The
partner of a channel in the rotation is loaded a second time, from the cache. Slots beyond the tokens are not read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.launch import launch, load
from pallas_kernels.quantised import Format, Numbers, Quantised, numbers_of

TILE = 1024  # elements of each page per addition
MOST_HEAD_SIZE = 1024


def why_not(kv: Any, first: Any, second: Any, num_tokens: Any, angle: Any) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if not isinstance(kv, Quantised) and kv.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the pool must be float32 or bfloat16; got {kv.dtype}"
    if kv.shape[3] > MOST_HEAD_SIZE:
        return f"the head size must be at most {MOST_HEAD_SIZE}; got {kv.shape[3]}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def block_distance(
    kv: Numbers,
    first: Int[Array, "I L K"],
    second: Int[Array, "I L K"],
    num_tokens: Int[Array, " I"],
    angle: Float[Array, "I half"] | None,
    interpret: Any = False,
) -> Float[Array, "I L 2 3"]:
    """See `pallas_kernels.block_distance`."""
    num_pairs, num_layers, _ = first.shape
    pool, format = ([kv.codes, kv.scale], kv.format) if isinstance(kv, Quantised) else ([kv], None)
    inputs = [first, second, num_tokens, *pool]
    if angle is not None:
        inputs += [jnp.cos(angle), jnp.sin(angle)]
    return launch(
        functools.partial(measure, format, angle is not None),
        *inputs,
        name="block_distance",
        grid=(num_pairs, num_layers),
        out_shape=jax.ShapeDtypeStruct((num_pairs, num_layers, 2, 3), jnp.float32),
        num_warps=4,
        interpret=interpret,
    )


def measure(
    format: Format | None, is_turned: bool, first_ref: Any, second_ref: Any, num_tokens_ref: Any, kv_ref: Any, *refs: Any
) -> None:
    """Sums the squares of one layer of one pair."""
    scale_ref, *refs = refs if format is not None else (None, *refs)  # type: ignore[assignment]
    cos_ref, sin_ref, out_ref = refs if is_turned else (None, None, *refs)
    num_heads, (page_size, head_size) = first_ref.shape[2], kv_ref.shape[2:]
    channels = pl.next_power_of_2(head_size)
    rows = min(pl.next_power_of_2(page_size), max(1, TILE // channels))
    pair, layer = pl.program_id(0), pl.program_id(1)
    num_tokens = num_tokens_ref[pair]
    channel_H = lax.broadcasted_iota(jnp.int32, (rows, channels), 1)
    slot_S = lax.broadcasted_iota(jnp.int32, (rows, channels), 0)
    partner_H = channel_H
    if is_turned:
        half = cos_ref.shape[1]
        is_low_H, is_turning_H = channel_H < half, channel_H < 2 * half
        frequency_H = jnp.where(is_low_H, channel_H, channel_H - half)
        cos_H = load(cos_ref.at[pair, frequency_H], mask=is_turning_H, other=1.0)
        sin_H = load(sin_ref.at[pair, frequency_H], mask=is_turning_H, other=0.0)
        sin_H = jnp.where(is_low_H, -sin_H, sin_H)
        partner_H = jnp.where(is_low_H, channel_H + half, jnp.where(is_turning_H, channel_H - half, channel_H))

    def read(page: Any, part: int, slot: Any, channel_H: Any, is_read: Any) -> Any:
        """Keys or values of some slots and channels in float32."""
        numbers = load(kv_ref.at[page, part, slot, channel_H], mask=is_read, other=0)
        if format is None:
            return numbers.astype(jnp.float32)
        scale = load(scale_ref.at[page, part, slot], mask=is_read, other=0.0)
        return numbers_of(numbers, format, jnp.float32) * scale

    def add(index: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        head, slot = lax.div(index, chunks), lax.rem(index, chunks) * rows + slot_S
        pages = first_ref[pair, layer, head], second_ref[pair, layer, head]
        is_read = (slot < num_tokens) & (channel_H < head_size)
        added = []
        for part in range(2):
            one, other = (read(page, part, slot, channel_H, is_read) for page in pages)
            if is_turned and part == 0:
                other = other * cos_H + read(pages[1], part, slot, partner_H, is_read) * sin_H
            added += [one * one, other * other, jnp.square(one - other)]
        return tuple(old + new for old, new in zip(sums, added, strict=True))

    chunks = pl.cdiv(page_size, rows)
    sums = lax.fori_loop(0, num_heads * chunks, add, (jnp.zeros((rows, channels), jnp.float32),) * 6)
    for i, total in enumerate(sums):
        out_ref[pair, layer, i // 3, i % 3] = jnp.sum(total)
